"""Conformance suites, doubles and planned faults for authors of tiers and embedders. See docs/testing.md.

This package itself needs nothing beyond kvtier's own dependencies. `kvtier.testing.conformance`
needs pytest and hypothesis (`pip install "kvtier[test]"`) and are imported by name.
"""

from kvtier.testing.driver import Owners, TestRows, content
from kvtier.testing.faults import NO_FAULTS, Fault, FaultKind, FaultPlan, FaultyBackend, NthJob, SeededFaults
from kvtier.testing.memory import MemoryOptions, MemoryStorage, MemoryTier, SharedMemoryTier

__all__ = [
    "NO_FAULTS",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultyBackend",
    "MemoryOptions",
    "MemoryStorage",
    "MemoryTier",
    "NthJob",
    "Owners",
    "SeededFaults",
    "SharedMemoryTier",
    "TestRows",
    "content",
]
