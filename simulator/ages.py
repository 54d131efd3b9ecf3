"""Whether blocks that are loaded, found or kept are younger than the tier's `max_age`, by when each was stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.tiers.slot_table import READY
from kvtier.types.jobs import JobResult, TransferJob
from kvtier.types.keys import OffloadKey
from simulator.oracle import Oracle

RECLAIM_SECONDS = 2.0
"""How long a block that has become too old may keep its slot, with a `max_age` of at most a minute."""
_CLOCK_ERROR = 1e-3
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class AgePlan:
    """A `max_age` of the tier below. Before process i `pauses[i]` seconds pass, and its clock is `steps[i]` further
    off; `steps` is empty for a right clock."""

    max_age_seconds: int
    pauses: tuple[float, ...]
    steps: tuple[float, ...]


def draw_age_plan(rng: Random, processes: int) -> AgePlan | None:
    """A limit for every third seed, half of them with a clock that is set between and during processes."""
    if rng.random() > 1 / 3:
        return None
    seconds = rng.choice((1, 2, 5, 20))
    pauses = tuple(rng.choice((0.0, 0.4, 1.5, 3.0)) * seconds * rng.random() for _ in range(processes))
    far = rng.choice((0.0, 0.7, 3.0, 1e6)) * seconds
    steps = tuple(rng.choice((-far, 0.0, far)) for _ in range(processes)) if far and rng.random() < 0.7 else ()
    return AgePlan(seconds, pauses, steps)


class AgeWatch:
    """Watches the tier below in one process; what it records of stores outlives that.

    With a right clock, a block's age counts from when its store began. Where clocks are set it counts from what the
    clock said then, which is the generation.
    """

    def __init__(self, plan: AgePlan, oracle: Oracle, wall: Callable[[], float]) -> None:
        self.plan, self._oracle, self._wall = plan, oracle, wall
        self._stored = oracle.record.stored_times

    def begins(self, job: TransferJob, reading: bool) -> float:
        """A job of the tier begins; returns when."""
        if not reading:
            for key, generation in _copies(job):
                when = generation / _NANOSECONDS if self.plan.steps else self._oracle.loop.time()
                self._stored.setdefault((key, generation), when)
        return self._now()

    def _now(self) -> float:
        return self._wall() if self.plan.steps else self._oracle.loop.time()

    def _too_old(self, stored: float, now: float) -> bool:
        return abs(now - stored) > self.plan.max_age_seconds + _CLOCK_ERROR

    def loaded(self, job: TransferJob, result: JobResult, begun: float) -> None:
        """A load that began then has ended."""
        outcomes = [outcome for group in result.outcomes for outcome in group]
        for copy, outcome in zip(_copies(job), outcomes, strict=True):
            stored = self._stored.get(copy)
            if outcome.ok and stored is not None and self._too_old(stored, begun):
                self._oracle.violation(f"key {copy[0].hex()[:8]} was loaded {begun - stored:.3f} s after it was stored")

    def located(self, keys: Sequence[OffloadKey], where: Sequence[str | None]) -> None:
        """The stack says in which tier keys are."""
        now = self._now()
        young = {key for (key, _), stored in self._stored.items() if not self._too_old(stored, now)}
        for key, tier in zip(keys, where, strict=True):
            if tier == "fs" and key not in young:
                self._oracle.violation(f"key {key.hex()[:8]} is found, and every copy of it is too old")

    def kept(self, plane: ControlPlane) -> None:
        """Time has passed since anything was done: no slot holds a block that has been too old for long."""
        latest = self._wall() - self.plan.max_age_seconds - RECLAIM_SECONDS
        for lower in plane.control.lowers:
            assert lower.owned is not None
            self._oracle.record.covered["blocks expired"] += lower.owned.expired
            table = lower.owned.table
            for slot, generation in enumerate(table.generation):
                if table.state[slot] == READY and generation < latest * _NANOSECONDS:
                    self._oracle.violation(f"slot {slot} holds a block that was to be reclaimed")


def _copies(job: TransferJob) -> Iterator[tuple[OffloadKey, int]]:
    """What a job names: a key, and the generation of the copy."""
    for group in job.row_groups:
        yield from zip(group.keys, group.generations, strict=True)
