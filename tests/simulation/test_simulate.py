"""The simulator itself: every seed the same each time, and the command. What it finds is in the fault suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from click.testing import CliRunner
from support_counts import fully

from simulator.command import simulate
from simulator.seed_run import Simulator, run_seed


@fully
def test_a_seed_is_the_same_under_any_hash_seed():
    code = (
        "from simulator.seed_run import run_seed; "
        "print([run_seed(s, layout).digest for s in range(6) for layout in ('slab', 'files')])"
    )
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


@pytest.mark.parametrize("layout", ["slab", "files"])
def test_a_seed_is_the_same_when_it_is_run_again(layout):
    assert [run_seed(seed, layout).trace for seed in (3, 4)] == [run_seed(seed, layout).trace for seed in (3, 4)]


def test_a_seed_of_the_other_layout_names_it_in_its_replay():
    ran = CliRunner().invoke(simulate, ["--seed", "5", "--layout", "files"])
    assert ran.exit_code == 0
    assert "replay: python -m simulator --layout files --seed 5 --trace" in ran.output


def test_the_command_prints_a_trace_and_counts():
    ran = CliRunner().invoke(simulate, ["--seed", "5", "--trace"])
    assert ran.exit_code == 0
    assert "seed 5: SeedPlan(" in ran.output
    assert "a process begins" in ran.output
    assert "replay: python -m simulator --seed 5 --trace" in ran.output
    ran = CliRunner().invoke(simulate, ["--seeds", "3", "--start", "7", "--json"])
    assert ran.exit_code == 0
    total = json.loads(ran.output.splitlines()[-1])
    assert (total["seeds"], total["first_seed"], total["broken"]) == (3, 7, 0)
    assert total["covered"] == dict(sum((Simulator().run(seed).covered for seed in (7, 8, 9)), Counter()))


def test_several_processes_find_what_one_finds(dial):
    seeds = dial(40, 12)
    command = ["--seeds", str(seeds), "--json", "--jobs"]
    ends = [CliRunner().invoke(simulate, [*command, jobs]).output for jobs in ("1", "2")]
    one, two = (json.loads(output.splitlines()[-1]) for output in ends)
    assert one["seeds"] == seeds
    assert one["covered"] == two["covered"]
