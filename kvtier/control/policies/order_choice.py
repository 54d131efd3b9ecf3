"""Which of two orders a tier evicts in: by what was learned, or LRU, whichever would hit more at present.

Both are predicted for each use of a segment, from its class, its age and the sizes of all segments, so that no second
tier is kept: LRU still has what is younger than the youngest blocks that no longer fit, and the learned order has what
was never worth less, at any age so far, than the best blocks that no longer fit.
"""

from __future__ import annotations

import numpy as np

from kvtier.control.policies.prediction.classes import NUM_BUCKETS
from kvtier.control.policies.prediction.life_tables import FloatArray
from kvtier.control.policies.prediction.model import BOUNDS, ReuseModel
from kvtier.control.policies.prediction.segments import Segments

LEAD = 0.03
"""Hits by which the learned order must lead before it is followed again, in sizes of the tier."""
LAG = 0.15
"""Hits by which it may lag before LRU's is: tables of few lives predict too few hits for it."""
HALF_LIFE = 4
"""Blocks asked for after which a lead is worth half, in sizes of the tier."""
REVIEW_FRACTION = 8
"""A review comes after as many missed blocks as this part of the tier, or `USES_KEPT` uses."""
USES_KEPT = 8192
SAMPLE_MAX = 16384
"""So many segments a review looks at all of; of more of them, at every third, fifth and so on."""


class OrderChoice:
    """`learned` says which order holds. It begins with the learned one, which is LRU's until there are data.

    The uses since the last review are kept, at most `USES_KEPT` of them: a review judges them by what would have been
    in the tier at the one before, and finds what would be in it now. Ghosts count as well.
    """

    def __init__(self, num_slots: int, segments: Segments, model: ReuseModel) -> None:
        self.learned = True
        self._num_slots = max(1, num_slots)
        self._segments = segments
        self._model = model
        self._uses: list[tuple[int, float, int]] = []
        self._asked = self._missed = 0
        self._lead = 0.0
        self._oldest = np.inf
        self._least: tuple[float, float] | None = None
        self._lowest: FloatArray = np.zeros((1, NUM_BUCKETS))

    def used(self, kind: int, gap: float, blocks: int) -> None:
        """A segment of this class was used, `gap` seconds after its last use."""
        if len(self._uses) < USES_KEPT:
            self._uses.append((kind, gap, blocks))

    def asked(self, blocks: int, missed: int) -> bool:
        """A request asked for so many blocks. True if the order has changed."""
        before = self.learned
        self._asked += blocks
        self._missed += missed
        if REVIEW_FRACTION * self._missed < self._num_slots and len(self._uses) < USES_KEPT:
            return self.learned is not before
        self._judge()
        self._fit()
        self._uses, self._asked, self._missed = [], 0, 0
        return self.learned is not before

    def _judge(self) -> None:
        """How many more blocks the learned order had of those that were used."""
        self._lead *= 0.5 ** (self._asked / (HALF_LIFE * self._num_slots))
        if self._least is not None and self._uses:
            kinds, gaps, blocks = (np.array(column) for column in zip(*self._uses, strict=True))
            lowest = self._lowest[kinds, np.searchsorted(BOUNDS, gaps, "right")]
            least, oldest = self._least
            there = (lowest > least) | ((lowest == least) & (gaps <= oldest))
            self._lead += float(blocks[there].sum() - blocks[gaps <= self._oldest].sum())
        bound = -LAG if self.learned else LEAD
        self.learned = self._lead > bound * self._num_slots

    def _fit(self) -> None:
        """What each order would have in the tier now, of all segments, or of a part of them where there are many."""
        used = self._segments.used
        if not used:
            return
        step = used // SAMPLE_MAX | 1
        lengths = np.frombuffer(self._segments.length, np.int32, used)[::step].astype(np.int64)
        ages = self._model.now - np.frombuffer(self._segments.touched, np.float64, used)[::step]
        kinds = np.frombuffer(self._segments.kind, np.uint16, used)[::step].astype(np.int64)
        self._lowest = np.minimum.accumulate(self._model.tables.values, axis=1)
        lowest = self._lowest[kinds, np.searchsorted(BOUNDS, ages, "right")]
        first = self._first_out(lengths, np.argsort(ages), step)
        self._oldest = float(ages[first]) if first >= 0 else np.inf
        first = self._first_out(lengths, np.lexsort((ages, -lowest)), step)
        self._least = (float(lowest[first]), float(ages[first])) if first >= 0 else (-1.0, np.inf)

    def _first_out(self, lengths: np.ndarray, order: np.ndarray, step: int) -> int:
        """The first segment in an order that does not fit into the tier any more; -1 if all do."""
        at = int(np.searchsorted(np.cumsum(lengths[order]), self._num_slots // step, "right"))
        return int(order[at]) if at < len(order) else -1
