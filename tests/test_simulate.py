"""The simulator on the code as it is: every promise kept, every seed the same each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvtier.testing.simulate import simulate
from kvtier.testing.world.scenario import run_seed

SEEDS = range(200)


@pytest.mark.parametrize("first", range(SEEDS.start, SEEDS.stop, 20))
def test_every_promise_is_kept_in_every_seed(first):
    loaded = crashes = 0
    for seed in range(first, first + 20):
        outcome = run_seed(seed)
        replay = f"python -m kvtier.testing.simulate --seed {seed} --trace"
        assert not outcome.violations, f"{outcome.violations[0]}; replay: {replay}"
        loaded += outcome.loaded
        crashes += outcome.crashes
    assert loaded > 50, "the scenarios load blocks and compare them"
    assert crashes > 5, "and crash"


@pytest.mark.long
def test_every_promise_is_kept_in_many_seeds():
    for seed in range(1000, 21_000):
        outcome = run_seed(seed)
        assert not outcome.violations, f"seed {seed}: {outcome.violations[0]}"


def test_a_seed_is_the_same_under_any_hash_seed():
    code = "from kvtier.testing.world.scenario import run_seed; print([run_seed(s).digest for s in range(12)])"
    digests = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert ran.stderr == ""
        digests.add(ran.stdout)
    assert len(digests) == 1
    assert len(set(json.loads(digests.pop().replace("'", '"')))) == 12, "seeds differ from each other"


def test_a_seed_is_the_same_when_it_is_run_again():
    assert [run_seed(seed).trace for seed in (3, 4)] == [run_seed(seed).trace for seed in (3, 4)]


def test_the_command_prints_a_trace_and_counts():
    ran = CliRunner().invoke(simulate, ["--seed", "5", "--trace"])
    assert ran.exit_code == 0
    assert "seed 5: Plan(" in ran.output
    assert "a life begins" in ran.output
    assert "replay: python -m kvtier.testing.simulate --seed 5 --trace" in ran.output
    ran = CliRunner().invoke(simulate, ["--seeds", "3", "--start", "7", "--json"])
    assert ran.exit_code == 0
    total = json.loads(ran.output.splitlines()[-1])
    assert (total["seeds"], total["first_seed"], total["broken"]) == (3, 7, 0)
