"""What one request asks for, key by key and step after step, as vLLM's scheduler does it.

vLLM scans prefixes from the left and windows from the right, asks again in every step a request waits, and never says
that it did not use a hit. So keys are collected while a step asks, reserved when it ends, and answered from the
reservation from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.control.reservations import KeyState, Reservation
from kvtier.keys import OffloadKey, key_group
from kvtier.loadstore import LookupResult


@dataclass(slots=True, eq=False)
class Asking:
    """One request. `keys` are those found in this step's scans, in the order asked; `deferred` if one was not a hit.

    `from_below` are the keys that were not in a row when they were first asked for: vLLM reports them as disk hits.
    """

    keys: dict[OffloadKey, None] = field(default_factory=dict)
    deferred: bool = False
    asked: bool = False
    reserved: bool = False
    refused_since: float | None = None
    from_below: set[OffloadKey] = field(default_factory=set)
    _last: dict[int, int] = field(default_factory=dict)

    def found(self, key: OffloadKey, result: LookupResult) -> None:
        """Note an answer that is no miss."""
        if result is LookupResult.HIT:
            self.keys[key] = None
            return
        self.deferred = True
        if result is LookupResult.HIT_PENDING:
            self.keys[key] = None
            self.from_below.add(key)

    def waiting(self, key: OffloadKey, position: int | None) -> LookupResult:
        """The O(1) answer while the request's reservation is not served.

        A prefix scan ends at a miss after its first pending key; a window scan goes from right to left and ends once
        its window is full, so there every key is pending.
        """
        group = key_group(key)
        last = self._last.get(group)
        self._last[group] = 0 if position is None else position
        if last is None or position is None or position < last:
            return LookupResult.HIT_PENDING
        return LookupResult.MISS

    def end_step(self) -> None:
        """The scans of this step are over."""
        self.keys.clear()
        self._last.clear()
        self.deferred = self.asked = False


def reserved_answer(reservation: Reservation, key: OffloadKey) -> LookupResult | None:
    """What a served reservation says of a key; None if it was not asked for it."""
    index = reservation.index.get(key)
    if index is None:
        return None
    return LookupResult.HIT if reservation.state[index] is KeyState.LEASED else LookupResult.MISS
