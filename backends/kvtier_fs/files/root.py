"""The shared root while it is open: folder, threads, engine, buckets, our lease. All methods run on the event loop."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from kvtier_fs.buffers import HeaderPages
from kvtier_fs.files.account import FULL, BucketRules
from kvtier_fs.files.blockfile import Temporary
from kvtier_fs.files.bucket import Bucket
from kvtier_fs.files.folder import Busy, TreeFolder, names_in
from kvtier_fs.files.leases import Holder, Leases, this_process
from kvtier_fs.files.moving import Mover
from kvtier_fs.files.places import DISK_BLOCK_BYTES, TEMPORARY_NAME, Quota
from kvtier_fs.files.records import Tree
from kvtier_fs.io.contract import IOEngine
from kvtier_fs.io.probe import DirectProbe
from kvtier_fs.options import FSOptions
from kvtier_fs.threads import RootThreads

_BUCKET_NAME = re.compile(r"bucket-([0-9a-f]{2})")
_FIRST_WAIT_SECONDS = 0.001
_LONGEST_WAIT_SECONDS = 0.05
_IN_VAIN_MAX = 8

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FilesSeams:
    """What a simulator or a fault test replaces, and the times the layout keeps, in seconds.

    `engine` None: chosen by the options. `wall` gives the times that order evictions over all hosts. A store waits
    `lock_seconds` while others have its bucket; recency is written at most once in `touch_seconds`; a lease lasts
    `lease_seconds`; when evictions did not make a full disk take blocks, none is tried for `full_seconds`.
    """

    folder: Callable[[str, FSOptions], TreeFolder] = TreeFolder
    engine: Callable[[], IOEngine] | None = None
    wall: Callable[[], float] = time.time
    holder: Callable[[], Holder] = this_process
    random_bytes: Callable[[int], bytes] = os.urandom
    lock_seconds: float = 1.0
    touch_seconds: float = 60.0
    lease_seconds: float = 60.0
    full_seconds: float = 1.0


class Gate:
    """Blocks with I/O under way in one direction, and the header pages they use."""

    def __init__(self, depth: int, header_bytes: int) -> None:
        self.pages = HeaderPages(depth, header_bytes)
        self.permits = asyncio.Semaphore(depth)


class SharedRoot:
    """One root that other processes and hosts use at the same time."""

    def __init__(self, path: str, options: FSOptions, seams: FilesSeams, counters: Counter[str]) -> None:
        name = f"kvtier-fs-{os.path.basename(path)}"
        self.path = path
        self.seams = seams
        self.counters = counters
        self.folder = seams.folder(path, options)
        self.files = RootThreads(f"{name}-files", options.io_threads)
        self.io_threads = RootThreads(f"{name}-io", options.io_threads)
        self.probe = DirectProbe(False, reason="turned off")
        self.lease = seams.random_bytes(8).hex()
        self.started = False
        self.leased = False
        self.tree: Tree
        self.engine: IOEngine
        self.mover: Mover
        self.loads: Gate
        self.stores: Gate
        self.leases: Leases
        self.rules: BucketRules
        self._options = options
        self._buckets: list[Bucket] = []
        self._temporaries = 0
        self._calls: set[Future[Any]] = set()
        self._full_until = float("-inf")
        self._in_vain = 0
        self._after_death: dict[str, set[int]] = {}

    async def call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a file call on the root's threads. Raises what it raises."""
        future = self.files.submit(fn, *args, **kwargs)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return await asyncio.wrap_future(future)

    async def calls_ended(self) -> None:
        """Wait until no file call is under way, those included that nobody waits for any more."""
        while calls := [asyncio.wrap_future(call) for call in list(self._calls) if not call.cancelled()]:
            ended, _ = await asyncio.wait(calls)
            for call in ended:
                if not call.cancelled():
                    call.exception()  # it is the caller's, if there still is one; nobody is to miss it here

    def temporary(self) -> str:
        """A name for a temporary that nobody else uses, and that says whose it is."""
        self._temporaries += 1
        return f"new-{self.lease}-{self._temporaries:x}"

    def settle(self, tree: Tree, quota: Quota) -> None:
        """From now on there are buckets."""
        self.tree = tree
        self.rules = BucketRules(
            quota.bucket_bytes,
            self._options.min_free_bytes,
            self.probe.direct,
            self._expired,
            self.counters,
            self.seams.wall,
            self.seams.touch_seconds,
        )
        self._buckets = [Bucket(self.folder, number, self.rules) for number in range(tree.buckets)]

    def start(self, engine: IOEngine) -> None:
        """From now on blocks can move."""
        depth, header_bytes = self._options.io_depth, self.tree.header_bytes
        alignment = self.probe.offset_alignment if self.probe.direct else 1
        self.engine = engine
        self.mover = Mover(engine, header_bytes, alignment, self.counters)
        self.loads, self.stores = Gate(depth, header_bytes), Gate(depth, header_bytes)
        self.started = True

    def _expired(self, lease: str) -> bool:
        """True if nobody holds a lease any more; one that cannot be read is taken to be held."""
        try:
            return self.leases.expired(self.folder.leases_fd, lease)
        except OSError:
            return False

    def bucket(self, number: int) -> Bucket:
        return self._buckets[number]

    async def visit(self, bucket: Bucket, work: Callable[[], T]) -> T | Busy:
        """Do some work on the threads while holding a bucket's lock. Raises OSError.

        BUSY, with nothing done, if others kept the lock from this process for `lock_seconds`. Time that visits of this
        process take, one after another, is not counted.
        """
        began = asyncio.get_running_loop().time()
        if not await self._turn(bucket, began):
            return Busy.BUSY
        try:
            return await self._visit(bucket, work, began)
        finally:
            bucket.turn.release()

    async def _turn(self, bucket: Bucket, began: float) -> bool:
        while True:
            try:
                async with asyncio.timeout(self.seams.lock_seconds):
                    return await bucket.turn.acquire()
            except TimeoutError:
                if self._refused_long(bucket, began):
                    return False

    async def _visit(self, bucket: Bucket, work: Callable[[], T], began: float) -> T | Busy:
        loop, wait = asyncio.get_running_loop(), _FIRST_WAIT_SECONDS
        while True:
            try:
                result = await self.call(bucket.locked, work)
            except OSError:
                bucket.refused = None
                raise
            if not isinstance(result, Busy):
                bucket.refused = None
                return result
            now = loop.time()
            bucket.refused = (bucket.refused[0] if bucket.refused else now, now)
            if self._refused_long(bucket, began):
                return result
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    def _refused_long(self, bucket: Bucket, began: float) -> bool:
        """True if this process was refused a bucket's lock, time and again, for long enough since somebody began."""
        if bucket.refused is None or bucket.refused[1] - max(bucket.refused[0], began) < self.seams.lock_seconds:
            return False
        self.counters["lock.timeout"] += 1
        return True

    async def discard(self, bucket: Bucket, temporary: Temporary) -> None:
        """Remove a temporary, closed already, that will not become a block: now, or at the bucket's next visit.

        If others swept it, they have taken our lease for one that expired: we take it anew.
        """
        try:
            discarded = await self.visit(bucket, partial(bucket.discard, temporary))
        except OSError:
            discarded = Busy.BUSY
        if isinstance(discarded, Busy):
            bucket.leave_over(temporary)
        elif not discarded:
            await self._beat()

    async def clear(self, timeout_seconds: float) -> None:
        """Visit the buckets where something was left over, once; what is busy or fails stays."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                for bucket in self._buckets:
                    if bucket.has_leftovers:
                        with suppress(OSError):
                            await self.visit(bucket, lambda: None)

    async def make_room(self, number: int, need: int) -> bool:
        """The disk is full: evict blocks for so many bytes, from a bucket or, where it has none, from another.

        False if there are none, or if that was no help lately: blocks are not given up for nothing.
        """
        if asyncio.get_running_loop().time() < self._full_until:
            return False
        return await self._evict(number, need)

    async def _evict(self, number: int, need: int) -> bool:
        for bucket in [*self._buckets[number : number + 1], *await self._others(number)]:
            with suppress(OSError):
                if await self.visit(bucket, partial(bucket.make_room, need)) is True:
                    return True
        return False

    async def with_room(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Write something small that is more than a block: on a full disk once more, in the place of the oldest blocks.

        Raises what the attempt raises.
        """
        try:
            return await attempt()
        except OSError as error:
            if error.errno not in FULL:
                raise
        await self._evict(0, DISK_BLOCK_BYTES)
        return await attempt()

    async def _others(self, number: int) -> list[Bucket]:
        with suppress(OSError):
            return [self._buckets[other] for other in await self.call(self._existing_buckets) if other != number]
        return []

    def made_room(self, helped: bool) -> None:
        """What came of an eviction for a full disk. Where several were no help, others take all there is: do without
        for a while, then try one at a time."""
        self._in_vain = 0 if helped else self._in_vain + 1
        if self._in_vain >= _IN_VAIN_MAX:
            self._full_until = asyncio.get_running_loop().time() + self.seams.full_seconds

    async def sweep(self) -> None:
        """Remove what dead processes left behind: temporaries, accounts they may have left wrong, then their leases.

        Skips what is busy or fails; a lease stays until every bucket was seen to.
        """
        try:
            numbers = await self.call(self._existing_buckets)
            dead = await self.call(self.leases.dead, self.folder.leases_fd)
            await self.call(self._sweep_small)
        except OSError as error:
            self._note_failure("sweep", error)
            return
        self._after_death = {lease: self._after_death.get(lease, set()) for lease in dead}
        for number in numbers:
            await self._sweep_bucket(number)
        for lease, seen_to in self._after_death.items():
            if seen_to.issuperset(numbers):
                with suppress(OSError):
                    await self.call(self.leases.remove, self.folder.leases_fd, lease)

    async def _sweep_bucket(self, number: int) -> None:
        bucket = self._buckets[number]
        waiting = [seen_to for seen_to in self._after_death.values() if number not in seen_to]
        try:
            if not waiting and not bucket.has_leftovers and not await self.call(bucket.has_temporaries):
                return
            swept = await self.visit(bucket, bucket.sweep_after_death if waiting else bucket.sweep)
        except OSError as error:
            self._note_failure("sweep", error)
            return
        if not isinstance(swept, Busy):
            for seen_to in waiting:
                seen_to.add(number)

    def _note_failure(self, where: str, error: OSError) -> None:
        self.counters[f"{where}.{errno.errorcode.get(error.errno or 0, 'EIO')}"] += 1

    def _existing_buckets(self) -> list[int]:
        matches = map(_BUCKET_NAME.fullmatch, sorted(names_in(self.folder.fd)))
        numbers = (int(match[1], 16) for match in matches if match)
        return [number for number in numbers if number < len(self._buckets)]

    def _sweep_small(self) -> None:
        for folder_fd in self.folder.small_folders():
            for name in names_in(folder_fd):
                match = TEMPORARY_NAME.fullmatch(name)
                if match is not None and self._expired(match[1]):
                    with suppress(OSError):  # one that cannot go must not keep the others
                        os.unlink(name, dir_fd=folder_fd)

    async def keep_lease(self) -> None:
        """Beat and sweep until cancelled."""
        beat_seconds = self.seams.lease_seconds / 6
        while True:
            await self.sweep()
            for _ in range(5):
                await asyncio.sleep(beat_seconds)
                await self._beat()

    async def _beat(self) -> None:
        try:
            await self.call(self.leases.beat, self.folder.leases_fd)
        except OSError as error:
            self._note_failure("lease", error)
