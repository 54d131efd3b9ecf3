"""Which way bytes move on CUDA: tried when the tier opens, chosen by rule where that is not possible, and said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support_cuda import Costs, FakeCuda
from support_cuda_tier import GEOMETRY, Stand, opening, small
from support_gpu import MmapRows, make_worker

from kvtier.errors import ResourceError
from kvtier.tier_api.contract import FencesCopies
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier_gpu import GPUBackend, GPUOptions
from kvtier_gpu.copy_plan import GroupTable
from kvtier_gpu.engines import path_trial
from kvtier_gpu.engines.contract import Direction
from kvtier_gpu.engines.copy_paths import CopyPath, path_by_rule

BATCH, GATHER, SINGLE = CopyPath


@pytest.fixture(autouse=True)
def short_trials() -> Iterator[None]:
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


@pytest.mark.parametrize("path", list(CopyPath))
async def test_the_fastest_path_is_found_and_said(path: CopyPath, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    device = FakeCuda(seed)
    device.costs = Costs.favouring(path)
    with caplog.at_level(logging.INFO, "kvtier_gpu"):
        mode, notes = await opened_with(device, seed)
    assert mode == f"cuda:0, 3 streams, pinned rows; to_rows by {path}; to_gpu by {path}"
    assert notes == ()
    tried = [record.getMessage() for record in caplog.records if "in fragments of" in record.getMessage()]
    heads = [f"copies {way} of pages in fragments of {size} bytes" for size in ("64 to 128", "64") for way in Direction]
    assert [line.partition(": ")[0] for line in tried] == heads


async def test_groups_and_directions_have_paths_of_their_own(seed: int) -> None:
    """Here a gather costs as much as 20 copies: it pays for the 60 fragments of 30 pages, not for 60 of 60."""
    layout = Geometry(KVLayout((GroupLayout((TensorRef(0, 64), TensorRef(1, 64))), GroupLayout((TensorRef(2, 64),)))))
    device, rows = FakeCuda(seed), MmapRows(layout, 4)
    worker = make_worker(layout, 8, "plain", np.random.default_rng(seed))
    device.costs = Costs(copy=1e-6, operations={"move_pages": 1e-3, "gather": 20e-6, "scatter": 1e-3})
    tier, about = await opening(device, layout, worker, rows, copies="fastest")
    await tier.close()
    assert ways(about.mode) == ("gather and batch", "batch")


@pytest.mark.parametrize("path", list(CopyPath))
async def test_a_path_that_is_wanted_is_taken_without_a_trial(path: CopyPath, seed: int) -> None:
    device = FakeCuda(seed)
    device.costs = Costs.favouring(next(other for other in CopyPath if other is not path))
    mode, notes = await opened_with(device, seed, copies=path)
    assert ways(mode) == (path, path)
    assert notes == ()


@pytest.mark.parametrize(
    ("fragment_bytes", "batch", "to_rows", "to_gpu"),
    [
        (64, True, BATCH, GATHER),
        ((28 << 10) - 1, True, BATCH, GATHER),
        (28 << 10, True, BATCH, BATCH),
        (1 << 20, True, BATCH, BATCH),
        (64, False, GATHER, GATHER),
        ((256 << 10) - 1, False, GATHER, GATHER),
        (256 << 10, False, SINGLE, SINGLE),
    ],
)
def test_the_rule_for_what_was_not_tried(fragment_bytes: int, batch: bool, to_rows: CopyPath, to_gpu: CopyPath) -> None:
    lengths = int_array([1 << 20, fragment_bytes])
    table = GroupTable(0, lengths, lengths, lengths, lengths, int(lengths.sum()), 0, 1)
    assert path_by_rule(table, Direction.TO_ROWS, batch=batch) is to_rows
    assert path_by_rule(table, Direction.TO_GPU, batch=batch) is to_gpu


RULE_WITH_BATCH, RULE_WITHOUT = ("batch", "gather"), ("gather", "gather")


async def test_without_time_the_rule_decides(seed: int) -> None:
    """Each run takes longer than all trials may."""
    device = FakeCuda(seed)
    device.costs = Costs(call=2 * path_trial.TRIAL_SECONDS, operations={"gather": 99.0})
    mode, notes = await opened_with(device, seed)
    assert ways(mode) == RULE_WITH_BATCH
    assert notes == ()


async def test_without_memory_for_a_trial_the_rule_decides(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeCuda(seed)
    device.costs = Costs.favouring(SINGLE)
    monkeypatch.setattr(path_trial, "TRIAL_BYTES_MAX", 0)
    assert ways((await opened_with(device, seed))[0]) == RULE_WITH_BATCH
    monkeypatch.undo()
    device, empty = FakeCuda(seed), FakeCuda.empty

    def no_room(device: FakeCuda, nbytes: int) -> torch.Tensor:
        if nbytes in (30 * 192, 60 * 64):  # those of trials
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(device, nbytes)

    monkeypatch.setattr(FakeCuda, "empty", no_room)
    mode, notes = await opened_with(device, seed)
    assert ways(mode) == RULE_WITH_BATCH
    assert notes == ("not all ways to copy could be tried: CUDA out of memory",)


async def test_a_driver_that_brings_wrong_bytes_is_not_used(seed: int) -> None:
    device = FakeCuda(seed)
    device.faults.wrong_byte = True
    mode, notes = await opened_with(device, seed)
    assert "batch" not in mode
    assert notes == ("copies by batch failed when they were tried: wrong bytes arrived",)


async def test_a_driver_that_refuses_is_not_used(seed: int) -> None:
    for refused in (lambda call: True, lambda call: call == 4):  # at once, or only when a group is tried
        device = FakeCuda(seed)
        device.faults.refuse = refused
        mode, notes = await opened_with(device, seed)
        assert "batch" not in mode
        assert notes == ("copies by batch failed when they were tried: cuMemcpyBatchAsync: CUDA error 1",)


async def test_a_driver_that_hangs_in_a_trial_does_not_hold_up_opening(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory stays until the call returns, which may be never."""
    monkeypatch.setattr(path_trial, "HANG_SECONDS", 0.5)
    stand = Stand(FakeCuda(seed), seed)
    stand.device.faults.hangs = threading.Event()
    tier, about = await opening(stand.device, GEOMETRY, stand.worker, stand.rows, copies="batch")
    assert ways(about.mode) == RULE_WITHOUT
    assert about.notes == ("the ways to copy could not be tried: they did not end within 0.5 s",)
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


@pytest.mark.parametrize(
    ("device", "copies", "mode", "note"),
    [
        ({"function": "it needs the package cuda-bindings"}, "fastest", None, "not used: it needs the package"),
        ({"function": "it needs the package cuda-bindings"}, "batch", RULE_WITHOUT, "not used: it needs the package"),
        ({"capability": 10}, "fastest", None, "it has crashed on devices as new as cuda:0"),
        ({"capability": 12}, "batch", ("batch", "batch"), None),
        ({"function": "it needs the package cuda-bindings"}, "gather", RULE_WITHOUT, None),
    ],
)
async def test_where_the_driver_is_not_asked_the_others_are_used(
    device: dict[str, str | int], copies: str, mode: tuple[str, str] | None, note: str | None, seed: int
) -> None:
    made = FakeCuda(seed, **device)
    made.costs = Costs.favouring(SINGLE)
    found, notes = await opened_with(made, seed, copies)
    assert ways(found) == (mode or ("single", "single"))
    assert (len(notes), note is None or note in notes[0]) == (int(note is not None), True)
    if mode != ("batch", "batch"):
        assert made.calls == []


async def test_rows_that_are_not_pinned_are_copied_as_before(seed: int) -> None:
    """Without the driver's call, which a copy of pageable memory would hold up, and without a trial."""
    device = FakeCuda(seed)
    device.costs = Costs.favouring(SINGLE)
    device.faults.register_error = 2
    mode, notes = await opened_with(device, seed)
    assert mode == "cuda:0, 3 streams, pageable rows; to_rows by gather; to_gpu by gather"
    assert notes == ("the region is not pinned (CUDA error 2): copies are slow and synchronous",)
    assert device.calls == []


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
