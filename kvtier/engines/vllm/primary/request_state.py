"""The manager's state of one request while vLLM scans its keys."""

import dataclasses

from kvtier.control.reservations import KeyState, Reservation
from kvtier.tier.contract import LookupResult
from kvtier.types.keys import OffloadKey, key_group


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
    """The lookups of one request. `keys` are those found in this step's scans, in lookup order.

    `deferred`: one of them was not a hit. `unknown` are those that no tier could answer for in this step, `chain` those
    that are asked for until all are known. `computes`: what is not in a row is computed, which is sooner than a load.
    `announced` is how many of its keys the stack was given, None before the first.
    `from_below` are the keys that were not in a row at their first lookup: vLLM reports them as disk hits. `pending`
    are those that were answered with HIT_PENDING.
    """

    keys: dict[OffloadKey, None] = dataclasses.field(default_factory=dict)
    unknown: dict[OffloadKey, None] = dataclasses.field(default_factory=dict)
    chain: dict[OffloadKey, None] = dataclasses.field(default_factory=dict)
    deferred: bool = False
    computes: bool = False
    refused_since: float | None = None
    from_below: set[OffloadKey] = dataclasses.field(default_factory=set)
    pending: set[OffloadKey] = dataclasses.field(default_factory=set)
    announced: int | None = None
    _last: dict[int, int] = dataclasses.field(default_factory=dict)

    def found(self, key: OffloadKey, result: LookupResult) -> None:
        """Record an answer that is not a miss."""
        if result is LookupResult.HIT:
            self.keys[key] = None
            return
        self.deferred = True
        if result is LookupResult.RETRY:
            self.unknown[key] = None
        elif result is LookupResult.HIT_PENDING:
            self.from_below.add(key)
            self.pending.add(key)
            if not self.unknown:  # what is behind a key that turns out to be absent is of no use
                self.keys[key] = None

    def waiting(self, key: OffloadKey, position: int | None) -> LookupResult:
        """The O(1) answer while the request's reservation is not served.

        A prefix scan ends at a miss after its first pending key; a window scan goes from right to left and ends once
        its window is full, so there every key is pending.
        """
        group = key_group(key)
        last = self._last.get(group)
        self._last[group] = 0 if position is None else position
        if last is None or position is None or position < last:
            self.pending.add(key)
            return LookupResult.HIT_PENDING
        return LookupResult.MISS

    def end_step(self) -> None:
        """The scans of this step are over."""
        self.unknown = {}
        self.keys.clear()
        self._last.clear()
        self.deferred = False


def reserved_answer(reservation: Reservation, key: OffloadKey) -> LookupResult | None:
    """The answer of a served reservation for a key; None if the key is not part of it."""
    index = reservation.index.get(key)
    if index is None:
        return None
    return LookupResult.HIT if reservation.state[index] is KeyState.LEASED else LookupResult.MISS
