"""Eviction policies: which ready slot of a tier goes first. One file each, one contract (`base`)."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.control.policies.arc import ARC
from kvtier.control.policies.base import EvictionPolicy
from kvtier.control.policies.lru import LRU
from kvtier.errors import ConfigError
from kvtier.types.keys import OffloadKey

POLICIES: dict[str, type[EvictionPolicy]] = {"arc": ARC, "lru": LRU}

__all__ = ["ARC", "LRU", "POLICIES", "EvictionPolicy", "make_policy"]


def make_policy(name: str, num_slots: int, keys: Sequence[OffloadKey | None]) -> EvictionPolicy:
    """A new policy over slots 0 .. num_slots - 1; `keys` is the tier's own list, read but never changed.

    Raises ConfigError for a name that is not in `POLICIES`.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"unknown policy {name!r}; use one of {', '.join(sorted(POLICIES))}", "policy")
    return policy(num_slots, keys)
