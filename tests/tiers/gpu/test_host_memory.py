"""The copy engine for host memory moves the same bytes whichever means it takes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support_gpu import MmapRows, job, make_worker, naive_copy, transfer

from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier_gpu.copy_plan import RegionShape, group_tables, plan_job
from kvtier_gpu.engines.contract import Direction
from kvtier_gpu.engines.host_memory import CopyScattered, HostMemoryEngine, load_compiled
from kvtier_gpu.kv_tensors import describe_tensors

SIZES = (1000, 4096, 40_000, 64 << 10, 600 << 10)
LAYOUT = KVLayout(
    (
        GroupLayout(tuple(TensorRef(index, size) for index, size in enumerate(SIZES))),
        GroupLayout((TensorRef(len(SIZES), 30_000),)),
    )
)
BLOCKS = 12


@pytest.mark.parametrize("style", ["plain", "strided", "packed"])
@pytest.mark.parametrize("direction", list(Direction))
def test_copies_of_python_bring_every_byte_and_change_no_other(style: str, direction: Direction) -> None:
    copy_and_compare(style, direction, None)


@pytest.mark.parametrize("style", ["plain", "strided", "packed"])
@pytest.mark.parametrize("direction", list(Direction))
def test_compiled_copies_bring_every_byte_and_change_no_other(style: str, direction: Direction) -> None:
    copy_and_compare(style, direction, compiled_or_skip())


def test_pieces_of_any_length_and_place_are_copied_by_the_compiled_loop() -> None:
    copy, random = compiled_or_skip(), np.random.default_rng(3)
    for _ in range(50):
        lengths = np.concatenate((random.integers(0, 200, 20), random.integers(4000, 9000, 10), [0, 4095, 4096, 4097]))
        random.shuffle(lengths)
        source = random.integers(0, 256, 1 << 18, dtype=np.uint8)
        target = random.integers(0, 256, 1 << 18, dtype=np.uint8)
        expected = target.copy()
        at = random.integers(0, len(source) - 9000, len(lengths))
        gaps = random.integers(0, 100, len(lengths))
        to = np.cumsum(lengths + gaps) - lengths
        for start, place, length in zip(at, to, lengths, strict=True):
            expected[place : place + length] = source[start : start + length]
        copy(to + target.ctypes.data, at + source.ctypes.data, lengths)
        assert np.array_equal(target, expected)


def test_the_compiled_loop_refuses_arrays_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="2 targets, 1 sources"):
        compiled_or_skip()(np.zeros(2, np.int64), np.zeros(1, np.int64), np.zeros(2, np.int64))


def compiled_or_skip() -> CopyScattered:
    compiled = load_compiled()
    if compiled is None:
        pytest.skip("kvtier was installed without a C compiler")
    return compiled


def copy_and_compare(style: str, direction: Direction, compiled: CopyScattered | None) -> None:
    geometry, random = Geometry(LAYOUT, 4096), np.random.default_rng(1)
    rows, worker = MmapRows(geometry, 2 * BLOCKS), make_worker(geometry, BLOCKS + 1, style, random)
    rows.view[:] = random.integers(0, 256, rows.view.shape, dtype=np.uint8)
    places = random.permutation(2 * BLOCKS)
    groups = []
    for group, part in enumerate(np.array_split(places, 2)):
        blocks = np.sort(random.permutation(BLOCKS + 1)[:BLOCKS]) if group else random.permutation(BLOCKS)
        groups.append(transfer(group, GPURuns.whole(blocks), np.sort(part) if group else part))
    work = job(*groups)

    found = describe_tensors(worker.tensors, geometry)
    shape = RegionShape(rows.num_rows, rows.row_bytes, 1)
    plan = plan_job(work, group_tables(geometry, 0, found), shape, to_gpu=direction is Direction.TO_GPU)
    before_rows, before_tensors = rows.view.copy(), worker.bytes()
    engine, ended = HostMemoryEngine(rows.view.reshape(-1), found, 1, compiled), threading.Event()
    errors: list[Exception | None] = []
    engine.start()
    engine.submit(plan, direction, lambda error: (errors.append(error), ended.set()))  # type: ignore[func-returns-value]
    assert ended.wait(20)
    assert engine.stop(20)
    assert errors == [None]
    after_rows, after_tensors = rows.view.copy(), worker.bytes()

    rows.view[:] = before_rows
    for storage, content in zip(worker.storages, before_tensors, strict=True):
        storage.numpy()[:] = content
    naive_copy(geometry, work, 0, worker.tensors, rows.view, to_gpu=direction is Direction.TO_GPU)
    assert np.array_equal(after_rows, rows.view)
    assert all(np.array_equal(after, now) for after, now in zip(after_tensors, worker.bytes(), strict=True))
    rows.close()
