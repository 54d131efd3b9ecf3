"""The filesystem tier with one file a block: a shared tier, for network file systems and several hosts."""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import ClassVar

from kvtier.errors import UsageError
from kvtier.geometry import Geometry
from kvtier.jobs import CANCELLED, LATE, DropReason, GPURuns, JobKind, JobResult, TransferJob, dropped
from kvtier.keys import FS, Medium, OffloadKey, key_group
from kvtier.loadstore import LoadStore, LookupResult, Opened, Ownership, Rows, TierContext
from kvtier.options import TierOptions
from kvtier.outlast import outlast
from kvtier.registry import Preview
from kvtier_fs.batches import JobRun
from kvtier_fs.files import opening, pruning
from kvtier_fs.files.blockfile import Wanted
from kvtier_fs.files.blocks import Block, BlockSteps
from kvtier_fs.files.epochs import Epoch
from kvtier_fs.files.places import place_of
from kvtier_fs.files.preview import preview
from kvtier_fs.files.root import FilesSeams, SharedRoot
from kvtier_fs.io.probe import probe_path
from kvtier_fs.options import FSOptions
from kvtier_fs.slot import SlotHeader, max_key_bytes
from kvtier_fs.threads import RootThreads

_log = logging.getLogger("kvtier.fs")
_NANOSECONDS = 1_000_000_000


class FilesBackend(LoadStore):
    """A tier of one file a block in a folder that other processes and hosts use too, `files` layout. Shared: placement
    and eviction are here, nobody owns the root, and a block may vanish at any moment.

    `counters` counts what happened by place and reason: `mismatch.<field>` for loads refused by verification (`file`:
    not even a plain file of the right length), `errno.<name>` for failed I/O, `lock.timeout` for buckets whose lock
    was not to be had, `evicted`, `temporary.swept`, `reset.failed` (the disk did not take an epoch), `close.stuck`.
    """

    medium: ClassVar[Medium] = FS
    ownership: ClassVar[Ownership] = Ownership.SHARED
    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = mmap.PAGESIZE
    Options: ClassVar[type[TierOptions]] = FSOptions

    def __init__(self, options: TierOptions, seams: FilesSeams | None = None) -> None:
        if not isinstance(options, FSOptions):
            raise UsageError(f"the fs tier is configured with FSOptions, not with {type(options).__name__}")
        self.options: FSOptions = options
        self.counters: Counter[str] = Counter()
        self._seams = seams or FilesSeams()
        self._root: SharedRoot | None = None
        self._opened = False
        self._closing = False
        self._releasing = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._moving: dict[asyncio.Task[None], Block] = {}
        self._steps: BlockSteps
        self._context: TierContext
        self._rows: Rows
        self._memory = memoryview(b"")
        self._namespace = b""
        self._epoch: Epoch
        self._asking: set[asyncio.Task[int | None]] = set()
        self._generation = 0
        self._presence: pruning.Presence

    async def probe_alignment(self) -> int:
        """The alignment of the root's disk for direct I/O; a page where there is none. Leaves nothing behind."""
        if self.options.direct == "off":
            return mmap.PAGESIZE
        threads = RootThreads("kvtier-fs-probe", 1)
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, probe_path, self.options.roots[0])
        finally:
            await threads.close(self.options.close_timeout_seconds)

    def preview(self, geometry: Geometry, look: bool) -> Preview:
        """What the tier would be if it were opened now. Looks at the root only if asked to; leaves nothing behind."""
        return preview(self.options, geometry, look)

    async def open(self, context: TierContext) -> Opened:
        """Join the root, made if it is new. Raises RootError, GeometryError or ResourceError; lets go of everything."""
        if self._opened or self._closing:
            raise UsageError("this tier was opened before; make a new one")
        if context.rows is None:
            raise UsageError("the fs tier moves rows of the shared region and was given none")
        if not context.rows.view.flags.c_contiguous:
            raise UsageError("the rows of the shared region must follow each other without gaps")
        self._opened = True
        self._root = root = opening.make_root(self.options, self._seams, self.counters)
        try:
            return await self._open(root, context, context.rows)
        except OSError as error:
            await self._release()
            raise root.folder.refusal(error) from error
        except BaseException:
            await self._release()
            raise

    async def _open(self, root: SharedRoot, context: TierContext, rows: Rows) -> Opened:
        stored = await opening.enter_root(root, self.options)
        share = await opening.settle(root, stored, self.options, context.geometry)
        namespace = context.namespace.digest()
        self._epoch = Epoch(root, namespace, self.counters)
        epoch = await self._epoch.begin()
        note = await opening.describe(root, namespace, context.namespace.manifest(), share)
        engine, engine_note = await opening.start_engine(root, self.options)
        self._context, self._rows, self._memory = context, rows, rows.view.reshape(-1).data
        self._namespace = namespace
        self._presence = pruning.Presence(root.folder, namespace)
        self._steps = BlockSteps(root, rows.set_checksum)
        root.start(engine)
        self._in_background(root.keep_lease())
        return Opened(
            capacity_bytes=self.options.capacity,
            epoch=epoch,
            mode=f"files, {engine.name}, {'direct' if root.probe.direct else 'buffered'}",
            notes=tuple(text for text in (note, engine_note) if text),
        )

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _open_root(self) -> SharedRoot:
        if self._root is None or not self._root.started:
            raise UsageError("this tier is not open")
        return self._root

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """HIT for a key whose file is there with a header that is right, as far as a look tells; MISS for any other.

        Payloads are not read; a load does that.
        """
        root = self._open_root()
        if self._closing:
            return [LookupResult.MISS] * len(keys)
        epoch = self._epoch.now
        wanted = [self._wanted(key, epoch) if self._known(key) else None for key in keys]
        found = await root.call(self._presence.look, wanted, epoch)
        return [LookupResult.HIT if there else LookupResult.MISS for there in found]

    def _known(self, key: OffloadKey) -> bool:
        return key_group(key) < self._context.geometry.num_groups and len(key) <= self._key_bytes_max()

    def _key_bytes_max(self) -> int:
        return max_key_bytes(self._open_root().tree.header_bytes)

    def _wanted(self, key: OffloadKey, epoch: int, generation: int = 0, digest: bytes = b"") -> Wanted:
        tree = self._open_root().tree
        place = place_of(tree, self._namespace, key)
        payload_bytes = self._context.geometry.aligned_bytes(key_group(key))
        file_bytes = tree.header_bytes + payload_bytes
        header = SlotHeader(
            self._namespace,
            epoch,
            tree.root_uuid,
            place.bucket,
            0,
            0,
            file_bytes,
            payload_bytes,
            generation,
            key_group(key),
            key,
            digest,
        )
        return Wanted(place, header, file_bytes)

    async def store(self, job: TransferJob) -> JobResult:
        """Write each block to a temporary of its own, then give it its name.

        A block is STORED, PRESENT (somebody stored it before), dropped (backlog: its bucket's lock was not to be had;
        no_slot, disk_full, reset: the namespace has a newer epoch, key_too_long, closing), LATE, or failed(errno).
        """
        return await self._run(job, JobKind.STORE)

    async def load(self, job: TransferJob) -> JobResult:
        """Read each file into its row; LOADED once everything it says and its payload's checksum were verified.

        MISSING if there is none of the current epoch. Anything else that differs makes a block CORRUPT, and its file is
        removed; its row's bytes must not be used.
        """
        return await self._run(job, JobKind.LOAD)

    async def _run(self, job: TransferJob, kind: JobKind) -> JobResult:
        self._open_root()
        self._check_job(job)
        started = self._context.clock()
        if self._closing:
            return JobResult.uniform(job, dropped(DropReason.CLOSING))
        if job.deadline is not None and started > job.deadline:
            return JobResult.uniform(job, LATE)
        run = JobRun(job, kind, asyncio.get_running_loop())
        blocks = self._blocks(run)
        current = asyncio.create_task(self._epoch.on_disk(job.epoch, kind is JobKind.STORE))
        self._asking.add(current)
        current.add_done_callback(self._asking.discard)
        current.add_done_callback(_seen)  # every block that is still waited for sees what it raised
        for block in blocks:
            task = asyncio.create_task(self._steps.run(block, current))
            self._moving[task] = block
            task.add_done_callback(lambda ended: self._moving.pop(ended, None))
        try:
            await self._wait(run, blocks, None if job.deadline is None else job.deadline - started)
        except asyncio.CancelledError:
            for block in blocks:
                block.give_up(CANCELLED)
            with suppress(asyncio.CancelledError):
                await outlast(run.finished)
            raise
        return run.result(self._context.clock() - started)

    async def _wait(self, run: JobRun, blocks: Sequence[Block], seconds: float | None) -> None:
        """Wait for a job's blocks; past its deadline only for those whose rows are in use."""
        await asyncio.wait((run.finished,), timeout=seconds)
        if not run.finished.done():
            for block in blocks:
                block.give_up(LATE)
            await asyncio.shield(run.finished)

    def _blocks(self, run: JobRun) -> list[Block]:
        """A job's blocks, without those whose key fits no header."""
        storing, row_bytes, longest = run.kind is JobKind.STORE, self._rows.row_bytes, self._key_bytes_max()
        blocks = []
        for number, group in enumerate(run.job.groups):
            assert not isinstance(group.staging, GPURuns)
            for position, (key, row) in enumerate(zip(group.keys, group.staging.tolist(), strict=True)):
                if len(key) > longest:
                    run.end(number, position, dropped(DropReason.KEY_TOO_LONG))
                    continue
                generation, digest = (self._next_generation(), self._rows.checksum(row)) if storing else (0, b"")
                wanted = self._wanted(key, run.job.epoch, generation, digest)
                payload = self._memory[row * row_bytes : row * row_bytes + wanted.header.payload_bytes]
                blocks.append(Block(run, number, position, row, payload, wanted))
        return blocks

    def _next_generation(self) -> int:
        """Larger than any before it in this process, and comparable between hosts as well as their clocks are."""
        self._generation = max(self._generation + 1, int(self._seams.wall() * _NANOSECONDS))
        return self._generation

    def _check_job(self, job: TransferJob) -> None:
        """Raise UsageError for a job that makes no sense."""
        for group in job.groups:
            if isinstance(group.staging, GPURuns) or len(group.keys) != len(group.staging):
                raise UsageError("a job on this tier names a row for each key")
            if not 0 <= group.group < self._context.geometry.num_groups:
                raise UsageError(f"there is no group {group.group}")
            if any(key_group(key) != group.group for key in group.keys):
                raise UsageError(f"a key of another group is in the share of group {group.group}")
            rows = group.staging
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self._rows.num_rows:
                raise UsageError("a job names a row that does not exist")

    async def reset(self, epoch: int) -> None:
        """Raise the namespace's epoch for everybody, durably before this returns. Raises RootError if that failed.

        Processes that have not reset to this epoch themselves hit nothing and store nothing from here on. If it failed
        that holds for this process only, which stores nothing before the disk has taken the epoch.
        """
        root = self._open_root()
        if self._closing:
            raise UsageError("this tier is not open")
        await self._epoch.reset(epoch)
        self._in_background(pruning.prune(root, self._namespace, epoch))

    async def sweep(self) -> None:
        """Remove what dead processes left behind, now; it is also done from time to time."""
        await self._open_root().sweep()

    async def close(self) -> None:
        """Let I/O end within `close_timeout_seconds`, give the lease up, let go of everything. Idempotent.

        Blocks whose I/O had not begun are dropped. Blocks whose I/O is stuck are reported late and counted in
        `close.stuck`; files, memory and threads stay then.
        """
        self._closing = True
        async with self._releasing:
            await self._release()

    async def _release(self) -> None:
        self._closing = True
        root, timeout = self._root, self.options.close_timeout_seconds
        if root is None:
            return
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        stuck = await self._drain(root, timeout)
        if not stuck:
            stuck = await opening.leave(root, timeout)
        self.counters["close.stuck"] = stuck
        if stuck:
            _log.warning("%s: I/O is stuck; files stay open until it ends", root.path)
            return
        self._root, self._memory = None, memoryview(b"")

    async def _drain(self, root: SharedRoot, timeout: float) -> int:
        """End what moves. Returns how many blocks or requests are stuck at the deadline."""
        for block in list(self._moving.values()):
            block.give_up(dropped(DropReason.CLOSING))
        if self._moving:
            await asyncio.wait(list(self._moving), timeout=timeout)
        stuck = list(self._moving.values())
        for block in stuck:  # their steps go on and clean up, should the I/O ever end
            block.let_down = True
            block.run.give_up()
        requests = await root.engine.close(timeout) if root.started else 0
        return max(len(stuck), requests)


def _seen(ended: asyncio.Future[int | None]) -> None:
    if not ended.cancelled():
        ended.exception()
