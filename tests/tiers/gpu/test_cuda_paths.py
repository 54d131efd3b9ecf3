"""Which way bytes move on CUDA: chosen by rule, without a driver's call that fails when it is tried, and said."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support_cuda import FakeCuda
from support_cuda_tier import GEOMETRY, Stand, opening, small
from support_gpu import MmapRows, make_worker

from kvtier.errors import ResourceError
from kvtier.tier.contract import FencesCopies
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier_gpu import GPUBackend, GPUOptions
from kvtier_gpu.copy_plan import GroupTable
from kvtier_gpu.engines import check_copies
from kvtier_gpu.engines.contract import Direction
from kvtier_gpu.engines.plan_copier import CopyPath, path_by_rule

KERNEL, BATCH, GATHER, SINGLE = CopyPath


@pytest.fixture(autouse=True)
def small_calls() -> Iterator[None]:
    with small(descriptors=16, staging_bytes=4096):
        yield


def ways(mode: str) -> tuple[str, str]:
    """The paths to rows and to the GPU in a tier's mode."""
    _, to_rows, to_gpu = mode.split("; ")
    return to_rows.removeprefix("to_rows by "), to_gpu.removeprefix("to_gpu by ")


async def opened_with(device: FakeCuda, seed: int, copies: str = "fastest") -> tuple[str, tuple[str, ...]]:
    """The mode and the notes of a tier, which then moves a job of both groups both ways and is closed."""
    stand = Stand(device, seed)
    tier, about = await opening(device, GEOMETRY, stand.worker, stand.rows, copies=copies)
    work = stand.job(1)
    device.faults.wrong_byte = False
    want, content = stand.wanted(work), stand.worker.bytes()
    assert (await tier.load(work)).ok
    assert (stand.rows.view == want).all()
    stand.wipe(work)
    assert (await tier.store(work)).ok
    assert stand.worker.holds(content)
    await tier.close()
    assert device.violations == []
    assert device.pinned == {}
    return about.mode, about.notes


async def test_the_rule_decides_for_each_group_and_direction_and_is_said(seed: int) -> None:
    """Fragments of 64 bytes: stores by the driver's call, loads by the kernel. Of 64 KiB: the driver's call."""
    mode, notes = await opened_with(FakeCuda(seed), seed)
    assert mode == "cuda:0, 3 streams, pinned rows; to_rows by batch; to_gpu by kernel"
    assert notes == ()
    long = GroupLayout((TensorRef(2, 64 << 10),))
    layout = Geometry(KVLayout((GroupLayout((TensorRef(0, 64), TensorRef(1, 64))), long)))
    device, rows = FakeCuda(seed), MmapRows(layout, 4)
    worker = make_worker(layout, 8, "plain", np.random.default_rng(seed))
    tier, about = await opening(device, layout, worker, rows, copies="fastest")
    await tier.close()
    assert ways(about.mode) == ("batch", "kernel and batch")


@pytest.mark.parametrize("path", list(CopyPath))
async def test_a_path_that_is_wanted_is_taken(path: CopyPath, seed: int) -> None:
    mode, notes = await opened_with(FakeCuda(seed), seed, copies=path)
    assert ways(mode) == (path, path)
    assert notes == ()


@pytest.mark.parametrize(
    ("fragment_bytes", "many", "to_rows", "to_gpu"),
    [
        (64, (KERNEL, BATCH), BATCH, KERNEL),
        ((48 << 10) - 1, (KERNEL, BATCH), BATCH, KERNEL),
        (48 << 10, (KERNEL, BATCH), BATCH, BATCH),
        (64, (BATCH,), BATCH, GATHER),
        ((48 << 10) - 1, (BATCH,), BATCH, GATHER),
        (48 << 10, (BATCH,), BATCH, BATCH),
        (1 << 20, (BATCH,), BATCH, BATCH),
        (64, (KERNEL,), GATHER, KERNEL),
        (48 << 10, (KERNEL,), GATHER, GATHER),
        (512 << 10, (KERNEL,), SINGLE, SINGLE),
        (64, (), GATHER, GATHER),
        ((512 << 10) - 1, (), GATHER, GATHER),
        (512 << 10, (), SINGLE, SINGLE),
    ],
)
def test_the_rule(fragment_bytes: int, many: tuple[CopyPath, ...], to_rows: CopyPath, to_gpu: CopyPath) -> None:
    lengths = int_array([1 << 20, fragment_bytes])
    table = GroupTable(0, lengths, lengths, lengths, lengths, int(lengths.sum()), 0, 1)
    assert path_by_rule(table, Direction.TO_ROWS, many) is to_rows
    assert path_by_rule(table, Direction.TO_GPU, many) is to_gpu


RULE_WITHOUT = ("gather", "gather")
NAMES = ("the copy kernel", "cuMemcpyBatchAsync")


def failed_notes(why: str) -> tuple[str, ...]:
    """The notes if both ways to make many copies failed when they were tried."""
    return tuple(f"{name} is not used: it failed when it was tried: {why}" for name in NAMES)


async def test_without_memory_for_the_check_the_driver_is_not_used(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = FakeCuda.empty

    def no_room(device: FakeCuda, nbytes: int) -> torch.Tensor:
        if nbytes == check_copies.CHECKED_PIECES * check_copies.CHECKED_PIECE_BYTES:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(device, nbytes)

    monkeypatch.setattr(FakeCuda, "empty", no_room)
    mode, notes = await opened_with(FakeCuda(seed), seed)
    assert ways(mode) == RULE_WITHOUT
    assert notes == failed_notes("CUDA out of memory")


async def test_a_driver_that_brings_wrong_bytes_is_not_used(seed: int) -> None:
    device = FakeCuda(seed)
    device.faults.wrong_byte = True
    mode, notes = await opened_with(device, seed)
    assert ways(mode) == RULE_WITHOUT
    assert notes == failed_notes("it brought wrong bytes")


async def test_a_driver_that_refuses_is_not_used(seed: int) -> None:
    for refused in (lambda call: True, lambda call: call == 1):  # at once, or only the other direction
        device = FakeCuda(seed)
        device.faults.refuse = device.faults.refuse_launch = refused
        mode, notes = await opened_with(device, seed)
        assert ways(mode) == RULE_WITHOUT
        assert notes == failed_notes("CUDA error 1")


async def test_a_driver_that_hangs_in_its_check_does_not_hold_up_opening(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory stays until the call returns, which may be never."""
    monkeypatch.setattr(check_copies, "CHECK_SECONDS", 0.5)
    stand = Stand(FakeCuda(seed), seed)
    stand.device.faults.hangs = threading.Event()
    tier, about = await opening(stand.device, GEOMETRY, stand.worker, stand.rows, copies="batch")
    assert ways(about.mode) == RULE_WITHOUT
    assert about.notes == ("cuMemcpyBatchAsync is not used: it failed when it was tried: it did not end within 0.5 s",)
    work = stand.job(1)
    assert (await tier.load(work)).ok
    assert (stand.rows.view == stand.wanted(work)).all()
    await tier.close()
    assert stand.device.calls == []
    assert stand.device.pinned
    (left,) = [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-gpu-trial")]
    stand.device.faults.hangs.set()
    left.join(30)
    assert not left.is_alive()
    assert stand.device.pinned == {}
    assert stand.device.violations == []


ABSENT = dict.fromkeys(("function", "kernel"), "it needs the package cuda-bindings")


@pytest.mark.parametrize(
    ("device", "copies", "mode", "note"),
    [
        (ABSENT, "fastest", RULE_WITHOUT, "the copy kernel is not used: it needs the package"),
        (ABSENT, "batch", RULE_WITHOUT, "cuMemcpyBatchAsync is not used: it needs the package"),
        (ABSENT, "kernel", RULE_WITHOUT, "the copy kernel is not used: it needs the package"),
        (ABSENT, "gather", RULE_WITHOUT, None),
        ({"kernel": "no compiler"}, "fastest", ("batch", "gather"), "the copy kernel is not used: no compiler"),
        ({"capability": 10}, "fastest", ("gather", "kernel"), "it has crashed on devices as new as cuda:0"),
        ({"capability": 12}, "batch", ("batch", "batch"), None),
    ],
)
async def test_where_the_driver_is_not_asked_the_others_are_used(
    device: dict[str, str | int], copies: str, mode: tuple[str, str], note: str | None, seed: int
) -> None:
    made = FakeCuda(seed, **device)
    found, notes = await opened_with(made, seed, copies)
    assert ways(found) == mode
    wanted = 0 if note is None else 2 if device is ABSENT and copies == "fastest" else 1
    assert (len(notes), note is None or note in notes[0]) == (wanted, True)
    assert bool(made.calls) == ("batch" in mode)
    assert bool(made.launches) == ("kernel" in mode)


async def test_rows_that_are_not_pinned_are_copied_as_before(seed: int) -> None:
    """Without the driver's call, which a copy of pageable memory would hold up."""
    device = FakeCuda(seed)
    device.faults.register_error = 2
    mode, notes = await opened_with(device, seed)
    assert mode == "cuda:0, 3 streams, pageable rows; to_rows by gather; to_gpu by gather"
    assert notes == ("the region is not pinned (CUDA error 2): copies are slow and synchronous",)
    assert device.calls == device.launches == []


async def test_a_device_without_room_for_a_stream_is_refused_and_nothing_is_left(seed: int) -> None:
    stand = Stand(FakeCuda(seed), seed)
    stand.device.faults.no_memory = True
    with pytest.raises(ResourceError, match="cuda:0 has no room"):
        await opening(stand.device, GEOMETRY, stand.worker, stand.rows)
    assert stand.device.pinned == {}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-to_")]
    stand.device.faults.no_memory = False
    tier, _ = await opening(stand.device, GEOMETRY, stand.worker, stand.rows)
    await tier.close()


def test_options_name_the_ways() -> None:
    for copies in ("fastest", *CopyPath):
        assert GPUOptions.model_validate({"type": "gpu", "cuda_copies": str(copies)}).cuda_copies == copies
    assert isinstance(GPUBackend(GPUOptions()), FencesCopies)
