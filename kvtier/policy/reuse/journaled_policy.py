"""A policy that follows requests behind a journal: notified later (`reuse.journal`), with victims chosen ahead.

Most steps of an engine need a few slots, and a choice by the policy would cost more than the rest of the step's control
plane. So victims are chosen ahead, by a call in the journal like those that notify. The slots that it chooses still
hold their blocks, and are evicted as slots are needed. One that is used before that is given back to the policy, as a
block that has become ready.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence

from kvtier.policy.base import RequestPolicy
from kvtier.policy.reuse.journal import Journal
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId
from kvtier.types.requests import RequestUse

AHEAD_MAX = 96
AHEAD_PART = 16
"""Slots that are chosen ahead, at most, and the part of the tier that they are."""
CHOOSE_PART = 8
"""More are chosen once this part of them has gone."""
FEW_PART = 4
"""Up to this part of them, blocks are placed without a comparison of their worth."""


class JournaledPolicy(RequestPolicy):
    """A policy behind a journal. `policy` is itself, for calls that come from the journal.

    Fewer than `bypass_min_blocks` at once are placed without `bypass`. The policy does not have the slots that are
    chosen. They are in `_chosen` first, which only calls in the journal change, and are added to `_ahead` once the last
    such call was made (`_is_current`). Of `_ahead` the first goes next. The time of those calls changes no answer.
    """

    def __init__(self, policy: RequestPolicy, journal: Journal, num_slots: int) -> None:
        self.policy = policy
        self._journal = journal
        self._ahead_max = min(AHEAD_MAX, num_slots // AHEAD_PART)
        self._choose_at = max(1, self._ahead_max // CHOOSE_PART)
        self.bypass_min_blocks = self._ahead_max // FEW_PART + 1
        self._no_pins = bytes(num_slots)
        self._ahead: OrderedDict[int, None] = OrderedDict()  # a dict would look at all that went from its front
        self._chosen: dict[int, None] = {}
        self._last_change = self._last_begin = self._gone = self._short = 0

    # -- what tells it something: later --------------------------------------------------------------------------

    def admit(self, keys: Sequence[OffloadKey]) -> None:
        self._journal.add(self.policy.admit, keys)

    def insert(self, slots: Sequence[int]) -> None:
        self._journal.add(self.policy.insert, tuple(slots))

    def touch(self, slots: Sequence[int]) -> None:
        self._use(slots, self.policy.touch)

    def renew(self, slots: Sequence[int]) -> None:
        self._use(slots, self.policy.renew)

    def begin_request(self, use: RequestUse, slots: Sequence[int]) -> None:
        if self._is_current:
            self._use_in_order(slots, self.policy.begin_request, use)
        else:
            self._last_change = self._journal.add(self._begin_late, use, slots, _taken(self._ahead, slots))
        self._last_begin = self._journal.added

    def extend_request(
        self, request_id: RequestId, group: GroupIndex, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> None:
        self._make_current()
        self._use_in_order(slots, self.policy.extend_request, request_id, group, keys)

    def end_request(self, request_id: RequestId, output_tokens: int | None) -> None:
        self._journal.add(self.policy.end_request, request_id, output_tokens)

    def advance(self, time: float) -> None:
        self._journal.add(self.policy.advance, time)

    # -- what is asked, or frees a slot: at once -----------------------------------------------------------------

    def recover(self, slots: Sequence[int]) -> None:
        self.policy.recover(slots)  # before all else, perhaps in another thread

    def remove(self, slots: Sequence[int]) -> None:
        self._take_in()
        self.policy.remove(self._own(slots))

    def forget(self, slots: Sequence[int]) -> None:
        self._take_in()
        self.policy.forget(self._own(slots))

    def evict(self, count: int, pins: Sequence[int]) -> list[int] | None:
        victims = self._first_ahead(count, pins)
        if len(victims) < count:
            self._make_current()
            victims = self._first_ahead(count, pins)
        for slot in victims:
            del self._ahead[slot]
        self._gone += len(victims)
        if len(victims) < count:
            self._take_in()
            others = self.policy.evict(count - len(victims), pins)
            if others is None:
                self._gone -= len(victims)
                self._ahead = OrderedDict.fromkeys([*victims, *self._ahead])
                return None
            victims += others
            self._gone, self._short = self._ahead_max - len(self._ahead), 0
        if self._gone >= self._choose_at:
            self._last_change = self._journal.add(self._choose, self._gone)
            self._gone = 0
        return victims

    def coldest(self) -> Iterator[int]:
        self._take_in()
        yield from self._ahead
        yield from self.policy.coldest()

    @property
    def admits_everything(self) -> bool:
        return self._last_begin <= self._journal.done and self.policy.admits_everything

    def bypass(self, keys: Sequence[OffloadKey], evictions: int, pins: Sequence[int]) -> Sequence[int]:
        if self.admits_everything:
            return ()
        self._journal.take_in()
        return self.policy.bypass(keys, evictions, pins)

    # -- slots chosen ahead --------------------------------------------------------------------------------------

    @property
    def _is_current(self) -> bool:
        """True once `_ahead` has all slots that were chosen."""
        if self._last_change > self._journal.done:
            return False
        if self._chosen:
            self._ahead.update(self._chosen)
            self._chosen = {}
        return True

    def _make_current(self) -> None:
        if not self._is_current:
            self._take_in()

    def _take_in(self) -> None:
        self._journal.take_in()
        assert self._is_current

    def _first_ahead(self, count: int, pins: Sequence[int]) -> list[int]:
        first: list[int] = []
        for slot in self._ahead:
            if len(first) == count:
                break
            if not pins[slot]:
                first.append(slot)
        return first

    def _choose(self, count: int) -> None:
        """From the journal: whatever is pinned now, so that it makes no difference when this is."""
        self._chosen.update(dict.fromkeys(self.policy.preselect(count + self._short, self._no_pins)))
        self._short = 0

    def _own(self, slots: Sequence[int]) -> Sequence[int]:
        """Slots that the policy has; the others are not ahead any more."""
        gone = _taken(self._ahead, slots)
        self._short += len(gone)
        return _others(slots, gone)

    def _use(self, slots: Sequence[int], call: Callable[[Sequence[int]], None]) -> None:
        """The policy is notified of slots in access order: those that were ahead become its own instead."""
        self._make_current()
        back = _taken(self._ahead, slots)
        self._journal.add(call, tuple(_others(slots, back)))
        if back:
            self._journal.add(self._put_back, back)

    def _use_in_order(self, slots: Sequence[int], call: Callable[..., None], *arguments: object) -> None:
        """The policy is notified of slots in prefix order: those that were ahead become ready right after that."""
        if back := _taken(self._ahead, slots):
            self._journal.add(self._use_and_put_back, back, slots, call, *arguments)
        else:
            self._journal.add(call, *arguments, slots)

    def _begin_late(self, use: RequestUse, slots: Sequence[int], back: list[int]) -> None:
        """From the journal: a request that began while slots were yet to be chosen. `back` was ahead before."""
        back = [*back, *_taken(self._chosen, slots)]
        self._use_and_put_back(back, slots, self.policy.begin_request, use)

    def _use_and_put_back(
        self, back: Sequence[int], slots: Sequence[int], call: Callable[..., None], *arguments: object
    ) -> None:
        """From the journal: the call, for which the slots of `back` are not there, and then these are."""
        gone = set(back)
        call(*arguments, [-1 if slot in gone else slot for slot in slots])
        self._put_back([slot for slot in dict.fromkeys(reversed(slots)) if slot in gone])

    def _put_back(self, slots: Sequence[int]) -> None:
        """From the journal: these are the policy's, as blocks that have become ready, leaf before root."""
        if slots:
            self._short += len(slots)
            self.policy.insert(slots)


def _taken(ahead: dict[int, None], slots: Sequence[int]) -> list[int]:
    """Remove the slots that are ahead, and return them, each once: a job may name a block twice."""
    if not ahead or ahead.keys().isdisjoint(slots):
        return []
    taken = [slot for slot in dict.fromkeys(slots) if slot in ahead]
    for slot in taken:
        del ahead[slot]
    return taken


def _others(slots: Sequence[int], left_out: Collection[int]) -> Sequence[int]:
    return [slot for slot in slots if slot not in left_out] if left_out else slots
