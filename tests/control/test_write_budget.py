"""A write budget: never more in any 24 hours, and used up on days that offer more."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import accumulate

import pytest
from support_counts import full_alone

from kvtier.policy.write_budget import DAY_SECONDS, WriteBudget

BLOCK = 1 << 20
HOUR = 3600.0


def run(budget: WriteBudget, offers: list[tuple[float, float]]) -> list[tuple[float, int, float]]:
    """Offer blocks at (time, expected hits). Returns (time, bytes, expected hits) of those that were written."""
    written, latest = [], offers[0][0]
    for time, hits in offers:
        latest = max(latest, time)
        budget.advance(latest)
        if budget.can_admit(hits, BLOCK):
            budget.record_admitted(BLOCK)
            budget.record_sent(BLOCK)
            written.append((latest, BLOCK, hits))
    return written


def most_in_a_day(written: list[tuple[float, int, float]]) -> int:
    times = [time for time, _, _ in written]
    sums = [0, *accumulate(size for _, size, _ in written)]
    return max(
        (sums[at + 1] - sums[bisect_left(times, time - DAY_SECONDS)] for at, time in enumerate(times)), default=0
    )


def on_day(written: list[tuple[float, int, float]], day: int) -> int:
    return sum(size for time, size, _ in written if day <= time / DAY_SECONDS < day + 1)


def steady(draw: random.Random, start: float, end: float, per_hour: int) -> list[tuple[float, float]]:
    count = int((end - start) / HOUR * per_hour)
    return [(time, draw.random() ** 3) for time in sorted(draw.uniform(start, end) for _ in range(count))]


@pytest.mark.parametrize("factor", [1.1, 3, 20])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=full_alone())])
def test_a_week_that_offers_more_uses_the_budget_and_takes_the_best(seed: int, factor: float) -> None:
    draw, blocks = random.Random(seed), 2400
    offers = steady(draw, 0.0, 7 * DAY_SECONDS, int(blocks * factor / 24))
    written = run(WriteBudget(blocks * BLOCK), offers)
    assert most_in_a_day(written) <= blocks * BLOCK
    for day in range(7):
        assert on_day(written, day) >= 0.98 * blocks * BLOCK, (seed, day)
    best = sorted((hits for _, hits in offers), reverse=True)[: len(written)]
    gained = sum(hits for _, _, hits in written) / sum(best)
    assert gained > 0.9, (seed, gained)


@pytest.mark.parametrize("seed", range(6))
def test_bursts_idle_days_and_a_clock_that_goes_back_never_exceed_it(seed: int) -> None:
    draw, blocks, time = random.Random(seed), 500, 1e6 * seed
    offers: list[tuple[float, float]] = []
    while len(offers) < 20_000:
        kind = draw.choice(["burst", "idle", "steady", "back"])
        if kind == "burst":
            offers += [(time + 0.001 * n, draw.random()) for n in range(draw.randrange(2000))]
        elif kind == "steady":
            offers += steady(draw, time, time + 6 * HOUR, 200)
            time += 6 * HOUR
        elif kind == "idle":
            time += draw.uniform(0, 3) * DAY_SECONDS
        else:
            offers += [(time - draw.uniform(0, 2) * DAY_SECONDS, draw.random()) for _ in range(50)]
    assert 0 < most_in_a_day(run(WriteBudget(blocks * BLOCK), offers)) <= blocks * BLOCK, seed


def test_what_an_idle_day_left_is_used_within_hours() -> None:
    draw, blocks = random.Random(3), 2400
    offers = steady(draw, 0.0, DAY_SECONDS, 200) + steady(draw, 3 * DAY_SECONDS, 3 * DAY_SECONDS + 6 * HOUR, 1000)
    written = run(WriteBudget(blocks * BLOCK), offers)
    assert most_in_a_day(written) <= blocks * BLOCK
    assert on_day(written, 3) >= 0.98 * blocks * BLOCK


def test_days_with_a_night_use_it_too() -> None:
    draw, blocks = random.Random(4), 2400
    offers = [
        offer for day in range(7) for offer in steady(draw, (day + 0.4) * DAY_SECONDS, (day + 0.9) * DAY_SECONDS, 400)
    ]
    written = run(WriteBudget(blocks * BLOCK), offers)
    assert most_in_a_day(written) <= blocks * BLOCK
    for day in range(1, 7):
        assert on_day(written, day) >= 0.98 * blocks * BLOCK, day


def test_days_that_end_with_worse_offers_use_the_budget_too() -> None:
    """The offers of the last hour were better, so a threshold that followed them alone would come too late."""
    blocks = 2400
    offers = [
        (time, hits if time % DAY_SECONDS < 23.25 * HOUR else 0.1 * hits)
        for time, hits in steady(random.Random(8), 0.0, 7 * DAY_SECONDS, 400)
    ]
    written = run(WriteBudget(blocks * BLOCK), offers)
    assert most_in_a_day(written) <= blocks * BLOCK
    for day in range(7):
        assert on_day(written, day) >= 0.98 * blocks * BLOCK, day


def test_days_that_offer_less_are_written_whole() -> None:
    offers = steady(random.Random(5), HOUR, 7 * DAY_SECONDS, 50)
    written = run(WriteBudget(2400 * BLOCK), offers)
    assert len(written) >= 0.99 * len(offers)


def test_a_budget_of_less_than_a_block_writes_nothing_and_a_huge_one_everything() -> None:
    offers = steady(random.Random(6), HOUR, DAY_SECONDS, 500)
    assert not run(WriteBudget(1), offers)
    assert not run(WriteBudget(BLOCK - 1), offers)
    first_minute = sum(time < offers[0][0] // 60 * 60 + 60 for time, _ in offers)
    assert len(run(WriteBudget(1 << 60), offers)) == len(offers) - first_minute


def test_it_does_not_begin_with_the_budget_of_a_day() -> None:
    offers = steady(random.Random(7), 5.0, HOUR, 5000)
    assert len(run(WriteBudget(2400 * BLOCK), offers)) <= 101


def test_time_may_be_negative_and_jump() -> None:
    budget = WriteBudget(100 * BLOCK)
    offers = [(-1e9, 1.0)] * 10 + [(1e9, 1.0)] * 200
    assert most_in_a_day(run(budget, offers)) <= 100 * BLOCK
