"""Every attack of the fault suite at its normal count; `python -m faults --long` runs the long ones."""

from __future__ import annotations

import pytest

from faults.attack import Attack, Tally
from faults.suite import all_attacks, run

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
