"""The GPU tier: copies between an engine's own KV blocks and rows of the shared region.

The tools for stores on disk import every backend, so torch is imported where tensors are used, not with this module.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.shielded_wait import shielded_wait
from kvtier.errors import ConfigError, GeometryError, ResourceError, UsageError
from kvtier.options import TierOptions
from kvtier.tier.contract import LoadStore, Opened, Rows, TierContext
from kvtier.types.jobs import (
    LOADED,
    PARTIAL,
    STORED,
    BlockOutcome,
    DropReason,
    GPUGroup,
    JobResult,
    TransferJob,
    dropped,
    failed,
)
from kvtier.types.keys import GPU, Medium
from kvtier_gpu.copy_plan import CopyPlan, GroupTable, RegionShape, group_tables, plan_job
from kvtier_gpu.engines.contract import CopyEngine, CopyFailure, Direction
from kvtier_gpu.engines.host_memory import HostMemoryEngine, load_compiled
from kvtier_gpu.kv_tensors import KVTensor, describe_tensors

if TYPE_CHECKING:
    from kvtier_gpu.engines.device import CudaDevice

POOL_CLOSE_SECONDS = 1.0
CLOSE_TIMEOUT_SECONDS = 5.0
MAX_JOBS_IN_FLIGHT = 256

_log = logging.getLogger(__name__)
T = TypeVar("T")


class GPUOptions(TierOptions):
    """Options of the GPU tier."""

    type: Literal["gpu"] = "gpu"
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where the KV tensors must be; auto: wherever they are"
    )
    cuda_copies: Literal["fastest", "kernel", "batch", "gather", "single"] = Field(
        default="fastest",
        description="how bytes move on CUDA; fastest: by measured rule, batch, and kernel for loads of pages below "
        "48 KiB; kernel: by a few of the device's multiprocessors; batch: one driver call for many copies; gather: "
        "gathered on the device first, without either; single: a copy for each page",
    )
    copy_threads: int = Field(
        default=2, ge=1, le=16, description="threads that copy when the tensors are in host memory"
    )
    urgent_lane: bool = Field(
        default=False, description="a lane of their own for urgent jobs: a thread, and on CUDA a stream and up to 4 MiB"
    )


class _Open:
    """The parts of an open tier. `running`: the tasks of jobs, so that `close` can wait for them.

    `lost`: the device takes no copy any more.
    """

    def __init__(self, context: TierContext, rows: Rows, tables: tuple[GroupTable, ...], engine: CopyEngine) -> None:
        self.context = context
        self.rows = rows
        self.tables = tables
        self.engine = engine
        self.shape = RegionShape(rows.num_rows, rows.row_bytes, context.geometry.factor)
        self.room = asyncio.Semaphore(MAX_JOBS_IN_FLIGHT)
        self.running: set[asyncio.Task[Any]] = set()
        self.lost = False


class GPUBackend(LoadStore):
    """Copies whole offloaded blocks, or the runs of them that a job names, between GPU blocks and rows.

    Staging is the job's GPURuns, slots are rows; each worker copies its own slice of a row. This is the border before
    raw pointers, so every job is checked here.
    """

    medium: ClassVar[Medium] = GPU
    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = 1
    Options: ClassVar[type[TierOptions]] = GPUOptions
    options: GPUOptions

    def __init__(self, options: TierOptions, cuda: CudaDevice | None = None) -> None:
        """`cuda` stands for the CUDA device of the KV tensors; None: they are where torch says."""
        super().__init__(options)
        self._cuda = cuda
        self._open: _Open | None = None
        self._ending: _Open | None = None
        self._closing = asyncio.Lock()

    async def open(self, context: TierContext) -> Opened:
        """Check the engine's tensors against the layout and start the copy engine.

        `context` must bring `kv_caches` and `rows`. Raises GeometryError naming the tensor that does not fit,
        ConfigError if the tensors are on another device than configured, ResourceError if the device refuses; nothing
        is left behind.
        """
        if self._open is not None:
            raise UsageError("the GPU tier is already open")
        rows = context.rows
        if context.kv_caches is None or rows is None:
            raise UsageError("the GPU tier is opened with the engine's KV tensors and the region's rows")
        tensors = describe_tensors(context.kv_caches, context.geometry)
        device = tensors[0].tensor.device
        if device.type not in ("cpu", "cuda") or self.options.device not in ("auto", device.type):
            raise ConfigError(f"the KV tensors are on {device}, not on {self.options.device}", path="device")
        tables = group_tables(context.geometry, context.worker, tensors)
        engine = self._engine(context, rows, tensors, tables)
        try:
            opened = _Open(context, rows, tables, engine)
            notes = await _off_loop(engine.start)
            result = Opened(sum(tensor.nbytes for tensor in tensors), mode=engine.mode, notes=notes)
        except BaseException as error:
            await _off_loop(lambda: engine.stop(CLOSE_TIMEOUT_SECONDS))
            if isinstance(error, RuntimeError):  # such as no thread to be had
                raise ResourceError(f"the copy engine could not be started: {error}") from error
            raise
        self._open = opened
        return result

    def _engine(
        self, context: TierContext, rows: Rows, tensors: tuple[KVTensor, ...], tables: tuple[GroupTable, ...]
    ) -> CopyEngine:
        region = _flat(rows, context.geometry.row_bytes)
        device = tensors[0].tensor.device
        options = self.options
        if device.type == "cpu" and self._cuda is None:
            compiled, urgent = load_compiled(), options.urgent_lane
            return HostMemoryEngine(region, tensors, options.copy_threads, compiled=compiled, urgent_lane=urgent)
        from kvtier_gpu.engines.cuda import CudaEngine
        from kvtier_gpu.engines.device import TorchDevice
        from kvtier_gpu.engines.pinned_region import RowSlices
        from kvtier_gpu.engines.plan_copier import CopyPath, CopySides, group_tensors

        groups = group_tensors(context.geometry, tables, tensors)
        slices = RowSlices(rows.row_bytes, context.geometry.slices(context.worker))
        cuda = self._cuda or TorchDevice(device)
        sides = CopySides(cuda, groups, region, slices, many={})
        wanted = None if options.cuda_copies == "fastest" else CopyPath(options.cuda_copies)
        return CudaEngine(sides, wanted, urgent_lane=options.urgent_lane)

    @property
    def beside_engine(self) -> bool:
        """True while it is open over tensors on a device."""
        return self._open is not None and not isinstance(self._open.engine, HostMemoryEngine)

    def fence(self) -> None:
        """Copies of jobs that are submitted from now on begin after the work that the calling thread gave its stream.

        Before a job, from the thread whose stream computes its GPU blocks or uses them. Until it is first called, the
        stream counts that was current at `open`, as it is when a copy is submitted. Does nothing in host memory.
        """
        if self._open is not None:
            self._open.engine.fence()

    def store(self, job: TransferJob) -> Coroutine[Any, Any, JobResult]:
        """Copy the job's rows into its GPU blocks: STORED for each block, failed(errno) if the device refused it.

        Once the device takes no copies any more, as after an illegal access of any kernel, every block is dropped as
        `tier_down`, here and in `load`.

        Raises UsageError before any byte moves if the job names what is not there. Ends only when none of its copies is
        in flight, also when cancelled.
        """
        return self._run(job, Direction.TO_GPU, STORED)

    def load(self, job: TransferJob) -> Coroutine[Any, Any, JobResult]:
        """Copy the job's GPU blocks into its rows: LOADED for each block, failed(errno) if the device refused it.

        Blocks whose runs do not cover every sub-block exactly once are dropped as partial: their rows are not whole.
        Raises and ends as `store` does.
        """
        return self._run(job, Direction.TO_ROWS, LOADED)

    async def close(self) -> None:
        """Wait for the copies in flight, then stop the engine; at the deadline log what is stuck. Idempotent."""
        async with self._closing:
            self._ending = opened = self._open or self._ending
            self._open = None
            if opened is None:
                return
            try:
                if opened.running:
                    await asyncio.wait(opened.running, timeout=CLOSE_TIMEOUT_SECONDS)
            finally:
                if stuck := len(opened.running):
                    _log.warning("the GPU tier is closed with %d jobs still in flight", stuck)
                await _off_loop(lambda: opened.engine.stop(0.0 if stuck else CLOSE_TIMEOUT_SECONDS))
            self._ending = None

    async def _run(self, job: TransferJob, direction: Direction, success: BlockOutcome) -> JobResult:
        opened = self._open
        if opened is None:
            raise UsageError("the GPU tier is not open")
        started = opened.context.clock()
        plan = plan_job(job, opened.tables, opened.shape, to_gpu=direction is Direction.TO_GPU)
        if direction is Direction.TO_ROWS and not opened.rows.view.flags.writeable:
            raise UsageError("the rows of this worker cannot be written: its engine only reads")
        task = asyncio.current_task()
        assert task is not None
        opened.running.add(task)
        try:
            async with nullcontext() if job.urgent else opened.room:
                if self._open is not opened or opened.lost:
                    reason = DropReason.CLOSING if self._open is not opened else DropReason.TIER_DOWN
                    return JobResult.uniform(job, dropped(reason))
                failure = await _start_copy(opened.engine, plan, direction, job.urgent)
        finally:
            opened.running.discard(task)
        seconds = opened.context.clock() - started
        outcomes = [(success,) * len(group.keys) for group in job.groups]
        if direction is Direction.TO_ROWS:
            outcomes = [_of_whole(group, opened.shape.factor, success) for group in job.gpu_groups]
        if failure is None:
            return JobResult(job.job_id, tuple(outcomes), plan.nbytes, seconds)
        refused, missed = self._refusal(opened, failure), _rows_missed(plan, failure)
        for at, group in enumerate(job.gpu_groups):
            pairs = zip(outcomes[at], group.rows.tolist(), strict=True)
            outcomes[at] = tuple([refused if row in missed else outcome for outcome, row in pairs])
        return JobResult(job.job_id, tuple(outcomes), _bytes_of_others(plan, missed), seconds)

    def _refusal(self, opened: _Open, failure: CopyFailure) -> BlockOutcome:
        """The outcome of blocks that were not copied, and a line in the log: one for a device that is lost, in all."""
        import torch

        error = failure.error
        if isinstance(error, UsageError):
            raise error
        what = f"{type(error).__name__}: {error}"
        if failure.lasting and not opened.lost:
            _log.error("the GPU tier is out of use: its device takes no copies any more (%s)", what)
        elif not failure.lasting:
            _log.warning("a GPU copy failed: %s", what)
        opened.lost = opened.lost or failure.lasting
        memory = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
        return failed(errno.ENOMEM if memory else errno.EIO)


def _flat(rows: Rows, row_bytes_needed: int) -> npt.NDArray[np.uint8]:
    """The region as one run of bytes."""
    view = rows.view
    if not view.flags.c_contiguous or view.shape != (rows.num_rows, rows.row_bytes):
        raise GeometryError(f"the region's rows must be contiguous, ({rows.num_rows}, {rows.row_bytes}) bytes")
    if rows.row_bytes < row_bytes_needed:
        raise GeometryError(f"a row of the region has {rows.row_bytes} bytes but the layout needs {row_bytes_needed}")
    return view.reshape(-1)


def _of_whole(group: GPUGroup, factor: int, success: BlockOutcome) -> tuple[BlockOutcome, ...]:
    """`success` for each block that a load has filled whole."""
    count = len(group.keys)
    if group.runs.all_whole(count, factor):
        return (success,) * count
    whole = group.runs.covers_whole(count, factor).tolist()
    return tuple([success if each else PARTIAL for each in whole])


def _rows_missed(plan: CopyPlan, failure: CopyFailure) -> frozenset[int]:
    """The rows of a plan that the failure of its copy concerns."""
    return frozenset((plan.rows if failure.rows is None else failure.rows).tolist())


def _bytes_of_others(plan: CopyPlan, missed: frozenset[int]) -> int:
    """The bytes of a plan that lie in other rows."""
    total = 0
    for pages in plan.groups:
        rows = (pages.row_offsets // plan.row_bytes).tolist()
        total += sum([row not in missed for row in rows]) * pages.table.page_bytes
    return total


def _start_copy(
    engine: CopyEngine, plan: CopyPlan, direction: Direction, urgent: bool
) -> Coroutine[Any, Any, CopyFailure | None]:
    """Submit a plan. The result is awaited for what failed; it ends only when every copy has, also if cancelled.

    The engine completes a plan on a thread of its own, or here. A loop that is closed by then has no waiter left.
    """
    here = threading.get_ident()
    loop = asyncio.get_running_loop()
    landed: asyncio.Future[CopyFailure | None] = loop.create_future()

    def done(failure: CopyFailure | None) -> None:
        if threading.get_ident() == here:
            _land(landed, failure)
            return
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_land, landed, failure)

    engine.submit(plan, direction, done, urgent)
    return shielded_wait(landed)


def _land(landed: asyncio.Future[CopyFailure | None], failure: CopyFailure | None) -> None:
    """In the loop: the copy has ended."""
    if not landed.done():
        landed.set_result(failure)


async def _off_loop(call: Callable[[], T]) -> T:
    """Run a blocking call on a daemon thread of its own and wait for its end, also when cancelled."""
    pool = DaemonPool("kvtier-gpu-setup", 1)
    try:
        ended = pool.submit(call)
        pool.shutdown()  # the thread ends with its call, also where the waiting is interrupted
        return await shielded_wait(asyncio.wrap_future(ended))
    finally:
        await pool.close(POOL_CLOSE_SECONDS)
