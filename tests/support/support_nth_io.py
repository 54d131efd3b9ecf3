"""One I/O of a scenario fails, any one or each in turn, and what was found then."""

from __future__ import annotations

import errno
import itertools
import random
import shutil
from typing import Any, NamedTuple

from support_conformance import LARGE, SMALL, FailingCalls, Scenario

from kvtier_fs.testing import FaultyIO, nth
from tests.conformance.test_nth_io import CALLS, FAULTS, HARMLESS, run_scenario

SCENARIOS = [(layout, size) for size in (SMALL, LARGE) for layout in ("slab", "files")]


class _Way(NamedTuple):
    """One way to fail: which layout and size of scenario, an I/O request or another file call, and how."""

    layout: str
    size: Any
    request: bool
    fault: str


class _Sweep:
    """Runs the scenario with its N-th I/O failed, each time on a new root."""

    def __init__(self, budget: Any, tally: Any) -> None:
        self._folder, self._tally = budget.folder, tally
        self._count = 0
        self._unharmed: dict[tuple[str, int], tuple[int, int, int]] = {}

    def unharmed(self, way: _Way) -> tuple[int, int, int]:
        """(requests, file calls, blocks loaded) of a scenario that nothing befalls."""
        which = way.layout, way.size.keys
        if which not in self._unharmed:
            io, calls = FaultyIO(), FailingCalls(0, errno.EIO)
            scenario = self._run(way, io, calls)
            self._unharmed[which] = io.count, calls.count, scenario.loaded
        return self._unharmed[which]

    def fail(self, way: _Way, number: int) -> bool:
        """Fail one; False if the scenario has no N-th one."""
        struck: list[int] = []
        if way.request:
            fault = nth(number, FAULTS[way.fault])

            def plan(count, request):
                told = fault(count, request)
                if told is not None:
                    struck.append(count)
                return told

            io, calls = FaultyIO(plan), None
        else:
            io, calls = FaultyIO(), FailingCalls(number, CALLS[way.fault])
        hits = self.unharmed(way)[2]
        what = (
            f"{way.layout}, {way.fault} of {'request' if way.request else 'call'} {number} of {way.size.keys * 2} keys"
        )
        try:
            scenario = self._run(way, io, calls)
        except AssertionError as broken:
            self._tally.wrong_bytes += "was loaded" in str(broken) or "came back" in str(broken) or not str(broken)
            self._tally.leaks += "left" in str(broken)
            self._tally.expect(False, f"{what}: {broken!r}")
            return True
        reached = number <= io.count if way.request else bool(calls and calls.struck)
        befell = bool(struck) if way.request else reached
        self._tally.notes[f"{'requests' if way.request else 'file calls'} failed, {way.layout}"] += befell
        self._tally.notes["blocks loaded and compared"] += scenario.loaded
        self._tally.iterations += befell
        if way.request:
            self._tally.expect(not scenario.refused, f"{what} was no outcome: {scenario.refused}")
            if befell and way.fault in HARMLESS:
                self._tally.expect(scenario.loaded == hits, f"{what} cost a hit")
        return reached

    def _run(self, way: _Way, io: FaultyIO, calls: FailingCalls | None) -> Scenario:
        self._count += 1
        place = self._folder / str(self._count)
        scenario = Scenario(place, way.layout, way.size)
        try:
            run_scenario(scenario, io, calls)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return scenario


def nth_io_fails(budget: Any, tally: Any) -> Any:
    """In the long run every request and file call of every scenario fails in every way; else `count` random ones."""
    rng = random.Random(budget.seed)
    sweep = _Sweep(budget, tally)
    ways = [_Way(layout, size, True, fault) for layout, size in SCENARIOS for fault in FAULTS]
    ways += [_Way(layout, size, False, fault) for layout, size in SCENARIOS for fault in CALLS]
    if budget.long:
        for way in ways:
            for number in itertools.count(1):
                if not sweep.fail(way, number):
                    break
        requests = sum(sweep.unharmed(way)[0] for way in ways if way.request)
        tally.expect(tally.iterations > requests // 2, "hardly any of the requests was failed")
        return tally
    small = [way for way in ways if way.size is SMALL]
    while tally.iterations < budget.count and not tally.problems:
        way = rng.choice(small)
        requests, calls, _ = sweep.unharmed(way)
        sweep.fail(way, rng.randint(1, requests if way.request else calls))
    return tally
