"""Every attack of the fault suite at its normal count; `python -m faults --long` runs the long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtier.testing.simulation
from faults.attack import Attack, Tally
from faults.attacks.kernel import SUITES
from faults.attacks.world import HANGS, LEAKS, count_violation
from faults.suite import PROJECT, all_attacks, run
from kvtier.testing.simulation.disk import Disks, SimulatedRoot

START_SECONDS = 60
"""What a test may take beyond its attack's own limit, which kills the attack's process and counts as a hang."""


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(attack, id=name, marks=pytest.mark.timeout(attack.minutes * 60 + START_SECONDS))
        for name, attack in all_attacks().items()
    ],
)
def test_every_promise_holds_under(attack: Attack, seed: int, tmp_path):
    print(f"replay alone: python -m faults --only {attack.name!r} --count {attack.normal} --seed {seed}")
    result = run(attack, attack.normal, seed, tmp_path, long=False)
    if result.missing is not None:
        pytest.skip(result.missing)
    print(result.tally)
    assert result.tally.clean


@pytest.mark.parametrize("field", ["wrong_bytes", "hangs", "leaks", "over_bound"])
def test_one_broken_promise_is_not_clean(field):
    assert Tally(iterations=1).clean
    assert not Tally(iterations=1, **{field: 1}).clean


def test_an_attack_that_attacked_nothing_is_not_clean():
    assert not Tally().clean


def test_a_broken_promise_of_the_simulator_counts_in_its_column():
    """Columns are found by parts of messages, so a message that is changed must be changed here too."""
    sources = Path(kvtier.testing.simulation.__file__).parent.glob("*.py")
    messages = [line for source in sources for line in source.read_text().splitlines() if "violation(" in line]
    for column, parts in (("hangs", HANGS), ("leaks", LEAKS)):
        for part in parts:
            assert any(part in message for message in messages), part
            tally = Tally()
            count_violation(tally, f"the row {part} 5")
            assert getattr(tally, column) == 1
    over, wrong = Tally(), Tally()
    count_violation(over, Disks([SimulatedRoot("/root", -1)]).over_bound())
    count_violation(wrong, "key 12345678 was loaded with bytes of no block; allowed are [1]")
    assert (over.over_bound, wrong.wrong_bytes) == (1, 1)


@pytest.mark.parametrize("suite", SUITES)
def test_the_tests_that_run_without_io_uring_are_there(suite):
    assert len(list(PROJECT.glob(suite))) > 5
