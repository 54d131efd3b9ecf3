"""The CPU tier: blocks in rows of the shared region, copied from and to GPU blocks by the workers."""

from __future__ import annotations

import asyncio
import errno
import mmap
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.loop_budget import ByteBudget
from kvtier.aio.shielded_wait import shielded_wait
from kvtier.errors import ConfigError, GeometryError, IntegrityError, KVTierError, UsageError
from kvtier.options import ByteSize, PolicyName, Quota, TierOptions
from kvtier.tier.checksum import SHORT_BYTES
from kvtier.tier.contract import LoadStore, Opened, Rows, SlotSpace, TierContext
from kvtier.types.arrays import IntArray
from kvtier.types.checks import outside
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import (
    CANCELLED,
    CORRUPT,
    LOADED,
    PARTIAL,
    STORED,
    BlockOutcome,
    BlockStatus,
    GPUGroup,
    JobResult,
    TransferJob,
    failed,
)
from kvtier.types.keys import CPU, GroupIndex
from kvtier.types.values import job_value
from kvtier_cpu.region.opening import RegionHost, attach_region, open_kept, open_region
from kvtier_cpu.region.populate import HUGE_BYTES, private_works
from kvtier_cpu.region.shared_region import Populated, RegionSpec, SharedRegion, Sharing, intact_rows, seal_rows

if TYPE_CHECKING:
    from kvtier.tier.registry import DryRun
    from kvtier_cpu.region.huge_pages import HugePages

TRANSFER_OF, IS_OK = attrgetter("transfer"), attrgetter("ok")
T = TypeVar("T")

FilledRows = Sequence[tuple[GroupIndex, Sequence[int]]]
"""(group, rows) of rows that hold blocks."""

PIECE_BYTES = 4 << 20
"""Bytes that one call clears and hashes: below a millisecond, so that several jobs share the threads fairly."""
POOL_THREADS = 2
POOL_CLOSE_SECONDS = 1.0
CLOSE_SECONDS = 5.0
"""How long `close` waits for transfers in flight before it releases the region without them."""


class CPUOptions(TierOptions):
    """Options of the CPU tier."""

    CAPACITY_KEY = "cpu_bytes_to_use"

    type: Literal["cpu"] = "cpu"
    cpu_bytes_to_use: ByteSize = Field(description="memory for rows; never exceeded, alignment costs blocks instead")
    policy: PolicyName = Field(default="lru", description="which block goes first when the rows are full")
    free_watermark: float = Field(
        default=0.05, ge=0.0, lt=1.0, description="share of rows kept free by background demotion"
    )
    retained_max: Quota = Field(
        default=0.25,
        description="what hints may retain here, at most: bytes or a share such as 25%, and three quarters in any case",
    )
    huge_pages: bool = Field(default=True, description="ask for huge pages where the system offers them")
    reserved_huge_pages: bool = Field(
        default=False, description="rows in a memfd of huge pages that the host has set aside (vm.nr_hugepages)"
    )
    populate: bool = Field(default=True, description="touch all memory at start instead of at first use")
    dump_rows: bool = Field(default=False, description="let core dumps hold the rows; they contain users' prompts")
    verify_loads: bool = Field(default=False, description="check a row's checksum again before it goes to the GPU")
    shared: Literal["auto", "private", "memfd"] = Field(
        default="auto",
        description="private: memory of this process alone, in huge pages; memfd: workers live in this process or are "
        "handed descriptors; auto: private where huge_pages and populate allow it",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_names(cls, given: Any) -> Any:
        """Read what earlier releases had for rows that processes found by a name: `named`, `join_timeout_seconds`."""
        if not isinstance(given, Mapping):
            return given
        named = {"shared": "memfd"} if given.get("shared") == "named" else {}
        return {key: value for key, value in given.items() if key != "join_timeout_seconds"} | named

    @model_validator(mode="after")
    def _check_reserved(self) -> Self:
        if self.reserved_huge_pages and self.shared not in ("auto", "memfd"):
            raise ValueError("reserved_huge_pages are for rows in a memfd: leave shared out")
        if self.reserved_huge_pages and self.cpu_bytes_to_use % HUGE_BYTES:
            raise ValueError("with reserved_huge_pages cpu_bytes_to_use is a multiple of 2 MiB")
        return self

    def for_engine(self, restart_seconds: float) -> Self:
        """These, for an engine that cannot take back a hit that it has promised."""
        if self.verify_loads:
            raise ConfigError("the engine cannot take back a hit; leave verify_loads out", "stack.tiers.verify_loads")
        return self


class RowHashing:
    """Calls that hash rows, where that costs least: on the event loop for short rows, on the tier's threads for long.

    A thread would answer later than hashing a short row takes.
    """

    def __init__(self, pool: DaemonPool) -> None:
        self._pool = pool
        self._budget = ByteBudget()

    def at_once(self, region: SharedRegion, filled: FilledRows) -> bool:
        """Seal these rows now, if they are short, and few enough for this turn of the loop."""
        nbytes = longest = 0
        for group, rows in filled:
            size = region.geometry.aligned_bytes(group)
            longest, nbytes = max(longest, size), nbytes + size * len(rows)
        if longest > SHORT_BYTES or nbytes > PIECE_BYTES or not self._budget.take(nbytes):
            return False
        for group, rows in filled:
            seal_rows(region, group, np.array(rows, np.int64))
        return True

    async def each(
        self, call: Callable[[SharedRegion, int, IntArray], T], region: SharedRegion, group: int, rows: IntArray
    ) -> list[T]:
        """The results of `seal_rows` or `intact_rows` for these rows of a group, in pieces of about PIECE_BYTES."""
        nbytes = region.geometry.aligned_bytes(group)
        step = max(1, PIECE_BYTES // nbytes)
        pieces = [rows[start : start + step] for start in range(0, len(rows), step)]
        if nbytes > SHORT_BYTES:
            return await asyncio.gather(*[self._pool.run(call, region, group, piece) for piece in pieces])
        done = []
        for piece in pieces:
            await self._budget.reserve(len(piece) * nbytes)
            done.append(call(region, group, piece))
        return done


_Transfer = Callable[[TierContext, SharedRegion, TransferJob], Coroutine[Any, Any, JobResult]]


class CPUBackend(LoadStore):
    """Owns the shared region. The workers in its context copy the bytes; it decides which rows became whole.

    A store reports STORED only for blocks that every worker has copied whole, whose padding has been zeroed, and whose
    checksum is recorded. Where the layout is replicated, worker 0 stores for all.
    """

    medium = CPU
    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = mmap.PAGESIZE
    Options: ClassVar[type[TierOptions]] = CPUOptions
    options: CPUOptions

    def __init__(self, options: TierOptions, host: RegionHost | None = None) -> None:
        super().__init__(options)
        self._host = host or RegionHost()
        self._region: SharedRegion | None = None
        self._ending: SharedRegion | None = None
        self._context: TierContext | None = None
        self._huge: HugePages | None = None
        self._pool = DaemonPool("kvtier-cpu", POOL_THREADS)
        self._hashing = RowHashing(self._pool)
        self._transfers: set[asyncio.Future[Any]] = set()
        self._open_region: Callable[[RegionSpec, RegionHost], SharedRegion] = open_region
        self.counters = Counter[str]()

    @property
    def rows(self) -> SharedRegion:
        """The region. Raises UsageError before `open` and after `close`."""
        if self._region is None:
            raise UsageError("the CPU tier is not open")
        return self._region

    @property
    def huge_share(self) -> float:
        """The share of the rows' bytes that are in huge pages. Of shared rows; it grows after opening."""
        return 0.0 if self._huge is None else self._huge.share

    async def open(self, context: TierContext) -> Opened:
        """Create the region.

        Raises GeometryError for a budget below one row, SharedMemoryError or RegionError; nothing is left behind.
        """
        spec = self._spec(context)
        region, sharing = await self._map(context, spec), spec.sharing
        if sharing is Sharing.MEMFD and self.options.huge_pages and region.populated is not Populated.SKIPPED:
            from kvtier_cpu.region.huge_pages import HugePages  # most stacks have private memory

            self._huge = HugePages(region.maps[0], self.options.label)
            self._huge.open()
        mode = f"{sharing}, {region.populated}" if self.options.populate else str(sharing)
        return Opened(
            capacity_bytes=self.options.cpu_bytes_to_use,
            space=SlotSpace(
                region_bytes=spec.size_bytes,
                regions_by_root=(1,),
                slot_bytes=(spec.geometry.row_bytes,) * spec.geometry.num_groups,
            ),
            mode=mode,
        )

    def dry_run(self, geometry: Geometry, probe: bool) -> DryRun:
        """The problems of opening on this machine, if it may be looked at. Takes no memory."""
        from kvtier.tier.registry import DryRun  # for `kvtier check` alone
        from kvtier_cpu.dry_run import dry_run

        num_rows = self.options.cpu_bytes_to_use // geometry.row_bytes
        if not probe or not num_rows:
            return DryRun()
        return dry_run(
            RegionSpec(geometry, num_rows, b"", reserved=self.options.reserved_huge_pages), self._host.limits
        )

    @classmethod
    def attach(cls, context: TierContext, num_rows: int, rows_fd: int, control_fd: int) -> Rows:
        """Map a region by descriptors that its owner passed on. Raises RegionError."""
        spec = RegionSpec(context.geometry, num_rows, context.namespace.digest(), populate=False)
        return attach_region(spec, rows_fd, control_fd)

    def keep(self, rows_fd: int, control_fd: int, let_go: Callable[[], None]) -> None:
        """Have `open` take the region of a former process, if it is of these rows and blocks."""
        self._open_region = partial(open_kept, (rows_fd, control_fd), let_go)

    def use_geometry(self, geometry: Geometry) -> None:
        """Blocks are as long as this geometry says from here on, in rows that stay as they are.

        Raises GeometryError if a row is too short for one.
        """
        region, context = self.rows, self._context
        if geometry.row_bytes > region.row_bytes:
            raise GeometryError(f"a block needs {geometry.row_bytes} bytes, and a row has {region.row_bytes}")
        assert context is not None
        region.geometry, self._context = geometry, replace(context, geometry=geometry)

    def store(self, job: TransferJob) -> Coroutine[Any, Any, JobResult]:
        """Have every worker copy its slice of each block into its row, then seal the rows.

        Blocks of which not all sub-blocks are named are dropped as partial and not copied at all.
        """
        return self._transfer(self._store, job)

    def load(self, job: TransferJob) -> Coroutine[Any, Any, JobResult]:
        """Have every worker copy its slice of each row into the GPU blocks that the runs name, also parts of blocks.

        The worst outcome over the workers counts. With `verify_loads`, a row that no longer matches its checksum is
        CORRUPT and not copied.
        """
        return self._transfer(self._load, job)

    def seal(self, filled: FilledRows) -> asyncio.Future[None] | None:
        """Seal rows that other processes have filled: short ones at once, others on the tier's threads.

        `close` waits for those, as for transfers.
        """
        region = self.rows
        if self._hashing.at_once(region, filled):
            return None
        task = asyncio.ensure_future(self._seal(region, filled))
        self._transfers.add(task)
        task.add_done_callback(self._transfers.discard)
        return task

    async def _seal(self, region: SharedRegion, filled: FilledRows) -> None:
        each = [self._hashing.each(seal_rows, region, group, np.array(rows, np.int64)) for group, rows in filled]
        await asyncio.gather(*each)

    async def close(self) -> None:
        """Wait for transfers in flight, up to a deadline, and release the region. Idempotent.

        Memory that a copy past the deadline still has a view of stays mapped until that view is gone.
        """
        self._context = None
        if self._huge is not None:
            await self._pool.run(self._huge.close)
            self._huge = None
        if self._transfers:
            await asyncio.wait(self._transfers, timeout=CLOSE_SECONDS)
        self._ending, self._region = self._region or self._ending, None
        await self._pool.close(POOL_CLOSE_SECONDS)
        if self._ending is not None:
            self._ending.close()
            self._ending = None

    async def _transfer(self, transfer: _Transfer, job: TransferJob) -> JobResult:
        """Run a transfer to its end, also when cancelled: its buffers are in use until then."""
        context, region = self._context, self._region
        if context is None or region is None:
            raise UsageError("the CPU tier is not open")
        if not context.workers:
            raise UsageError("the CPU tier has no workers to copy with")
        task = asyncio.ensure_future(transfer(context, region, job))
        try:
            self._transfers.add(task)
            task.add_done_callback(self._transfers.discard)
        finally:
            result = await shielded_wait(task)
        return result

    async def _store(self, context: TierContext, region: SharedRegion, job: TransferJob) -> JobResult:
        started, geometry = context.clock(), context.geometry
        outcomes, selections = select_whole(job, geometry.num_groups, geometry.factor)
        reports = await self._copy(context.workers[: geometry.num_copies], "load", job, selections)
        if self._region is not region:
            return JobResult.uniform(job, CANCELLED)
        sealing, copied, bytes_moved = [], 0, 0
        for selection, reported in zip(selections, reports, strict=True):
            transfer, of_group = selection.transfer, outcomes[selection.index]
            copied += len(transfer.keys)
            good = list(map(IS_OK, reported))
            for position, outcome, ok in zip(selection.positions, reported, good, strict=True):
                of_group[position] = STORED if ok else outcome
            rows = transfer.rows[np.array(good)]
            bytes_moved += len(rows) * geometry.kv_bytes_per_offloaded_block(transfer.group)
            sealing.append(self._hashing.each(seal_rows, region, transfer.group, rows))
        self.counters["partial_blocks"] += sum(map(len, outcomes)) - copied
        if len(sealing) == 1:  # without a task of its own
            await sealing[0]
        else:
            await asyncio.gather(*sealing)
        return JobResult(job.job_id, tuple(map(tuple, outcomes)), bytes_moved, context.clock() - started)

    async def _load(self, context: TierContext, region: SharedRegion, job: TransferJob) -> JobResult:
        started, geometry = context.clock(), context.geometry
        outcomes, selections = select_all(job, geometry.num_groups)
        if self.options.verify_loads:
            selections = await self._verified(region, selections)
        reports = await self._copy(context.workers, "store", job, selections)
        bytes_moved = 0
        for selection, reported in zip(selections, reports, strict=True):
            of_group = outcomes[selection.index]
            for position, outcome in zip(selection.positions, reported, strict=True):
                of_group[position] = LOADED if outcome.ok else outcome
            bytes_moved += selection.pages(reported) * geometry.kv_bytes_per_block(selection.transfer.group)
        return JobResult(job.job_id, tuple(map(tuple, outcomes)), bytes_moved, context.clock() - started)

    async def _verified(self, region: SharedRegion, selections: list[BlockSelection]) -> list[BlockSelection]:
        """The selections without the rows that no longer match their checksum."""
        good = []
        for selection in selections:
            rows = selection.transfer.rows
            answers = await self._hashing.each(intact_rows, region, selection.transfer.group, rows)
            intact = [i for i, ok in enumerate(chain.from_iterable(answers)) if ok]
            self.counters["corrupt_rows"] += len(rows) - len(intact)
            if intact:
                good.append(selection.select(intact))
        return good

    async def _copy(
        self,
        workers: Sequence[LoadStore],
        call: Literal["load", "store"],
        job: TransferJob,
        selections: list[BlockSelection],
    ) -> list[Sequence[BlockOutcome]]:
        """Have all workers copy at once. For each selection one outcome for each block, the worst over the workers."""
        if not selections:
            return []
        groups = tuple(map(TRANSFER_OF, selections))
        part = job if groups == job.groups else replace(job, groups=groups)
        calls = [worker.load(part) if call == "load" else worker.store(part) for worker in workers]
        if len(calls) == 1:
            return list(self._report(part, await _answer(calls[0])))
        answers = [await _answer(each) for each in list(map(asyncio.ensure_future, calls))]
        reports = [self._report(part, answer) for answer in answers]
        return [worst(of_workers) for of_workers in zip(*reports, strict=True)]

    def _report(self, part: TransferJob, answer: JobResult | BaseException) -> tuple[tuple[BlockOutcome, ...], ...]:
        if isinstance(answer, JobResult):
            if not answer.fits(part):
                raise IntegrityError(f"a worker's result of job {part.job_id} does not match its blocks")
            return answer.outcomes
        if isinstance(answer, KVTierError) or not isinstance(answer, (Exception, asyncio.CancelledError)):
            raise answer
        cancelled = isinstance(answer, asyncio.CancelledError)
        self.counters["worker_errors"] += not cancelled
        outcome = CANCELLED if cancelled else failed(getattr(answer, "errno", None) or errno.EIO)
        return JobResult.uniform(part, outcome).outcomes

    async def _map(self, context: TierContext, spec: RegionSpec) -> SharedRegion:
        """Open the region on a thread. A cancelled caller leaves nothing behind."""
        if self._region is not None:
            raise UsageError("the CPU tier is open already")
        stop = threading.Event()
        self._pool = DaemonPool("kvtier-cpu", POOL_THREADS)
        self._hashing = RowHashing(self._pool)
        opening = asyncio.ensure_future(self._pool.run(self._open_region, spec, replace(self._host, stop=stop)))
        try:
            region = await shielded_wait(opening, stop.set)
        except BaseException:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result().close()
            self._pool.shutdown()
            raise
        self._context, self._region = context, region
        return region

    def _sharing(self) -> Sharing:
        """Private memory where that gets huge pages and is kept from a fork, unless the options say otherwise."""
        options = self.options
        if options.shared != "auto":
            return Sharing(options.shared)
        takes_private = options.huge_pages and options.populate and not options.reserved_huge_pages
        return Sharing.PRIVATE if takes_private and private_works() else Sharing.MEMFD

    def _spec(self, context: TierContext) -> RegionSpec:
        geometry, options = context.geometry, self.options
        return RegionSpec(
            geometry=geometry,
            num_rows=geometry.num_blocks(options.cpu_bytes_to_use),
            namespace_digest=context.namespace.digest(),
            sharing=self._sharing(),
            huge_pages=options.huge_pages,
            reserved=options.reserved_huge_pages,
            populate=options.populate,
            dump_rows=options.dump_rows,
        )


async def _answer(call: Awaitable[JobResult]) -> JobResult | BaseException:
    """The result or exception of a worker's call. One that is alone needs no task of its own."""
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # this transfer was cancelled, not the worker's call alone
        return error
    except Exception as error:
        return error


_BY_SEVERITY = (
    BlockStatus.LOADED,
    BlockStatus.PRESENT,
    BlockStatus.STORED,
    BlockStatus.DROPPED,
    BlockStatus.MISSING,
    BlockStatus.CANCELLED,
    BlockStatus.LATE,
    BlockStatus.FAILED,
    BlockStatus.CORRUPT,
)

Outcomes = list[list[BlockOutcome]]


@job_value
class BlockSelection:
    """Blocks of one group that the workers copy: those at `positions` in the keys of the job's group `index`.

    `transfer` is the group that the workers are given, with these blocks alone.
    """

    index: int
    positions: Sequence[int]
    transfer: GPUGroup

    def select(self, chosen: Sequence[int]) -> BlockSelection:
        """Only the `chosen` blocks, by their order in this selection."""
        if len(chosen) == len(self.positions):
            return self
        old, at = self.transfer, np.asarray(chosen, np.int64)
        transfer = replace(
            old,
            keys=tuple(old.keys[i] for i in chosen),
            runs=old.runs.select(at),
            rows=old.rows[at],
            generations=old.generations[at],
        )
        return BlockSelection(self.index, [self.positions[i] for i in chosen], transfer)

    def pages(self, outcomes: Sequence[BlockOutcome]) -> int:
        """The number of GPU pages that the blocks with a good outcome have."""
        runs = self.transfer.runs
        good = np.array([outcome.ok for outcome in outcomes], dtype=np.bool_)
        return len(runs.gpu_blocks) if good.all() else int(runs.counts[good[runs.blocks]].sum())


def select_whole(job: TransferJob, num_groups: int, factor: int) -> tuple[Outcomes, list[BlockSelection]]:
    """The blocks of a store that the workers copy: those whose runs name every sub-block exactly once.

    The outcome of the others is dropped(PARTIAL). Raises UsageError for a job that is not one of the CPU tier's.
    """
    outcomes, selections = select_all(job, num_groups, PARTIAL)
    whole = []
    for selection in selections:
        runs, count = selection.transfer.runs, len(selection.positions)
        if runs.all_whole(count, factor):
            whole.append(selection)
        elif (covered := runs.covers_whole(count, factor)).any():
            whole.append(selection.select(np.flatnonzero(covered).tolist()))
    return outcomes, whole


def select_all(
    job: TransferJob, num_groups: int, outcome: BlockOutcome = CORRUPT
) -> tuple[Outcomes, list[BlockSelection]]:
    """Every block of a job, and for each block the outcome it has if no worker copies it.

    Checks only what this tier indexes by; the GPU tier checks the rest. Raises UsageError for a job that is not one of
    the CPU tier's.
    """
    outcomes, selections = [], []
    for index, group in enumerate(job.gpu_groups):
        count = len(group.keys)
        if not 0 <= group.group < num_groups:
            raise UsageError(f"there is no group {group.group} among {num_groups}")
        if not (len(group.rows) == len(group.generations) == count):
            raise UsageError(f"{count} keys need as many rows and generations")
        if outside(group.runs.blocks, count) is not None:
            raise UsageError("a run reaches outside the job's offloaded blocks")
        outcomes.append([outcome] * count)
        if count:
            selections.append(BlockSelection(index, range(count), group))
    return outcomes, selections


def worst(reports: Sequence[Sequence[BlockOutcome]]) -> Sequence[BlockOutcome]:
    """For each block the gravest outcome that a worker reported; of equally grave ones the first."""
    return [max(outcomes, key=_severity) for outcomes in zip(*reports, strict=True)]


def _severity(outcome: BlockOutcome) -> int:
    return _BY_SEVERITY.index(outcome.status)
