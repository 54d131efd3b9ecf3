"""Conformance suites of tiers and (`policies`) of eviction policies: subclass one, and pytest runs it; for tests alone.

`LoadStoreTests`, given `make`, holds a tier below the CPU, owned or shared, to the whole contract. Needs pytest and
hypothesis (`pip install "kvtier[test]"`), no plugins.
"""

from __future__ import annotations

from pathlib import Path

from kvtier.testing.conformance.base import ConformanceBase, make_keys
from kvtier.testing.conformance.blocks import BlockTests, FailureTests
from kvtier.testing.conformance.lifecycle import LifecycleTests, RecoveryTests
from kvtier.testing.conformance.machine import run_machine


class LoadStoreTests(LifecycleTests, BlockTests, FailureTests, RecoveryTests):
    """Tests of the whole contract in `kvtier.tier.contract` for a tier below the CPU.

    Every test runs in an event loop of its own and fails if a file descriptor, a thread or a task is left behind or
    anything ran on the loop's default executor.
    """

    def test_random_operations_against_a_dict(self, tmp_path: Path) -> None:
        run_machine(self, tmp_path)


__all__ = ["ConformanceBase", "LoadStoreTests", "make_keys"]
