"""Simulated hosts over stores that forget and lie: no old weights are found, and without each protection some are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import support_protections_epochs as protections
from click.testing import CliRunner

from faults.epochs.__main__ import main
from faults.epochs.seed import run_seed

SEEDS, QUICK_SEEDS = 250, 100
SEEDS_MAX = 2000
CENTRE = ("open", "reset", "lost", "forged", "dump restored", "forgotten", "reset failed", "blocks loaded")


def test_no_seed_finds_older_weights(dial):
    covered = set[str]()
    for seed in range(dial(SEEDS, QUICK_SEEDS)):
        outcome = run_seed(seed)
        assert not outcome.violations, "\n".join((f"seed {seed}", *outcome.trace))
        covered.update(outcome.covered)
    assert covered.issuperset(CENTRE), "seeds that attack nothing prove nothing"


@pytest.mark.parametrize("seed", [19541, 51509, 83304])
def test_seeds_that_once_found_older_weights(seed: int):
    """A failed reset that was counted later beside a new host; one that only some tiers of its stack had taken.

    The third was a fault of the simulation: what a host stored after a failed reset was taken for its repetition.
    """
    assert not run_seed(seed).violations


def test_a_seed_is_the_same_when_it_is_run_again():
    assert [run_seed(seed).trace for seed in (3, 4)] == [run_seed(seed).trace for seed in (3, 4)]


@pytest.mark.parametrize(
    ("switch", "first"),
    [
        (protections.without_numbers_of_openings, 290),
        (protections.without_forgetting_of_lost_markers, 290),
        (protections.without_ceiling, 0),
    ],
)
def test_without_a_protection_some_seed_finds_older_weights_or_an_empty_disk(
    monkeypatch, switch: Callable[..., None], first: int
):
    """`first` spares the seeds in front of the one that was red when this was written."""
    switch(monkeypatch)
    seeds = range(first, SEEDS_MAX)
    assert any(run_seed(seed).violations for seed in seeds), f"{SEEDS_MAX} seeds notice nothing"


def test_the_command_replays_a_seed():
    ran = CliRunner().invoke(main, ["--seed", "5"])
    assert ran.exit_code == 0
    assert "servers, folder" in ran.output
