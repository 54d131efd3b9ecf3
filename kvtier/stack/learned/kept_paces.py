"""What was written to a tier in the last 24 hours, kept over restarts, so that its write budget holds across them.

A record is written before the bytes are: it counts a share of the budget as written that is only then sent. So a
process that is killed loses the rest of that share, and gains nothing.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.policy.write_pace import MINUTES, WritePace
from kvtier.tier.block_envelope import COUNTER_LIMIT

SHARES = 16
"""A record allows so large a part of the budget until the next one is written, or `SHARE_BLOCKS`."""
SHARE_BLOCKS = 64
_MINUTE_NS = 60 * 10**9
_HEAD = struct.Struct("<16sQ")
_BYTES = struct.Struct(f"<{MINUTES + 1}Q")


@dataclass(frozen=True, slots=True)
class MachineClock:
    """Nanoseconds since the machine was started, which no correction of the time moves, and which start that was."""

    boot: bytes
    now_ns: Callable[[], int]


def machine_clock() -> MachineClock:
    """The machine's own. Where it does not say which start this is, no other process's clock counts as the same."""
    try:
        boot = uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        boot = uuid.uuid4().bytes
    return MachineClock(boot, lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME))


class KeptPace:
    """The record of the tier at one position of its stack. Time counts that passed under one start of the machine."""

    def __init__(self, position: int, pace: WritePace, block_bytes: int, clock: MachineClock) -> None:
        self.name = f"writes-{position}"
        self._pace = pace
        self._clock = clock
        self._share = max(pace.bytes_per_day // SHARES, SHARE_BLOCKS * block_bytes)
        self._allowed = 0
        pace.allow(0)

    @property
    def low(self) -> bool:
        """True if the next record should be written now: less than half a share may be sent until then."""
        return self._pace.allowed < self._share // 2

    def save(self, last: bool = False) -> bytes:
        """The next record. After the `last` one nothing is sent."""
        share = 0 if last else self._share
        self._allowed = self._pace.sent_bytes + share
        minutes = self._pace.minutes()
        minutes[0] += share
        return _HEAD.pack(self._clock.boot, self._clock.now_ns()) + _BYTES.pack(*minutes)

    def saved(self) -> None:
        """The last record is durable: what it counts may be sent."""
        self._pace.allow(self._allowed)

    def restore(self, record: bytes) -> None:
        """Begin with what a record counts. Raises ValueError for one that no process wrote, then as `lost`."""
        whole = len(record) == _HEAD.size + _BYTES.size
        minutes = _BYTES.unpack_from(record, _HEAD.size) if whole else ()
        if not whole or max(minutes) >= COUNTER_LIMIT:
            self.lost()
            raise ValueError("it is no record of what was written")
        boot, at = _HEAD.unpack_from(record)
        if boot != self._clock.boot:
            at = self._clock.now_ns()
        self._begin_with(at, minutes)

    def lost(self) -> None:
        """It is not known what was written: perhaps all of the budget, just now."""
        self._begin_with(self._clock.now_ns(), (self._pace.bytes_per_day, *[0] * MINUTES))

    def _begin_with(self, at: int, minutes: Sequence[int]) -> None:
        def before() -> list[int]:
            # a minute less: neither this process nor the one before began at the beginning of a minute
            passed = max(0, (self._clock.now_ns() - at) // _MINUTE_NS - 1)
            return [*[0] * min(passed, len(minutes)), *minutes][: len(minutes)]

        self._pace.begin_with(before)


def kept_paces(lowers: Sequence[LowerTier]) -> list[KeptPace]:
    """Those of owned tiers: others keep their own. Nothing is sent to these tiers before a record is durable."""
    limited = [(lower.position, lower.allowance) for lower in lowers if lower.owned is not None]
    clock = machine_clock()
    return [KeptPace(at, found.pace, found.block_bytes, clock) for at, found in limited if found is not None]
