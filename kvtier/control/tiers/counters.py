"""What is counted for each tier of a stack."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.types.jobs import BlockOutcome, BlockStatus, DropReason, SkipReason


@dataclass(slots=True)
class TierCounters:
    """Counts by outcome since the stack opened; bytes are payload.

    `looked_up` blocks were looked up in the tier because no tier above has them, and `missed` are those of them that it
    does not have either. `written_bytes` is the room on the tier's device of what was stored in it, with headers and
    padding. `skipped` blocks were not sent to the tier, and are not lost by it: `not_admitted` counts a
    block each time it was ready and not admitted, also one that was written later. `computed_sooner` blocks were found
    and not loaded, because the tier is slower than the engine computes them. `computed_again` blocks came from the
    engine once more after they were not admitted: hits that the admission cost.
    """

    looked_up: int = 0
    missed: int = 0
    hits: int = 0
    loaded: int = 0
    load_bytes: int = 0
    stored: int = 0
    store_bytes: int = 0
    written_bytes: int = 0
    failed: int = 0
    corrupt: int = 0
    missing: int = 0
    late: int = 0
    computed_sooner: int = 0
    computed_again: int = 0
    dropped: dict[DropReason, int] = field(default_factory=dict)
    skipped: dict[SkipReason, int] = field(default_factory=dict)

    def look_up(self, looked_up: int, missed: int) -> None:
        """Count the blocks of one lookup."""
        self.looked_up += looked_up
        self.missed += missed

    def drop(self, reason: DropReason, count: int = 1) -> None:
        """Count blocks that were not stored."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def skip(self, reason: SkipReason, count: int = 1) -> None:
        """Count blocks that need not be stored."""
        self.skipped[reason] = self.skipped.get(reason, 0) + count

    def count(self, outcome: BlockOutcome) -> None:
        """Count one block's outcome by reason, unless it succeeded or was cancelled."""
        match outcome.status:
            case BlockStatus.FAILED:
                self.failed += 1
            case BlockStatus.CORRUPT:
                self.corrupt += 1
            case BlockStatus.MISSING:
                self.missing += 1
            case BlockStatus.LATE:
                self.late += 1
            case BlockStatus.DROPPED:
                self.drop(outcome.reason or DropReason.BACKLOG)
            case _:
                pass
