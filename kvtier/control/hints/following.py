"""Hints as the control plane follows them; `kvtier.types.hints` has their meaning."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvtier.control.flow.demotions import Demotions
from kvtier.control.flow.promotions import Promotions
from kvtier.control.hints.prefetches import Prefetches
from kvtier.control.hints.retention import Retention
from kvtier.control.settings import StackSettings
from kvtier.control.state import ControlState
from kvtier.errors import UsageError
from kvtier.types.hints import Demote, HintRefusal, HintResult, KVHint, Pin, Prefetch, Release, Retain
from kvtier.types.keys import OffloadKey

_OF_SETS = (
    HintRefusal.NOT_FOUND,
    HintRefusal.OVER_QUOTA,
    HintRefusal.TOO_MANY,
    HintRefusal.QUEUE_FULL,
    HintRefusal.STOPPED,
)
REFUSALS = {
    "retain": _OF_SETS,
    "pin": _OF_SETS,
    "prefetch": (HintRefusal.QUEUE_FULL, HintRefusal.STOPPED),
    "demote": (
        HintRefusal.NOT_FOUND,
        HintRefusal.IN_USE,
        HintRefusal.NO_TIER,
        HintRefusal.QUEUE_FULL,
        HintRefusal.STOPPED,
    ),
}
"""Why blocks of each hint may be refused: counted from zero on."""
BLOCKS_AT_ONCE = 256
"""Blocks to be retained, pinned or demoted that the calls between two steps look at, and each step: an engine waits."""
BLOCKS_MAX = 1 << 16
"""Blocks of one hint; those behind them are refused."""
WAITING_HINTS_MAX, WAITING_BLOCKS_MAX = 1024, 1 << 17
"""Hints of which blocks wait for the next steps, and such blocks of all of them."""
REST_SECONDS = 0.001
"""Time between two steps that go on with the hints of which blocks wait."""


@dataclass(slots=True, eq=False)
class WaitingHint:
    """The part of a hint whose blocks no step has processed yet; blocks are retained until a time."""

    hint: Retain | Pin | Demote
    keys: list[OffloadKey]
    until: float
    done: int = 0

    def take(self, most: int) -> list[OffloadKey]:
        """The next blocks."""
        taken = self.keys[self.done : self.done + most]
        self.done += len(taken)
        return taken


LOOKED_AT_ONCE = 256
"""Rows that one step looks at, at most."""


class EarlyDemotions:
    """The rows that are to be given up and wait for their write-back, by the key of their block.

    `freed` counts rows that were given up, `kept` those that no lower tier has taken, or that were used meanwhile.
    """

    def __init__(self, control: ControlState, demotions: Demotions) -> None:
        self._control = control
        self._demotions = demotions
        self._waiting: dict[OffloadKey, int] = {}
        self.freed = 0
        self.kept = 0

    def __bool__(self) -> bool:
        """True if any row waits."""
        return bool(self._waiting)

    def add(self, key: OffloadKey, now: float) -> HintRefusal | None:
        """Give up this block's row as soon as that is possible; why not, or None."""
        control = self._control
        row = control.cpu.ready(key)
        if row is None:
            return HintRefusal.IN_USE if key in control.cpu.directory else HintRefusal.NOT_FOUND
        if self._waiting.get(key) == control.cpu.table.generation[row]:
            return None  # it is on its way
        if not self._below(key, now) and not self._demotions.write_back(row, now):
            return HintRefusal.NO_TIER
        self._waiting[key] = control.cpu.table.generation[row]
        return None

    def _below(self, key: OffloadKey, now: float) -> bool:
        """True if a lower tier surely has this block."""
        return any(index.presence(key, now) for index in self._control.indexes[1:])

    def advance(self, now: float) -> None:
        """Free the rows that are clean by now and in no use."""
        cpu, free, looked = self._control.cpu, [], 0
        dirty, sending = self._demotions.dirty.bits, self._demotions.dirty.sending
        for key in list(islice(self._waiting, LOOKED_AT_ONCE)):
            generation, row = self._waiting.pop(key), cpu.ready(key)
            if row is not None and cpu.table.generation[row] == generation and (dirty[row] or sending[row]):
                self._waiting[key] = generation  # the next time after those that were not looked at
                continue
            looked += 1
            if row is not None and not cpu.table.pins[row] and self._below(key, now):
                free.append(row)
        if free:
            cpu.drop(free)
        self.freed += len(free)
        self.kept += looked - len(free)

    def on_load(self, keys: Sequence[OffloadKey]) -> None:
        """The engine loads these blocks: their rows stay."""
        for key in keys:
            if self._waiting.pop(key, None) is not None:
                self.kept += 1

    def stop(self) -> None:
        """No row is given up early any more."""
        self._waiting.clear()


class Hints:
    """Follows hints, as far as bounds and quotas allow. `refused` counts blocks by the hint and the reason.

    `is_used`: some hint was given. Before that there is nothing to do, and a stack without hints pays for nothing.
    """

    def __init__(
        self, control: ControlState, demotions: Demotions, promotions: Promotions, settings: StackSettings
    ) -> None:
        self._control = control
        self._demotions = demotions
        self._retain_time = settings.retain_time
        self.is_used = False
        self.retention = Retention(control, settings.retained_sets)
        self.prefetches = Prefetches(promotions, settings.prefetch_blocks)
        self.demotions = EarlyDemotions(control, demotions)
        self._blocks_left = BLOCKS_AT_ONCE
        self._waiting: deque[WaitingHint] = deque()
        self._waiting_blocks = 0
        self._advanced_at = -math.inf
        names = ((hint, reason.value) for hint, reasons in REFUSALS.items() for reason in reasons)
        self.refused: Counter[tuple[str, str]] = Counter(dict.fromkeys(names, 0))

    def follow(self, hint: KVHint, now: float) -> HintResult:
        """Do what is asked for, as far as it can be done. Raises UsageError for seconds that are none."""
        self.is_used = True
        if isinstance(hint, Release):
            self._drop_waiting(hint.session)
            released = self.retention.release(hint.session, now)
            self.retention.expire(now)
            return HintResult(released)
        until = math.inf
        if isinstance(hint, Retain | Pin):
            if not 0 < hint.seconds < math.inf:
                raise UsageError(f"blocks are retained for a number of seconds above 0, not for {hint.seconds}")
            until = now + min(hint.seconds, self._retain_time)
        keys = list(dict.fromkeys(islice(hint.keys, BLOCKS_MAX)))
        over = max(0, len(hint.keys) - BLOCKS_MAX)
        if self._demotions.closing:
            return self._result(hint, Counter({HintRefusal.STOPPED: over + len(keys)}), over + len(keys))
        if not keys and not isinstance(hint, Retain | Pin):
            keys = self.retention.keys_of(hint.session, BLOCKS_MAX)
        if isinstance(hint, Prefetch):
            full = over + len(keys) - self.prefetches.add(keys, now)
        else:
            waiting = WaitingHint(hint, keys, until)
            refused = self._process_next(waiting, now)
            full = over + self._wait(waiting)
            refused[HintRefusal.QUEUE_FULL] += full
            return self._result(hint, refused, over + len(keys))
        return self._result(hint, Counter({HintRefusal.QUEUE_FULL: full}), over + len(keys))

    def _wait(self, waiting: WaitingHint) -> int:
        """The next steps go on with what is left of a hint. Returns for how many blocks there is no room."""
        left = len(waiting.keys) - waiting.done
        room = WAITING_BLOCKS_MAX - self._waiting_blocks if len(self._waiting) < WAITING_HINTS_MAX else 0
        taken = min(left, room)
        if taken:
            del waiting.keys[waiting.done + taken :]
            self._waiting.append(waiting)
            self._waiting_blocks += taken
        return left - taken

    def _process_next(self, waiting: WaitingHint, now: float) -> Counter[HintRefusal]:
        """Look at the next blocks of a hint, as many as may be looked at by now; how many are refused, by reason."""
        hint, keys = waiting.hint, waiting.take(self._blocks_left)
        self._blocks_left -= len(keys)
        if isinstance(hint, Demote):
            refusals = self._demote(keys, now)
        else:
            refusals = self._retain(hint, keys, waiting.until, now)
        return Counter(refusal for refusal in refusals if refusal is not None)

    def advance(self, now: float) -> None:
        """A step: go on with the hints of which blocks wait."""
        self._blocks_left, self._advanced_at = BLOCKS_AT_ONCE, now
        while self._waiting and self._blocks_left:
            waiting = self._waiting[0]
            before = waiting.done
            self._result(waiting.hint, self._process_next(waiting, now), 0)
            self._waiting_blocks -= waiting.done - before
            if waiting.done == len(waiting.keys):
                self._waiting.popleft()

    def _drop_waiting(self, session: str | None = None, reason: HintRefusal | None = None) -> None:
        """Drop, for this reason, the waiting hints of a session that retain, or all that wait."""
        kept: deque[WaitingHint] = deque()
        for waiting in self._waiting:
            left = len(waiting.keys) - waiting.done
            if session is not None and (isinstance(waiting.hint, Demote) or waiting.hint.session != session):
                kept.append(waiting)
                continue
            self._waiting_blocks -= left
            if reason is not None:
                self._result(waiting.hint, Counter({reason: left}), 0)
        self._waiting = kept

    def _result(self, hint: KVHint, refused: Counter[HintRefusal], count: int) -> HintResult:
        refused = +refused  # without zeros
        for reason, number in refused.items():
            self.refused[type(hint).__name__.lower(), reason.value] += number
        return HintResult(count - refused.total(), dict(refused))

    def _retain(
        self, hint: Retain | Pin, keys: Sequence[OffloadKey], until: float, now: float
    ) -> list[HintRefusal | None]:
        if until <= now:
            return []
        pinned = isinstance(hint, Pin)
        refusals = self.retention.retain(hint.session, keys, until, pinned, now)
        accepted = [key for key, refusal in zip(keys, refusals, strict=True) if refusal is None]
        if pinned:
            self.prefetches.add(accepted, now)
        else:
            self._write_back(accepted, now)
        return refusals

    def _write_back(self, keys: Iterable[OffloadKey], now: float) -> None:
        """Retained blocks go to the lower tiers soon, also to those that get blocks when they are evicted."""
        for key in keys:
            if key in self._control.cpu.retained.keys and (row := self._control.cpu.ready(key)) is not None:
                self._demotions.write_back(row, now)

    def _demote(self, keys: Sequence[OffloadKey], now: float) -> list[HintRefusal | None]:
        refusals = [
            HintRefusal.IN_USE if self.retention.is_pinned(key) else self.demotions.add(key, now) for key in keys
        ]
        self.demotions.advance(now)
        return refusals

    # -- what else happens ---------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if blocks wait to be looked at, or to be promoted."""
        return bool(self._waiting) or self.prefetches.busy

    def next_at(self) -> float:
        """The time at which something changes by time alone; infinite if nothing does."""
        soon = self._advanced_at + REST_SECONDS if self._waiting else math.inf
        return min(self.retention.expires_at, self.prefetches.next_at(), soon)

    def on_load(self, keys: Sequence[OffloadKey]) -> None:
        """The engine loads these blocks."""
        if self.prefetches or self.demotions:
            self.prefetches.on_load(keys)
            self.demotions.on_load(keys)

    def hold_back(self) -> None:
        """No lower tier is used any more."""
        self.retention.hold_back()
        self.stop()

    def stop(self) -> None:
        """Nothing more is retained, promoted or given up early; what is retained stays so."""
        self._drop_waiting(reason=HintRefusal.STOPPED)
        self.prefetches.stop()
        self.demotions.stop()

    def reset(self) -> None:
        """Nothing from before is worth anything."""
        self._drop_waiting()
        self.retention.reset()
        self.prefetches.reset()
        self.demotions.stop()
