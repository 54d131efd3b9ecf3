"""Requests that begin, go on and end, and the time: passed to the policies that follow requests, and their models.

Hits of tiers of other sizes (`SizeCurve`) are counted here too, of the requests that begin.

The caller may hand in the time of a request, such as that of a trace; then the time of the policies is what was handed
in, and nothing else. Otherwise it is the stack's. Either way it never goes back: a time before the last one counts as
that one. After `BEHIND_MAX` of them in a row the clock itself was set back: then it goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import filterfalse, repeat

from kvtier.control.state import ControlState
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.size_curve import SizeCurve
from kvtier.control.tiers.slot_table import FILLING, READY
from kvtier.errors import UsageError
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId, key_group
from kvtier.types.requests import NO_INFO, RequestInfo, RequestUse

OPEN_MAX = 65536
"""Requests that began and have not ended, at most: beyond that the oldest count as aborted."""
BEHIND_MAX = 16
"""Times in a row before the last one, after which the clock counts as set back."""
FIRST_GROUP = GroupIndex(0)
NO_REQUEST = RequestId("")
"""The request of a use that came with `touch` alone."""


class RequestTracker:
    """The open requests of a stack in which a policy follows requests, or with `curves`.

    `chains` are the groups of which every block needs all those before it; None: all groups. The others are not passed
    on. Once a request has begun, `touch` is no use of its own: its request was one.
    """

    def __init__(self, control: ControlState, chains: frozenset[GroupIndex] | None, curves: bool = False) -> None:
        self._control = control
        self._curves = curves
        self._followed = bool(list(control.models))
        self._chains = chains
        self._one_group = len(control.cpu.space.slot_bytes) == 1
        self._time = -math.inf
        self._ahead = 0.0
        self._behind = 0
        self._handed_in = False
        self._begun = False
        self._touched = False
        self._open: dict[RequestId, None] = {}

    @property
    def counted(self) -> bool:
        """True once any use was taken in: then the loads of a request are no uses of their own."""
        return self._begun or self._touched

    def begin(
        self, request_id: RequestId, keys: Sequence[OffloadKey], now: float, time: float | None, info: RequestInfo
    ) -> None:
        """Begin a request, once, that uses these keys: each group's in prefix order, however the groups are mixed.

        `time` is the time of the policies, in seconds; `now`, the stack's, if None.
        """
        if request_id in self._open:
            return
        if time is not None and not math.isfinite(time):
            raise UsageError(f"the time of request {request_id} is {time}")
        self._handed_in = self._handed_in or time is not None
        self._begun = True
        self._open[request_id] = None
        groups = self._by_group(keys)
        if self._curves:
            self._count(groups)
        self._use(request_id, groups, now, self._time_of(now, time), info)
        if len(self._open) > OPEN_MAX:
            self.end(next(iter(self._open)), None)

    def extend(self, request_id: RequestId, keys: Sequence[OffloadKey]) -> None:
        """Extend a request by these blocks of its output; nothing happens unless it began and has not ended."""
        if not self._followed or request_id not in self._open:
            return
        for group, chain in self._by_group(keys):
            for model in self._control.models:
                model.extend_request(request_id, group, chain)
            for tier, policy in self._control.request_policies:
                policy.extend_request(request_id, group, chain, _ready_slots(tier, chain))

    def on_touch(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Count a use of these keys by an embedder: a request of its own, unless it announces those as they begin."""
        if not self._begun:
            self._touched = True
            self._use(NO_REQUEST, self._by_group(keys), now, self._time_of(now), NO_INFO)

    def end(self, request_id: RequestId, output_tokens: int | None) -> None:
        """End a request; nothing happens if it never began."""
        if request_id in self._open:
            del self._open[request_id]
            for model in self._control.models:
                model.end_request(request_id, output_tokens)
            for _, policy in self._control.request_policies:
                policy.end_request(request_id, output_tokens)

    def advance(self, now: float) -> None:
        """Let time pass up to `now` on the stack's clock."""
        self._advance(self._time_of(now))

    def _advance(self, time: float) -> None:
        for model in self._control.models:
            model.advance(time)
        for _, policy in self._control.request_policies:
            policy.advance(time)

    def _time_of(self, now: float, time: float | None = None) -> float:
        if time is None and not self._handed_in:
            time = now
        if time is None:
            return self._time if self._time > -math.inf else now
        if time + self._ahead >= self._time:
            self._time = time + self._ahead
            self._behind = 0
        else:
            self._behind += 1
            if self._behind == BEHIND_MAX:
                self._ahead, self._behind = self._time - time, 0
        return self._time

    def _count(self, groups: Sequence[tuple[GroupIndex, list[OffloadKey]]]) -> None:
        keys = [key for _, chain in groups for key in chain]
        for tier in self._control.owned_tiers:
            if tier.curve is None:
                tier.curve = SizeCurve(tier.space)
            tier.curve.use(keys)

    def _use(
        self,
        request_id: RequestId,
        groups: Sequence[tuple[GroupIndex, list[OffloadKey]]],
        now: float,
        time: float,
        info: RequestInfo,
    ) -> None:
        if not self._followed:
            return
        self._advance(time)
        for group, chain in groups:
            use = RequestUse(request_id, time, chain, group, self._count_new(chain, now), info)
            for model in self._control.models:
                model.begin_request(use)
            for tier, policy in self._control.request_policies:
                slots = _ready_slots(tier, chain)
                tier.uses.use([slot for slot in slots if slot >= 0])
                policy.begin_request(use, slots)

    def _by_group(self, keys: Sequence[OffloadKey]) -> list[tuple[GroupIndex, list[OffloadKey]]]:
        """The chain of each group that keeps one, without keys that come twice."""
        distinct = list(dict.fromkeys(keys))
        if self._one_group:
            return [(FIRST_GROUP, distinct)] if distinct else []
        groups: dict[GroupIndex, list[OffloadKey]] = {}
        for key in distinct:
            groups.setdefault(key_group(key), []).append(key)
        return [item for item in groups.items() if self._chains is None or item[0] in self._chains]

    def _count_new(self, keys: Sequence[OffloadKey], now: float) -> int:
        for index in self._control.indexes:
            if isinstance(index, OwnedTier):
                keys = list(filterfalse(index.directory.__contains__, keys))
            else:
                keys = [key for key in keys if not index.presence(key, now)]
        return len(keys)


def _ready_slots(tier: OwnedTier, keys: Sequence[OffloadKey]) -> list[int]:
    slots = list(map(tier.directory.get, keys, repeat(-1)))
    state, kept = tier.table.state, tier.retained.slots
    if kept or tier.table.counts[FILLING]:
        return [slot if slot >= 0 and state[slot] == READY and slot not in kept else -1 for slot in slots]
    return slots
