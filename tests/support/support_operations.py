"""Random operations on filesystem tiers of both layouts against a dict, and how many of each kind there were."""

from __future__ import annotations

import itertools
import shutil
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import seed as hypothesis_seed

from kvtier.testing.conformance.base import ConformanceBase
from kvtier.testing.conformance.machine import TierMachine, run_machine
from kvtier_fs import FSBackend, FSOptions, SharedFSBackend, SharedFSOptions

EXAMPLES_AT_ONCE = 50
ENOUGH_EXAMPLES = 50
"""From here on examples must load blocks; a handful may happen to hold none that do."""


class _SlabSuite(ConformanceBase):
    survives_reopen = True
    options: ClassVar[dict[str, object]] = {"capacity": "4MiB", "region_bytes": "256KiB"}

    def make(self, place: Path) -> FSBackend:
        fixed = {"roots": [str(place)], "min_free_bytes": 0, "io_threads": 2}
        return FSBackend(FSOptions.model_validate(fixed | self.options))


class _FilesSuite(ConformanceBase):
    survives_reopen = True

    def make(self, place: Path) -> SharedFSBackend:
        fixed = {"root": str(place), "min_free_bytes": 0, "io_threads": 2, "capacity": "16MiB"}
        return SharedFSBackend(SharedFSOptions.model_validate(fixed))


def random_operations(budget: Any, tally: Any) -> Any:
    """Hypothesis against a dict: `count` examples over both layouts, each of 100 operations (50 in the short run)."""
    warnings.filterwarnings("ignore", "It looks like `register_random`")  # no referrer that is frozen is found
    with pytest.MonkeyPatch.context() as monkeypatch:
        _count_operations(monkeypatch, tally)
        rounds = -(-budget.count // EXAMPLES_AT_ONCE)
        for number, suite in zip(range(rounds), itertools.cycle((_SlabSuite(), _FilesSuite())), strict=False):
            examples = min(EXAMPLES_AT_ONCE, budget.count - number * EXAMPLES_AT_ONCE)
            place = budget.folder / f"round-{number}"
            place.mkdir()
            limits = settings(
                max_examples=examples, stateful_step_count=100 if budget.long else 50, deadline=None, database=None,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            hypothesis_seed(budget.seed * 1_000_003 + number)(TierMachine)
            try:
                run_machine(suite, place, limits)
            except AssertionError as broken:
                tally.wrong_bytes += "bytes are wrong" in str(broken) or "before the reset" in str(broken)
                tally.leaks += "left behind" in str(broken)
                notes = "; ".join(getattr(broken, "__notes__", ()))
                tally.expect(False, f"{type(suite).__name__}, round {number}: {broken} {notes}"[:2000])
            shutil.rmtree(place)
    tally.iterations = tally.notes["examples"]
    if tally.iterations >= ENOUGH_EXAMPLES:
        tally.expect(tally.notes["blocks loaded"] > tally.iterations, "hardly a block was loaded")
    return tally


def _count_operations(monkeypatch: pytest.MonkeyPatch, tally: Any) -> None:
    """Have the machine tell what it does."""
    judge, cancelled, opened, made = (
        TierMachine._judge, TierMachine._run_cancelled, TierMachine._open, TierMachine.__init__,
    )  # fmt: skip

    def counted_judge(self, outcomes):
        tally.notes["blocks loaded"] += sum(outcome.ok for outcome in outcomes.values())
        judge(self, outcomes)

    async def counted_cancelled(self, job, turns_before):
        result = await cancelled(self, job, turns_before)
        tally.notes["jobs cancelled"] += result is None
        return result

    async def counted_open(self):
        tally.notes["opens"] += 1
        return await opened(self)

    def counted_made(self):
        tally.notes["examples"] += 1
        made(self)

    monkeypatch.setattr(TierMachine, "_judge", counted_judge)
    monkeypatch.setattr(TierMachine, "_run_cancelled", counted_cancelled)
    monkeypatch.setattr(TierMachine, "_open", counted_open)
    monkeypatch.setattr(TierMachine, "__init__", counted_made)
