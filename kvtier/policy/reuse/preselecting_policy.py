"""A policy that follows requests, with victims chosen ahead.

Most steps need a few slots, and a choice by the policy for each would cost more than the rest of the step's control
plane. So victims are chosen ahead, some at once. The slots that are chosen still hold their blocks, and are evicted as
slots are needed. One that is used before that is given back to the policy, as a block that has become ready.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence

from kvtier.policy.base import RequestPolicy
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId
from kvtier.types.requests import RequestUse

AHEAD_MAX = 96
AHEAD_PART = 16
"""Slots that are chosen ahead, at most, and the part of the tier that they are."""
CHOOSE_PART = 8
"""More are chosen once this part of them has gone."""
FEW_PART = 4
"""Up to this part of them, blocks are placed without a comparison of their worth."""


class PreselectingPolicy(RequestPolicy):
    """A policy whose victims are chosen ahead. `policy` is itself, and does not have the slots that are chosen.

    Fewer than `bypass_min_blocks` at once are placed without `bypass`. Of `_ahead` the first goes next.
    """

    def __init__(self, policy: RequestPolicy, num_slots: int) -> None:
        self.policy = policy
        self._ahead_max = min(AHEAD_MAX, num_slots // AHEAD_PART)
        self._choose_at = max(1, self._ahead_max // CHOOSE_PART)
        self.bypass_min_blocks = self._ahead_max // FEW_PART + 1
        self._no_pins = bytes(num_slots)
        self._ahead: OrderedDict[int, None] = OrderedDict()  # a dict would look at all that went from its front
        self._gone = self._short = 0

    def admit(self, keys: Sequence[OffloadKey]) -> None:
        self.policy.admit(keys)

    def insert(self, slots: Sequence[int]) -> None:
        self.policy.insert(slots)

    def recover(self, slots: Sequence[int]) -> None:
        self.policy.recover(slots)

    def touch(self, slots: Sequence[int]) -> None:
        self._use(slots, self.policy.touch)

    def renew(self, slots: Sequence[int]) -> None:
        self._use(slots, self.policy.renew)

    def begin_request(self, use: RequestUse, slots: Sequence[int]) -> None:
        self._use_in_order(slots, self.policy.begin_request, use)

    def extend_request(
        self, request_id: RequestId, group: GroupIndex, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> None:
        self._use_in_order(slots, self.policy.extend_request, request_id, group, keys)

    def end_request(self, request_id: RequestId, output_tokens: int | None) -> None:
        self.policy.end_request(request_id, output_tokens)

    def advance(self, time: float) -> None:
        self.policy.advance(time)

    def remove(self, slots: Sequence[int]) -> None:
        self.policy.remove(self._own(slots))

    def forget(self, slots: Sequence[int]) -> None:
        self.policy.forget(self._own(slots))

    def evict(self, count: int, pins: Sequence[int]) -> list[int] | None:
        victims = self._first_ahead(count, pins)
        for slot in victims:
            del self._ahead[slot]
        self._gone += len(victims)
        if len(victims) < count:
            others = self.policy.evict(count - len(victims), pins)
            if others is None:
                self._gone -= len(victims)
                self._ahead = OrderedDict.fromkeys([*victims, *self._ahead])
                return None
            victims += others
            self._gone, self._short = self._ahead_max - len(self._ahead), 0
        if self._gone >= self._choose_at:
            self._choose()
        return victims

    def coldest(self) -> Iterator[int]:
        yield from self._ahead
        yield from self.policy.coldest()

    @property
    def admits_everything(self) -> bool:
        return self.policy.admits_everything

    def bypass(self, keys: Sequence[OffloadKey], evictions: int, pins: Sequence[int]) -> Sequence[int]:
        return () if self.policy.admits_everything else self.policy.bypass(keys, evictions, pins)

    # -- slots chosen ahead --------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Choose as many as have gone, whatever is pinned now."""
        self._ahead.update(dict.fromkeys(self.policy.preselect(self._gone + self._short, self._no_pins)))
        self._gone = self._short = 0

    def _first_ahead(self, count: int, pins: Sequence[int]) -> list[int]:
        first: list[int] = []
        for slot in self._ahead:
            if len(first) == count:
                break
            if not pins[slot]:
                first.append(slot)
        return first

    def _own(self, slots: Sequence[int]) -> Sequence[int]:
        """Slots that the policy has; the others are not ahead any more."""
        gone = self._taken(slots)
        self._short += len(gone)
        return _others(slots, gone)

    def _use(self, slots: Sequence[int], call: Callable[[Sequence[int]], None]) -> None:
        """The policy is notified of slots in access order: those that were ahead become its own instead."""
        back = self._taken(slots)
        call(_others(slots, back))
        self._put_back(back)

    def _use_in_order(self, slots: Sequence[int], call: Callable[..., None], *arguments: object) -> None:
        """The policy is notified of slots in prefix order, without those that are ahead: these become ready after that.

        Leaf before root.
        """
        gone = set(self._taken(slots))
        call(*arguments, [-1 if slot in gone else slot for slot in slots] if gone else slots)
        self._put_back([slot for slot in dict.fromkeys(reversed(slots)) if slot in gone] if gone else ())

    def _put_back(self, slots: Sequence[int]) -> None:
        """These are the policy's, as blocks that have become ready."""
        if slots:
            self._short += len(slots)
            self.policy.insert(slots)

    def _taken(self, slots: Sequence[int]) -> list[int]:
        """Remove the slots that are ahead, and return them, each once: a job may name a block twice."""
        ahead = self._ahead
        if not ahead or ahead.keys().isdisjoint(slots):
            return []
        taken = [slot for slot in dict.fromkeys(slots) if slot in ahead]
        for slot in taken:
            del ahead[slot]
        return taken


def _others(slots: Sequence[int], left_out: Collection[int]) -> Sequence[int]:
    return [slot for slot in slots if slot not in left_out] if left_out else slots
