"""Simulated worlds, the harness without its protections, random operations, and every I/O of a scenario failed once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from simulator.seed_run import Simulator

from ..attack import Attack, Budget, Tally

SEEDS_APART = 10_000_000
"""How far the first simulated seeds of two shards are apart."""

HARNESS_SEEDS = 1000
"""Seeds that may pass before the simulator notices that a protection is off."""

ALWAYS_COVERED = (
    "blocks evicted from disk",
    "blocks expired",
    "blocks loaded and compared",
    "blocks of loads corrupt",
    "blocks recovered",
    "calls cancelled",
    "crashes at a system call",
    "crashes by power loss",
    "crashes by process death",
    "landed after death",
    "lost sectors and names",
    "reads misplaced",
    "regions formatted again",
    "resets",
    "writes failed",
    "writes lost",
    "writes misplaced",
    "writes short",
    "writes torn by a crash",
)
"""What a few hundred seeds go through, whichever they are."""

HANGS = ("hang: ", "after its deadline")
LEAKS = ("are open after", "not accounted for", "uncaught exception", "had not ended at the close", "s after an open")
OVER_BOUND = " takes "
"""Parts of the messages of the simulator, by the column in which they count; all others are wrong bytes."""

ONLY_SLABS = ("blocks evicted from disk", "blocks expired", "blocks recovered", "regions formatted again")
"""What the control plane does with slots; a shared root is placed and evicted by its backend."""


# -- simulated worlds -------------------------------------------------------------------------------------------


def simulated_world(budget: Budget) -> Tally:
    """Run seeds over slabs; the number in the table replays any of them."""
    return _simulated(budget, "slab", ALWAYS_COVERED)


def simulated_shared_root(budget: Budget) -> Tally:
    """Run seeds over a root of one file a block."""
    return _simulated(budget, "files", [name for name in ALWAYS_COVERED if name not in ONLY_SLABS])


def _simulated(budget: Budget, layout: str, expected: Sequence[str]) -> Tally:
    tally, simulator = Tally(), Simulator(layout=layout)
    first = budget.seed * SEEDS_APART
    for seed in range(first, first + budget.count):
        outcome = simulator.run(seed)
        tally.iterations += 1
        tally.notes.update(outcome.covered)
        for violation in outcome.violations:
            count_violation(tally, f"--layout {layout} --seed {seed}: {violation}")
    if budget.count >= 200:
        for name in expected:
            tally.expect(tally.notes[name] > 0, f"no seed covered: {name}")
    return tally


def count_violation(tally: Tally, violation: str) -> None:
    """Count a broken promise in its column, and keep its message."""
    if any(part in violation for part in HANGS):
        tally.hangs += 1
    elif any(part in violation for part in LEAKS):
        tally.leaks += 1
    elif OVER_BOUND in violation:
        tally.over_bound += 1
    else:
        tally.wrong_bytes += 1
    tally.expect(False, violation)


# -- the harness itself -----------------------------------------------------------------------------------------


def harness_itself(budget: Budget) -> Tally:
    """Turn protections off one at a time; at most `count` seeds may pass before the simulator finds it.

    A run with less than the normal count begins with seeds that were red before.
    """
    import pytest
    from support_protections import RARE, RED_SEEDS, SWITCHES

    tally = Tally()
    first = budget.seed * SEEDS_APART
    for name, (switch, broken, layout) in SWITCHES.items():
        if name in RARE and not budget.long:
            continue
        tally.iterations += 1
        simulator = Simulator(layout=layout)
        with pytest.MonkeyPatch.context() as monkeypatch:
            switch(monkeypatch)
            before = RED_SEEDS.get(name, ()) if budget.count < HARNESS_SEEDS else ()
            red = _first_red(simulator, [*before, *range(first, first + budget.count)])
        if red is None:
            tally.expect(False, f"without {name} nothing was noticed in {budget.count} seeds from {first}")
            continue
        tried, seed, violation = red
        tally.notes[f"seeds until red without {name}"] = tried
        tally.expect(re.search(broken, violation) is not None, f"without {name}, seed {seed}: {violation}")
        tally.expect(not simulator.run(seed).violations, f"seed {seed} is red with {name} as well")
    return tally


def _first_red(simulator: Simulator, seeds: Iterable[int]) -> tuple[int, int, str] | None:
    """How many seeds were tried, the red one, and the promise that it broke."""
    for tried, seed in enumerate(seeds, 1):
        violations = simulator.run(seed).violations
        if violations:
            return tried, seed, violations[0]
    return None


# -- random operations, and every I/O of a scenario -------------------------------------------------------------


def random_operations(budget: Budget) -> Tally:
    """Hypothesis against a dict: `count` examples over both layouts."""
    from support_operations import random_operations

    return random_operations(budget, Tally())


def nth_io_fails(budget: Budget) -> Tally:
    """In the long run every request and file call of every scenario fails in every way; else `count` random ones."""
    from support_nth_io import nth_io_fails

    return nth_io_fails(budget, Tally())


ATTACKS = (
    Attack(
        "simulated world",
        "a seeded scheduler, a virtual clock and disks that fail, misreport, lose, tear and reorder; crashes anywhere",
        200, 200_000, simulated_world, minutes=4, shards=8,
    ),
    Attack(
        "simulated shared root",
        "the same over layout files: one file a block, leases, accounts, its own eviction",
        60, 50_000, simulated_shared_root, minutes=4, shards=8,
    ),
    Attack(
        "the harness itself",
        "one protection turned off at a time; seeds until the simulator is red, of so many at most",
        HARNESS_SEEDS, 5000, harness_itself, minutes=5,
    ),
    Attack(
        "random operations",
        "Hypothesis against a dict: store, load, evict, cancel, reset, reopen; 50 steps, 100 in the long run",
        6, 3000, random_operations, shards=4,
    ),
    Attack(
        "N-th I/O fails",
        "EIO, ENOSPC, EINTR, EAGAIN, ECANCELED, EACCES, short, lost, misdirected; random N, in the long run every N",
        24, 5000, nth_io_fails,
    ),
)  # fmt: skip
