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

from kvtier.control.tiers.shared_tier import SharedTier
from kvtier.types.keys import GroupIndex, OffloadKey, by_group

FIRST_PARTS = (0.0, 0.125, 0.5)
"""Where in what is unknown of a chain the first keys are looked up: no prompt of 512 blocks takes more than 11."""


class ProbedTier(SharedTier):
    """A shared tier of which `groups` are chains, those of full attention. Other groups are looked up key by key.

    All lookups for one chain end within the time for one: after that, what is unknown counts as absent.
    """

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

    def find(self, keys: Sequence[OffloadKey], now: float) -> list[bool | None]:
        """The presence of each key; what lies behind a key of its group that is absent is absent too."""
        presences: list[bool | None] = [None] * len(keys)
        for group, members in by_group(keys).items():
            of_group = [keys[at] for at in members]
            found = self._probe(of_group, now) if group in self.groups else super().find(of_group, now)
            for at, presence in zip(members, found, strict=True):
                presences[at] = presence
        return presences

    def _probe(self, chain: Sequence[OffloadKey], now: float) -> list[bool | None]:
        known = [self.presence(key, now) for key in chain]
        end = known.index(False) if False in known else len(chain)
        begin = max((at for at in range(end) if known[at]), default=-1) + 1
        for at in range(begin):
            if known[at] is None:
                self._believe(chain[at], True, until=self._hints[chain[begin - 1]][1])
        fresh = chain[-1] not in self._deadlines
        if begin < end and now >= self._deadline(chain[-1], now):
            self.learn(chain[begin], False, now)
            end = begin
        if begin == end:
            self._deadlines.pop(chain[-1], None)
        elif self._open.keys().isdisjoint(chain[begin:end]):
            for at in sorted({begin + int(part * (end - begin)) for part in (FIRST_PARTS if fresh else (0.5,))}):
                self.request(chain[at], now)
        return [True] * begin + [None] * (end - begin) + [bool(there) for there in known[end:]]

    def _deadline(self, last: OffloadKey, now: float) -> float:
        """When the lookups for the chain that ends with this key end.

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
