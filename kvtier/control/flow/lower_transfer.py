"""A job of a lower tier, as the control plane keeps it until its I/O has ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import TypeVar

from kvtier.control.jobs import JobOwner
from kvtier.control.tiers.breaker import BreakerState
from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.types.jobs import (
    STORED,
    BlockOutcome,
    BlockStatus,
    JobKind,
    JobResult,
    RegionFormat,
    RowGroup,
    SkipReason,
    by_group,
)
from kvtier.types.keys import OffloadKey

T = TypeVar("T")

STATUS_OF = attrgetter("status")

REFUSED = (BlockStatus.CORRUPT, BlockStatus.FAILED, BlockStatus.MISSING)
"""Outcomes of a load of an entry that is not to be tried again."""


class LowerTransfer(JobOwner):
    """Blocks between rows and a lower tier, in the order in which they age; the tier's job has them group by group.

    It holds its rows from `begin` to its end. `slots` are those of an owned tier and all lie in `root`; a load pins
    them, a store fills them. For a shared tier `slots` and `generations` are empty.
    """

    def __init__(
        self, lower: LowerTier, kind: JobKind, keys: Sequence[OffloadKey], rows: Sequence[int], slots: Sequence[int]
    ) -> None:
        self.lower = lower
        self.kind = kind
        self.keys = keys
        self.rows = rows
        self.slots = slots
        self.root = lower.roots.of(slots[0]) if slots and lower.roots.several else 0
        self._breaker = lower.store_breaker if kind is JobKind.STORE else lower.load_breaker
        self.generations: Sequence[int] = ()
        self.formats: tuple[RegionFormat, ...] = ()
        if lower.owned is not None:
            self.generations = list(map(lower.owned.table.generation.__getitem__, slots))
            if kind is JobKind.STORE:
                self.formats = lower.owned.placement.formats_for(slots)
        self._by_group = by_group(keys)

    @property
    def groups(self) -> tuple[RowGroup, ...]:
        """The groups of the tier's job."""
        if len(self._by_group) == 1:
            (group,) = self._by_group
            return (RowGroup(group, tuple(self.keys), self.rows, self.slots, self.generations),)
        result = []
        for group, at in self._by_group.items():
            places = [pick(numbers, at) if numbers else () for numbers in (self.slots, self.generations)]
            result.append(RowGroup(group, tuple(pick(self.keys, at)), pick(self.rows, at), *places))
        return tuple(result)

    def begin(self) -> None:
        """The tier's job is about to be sent."""
        lower = self.lower
        if self._breaker.state is not BreakerState.CLOSED:
            self._breaker.on_send()
        if self.kind is JobKind.STORE:
            if lower.room_breaker.state is not BreakerState.CLOSED:
                lower.room_breaker.on_send()
        else:
            lower.index.pin(self.slots)
        lower.rows_in_flight += len(self.keys)
        lower.roots.held[self.root] += len(self.keys)

    def release(self) -> None:
        """The transfer no longer holds its rows."""
        self.lower.rows_in_flight -= len(self.keys)
        self.lower.roots.held[self.root] -= len(self.keys)

    def outcomes_of(self, result: JobResult) -> list[BlockOutcome]:
        """The outcome of each block, in the order of `keys`."""
        outcomes = list(chain.from_iterable(result.outcomes))
        if len(self._by_group) == 1:
            return outcomes
        by_place = dict(zip(chain.from_iterable(self._by_group.values()), outcomes, strict=True))
        return pick(by_place, range(len(self.keys)))

    def finish_load(self, outcomes: Sequence[BlockOutcome], bytes_moved: int, now: float, current: bool = True) -> None:
        """A load ended in time. Entries that were refused or could not be read are dropped.

        Not `current`: a reset came after the job was sent, so a shared tier's hints are left alone.
        """
        lower = self.lower
        lower.counters.load_bytes += bytes_moved
        for i, outcome in enumerate(outcomes):
            if outcome.ok:
                lower.counters.loaded += 1
                continue
            lower.counters.count(outcome)
            if outcome.status in REFUSED:
                if lower.owned is not None:
                    lower.owned.discard(self.slots[i], self.generations[i])
                elif current and outcome.status is not BlockStatus.FAILED:
                    lower.index.note_presence(self.keys[i], False, now)
        self._judge(outcomes, now)
        lower.index.unpin(self.slots)

    def finish_store(
        self, outcomes: Sequence[BlockOutcome], bytes_moved: int, now: float, current: bool = True
    ) -> list[tuple[int, int]]:
        """A store ended in time. `current` is as in `finish_load`. The caller counts blocks that were not stored.

        Returns (slot, generation) of what was stored in an owned tier.
        """
        lower = self.lower
        whole = outcomes.count(STORED) == len(outcomes)
        good = range(len(outcomes)) if whole else [i for i, outcome in enumerate(outcomes) if outcome.ok]
        present = len(good) - outcomes.count(STORED)
        if present:
            lower.counters.skip(SkipReason.ALREADY_THERE, present)
        lower.counters.stored += len(good) - present
        lower.counters.store_bytes += bytes_moved
        self._judge(outcomes, now)
        if lower.owned is None:
            lower.counters.written_bytes += bytes_moved
            for i in good if current else ():
                lower.index.note_presence(self.keys[i], True, now)
            return []
        stored, generations = (
            (self.slots, self.generations) if whole else (pick(self.slots, good), pick(self.generations, good))
        )
        lower.counters.written_bytes += lower.owned.placement.slot_bytes(stored)
        lower.owned.commit(stored)
        if len(good) < len(outcomes):
            lower.owned.abort([slot for slot, outcome in zip(self.slots, outcomes, strict=True) if not outcome.ok])
        if stored and self.formats:
            lower.owned.placement.complete_formats(self.formats)
        return list(zip(stored, generations, strict=True))

    def _judge(self, outcomes: Sequence[BlockOutcome], now: float) -> None:
        """Record a job's end in a breaker: errors, and lateness before it began, count against the tier.

        A job that was cancelled as a whole says nothing, so a probe that was cancelled has failed.
        """
        breaker = self._breaker
        statuses = set(map(STATUS_OF, outcomes))
        if not statuses.isdisjoint((BlockStatus.FAILED, BlockStatus.LATE)):
            breaker.on_failure(now)
        elif statuses != {BlockStatus.CANCELLED}:
            if breaker.failures or breaker.state is not BreakerState.CLOSED:
                breaker.on_success()
        elif breaker.state is BreakerState.HALF_OPEN:
            breaker.on_failure(now)

    def judge_room(self, outcomes: Sequence[BlockOutcome], full: Sequence[int], refused: bool, now: float) -> None:
        """Record the end of a store in the breaker of the room on disk, which had none for the blocks in `full`.

        `refused`: not even old places have room.
        """
        breaker = self.lower.room_breaker
        if not full or any(outcome.ok for outcome in outcomes):
            if breaker.failures or breaker.state is not BreakerState.CLOSED:
                breaker.on_success()
        elif refused:
            breaker.on_failure(now)

    def on_late(self, now: float) -> None:
        """The job is late: a store's slots are quarantined until `on_end`.

        That counts against the tier unless another of its roots is not silent. A probe counts in any case, or no other
        would follow it.
        """
        lower, count = self.lower, len(self.keys)
        lower.counters.late += count
        lower.rows_late += count
        lower.roots.begin_late(self.root, count)
        if lower.roots.speaks and self._breaker.state is not BreakerState.HALF_OPEN:
            self._breaker.after_failure()
        else:
            self._breaker.on_failure(now)
        if self.kind is JobKind.STORE:
            lower.room_breaker.on_success()  # a late store says nothing of room
            lower.index.quarantine(self.slots)

    def on_end(self, now: float) -> None:
        """The I/O of a late job has ended: it no longer holds its slots and rows."""
        self.lower.rows_late -= len(self.keys)
        self.lower.roots.end_late(self.root, len(self.keys))
        self.lower.index.unpin(self.slots)
        self.release()


def pick(values: Sequence[T] | dict[int, T], at: Sequence[int]) -> list[T]:
    """The values at these places."""
    return list(map(values.__getitem__, at))
