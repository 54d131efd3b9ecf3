"""Which of two orders a tier evicts in: by what was learned, or LRU, whichever would hit more at present.

What LRU would have had is predicted for each use of a segment, and what the learned order would have had while it does
not hold, from class, age and the sizes of all segments, so that no second tier is kept: LRU still has what is younger
than the youngest blocks that no longer fit, and the learned order has what was never worth less, at any age so far,
than the best blocks that no longer fit. While the learned order holds, it has what the tier has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.policy.reuse.prediction.life_tables import FloatArray
from kvtier.policy.reuse.prediction.model import BOUNDS, ReuseModel
from kvtier.policy.reuse.prediction.segments import Segments

LEAD = 2.5
"""The learned order is followed once it leads by so many standard deviations of what the requests gave it: what is seen
of few requests is chance, and only LRU's own order costs nothing."""
GAIN_MIN = 0.003
"""And by so many hits a block asked for: it fills the tier with other blocks than LRU would, which are lost where
behaviour changes. LRU's order holds again once the learned one leads no more."""
HALF_LIFE = 4
"""Blocks asked for after which a lead is worth half, in sizes of the tier."""
REVIEW_FRACTION = 8
"""A review comes after as many missed blocks as this part of the tier, or `USES_KEPT` uses."""
USES_KEPT = 8192
SAMPLE_MAX = 16384
"""So many segments a review looks at all of; of more of them, at every third, fifth and so on."""

Use: TypeAlias = tuple[int, float, int, int]
"""The class of a segment that is used, the seconds since its last use, its blocks, how many of them the tier has."""


class Fit(NamedTuple):
    """What each order would have in the tier: LRU what is not older than `oldest` seconds, the learned one, unless it
    holds, what was worth more than `least` at every age so far (`lowest`, by class and bucket), or as much and is not
    older than `least_age`."""

    oldest: float
    lowest: FloatArray
    least: float
    least_age: float


class OrderChoice:
    """`learned` says which order holds. It begins with LRU's, or as it was when the tables were saved.

    The uses since the last review are kept, at most `USES_KEPT` of them, and where those of a request end: a review
    judges them by what would have been in the tier at the one before, and finds what would be in it now. Ghosts count
    as well. The lead of the learned order is a sum over requests, and its variance that of their squares; they fade,
    and so does the `weight` of the blocks that were asked for.
    """

    def __init__(self, num_slots: int, segments: Segments, model: ReuseModel) -> None:
        self.learned = False
        self._begun = False
        self._num_slots = max(1, num_slots)
        self._segments = segments
        self._model = model
        self._uses: list[Use] = []
        self._ends = [0]
        self._asked = self._missed = 0
        self._lead = self._variance = self._weight = 0.0
        self._fit: Fit | None = None

    def used(self, uses: Sequence[Use]) -> None:
        """Segments of one request were used, from the root on."""
        if len(self._uses) + len(uses) <= USES_KEPT:
            self._uses += uses

    def asked(self, blocks: int, missed: int) -> bool:
        """A request asked for so many blocks, and its uses have been given. True if the order has changed."""
        before = self.learned
        if not self._begun:
            self._begun, self.learned = True, self._model.is_followed
        if len(self._uses) > self._ends[-1]:
            self._ends.append(len(self._uses))
        self._asked += blocks
        self._missed += missed
        if REVIEW_FRACTION * self._missed >= self._num_slots or 2 * len(self._uses) >= USES_KEPT:
            self._review()
        return self.learned is not before

    def _review(self) -> None:
        fading = 0.5 ** (self._asked / (HALF_LIFE * self._num_slots))
        self._lead *= fading
        self._variance *= fading * fading
        self._weight = self._weight * fading + self._asked
        if self._fit is not None and self._uses:
            leads = self._leads(self._fit)
            self._lead += float(leads.sum())
            self._variance += float((leads * leads).sum())
        self._uses, self._ends, self._asked, self._missed = [], [0], 0, 0
        if self.learned:
            self.learned = self._lead >= 0.0
        else:
            self.learned = self._lead > max(LEAD * self._variance**0.5, GAIN_MIN * self._weight)
        self._model.follow(self._segments, self.learned)
        if self._segments.used:
            self._fit = self._fitting()

    def _leads(self, fit: Fit) -> FloatArray:
        """For each request, how many more of its blocks the learned order had."""
        kinds, gaps, blocks, held = (np.array(column) for column in zip(*self._uses, strict=True))
        if not self.learned:
            lowest = fit.lowest[kinds, np.searchsorted(BOUNDS, gaps, "right")]
            there = (lowest > fit.least) | ((lowest == fit.least) & (gaps <= fit.least_age))
            held = np.where(there, blocks, 0)
        more = held - np.where(gaps <= fit.oldest, blocks, 0)
        return np.add.reduceat(more, self._ends[:-1]).astype(np.float64)

    def _fitting(self) -> Fit:
        """Of all segments, or of a part of them where there are many. Which of equals comes first changes nothing."""
        segments, lowest = self._segments, self._model.tables.lowest
        step = segments.used // SAMPLE_MAX | 1
        touched = np.frombuffer(segments.touched, np.float64, segments.used)[::step]
        by_age = np.argsort(touched)[::-1]
        lengths = np.frombuffer(segments.length, np.int32, segments.used)[::step][by_age]
        room = self._num_slots // step
        youngest_out = _first_out(lengths, room)
        oldest = np.inf if youngest_out is None else float(self._model.now - touched[by_age[youngest_out]])
        if self.learned or youngest_out is None:
            return Fit(oldest, lowest, -1.0, np.inf)
        ages = self._model.now - touched[by_age]
        kinds = np.frombuffer(segments.kind, np.uint16, segments.used)[::step][by_age]
        values = lowest[kinds, np.searchsorted(BOUNDS, ages, "right")]
        by_value = np.argsort(values)[::-1]
        out = _first_out(lengths[by_value], room)
        assert out is not None, "as many do not fit in this order"
        least = values[by_value[out]]
        equal = np.flatnonzero(values == least)
        fits = _first_out(lengths[equal], room - int(lengths[values > least].sum()))
        assert fits is not None, "one of them does not fit"
        return Fit(oldest, lowest, float(least), float(ages[equal[fits]]))


def _first_out(lengths: npt.NDArray[np.int32], room: int) -> int | None:
    """The first of these segments, in their order, that does not fit into so many slots any more; None if all do."""
    at = int(np.searchsorted(np.cumsum(lengths), room, "right"))
    return at if at < len(lengths) else None
