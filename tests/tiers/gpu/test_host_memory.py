"""The copy engine for host memory moves the same bytes whichever means it takes, and leaves calls that have to wait."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from support_counts import full_alone
from support_gpu import MmapRows, job, make_worker, naive_copy, transfer

from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier_gpu.copy_plan import RegionShape, group_tables, plan_job
from kvtier_gpu.engines.contract import Direction
from kvtier_gpu.engines.host_memory import AVOID_SECONDS, WAITS, CopyScattered, HostMemoryEngine, load_compiled
from kvtier_gpu.kv_tensors import describe_tensors

SIZES = (1000, 4096, 40_000, 64 << 10, 600 << 10)
LAYOUT = KVLayout(
    (
        GroupLayout(tuple(TensorRef(index, size) for index, size in enumerate(SIZES))),
        GroupLayout((TensorRef(len(SIZES), 30_000),)),
    )
)
BLOCKS = 12

Clock = Callable[[], float]


def still() -> Clock:
    """No call ever takes any time."""
    return lambda: 0.0


def slow() -> Clock:
    """Every call had to wait."""
    ticks = itertools.count()
    return lambda: next(ticks) * 0.1


def now_and_then(seed: int) -> Clock:
    """Some calls had to wait, and some time passes anyhow."""
    random, at = np.random.default_rng(seed), 0.0

    def clock() -> float:
        nonlocal at
        at += float(random.choice([0.0, 1e-5, 0.01, 0.2], p=[0.5, 0.2, 0.2, 0.1]))
        return at

    return clock


CLOCKS = [pytest.param(still, id="still"), pytest.param(slow, id="slow")]
CLOCKS += [
    pytest.param(lambda seed=seed: now_and_then(seed), id=f"seed {seed}", marks=full_alone() if seed > 1 else ())
    for seed in range(6)
]


@pytest.mark.parametrize("make_clock", CLOCKS)
@pytest.mark.parametrize("style", ["plain", "strided", "packed"])
@pytest.mark.parametrize("direction", list(Direction))
def test_whatever_calls_have_to_wait_every_byte_arrives_and_no_other_changes(
    make_clock: Callable[[], Clock], style: str, direction: Direction
) -> None:
    copy_and_compare(style, direction, make_clock(), None)


@pytest.mark.parametrize("style", ["plain", "strided", "packed"])
@pytest.mark.parametrize("direction", list(Direction))
def test_compiled_copies_bring_every_byte_and_change_no_other(style: str, direction: Direction) -> None:
    copy_and_compare(style, direction, time.perf_counter, compiled_or_skip())


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


def copy_and_compare(style: str, direction: Direction, clock: Clock, compiled: CopyScattered | None) -> None:
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
    engine, ended = HostMemoryEngine(rows.view.reshape(-1), found, 1, clock, compiled), threading.Event()
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


def test_calls_that_have_to_wait_are_left_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, 64 << 10),)),)), 4096)
    rows, worker = MmapRows(geometry, 64), make_worker(geometry, 64, "plain", np.random.default_rng(1))
    found, order = describe_tensors(worker.tensors, geometry), np.random.default_rng(2).permutation(64)
    work = job(transfer(0, GPURuns.whole(order), range(64)))
    plan = plan_job(work, group_tables(geometry, 0, found), RegionShape(64, rows.row_bytes, 1), to_gpu=False)
    at, waiting, calls = 0.0, True, 0

    def clock() -> float:
        nonlocal at, calls
        calls += 1
        at += 0.02 if waiting else 0.0
        return at

    engine = HostMemoryEngine(rows.view.reshape(-1), found, 1, clock)

    def calls_of_one_copy() -> int:
        """How often the clock was asked: once before, once for the first call, once after each."""
        nonlocal calls
        calls = 0
        ended = threading.Event()
        engine.submit(plan, Direction.TO_ROWS, lambda error: ended.set())
        assert ended.wait(20)
        return calls

    engine.start()
    while_waiting = calls_of_one_copy()
    avoided = calls_of_one_copy()
    at, waiting = at + AVOID_SECONDS, False
    later = calls_of_one_copy()
    assert engine.stop(20)
    assert WAITS < while_waiting < avoided + WAITS + 4
    assert avoided < WAITS < later
    rows.close()
