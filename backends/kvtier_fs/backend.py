"""The filesystem tier: blocks in the slots of a few large files, on one or more local disks."""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import numpy as np

from kvtier.errors import RootError, UsageError
from kvtier.geometry import Geometry
from kvtier.inspection import Access, Inspection
from kvtier.jobs import (
    CANCELLED,
    MISSING,
    BlockOutcome,
    DropReason,
    GPURuns,
    IntArray,
    JobKind,
    JobResult,
    TransferJob,
    dropped,
    failed,
)
from kvtier.keys import FS, Medium, OffloadKey
from kvtier.loadstore import LoadStore, LookupResult, Opened, Rows, SlotSpace, TierContext
from kvtier.options import TierOptions
from kvtier.outlast import outlast
from kvtier.registry import Preview
from kvtier_fs import opening
from kvtier_fs.directory import recovered
from kvtier_fs.files.backend import FilesBackend
from kvtier_fs.inspect import inspect_root
from kvtier_fs.io.probe import probe_path
from kvtier_fs.opening import Layout, Seams, Session, side_by_side
from kvtier_fs.options import FSOptions
from kvtier_fs.preview import preview
from kvtier_fs.root import RegionState, Root
from kvtier_fs.scan import Wanted, recover_root
from kvtier_fs.slot import SlotHeader, max_key_bytes
from kvtier_fs.strict import StrictIO
from kvtier_fs.threads import RootThreads
from kvtier_fs.transfer import BlockMove, BlockPlace, JobRun, Lane, LaneParts, error_outcome

_log = logging.getLogger("kvtier.fs")


class FSBackend(LoadStore):
    """A tier of slots on local disks, `slab` layout. Owned: the control plane says which slot, this does the I/O.

    `counters` counts what happened by place and reason: `mismatch.<field>` for loads refused by verification,
    `errno.<name>` for failed I/O, `io.short` for continued transfers, `open.snapshot` and `open.scan` for how the roots
    were recovered, `close.stuck` for I/O that outlived close.
    """

    medium: ClassVar[Medium] = FS
    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = mmap.PAGESIZE
    Options: ClassVar[type[TierOptions]] = FSOptions

    def __new__(cls, options: TierOptions, seams: Seams | None = None) -> FSBackend | FilesBackend:  # type: ignore[misc]
        """Layout `files` is a tier of another kind, with a class of its own."""
        if isinstance(options, FSOptions) and options.layout == "files":
            return FilesBackend(options)
        return super().__new__(cls)

    def __init__(self, options: TierOptions, seams: Seams | None = None) -> None:
        if not isinstance(options, FSOptions):
            raise UsageError(f"the fs tier is configured with FSOptions, not with {type(options).__name__}")
        self.options: FSOptions = options
        self._seams = seams or Seams()
        self.counters: Counter[str] = Counter()
        self._roots: list[Root] = []
        self._first_regions: list[int] = []
        self._space: SlotSpace | None = None
        self._context: TierContext
        self._rows: Rows
        self._layout: Layout
        self._memory = memoryview(b"")
        self._namespace = b""
        self._slots_per_region = 0
        self._max_key_bytes = 0
        self._closing = False
        self._releasing = asyncio.Lock()

    async def probe_alignment(self) -> int:
        """The largest alignment over the roots: pages, buffers and offsets of direct I/O. Leaves nothing behind.

        A root that is not there yet is judged by the folder it will be created in; one that cannot be looked at
        counts as page-aligned, and `open` says what is wrong with it.
        """
        if self.options.direct == "off":
            return mmap.PAGESIZE
        threads = RootThreads("kvtier-fs-probe", 2)
        try:
            loop = asyncio.get_running_loop()
            probes = [loop.run_in_executor(threads, probe_path, root) for root in self.options.roots]
            return max(await asyncio.gather(*probes))
        finally:
            await threads.close(self.options.close_timeout_seconds)

    def preview(self, geometry: Geometry, look: bool) -> Preview:
        """What the tier would be if it were opened now. Looks at the roots only if asked to; leaves nothing behind."""
        return preview(self.options, geometry, look)

    @classmethod
    def inspect(cls, root: str, access: Access) -> Inspection | None:
        """The store in a folder, for the tools; None if the folder holds none of ours. Raises RootError."""
        return inspect_root(root, access)

    async def open(self, context: TierContext) -> Opened:
        """Take the roots, begin a session in each, rebuild the directory from the headers on disk.

        Raises RootError, GeometryError or ResourceError and lets go of everything it took.
        """
        if self._space is not None or self._closing:
            raise UsageError("this tier was opened before; make a new one")
        if context.rows is None:
            raise UsageError("the fs tier moves rows of the shared region and was given none")
        if not context.rows.view.flags.c_contiguous:
            raise UsageError("the rows of the shared region must follow each other without gaps")
        try:
            return await self._open(context, context.rows)
        except BaseException:
            await self._release()
            raise

    async def _open(self, context: TierContext, rows: Rows) -> Opened:
        notes = await self._enter()
        layout = opening.lay_out(self._roots, self.options, context.geometry)
        notes.extend(layout.notes)
        self._context, self._rows, self._layout = context, rows, layout
        self._memory = rows.view.reshape(-1).data
        self._namespace = context.namespace.digest()
        epochs = [root.stored.epoch(self._namespace) for root in self._roots if root.stored is not None]
        session = Session(layout, self._namespace, context.namespace.manifest(), max(epochs, default=0))
        for root_notes in await side_by_side(self._begin(root, session) for root in self._roots):
            notes.extend(root_notes)
        engine = await self._start_engines(notes)
        space = self._number_regions()
        wanted = Wanted(self._namespace, session.epoch, layout.slot_bytes, layout.payload_bytes)
        await side_by_side(self._recover(root, wanted) for root in self._roots)
        self._space = space
        direct = all(root.probe.direct for root in self._roots)
        return Opened(
            capacity_bytes=layout.share * len(self._roots),
            space=space,
            recovered=recovered(self._roots, space),
            epoch=session.epoch,
            mode=opening.mode(engine, direct),
            notes=tuple(notes),
        )

    async def _enter(self) -> list[str]:
        """Take every root that is there. Returns a note for each that is not; raises RootError if none is."""
        paths = self.options.roots

        async def enter(path: str) -> None:
            root = await opening.enter_root(path, self.options, self._seams)
            if root is not None:
                self._roots.append(root)

        await side_by_side(map(enter, paths))
        self._roots.sort(key=lambda root: paths.index(root.path))
        present = {root.path for root in self._roots}
        missing = [path for path in paths if path not in present]
        if not present:
            raise RootError(missing[0], opening.MISSING)
        return [f"{path}: is not there; running without it" for path in missing]

    async def _begin(self, root: Root, session: Session) -> list[str]:
        try:
            notes = [
                await opening.begin_session(root, session, self._seams.random_bytes),
                await opening.describe(root, session),
                await opening.unknown_files(root),
            ]
        except OSError as error:
            raise root.folder.refusal(error) from error
        return [note for note in notes if note]

    async def _start_engines(self, notes: list[str]) -> str:
        """Give every root its I/O engine and its lane. Returns the engine's name."""
        name, note = "", ""
        if self._seams.engine is None:
            name, note = await opening.choose_engine(self._roots[0].files, self.options)
        notes.extend([note] if note else [])
        for root in self._roots:
            seam = self._seams.engine
            engine = opening.make_engine(name, root, self.options) if seam is None else seam(root)
            io = StrictIO(engine, root.probe.offset_alignment if root.probe.direct else 1, self.counters)
            parts = LaneParts(
                loop=asyncio.get_running_loop(),
                io=io,
                threads=root.files,
                clock=self._context.clock,
                set_checksum=self._rows.set_checksum,
                counters=self.counters,
                ledger=root.ledger,
                header_bytes=self._layout.header_bytes,
                depth=self.options.io_depth,
            )
            root.start(io, Lane(parts))
        return " and ".join(sorted({root.engine.name for root in self._roots}))

    async def _recover(self, root: Root, wanted: Wanted) -> None:
        try:
            from_snapshot = await recover_root(root, wanted)
        except OSError as error:
            raise root.folder.refusal(error) from error
        self.counters["open.snapshot" if from_snapshot else "open.scan"] += 1

    def _number_regions(self) -> SlotSpace:
        """Number the regions over the roots in the order of the options; a root that is not there has none."""
        present = {root.path: root for root in self._roots}
        counts, first = [], 0
        for path in self.options.roots:
            root = present.get(path)
            counts.append(root.plan.regions if root else 0)
            if root:
                root.first_region = first
                first += root.plan.regions
        self._first_regions = [root.first_region for root in self._roots]
        space = SlotSpace(self._layout.plan.region_bytes, tuple(counts), self._layout.slot_bytes)
        self._slots_per_region = space.slots_per_region
        self._max_key_bytes = max_key_bytes(self._layout.header_bytes)
        return space

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """An owned tier keeps no directory of its own: asked all the same, it knows of nothing."""
        return [LookupResult.MISS] * len(keys)

    async def store(self, job: TransferJob) -> JobResult:
        """Cut the job's regions, then write each block's header and payload into its slot.

        A block is STORED, dropped (key_too_long, disk_full, closing), LATE (its deadline passed before its I/O began)
        or failed with an errno. The call returns once no I/O touches the job's rows, also when it is cancelled.
        """
        started = self._check_job(job)
        if not self._closing:
            for cut in job.cuts:
                root, region = self._locate(cut.region)
                root.cut(region, cut.slot_bytes, cut.generation)
            await self._cuts_ended(job)
        return await self._run(job, JobKind.STORE, started)

    async def load(self, job: TransferJob) -> JobResult:
        """Read each slot into its row; LOADED once everything it says and its payload's checksum were verified.

        Anything that differs makes a block CORRUPT, and its row's bytes must not be used. The call returns once no
        I/O touches the job's rows, also when it is cancelled.
        """
        return await self._run(job, JobKind.LOAD, self._check_job(job))

    def _check_job(self, job: TransferJob) -> float:
        """Raise UsageError for a job that makes no sense. Returns the time."""
        if self._space is None:
            raise UsageError("this tier is not open")
        for group in job.groups:
            lengths = {len(group.keys), len(group.slots), len(group.generations)}
            if isinstance(group.staging, GPURuns) or lengths != {len(group.staging)}:
                raise UsageError("a job on this tier names a row, a slot and a generation for each key")
            if not 0 <= group.group < len(self._layout.payload_bytes):
                raise UsageError(f"there is no group {group.group}")
            if not (_within(group.staging, self._rows.num_rows) and _within(group.slots, self._space.num_slot_ids)):
                raise UsageError("a job names a row or a slot that does not exist")
        return self._context.clock()

    def _locate(self, region: int) -> tuple[Root, int]:
        """The root a region lies in, and the region's number within it."""
        root = self._roots[bisect_right(self._first_regions, region) - 1]
        return root, region - root.first_region

    async def _cuts_ended(self, job: TransferJob) -> None:
        """Wait until the headers of all regions the job writes into were written, or could not be."""
        slots = [group.slots // self._slots_per_region for group in job.groups]
        regions = np.unique(np.concatenate(slots)).tolist() if slots else []
        pending = [root.cut_pending(local) for root, local in map(self._locate, regions)]
        cuts = [cut for cut in pending if cut is not None]
        if cuts:
            await asyncio.wait(cuts)

    async def _run(self, job: TransferJob, kind: JobKind, started: float) -> JobResult:
        """Move a job's blocks, in the order of their places, on all roots side by side."""
        if self._closing:
            return JobResult.uniform(job, dropped(DropReason.CLOSING))
        run = JobRun(job, kind, asyncio.get_running_loop())
        for number, group in enumerate(job.groups):
            order = np.argsort(group.slots, kind="stable")
            owners = np.searchsorted(self._first_regions, group.slots[order] // self._slots_per_region, "right") - 1
            for owner in np.unique(owners).tolist():
                root = self._roots[owner]
                root.lane.enqueue(run, self._moves(root, run, number, order[owners == owner]))
        try:
            await asyncio.shield(run.finished)
        except asyncio.CancelledError:
            for root in self._roots:
                root.lane.withdraw(CANCELLED, run)
            with suppress(asyncio.CancelledError):
                await outlast(run.finished)
            raise
        return run.result(self._context.clock() - started)

    def _moves(self, root: Root, run: JobRun, number: int, positions: IntArray) -> Iterator[BlockMove]:
        """The blocks of one group of a job on one root, by place, made when their turn comes; ends what cannot move."""
        group = run.job.groups[number]
        assert not isinstance(group.staging, GPURuns)
        storing, row_bytes, memory = run.kind is JobKind.STORE, self._rows.row_bytes, self._memory
        payload_bytes, slot_bytes = self._layout.payload_bytes[group.group], self._layout.slot_bytes[group.group]
        places = group.slots[positions].tolist(), group.staging[positions].tolist()
        generations = group.generations[positions].tolist()
        region, refused, state = -1, None, RegionState()
        ahead = storing and not root.takes_epoch(self._namespace, run.job.epoch)
        for position, slot, row, generation in zip(positions.tolist(), *places, generations, strict=True):
            key = group.keys[position]
            numbered, index = divmod(slot, self._slots_per_region)
            if numbered - root.first_region != region:
                region = numbered - root.first_region
                state = root.regions[region]
                refused = self._refuse_region(root, region, run.kind, slot_bytes)
                refused = dropped(DropReason.RESET) if ahead else refused
            outcome = refused or self._refuse_block(root, index, slot_bytes, key)
            if outcome is not None:
                run.end(number, position, outcome)
                continue
            header = SlotHeader(
                self._namespace,
                run.job.epoch,
                root.superblock.root_uuid,
                region,
                index,
                state.generation,
                slot_bytes,
                payload_bytes,
                generation,
                group.group,
                key,
                self._rows.checksum(row) if storing else b"",
            )
            at = root.fds[root.plan.file_of(region)], root.plan.slot_offset(region, index, slot_bytes)
            payload = memory[row * row_bytes : row * row_bytes + payload_bytes]
            yield BlockMove(BlockPlace(run, number, position), row, payload, header, at)

    def _refuse_region(self, root: Root, region: int, kind: JobKind, slot_bytes: int) -> BlockOutcome | None:
        """Why blocks of a size cannot move to or from a region, if so."""
        state = root.regions[region]
        if state.slot_bytes != slot_bytes:
            self.counters["refused.slot_size"] += 1
            return MISSING if kind is JobKind.LOAD else failed(errno.EINVAL)
        if kind is JobKind.LOAD:
            return None if root.plan.file_of(region) in root.fds else MISSING
        return None if state.ready else error_outcome(state.errno or errno.EIO)

    def _refuse_block(self, root: Root, index: int, slot_bytes: int, key: OffloadKey) -> BlockOutcome | None:
        """Why a block cannot move, if so: its slot does not exist, or its key fits no header."""
        if (index + 1) * slot_bytes > root.plan.region_bytes:
            self.counters["refused.no_slot"] += 1
            return failed(errno.EINVAL)
        return dropped(DropReason.KEY_TOO_LONG) if len(key) > self._max_key_bytes else None

    async def reset(self, epoch: int) -> None:
        """Raise the namespace's epoch in every root, durably before this returns. Raises RootError if one fails."""
        if self._space is None or self._closing:
            raise UsageError("this tier is not open")
        await side_by_side(root.raise_epoch(self._namespace, epoch) for root in self._roots)

    async def close(self) -> None:
        """End I/O within `close_timeout_seconds`, mark the roots clean, let go of everything. Idempotent.

        Blocks whose I/O had not begun are dropped. Blocks whose I/O is stuck are reported late and counted in
        `close.stuck`; their root keeps its lock, files and memory. Calling again lets go of what has ended meanwhile.
        """
        self._closing = True
        async with self._releasing:
            await self._release()

    async def _release(self) -> None:
        self._closing = True
        stuck = await side_by_side(self._release_root(root) for root in self._roots)
        self.counters["close.stuck"] = sum(stuck)
        self._roots = [root for root, left in zip(self._roots, stuck, strict=True) if left]
        self._memory = memoryview(b"")

    async def _release_root(self, root: Root) -> int:
        """Returns how many requests or threads are stuck; then the root is not released."""
        timeout = self.options.close_timeout_seconds
        stuck = await root.drained(timeout)
        if stuck:
            _log.warning("%s: I/O is stuck; the folder stays locked until it ends", root.path)
            return stuck
        if self._space is not None:
            await self._end_session(root)
        return await root.release(timeout)

    async def _end_session(self, root: Root) -> None:
        """Write the snapshot, then say that the session ended in order: it counts only if this does."""
        try:
            await root.write_snapshot(self._layout.snapshot_bytes)
        except (OSError, RootError):
            self.counters["close.no_snapshot"] += 1
        try:
            await root.write_superblock(replace(root.superblock, clean=True))
        except RootError:
            self.counters["close.unclean"] += 1


def _within(values: IntArray, limit: int) -> bool:
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < limit)
