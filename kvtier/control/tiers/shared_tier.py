"""Hints about a shared tier, whose placement and eviction belong to its backend and to other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvtier.control.tiers.breaker import Breaker
from kvtier.control.tiers.tier_index import ASKED_AT_ONCE, TierIndex
from kvtier.tier.contract import LookupResult
from kvtier.types.checks import check_keys
from kvtier.types.keys import OffloadKey


class SharedTier(TierIndex):
    """Hints about the keys of a shared tier. A hint expires; a key without one is unknown until it is looked up.

    That a key is there is believed for `hit_hint_seconds`, that it is not for `miss_hint_seconds`: others store too.
    A key that is not answered for by its deadline counts as absent until that hint expires. The deadline runs from
    the first question on, however often the backend says RETRY. A backend that says nothing else is not asked for a
    while, during which unknown keys are absent: requests would wait for each of their lookups until its deadline.
    """

    def __init__(
        self,
        name: str,
        hit_hint_seconds: float,
        miss_hint_seconds: float,
        lookup_timeout_seconds: float,
        max_hints: int,
    ) -> None:
        super().__init__(name)
        self.hit_hint_seconds = hit_hint_seconds
        self.miss_hint_seconds = miss_hint_seconds
        self.lookup_timeout_seconds = lookup_timeout_seconds
        self.max_hints = max_hints
        self.lookup_breaker = Breaker()
        self._hints: dict[OffloadKey, tuple[bool, float]] = {}
        self._asked: dict[OffloadKey, float] = {}
        self._open: dict[OffloadKey, None] = {}

    def presence(self, key: OffloadKey, now: float) -> bool | None:
        """True or False while a hint is fresh, None while unknown. Never asks."""
        hint = self._hints.get(key)
        if hint is not None:
            if hint[1] > now:
                return hint[0]
            del self._hints[key]
        deadline = self._asked.get(key)
        if deadline is not None and deadline <= now:
            self._end_query(key)
            self.note_presence(key, False, now)
            return False
        return None if self.lookup_breaker.allows(now) else False

    def presences(self, keys: Sequence[OffloadKey], now: float) -> list[bool | None]:
        """The presence of each key, as `presence` says it, in few passes over all of them."""
        unasked = None if self.lookup_breaker.allows(now) else False
        hints = map(self._hints.get, keys)
        known = [unasked if hint is None or hint[1] <= now else hint[0] for hint in hints]
        if not self._asked.keys().isdisjoint(keys):
            for at, key in enumerate(keys):
                if key in self._asked:
                    known[at] = self.presence(key, now)
        return known

    def find(self, keys: Sequence[OffloadKey], now: float) -> list[bool | None]:
        """The presence of each key; what is unknown is looked up, `ASKED_AT_ONCE` keys at a time.

        Raises UsageError for what is no key.
        """
        check_keys(keys)
        presences = self.presences(keys, now)
        if None in presences:
            unknown = (key for key, there in zip(keys, presences, strict=True) if there is None)
            for key in islice(unknown, ASKED_AT_ONCE):
                self.request(key, now)
        return presences

    def request(self, key: OffloadKey, now: float) -> None:
        """Put a question about an unknown key, unless one is open."""
        if key in self._open:
            return
        if key not in self._asked:
            if len(self._asked) >= self.max_hints:
                self._end_query(next(iter(self._asked)))
            self._asked[key] = now + self.lookup_timeout_seconds
        self._open[key] = None
        self.queries.append(key)

    def _end_query(self, key: OffloadKey) -> None:
        self._asked.pop(key, None)
        self._open.pop(key, None)

    def take_answers(self, keys: Sequence[OffloadKey], results: Sequence[LookupResult], now: float) -> None:
        """The backend's answers; RETRY leaves the key unknown, to be asked for again."""
        if all(result is LookupResult.RETRY for result in results):
            self.lookup_breaker.on_failure(now)
        else:
            self.lookup_breaker.on_success()
        for key, result in zip(keys, results, strict=True):
            if result is LookupResult.RETRY:
                self._open.pop(key, None)
            else:
                self._end_query(key)
                self.note_presence(key, result is not LookupResult.MISS, now)

    def note_presence(self, key: OffloadKey, present: bool, now: float) -> None:
        """Something was found out about a key (a lookup, a store, a load that missed)."""
        self._believe(key, present, now + (self.hit_hint_seconds if present else self.miss_hint_seconds))

    def _believe(self, key: OffloadKey, present: bool, until: float) -> None:
        self._hints.pop(key, None)
        self._hints[key] = (present, until)
        self._trim()

    def _trim(self) -> None:
        """Forget what was learned first if there is too much."""
        if len(self._hints) > self.max_hints:
            for oldest in list(self._hints)[: len(self._hints) - self.max_hints * 3 // 4]:
                del self._hints[oldest]

    def reset(self) -> None:
        """Forget everything."""
        self._hints.clear()
        self._asked.clear()
        self._open.clear()
        self.queries.clear()
