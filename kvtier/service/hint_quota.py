"""A bound of what one engine of several may ask for by hints, so that none takes what the others may retain.

While n engines are served, each may retain an nth of the bytes, sets and blocks that all may, counted in the blocks
that its hints name, each once in a set. Those that no tier has are left out again when there is no more room. A
prefetch takes at most an nth of the room that the queue has left. What was retained before another engine came stays.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from kvtier.control.hints.retention import CLAIMS_MAX, RetainedSet
from kvtier.service.quotas import PoolState
from kvtier.types.hints import HintRefusal, KVHint, Pin, Prefetch, Release, Retain
from kvtier.types.keys import OffloadKey, key_group

RECOUNT_SECONDS = 1.0
"""What the stack does not retain is left out at most once in this time: that looks at all blocks of the engine."""


@dataclass(slots=True, eq=False)
class NamedSet(RetainedSet):
    """The blocks that an engine has a session retain, or pin, until a time, and their bytes in rows."""

    num_bytes: int = 0


class HintQuota:
    """The hints of one engine."""

    def __init__(self, pool: PoolState) -> None:
        self._pool = pool
        self._sets: dict[tuple[str, bool], NamedSet] = {}
        self._recounted_at = -math.inf

    def take(self, hint: KVHint, now: float) -> tuple[KVHint, HintRefusal | None]:
        """The hint with as many of its blocks as the engine may name; why not all of them, if so."""
        for name in [name for name, each in self._sets.items() if each.until <= now]:
            del self._sets[name]
        if isinstance(hint, Release):
            for pinned in (False, True):
                self._sets.pop((hint.session, pinned), None)
        elif isinstance(hint, Retain | Pin | Prefetch):
            bounded, refusal = self._prefetch(hint) if isinstance(hint, Prefetch) else self._retain(hint, now)
            if refusal is not None:
                kind = type(hint).__name__.lower()
                self._pool.plane.hints.refused[kind, refusal.value] += len(hint.keys) - len(bounded.keys)
            return bounded, refusal
        return hint, None

    def _retain(self, hint: Retain | Pin, now: float) -> tuple[Retain | Pin, HintRefusal | None]:
        name, alone = (hint.session, isinstance(hint, Pin)), self._pool.quotas.engines <= 1
        if now >= self._recounted_at + RECOUNT_SECONDS and not self._has_room(name, hint.keys):
            self._recounted_at = now
            self._recount()
        one = self._sets.get(name)
        if one is None:
            if len(self._sets) >= self._sets_max:
                return (hint, None) if alone else (replace(hint, keys=()), HintRefusal.TOO_MANY)
            one = self._sets[name] = NamedSet()
        one.until = max(one.until, now + min(hint.seconds, self._pool.settings.retain_time))
        refused = self._add(one, hint.keys)
        if alone or not refused:  # one alone is bounded by the stack itself
            return hint, None
        return replace(hint, keys=[key for key in hint.keys if key not in refused]), next(iter(refused.values()))

    @property
    def _sets_max(self) -> int:
        return self._pool.settings.retained_sets // max(1, self._pool.quotas.engines)

    def _has_room(self, name: tuple[str, bool], keys: Sequence[OffloadKey]) -> bool:
        """True if these blocks of a set may all be counted."""
        one, (bytes_left, blocks_left) = self._sets.get(name), self._left()
        if one is None and len(self._sets) >= self._sets_max:
            return False
        new = [key for key in dict.fromkeys(keys) if one is None or key not in one.keys]
        return sum(map(self._num_bytes, new)) <= bytes_left and len(new) <= blocks_left

    def _add(self, one: NamedSet, keys: Sequence[OffloadKey]) -> dict[OffloadKey, HintRefusal]:
        """Count blocks of a set as far as the quota goes; why the others are not."""
        bytes_left, blocks_left = self._left()
        refused: dict[OffloadKey, HintRefusal] = {}
        for key in keys:
            if key in one.keys:
                continue
            num_bytes = self._num_bytes(key)
            if num_bytes > bytes_left or blocks_left <= 0:
                refused[key] = HintRefusal.OVER_QUOTA if num_bytes > bytes_left else HintRefusal.TOO_MANY
                continue
            one.keys[key] = None
            one.num_bytes += num_bytes
            bytes_left -= num_bytes
            blocks_left -= 1
        return refused

    def _recount(self) -> None:
        """Leave out what the stack does not retain, also what waits in its queue of hints, which is bounded."""
        retention = self._pool.plane.hints.retention
        for one in self._sets.values():
            one.keys = {key: None for key in one.keys if key in retention}
            one.num_bytes = sum(map(self._num_bytes, one.keys))
        self._sets = {name: each for name, each in self._sets.items() if each.keys}

    def _left(self) -> tuple[int, int]:
        """(bytes, blocks) that the engine may yet name."""
        share, sets = max(1, self._pool.quotas.engines), self._sets.values()
        most = sum(tier.retained.max_bytes for tier in self._pool.plane.control.owned_tiers)
        num_bytes, blocks = sum(each.num_bytes for each in sets), sum(len(each.keys) for each in sets)
        return most // share - num_bytes, CLAIMS_MAX // share - blocks

    def _num_bytes(self, key: OffloadKey) -> int:
        return self._pool.geometry.aligned_bytes(key_group(key))

    def _prefetch(self, hint: Prefetch) -> tuple[Prefetch, HintRefusal | None]:
        plane, engines = self._pool.plane, self._pool.quotas.engines
        if engines <= 1:
            return hint, None
        prefetches = plane.hints.prefetches
        room = (prefetches.waiting_max - prefetches.waiting) // engines
        taken = _first(hint.keys, room, plane.control.cpu.directory)
        return replace(hint, keys=taken), HintRefusal.QUEUE_FULL if len(taken) < len(hint.keys) else None

    def reset(self) -> None:
        """Nothing is retained any more."""
        self._sets.clear()


def _first(keys: Sequence[OffloadKey], room: int, there: Container[OffloadKey]) -> Sequence[OffloadKey]:
    """Keys up to the last one for which there is room: those that are there need none."""
    for at, key in enumerate(keys):
        room -= key not in there
        if room < 0:
            return keys[:at]
    return keys
