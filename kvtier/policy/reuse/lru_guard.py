"""Choice between two orders of eviction: the model's, or LRU, whichever would hit more at present.

The blocks that LRU would have had are predicted for each use of a segment, and while LRU holds also those that the
model's order would have had: from class, age and the sizes of all segments, so that no second tier is kept. LRU has
what is younger than the youngest blocks that no longer fit. The model's order has what was never worth less, at any
age so far, than the best blocks that no longer fit. While it holds, it has what the tier has.
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
"""Standard deviations of what the requests gave it by which the model's order has to lead before it is followed: few
requests may lead by chance, and only LRU's own order costs nothing."""
GAIN_MIN = 0.003
"""Hits a requested block by which it has to lead as well: it fills the tier with other blocks than LRU would, which are
lost where behaviour changes. LRU's order holds again once the model's no longer leads."""
HALF_LIFE = 4
"""Requested blocks after which a lead is worth half, in sizes of the tier."""
REVIEW_FRACTION = 8
"""A review comes after as many missed blocks as this part of the tier, or `USES_KEPT` uses."""
USES_KEPT = 8192
SAMPLE_MAX = 16384
"""Segments of which a review considers all; of more of them, every third, fifth and so on."""

Use: TypeAlias = tuple[int, float, int, int]
"""The class of a segment that is used, the seconds since its last use, its blocks, how many of them the tier has."""


class Capacity(NamedTuple):
    """Blocks that each order would have in the tier: LRU those not older than `oldest` seconds.

    The model's order, unless it holds, those worth more than `least` at every age so far (`lowest`, by class and
    bucket), or as much and not older than `least_age`.
    """

    oldest: float
    lowest: FloatArray
    least: float
    least_age: float


class LRUGuard:
    """The order that holds: the model's if `follows_model`. It begins with LRU's, or as when the tables were saved.

    The uses since the last review are kept, at most `USES_KEPT` of them, and where those of a request end. A review
    compares them with what would have been in the tier at the one before, and finds what would be in it now. Ghosts
    count as well. The lead of the model's order is a sum over requests, and its variance that of their squares; they
    fade, and so does the `weight` of the requested blocks.
    """

    def __init__(self, num_slots: int, segments: Segments, model: ReuseModel) -> None:
        self.follows_model = False
        self._begun = False
        self._num_slots = max(1, num_slots)
        self._segments = segments
        self._model = model
        self._uses: list[Use] = []
        self._ends = [0]
        self._asked = self._missed = 0
        self._lead = self._variance = self._weight = 0.0
        self._capacity: Capacity | None = None

    def on_use(self, uses: Sequence[Use]) -> None:
        """Add the uses of segments by one request, from the root on."""
        if len(self._uses) + len(uses) <= USES_KEPT:
            self._uses += uses

    def on_request(self, blocks: int, missed: int) -> bool:
        """Count the blocks of a request whose uses have been given. True if the order has changed."""
        before = self.follows_model
        if not self._begun:
            self._begun, self.follows_model = True, self._model.is_followed
        if len(self._uses) > self._ends[-1]:
            self._ends.append(len(self._uses))
        self._asked += blocks
        self._missed += missed
        if REVIEW_FRACTION * self._missed >= self._num_slots or 2 * len(self._uses) >= USES_KEPT:
            self._review()
        return self.follows_model is not before

    def _review(self) -> None:
        fading = 0.5 ** (self._asked / (HALF_LIFE * self._num_slots))
        self._lead *= fading
        self._variance *= fading * fading
        self._weight = self._weight * fading + self._asked
        if self._capacity is not None and self._uses:
            leads = self._leads(self._capacity)
            self._lead += float(leads.sum())
            self._variance += float((leads * leads).sum())
        self._uses, self._ends, self._asked, self._missed = [], [0], 0, 0
        if self.follows_model:
            self.follows_model = self._lead >= 0.0
        else:
            self.follows_model = self._lead > max(LEAD * self._variance**0.5, GAIN_MIN * self._weight)
        self._model.follow(self._segments, self.follows_model)
        if self._segments.used:
            self._capacity = self._measure()

    def _leads(self, capacity: Capacity) -> FloatArray:
        """Number of blocks by which the model's order had more, of each request."""
        kinds, gaps, blocks, held = (np.array(column) for column in zip(*self._uses, strict=True))
        if not self.follows_model:
            lowest = capacity.lowest[kinds, np.searchsorted(BOUNDS, gaps, "right")]
            there = (lowest > capacity.least) | ((lowest == capacity.least) & (gaps <= capacity.least_age))
            held = np.where(there, blocks, 0)
        more = held - np.where(gaps <= capacity.oldest, blocks, 0)
        return np.add.reduceat(more, self._ends[:-1]).astype(np.float64)

    def _measure(self) -> Capacity:
        """Capacity by all segments, or by a part of them where there are many. The order of equals changes nothing."""
        segments, lowest = self._segments, self._model.tables.lowest
        step = segments.used // SAMPLE_MAX | 1
        touched = np.frombuffer(segments.touched, np.float64, segments.used)[::step]
        by_age = np.argsort(touched)[::-1]
        lengths = np.frombuffer(segments.length, np.int32, segments.used)[::step][by_age]
        room = self._num_slots // step
        youngest_out = _first_out(lengths, room)
        oldest = np.inf if youngest_out is None else float(self._model.now - touched[by_age[youngest_out]])
        if self.follows_model or youngest_out is None:
            return Capacity(oldest, lowest, -1.0, np.inf)
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
        return Capacity(oldest, lowest, float(least), float(ages[equal[fits]]))


def _first_out(lengths: npt.NDArray[np.int32], room: int) -> int | None:
    """The first of these segments, in their order, that does not fit into this many slots; None if all do."""
    at = int(np.searchsorted(np.cumsum(lengths), room, "right"))
    return at if at < len(lengths) else None
