"""Several engines at one simulated stack process: no promise is broken, and without a protection one is."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from click.testing import CliRunner
from support_session_protections import PROTECTIONS, RED_SEEDS

from simulator.command import simulate
from simulator.service.world import run_service_seed

SEEDS_MAX = 2000


@pytest.mark.full
def test_no_seed_breaks_a_promise(seed, dial):
    covered = Counter[str]()
    for number in range(seed, seed + dial(1000, 15)):
        outcome = run_service_seed(number)
        assert not outcome.violations, f"python -m simulator --layout service --seed {number} --trace"
        covered += outcome.covered
    for what in ("loads compared", "engines killed", "resets", "connections cut", "stack processes killed"):
        assert covered[what], what


@pytest.mark.parametrize("name", PROTECTIONS)
def test_without_a_protection_a_promise_is_broken(name, monkeypatch):
    turn_off, says = PROTECTIONS[name]
    turn_off(monkeypatch)
    for number in itertools.chain(RED_SEEDS[name], range(1000, 1000 + SEEDS_MAX)):
        outcome = run_service_seed(number)
        if outcome.violations:
            assert re.search(says, outcome.violations[0]), outcome.violations
            return
    pytest.fail(f"{SEEDS_MAX} seeds do not need this protection")


def test_a_seed_is_the_same_under_any_hash_seed():
    code = (
        "from simulator.service.world import run_service_seed as run; "
        "print([(o.steps, o.virtual_seconds, sorted(o.covered.items())) for o in map(run, range(6))])"
    )
    found = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert ran.stderr == ""
        found.add(ran.stdout)
    assert len(found) == 1


def test_the_command_runs_them():
    ran = CliRunner().invoke(simulate, ["--layout", "service", "--seeds", "2", "--json"])
    assert ran.exit_code == 0
    assert '"broken": 0' in ran.output
    ran = CliRunner().invoke(simulate, ["--layout", "service", "--seed", "3", "--trace"])
    assert "seed 3: ServicePlan(" in ran.output
    assert "replay: python -m simulator --layout service --seed 3 --trace" in ran.output
