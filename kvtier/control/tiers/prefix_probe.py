"""Prefix probing: few lookups for a whole prompt, in shared tiers where each key that is looked up costs a request.

The keys of one group in a lookup are a chain: a block is of use only behind all those before it, so where one is there
it is believed that those before it are. That leaves one number to find, how many blocks from the first on are there,
and it takes a few keys to find it: at first the first one, the one after an eighth and the one in the middle, in one
question to the tier, then the one in the middle of what is open. Each answer narrows it further at the next lookup of
the same keys. The first key tells at once that nothing is there, the second that little is, which is the most frequent
case in traces. A belief that was wrong is a block that is missing at its load; then it is known that it is not there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvtier.control.tiers.shared_tier import SharedTier
from kvtier.types.checks import check_keys
from kvtier.types.jobs import by_group
from kvtier.types.keys import GroupIndex, OffloadKey

FIRST_PARTS = (0.0, 0.125, 0.5)
"""Where in what is unknown of a chain the first keys are looked up: no prompt of 512 blocks takes more than 11."""


SEARCHES_MAX = 1024
SEARCHED_KEYS_MAX = 1 << 20
"""Searches that are kept, and the keys of all of them: of others everything is looked at once more."""


@dataclass(slots=True, eq=False)
class ChainSearch:
    """The part of a chain that is there: its end is from `begin` to `end`. The keys at `asked` were looked up.

    After `until` what it rests on may have changed: then everything is looked at once more.
    """

    chain: list[OffloadKey]
    begin: int
    end: int
    until: float
    asked: list[int] = field(default_factory=list)


class ProbedTier(SharedTier):
    """A shared tier of which `groups` are chains, those of full attention. Other groups are looked up key by key.

    A call of at most `probed_from` keys is answered key by key. All lookups for one chain end within the time for one:
    after that, what is unknown counts as absent. While a chain is being searched its next lookup looks at what was
    asked alone, so that a long prompt costs few passes.
    """

    probed_from = 0

    def __init__(
        self,
        name: str,
        hit_hint_seconds: float,
        miss_hint_seconds: float,
        lookup_timeout_seconds: float,
        max_hints: int,
        groups: Collection[GroupIndex],
    ) -> None:
        super().__init__(name, hit_hint_seconds, miss_hint_seconds, lookup_timeout_seconds, max_hints)
        self.groups = groups
        self._deadlines: dict[OffloadKey, float] = {}
        self._searches: dict[OffloadKey, ChainSearch] = {}
        self._searched_keys = 0

    def find(self, keys: Sequence[OffloadKey], now: float) -> list[bool | None]:
        """The presence of each key; what lies behind a key of its group that is absent is absent too."""
        if len(keys) <= self.probed_from:
            return super().find(keys, now)
        if keys and keys[-1] in self._searches and (search := self._search_of(list(keys), now)) is not None:
            return self._go_on(search, now)
        check_keys(keys)
        groups = by_group(keys)
        if len(groups) == 1:
            (group,) = groups
            return self._probe(list(keys), now) if group in self.groups else super().find(keys, now)
        presences: list[bool | None] = [None] * len(keys)
        for group, members in groups.items():
            of_group = [keys[at] for at in members]
            found = self._probe(of_group, now) if group in self.groups else super().find(of_group, now)
            for at, presence in zip(members, found, strict=True):
                presences[at] = presence
        return presences

    def _probe(self, chain: list[OffloadKey], now: float) -> list[bool | None]:
        search = self._search_of(chain, now)
        if search is not None:
            return self._go_on(search, now)
        known = self.presences(chain, now)
        end = known.index(False) if False in known else len(chain)
        begin = end - known[:end][::-1].index(True) if True in known[:end] else 0
        if None in known[:begin]:
            self._believe_all(chain[: begin - 1], self._hints[chain[begin - 1]][1], now)
        if begin < end:
            search = ChainSearch(chain, begin, end, now + self.lookup_timeout_seconds)
            if not self._open.keys().isdisjoint(chain[begin:end]):
                search.asked = [at for at in range(begin, end) if chain[at] in self._open]
            return self._narrow(search, now)
        self._deadlines.pop(chain[-1], None)
        return [*([True] * begin), *(bool(there) for there in known[end:])]

    def _search_of(self, chain: list[OffloadKey], now: float) -> ChainSearch | None:
        """The search for this chain that goes on, if there is one."""
        search = self._searches.get(chain[-1])
        if search is None or now >= search.until or search.chain != chain or not self.lookup_breaker.allows(now):
            return None
        return search

    def _go_on(self, search: ChainSearch, now: float) -> list[bool | None]:
        """Narrow the searches by the answers."""
        chain, begin, end = search.chain, search.begin, search.end
        for at in search.asked:
            there = self.presence(chain[at], now) if begin <= at < end else None
            if there:
                search.begin = at + 1
            elif there is False:
                search.end = at
                break
        if search.begin > begin:
            self._believe_all(chain[begin : search.begin - 1], self._hints[chain[search.begin - 1]][1], now)
        return self._narrow(search, now)

    def _narrow(self, search: ChainSearch, now: float) -> list[bool | None]:
        """Ask for a few keys of what is unknown, unless that is done already, or over."""
        chain, begin, end = search.chain, search.begin, search.end
        last = chain[-1]
        fresh = last not in self._deadlines
        if begin < end and now >= self._deadline(last, now):
            self.note_presence(chain[begin], False, now)
            end = begin
        if begin == end:
            self._deadlines.pop(last, None)
            self._end(last)
        else:
            if not any(chain[at] in self._open for at in search.asked if begin <= at < end):
                parts = FIRST_PARTS if fresh else (0.5,)
                search.asked = sorted({begin + int(part * (end - begin)) for part in parts})
                for at in search.asked:
                    self.request(chain[at], now)
            self._keep(last, search)
        return [True] * begin + [None] * (end - begin) + [False] * (len(chain) - end)

    def _keep(self, last: OffloadKey, search: ChainSearch) -> None:
        if self._searches.get(last) is not search:
            self._end(last)
            self._searches[last] = search
            self._searched_keys += len(search.chain)
            while len(self._searches) > SEARCHES_MAX or self._searched_keys > SEARCHED_KEYS_MAX:
                self._end(next(iter(self._searches)))

    def _end(self, last: OffloadKey) -> None:
        search = self._searches.pop(last, None)
        if search is not None:
            self._searched_keys -= len(search.chain)

    def _believe_all(self, keys: Sequence[OffloadKey], until: float, now: float) -> None:
        """Record the keys without a hint as there, until then."""
        hints, hint = self._hints, (True, until)
        hints.update({key: hint for key in keys if key not in hints or hints[key][1] <= now})
        self._trim()

    def _deadline(self, last: OffloadKey, now: float) -> float:
        """The time at which the lookups for the chain that ends with this key end.

        They begin now, unless they did a short while ago: those of a request that was given up are over.
        """
        deadline = self._deadlines.get(last, -math.inf)
        if now >= deadline + self.lookup_timeout_seconds:
            if len(self._deadlines) >= self.max_hints:
                del self._deadlines[next(iter(self._deadlines))]
            deadline = self._deadlines[last] = now + self.lookup_timeout_seconds
        return deadline

    def reset(self) -> None:
        super().reset()
        self._deadlines.clear()
        self._searches.clear()
        self._searched_keys = 0
