"""The shared root while it is open: folder, threads, engine, buckets, own lease. All methods run on the event loop."""

import asyncio
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.tier.block_age import AgeLimit
from kvtier_fs.format.tree_records import Tree
from kvtier_fs.io.contract import HeaderPages, IOEngine
from kvtier_fs.io.full_transfer import FullTransferIO
from kvtier_fs.io.probe import DirectProbe
from kvtier_fs.options import SharedFSOptions
from kvtier_fs.roots.private_tree import names_in
from kvtier_fs.shared.block_file import Temporary
from kvtier_fs.shared.bucket import FULL, Bucket, BucketRules
from kvtier_fs.shared.folder import LockBusy, TreeFolder
from kvtier_fs.shared.leases import FolderLeases, Holder, this_process
from kvtier_fs.shared.paths import DISK_BLOCK_BYTES, TEMPORARY_NAME

_log = logging.getLogger("kvtier.fs")
_FIRST_WAIT_SECONDS = 0.001
_LONGEST_WAIT_SECONDS = 0.05
_IN_VAIN_MAX = 8

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FilesHooks:
    """Parts that a simulator or a fault test replaces, and times of the layout in seconds.

    `engine` None: chosen by the options. `wall` gives the times that order evictions over all hosts. A store waits
    `lock_seconds` while others have its bucket; recency is written at most once in `touch_seconds`; a lease lasts
    `lease_seconds`; when evictions did not make a full disk take blocks, none is tried for `full_seconds`.
    """

    folder: Callable[[str, SharedFSOptions], TreeFolder] = TreeFolder
    engine: Callable[[], IOEngine] | None = None
    wall: Callable[[], float] = time.time
    holder: Callable[[], Holder] = this_process
    random_bytes: Callable[[int], bytes] = os.urandom
    lock_seconds: float = 1.0
    touch_seconds: float = 60.0
    lease_seconds: float = 60.0
    full_seconds: float = 1.0


class TransferLimit:
    """Blocks with I/O in flight in one direction, and the header pages they use."""

    def __init__(self, depth: int, header_bytes: int) -> None:
        self.pages = HeaderPages(depth, header_bytes)
        self.permits = asyncio.Semaphore(depth)


class SharedRoot:
    """A root that other processes and hosts use at the same time."""

    def __init__(self, path: str, options: SharedFSOptions, hooks: FilesHooks, counters: Counter[str]) -> None:
        name = f"kvtier-fs-{os.path.basename(path)}"
        self.path = path
        self.hooks = hooks
        self.counters = counters
        self.folder = hooks.folder(path, options)
        self.files = DaemonPool(f"{name}-files", options.io_threads)
        self.io_threads = DaemonPool(f"{name}-io", options.io_threads)
        self.probe = DirectProbe(False, reason="turned off")
        self.lease = hooks.random_bytes(8).hex()
        self.started = False
        self.leased = False
        self.tree: Tree
        self.engine: IOEngine | None = None
        self.io: FullTransferIO
        self.loads: TransferLimit
        self.stores: TransferLimit
        self.leases: FolderLeases
        self.rules: BucketRules
        self._options = options
        self.buckets: list[Bucket] = []
        self._temporaries = 0
        self._calls: set[Future[Any]] = set()
        self._full_until = float("-inf")
        self._in_vain = 0
        self._after_death: dict[str, set[int]] = {}
        self._is_left = False

    async def call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a file call on the root's threads. Raises what it raises. It has ended then, but after a cancellation."""
        future = self.files.submit(fn, *args, **kwargs)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return await asyncio.wrap_future(future)

    async def _wait_for_calls(self) -> None:
        """Wait until no file call is in flight, cancelled ones included."""
        while calls := [asyncio.wrap_future(call) for call in list(self._calls) if not call.cancelled()]:
            ended, _ = await asyncio.wait(calls)
            for call in ended:
                if not call.cancelled():
                    call.exception()  # retrieved, so that asyncio does not log it: it belongs to the caller

    async def close(self, timeout_seconds: float) -> int:
        """Remove the lease, close every file, end the threads. No block moves any more. Returns how many threads are
        stuck at the deadline; then another call goes on."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        try:
            async with asyncio.timeout_at(deadline):
                if not self._is_left:
                    await self._leave(timeout_seconds / 2)
        except TimeoutError:
            return 1  # every thread is stuck in a file call
        left_seconds = max(0.0, deadline - loop.time())
        return sum(await asyncio.gather(self.io_threads.close(left_seconds), self.files.close(left_seconds)))

    async def _leave(self, clear_seconds: float) -> None:
        await self.clear(clear_seconds)
        await self._wait_for_calls()  # what they write is swept as soon as it has no lease
        leased, self.leased = self.leased, False
        try:
            if leased:
                await self.call(self.leases.remove, self.lease)
        except OSError as error:
            _log.info("%s: not closed in order (%s)", self.path, error)
            self.counters["close.unclean"] += 1
        await self._wait_for_calls()  # a folder must not be closed under a call that works in it
        await self.call(self.folder.leave)
        self._is_left = True

    def temporary(self) -> str:
        """A unique name for a temporary; it holds the lease of this process."""
        self._temporaries += 1
        return f"new-{self.lease}-{self._temporaries:x}"

    def use_tree(self, tree: Tree, budget_bytes: int) -> None:
        """Create the buckets."""
        self.tree = self.folder.tree = tree
        direct, free, hooks = self.probe.direct, self._options.min_free_bytes, self.hooks
        leases, counters = self.leases, self.counters
        self.rules = BucketRules(budget_bytes, free, direct, leases, counters, hooks.wall, hooks.touch_seconds)
        self.buckets = [Bucket(self.folder, number, self.rules) for number in range(tree.buckets)]

    def hold_engine(self, engine: IOEngine) -> None:
        """The engine that is to be closed with this root."""
        self.engine = engine

    def start(self, engine: IOEngine) -> None:
        """Start the I/O: blocks can move from now on."""
        depth, header_bytes = self._options.io_depth, self.tree.header_bytes
        alignment = self.probe.offset_alignment if self.probe.direct else 1
        self.io = FullTransferIO(engine, alignment, self.counters)
        self.loads, self.stores = TransferLimit(depth, header_bytes), TransferLimit(depth, header_bytes)
        self.started = True

    async def with_bucket(self, bucket: Bucket, work: Callable[[], T]) -> T | LockBusy:
        """Do some work on the threads while holding a bucket's lock. Raises OSError.

        BUSY, with nothing done, if others kept the lock from this process for `lock_seconds`. Time that visits of this
        process take, one after another, does not count.
        """
        loop, wait = asyncio.get_running_loop(), _FIRST_WAIT_SECONDS
        began = loop.time()
        async with bucket.visit_lock:
            while True:
                try:
                    result = await self.call(bucket.locked, work)
                except OSError:
                    bucket.refused = None
                    raise
                if not isinstance(result, LockBusy):
                    bucket.refused = None
                    return result
                now = loop.time()
                bucket.refused = now if bucket.refused is None else bucket.refused
                if now - max(bucket.refused, began) >= self.hooks.lock_seconds:
                    self.counters["lock.timeout"] += 1
                    return result
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    async def discard(self, bucket: Bucket, temporary: Temporary) -> None:
        """Remove a temporary, closed already, that will not become a block: now, or at the bucket's next visit.

        If others removed it, they took this process's lease for an expired one; the lease is taken again.
        """
        try:
            discarded = await self.with_bucket(bucket, partial(bucket.discard, temporary))
        except OSError:
            discarded = LockBusy.BUSY
        if isinstance(discarded, LockBusy):
            bucket.leftovers.append(temporary)
        elif not discarded:
            await self._beat()

    async def clear(self, timeout_seconds: float) -> None:
        """Visit the buckets that have leftovers, once; what is busy or fails stays."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                for bucket in self.buckets:
                    if bucket.leftovers:
                        with suppress(OSError):
                            await self.with_bucket(bucket, lambda: None)

    async def make_room(self, number: int, need: int) -> bool:
        """The disk is full: evict blocks of `need` bytes from a bucket or, if it has none, from another.

        False if there are none, or if evictions made no room lately.
        """
        if asyncio.get_running_loop().time() < self._full_until:
            return False
        return await self._evict(number, need)

    async def _evict(self, number: int, need: int) -> bool:
        for bucket in [*self.buckets[number : number + 1], *await self._others(number)]:
            with suppress(OSError):
                if await self.with_bucket(bucket, partial(bucket.make_room, need)) is True:
                    return True
        return False

    async def shrink(self) -> None:
        """Evict the oldest blocks of every bucket that is over its budget, as after the capacity was lowered.

        What is busy or fails is left to the next store there.
        """
        try:
            await asyncio.gather(*map(self._shrink, await self.call(self.folder.buckets)))
        except OSError as error:
            self.note_failure("shrink", error)

    async def _shrink(self, number: int) -> None:
        bucket = self.buckets[number]
        try:
            if await self.call(bucket.is_over_budget):
                await self.with_bucket(bucket, bucket.shrink)
        except OSError as error:
            self.note_failure("shrink", error)

    async def with_room(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Write a small file that matters more than a block: on a full disk, evict the oldest blocks and try once more.

        Raises what the attempt raises.
        """
        try:
            return await attempt()
        except OSError as error:
            if error.errno not in FULL or not self.buckets:  # a root that is being made has nothing to evict
                raise
        await self._evict(0, DISK_BLOCK_BYTES)
        return await attempt()

    async def _others(self, number: int) -> list[Bucket]:
        with suppress(OSError):
            return [self.buckets[other] for other in await self.call(self.folder.buckets) if other != number]
        return []

    def on_room_made(self, helped: bool) -> None:
        """Record whether an eviction made room on a full disk. After several that did not, others
        take all space: pause evictions for a while, then try one at a time."""
        self._in_vain = 0 if helped else self._in_vain + 1
        if self._in_vain >= _IN_VAIN_MAX:
            self._full_until = asyncio.get_running_loop().time() + self.hooks.full_seconds

    async def sweep(self) -> None:
        """Remove what ended processes left: temporaries, accounts that may be wrong, then their leases.

        Skips what is busy or fails; a lease stays until every bucket was swept.
        """
        try:
            numbers = await self.call(self.folder.buckets)
            dead = await self.call(self.leases.dead)
            await self.call(self._sweep_small)
        except OSError as error:
            self.note_failure("sweep", error)
            return
        self._after_death = {lease: self._after_death.get(lease, set()) for lease in dead}
        for number in numbers:
            await self._sweep_bucket(number)
        for lease, seen_to in self._after_death.items():
            if seen_to.issuperset(numbers):
                with suppress(OSError):
                    await self.call(self.leases.remove, lease)

    async def _sweep_bucket(self, number: int) -> None:
        bucket = self.buckets[number]
        waiting = [seen_to for seen_to in self._after_death.values() if number not in seen_to]
        try:
            if not waiting and not bucket.leftovers and not await self.call(bucket.has_temporaries):
                return
            swept = await self.with_bucket(bucket, bucket.sweep_after_death if waiting else bucket.sweep)
        except OSError as error:
            self.note_failure("sweep", error)
            return
        if not isinstance(swept, LockBusy):
            for seen_to in waiting:
                seen_to.add(number)

    def note_failure(self, where: str, error: OSError) -> None:
        """Count an error of work that no job waits for."""
        self.counters[f"{where}.{errno.errorcode.get(error.errno or 0, 'EIO')}"] += 1

    def _sweep_small(self) -> None:
        for folder_fd in self.folder.small_folders():
            for name in names_in(folder_fd):
                match = TEMPORARY_NAME.fullmatch(name)
                if match is not None and self.leases.expired(match[1]):
                    with suppress(OSError):  # one that cannot be removed must not stop the others
                        os.unlink(name, dir_fd=folder_fd)

    async def prune(self, namespace: bytes, epoch: int, ages: Callable[[], AgeLimit] = AgeLimit) -> None:
        """Remove blocks that a reset made unreachable, and those that are too old when their bucket's turn comes. What
        is busy or fails is evicted later, as the oldest."""
        for bucket in self.buckets:
            try:
                pruned = await self.with_bucket(bucket, partial(bucket.prune, namespace, epoch, ages))
            except OSError as error:
                self.note_failure("prune", error)
                continue
            if not isinstance(pruned, LockBusy):
                self.counters["pruned"] += pruned

    async def keep_lease(self) -> None:
        """Renew the lease until cancelled: without it others remove what is written."""
        while True:
            await asyncio.sleep(self.hooks.lease_seconds / 6)
            await self._beat()

    async def keep_swept(self) -> None:
        """Sweep until cancelled. Apart from the lease, which a sweep of a slow file system must not keep waiting."""
        while True:
            await self.sweep()
            await asyncio.sleep(self.hooks.lease_seconds * 5 / 6)

    async def _beat(self) -> None:
        try:
            await self.call(self.leases.beat)
        except OSError as error:
            self.note_failure("lease", error)
