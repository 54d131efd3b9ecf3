"""Choice between two orders of eviction: the model's, or LRU while that would hit more.

The blocks that LRU would have had are predicted for each use of a segment, and while LRU holds also those that the
model's order would have had: from class, age and the sizes of all segments, so that no second tier is kept. LRU has
what is younger than the youngest blocks that no longer fit. The model's order has what was never worth less, at any
age so far, than the best blocks that no longer fit. While it holds, it has what the tier has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from kvtier.policy.reuse.prediction.classes import BUCKET_BOUNDS
from kvtier.policy.reuse.prediction.life_tables import FloatArray
from kvtier.policy.reuse.prediction.model import BOUNDS, ReuseModel
from kvtier.policy.reuse.prediction.segments import Segments

LEAD, BEHIND = 2.0, 0.5
"""Standard deviations of what the requests gave it: the model's order replaces LRU's once it leads by the first, and is
left once it is behind by the second. A lead may be chance."""
HALF_LIFE = 4
"""Missed blocks after which a lead is worth half, in sizes of the tier."""
REVIEW_FRACTION = 8
"""A review comes after as many missed blocks as this part of the tier."""
SAMPLE_MAX = 16384
"""Segments of which a review considers all; of more of them, every third, fifth and so on."""


class LRUGuard:
    """The order that holds: the model's if `follows_model`.

    LRU's holds while all known segments fit into the tier. Then the model's does until it is `BEHIND`, and again once
    it leads by `LEAD`. A lead is a sum over requests, its variance that of their squares; both fade. A use is compared
    with what would have been in the tier at the last review, by class and age; ghosts count as well. LRU has what is
    not older than `_oldest` seconds. The model's order, unless it holds, has what was worth more than `_least` at every
    age so far (`_lowest`), or as much and is not older than `_least_age`.
    """

    def __init__(self, num_slots: int, segments: Segments, model: ReuseModel) -> None:
        self.follows_model = True
        self._num_slots = max(1, num_slots)
        self._segments = segments
        self._model = model
        self._missed = self._gain = 0
        self._lead = self._variance = 0.0
        self._oldest = inf
        self._lowest = model.tables.lowest
        self._least = self._least_age = inf

    def on_use(self, path: Sequence[int]) -> None:
        """Compare both orders by the segments that a request is about to use."""
        if self._oldest == inf:
            return
        segments, now, oldest = self._segments, self._model.now, self._oldest
        for seg in path:
            age, length = now - segments.touched[seg], segments.length[seg]
            if self.follows_model:
                self._gain += segments.held[seg]
            else:
                lowest = self._lowest[segments.kind[seg], bisect_right(BUCKET_BOUNDS, age)]
                if lowest > self._least or (lowest == self._least and age <= self._least_age):
                    self._gain += length
            if age <= oldest:
                self._gain -= length

    def on_request(self, missed: int) -> bool:
        """Count a request whose uses have been given, and the blocks that it missed. True if the order has changed."""
        before = self.follows_model
        self._lead += self._gain
        self._variance += self._gain * self._gain
        self._gain = 0
        self._missed += missed
        if REVIEW_FRACTION * self._missed >= self._num_slots:
            self._review()
        return self.follows_model is not before

    def _review(self) -> None:
        fading = 0.5 ** (self._missed / (HALF_LIFE * self._num_slots))
        self._lead *= fading
        self._variance *= fading * fading
        self._missed = 0
        had_room = self._oldest == inf
        segments = self._segments
        step = segments.used // SAMPLE_MAX | 1
        touched = np.frombuffer(segments.touched, np.float64, segments.used)[::step]
        by_age = np.argsort(touched)[::-1]
        lengths = np.frombuffer(segments.length, np.int32, segments.used)[::step][by_age]
        ages = self._model.now - touched[by_age]
        first_out = _first_out(lengths, self._num_slots // step)
        if first_out is None:
            self._oldest, self.follows_model = inf, False
            return
        self._oldest = float(ages[first_out])
        if had_room:
            self.follows_model, self._lead, self._variance = True, 0.0, 0.0
        deviation = self._variance**0.5
        self.follows_model = self._lead >= -BEHIND * deviation if self.follows_model else self._lead > LEAD * deviation
        if not self.follows_model:
            kinds = np.frombuffer(segments.kind, np.uint16, segments.used)[::step][by_age]
            self._measure(lengths, ages, kinds, self._num_slots // step)

    def _measure(
        self, lengths: npt.NDArray[np.int32], ages: FloatArray, kinds: npt.NDArray[np.uint16], room: int
    ) -> None:
        """Find what the model's order would have of these segments, the youngest first; not all of them fit."""
        self._lowest = self._model.tables.lowest
        values = self._lowest[kinds, np.searchsorted(BOUNDS, ages, "right")]
        by_value = np.argsort(values)[::-1]
        first_out = _first_out(lengths[by_value], room)
        assert first_out is not None, "as many do not fit in this order"
        self._least = float(values[by_value[first_out]])
        equal = np.flatnonzero(values == self._least)
        fits = _first_out(lengths[equal], room - int(lengths[values > self._least].sum()))
        assert fits is not None, "one of them does not fit"
        self._least_age = float(ages[equal[fits]])


def _first_out(lengths: npt.NDArray[np.int32], room: int) -> int | None:
    """The first of these segments, in their order, that does not fit into this many slots; None if all do."""
    at = int(np.searchsorted(np.cumsum(lengths), room, "right"))
    return at if at < len(lengths) else None
