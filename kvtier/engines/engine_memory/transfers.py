"""Jobs of the engine in flight, and the jobs of the tier that carry out parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.control.flow.lower_transfer import LowerTransfer
from kvtier.control.tiers.breaker import BreakerState
from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.engines.engine_memory.staging import CopyPermit
from kvtier.types.arrays import IntArray
from kvtier.types.jobs import LATE, BlockOutcome, BlockStatus, DropReason, JobKind, JobResult
from kvtier.types.keys import OffloadKey


@dataclass(slots=True, eq=False)
class EngineTransfer:
    """A job of the engine: block i is `keys[i]` at the place `places[i]` of its memory, in prefix order, root first.

    `ended`: nothing touches the engine's memory for it any more. `answered`: some of it has come back from the tier in
    time. `parts` are those in flight; `slots[i]` is the slot of block i in an owned tier.
    """

    job_id: int
    kind: JobKind
    keys: Sequence[OffloadKey]
    places: IntArray
    request_id: str
    started: float
    ended: bool = False
    answered: bool = False
    parts: set[TransferPart] = field(default_factory=set)
    slots: dict[int, int] = field(default_factory=dict)
    bytes_moved: int = 0
    seconds: float = 0.0
    _outcomes: dict[int, BlockOutcome] = field(default_factory=dict)

    def complete(self, blocks: Iterable[int], outcome: BlockOutcome) -> int:
        """Record the outcome of blocks that have none yet; returns how many those were."""
        before = len(self._outcomes)
        for block in blocks:
            self._outcomes.setdefault(block, outcome)
        return len(self._outcomes) - before

    def part_ended(self, part: TransferPart, outcomes: Sequence[BlockOutcome], bytes_moved: int = 0) -> None:
        """Record the outcomes of a part, unless it was given up before."""
        if part in self.parts:
            self.parts.remove(part)
            self.bytes_moved += bytes_moved
            for block, outcome in zip(part.members, outcomes, strict=True):
                self.complete((block,), outcome)

    @property
    def good(self) -> list[int]:
        """The blocks whose bytes are at their places, in their order."""
        return [block for block, outcome in sorted(self._outcomes.items()) if outcome.ok]

    @property
    def outcomes(self) -> list[BlockOutcome]:
        """The outcome of each block, in the order of `keys`; once the job has ended."""
        return [self._outcomes[block] for block in range(len(self.keys))]

    @property
    def ok(self) -> bool:
        """True when every block succeeded."""
        return len(self.good) == len(self.keys)

    @property
    def good_keys(self) -> list[OffloadKey]:
        """The keys whose blocks succeeded."""
        return [self.keys[block] for block in self.good]


class TransferPart(LowerTransfer):
    """A job of the tier: some blocks of an engine's job.

    `members` are positions in the engine's job in the order in which the blocks age. `permit` is needed to touch the
    engine's memory. `answered`: it came back from the tier. `current` until a reset: then what is found out is not
    believed any more.
    """

    def __init__(self, lower: LowerTier, transfer: EngineTransfer, members: Sequence[int]) -> None:
        keys = [transfer.keys[i] for i in members]
        slots = [transfer.slots[i] for i in members] if transfer.slots else []
        super().__init__(lower, transfer.kind, keys, [int(transfer.places[i]) for i in members], slots)
        self.transfer = transfer
        self.members = members
        self.permit = CopyPermit()
        self.answered = False
        self.current = True
        self._disk_was_full = lower.disk_full

    def finish(self, result: JobResult, now: float) -> None:
        """The tier's job ended in time."""
        self.release()
        outcomes = self.outcomes_of(result)
        if self.kind is JobKind.STORE:
            self._finish_store(outcomes, result.bytes_moved, now)
        else:
            self.lower.counters.hits += sum(outcome.ok for outcome in outcomes)
            self.finish_load(outcomes, result.bytes_moved, now, self.current)
        if any(outcome.status is not BlockStatus.CANCELLED for outcome in outcomes):
            self.answered = self.transfer.answered = True
        self.transfer.part_ended(self, outcomes, result.bytes_moved)

    def _finish_store(self, outcomes: Sequence[BlockOutcome], bytes_moved: int, now: float) -> None:
        lower = self.lower
        self.finish_store(outcomes, bytes_moved, now, self.current)
        stored = [key for key, outcome in zip(self.keys, outcomes, strict=True) if outcome.ok]
        if lower.owned is None and stored and self.current:
            lower.index.changes.append((False, stored))
        for outcome in outcomes:
            lower.counters.count(outcome)
        full = [at for at, outcome in enumerate(outcomes) if outcome.reason is DropReason.DISK_FULL]
        if lower.owned is not None and full:
            lower.owned.placement.disk_full([self.slots[at] for at in full], now)
        tried_again = lower.owned is None or self._disk_was_full or lower.room_breaker.state is not BreakerState.CLOSED
        self.judge_room(outcomes, full, tried_again, now)

    def on_late(self, now: float) -> None:
        """The tier's job passed its deadline: its blocks are late; its slots are kept until its I/O has ended."""
        self.permit.shut()
        super().on_late(now)
        self.transfer.part_ended(self, [LATE] * len(self.keys))
