"""Records of what was written to a tier in the last 24 hours, so that its write budget holds over restarts.

A record is written before the bytes are: it counts a share of the budget as written that is only then sent. So a
process that is killed loses the rest of that share, and gains nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvtier.aio.boot_clock import BootClock, read_boot_clock
from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.policy.write_budget import MINUTES, WriteBudget
from kvtier.tier.block_envelope import COUNTER_LIMIT

SHARES = 16
"""A record allows this fraction of the budget until the next one is written, or `SHARE_BLOCKS`."""
SHARE_BLOCKS = 64
_MINUTE_NS = 60 * 10**9
_HEAD = struct.Struct("<16sQ")
_BYTES = struct.Struct(f"<{MINUTES + 1}Q")


class BudgetRecord:
    """The record of the tier at one position of its stack. Time counts that passed under one start of the machine."""

    def __init__(self, position: int, budget: WriteBudget, clock: BootClock) -> None:
        self.name = f"writes-{position}"
        self._budget = budget
        self._clock = clock
        self._share = max(budget.bytes_per_day // SHARES, SHARE_BLOCKS * budget.block_bytes)
        self._limit = 0
        budget.set_durable_limit(0)

    @property
    def is_due(self) -> bool:
        """True if the next record should be written now: less than half a share may be sent until then."""
        return self._budget.durable_left < self._share // 2

    def save(self, last: bool = False) -> bytes:
        """The next record. After the `last` one nothing is sent."""
        share = 0 if last else self._share
        self._limit = self._budget.sent_bytes + share
        minutes = self._budget.minutes()
        minutes[0] += share
        return _HEAD.pack(self._clock.boot, self._clock.now_ns()) + _BYTES.pack(*minutes)

    def on_durable(self) -> None:
        """The last record is durable: what it counts may be sent."""
        self._budget.set_durable_limit(self._limit)

    def restore(self, record: bytes) -> None:
        """Begin with what a record counts. Raises ValueError for one that no process wrote, then as `on_lost`."""
        whole = len(record) == _HEAD.size + _BYTES.size
        minutes = _BYTES.unpack_from(record, _HEAD.size) if whole else ()
        if not whole or max(minutes) >= COUNTER_LIMIT:
            self.on_lost()
            raise ValueError("it is no record of what was written")
        boot, at = _HEAD.unpack_from(record)
        self._begin_with(at if boot == self._clock.boot else self._clock.now_ns(), minutes)

    def on_lost(self) -> None:
        """The record cannot be read: perhaps all of the budget was written, just now."""
        self._begin_with(self._clock.now_ns(), (self._budget.bytes_per_day, *[0] * MINUTES))

    def _begin_with(self, at: int, minutes: Sequence[int]) -> None:
        def before() -> list[int]:
            # a minute less: neither this process nor the one before began at the beginning of a minute
            passed = max(0, (self._clock.now_ns() - at) // _MINUTE_NS - 1)
            return [*[0] * min(passed, len(minutes)), *minutes][: len(minutes)]

        self._budget.begin_with(before)


def budget_records(lowers: Sequence[LowerTier]) -> list[BudgetRecord]:
    """A record for each of these tiers with a write budget. Nothing is sent to it before its record is durable."""
    clock = read_boot_clock()
    return [
        BudgetRecord(lower.position, lower.budgeted.budget, clock) for lower in lowers if lower.budgeted is not None
    ]
