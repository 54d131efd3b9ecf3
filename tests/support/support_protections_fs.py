"""Protections of the filesystem tiers beside those of `support_protections`, and how to turn each of them off."""

from __future__ import annotations

import pytest

from kvtier.stack.learned import budget_records
from kvtier.tier import block_envelope
from kvtier_fs.local import shrinking, tier
from kvtier_fs.roots.private_tree import PrivateTree
from kvtier_fs.shared import block_file
from kvtier_fs.shared.bucket import Bucket


def without_owner_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose a file is in a root that others may write into does not matter, nor how many names it has."""
    monkeypatch.setattr(PrivateTree, "_judge", lambda self, at, status: None)
    monkeypatch.setattr(PrivateTree, "_count_names", lambda self, at, status: None)


def without_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a configuration with another number of engines left stays, and nothing says so."""
    monkeypatch.setattr(tier, "remove_leftovers", lambda root, options: [])


def without_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared root keeps what is over a lowered capacity until something is stored."""
    monkeypatch.setattr(Bucket, "is_over_budget", lambda self: False)


def without_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of another version of the envelope is damaged."""
    for module in (block_envelope, block_file):
        monkeypatch.setattr(module, "is_other_version", lambda page, payload=b"": False)


def without_bounds_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of what was written may state any number of bytes."""
    monkeypatch.setattr(budget_records, "COUNTER_LIMIT", 1 << 80)


def without_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab root whose capacity was lowered keeps what lies in its first regions, however old."""
    monkeypatch.setattr(shrinking, "_choices", lambda root, room: iter(()))
