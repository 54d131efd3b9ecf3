"""The CPU tier: blocks in rows of the shared region, copied from and to GPU blocks by the workers."""

from __future__ import annotations

import asyncio
import errno
import mmap
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from kvtier.errors import IntegrityError, KVTierError, ResourceError, UsageError
from kvtier.geometry import Geometry
from kvtier.jobs import CANCELLED, LOADED, NO_IDS, STORED, BlockOutcome, JobResult, TransferJob, failed, int_array
from kvtier.keys import CPU, OffloadKey
from kvtier.loadstore import LoadStore, LookupResult, Opened, Rows, SlotSpace, TierContext
from kvtier.options import ByteSize, PolicyName, TierOptions
from kvtier_cpu.opening import RegionHost, open_region
from kvtier_cpu.populate import private_works
from kvtier_cpu.region import RegionSpec, SharedRegion, Sharing
from kvtier_cpu.seal import Hashing, Piece, intact_rows, pieces, seal_rows
from kvtier_cpu.shares import UNSEEN, Share, all_blocks, as_tuples, whole_blocks, worst
from kvtier_cpu.threads import DaemonPool, to_the_end

POOL_THREADS = 2
CLOSE_SECONDS = 5.0
"""How long `close` waits for transfers under way before it lets go of the region without them."""


class CPUOptions(TierOptions):
    """What the CPU tier can be told."""

    type: Literal["cpu"] = "cpu"
    cpu_bytes_to_use: ByteSize = Field(description="memory for rows; never exceeded, alignment costs blocks instead")
    policy: PolicyName = Field(default="lru", description="which block goes first when the rows are full")
    free_watermark: float = Field(
        default=0.05, ge=0.0, lt=1.0, strict=False, description="share of rows kept free by background demotion"
    )
    huge_pages: bool = Field(default=True, description="ask for huge pages where the system offers them")
    populate: bool = Field(default=True, description="touch all memory at start instead of at first use")
    verify_loads: bool = Field(default=False, description="check a row's checksum again before it goes to the GPU")
    shared: Literal["auto", "private", "memfd", "named"] = Field(
        default="auto",
        description="private: memory of this process alone, in huge pages; memfd: workers live in this process or are "
        "handed descriptors; named: workers in other processes find the region by engine id; auto: named as soon as "
        "there is more than one worker, else private where huge_pages and populate allow it",
    )
    join_timeout_seconds: float = Field(
        default=300.0, gt=0, allow_inf_nan=False, strict=False, description="how long to wait for the region's creator"
    )

    def share(self, index: int, count: int) -> Self:
        """An equal part of the memory."""
        super().share(index, count)
        return self.model_copy(update={"cpu_bytes_to_use": self.cpu_bytes_to_use // count})


@dataclass(slots=True)
class CPUCounters:
    """What went wrong, in blocks; `worker_errors` counts calls of a worker that ended in an exception."""

    partial_blocks: int = 0
    unstamped_blocks: int = 0
    corrupt_rows: int = 0
    worker_errors: int = 0


_Transfer = Callable[[TierContext, SharedRegion, TransferJob], Coroutine[Any, Any, JobResult]]


class CPUBackend(LoadStore):
    """Owns the shared region. The workers in its context move the bytes; it decides what became whole.

    A store reports STORED only for blocks that every worker stamped with the issued generation, whose unused bytes
    have been cleared, and whose checksum is recorded. Where the layout is replicated, worker 0 stores for all.
    """

    medium = CPU
    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = mmap.PAGESIZE
    Options: ClassVar[type[TierOptions]] = CPUOptions

    def __init__(self, options: TierOptions, host: RegionHost | None = None) -> None:
        if not isinstance(options, CPUOptions):
            raise UsageError(f"the CPU tier needs CPUOptions, got {type(options).__name__}")
        self.options: CPUOptions = options
        self._host = host or RegionHost()
        self._region: SharedRegion | None = None
        self._context: TierContext | None = None
        self._pool = DaemonPool("kvtier-cpu", POOL_THREADS)
        self._hashing = Hashing(self._pool)
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.counters = CPUCounters()

    @property
    def rows(self) -> Rows:
        """The shared region. Raises UsageError before `open` or `join` and after `close`."""
        return self.region

    @property
    def region(self) -> SharedRegion:
        """The shared region with its views of one worker's slices."""
        if self._region is None:
            raise UsageError("the CPU tier is not open")
        return self._region

    async def open(self, context: TierContext) -> Opened:
        """Create or join the shared region as its coordinator.

        Raises GeometryError for a budget below one row, SharedMemoryError or RegionError; nothing is left behind.
        """
        world_size = context.geometry.world_size
        sharing = self._sharing(world_size)
        named = sharing is Sharing.NAMED
        spec = self._spec(context, sharing)
        spec = replace(spec, participant=world_size) if named else replace(spec, serves=tuple(range(world_size)))
        region = await self._map(context, spec)
        mode = f"{sharing}, {region.populated}" if self.options.populate else str(sharing)
        notes = () if region.complete else (f"{spec.participants} processes share the region; not all have mapped it",)
        return Opened(
            capacity_bytes=self.options.cpu_bytes_to_use,
            space=SlotSpace(
                region_bytes=spec.size_bytes,
                regions_by_root=(1,),
                slot_bytes=(spec.geometry.row_bytes,) * spec.geometry.num_groups,
            ),
            mode=mode,
            notes=notes,
        )

    async def join(self, context: TierContext, note: str = "") -> Rows:
        """Map the region as worker `context.worker` in a process of its own, without owning it.

        The processes may arrive in any order; who comes later can read `note`, a short text.
        Raises RegionError or SharedMemoryError; nothing is left behind.
        """
        if self._sharing(context.geometry.world_size) is not Sharing.NAMED:
            raise UsageError("a region without a name cannot be joined: set shared: named, and an engine_id")
        here = {"participant": context.worker, "serves": (context.worker,), "note": note}
        spec = replace(self._spec(context, Sharing.NAMED), **here)  # type: ignore[arg-type]
        return await self._map(context, spec)

    def worker_notes(self) -> list[str]:
        """What each worker said of itself. Raises ResourceError unless every worker has mapped the region."""
        if not self.region.complete:
            mapped = len(self.region.participants_mapped)
            raise ResourceError(f"{mapped} of {self.region.spec.participants} processes have mapped the shared region")
        return [self.region.note(worker) for worker in range(self.region.spec.geometry.world_size)]

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """An owned tier has no directory of its own: its control plane answers. Raises UsageError."""
        raise UsageError("the CPU tier is owned by the control plane, which answers lookups itself")

    async def store(self, job: TransferJob) -> JobResult:
        """Have every worker copy its slice of each block into its row, then make the rows whole.

        Blocks of which not all sub-blocks are named are dropped as partial and not copied at all.
        """
        return await self._tracked(self._store, job)

    async def load(self, job: TransferJob) -> JobResult:
        """Have every worker copy its slice of each row into the GPU blocks the runs name, parts of blocks included.

        The worst outcome over the workers counts. With `verify_loads`, a row that no longer matches its checksum is
        CORRUPT and not copied.
        """
        return await self._tracked(self._load, job)

    async def close(self) -> None:
        """Wait for transfers under way, up to a deadline, and release the region. Idempotent.

        Views still held, by a copy past the deadline for one, keep their memory until they go.
        """
        self._context = None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), CLOSE_SECONDS)
        region, self._region = self._region, None
        self._pool.close()
        if region is not None:
            region.close()

    async def _tracked(self, transfer: _Transfer, job: TransferJob) -> JobResult:
        context, region = self._context, self._region
        if context is None or region is None:
            raise UsageError("the CPU tier is not open")
        if not context.workers:
            raise UsageError("the CPU tier has no workers to copy with")
        self._busy += 1
        self._idle.clear()
        try:
            return await to_the_end(transfer(context, region, job))
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    async def _store(self, context: TierContext, region: SharedRegion, job: TransferJob) -> JobResult:
        geometry, started = context.geometry, context.clock()
        outcomes, shares = whole_blocks(job, geometry)
        self.counters.partial_blocks += job.num_blocks - sum(len(share.positions) for share in shares)
        reports = await self._ask(context.workers[: geometry.num_copies], "load", job, shares)
        if self._region is not region:
            return JobResult.uniform(job, CANCELLED)
        sealed: list[Piece[None]] = []
        bytes_moved = 0
        for number, share in enumerate(shares):
            group, rows = share.transfer.group, share.transfer.slots
            stamped = region.stamped(rows, share.transfer.generations).tolist()
            for i, position in enumerate(share.positions.tolist()):
                told = worst(report[number][i] for report in reports)
                outcomes[share.index][position] = STORED if told.ok and stamped[i] else told if not told.ok else UNSEEN
            kept = int_array(
                [row for row, at in zip(rows, share.positions, strict=True) if outcomes[share.index][at].ok]
            )
            sealed += pieces(seal_rows, region, geometry, group, kept)
            bytes_moved += len(kept) * geometry.kv_bytes_per_offloaded_block(group)
            self.counters.unstamped_blocks += sum(outcomes[share.index][at] is UNSEEN for at in share.positions)
        await self._hashing.do(sealed)
        return JobResult(job.job_id, as_tuples(outcomes), bytes_moved, context.clock() - started)

    async def _load(self, context: TierContext, region: SharedRegion, job: TransferJob) -> JobResult:
        geometry, started = context.geometry, context.clock()
        outcomes, shares = all_blocks(job, geometry)
        if self.options.verify_loads:
            shares = await self._verified(region, geometry, shares)
        reports = await self._ask(context.workers, "store", job, shares)
        bytes_moved = 0
        for number, share in enumerate(shares):
            told = [worst(report[number][i] for report in reports) for i in range(len(share.positions))]
            for outcome, position in zip(told, share.positions.tolist(), strict=True):
                outcomes[share.index][position] = LOADED if outcome.ok else outcome
            bytes_moved += share.pages(told) * geometry.kv_bytes_per_block(share.transfer.group)
        return JobResult(job.job_id, as_tuples(outcomes), bytes_moved, context.clock() - started)

    async def _verified(self, region: SharedRegion, geometry: Geometry, shares: list[Share]) -> list[Share]:
        """The shares less the rows that no longer match their checksum."""
        good = []
        for share in shares:
            group, rows = share.transfer.group, share.transfer.slots
            answers = await self._hashing.do(pieces(intact_rows, region, geometry, group, rows))
            intact = np.flatnonzero(np.concatenate(answers)) if answers else NO_IDS
            self.counters.corrupt_rows += len(rows) - len(intact)
            if len(intact):
                good.append(share.select(intact))
        return good

    async def _ask(
        self, workers: Sequence[LoadStore], call: Literal["load", "store"], job: TransferJob, shares: list[Share]
    ) -> list[list[Sequence[BlockOutcome]]]:
        """One report for each worker: for each share, one outcome for each block. All workers at once."""
        if not shares:
            return []
        part = replace(job, groups=tuple(share.transfer for share in shares))
        calls = [worker.load(part) if call == "load" else worker.store(part) for worker in workers]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [self._report(part, answer) for answer in answers]

    def _report(self, part: TransferJob, answer: JobResult | BaseException) -> list[Sequence[BlockOutcome]]:
        if isinstance(answer, JobResult):
            if [len(group) for group in answer.outcomes] == [len(group.keys) for group in part.groups]:
                return list(answer.outcomes)
            raise IntegrityError(f"a worker's answer to job {part.job_id} does not match its blocks")
        if isinstance(answer, KVTierError) or not isinstance(answer, (Exception, asyncio.CancelledError)):
            raise answer
        cancelled = isinstance(answer, asyncio.CancelledError)
        self.counters.worker_errors += not cancelled
        outcome = CANCELLED if cancelled else failed(getattr(answer, "errno", None) or errno.EIO)
        return list(JobResult.uniform(part, outcome).outcomes)

    async def _map(self, context: TierContext, spec: RegionSpec) -> SharedRegion:
        """Open the region on a thread. A cancelled caller leaves nothing behind."""
        if self._region is not None:
            raise UsageError("the CPU tier is open already")
        stop = threading.Event()
        self._pool.start()
        opening = asyncio.ensure_future(self._pool.run(partial(open_region, spec, replace(self._host, stop=stop))))
        try:
            region = await asyncio.shield(opening)
        except BaseException as error:
            stop.set()
            if isinstance(error, asyncio.CancelledError):
                await asyncio.wait([opening])
                if not opening.cancelled() and opening.exception() is None:
                    opening.result().close()
            self._pool.close()
            raise
        self._context, self._region = context, region
        return region

    def _sharing(self, world_size: int) -> Sharing:
        options = self.options
        if options.shared != "auto":
            return Sharing(options.shared)
        if world_size > 1:
            return Sharing.NAMED
        return Sharing.PRIVATE if options.huge_pages and options.populate and private_works() else Sharing.MEMFD

    def _spec(self, context: TierContext, sharing: Sharing) -> RegionSpec:
        geometry, options = context.geometry, self.options
        return RegionSpec(
            geometry=geometry,
            num_rows=geometry.num_blocks(options.cpu_bytes_to_use),
            namespace_digest=context.namespace.digest(),
            sharing=sharing,
            engine_id=context.engine_id,
            participants=geometry.world_size + 1 if sharing is Sharing.NAMED else 1,
            huge_pages=options.huge_pages,
            populate=options.populate,
            deadline_seconds=options.join_timeout_seconds,
        )
