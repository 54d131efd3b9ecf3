"""What a measurement found, as values."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.bench.moving import Timing
from kvtier.keys import Medium

US_DIGITS = 1
RATE_DIGITS = 4
SCATTERED = "_scattered"
"""How the name of a move ends whose blocks do not follow each other in the tensors."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One way of moving blocks of one size: `bulk` with many blocks under way, `single` one block at a time.

    `payload_bytes` are those of a block, or of one block of each group; 0 where no blocks were moved. A token of the
    layout has `bytes_per_token` in all its groups together; 0 for a size that is not the layout's.
    """

    move: str
    payload_bytes: int
    bulk: Timing
    single: Timing = field(default_factory=Timing)
    bytes_per_token: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the layout; 0 for other sizes."""
        if not (self.bytes_per_token and self.bulk.seconds):
            return 0.0
        return self.bulk.moved_bytes / self.bulk.seconds / self.bytes_per_token

    def to_json(self) -> dict[str, object]:
        """The figure as it stands in the JSON document; what was not measured is null."""
        return {
            "move": self.move,
            "block_bytes": self.payload_bytes or None,
            "bytes": self.bulk.moved_bytes,
            "seconds": round(self.bulk.seconds, 6),
            "gib_per_second": round(self.bulk.gib_per_second, RATE_DIGITS),
            "cpu_seconds_per_gib": round(self.bulk.cpu_seconds_per_gib, RATE_DIGITS),
            "tokens_per_second": round(self.tokens_per_second) if self.bytes_per_token else None,
            "single_p50_us": round(self.single.percentile_us(0.50), US_DIGITS) if self.single.jobs else None,
            "single_p99_us": round(self.single.percentile_us(0.99), US_DIGITS) if self.single.jobs else None,
        }


@dataclass(slots=True)
class TierFigures:
    """What one tier does in one place. `skipped` says why it was not measured; empty if it was."""

    name: str
    medium: Medium
    place: str = ""
    mode: str = ""
    notes: tuple[str, ...] = ()
    figures: list[Figure] = field(default_factory=list)
    skipped: str = ""
    wrong_blocks: int = 0
    checked_blocks: int = 0

    def to_json(self) -> dict[str, object]:
        """The tier as it stands in the JSON document."""
        return {
            "name": self.name,
            "medium": self.medium,
            "place": self.place,
            "mode": self.mode,
            "notes": list(self.notes),
            "skipped": self.skipped or None,
            "checked_blocks": self.checked_blocks,
            "wrong_blocks": self.wrong_blocks,
            "figures": [figure.to_json() for figure in self.figures],
        }
