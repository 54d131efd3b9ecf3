"""Conformance suites, doubles, planned faults for tests of tiers and embedders (docs/testing.md); no room imports it.

`kvtier.testing.conformance` needs pytest and hypothesis (`pip install "kvtier[test]"`) and is imported by name.
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
