"""The N-th I/O of a scenario fails, for every N until none fails: right bytes or a miss, and nothing left behind."""

from __future__ import annotations

import errno
import itertools
import random
from pathlib import Path

import pytest
from support_conformance import LARGE, SMALL, FailingCalls, Scenario, Size

from kvtier.testing.trace import leaving_no_trace, run_in_loop
from kvtier_fs.io.contract import IORequest
from kvtier_fs.testing import FaultyIO, IOFault, IOFaultKind, nth

FAULTS = {
    "EIO": IOFault(IOFaultKind.ERROR, errno=errno.EIO),
    "ENOSPC": IOFault(IOFaultKind.ERROR, errno=errno.ENOSPC),
    "EINTR": IOFault(IOFaultKind.ERROR, errno=errno.EINTR),
    "EAGAIN": IOFault(IOFaultKind.ERROR, errno=errno.EAGAIN),
    "ECANCELED": IOFault(IOFaultKind.ERROR, errno=errno.ECANCELED),
    "short": IOFault(IOFaultKind.SHORT),
    "lost": IOFault(IOFaultKind.LOSE),
    "misdirected": IOFault(IOFaultKind.MISDIRECT),
}
HARMLESS = ("EINTR", "EAGAIN", "short")
LIMIT = 500


def temporaries(root: Path) -> list[str]:
    """Files that are only there for a while."""
    names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    return sorted(name for name in names if "tmp" in name or "temp" in name)


def run_scenario(scenario: Scenario, io: FaultyIO, calls: FailingCalls | None = None) -> None:
    """The scenario, then a healthy life on the same disk; nothing may be left by either."""
    with leaving_no_trace():
        if calls is None:
            run_in_loop(scenario.run(io))
        else:
            with calls.in_modules("kvtier_fs", "kvtier_fs.testing"):
                run_in_loop(scenario.run(io))
    with leaving_no_trace():
        run_in_loop(scenario.afterwards())
    assert not temporaries(scenario.root), "temporaries were left"


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("layout", ["slab", "files"])
def test_the_scenario_does_what_it_is_for(tmp_path, layout, size):
    """It loads from disk, evicts, resets and reopens; otherwise the rows below would prove nothing."""
    scenario, io = Scenario(tmp_path / "root", layout, size), FaultyIO()
    run_scenario(scenario, io)
    assert not scenario.refused
    assert scenario.evicted, "the disk was never full"
    assert scenario.loaded > 2 * size.keys
    assert io.count > 3 * size.keys


def some_long(names, *long: str) -> list[object]:
    """All names as parameters, those that take the paths of another one in the long run only."""
    return [pytest.param(name, marks=pytest.mark.long if name in long else ()) for name in names]


SIZES = [pytest.param(SMALL, id="small"), pytest.param(LARGE, id="large", marks=pytest.mark.long)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["slab", "files"])
@pytest.mark.parametrize("name", some_long(FAULTS, "EAGAIN", "ECANCELED"))
def test_the_nth_io_fails(tmp_path, layout, name, size, dial):
    """In a quick run each request is struck by one of the faults."""
    fault, loaded, step = FAULTS[name], {}, dial(1, 6)
    for number in itertools.count(1 + list(FAULTS).index(name) % step, step):
        struck = []
        plan = nth(number, fault)
        io = FaultyIO(lambda count, request, plan=plan, struck=struck: _noting(plan(count, request), request, struck))
        scenario = Scenario(tmp_path / str(number), layout, size)
        run_scenario(scenario, io)
        assert not scenario.refused, f"{name} of request {number} was no outcome: {scenario.refused}"
        loaded[number] = scenario.loaded, struck
        if number > io.count:
            break
        assert number < LIMIT
    unharmed = scenario.loaded
    assert number > 3 * size.keys, "the scenario has more I/O than that"
    assert step * sum(len(struck) for _, struck in loaded.values()) > size.keys, "the fault befell hardly any request"
    for number, (hits, struck) in loaded.items():
        if name in HARMLESS and struck:
            assert hits == unharmed, f"{name} of request {number} cost a hit"


def _noting(fault: IOFault | None, request: IORequest, struck: list[int]) -> IOFault | None:
    if fault is not None:
        struck.append(request.length)
    return fault


STACKS_MAX = 24
"""Stacks of file calls that a quick run fails, of those of a scenario."""
CALLS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EACCES": errno.EACCES, "short": 0}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["slab", "files"])
@pytest.mark.parametrize("name", some_long(CALLS, "ENOSPC", "EACCES", "short"))
def test_the_nth_file_call_fails(tmp_path, layout, name, size, dial, seed):
    """All that is no block: folders, locks, superblocks, allocation, renames. Opening may refuse, with a type.

    A quick run fails the first call of stacks that the seed draws, a full one that of each stack, and then each call;
    of the hundreds of the small scenario on files every fifth one.
    """
    unharmed = FailingCalls(0, CALLS[name])
    run_scenario(Scenario(tmp_path / "unharmed", layout, size), FaultyIO(), unharmed)
    stacks = sorted(unharmed.stacks)
    drawn = random.Random(seed).sample(stacks, min(len(stacks), dial(len(stacks), STACKS_MAX)))
    struck = sum(
        bool(strike(tmp_path / f"stack {number}", layout, size, FailingCalls(0, CALLS[name], stack)).struck)
        for number, stack in enumerate(drawn)
    )
    print(f"{struck} of {len(drawn)} stacks; there are {len(stacks)} of {unharmed.count} calls")
    assert struck > 0.8 * len(drawn), "what is scheduled otherwise is some of them only"
    assert struck > (20 if CALLS[name] else 3), "the scenario has more stacks than that"
    if dial(1, 0):
        strike_each(tmp_path, layout, size, CALLS[name])


def strike_each(folder: Path, layout: str, size: Size, error: int) -> None:
    """The scenario with one call after the other that fails, until none is left."""
    for number in itertools.count(1, 5 if size is SMALL and layout == "files" else 1):
        if not strike(folder / str(number), layout, size, FailingCalls(number, error)).struck:
            break
        assert number < 4 * LIMIT
    assert number > (20 if error else 3), "the scenario has more file calls than that"


def strike(root: Path, layout: str, size: Size, calls: FailingCalls) -> FailingCalls:
    """The scenario with a call that fails."""
    run_scenario(Scenario(root, layout, size), FaultyIO(), calls)
    return calls
