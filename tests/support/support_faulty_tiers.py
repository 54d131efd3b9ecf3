"""Tiers of engine memory that go wrong as planned, and what befalls them in random operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtier.testing.faults import Fault, FaultKind, FaultyBackend
from kvtier.tier.registry import discover
from kvtier.types.jobs import JobKind

CHANCES = [
    (0.03, Fault(FaultKind.FAIL)),
    (0.03, Fault(FaultKind.CORRUPT, JobKind.LOAD)),
    (0.02, Fault(FaultKind.MISSING, JobKind.LOAD)),
    (0.02, Fault(FaultKind.DROP, JobKind.STORE)),
    (0.02, Fault(FaultKind.LOSE, JobKind.STORE)),
    (0.01, Fault(FaultKind.RAISE)),
    (0.005, Fault(FaultKind.HOLD)),
]
"""For random operations: every way to go wrong that needs no deadline."""


def faulty_tiers(monkeypatch: pytest.MonkeyPatch) -> list[FaultyBackend]:
    """Every backend that engine memory makes from here on goes wrong as planned; it is added to the list."""
    made: list[FaultyBackend] = []
    backends = discover()

    class Planned:
        def get(self, name: str) -> Any:
            kind = backends.get(name)

            def make(options: Any) -> FaultyBackend:
                inner = kind(options)
                for call in ("load", "store"):  # what is held is I/O that has begun: it is done, however late
                    move = getattr(inner, call)
                    setattr(inner, call, lambda job, move=move: move(replace(job, deadline=None)))
                made.append(FaultyBackend(inner))
                return made[-1]

            return make

    monkeypatch.setattr("kvtier.engines.engine_memory.tier.discover", Planned)
    return made
