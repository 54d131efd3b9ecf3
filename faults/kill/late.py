"""Old writes of a dead victim land after the next one has reused their places: the right bytes or a miss."""

from __future__ import annotations

from pathlib import Path

from ..attack import Tally
from .cycles import ALL_LATE, Cycles


class LateWrites(Cycles):
    """The row "late writes": every death is followed by late writes. An iteration is a life that some of them hit."""

    def __init__(self, layout: str, folder: Path, seed: int, tally: Tally) -> None:
        super().__init__(layout, folder, seed, tally, ALL_LATE)

    def _count(self, killed: bool) -> None:
        self.tally.notes["kills"] += killed
        self.tally.iterations = self.tally.notes["cycles with late writes"]
