"""The filesystem tier: blocks in the slots of a few large files, on one or more local disks."""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

from kvtier.errors import RootError, UsageError
from kvtier.geometry import Geometry
from kvtier.inspection import Access, Inspection
from kvtier.jobs import CANCELLED, DropReason, JobKind, JobResult, TransferJob, dropped
from kvtier.keys import FS, Medium, OffloadKey
from kvtier.loadstore import LoadStore, LookupResult, Opened, Rows, SlotSpace, TierContext
from kvtier.options import TierOptions
from kvtier.outlast import outlast
from kvtier.registry import Preview
from kvtier_fs import opening
from kvtier_fs.batches import JobRun
from kvtier_fs.closing import RootEnd
from kvtier_fs.directory import recovered
from kvtier_fs.files.backend import FilesBackend
from kvtier_fs.inspect import inspect_root
from kvtier_fs.io.probe import probe_path
from kvtier_fs.io.turns import Turns
from kvtier_fs.opening import Layout, Seams, Session, side_by_side
from kvtier_fs.options import FSOptions
from kvtier_fs.preview import preview
from kvtier_fs.root import Root
from kvtier_fs.router import SlotRouter
from kvtier_fs.scan import Wanted, recover_root
from kvtier_fs.shares import TierSide
from kvtier_fs.strict import StrictIO
from kvtier_fs.threads import RootThreads
from kvtier_fs.transfer import Lane, LaneParts


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
        self._router: SlotRouter | None = None
        self._context: TierContext
        self._layout: Layout
        self._namespace = b""
        self._opened = False
        self._closing = False
        self._ends: list[RootEnd] = []
        self._releasing = asyncio.Lock()
        self._raising: set[asyncio.Task[None]] = set()

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
        if self._opened or self._closing:
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
        self._context, self._layout = context, layout
        self._namespace = context.namespace.digest()
        epochs = [root.stored.epoch(self._namespace) for root in self._roots if root.stored is not None]
        session = Session(layout, self._namespace, context.namespace.manifest(), max(epochs, default=0))
        for root_notes in await side_by_side(self._begin(root, session) for root in self._roots):
            notes.extend(root_notes)
        engine = await self._start_engines(notes, rows)
        space = self._number_regions()
        wanted = Wanted(self._namespace, session.epoch, layout.slot_bytes, layout.payload_bytes)
        await side_by_side(self._recover(root, wanted) for root in self._roots)
        side = TierSide(rows, space, layout, self._namespace, self.counters)
        self._router, self._opened = SlotRouter(list(self._roots), side), True
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

    async def _start_engines(self, notes: list[str], rows: Rows) -> str:
        """Give every root its I/O engine and its lane. Returns the engine's name."""
        name, note = "", ""
        if self._seams.engine is None:
            name, note = await opening.choose_engine(self._roots[0].crew.files, self.options)
        notes.extend([note] if note else [])
        for root in self._roots:
            seam, turns = self._seams.engine, Turns()
            engine = opening.make_engine(name, root, self.options, turns) if seam is None else seam(root)
            io = StrictIO(engine, root.probe.offset_alignment if root.probe.direct else 1, self.counters)
            parts = LaneParts(
                loop=asyncio.get_running_loop(),
                io=io,
                threads=root.crew.checks,
                clock=self._context.clock,
                turns=turns,
                set_checksum=rows.set_checksum,
                counters=self.counters,
                ledger=root.ledger,
                header_bytes=self._layout.header_bytes,
                slot_bytes=min(self._layout.slot_bytes),
                depth=self.options.io_depth,
                checked_here_bytes=self._seams.checked_here_bytes,
            )
            root.start(io, Lane(parts))
        return " and ".join(sorted({root.io.engine.name for root in self._roots}))

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
        return SlotSpace(self._layout.plan.region_bytes, tuple(counts), self._layout.slot_bytes)

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """An owned tier keeps no directory of its own: asked all the same, it knows of nothing."""
        return [LookupResult.MISS] * len(keys)

    async def store(self, job: TransferJob) -> JobResult:
        """Cut the job's regions, then write each block's header and payload into its slot.

        A block is STORED, dropped (key_too_long, disk_full, closing), LATE (its deadline passed before its I/O began)
        or failed with an errno. The call returns once no I/O touches the job's rows, also when it is cancelled.
        """
        return await self._run(job, JobKind.STORE)

    async def load(self, job: TransferJob) -> JobResult:
        """Read each slot into its row; LOADED once everything it says and its payload's checksum were verified.

        Anything that differs makes a block CORRUPT, and its row's bytes must not be used. The call returns once no
        I/O touches the job's rows, also when it is cancelled.
        """
        return await self._run(job, JobKind.LOAD)

    async def _run(self, job: TransferJob, kind: JobKind) -> JobResult:
        """Move a job's blocks on all roots side by side."""
        router = self._router
        if router is None and not self._closing:
            raise UsageError("this tier is not open")
        if router is not None:
            router.check(job)
            started = self._context.clock()
            if kind is JobKind.STORE and not self._closing:
                cuts = router.cut(job)
                if cuts:
                    await asyncio.wait(cuts)
        if router is None or self._closing:
            return JobResult.uniform(job, dropped(DropReason.CLOSING))
        run = JobRun(job, kind, asyncio.get_running_loop())
        router.send(run)
        try:
            await run.finished
        except asyncio.CancelledError:
            left = run.going_on()
            router.withdraw(run, CANCELLED)
            with suppress(asyncio.CancelledError):
                await outlast(left)
            raise
        return run.result(self._context.clock() - started)

    async def reset(self, epoch: int) -> None:
        """Raise the namespace's epoch in every root, durably before this returns.

        Raises RootError if one fails, or does not answer within `job_timeout_seconds`; it may take hold there yet.
        """
        if self._router is None or self._closing:
            raise UsageError("this tier is not open")
        raising = {
            asyncio.create_task(root.raise_epoch(self._namespace, epoch), name=f"reset {root.path}"): root.path
            for root in self._roots
        }
        self._raising.update(raising)
        for task in raising:
            task.add_done_callback(self._raised)
        await asyncio.wait(raising, timeout=self.options.job_timeout_seconds)
        for task, path in raising.items():
            if not task.done():
                raise RootError(path, "the disk does not answer; the reset is not durable before it does")
            task.result()

    def _raised(self, task: asyncio.Task[None]) -> None:
        self._raising.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.counters["reset.failed"] += 1

    async def close(self) -> None:
        """End I/O within `close_timeout_seconds`, mark the roots clean, let go of everything. Idempotent.

        Blocks whose I/O had not begun are dropped. Blocks whose I/O is stuck are reported late and counted in
        `close.stuck`; their root keeps its lock, files and memory, and lets go of them when that I/O has ended.
        """
        self._closing = True
        async with self._releasing:
            await self._release()

    async def _release(self) -> None:
        self._closing = True
        for root in self._roots:
            self._ends.append(RootEnd(root, self.counters, self._layout.snapshot_bytes if self._router else None))
        self._roots.clear()
        self._router = None
        timeout = self.options.close_timeout_seconds
        results = await asyncio.gather(*(end.within(timeout) for end in self._ends), return_exceptions=True)
        left, errors = [], []
        self.counters["close.stuck"] = 0
        for end, stuck in zip(self._ends, results, strict=True):
            if isinstance(stuck, BaseException):
                errors.append(stuck)
            elif stuck:
                self.counters["close.stuck"] += stuck
                left.append(end)
        self._ends = left
        for error in errors:
            raise error
