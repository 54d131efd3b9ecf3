"""Engines and stack processes that are killed while copies, fills and leases are open."""

from __future__ import annotations

import os
import random
import select
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support_served import Served, served
from support_service import TestEngine, block_keys, on_disk, stack_process, stack_text, until
from support_victims import NUMBERS, RUN, Victims, freeze_while, victims

from kvtier.service import listener
from kvtier.types.jobs import JobKind

STORE, LOAD = JobKind.STORE, JobKind.LOAD
KINDS = ("engine", "worker", "scheduler")
ROWS = 1024
"""Fewer than the blocks of the victims, so that rows are used again."""
BACK_SECONDS = 1.0


@pytest.fixture
def many_greetings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Victims come faster than a stack process lets engines connect in the long run, which is four a second."""
    monkeypatch.setattr(listener, "GREETINGS_PER_SECOND", 1000.0)


def strike(found: Victims, rng: random.Random) -> tuple[float, dict[str, int]]:
    """Kill a victim, most often with something open. (The time of its exit, what was open.)"""
    until(lambda: found.pid, "the victim serves")
    pidfd = os.pidfd_open(found.pid)
    try:
        wants = rng.choice(("copy", "fill", "lease", ""))
        time.sleep(rng.random() * 0.03)
        freeze_while([found], lambda: wants != "" and bool(found.open()[wants]), rng.random() * 0.1 + 2.0 * bool(wants))
        os.kill(found.pid, signal.SIGKILL)
        select.select([pidfd], [], [], 30)
        return time.monotonic(), found.open()
    finally:
        os.close(pidfd)


def are_free(service: Served) -> bool:
    """True once the rows of all engines but one are free again."""

    def look() -> bool:
        pool = service.server.pool
        return len(service.server._engines) == 1 and len(pool.sessions) == 1

    return service.run(look) and service.rows().get("QUARANTINED", 0) == 0


def loads_right(witness: TestEngine, rng: random.Random, counts: Counter[str]) -> None:
    """Load blocks of the victims: the bytes that were stored, or a miss."""
    first = rng.randrange(0, NUMBERS - 32, RUN)
    counts.update(witness.load(range(first, first + 32), f"w{counts.total()}"))


@pytest.mark.usefixtures("many_greetings")
@pytest.mark.parametrize("strikes", [None, pytest.param(1000, marks=pytest.mark.long)])
def test_killed_engines_leave_right_bytes_and_no_row_behind(
    strikes: int | None, tmp_path: Path, seed: int, dial: Callable[[int, int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines and workers are killed, at least half of them with something open."""
    kill_engines(strikes or dial(60, 10), KINDS, tmp_path, random.Random(seed), capsys)


@pytest.mark.usefixtures("many_greetings")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.timeout(600)
def test_engines_killed_while_they_copy_on_a_device_leave_right_bytes(
    tmp_path: Path, seed: int, dial: Callable[[int, int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    kill_engines(dial(100, 20), ("cuda",), tmp_path, random.Random(seed), capsys)


def kill_engines(
    strikes: int, kinds: Sequence[str], tmp_path: Path, rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill engines one after another beside one that lives. After each strike rows are back, and bytes are right."""
    counts, opens, took = Counter[str](), Counter[str](), list[float]()
    stack = stack_text(ROWS, tmp_path / "root")
    with served(tmp_path, stack) as service, TestEngine(service.path) as witness:
        with victims(service.path, tmp_path) as found:
            for _ in range(strikes):
                found.begin(rng.randrange(1 << 30), kind := rng.choice(kinds))
                exited, was_open = strike(found, rng)
                opens.update([what for what, number in was_open.items() if number] or ["nothing"])
                opens["strikes with something open"] += any(was_open.values())
                opens[kind] += 1
                until(lambda: are_free(service), "rows are back")
                took.append(time.monotonic() - exited)
                loads_right(witness, rng, counts)
        assert witness.store(range(2000, 2016)) == ["stored"] * 16
        assert witness.load(range(2000, 2016)) == ["hit"] * 16
    with capsys.disabled():
        print(f"\n{strikes} strikes: {dict(opens)}; loads {dict(counts)}", end="; ")
        print(f"rows back after {statistics.median(took):.3f} s in the median, {max(took):.3f} s at most")
    assert opens["strikes with something open"] >= strikes / 2
    assert counts["hit"] > 0
    assert statistics.median(took) <= BACK_SECONDS
    assert not set(counts) - {"hit", "missing"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_engine_costs_the_others_nothing(
    kind: str, tmp_path: Path, seed: int, dial: Callable[[int, int], int]
) -> None:
    """It holds what it has open and no more, and goes on where it was."""
    seconds, first = dial(60, 1) / 2, 10_000
    with (
        served(tmp_path, stack_text(ROWS, tmp_path / "root")) as service,
        TestEngine(service.path) as witness,
        victims(service.path, tmp_path) as found,
    ):
        found.begin(seed, kind)
        until(lambda: found.pid and any(found.open().values()), "something is open")
        os.kill(found.pid, signal.SIGSTOP)
        try:
            was_open, end = found.open(), time.monotonic() + seconds
            while time.monotonic() < end:
                assert witness.store(range(first, first + 16)) == ["stored"] * 16
                assert witness.load(range(first, first + 16), f"w{first}") == ["hit"] * 16
                first += 16
            rows = service.rows()
            assert rows.get("FREE", 0) + rows.get("READY", 0) >= ROWS // 2
        finally:
            os.kill(found.pid, signal.SIGCONT)
        if kind != "worker":  # the state is that of the whole engine, whose scheduler went on
            until(lambda: found.open() != was_open, "it goes on")
        loads_right(witness, random.Random(seed), Counter())
        os.kill(found.pid, signal.SIGKILL)
        until(lambda: are_free(service), "rows are back")


@pytest.mark.parametrize("kills", [None, pytest.param(1000, marks=pytest.mark.long)])
def test_a_killed_stack_process_costs_engines_misses_alone(
    kills: int | None, tmp_path: Path, seed: int, dial: Callable[[int, int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its engine has jobs, leases and questions open. No job waits for ever, and what the next process finds on the
    disk has the right bytes."""
    kills = kills or dial(50, 3)
    rng, counts = random.Random(seed), Counter[str]()
    stack, path = tmp_path / "stack.yaml", str(tmp_path / "socket")
    figures = str(tmp_path / "figures")
    stack.write_text(stack_text(2048, tmp_path / "root", stats_socket=figures))
    for life in range(kills):
        with stack_process(stack, path) as process, TestEngine(path) as engine:
            before, first = max(life - 1, 0) * 64, life * 64  # none twice: the disk stores no block that it has
            counts.update(engine.load(range(before, before + 64), "before"))
            assert engine.store(range(first, first + 64)) == ["stored"] * 64
            if life % 2:
                until(lambda: on_disk(figures) >= 64, "the disk has them")
            request = engine.reserve(range(first, first + RUN), "held")
            engine.step_until(lambda: len(engine.client.core._lent) >= RUN, "rows are lent")
            jobs = [
                engine.begin(STORE, range(first, first + RUN)),
                engine.begin(LOAD, range(first, first + RUN), request),
            ]
            engine.client.request("asked", block_keys(RUN))
            time.sleep(rng.random() * 0.004)
            process.kill()
            for job in jobs:
                assert set(engine.finish(job)) <= {"stored", "present", "dropped", "loaded", "missing"}
            engine.step_until(lambda: not engine.client.core.connected, "the end is seen")
            assert engine.load(range(8), "after") == ["missing"] * 8
            assert not engine.client.has_pending_work
    with capsys.disabled():
        print(f"\n{kills} kills; loads {dict(counts)}")
    assert counts["hit"] > 0
    assert not set(counts) - {"hit", "missing"}
