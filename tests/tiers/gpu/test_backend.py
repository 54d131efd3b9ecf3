"""What the GPU tier promises around its copies: refusals, cancellation, a free event loop, a clean end."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support_gpu import MmapRows, context, job, make_worker, runs_of, transfer

from kvtier.errors import ConfigError, GeometryError, UsageError
from kvtier.tier.contract import AnswersLookups, TierContext
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import LOADED, PARTIAL, DropReason, TransferJob, dropped, failed
from kvtier_gpu import GPUBackend, GPUOptions
from kvtier_gpu.copy_plan import GroupPages
from kvtier_gpu.engines import host_memory
from kvtier_gpu.engines.host_memory import HostMemoryEngine, load_compiled
from kvtier_gpu.engines.pinned_region import PAGE_BYTES, PIECE_BYTES, PIECES_MAX, PinnedRegion, RowSlices

GEOMETRY = Geometry(KVLayout((GroupLayout((TensorRef(0, 1000),)),), block_size_factor=2))
NUM_BLOCKS, NUM_ROWS = 10, 4
WORK = job(transfer(0, runs_of([(0, 0, [1, 2]), (1, 1, [3])]), [2, 0], generation=6))
OUTCOMES = ((LOADED, PARTIAL),)


@pytest.fixture
def rows() -> Iterator[MmapRows]:
    made = MmapRows(GEOMETRY, NUM_ROWS)
    yield made
    made.close()


def tensors() -> list[torch.Tensor]:
    return make_worker(GEOMETRY, NUM_BLOCKS, "plain", np.random.default_rng(5)).tensors


async def opened(rows: MmapRows, options: GPUOptions | None = None) -> GPUBackend:
    tier = GPUBackend(options or GPUOptions())
    await tier.open(context(GEOMETRY, tensors(), rows))
    return tier


class Gate:
    """Holds every copy at its start, in a thread, until it is opened; `begun` is set in the loop by the first one."""

    def __init__(self, patch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self._open = threading.Event()
        self.begun = asyncio.Event()
        self.passed = 0
        loop, copy = asyncio.get_running_loop(), HostMemoryEngine._copy

        def gated(engine: HostMemoryEngine, *arguments: object) -> None:
            loop.call_soon_threadsafe(self.begun.set)
            assert self._open.wait(timeout=30), "the event loop never came to open the gate"
            if error is not None:
                raise error
            copy(engine, *arguments)
            self.passed += 1

        patch.setattr(HostMemoryEngine, "_copy", gated)
        patch.setattr(host_memory, "OWN_BYTES_MAX", -1)

    def open(self) -> None:
        self._open.set()


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_opening_tells_capacity_and_means(rows: MmapRows) -> None:
    tier = GPUBackend(GPUOptions(copy_threads=3))
    opened = await tier.open(context(GEOMETRY, tensors(), rows))
    mode = "cpu, 3 copy threads" + (", compiled copies" if load_compiled() else "")
    assert (opened.capacity_bytes, opened.mode, opened.space) == (NUM_BLOCKS * 1000, mode, None)
    await tier.close()


@pytest.mark.parametrize("own_bytes_max", [0, 1 << 20])
async def test_a_small_copy_needs_no_thread(rows: MmapRows, monkeypatch: pytest.MonkeyPatch, own_bytes_max) -> None:
    threads, copy = [], HostMemoryEngine._copy

    def seen(engine: HostMemoryEngine, *arguments: object) -> None:
        threads.append(threading.current_thread())
        copy(engine, *arguments)

    monkeypatch.setattr(HostMemoryEngine, "_copy", seen)
    monkeypatch.setattr(host_memory, "OWN_BYTES_MAX", own_bytes_max)
    tier = await opened(rows)
    assert (await tier.load(WORK)).outcomes == OUTCOMES
    own = bool(own_bytes_max) and load_compiled() is not None
    assert [each is threading.main_thread() for each in threads] == [own]
    await tier.close()


async def test_the_event_loop_runs_while_bytes_are_copied(rows: MmapRows, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, gate = await opened(rows), Gate(monkeypatch)
    call = asyncio.create_task(tier.load(WORK))
    await gate.begun.wait()
    await turns()
    assert not call.done()
    gate.open()
    assert (await call).outcomes == OUTCOMES
    await tier.close()


async def test_an_urgent_copy_waits_for_no_other_one(rows: MmapRows, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, begun, go_on = HostMemoryEngine._copy, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def gated(engine: HostMemoryEngine, *arguments: object) -> None:
        if not begun.is_set():
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(timeout=30)
        copy(engine, *arguments)

    monkeypatch.setattr(HostMemoryEngine, "_copy", gated)
    monkeypatch.setattr(host_memory, "OWN_BYTES_MAX", -1)
    tier = await opened(rows, GPUOptions(copy_threads=1, urgent_lane=True))
    others = [asyncio.create_task(tier.load(WORK)) for _ in range(2)]
    await begun.wait()  # one copy holds the only thread of its lane
    urgent = replace(job(transfer(0, runs_of([(0, 0, [7])]), [1])), urgent=True)
    assert (await asyncio.wait_for(tier.store(urgent), 30)).ok
    assert not any(other.done() for other in others)
    go_on.set()
    assert all(result.outcomes == OUTCOMES for result in await asyncio.gather(*others))
    await tier.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtier-copy-urgent"]


async def test_without_a_lane_for_them_urgent_copies_are_as_others(rows: MmapRows) -> None:
    tier = await opened(rows)
    assert (await tier.store(replace(job(transfer(0, runs_of([(0, 0, [7])]), [1])), urgent=True))).ok
    await tier.close()


async def test_a_cancelled_copy_ends_before_its_buffers_are_free(
    rows: MmapRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, gate = await opened(rows), Gate(monkeypatch)
    call = asyncio.create_task(tier.load(WORK))
    await gate.begun.wait()
    for _ in range(3):
        call.cancel()
        await turns()
        assert not call.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert gate.passed == 1
    await tier.close()


async def test_a_job_cancelled_before_it_began_copies_nothing(rows: MmapRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_gpu.backend.MAX_JOBS_IN_FLIGHT", 1)
    tier, gate = await opened(rows), Gate(monkeypatch)
    first = asyncio.create_task(tier.load(WORK))
    await gate.begun.wait()
    second = asyncio.create_task(tier.load(job(transfer(0, GPURuns.whole([4, 5], 2), [3]))))
    await turns()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.open()
    await first
    assert gate.passed == 1
    await tier.close()


@pytest.mark.parametrize(
    ("error", "number"),
    [(MemoryError(), errno.ENOMEM), (torch.OutOfMemoryError(), errno.ENOMEM), (OSError(), errno.EIO)],
)
async def test_a_copy_that_fails_is_an_outcome(
    rows: MmapRows, monkeypatch: pytest.MonkeyPatch, error: Exception, number: int
) -> None:
    tier, gate = await opened(rows), Gate(monkeypatch, error)
    gate.open()
    result = await tier.load(WORK)
    assert result.outcomes == ((failed(number),) * 2,)
    assert result.bytes_moved == 0
    monkeypatch.undo()
    assert (await tier.load(WORK)).outcomes == OUTCOMES
    await tier.close()


async def test_a_part_that_fails_fails_its_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks of 300 KiB on four threads: a part for each."""
    page, copy = 300 << 10, HostMemoryEngine._copy
    geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, page),)),)))
    worker, rows = make_worker(geometry, 4, "plain", np.random.default_rng(2)), MmapRows(geometry, 4)

    def fails(engine: HostMemoryEngine, part: tuple[GroupPages, ...], *arguments: object) -> None:
        if 2 in part[0].row_offsets // page:
            raise OSError("no copy")
        copy(engine, part, *arguments)

    monkeypatch.setattr(HostMemoryEngine, "_copy", fails)
    tier = GPUBackend(GPUOptions(copy_threads=4))
    await tier.open(context(geometry, worker.tensors, rows))
    result = await tier.load(job(transfer(0, GPURuns.whole(range(4)), [3, 2, 1, 0], generation=9)))
    assert result.outcomes == ((LOADED, failed(errno.EIO), LOADED, LOADED),)
    assert result.bytes_moved == 3 * page
    await tier.close()
    rows.close()


@pytest.mark.parametrize(
    "work",
    [
        job(transfer(0, GPURuns.whole([1, NUM_BLOCKS], 2), [0])),
        job(transfer(0, GPURuns.whole([1, 2], 2), [NUM_ROWS])),
        job(transfer(0, GPURuns.whole([1, 2, 3, 4], 2), [0, 0])),
    ],
    ids=["block", "row", "row twice"],
)
async def test_a_defect_of_the_caller_is_raised_before_any_byte_moves(rows: MmapRows, work: TransferJob) -> None:
    tier = GPUBackend(GPUOptions())
    mine = tensors()
    before = [tensor.clone() for tensor in mine]
    await tier.open(context(GEOMETRY, mine, rows))
    for call in (tier.load, tier.store):
        with pytest.raises(UsageError):
            await call(work)
    assert not rows.view.any()
    assert all((tensor == old).all() for tensor, old in zip(mine, before, strict=True))
    await tier.close()


async def test_closing_waits_for_copies_and_lets_go_of_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = MmapRows(GEOMETRY, NUM_ROWS)
    monkeypatch.setattr("kvtier_gpu.backend.MAX_JOBS_IN_FLIGHT", 1)
    tier, gate = await opened(rows), Gate(monkeypatch)
    first = asyncio.create_task(tier.load(WORK))
    await gate.begun.wait()
    second = asyncio.create_task(tier.load(job(transfer(0, GPURuns.whole([4, 5], 2), [3]))))
    await turns()
    closing = asyncio.create_task(tier.close())
    await turns()
    assert not closing.done()
    gate.open()
    await closing
    assert (await first).outcomes == OUTCOMES
    assert (await second).outcomes == ((dropped(DropReason.CLOSING),),)
    for call in (tier.load, tier.store):
        with pytest.raises(UsageError, match="not open"):
            await call(WORK)
    await tier.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-copy")]
    rows.close()


async def test_a_copy_that_never_ends_does_not_keep_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = MmapRows(GEOMETRY, NUM_ROWS)  # never unmapped: the stuck copy still has it
    monkeypatch.setattr("kvtier_gpu.backend.CLOSE_TIMEOUT_SECONDS", 0.01)
    tier, gate = await opened(rows), Gate(monkeypatch)
    call = asyncio.create_task(tier.load(WORK))
    await gate.begun.wait()
    await tier.close()
    assert "still in flight" in caplog.text
    assert not call.done()
    gate.open()
    await call


async def test_what_cannot_be_opened_is_refused(rows: MmapRows) -> None:
    tier = GPUBackend(GPUOptions())
    good = context(GEOMETRY, tensors(), rows)
    with pytest.raises(UsageError, match="KV tensors"):
        await tier.open(TierContext("gpu", GEOMETRY, good.namespace, good.clock, rows=rows))
    with pytest.raises(UsageError, match="rows"):
        await tier.open(context(GEOMETRY, tensors(), None))
    with pytest.raises(GeometryError, match="KV tensor 0"):
        await tier.open(context(GEOMETRY, [torch.zeros(4, 999, dtype=torch.uint8)], rows))
    wider = Geometry(KVLayout((GroupLayout((TensorRef(0, 1000),)),), block_size_factor=3))
    with pytest.raises(GeometryError, match="3000"):
        await tier.open(context(wider, tensors(), rows))
    with pytest.raises(ConfigError, match="device"):
        await GPUBackend(GPUOptions(device="cuda")).open(good)
    assert (await tier.open(good)).capacity_bytes
    with pytest.raises(UsageError, match="already"):
        await tier.open(good)
    await tier.close()


async def test_lookups_belong_to_the_engine(rows: MmapRows) -> None:
    tier = await opened(rows)
    assert not isinstance(tier, AnswersLookups)
    await tier.close()


async def test_a_job_of_nothing_succeeds_and_moves_nothing(rows: MmapRows) -> None:
    tier = await opened(rows)
    nothing = GPURuns.whole([])
    for work in (job(), job(transfer(0, nothing, [])), job(transfer(0, nothing, [1]))):
        result = await tier.load(work)
        assert result.outcomes == tuple((PARTIAL,) * len(group.keys) for group in work.groups)
        assert result.bytes_moved == 0
    assert not rows.view.any()
    await tier.close()


def test_options_are_strict() -> None:
    assert GPUOptions.model_validate({"type": "gpu", "device": "cpu", "copy_threads": 16}).copy_threads == 16
    for wrong in ({"device": "tpu"}, {"copy_threads": 0}, {"copy_threads": 17}, {"threads": 1}, {"type": "cpu"}):
        with pytest.raises(ValidationError):
            GPUOptions.model_validate(wrong)


class CountingRuntime:
    """A CUDA runtime that keeps books of registered memory and refuses the n-th registration."""

    def __init__(self, refuse: int) -> None:
        self.refuse = refuse
        self.registered: dict[int, int] = {}
        self.history: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if len(self.history) == self.refuse:
            return 2
        self.registered[address] = size
        self.history.append((address, size))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class HugeRegion:
    """The address and size of three and a half gibibytes that are never allocated."""

    row_bytes = 3 << 20
    size = (7 << 29) // row_bytes * row_bytes

    class ctypes:
        data = 1 << 40


def whole_rows() -> RowSlices:
    return RowSlices(HugeRegion.row_bytes, [(0, HugeRegion.row_bytes)])


def pinned_pages(rows: RowSlices, num_rows: int) -> set[int]:
    """The pages of a region that are pinned, each once."""
    pages: set[int] = set()
    for start, size in rows.pieces(num_rows * rows.row_bytes):
        assert start % PAGE_BYTES == size % PAGE_BYTES == 0
        own = range(start // PAGE_BYTES, (start + size) // PAGE_BYTES)
        assert pages.isdisjoint(own)
        pages.update(own)
    return pages


@pytest.mark.parametrize("pages", [(8 * 4096,), (8 * 4096, 3 * 4096), (5000, 4096, 7), (24 * 4096, 1)])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_worker_pins_the_pages_of_its_own_slices_only(pages: tuple[int, ...], world_size: int) -> None:
    groups = tuple(GroupLayout((TensorRef(index, size),)) for index, size in enumerate(pages))
    geometry, num_rows = Geometry(KVLayout(groups, world_size, 2), 4096), 7
    for worker in range(world_size):
        slices = geometry.slices(worker)
        pinned = pinned_pages(RowSlices(geometry.row_bytes, slices), num_rows)
        needed = {
            (row * geometry.row_bytes + byte) // PAGE_BYTES
            for row in range(num_rows)
            for first, end in slices
            for byte in (*range(first, end, PAGE_BYTES), end - 1)
        }
        everything = set(range(num_rows * geometry.row_bytes // PAGE_BYTES))
        assert needed <= pinned
        assert pinned == needed or (pinned == everything and 2 * len(needed) > len(everything))


def test_so_many_slices_that_pinning_each_would_take_longer_are_pinned_with_all_others() -> None:
    rows = RowSlices(8 * PAGE_BYTES, [(PAGE_BYTES, 2 * PAGE_BYTES)])
    assert len(list(rows.pieces(PIECES_MAX * rows.row_bytes))) == PIECES_MAX
    assert next(rows.pieces((PIECES_MAX + 1) * rows.row_bytes)) == (0, PIECE_BYTES)


def test_pinning_covers_the_region_in_whole_rows_and_undoes_itself() -> None:
    runtime = CountingRuntime(refuse=-1)
    pinned = PinnedRegion(runtime, HugeRegion(), whole_rows())
    assert pinned.pin() == 0
    at = HugeRegion.ctypes.data
    for address, size in runtime.history:
        assert address == at
        assert 0 < size <= PIECE_BYTES
        assert size % HugeRegion.row_bytes == 0
        at += size
    assert at == HugeRegion.ctypes.data + HugeRegion.size
    pinned.unpin()
    pinned.unpin()
    assert not runtime.registered


def test_pinning_that_is_refused_leaves_nothing_pinned() -> None:
    runtime = CountingRuntime(refuse=2)
    assert PinnedRegion(runtime, HugeRegion(), whole_rows()).pin() == 2
    assert len(runtime.history) == 2
    assert not runtime.registered
