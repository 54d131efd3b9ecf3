"""Lookups of one engine: each is one lookup in the tiers, in however many items it came, until all of it is known.

A tier finds a whole prefix with few requests if the same keys are looked up again until it has answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.service import wire
from kvtier.service.quotas import PoolState
from kvtier.service.wire import IN_ROW, MISSING, PENDING, UNKNOWN, Breach, Item
from kvtier.tier.contract import LookupResult
from kvtier.types.keys import OffloadKey

LOOK_SECONDS = 0.05
"""The time after which a lookup goes on although no tier has answered: one may have given up."""
KEYS_MAX = 2 * wire.JOB_BLOCKS_MAX
"""Keys of lookups of an engine that go on; what is unknown of others is missing."""
Lookup = wire.Ask | wire.Look
Answer = Callable[[wire.Ask, Sequence[OffloadKey], Sequence[LookupResult]], tuple[bytes, wire.Places]]
UPDATES = {
    LookupResult.HIT: PENDING,
    LookupResult.HIT_PENDING: PENDING,
    LookupResult.RETRY: UNKNOWN,
    LookupResult.MISS: MISSING,
}
NO_PLACES = wire.Places(b"", b"")


@dataclass(slots=True, eq=False)
class OpenLookup:
    """A lookup in its parts, with the keys of all of them."""

    items: list[Lookup]
    parts: list[list[OffloadKey]]

    @property
    def keys(self) -> list[OffloadKey]:
        """All keys, in their order."""
        return self.parts[0] if len(self.parts) == 1 else [key for part in self.parts for key in part]

    @property
    def named(self) -> tuple[type[Item], str]:
        """The kind of lookup, and its request."""
        first = self.items[0]
        return type(first), first.request if isinstance(first, wire.Ask) else ""


class OpenLookups:
    """`out` takes the answers; `lease` gives states and places for those of a request. `look_at`: when to go on."""

    def __init__(self, pool: PoolState, out: list[Item], lease: Answer) -> None:
        self.look_at = math.inf
        self._pool = pool
        self._out = out
        self._lease = lease
        self._coming: OpenLookup | None = None
        self._open: list[OpenLookup] = []
        self._num_keys = 0

    def take(self, item: Lookup, keys: list[OffloadKey], now: float) -> None:
        """Take in a part. With the last one the engine is sent what is known. Raises Breach."""
        part = OpenLookup([item], [keys])
        lookup = self._coming or part
        if lookup.named != part.named:
            raise Breach("a lookup ends before all its keys have come")
        if lookup is not part:
            lookup.items.append(item)
            lookup.parts.append(keys)
        if sum(map(len, lookup.parts)) > wire.JOB_BLOCKS_MAX:
            raise Breach(f"a lookup has more than {wire.JOB_BLOCKS_MAX} keys")
        self._coming = lookup if item.more else None
        if not item.more:
            self._begin(lookup, now)

    def _begin(self, lookup: OpenLookup, now: float) -> None:
        keys, first = lookup.keys, lookup.items[0]
        asks = not isinstance(first, wire.Look) or first.asks
        found = self._pool.plane.lookup(keys, now, asks)
        goes_on = asks and LookupResult.RETRY in found and self._num_keys + len(keys) <= KEYS_MAX
        if goes_on:
            self._open.append(lookup)
            self._num_keys += len(keys)
            self.look_at = min(self.look_at, now + LOOK_SECONDS)
        at = 0
        for item, part in zip(lookup.items, lookup.parts, strict=True):
            some = found[at : at + len(part)]
            at += len(part)
            more = goes_on and LookupResult.RETRY in some
            if isinstance(item, wire.Ask):
                states, places = self._lease(item, part, some)
            else:
                states, places = _states(some), NO_PLACES
            if not goes_on and asks:
                states = states.replace(bytes((UNKNOWN,)), bytes((MISSING,)))
            self._out.append(wire.Found(item.number, states, places, more))

    def refuse(self, item: Lookup, count: int) -> None:
        """The engine is served nothing now: a lookup of so many keys finds nothing, nor do its earlier parts."""
        coming, self._coming = self._coming, None
        if coming is not None:
            for part, keys in zip(coming.items, coming.parts, strict=True):
                self.answer_missing(part.number, len(keys))
        self.answer_missing(item.number, count)

    def answer_missing(self, number: int, count: int) -> None:
        """Nothing of this is to be had."""
        self._out.append(wire.Found(number, bytes((MISSING,)) * count, NO_PLACES))

    def look_now(self, now: float) -> None:
        """A tier has answered: lookups that are open go on with the next `go_on`."""
        if self._open:
            self.look_at = min(self.look_at, now)

    def go_on(self, now: float) -> bool:
        """Look once more, and send what is known now of lookups of which all is. True if tiers may have been asked."""
        if now < self.look_at:
            return False
        for lookup in list(self._open):
            found = self._pool.plane.lookup(lookup.keys, now)
            if LookupResult.RETRY not in found:
                self._end(lookup)
                self._update(lookup, found)
        self.look_at = now + LOOK_SECONDS if self._open else math.inf
        return True

    def _update(self, lookup: OpenLookup, found: Sequence[LookupResult]) -> None:
        at = 0
        for item, part in zip(lookup.items, lookup.parts, strict=True):
            some = found[at : at + len(part)]
            at += len(part)
            states = bytes(UPDATES[each] for each in some) if isinstance(item, wire.Ask) else _states(some)
            self._out.append(wire.Found(item.number, states, NO_PLACES))

    def _end(self, lookup: OpenLookup) -> None:
        self._open.remove(lookup)
        self._num_keys -= sum(map(len, lookup.parts))

    def drop(self, request: str) -> None:
        """The engine has forgotten the lookups of a request."""
        for lookup in [each for each in self._open if each.named == (wire.Ask, request)]:
            self._end(lookup)

    def drop_all(self) -> None:
        """The engine has forgotten all lookups, or is to."""
        self._coming = None
        self._open.clear()
        self._num_keys = 0
        self.look_at = math.inf


def _states(found: Sequence[LookupResult]) -> bytes:
    return bytes(IN_ROW if each is LookupResult.HIT else UPDATES[each] for each in found)
