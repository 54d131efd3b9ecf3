"""A week of a real trace in virtual time: a write budget is never exceeded, and used where it can be.

A quick run takes two days of it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from support_counts import full_alone
from support_paths import TRACES

from kvtier.policy.write_budget import DAY_SECONDS, WriteBudget
from kvtier.tools.replay.setup import ReplayOptions
from kvtier.tools.whatif.simulate import Simulated, SimulateOptions, Simulation

TRACE = TRACES / "conversation.jsonl"
pytestmark = [
    pytest.mark.trace,
    pytest.mark.skipif(not TRACE.is_file(), reason="no trace: put conversation.jsonl into ../shared/traces"),
]
WEEK_DAYS, QUICK_DAYS = 7, 2
REQUESTS = 12
"""Each hour has so many requests, those that follow the ones of the hour before in the trace."""
BLOCK_BYTES = 4096
SLOT_BYTES = 2 * BLOCK_BYTES
STACK = """tiers:
  - {{type: gpu}}
  - {{type: cpu, cpu_bytes_to_use: 1MiB}}
  - {{type: fs, roots: [{root}], capacity: 16MiB, write_policy: {policy}, admit: predicted,
     write_bytes_per_day: {daily}}}
"""


def write_days(path: Path, days: int) -> None:
    """Requests in the order of the trace, evenly over the days."""
    lines = [json.loads(line) for line in TRACE.read_text().splitlines()[: 24 * days * REQUESTS]]
    with path.open("w") as out:
        for hour in range(24 * days):
            part = lines[hour * REQUESTS : (hour + 1) * REQUESTS]
            for number, request in enumerate(part):
                request["timestamp"] = round(3_600_000 * (hour + number / REQUESTS))
                out.write(json.dumps(request) + "\n")


def simulated(folder: Path, num_days: int, daily: int, policy: str) -> Simulated:
    stack, trace = folder / "stack.yaml", folder / "days.jsonl"
    stack.write_text(STACK.format(root=folder / "root", daily=daily, policy=policy))
    write_days(trace, num_days)
    replay = ReplayOptions(stack=stack, trace=trace, block_bytes=BLOCK_BYTES)
    return next(Simulation(SimulateOptions(stack, replay, arrivals="trace"), [{}]).run())


@pytest.mark.parametrize("policy", ["write_through", pytest.param("on_evict", marks=full_alone())])
def test_a_week_keeps_to_the_budget_and_uses_it(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dial: Callable[[int, int], int]
) -> None:
    """Each day offers some ten times the budget, to an `on_evict` tier too, which is offered what is evicted."""
    num_days = dial(WEEK_DAYS, QUICK_DAYS)
    daily, written, wrote = 750 * SLOT_BYTES, list[tuple[float, int]](), WriteBudget.record_sent

    def recorded(self: WriteBudget, num_bytes: int) -> None:
        written.append((self._time, num_bytes))
        wrote(self, num_bytes)

    monkeypatch.setattr(WriteBudget, "record_sent", recorded)
    found = simulated(tmp_path, num_days, daily, policy)
    assert found.tiers["fs"].stored * SLOT_BYTES == sum(size for _, size in written)
    assert found.counts.stored * SLOT_BYTES > 9 * num_days * daily
    times, sums = [time for time, _ in written], [0, *accumulate(size for _, size in written)]
    most = max(sums[at + 1] - sums[bisect_left(times, time - DAY_SECONDS)] for at, time in enumerate(times))
    begin = [bisect_left(times, day * DAY_SECONDS) for day in range(num_days + 1)]
    days = [(sums[end] - sums[start]) / daily for start, end in pairwise(begin)]
    assert most <= daily
    assert min(days) >= 0.98, days
