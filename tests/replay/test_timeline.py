"""A run over time: bounded, and with the sums of the run, whatever its length."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from kvtier.stack import TierStats
from kvtier.tools.replay.timeline import (
    COMPUTED,
    DRAIN_SECONDS,
    INTERVAL_SECONDS,
    PARTS_MAX,
    PHASES,
    SLOWEST_KEPT,
    SPANS_MAX,
    STALL_SECONDS,
    RequestPath,
    StackSnapshot,
    Timeline,
)
from kvtier.tools.whatif.stack import VirtualLoop


class Run:
    """A timeline over figures and a clock that a test sets. It begins at second 100 of the clock."""

    def __init__(self, samples_max: int = 200, requests_max: int = 1500) -> None:
        self.at = 100.0
        self.tier = TierStats(capacity_bytes=1000)
        self.backlog = 0
        self.timeline = Timeline(lambda: self.at, "virtual", samples_max, requests_max)
        self.timeline.begin(self.moment)

    def moment(self) -> StackSnapshot:
        return StackSnapshot({"fs": self.tier}, self.backlog)

    def look(self, seconds: float, **figures: Any) -> None:
        """So much later a look at the tier with these figures."""
        self.at += seconds
        self.tier = replace(self.tier, **figures)
        self.timeline.look()

    def end(self) -> dict[str, Any]:
        self.timeline.end(self.moment(), self.timeline.now)
        return self.timeline.to_json()


def path(number: int, seconds: float = 0.001, **parts: int) -> RequestPath:
    made = RequestPath(number, 0.0, sum(parts.values()), 0.0)
    for source, tokens in parts.items():
        made.add(source, tokens)
    made.end_phase("load", seconds)
    return made


def test_nothing_is_lost_from_the_sums_of_a_run_of_any_length(seed: int) -> None:
    rng, run = random.Random(seed), Run(samples_max=20)
    moved = evicted = no_row = tokens = 0
    for number in range(3000):
        moved, evicted, no_row = moved + rng.randrange(9), evicted + rng.randrange(3), no_row + rng.randrange(2)
        tokens += 16
        run.timeline.served(path(number, cpu=16))
        figures = {"load_bytes": moved, "evictions": evicted, "dropped": {"no_row": no_row}}
        run.look(INTERVAL_SECONDS * rng.random(), **figures)
    found = run.end()
    fs, times = found["tiers"]["fs"], found["times"]
    assert 10 <= len(times) <= 21
    assert times == sorted(set(times))
    assert times[-1] == pytest.approx(run.at - 100, abs=1e-5)
    assert sum(fs["load_bytes"]) == moved
    assert {what: sum(steps) for what, steps in fs["lost"].items()} == {"evicted": evicted, "dropped: no_row": no_row}
    assert sum(found["tokens"]["cpu"]) == tokens
    assert sum(found["requests_ended"]) == 3000
    assert {len(steps) for steps in (times, fs["used_bytes"], fs["load_bytes"], found["backlog"])} == {len(times)}


def test_of_many_requests_every_nth_and_the_slowest_are_kept() -> None:
    run = Run(requests_max=50)
    slow = range(7, 4000, 40)
    for number in range(1, 4001):
        run.timeline.served(path(number, seconds=9.0 if number in slow else 0.001, gpu=1))
    found = run.end()
    numbers = [request["number"] for request in found["requests"]]
    every = found["requests_every"]
    assert numbers == sorted({*range(every, 4001, every), *slow})
    assert len(numbers) <= 50 + SLOWEST_KEPT


def test_a_prompt_of_many_parts_keeps_its_tokens() -> None:
    made = RequestPath(1, 0.0, 0, 0.0)
    for _ in range(PARTS_MAX):
        made.add("cpu", 3)
        made.add("fs", 5)
    assert len(made.parts) == PARTS_MAX
    sums = {name: sum(tokens for source, tokens in made.parts if source == name) for name in ("cpu", "fs")}
    assert sums == {"cpu": 3 * PARTS_MAX, "fs": 5 * PARTS_MAX}


def test_the_first_token_is_out_after_computing() -> None:
    made = RequestPath(1, 0.0, 16, 0.0)
    for second, phase in enumerate(PHASES, start=1):
        made.end_phase(phase, float(second))
    assert made.first_token_seconds == PHASES.index("compute") + 1
    assert list(made.to_json()["phases"]) == list(PHASES)


def test_breakers_that_are_not_closed_are_spans() -> None:
    run = Run()
    for state in ("closed", "load closed, store open", "load closed, store half_open", "closed", "open: I/O is stuck"):
        run.look(1.0, breaker=state)
    run.at += 1.0
    assert run.end()["spans"] == [
        {"tier": "fs", "what": "store breaker open", "begin": 2.0, "end": 3.0},
        {"tier": "fs", "what": "store breaker half_open", "begin": 3.0, "end": 4.0},
        {"tier": "fs", "what": "breaker open: I/O is stuck", "begin": 5.0, "end": 6.0},
    ]


def test_transfers_in_flight_of_which_none_ends_are_a_span_from_the_last_that_did() -> None:
    run, step = Run(), STALL_SECONDS / 4
    busy = 0.0
    for turn in range(12):
        busy += step
        run.look(step, load_seconds=busy, load_bytes=100 if turn >= 8 else 50 if turn >= 2 else 0, store_seconds=0.0)
    found = run.end()["spans"]
    assert [(span["what"], span["begin"], span["end"]) for span in found] == [("no load ended", 3 * step, 9 * step)]


def test_an_idle_tier_is_no_span() -> None:
    run = Run()
    for _ in range(20):
        run.look(STALL_SECONDS)
    assert run.end()["spans"] == []


def test_spans_are_bounded_and_those_left_out_are_counted() -> None:
    run = Run()
    for _ in range(SPANS_MAX + 7):
        run.look(1.0, breaker="open")
        run.look(1.0, breaker="closed")
    found = run.end()
    assert (len(found["spans"]), found["spans_left_out"]) == (SPANS_MAX, 7)


def test_a_run_without_a_look_has_one_interval() -> None:
    run = Run()
    run.timeline.served(path(1, fs=16, computed=5))
    found = run.end()
    assert (found["times"], found["tokens"]) == ([0.0], {"fs": [16], COMPUTED: [5]})


def test_watching_ends_when_all_is_served_and_written() -> None:
    async def watch() -> None:
        loop, moments = asyncio.get_running_loop(), [StackSnapshot({}, 3)]
        timeline = Timeline(loop.time, "virtual")
        timeline.begin(lambda: moments[0])
        loop.call_at(5.0, timeline.all_served)
        loop.call_at(9.0, moments.__setitem__, 0, StackSnapshot({}, 0))
        await timeline.watch()
        assert 9.0 <= loop.time() <= 9.0 + timeline.interval

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(watch())


def test_watching_ends_when_nothing_more_is_written() -> None:
    async def watch() -> None:
        loop = asyncio.get_running_loop()
        timeline = Timeline(loop.time, "virtual")
        timeline.begin(lambda: StackSnapshot({}, 3))
        loop.call_at(5.0, timeline.all_served)
        await timeline.watch()
        assert DRAIN_SECONDS <= loop.time() - 5.0 <= DRAIN_SECONDS + 2 * timeline.interval

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(watch())
