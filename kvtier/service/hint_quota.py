"""A bound of what one engine of several may ask for by hints, so that none takes what the others may retain.

While n engines are served, each may retain an nth of the bytes, sets and blocks that all may; it is counted in the
blocks that its hints name, whether a tier has them or not, each once in a set. A prefetch takes at most an nth of the
room that the queue has left. What was retained before another engine came stays.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

from kvtier.control.hints.retention import CLAIMS_MAX
from kvtier.control.settings import StackSettings
from kvtier.service.pool_state import PoolState
from kvtier.types.hints import HintRefusal, KVHint, Pin, Prefetch, Release, Retain
from kvtier.types.keys import OffloadKey, key_group


@dataclass(slots=True, eq=False)
class NamedSet:
    """The blocks that an engine has a session retain, or pin, until a time, and their bytes in rows."""

    until: float = -math.inf
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    num_bytes: int = 0


class HintQuota:
    """The hints of one engine."""

    def __init__(self, pool: PoolState, settings: StackSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._sets: dict[tuple[str, bool], NamedSet] = {}

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
        control, share = self._pool.plane.control, max(1, self._pool.quotas.engines)
        name = (hint.session, isinstance(hint, Pin))
        one = self._sets.get(name)
        if one is None:
            if len(self._sets) >= self._settings.retained_sets // share:
                return replace(hint, keys=()), HintRefusal.TOO_MANY
            one = self._sets[name] = NamedSet()
        one.until = max(one.until, now + min(hint.seconds, self._settings.retain_time))
        sets = self._sets.values()
        bytes_left = sum(tier.retained.max_bytes for tier in control.owned_tiers) // share
        bytes_left -= sum(each.num_bytes for each in sets)
        blocks_left = CLAIMS_MAX // share - sum(len(each.keys) for each in sets)
        taken, refusal = list[OffloadKey](), None
        for key in hint.keys:
            if key not in one.keys:
                num_bytes = self._pool.geometry.aligned_bytes(key_group(key))
                if num_bytes > bytes_left or blocks_left <= 0:
                    refusal = HintRefusal.OVER_QUOTA if num_bytes > bytes_left else HintRefusal.TOO_MANY
                    continue
                one.keys[key] = None
                one.num_bytes += num_bytes
                bytes_left -= num_bytes
                blocks_left -= 1
            taken.append(key)
        return replace(hint, keys=taken), refusal

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
