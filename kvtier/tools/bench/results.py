"""The figures of a measurement, as values."""

from dataclasses import asdict, dataclass, field
from typing import Any

from kvtier.tools.bench.load_generator import Timing
from kvtier.types.keys import Medium

SCATTERED = "_scattered"
"""How the name of a move ends whose blocks do not follow each other in the tensors."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One way of moving blocks of one size: `bulk` with many blocks in flight, `single` one block at a time.

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
        return self.bulk.gib_per_second * (1 << 30) / self.bytes_per_token if self.bytes_per_token else 0.0

    def to_json(self) -> dict[str, Any]:
        """The figure as it stands in the JSON document; what was not measured is null."""
        return {
            "move": self.move,
            "block_bytes": self.payload_bytes or None,
            "bytes": self.bulk.moved_bytes,
            "seconds": round(self.bulk.seconds, 6),
            "gib_per_second": round(self.bulk.gib_per_second, 4),
            "cpu_seconds_per_gib": round(self.bulk.cpu_seconds_per_gib, 4),
            "tokens_per_second": round(self.tokens_per_second) if self.bytes_per_token else None,
            "single_p50_us": round(self.single.percentile_us(50), 1) if self.single.jobs else None,
            "single_p99_us": round(self.single.percentile_us(99), 1) if self.single.jobs else None,
        }


@dataclass(slots=True)
class TierFigures:
    """The figures of one tier in one place. `skipped` is the reason why it was not measured; empty if it was."""

    name: str
    medium: Medium
    place: str = ""
    mode: str = ""
    notes: tuple[str, ...] = ()
    figures: list[Figure] = field(default_factory=list)
    skipped: str = ""
    wrong_blocks: int = 0
    checked_blocks: int = 0

    def to_json(self) -> dict[str, Any]:
        """The tier as it stands in the JSON document."""
        figures = [figure.to_json() for figure in self.figures]
        return asdict(self) | {"skipped": self.skipped or None, "figures": figures}
