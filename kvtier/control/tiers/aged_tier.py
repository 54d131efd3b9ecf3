"""An owned tier with a `max_age`: a block that is too old is not present, and its slot becomes free."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.slot_table import READY
from kvtier.policy import EvictionPolicy, RequestModels
from kvtier.tier.block_age import BlockAges, next_generation
from kvtier.tier.contract import SlotSpace
from kvtier.types.arrays import NO_IDS, IntArray
from kvtier.types.keys import OffloadKey

RECLAIMED_AT_ONCE = 1024
"""Slots that one call of `reclaim` makes free, at most: the engine waits meanwhile."""
_REST_SECONDS = 0.05
_PASSES = 64
_PASS_SECONDS = 1.0, 60.0


class AgedTier(OwnedTier):
    """Knows by `ages` which blocks are too old. What is present at one time `now` is so until the next one.

    `reclaim_at` is when `reclaim` has work again: every 64th of the age a pass over all slots, at least a second and at
    most a minute apart, and soon while a pass has found more than one call makes free.
    """

    def __init__(
        self,
        name: str,
        space: SlotSpace,
        policy: str | type[EvictionPolicy],
        models: RequestModels | None = None,
        ages: BlockAges | None = None,
    ) -> None:
        super().__init__(name, space, policy, models, ages)
        assert ages is not None
        assert ages.max_age_seconds is not None
        shortest, longest = _PASS_SECONDS
        self._ages = ages
        self._limit = ages.limit()
        self._limit_of = -math.inf
        self._pass_seconds = min(max(ages.max_age_seconds / _PASSES, shortest), longest)
        self._found: IntArray = NO_IDS
        self.reclaim_at = -math.inf

    # -- presence ------------------------------------------------------------------------------------------------

    def presence(self, key: OffloadKey, now: float) -> bool:
        """True if the key's bytes are here and not too old."""
        self._judge_by(now)
        return self.ready(key) is not None

    def find(self, keys: Sequence[OffloadKey], now: float) -> list[bool | None]:
        """The presence of each key of a request, in one step."""
        self._judge_by(now)
        state, generation, (oldest, newest) = self.table.state, self.table.generation, self._limit
        slots = map(self.directory.get, keys)
        return [slot is not None and state[slot] == READY and oldest <= generation[slot] <= newest for slot in slots]

    def needs(self, key: OffloadKey, now: float) -> bool:
        """True unless the key has a slot, filling or ready. A block that is too old gives up its slot."""
        self._judge_by(now)
        self.ready(key)
        return super().needs(key, now)

    def needs_all(self, keys: Sequence[OffloadKey], now: float) -> bool:
        """True if `needs` is, for each of the keys."""
        return super().needs_all(keys, now) or all(self.needs(key, now) for key in keys)

    def ready(self, key: OffloadKey) -> int | None:
        """The slot that holds this key's bytes, or None. A block that is too old gives up its slot."""
        slot = super().ready(key)
        if slot is None or self._limit.allows(self.table.generation[slot]):
            return slot
        self._expire((slot,))
        return None

    def discard(self, slot: int, generation: int) -> bool:
        """Drop the entry, as in every tier. A block that is too old is no error of its place."""
        if not self.has(slot, generation) or self._ages.limit().allows(generation):
            return super().discard(slot, generation)
        self._expire((slot,))
        return True

    def _judge_by(self, now: float) -> None:
        """From here on a block is too old if it is at `now`."""
        if now != self._limit_of:
            self._limit, self._limit_of = self._ages.limit(), now

    # -- time ----------------------------------------------------------------------------------------------------

    def reclaim(self, now: float) -> None:
        """Free slots whose blocks are too old, if it is time for that."""
        if now < self.reclaim_at:
            return
        self._judge_by(now)
        if not len(self._found):
            self._found = self._too_old()
            self.table.next_generation = next_generation(self.table.next_generation - 1, self._ages.now_ns())
        some, self._found = self._found[:RECLAIMED_AT_ONCE], self._found[RECLAIMED_AT_ONCE:]
        state, generation, allows = self.table.state, self.table.generation, self._limit.allows
        self._expire([slot for slot in some.tolist() if state[slot] == READY and not allows(generation[slot])])
        self.reclaim_at = now + (_REST_SECONDS if len(self._found) else self._pass_seconds)

    def _too_old(self) -> IntArray:
        """The slots whose blocks are too old."""
        generations = self.table.generations
        ready = np.frombuffer(self.table.state, np.uint8) == READY
        return np.flatnonzero(ready & ((generations < self._limit.oldest) | (generations > self._limit.newest)))

    def _expire(self, slots: Sequence[int]) -> None:
        self.expired += len(slots)
        self.remove(slots)
