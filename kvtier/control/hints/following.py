"""What the control plane does with hints: see `kvtier.types.hints` for what each asks for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.control.flow.demotions import Demotions
from kvtier.control.flow.promotions import Promotions
from kvtier.control.hints.early_demotions import EarlyDemotions
from kvtier.control.hints.prefetches import Prefetches
from kvtier.control.hints.retention import Retention
from kvtier.control.state import ControlState
from kvtier.errors import UsageError
from kvtier.types.hints import Demote, HintRefusal, HintResult, KVHint, Pin, Prefetch, Release, Retain
from kvtier.types.jobs import TransferJob
from kvtier.types.keys import OffloadKey

_OF_SETS = (HintRefusal.NOT_FOUND, HintRefusal.OVER_QUOTA, HintRefusal.TOO_MANY, HintRefusal.STOPPED)
REFUSALS = {
    "retain": _OF_SETS,
    "pin": _OF_SETS,
    "prefetch": (HintRefusal.QUEUE_FULL, HintRefusal.STOPPED),
    "demote": (HintRefusal.NOT_FOUND, HintRefusal.IN_USE, HintRefusal.NO_TIER, HintRefusal.STOPPED),
}
"""Why blocks of each hint may be refused: counted from zero on."""


@dataclass(frozen=True, slots=True)
class HintLimits:
    """Bounds of all hints together, beside the quota of each tier.

    `retained_sets_max` sessions may retain or pin blocks, none of them for longer than `retain_seconds_max`;
    `prefetch_blocks_max` blocks may wait to be brought up.
    """

    retained_sets_max: int = 1024
    retain_seconds_max: float = 3600.0
    prefetch_blocks_max: int = 8192


class Hints:
    """Follows hints, as far as bounds and quotas allow. `refused` counts blocks by the hint and the reason.

    `said`: some hint was said. Before that there is nothing to do, and a stack without hints pays for nothing.
    """

    def __init__(self, control: ControlState, demotions: Demotions, promotions: Promotions, limits: HintLimits) -> None:
        self._control = control
        self._demotions = demotions
        self._limits = limits
        self.said = False
        self.retention = Retention(control, limits.retained_sets_max)
        self.prefetches = Prefetches(promotions, limits.prefetch_blocks_max)
        self.demotions = EarlyDemotions(control, demotions)
        names = ((hint, reason.value) for hint, reasons in REFUSALS.items() for reason in reasons)
        self.refused: Counter[tuple[str, str]] = Counter(dict.fromkeys(names, 0))

    def follow(self, hint: KVHint, now: float) -> HintResult:
        """Do what is asked for, as far as it can be done. Raises UsageError for seconds that are none."""
        self.said = True
        keys = list(dict.fromkeys(() if isinstance(hint, Release) else hint.keys))
        if self._demotions.closing:
            return self._result(hint, [HintRefusal.STOPPED] * len(keys))
        match hint:
            case Retain() | Pin():
                return self._result(hint, self._retain(hint, keys, now))
            case Prefetch():
                return self._result(hint, self._prefetch(keys or self.retention.keys_of(hint.session), now))
            case Demote():
                return self._result(hint, self._demote(keys or self.retention.keys_of(hint.session), now))
            case Release():
                released = self.retention.release(hint.session, now)
                self.retention.expire(now)
                return HintResult(released)

    def _result(self, hint: KVHint, refusals: Sequence[HintRefusal | None]) -> HintResult:
        refused = Counter(refusal for refusal in refusals if refusal is not None)
        for reason, count in refused.items():
            self.refused[type(hint).__name__.lower(), reason.value] += count
        return HintResult(len(refusals) - refused.total(), dict(refused))

    def _retain(self, hint: Retain | Pin, keys: Sequence[OffloadKey], now: float) -> list[HintRefusal | None]:
        if not 0 < hint.seconds < math.inf:
            raise UsageError(f"blocks are retained for a number of seconds above 0, not for {hint.seconds}")
        until = now + min(hint.seconds, self._limits.retain_seconds_max)
        pinned = isinstance(hint, Pin)
        refusals = self.retention.retain(hint.session, keys, until, pinned, now)
        accepted = [key for key, refusal in zip(keys, refusals, strict=True) if refusal is None]
        if pinned:
            self._prefetch(accepted, now)
        else:
            self._write_back(accepted, now)
        return refusals

    def _write_back(self, keys: Iterable[OffloadKey], now: float) -> None:
        """Retained blocks go to the lower tiers soon, also to those that get blocks when they are evicted."""
        for key in keys:
            if key in self._control.cpu.retained.keys and (row := self._control.cpu.ready(key)) is not None:
                self._demotions.write_back(row, now)

    def _prefetch(self, keys: Sequence[OffloadKey], now: float) -> list[HintRefusal | None]:
        """Refused for want of room only: a block that no tier has is missing when it is to be brought up."""
        wanted = [key for key in keys if key not in self._control.cpu.directory]
        taken = self.prefetches.add(wanted, now)
        full: list[HintRefusal | None] = [HintRefusal.QUEUE_FULL] * (len(wanted) - taken)
        return [*full, *[None] * (len(keys) - len(full))]

    def _demote(self, keys: Sequence[OffloadKey], now: float) -> list[HintRefusal | None]:
        refusals = [HintRefusal.IN_USE if self.retention.pinned(key) else self.demotions.add(key, now) for key in keys]
        self.demotions.advance(now)
        return refusals

    # -- what else happens ---------------------------------------------------------------------------------------

    def next_at(self) -> float:
        """When something changes by time alone; infinite if nothing does."""
        return min(self.retention.expires_at, self.prefetches.next_at())

    def loaded(self, job: TransferJob) -> None:
        """The engine loads the blocks of a job."""
        if self.prefetches or self.demotions:
            for group in job.groups:
                self.prefetches.loaded(group.keys)
                self.demotions.loaded(group.keys)

    def held_back(self) -> None:
        """No lower tier is used any more."""
        self.retention.held_back()
        self.stop()

    def stop(self) -> None:
        """Nothing more is brought up or given up early; what is retained stays so."""
        self.prefetches.stop()
        self.demotions.stop()

    def reset(self) -> None:
        """Nothing from before is worth anything."""
        self.retention.reset()
        self.prefetches.reset()
        self.demotions.stop()
