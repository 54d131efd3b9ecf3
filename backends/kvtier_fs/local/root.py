"""An open root: its folder, threads, I/O engine and queue, its superblock and the table of its regions."""

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.loop_budget import TimeBudget
from kvtier.errors import RootError
from kvtier_fs.format.region_header import RegionHeader, RegionPlan, encode_region_header
from kvtier_fs.format.slot_map import SlotMap
from kvtier_fs.format.snapshot import Snapshot, StoredFormat, encode_snapshot
from kvtier_fs.format.superblock import Superblock, encode_superblock
from kvtier_fs.io.contract import HeaderPages, IOEngine, IOKind
from kvtier_fs.io.full_transfer import FullTransferIO
from kvtier_fs.io.probe import DirectProbe
from kvtier_fs.local.folder import SlabFolder

P = ParamSpec("P")
T = TypeVar("T")
_FILE_THREADS = _CHECK_THREADS = 2


@dataclass(frozen=True, slots=True)
class RootPools:
    """The threads of one root: for calls on files, for reading and writing blocks, for checking what was read.

    Each kind has its own, so that calls that a disk does not answer hold up none of the others.
    """

    files: DaemonPool
    io: DaemonPool
    checks: DaemonPool

    @staticmethod
    def of(path: str, io_threads: int) -> "RootPools":
        """The threads of a root; none of them is started yet."""
        name = f"kvtier-fs-{os.path.basename(path)}"
        return RootPools(
            DaemonPool(f"{name}-files", _FILE_THREADS),
            DaemonPool(f"{name}-io", io_threads),
            DaemonPool(f"{name}-checks", _CHECK_THREADS),
        )

    async def begin(self) -> None:
        """Have a thread for calls on files and one for checks, so that it is known early if there is none to be had.

        Raises OSError. An engine that finds no thread later says so request by request.
        """
        for threads in (self.files, self.checks):
            await asyncio.wrap_future(threads.submit(lambda: None))

    async def close(self, timeout_seconds: float) -> int:
        """Let all of them end. Returns how many are stuck at the deadline."""
        each = (self.io, self.checks, self.files)
        return sum(await asyncio.gather(*(threads.close(timeout_seconds) for threads in each)))


@dataclass(slots=True)
class RegionState:
    """The state of a region in this session: its format, and whether its header is on the disk.

    `errno` is why it is not, when formatting failed. `allocated`: its blocks are reserved.
    """

    slot_bytes: int = 0
    generation: int = 0
    ready: bool = False
    allocated: bool = False
    errno: int = 0


class Root:
    """A root from the moment its lock is held. All methods run on the event loop; file calls go to its threads."""

    def __init__(self, folder: SlabFolder, pools: RootPools, probe: DirectProbe) -> None:
        self.folder = folder
        self.pools = pools
        self.probe = probe
        self.stored: Superblock | None = None
        self.engine: IOEngine | None = None
        self.superblock: Superblock
        self.snapshot: Snapshot | None = None
        self.slot_map: SlotMap
        self.plan: RegionPlan
        self.io: FullTransferIO
        self.budget: TimeBudget
        self.first_region = 0
        self.regions: list[RegionState] = []
        self.unready: set[int] = set()
        self.fds: dict[int, int] = {}
        self._formatting: dict[int, asyncio.Task[None]] = {}
        self._superblock_lock = asyncio.Lock()
        self._sequence = 0
        self._durable_epochs: dict[bytes, int] = {}
        self._durable_floor = -1

    @property
    def path(self) -> str:
        return self.folder.path

    def take_plan(self, plan: RegionPlan, slot_map: SlotMap) -> None:
        """Lay the root out."""
        self.plan, self.slot_map = plan, slot_map
        self.slot_map.clear()
        self.regions = [RegionState() for _ in range(self.plan.regions)]
        self.unready.clear()

    def forget_from(self, plan: RegionPlan) -> None:
        """The root has fewer regions from now on, those of this plan."""
        self.plan = plan
        self.slot_map.forget_from(plan.regions)
        del self.regions[plan.regions :]
        for number in [number for number in self.fds if number >= plan.files]:
            del self.fds[number]

    def hold_engine(self, engine: IOEngine) -> None:
        """The engine that is to be closed with this root."""
        self.engine = engine

    def start(self, io: FullTransferIO, budget: TimeBudget) -> None:
        """Bytes can move from now on. `budget` is the time that each kind of work takes in a turn of the loop."""
        self.io, self.budget = io, budget

    async def call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a file call on the root's threads. Raises what it raises, or OSError if there is no thread to be had."""
        return await asyncio.wrap_future(self.pools.files.submit(fn, *args, **kwargs))

    async def write_superblock(self, block: Superblock) -> None:
        """Make a superblock durable; it is the current one from then on. Raises RootError."""
        async with self._superblock_lock:
            await self._write_superblock(block)

    async def raise_epoch(self, namespace: bytes, epoch: int) -> None:
        """Make everything of our namespace before `epoch` unreachable, durably.

        Raises RootError if that failed; it may have taken hold all the same, and does with the next superblock.
        """
        async with self._superblock_lock:
            self.superblock = self.superblock.with_epoch(namespace, epoch)
            self.slot_map.reset(self.superblock.epoch(namespace))
            await self._write_superblock(self.superblock)

    async def _write_superblock(self, block: Superblock) -> None:
        # A failed write may have left one copy behind, so no sequence is used twice.
        self._sequence = max(self._sequence, block.sequence) + 1
        block = replace(block, sequence=self._sequence)
        if not block.possible:
            raise RootError(
                self.path, "an epoch or a counter is beyond what a superblock can state; it is left as it is"
            )
        try:
            await self.call(self.folder.write_superblock, encode_superblock(block))
        except OSError as error:
            raise RootError(self.path, f"the superblock cannot be written ({error.strerror})") from error
        self.superblock = block
        self._durable_epochs = {namespace: entry.epoch for namespace, entry in block.namespaces}
        self._durable_floor = block.floor_epoch

    def is_epoch_durable(self, namespace: bytes, epoch: int) -> bool:
        """True if the disk states this epoch of a namespace or a later one; after a crash no other reset gets it."""
        return self._durable_epochs.get(namespace, self._durable_floor) >= epoch

    async def write_snapshot(self, limit: int) -> None:
        """Write down what the slots hold, for the next open. Raises OSError (EFBIG if it is over `limit` bytes)."""
        formats = [StoredFormat(state.slot_bytes if state.ready else 0, state.generation) for state in self.regions]
        data = await self.call(encode_snapshot, self.superblock, formats, self.slot_map)
        if len(data) > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        await self.call(self.folder.write_snapshot, data)

    async def open_slab(self, number: int) -> int:
        """The slab file of a number, open. Raises OSError."""
        if number not in self.fds:
            self.fds[number] = await self.call(self.folder.slab, number)
        return self.fds[number]

    def format_region(self, region: int, slot_bytes: int, generation: int) -> None:
        """Give a region to slots of one size, from now on; its header is written in the background."""
        state = self.regions[region]
        if generation <= state.generation:
            return
        self.unready.add(region)
        state.slot_bytes, state.generation, state.ready = slot_bytes, generation, False
        self.slot_map.format(region, generation, self.plan.slots(slot_bytes))
        self._begin_format(region)

    def format_pending(self, region: int) -> asyncio.Task[None] | None:
        """The task that a store into a region waits for, None if nothing; a format that failed is tried once more."""
        if region not in self.unready:
            return None
        task = self._formatting.get(region)
        return task if task is not None and not task.done() else self._begin_format(region)

    def _begin_format(self, region: int) -> asyncio.Task[None]:
        before = self._formatting.get(region)
        task = asyncio.create_task(self._write_format(region, before), name=f"format region {region}")
        self._formatting[region] = task
        task.add_done_callback(lambda ended: self._on_format_end(region, ended))
        return task

    def _on_format_end(self, region: int, task: asyncio.Task[None]) -> None:
        if self._formatting.get(region) is task:
            del self._formatting[region]

    async def _write_format(self, region: int, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        state = self.regions[region]
        generation = state.generation
        header = RegionHeader(self.superblock.root_uuid, region, state.slot_bytes, generation)
        number = 0
        try:
            if not state.allocated:
                self.fds[self.plan.file_of(region)] = await self.call(self.folder.allocate, self.plan, region)
                state.allocated = True
            number = await self._write_region_header(header)
        except RootError:
            number = errno.EIO
        except OSError as error:
            number = error.errno or errno.EIO
        if number:
            self.io.count_error(number)
        if state.generation == generation:
            state.ready, state.errno = not number, number
            if state.ready:
                self.unready.discard(region)

    async def _write_region_header(self, header: RegionHeader) -> int:
        """Write a region's header page. Returns an errno, 0 when it is written."""
        pages = HeaderPages(1, self.plan.header_bytes)
        encode_region_header(header, pages.pages[0])
        fd, offset = self.fds[self.plan.file_of(header.region)], self.plan.region_offset(header.region)
        (number,) = await self.io.move(IOKind.WRITE, pages.pages, [(fd, offset)])
        return number

    async def wait_formats(self) -> None:
        """Wait for the region headers that are being written."""
        if self._formatting:
            await asyncio.wait(self._formatting.values())

    @property
    def requests_in_flight(self) -> int:
        """Requests of the I/O engine that have not ended."""
        return self.engine.in_flight if self.engine is not None else 0

    async def stop_engine(self, timeout_seconds: float) -> int:
        """Release the I/O engine. Returns how many requests have not ended at the deadline; then it is as it was."""
        return await self.engine.close(timeout_seconds) if self.engine is not None else 0
