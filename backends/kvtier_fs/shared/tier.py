"""Type `shared_fs`: one file a block in one folder that many processes and hosts share."""

import asyncio
import errno
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from kvtier.aio.shielded_wait import shielded_wait
from kvtier.errors import RootError, UsageError
from kvtier.options import TierOptions
from kvtier.tier.block_age import NO_AGE_LIMIT, AgeLimit, age_limit, next_generation
from kvtier.tier.block_envelope import SlotHeader, max_key_bytes
from kvtier.tier.contract import LookupResult, Opened, Rows, TierContext
from kvtier.tier.job_run import JobRun, check_job
from kvtier.tier.registry import DryRun
from kvtier.tier.shared_epoch import Marker, SharedEpoch, fresh_epoch
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import CANCELLED, LATE, DropReason, JobKind, JobResult, TransferJob, dropped, failed
from kvtier.types.keys import OffloadKey, key_group
from kvtier_fs.options import SharedFSOptions
from kvtier_fs.roots.disk import mode
from kvtier_fs.roots.root_tier import RootTier
from kvtier_fs.shared import opening
from kvtier_fs.shared.block_file import ExpectedBlock, Presence
from kvtier_fs.shared.block_steps import Block, BlockSteps
from kvtier_fs.shared.folder import LockBusy
from kvtier_fs.shared.paths import place_of
from kvtier_fs.shared.root import FilesHooks, SharedRoot

_WAIT_SECONDS = 0.01


class FolderEpoch(SharedEpoch):
    """A namespace's epoch in this process. Its file states a number alone."""

    def __init__(self, root: SharedRoot, namespace: bytes) -> None:
        super().__init__(self._read_file, self._swap_file)
        self._root = root
        self._namespace = namespace
        self._resets: dict[int, asyncio.Task[None]] = {}

    async def begin(self, new_epoch: int) -> bool:
        """Begin as `SharedEpoch` does. A file that states none may have stated a reset: then the namespace begins a new
        line."""
        if await self._root.call(self._root.folder.has_lost_epoch, self._namespace):
            new_epoch = new_epoch or fresh_epoch()
        return await super().begin(new_epoch)

    async def read_epoch(self, epoch: int, storing: bool) -> int | None:
        """The epoch that the root states now, None if nothing it states counts. Raises OSError.

        Before a store `epoch` is written again if it is not durable yet; None if that fails. That goes on when the call
        is cancelled, once for all stores that wait for it.
        """
        self.now = max(self.now, epoch)
        if storing and epoch > self.raised:
            try:
                await asyncio.shield(self._reset_once(epoch))
            except OSError:
                self._root.counters["reset.failed"] += 1
                return None
        stated = await self._root.call(self._root.folder.epoch, self._namespace)
        if stated is None or stated < self.raised:
            self.leave()
        return None if self.has_left else stated

    def _reset_once(self, epoch: int) -> asyncio.Task[None]:
        """A reset of this epoch: the one that is under way, if there is one."""
        if epoch not in self._resets:
            self._resets[epoch] = reset = asyncio.create_task(self.reset(epoch))
            reset.add_done_callback(_take_exception)
            reset.add_done_callback(lambda _: self._resets.pop(epoch))
        return self._resets[epoch]

    async def _read_file(self) -> Marker | None:
        return _marker(await self._root.call(self._root.folder.durable_epoch, self._namespace))

    async def _swap_file(self, held: Marker | None, marker: Marker) -> Marker | None:
        epochs = None if held is None else held.epoch, marker.epoch
        return _marker(await self._root.with_room(partial(self._swap_locked, *epochs)))

    async def _swap_locked(self, held: int | None, epoch: int) -> int | None:
        """Write the epoch once no other process holds the lock. Raises OSError, also after `lock_seconds`."""
        root, loop = self._root, asyncio.get_running_loop()
        deadline = loop.time() + root.hooks.lock_seconds
        while True:
            stated = await root.call(root.folder.swap_epoch, self._namespace, held, epoch, root.temporary())
            if not isinstance(stated, LockBusy):
                return stated
            if loop.time() >= deadline:
                raise OSError(errno.EBUSY, "another process holds the lock of the epochs; is it stopped or hung?")
            await asyncio.sleep(_WAIT_SECONDS)


def _marker(epoch: int | None) -> Marker | None:
    return None if epoch is None else Marker(b"", epoch)


_log = logging.getLogger("kvtier.fs")
_NANOSECONDS = 1_000_000_000
_DEFECT = failed(errno.EIO)
_PRUNE_SECONDS = 60.0
_PRUNES_IN_AN_AGE = 16
_SHRINK_SECONDS = 10.0
"""Seconds that an opening waits for the eviction of what is over the capacity."""


class SharedFSBackend(RootTier):
    """A tier of one file a block in a folder that other processes and hosts use too. Shared: placement and eviction are
    done here, no process owns the root, and a block may vanish at any moment.

    A stored block is STORED, PRESENT (it was stored before), dropped (backlog: the lock of its bucket was busy;
    no_slot; disk_full; reset: the namespace has a newer epoch; key_too_long; closing), LATE or failed with an errno.
    A loaded block is LOADED once its whole header and its payload's checksum were verified, and MISSING if there is
    none of the current epoch. If anything else differs it is CORRUPT and its file is removed.

    `counters` counts what happened by place and reason: `mismatch.<field>` for loads refused by verification (`file`:
    not even a plain file of the right length; `generation`: older than `max_age`), `errno.<name>` for failed I/O,
    `lock.timeout` for buckets whose lock stayed busy, `evicted`, `temporary.swept`, `reset.failed` (the disk did not
    take an epoch), `close.stuck`.
    """

    Options: ClassVar[type[TierOptions]] = SharedFSOptions
    options: SharedFSOptions

    def __init__(self, options: TierOptions, hooks: FilesHooks | None = None) -> None:
        super().__init__(options)
        self._hooks = hooks or FilesHooks()
        self._root: SharedRoot | None = None
        self._background: dict[asyncio.Task[None], None] = {}  # in the order they began, as they are cancelled
        self._moving: dict[asyncio.Task[None], Block] = {}
        self._steps: BlockSteps
        self._rows: Rows
        self._memory = memoryview(b"")
        self._epoch: FolderEpoch
        self._generation = 0
        self._presence: Presence

    def dry_run(self, geometry: Geometry, probe: bool) -> DryRun:
        """Describes the tier as it would be if it were opened now. Probes the root only if asked to; leaves nothing
        behind."""
        return opening.dry_run(self.options, geometry, probe)

    async def _open(self, context: TierContext, rows: Rows) -> Opened:
        """Join the root; it is made if it is new."""
        self._root = root = SharedRoot(self.options.root, self.options, self._hooks, self.counters)
        try:
            return await self._join(root, context, rows)
        except OSError as error:
            raise root.folder.refusal(error) from error

    async def _join(self, root: SharedRoot, context: TierContext, rows: Rows) -> Opened:
        stored = await opening.enter_root(root, self.options)
        await opening.join_root(root, stored, self.options, context.geometry)
        namespace = self._namespace
        self._epoch = FolderEpoch(root, namespace)
        is_new = await self._epoch.begin(context.new_epoch or 0)
        note = await opening.describe(root, namespace, context.namespace.manifest())
        shrunk = await self._shrink(root)
        engine, engine_note = await opening.start_engine(root, self.options)
        self._key_bytes_max = max_key_bytes(root.tree.header_bytes)
        self._rows, self._memory = rows, rows.view.reshape(-1).data
        self._presence = Presence(root.folder, namespace)
        self._steps = BlockSteps(root, rows.set_checksum)
        root.start(engine)
        self._in_background(root.keep_lease)
        self._in_background(root.keep_swept)
        if self.options.max_age is not None:
            self._in_background(partial(self._prune_old, root, self.options.max_age))
        return Opened(
            capacity_bytes=self.options.capacity,
            epoch=self._epoch.now,
            is_new_epoch=is_new,
            mode=mode("files", engine.name, root.probe.direct),
            layout="files",
            io_engine=engine.name,
            notes=tuple(text for text in (root.folder.note, shrunk, note, engine_note) if text),
        )

    async def _shrink(self, root: SharedRoot) -> str:
        """Keep the capacity, which may have been lowered. Returns a note; what takes long goes on in the background."""
        before = self.counters["evicted"]
        shrinking = self._in_background(root.shrink)
        await asyncio.wait((shrinking,), timeout=_SHRINK_SECONDS)
        evicted = self.counters["evicted"] - before
        more = "" if shrinking.done() else ", and more are being evicted"
        return f"{root.path}: {evicted} blocks were evicted to keep the capacity{more}" if evicted or more else ""

    def _in_background(self, work: Callable[[], Coroutine[None, None, None]]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work())
        self._background[task] = None
        task.add_done_callback(self._on_background_end)
        return task

    def _on_background_end(self, ended: asyncio.Task[None]) -> None:
        self._background.pop(ended, None)
        if not ended.cancelled() and (error := ended.exception()) is not None:
            _log.error("%s: work in the background ended", self.options.root, exc_info=error)
            self.counters["defect"] += 1

    async def _prune_old(self, root: SharedRoot, max_age: int) -> None:
        """Remove blocks of this namespace that are too old, from time to time until cancelled."""
        while True:
            await root.prune(self._namespace, self._epoch.now, self._ages)
            await asyncio.sleep(max(_PRUNE_SECONDS, max_age / _PRUNES_IN_AN_AGE))

    def _open_root(self) -> SharedRoot:
        if self._root is None or not self._root.started:
            raise UsageError("this tier is not open")
        return self._root

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """HIT for a key whose file exists with a right header; MISS for any other.

        Payloads are not read; a load does that.
        """
        root = self._open_root()
        if self._closing:
            return [LookupResult.MISS] * len(keys)
        epoch = self._epoch.now
        ages = self._ages()
        wanted = [self._expect(key, epoch, ages=ages) if self._is_known(key) else None for key in keys]
        found = await root.call(self._presence.probe, wanted, epoch)
        return [LookupResult.HIT if there else LookupResult.MISS for there in found]

    def _is_known(self, key: OffloadKey) -> bool:
        return key_group(key) < self._context.geometry.num_groups and len(key) <= self._key_bytes_max

    def _wall_ns(self) -> int:
        return int(self._hooks.wall() * _NANOSECONDS)

    def _ages(self) -> AgeLimit:
        """The generations that are young enough now."""
        return age_limit(self.options.max_age, self._wall_ns())

    def _expect(
        self, key: OffloadKey, epoch: int, generation: int = 0, digest: bytes = b"", ages: AgeLimit = NO_AGE_LIMIT
    ) -> ExpectedBlock:
        tree, group = self._open_root().tree, key_group(key)
        place = place_of(tree, self._namespace, key)
        payload_bytes = self._context.geometry.aligned_bytes(group)
        file_bytes = tree.header_bytes + payload_bytes
        of_place = (tree.root_uuid, place.bucket, 0, 0, file_bytes, payload_bytes)
        header = SlotHeader(self._namespace, epoch, *of_place, generation, group, key, digest)
        return ExpectedBlock(place, header, file_bytes, ages)

    async def _run(self, job: TransferJob, kind: JobKind) -> JobResult:
        self._open_root()
        check_job(job, self._context.geometry.num_groups, self._rows.num_rows)
        started = self._context.clock()
        if self._closing:
            return JobResult.uniform(job, dropped(DropReason.CLOSING))
        if job.deadline is not None and started > job.deadline:
            return JobResult.uniform(job, LATE)
        run = JobRun(job, kind, asyncio.get_running_loop())
        blocks = self._blocks(run)
        current = asyncio.create_task(self._epoch.read_epoch(job.epoch, kind is JobKind.STORE))
        current.add_done_callback(_take_exception)
        try:
            self._begin(blocks, current)
            await self._wait(run, blocks, None if job.deadline is None else job.deadline - started)
        except BaseException:
            for block in blocks:
                block.give_up(CANCELLED)
            with suppress(asyncio.CancelledError):
                await shielded_wait(run.finished)
            raise
        finally:
            current.cancel()  # with the steps of late blocks that wait for it
        return run.result(self._context.clock() - started)

    def _begin(self, blocks: Sequence[Block], current: asyncio.Future[int | None]) -> None:
        """Start the steps of each block. If this raises they may have begun."""
        for block in blocks:
            task = asyncio.create_task(self._steps.run(block, current))
            self._moving[task] = block
            task.add_done_callback(self._on_block_end)

    def _on_block_end(self, ended: asyncio.Task[None]) -> None:
        """End the block of steps that ended. Those that raised because of a defect reported no outcome."""
        block = self._moving.pop(ended)
        if not ended.cancelled() and (error := ended.exception()) is not None:
            _log.error("%s: a block could not be moved", self.options.root, exc_info=error)
            self.counters["defect"] += 1
            block.end(_DEFECT)

    async def _wait(self, run: JobRun, blocks: Sequence[Block], seconds: float | None) -> None:
        """Wait for a job's blocks; past its deadline only for those whose rows are in use."""
        await asyncio.wait((run.finished,), timeout=seconds)
        if not run.finished.done():
            for block in blocks:
                block.give_up(LATE)
            await asyncio.shield(run.finished)

    def _blocks(self, run: JobRun) -> list[Block]:
        """A job's blocks, without those whose key fits no header. Raises UsageError for a key of another group."""
        storing, row_bytes, longest = run.kind is JobKind.STORE, self._rows.row_bytes, self._key_bytes_max
        blocks, ages = [], self._ages()
        for number, group in enumerate(run.groups):
            for position, (key, row) in enumerate(zip(group.keys, group.rows, strict=True)):
                if key_group(key) != group.group:
                    raise UsageError(f"a key of another group is in the share of group {group.group}")
                if len(key) > longest:
                    run.end(number, position, dropped(DropReason.KEY_TOO_LONG))
                    continue
                generation, digest = (self._next_generation(), self._rows.checksum(row)) if storing else (0, b"")
                wanted = self._expect(key, run.job.epoch, generation, digest, ages)
                payload = self._memory[row * row_bytes : row * row_bytes + wanted.header.payload_bytes]
                blocks.append(Block(run, number, position, row, payload, wanted))
        return blocks

    def _next_generation(self) -> int:
        """Comparable between hosts as well as their clocks are."""
        self._generation = next_generation(self._generation, self._wall_ns())
        return self._generation

    async def state_epoch(self, epoch: int) -> int:
        """See `StatesEpoch`. Durable when this returns."""
        self._open_root()
        try:
            return await self._epoch.state(epoch)
        except OSError as error:
            raise self._epoch_error(error) from error

    def leave_epoch(self) -> None:
        """See `StatesEpoch`."""
        self._epoch.leave()

    async def reset(self, epoch: int) -> None:
        """Raise the namespace's epoch for all processes, durably before this returns. Raises RootError if that failed.

        Processes that have not reset to this epoch themselves hit nothing and store nothing from here on. If it failed
        that holds for this process only, which stores nothing before the disk has taken the epoch.
        """
        root = self._open_root()
        if self._closing:
            raise UsageError("this tier is not open")
        try:
            await self._epoch.reset(epoch)
        except OSError as error:
            raise self._epoch_error(error) from error
        self._in_background(partial(root.prune, self._namespace, epoch))

    def _epoch_error(self, error: OSError) -> RootError:
        return RootError(self.options.root, f"the epoch cannot be written ({error.strerror})")

    async def sweep(self) -> None:
        """Remove what ended processes left, now; it is also done from time to time."""
        await self._open_root().sweep()

    async def _release(self) -> None:
        self._closing = True
        root, loop = self._root, asyncio.get_running_loop()
        if root is None:
            return
        deadline = loop.time() + self.options.close_timeout_seconds
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        stuck = await self._drain(root, deadline)
        if not stuck:
            stuck = await root.close(max(0.0, deadline - loop.time()))
        self.counters["close.stuck"] = stuck
        if stuck:
            _log.warning("%s: I/O is stuck; files stay open until it ends", root.path)
            return
        self._root, self._memory = None, memoryview(b"")

    async def _drain(self, root: SharedRoot, deadline: float) -> int:
        """End the blocks in flight. Returns how many blocks or requests are stuck at the deadline."""
        for block in list(self._moving.values()):
            block.give_up(dropped(DropReason.CLOSING))
        loop = asyncio.get_running_loop()
        if self._moving:
            await asyncio.wait(list(self._moving), timeout=max(0.0, deadline - loop.time()))
        stuck = [block for task, block in self._moving.items() if not task.done()]
        for block in stuck:  # their steps continue and clean up if the I/O ends later
            block.abandoned = True
            block.run.give_up()
        requests = await root.engine.close(max(0.0, deadline - loop.time())) if root.engine is not None else 0
        return max(len(stuck), requests)


def _take_exception(ended: asyncio.Future[Any]) -> None:
    """Take what it raised, so that asyncio does not log it: each block that waits for it has it."""
    if not ended.cancelled():
        ended.exception()
