"""Promotions: blocks of lower tiers read into CPU rows, each key once however many wait for it."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.control.flow.demotions import JOB_BLOCKS, Demotions
from kvtier.control.flow.lower_transfer import LowerTransfer
from kvtier.control.state import ControlState, FillWaiter
from kvtier.control.tiers.breaker import BreakerState
from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.types.jobs import JobKind, JobResult
from kvtier.types.keys import OffloadKey
from kvtier.types.values import job_value


@job_value
class PromotionRequest:
    """This key, at this index of a request's, is wanted in a row. The lower tier has it."""

    key: OffloadKey
    lower: LowerTier
    index: int


class PromotionQuota:
    """The blocks that may be loaded from each lower tier now, and from each of its roots where it has several.

    `waits`: some block found no room in its root although its tier has some.
    """

    def __init__(self, tiers: list[int], roots: list[list[int] | None]) -> None:
        self._tiers = tiers
        self._roots = roots
        self.waits = False

    def __bool__(self) -> bool:
        """True if more can be asked for, as far as the tiers go."""
        return not self.waits and any(self._tiers)

    def has(self, position: int, root: int) -> bool:
        """True if one root of a tier may be asked for a block."""
        rooms = self._roots[position - 1]
        return self._tiers[position - 1] > 0 and (rooms is None or rooms[root] > 0)

    def left(self, lower: LowerTier, key: OffloadKey) -> int:
        """The blocks that may yet be loaded from where this tier holds this one."""
        room, rooms = self._tiers[lower.position - 1], self._roots[lower.position - 1]
        return room if rooms is None else min(room, rooms[lower.roots.of(*lower.index.slots((key,)))])

    def take(self, lower: LowerTier, key: OffloadKey) -> bool:
        """Use up the room of one block that this tier holds. False if there is none."""
        position = lower.position - 1
        if self._tiers[position] <= 0:
            return False
        rooms = self._roots[position]
        if rooms is not None:
            root = lower.roots.of(*lower.index.slots((key,)))
            if rooms[root] <= 0:
                self.waits = True
                return False
            rooms[root] -= 1
        self._tiers[position] -= 1
        return True


class Promotions:
    """Starts promotions in batches and ends them block by block: partial success is kept."""

    def __init__(self, control: ControlState, demotions: Demotions) -> None:
        self.control = control
        self.demotions = demotions

    def source(self, key: OffloadKey, tried: int, now: float) -> LowerTier | None:
        """The highest lower tier that may be asked for this key and was not tried (`tried` is a mask of bits)."""
        for lower in self.control.lowers:
            if not tried & lower.bit and lower.holds_key(key, now) and lower.may_load(now):
                return lower
        return None

    def quota(self, now: float, most: int | None = None) -> PromotionQuota:
        """The blocks that may be loaded from each lower tier now, and no more than `most` of each if that is given; one
        job's worth from a tier that is being probed."""
        rooms = []
        for lower in self.control.lowers:
            probing = lower.load_breaker.allows(now) and lower.load_breaker.state is BreakerState.HALF_OPEN
            room = lower.rows_max - lower.rows_in_flight
            room = room if most is None else min(room, most)
            rooms.append(min(room, JOB_BLOCKS, lower.spec.inflight_blocks) if probing else room)
        return PromotionQuota(
            rooms, [lower.roots.rooms() if lower.roots.several else None for lower in self.control.lowers]
        )

    def start(self, requests: Sequence[PromotionRequest], now: float, waiter: FillWaiter | None = None) -> int:
        """Reserve rows for the front of `requests` (distinct keys, none in the CPU tier) and emit the jobs.

        They are within the quota. Returns how many were started; the rest found no row. `waiter` waits for them;
        without one they are a trial of their tiers.
        """
        keys = [request.key for request in requests]
        rows = self.control.cpu.reserve(keys)
        if self.control.awaited.ages:
            self.control.awaited.on_change(keys[: len(rows)])
        started = requests[: len(rows)]
        if waiter is not None:
            self.control.wait_for_fills(waiter, zip([request.index for request in started], rows, strict=True))
        by_tier: dict[int, list[int]] = {}
        for i, request in enumerate(started):
            by_tier.setdefault(request.lower.position, []).append(i)
        for position, members in by_tier.items():
            lower = self.control.lowers[position - 1]
            size = min(JOB_BLOCKS, lower.spec.inflight_blocks)
            for part in self._by_root(lower, requests, members):
                for start in range(0, len(part), size):
                    some = part[start : start + size]
                    self._send(lower, [requests[i] for i in some], [rows[i] for i in some], now)
        return len(rows)

    @staticmethod
    def _by_root(lower: LowerTier, requests: Sequence[PromotionRequest], members: list[int]) -> list[list[int]]:
        if not lower.roots.several:
            return [members]
        parts = lower.roots.split(lower.index.slots([requests[i].key for i in members]))
        return [[members[i] for i in part] for part in parts]

    def _send(self, lower: LowerTier, requests: Sequence[PromotionRequest], rows: Sequence[int], now: float) -> None:
        keys = [request.key for request in requests]
        job = PromotionJob(self, lower, keys, rows, lower.index.slots(keys), now)
        job.begin()
        self.control.emit(lower.position, JobKind.LOAD, job.groups, now + lower.spec.timeout_seconds, job)


class PromotionJob(LowerTransfer):
    """A load from a lower tier: filling rows, pinned slots."""

    def __init__(
        self,
        promotions: Promotions,
        lower: LowerTier,
        keys: list[OffloadKey],
        rows: Sequence[int],
        slots: list[int],
        now: float,
    ) -> None:
        super().__init__(lower, JobKind.LOAD, keys, rows, slots)
        self.sent_at = now
        self.promotions = promotions
        self.control = promotions.control
        self.resets = promotions.control.resets

    def finish(self, result: JobResult, now: float) -> None:
        outcomes = self.outcomes_of(result)
        whole = [outcome.ok for outcome in outcomes]
        if any(whole):  # what fails at once says nothing of a load
            self.lower.speed.on_end(sum(whole), self.sent_at, now)
        self.release()
        self.finish_load(outcomes, result.bytes_moved, now, self.resets == self.control.resets)
        self.promotions.demotions.end_fills(self.rows, whole, self.lower.position, now)

    def on_late(self, now: float) -> None:
        """Waiting requests go on without these blocks; the entry stays, the rows wait for their I/O."""
        super().on_late(now)
        self.lower.speed.on_end(len(self.keys), self.sent_at, now)
        self.control.cpu.quarantine(self.rows)
        self.control.end_fill(self.rows, False, self.lower.position, now)

    def on_end(self, now: float) -> None:
        super().on_end(now)
        self.control.cpu.unpin(self.rows)
