"""Type `fs`: blocks in the slots of a few large files, on one or more local disks."""

import asyncio
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import ClassVar

from kvtier.aio.loop_budget import TimeBudget
from kvtier.aio.shielded_wait import shielded_wait
from kvtier.errors import RootError, UsageError
from kvtier.options import TierOptions
from kvtier.tier.block_age import BlockAges
from kvtier.tier.contract import Opened, Rows, SlotSpace, TierContext
from kvtier.tier.job_run import JobRun
from kvtier.tier.registry import DryRun
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import CANCELLED, MISSING, BlockOutcome, DropReason, JobKind, JobResult, TransferJob, dropped
from kvtier_fs.io.full_transfer import FullTransferIO
from kvtier_fs.local import layout, opening
from kvtier_fs.local.block_batches import RootShare, TierSide
from kvtier_fs.local.layout import RootSession
from kvtier_fs.local.opening import Hooks, remove_leftovers, side_by_side
from kvtier_fs.local.recovery import recover_root, recovered
from kvtier_fs.local.root import Root
from kvtier_fs.local.root_queue import RootQueue
from kvtier_fs.local.shrinking import shrink
from kvtier_fs.options import FSOptions
from kvtier_fs.roots.disk import ROOT_MISSING, choose_engine, make_engine, mode
from kvtier_fs.roots.root_tier import RootTier

_UNREADY = attrgetter("unready")


class SlotRouter:
    """Sends the blocks of jobs to the queues of the roots that their slots lie in.

    `ages`, of a tier with a `max_age`: blocks that are too old when their load begins are not read.
    """

    def __init__(self, queues: Sequence[RootQueue], side: TierSide, ages: BlockAges | None = None) -> None:
        self.queues, self._side, self._ages = queues, side, ages
        self._roots = roots = [queue.root for queue in queues]
        self._space, self._layout = side.space, side.layout
        self._num_rows, self._num_slots = side.rows.num_rows, side.space.num_slot_ids
        self._first_regions = [root.first_region for root in roots]
        self._slots_per_region = side.slots_per_region

    def check(self, job: TransferJob) -> None:
        """Raise UsageError for a job that makes no sense."""
        for group in job.row_groups:
            if not len(group.keys) == len(group.rows) == len(group.slots) == len(group.generations):
                raise UsageError("a job on this tier names a row, a slot and a generation for each key")
            if not 0 <= group.group < len(self._layout.payload_bytes):
                raise UsageError(f"there is no group {group.group}")
            rows, slots = group.rows, group.slots
            if rows and not (
                0 <= min(rows) <= max(rows) < self._num_rows and 0 <= min(slots) <= max(slots) < self._num_slots
            ):
                raise UsageError("a job names a row or a slot that does not exist")
        for wanted in job.formats:
            region, slot_bytes = wanted.region, wanted.slot_bytes
            if not 0 <= region < self._space.num_regions or not self._layout.plan.can_be_formatted(slot_bytes):
                raise UsageError(f"region {region} does not exist or cannot hold slots of {slot_bytes} bytes")

    def locate(self, region: int) -> tuple[Root, int]:
        """The root a region lies in, and the region's number within it."""
        root = self._roots[bisect_right(self._first_regions, region) - 1]
        return root, region - root.first_region

    def format_regions(self, job: TransferJob) -> list[asyncio.Task[None]]:
        """Begin the formats of a job, now, so that they are done in the order in which jobs come.

        Returns what to wait for: until the headers of all regions it writes into were written, or could not be.
        """
        for wanted in job.formats:
            root, region = self.locate(wanted.region)
            root.format_region(region, wanted.slot_bytes, wanted.generation)
        if not any(map(_UNREADY, self._roots)):
            return []
        pending = []
        for number in self._regions_of(job):
            root, region = self.locate(number)
            pending.append(root.format_pending(region))
        return [task for task in pending if task is not None]

    def _regions_of(self, job: TransferJob) -> list[int]:
        return sorted({slot // self._slots_per_region for group in job.row_groups for slot in group.slots})

    def shares(self, run: JobRun) -> list[tuple[RootQueue, RootShare]]:
        """A job's blocks, in the order of their places, and the queues of all their roots."""
        shares: list[tuple[RootQueue, RootShare]] = []
        for number, group in enumerate(run.groups):
            order = sorted(range(len(group.slots)), key=group.slots.__getitem__)
            if self._ages is not None or max(map(len, group.keys), default=0) > self._side.max_key_bytes:
                order = self._without_old(run, number, self._without_long_keys(run, number, order))
            if len(self._roots) == 1:
                shares.append((self.queues[0], RootShare(self._side, self._roots[0], run, number, order)))
                continue
            owners: dict[int, list[int]] = {}
            for i in order:
                region = group.slots[i] // self._slots_per_region
                owners.setdefault(bisect_right(self._first_regions, region) - 1, []).append(i)
            for owner, positions in owners.items():
                share = RootShare(self._side, self._roots[owner], run, number, positions)
                shares.append((self.queues[owner], share))
        return shares

    def _without_long_keys(self, run: JobRun, number: int, order: list[int]) -> list[int]:
        """Drop the blocks whose keys are too long for a header; returns the others."""
        keys = run.groups[number].keys
        too_long = [i for i in order if len(keys[i]) > self._side.max_key_bytes]
        run.end_all(number, too_long, dropped(DropReason.KEY_TOO_LONG))
        return [i for i in order if len(keys[i]) <= self._side.max_key_bytes]

    def _without_old(self, run: JobRun, number: int, order: list[int]) -> list[int]:
        """End the blocks of a load that are too old, whatever the control plane knew of them; returns the others."""
        if self._ages is None or run.kind is JobKind.STORE:
            return order
        allows, generations = self._ages.limit().allows, run.groups[number].generations
        old = [i for i in order if not allows(generations[i])]
        run.end_all(number, old, MISSING)
        self._side.counters["expired"] += len(old)
        return [i for i in order if allows(generations[i])]

    def withdraw(self, run: JobRun, outcome: BlockOutcome) -> None:
        """End the blocks of a job whose I/O has not begun."""
        for queue in self.queues:
            queue.withdraw(outcome, run)


_log = logging.getLogger("kvtier.fs")
_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0


class FSBackend(RootTier):
    """A tier of slots on local disks. Owned: the control plane chooses the slot, this class does the I/O.

    A stored block is STORED, dropped (key_too_long, disk_full, closing), LATE (its deadline passed before its I/O
    began) or failed with an errno. A loaded block is LOADED once its whole header and its payload's checksum were
    verified, and CORRUPT if anything differs.

    `counters` counts what happened by place and reason: `mismatch.<field>` for loads refused by verification,
    `errno.<name>` for failed I/O, `io.short` for continued transfers, `open.snapshot` and `open.scan` for how the roots
    were recovered, `close.stuck` for I/O that outlived close.
    """

    Options: ClassVar[type[TierOptions]] = FSOptions
    options: FSOptions

    def __init__(self, options: TierOptions, hooks: Hooks | None = None) -> None:
        super().__init__(options)
        self._hooks = hooks or Hooks()
        self._roots: list[Root] = []
        self._router: SlotRouter | None = None
        self._session: RootSession
        self._ends: dict[Root, RootCloser] = {}
        self._raising: set[asyncio.Task[None]] = set()

    def dry_run(self, geometry: Geometry, probe: bool) -> DryRun:
        """The tier as it would be if it were opened now. Probes the roots only if asked to; leaves nothing behind."""
        return opening.dry_run(self.options, geometry, probe)

    async def _open(self, context: TierContext, rows: Rows) -> Opened:
        """Take the roots, begin a session in each, rebuild the directory from the headers on disk."""
        notes = await self._enter()
        laid_out = layout.lay_out(self._roots, self.options, context.geometry)
        await self._roots[0].call(layout.check_index, laid_out, len(self._roots), self._hooks.limits)
        notes.extend(laid_out.notes)
        epoch = opening.first_epoch([root.stored for root in self._roots], self._namespace, context.new_epoch)
        session = RootSession(laid_out, self._namespace, context.namespace.manifest(), epoch)
        self._session = session
        for root_notes in await side_by_side(self._begin(root, session) for root in self._roots):
            notes.extend(root_notes)
        engine = await self._start_engines(notes)
        notes += filter(None, await side_by_side(self._recover(root, session) for root in self._roots))
        space = self._number_regions()
        side = TierSide(rows, space, session, context.clock, self.counters)
        here, depth = self._hooks.checked_here_bytes, self.options.io_depth
        ages = BlockAges(self._hooks.wall_ns, self.options.max_age)
        queues = [RootQueue(root, side, depth, here) for root in self._roots]
        self._router = SlotRouter(queues, side, ages if ages.max_age_seconds is not None else None)
        direct = all(root.probe.direct for root in self._roots)
        return Opened(
            capacity_bytes=laid_out.share * len(self._roots),
            space=space,
            recovered=recovered(self._roots, space, ages.limit()),
            epoch=session.epoch,
            mode=mode("slab", engine, direct),
            layout="slab",
            io_engine=engine,
            notes=tuple(notes),
            ages=ages,
        )

    async def _enter(self) -> list[str]:
        """Take every root that is there. Returns a note for each that is not; raises RootError if none is."""
        paths = self.options.roots

        async def enter(root: Root) -> None:
            if not await opening.enter_root(root, self.options):
                self._ends[root] = RootCloser(root, None, self.counters)
                self._roots.remove(root)
                await self._end(root, self.options.close_timeout_seconds)

        for path in paths:
            self._roots.append(opening.root_of(path, self.options, self._hooks))
        await side_by_side(map(enter, list(self._roots)))
        present = {root.path for root in self._roots}
        missing = [path for path in paths if path not in present]
        if not present:
            raise RootError(missing[0], ROOT_MISSING)
        notes = [f"{path}: is not there; running without it" for path in missing]
        notes += [root.folder.note for root in self._roots if root.folder.note]
        for root in self._roots:
            notes += await root.call(remove_leftovers, root.path, self.options)
        return notes

    async def _begin(self, root: Root, session: RootSession) -> list[str]:
        try:
            notes = [
                await opening.begin_session(root, session, self._hooks.random_bytes),
                await opening.describe(root, session),
                await opening.unknown_files(root),
            ]
        except OSError as error:
            raise root.folder.refusal(error) from error
        return [note for note in notes if note]

    async def _start_engines(self, notes: list[str]) -> str:
        """Give every root its I/O engine. Returns the engine's name."""
        name, note = "", ""
        if self._hooks.engine is None:
            name, note = await self._roots[0].call(choose_engine, self.options)
        notes.extend([note] if note else [])
        for root in self._roots:
            replaced, budget = self._hooks.engine, TimeBudget()
            if replaced is None:
                make_engine(name, root.pools.io, self.options, root.hold_engine, budget)
            else:
                root.hold_engine(replaced(root))
            assert root.engine is not None
            io = FullTransferIO(root.engine, root.probe.offset_alignment if root.probe.direct else 1, self.counters)
            root.start(io, budget)
        return " and ".join(sorted({root.io.engine.name for root in self._roots}))

    async def _recover(self, root: Root, session: RootSession) -> str:
        """Learn again what a root holds, within its plan. Returns a note, empty if nothing had to go."""
        try:
            from_snapshot = await recover_root(root, session)
            note = await shrink(root, session.layout.plan, session.layout.slot_bytes)
        except OSError as error:
            raise root.folder.refusal(error) from error
        self.counters["open.snapshot" if from_snapshot else "open.scan"] += 1
        return note

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
        return SlotSpace(self._session.layout.plan.region_bytes, tuple(counts), self._session.layout.slot_bytes)

    async def _run(self, job: TransferJob, kind: JobKind) -> JobResult:
        """Move a job's blocks on all roots side by side."""
        router = self._router
        if router is None and not self._closing:
            raise UsageError("this tier is not open")
        if router is not None:
            router.check(job)
            started = self._context.clock()
            if kind is JobKind.STORE and not self._closing:
                formats = router.format_regions(job)
                if formats:
                    await asyncio.wait(formats)
        if router is None or self._closing:
            return JobResult.uniform(job, dropped(DropReason.CLOSING))
        run = JobRun(job, kind, asyncio.get_running_loop())
        shares = router.shares(run)
        try:
            for queue, share in shares:
                queue.enqueue(share)
            await run.finished
        except asyncio.CancelledError:
            left = run.finished_after_cancel()
            router.withdraw(run, CANCELLED)
            with suppress(asyncio.CancelledError):
                await shielded_wait(left)
            raise
        finally:
            for queue, share in shares:
                queue.forget(share)
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
            task.add_done_callback(self._on_raised)
        await asyncio.wait(raising, timeout=self.options.job_timeout_seconds)
        for task, path in raising.items():
            if not task.done():
                raise RootError(path, "the disk does not answer; the reset is not durable before it does")
            task.result()

    def _on_raised(self, task: asyncio.Task[None]) -> None:
        self._raising.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.counters["reset.failed"] += 1

    async def _release(self) -> None:
        self._closing = True
        queues = {queue.root: queue for queue in self._router.queues} if self._router else {}
        for root in self._roots:
            self._ends.setdefault(root, RootCloser(root, queues.get(root), self.counters))
        self._roots.clear()
        self._router = None
        timeout = self.options.close_timeout_seconds
        self.counters["close.stuck"] = 0
        await side_by_side(self._end(root, timeout) for root in self._ends)

    async def _end(self, root: Root, timeout: float) -> None:
        """Close a root within a time. What is stuck, or raised, is left to the next `close`."""
        stuck = await self._ends[root].within(timeout)
        if stuck:
            self.counters["close.stuck"] += stuck
        else:
            del self._ends[root]


class RootCloser:
    """The end of one root. `queue` moves its blocks; None if no session began.

    It runs in a task of its own, however long the disk takes, and releases the lock last. Waiting for it is optional.
    """

    def __init__(self, root: Root, queue: RootQueue | None, counters: Counter[str]) -> None:
        self._root = root
        self._queue = queue
        self._counters = counters
        self._ending: asyncio.Task[None] | None = None

    async def within(self, timeout_seconds: float) -> int:
        """Wait for the end until a deadline. Returns how many requests, or other calls of the disk, are stuck then.

        Jobs whose I/O is stuck are reported late. What that I/O uses is kept, above all the lock.
        """
        if self._ending is None or (self._ending.done() and self._ending.exception() is not None):
            self._ending = asyncio.create_task(self._end(), name=f"close {self._root.path}")
        await asyncio.wait([self._ending], timeout=timeout_seconds)
        if self._ending.done():
            self._ending.result()
            return 0
        _log.warning("%s: I/O is stuck; the folder stays locked until it ends", self._root.path)
        if self._queue is not None:
            self._queue.give_up()
        return max(1, self._root.requests_in_flight)

    async def _end(self) -> None:
        """Let go of everything, in order. Cut short by the end of the loop it leaves what may be in use as it is."""
        root = self._root
        if self._queue is not None:
            self._queue.withdraw(dropped(DropReason.CLOSING))
            await self._queue.idle()
        await root.wait_formats()
        while await root.stop_engine(_PATIENCE_SECONDS):  # noqa: ASYNC110 - it has waited; some return at once
            await asyncio.sleep(_LOOK_SECONDS)
        await self._end_session()
        with suppress(OSError):  # not one thread was to be had, so nothing was opened either
            await root.call(root.folder.leave)
        while await root.pools.close(_PATIENCE_SECONDS):
            pass

    async def _end_session(self) -> None:
        """Write the snapshot, then say that the session ended in order: it counts only if this does.

        Whatever fails costs the next open a scan, and nothing else. So does a queue that has failed: its map of the
        slots may be wrong.
        """
        root, queue = self._root, self._queue
        if queue is None:
            return
        if queue.failed:
            self._counters["close.unclean"] += 1
            return
        try:
            try:
                await root.write_snapshot(queue.side.layout.snapshot_bytes)
            except OSError as error:
                _log.info("%s: no snapshot (%s)", root.path, error)
                self._counters["close.no_snapshot"] += 1
            await root.write_superblock(replace(root.superblock, clean=True))
        except Exception as error:  # whatever it is: the folder must be left, or it stays locked
            _log.info("%s: not closed in order (%s)", root.path, error)
            self._counters["close.unclean"] += 1
