"""The abilities of the tiers in this distribution are protocols, told at run time by the presence of their methods."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.options import TierOptions
from kvtier.testing.memory import MemoryOptions, MemoryTier, SharedMemoryTier
from kvtier.tier import contract, registry
from kvtier.tier.contract import (
    AnswersLookups,
    AttachesRows,
    FencesCopies,
    FitsGeometry,
    LoadStore,
    ProbesAlignment,
    ProvidesRows,
    Resettable,
    SealsRows,
    StatesEpoch,
)
from kvtier.tier.registry import DryRuns, EmbedsServer, discover

OF_INSTANCES = {
    AnswersLookups,
    AttachesRows,
    FencesCopies,
    FitsGeometry,
    ProbesAlignment,
    ProvidesRows,
    Resettable,
    SealsRows,
    StatesEpoch,
    DryRuns,
    EmbedsServer,
}
EXPECTED = {
    "gpu": {FencesCopies},
    "cpu": {AttachesRows, DryRuns, FitsGeometry, ProvidesRows, SealsRows},
    "fs": {ProbesAlignment, Resettable, DryRuns},
    "shared_fs": {AnswersLookups, ProbesAlignment, Resettable, StatesEpoch, DryRuns},
    "valkey": {AnswersLookups, Resettable, StatesEpoch, DryRuns, EmbedsServer},
    "s3": {AnswersLookups, Resettable, StatesEpoch, DryRuns},
    "memory": {Resettable},
    "shared memory": {AnswersLookups, Resettable},
}


def tiers(root: Path) -> dict[str, LoadStore]:
    """One tier of each kind, not open."""
    backends = discover()

    def make(kind: str, **values: object) -> LoadStore:
        backend = backends.get(kind)
        options: TierOptions = backend.Options.model_validate({"type": kind, **values})
        return backend(options)

    return {
        "gpu": make("gpu"),
        "cpu": make("cpu", cpu_bytes_to_use=1 << 20),
        "fs": make("fs", roots=[str(root)], capacity=1 << 30),
        "shared_fs": make("shared_fs", root=str(root), capacity=1 << 30),
        "valkey": make("valkey", servers=["cache:6379"]),
        "s3": make("s3", bucket="kv-cache"),
        "memory": MemoryTier(MemoryOptions()),
        "shared memory": SharedMemoryTier(MemoryOptions()),
    }


def has(tier: LoadStore, protocol: type) -> bool:
    """`isinstance` without evaluating properties, which a tier that is not open refuses."""
    return isinstance(tier, protocol) if protocol is not ProvidesRows else hasattr(type(tier), "rows")


def test_every_protocol_of_instances_is_listed_here() -> None:
    found = {
        value
        for module in (contract, registry)
        for value in vars(module).values()
        if getattr(value, "_is_protocol", False) and getattr(value, "_is_runtime_protocol", False)
    }
    assert found == OF_INSTANCES


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_tier_has_just_the_abilities_it_declares(kind: str, tmp_path: Path) -> None:
    tier = tiers(tmp_path)[kind]
    assert {protocol for protocol in OF_INSTANCES if has(tier, protocol)} == EXPECTED[kind]
