"""Life tables: how likely a segment of each class is used again at each age, and its worth by that.

A life begins at a use of a segment and ends at the next one, or is cut off when the segment is dropped or still open
now. `risk[c, b]` counts the lives of class c that were exposed to all of bucket b, `hits[c, b]` those that ended there.
The rates of a class are shrunk to those of the class above it in the hierarchy, and the root's to `PRIOR_RATES`,
those expected of any traffic. What they are shrunk to is scaled first, by how many lives of the class ended over how
many should have: a class of a few lives has the ages of the class above, and its own level.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from math import log
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from kvtier.policy.reuse.prediction.classes import BUCKET_BOUNDS, BUCKET_RATIO, NUM_BUCKETS, NUM_CLASSES, SHAPE

FloatArray = npt.NDArray[np.float64]

SHRINK = 60.0
"""Lives that what a class is shrunk to counts as, in each bucket."""
SCALE_SHRINK = 40.0
ROOT_SCALE_SHRINK = 10.0
"""Ended lives that a scale of 1 counts as."""
RATE_MAX = 0.95
DECAY_PER_MINUTE = 0.997
WIDTHS = np.diff(np.array([0.0, *BUCKET_BOUNDS, BUCKET_BOUNDS[-1] * BUCKET_RATIO]))
RETURNING = 0.5
"""Part of the segments that are used again in a new stack: half of them after a pause as programs make it, half after
one as people do. In public traces of agents and of conversations a third to a half of the prompts come back. No
trace's own counts are in the prior."""
MEDIANS = (20.0, 140.0)
"""Seconds of the median pause, of programs and of people: 18 to 37 in public traces of agents, 141 in one of
conversations. A pause is log-normal."""
DEVIATION = 1.2
"""The standard deviation of a pause's logarithm."""


def _prior_rates() -> FloatArray:
    """The part of the segments that get to a bucket of age and are used in it, for each bucket."""
    ages, pause = (*BUCKET_BOUNDS, BUCKET_BOUNDS[-1] * BUCKET_RATIO), NormalDist(sigma=DEVIATION)
    came = [sum(pause.cdf(log(age / median)) for median in MEDIANS) * RETURNING / len(MEDIANS) for age in ages]
    return np.array([(after - before) / (1.0 - before) for before, after in pairwise([0.0, *came])])


PRIOR_RATES = _prior_rates()


class LifeTables:
    """Counts of ended lives, by class and bucket, and the index computed from them.

    `ended` and `cut` are flat arrays, class * NUM_BUCKETS + bucket, which their readers count up. `index` is as long:
    hits a second that a segment of this class and age is worth at best, if kept until the best age from here. `lowest`,
    by class and bucket, is the least that it was worth up to that age.
    """

    def __init__(self) -> None:
        self.ended = array("d", [0.0]) * (NUM_CLASSES * NUM_BUCKETS)
        self.cut = array("d", [0.0]) * (NUM_CLASSES * NUM_BUCKETS)
        self.recompute(np.zeros(NUM_CLASSES * NUM_BUCKETS))

    def recompute(self, open_lives: FloatArray) -> None:
        """Take the counts into `rates` and `index`. `open_lives`: lives that go on, by class and bucket of age now."""
        shape = (*SHAPE, NUM_BUCKETS)
        hits = np.array(self.ended).reshape(shape)
        left = (np.array(self.cut) + open_lives).reshape(shape)
        lived = hits + left
        risk = np.cumsum(lived[..., ::-1], axis=-1)[..., ::-1] - left
        self.rates = self._shrunk(hits, risk).reshape(NUM_CLASSES, NUM_BUCKETS)
        self.values = index_of(self.rates)
        self.index = array("d", self.values.tobytes())
        self.lowest = np.minimum.accumulate(self.values, axis=1)

    def returns(self, buckets: int, open_lives: FloatArray) -> tuple[list[float], list[float]]:
        """For each level of uses: how many returns were counted, and the share that comes in the first buckets."""
        shape = (SHAPE[0], -1, NUM_BUCKETS)
        hits = np.array(self.ended).reshape(shape).sum(axis=1)
        left = (np.array(self.cut) + open_lives).reshape(shape).sum(axis=1)
        risk = np.cumsum((hits + left)[:, ::-1], axis=1)[:, ::-1] - left
        rates = hits[:, :buckets] / np.maximum(risk[:, :buckets], 1.0)
        counted: list[float] = hits.sum(axis=1).tolist()
        shares: list[float] = (1.0 - np.prod(1.0 - rates, axis=1)).tolist()
        return counted, shares

    def decay(self, minutes: float) -> None:
        """Old lives count less and less."""
        factor = DECAY_PER_MINUTE**minutes
        for counts in (self.ended, self.cut):
            view = np.frombuffer(counts, np.float64)
            view *= factor

    def _shrunk(self, hits: FloatArray, risk: FloatArray) -> FloatArray:
        rate = _shrunk_to(PRIOR_RATES, hits.sum(axis=(0, 1, 2, 3)), risk.sum(axis=(0, 1, 2, 3)), ROOT_SCALE_SHRINK)
        for level in range(1, 5):
            below = tuple(range(level, 4))
            above = np.expand_dims(rate, level - 1)
            rate = _shrunk_to(above, hits.sum(axis=below), risk.sum(axis=below), SCALE_SHRINK)
            if level == 3:
                unknown_output = rate
        rate[:, :, :, 0] = unknown_output
        return rate


def _shrunk_to(above: FloatArray, hits: FloatArray, risk: FloatArray, scale_shrink: float) -> FloatArray:
    """Rates of classes by bucket, drawn to the scaled rates of those above them."""
    ended = hits.sum(axis=-1, keepdims=True)
    expected = (risk * above).sum(axis=-1, keepdims=True)
    scaled = np.minimum(above * (ended + scale_shrink) / (expected + scale_shrink), RATE_MAX)
    rates: FloatArray = (hits + SHRINK * scaled) / (risk + SHRINK)
    return rates


def index_of(rates: FloatArray) -> FloatArray:
    """Gittins index of each bucket: the most hits a second over all horizons that start there. Shape as `rates`.

    Classes without lives of their own have the rates of the class above them: each row is computed once.
    """
    names: list[bytes] = np.ascontiguousarray(rates).view(f"V{rates[0].nbytes}").ravel().tolist()
    rows = {name: row for row, name in enumerate(dict.fromkeys(names))}
    rate = np.frombuffer(b"".join(rows)).reshape(len(rows), -1).T.copy()
    lasting, widths = 1.0 - rate, WIDTHS[:, None]
    alive, hits, seconds, best = np.ones_like(rate), np.zeros_like(rate), np.zeros_like(rate), np.zeros_like(rate)
    for ahead in range(len(rate)):
        kept = len(rate) - ahead
        survive = alive[:kept]
        hits[:kept] += survive * rate[ahead:]
        seconds[:kept] += survive * widths[ahead:]
        np.maximum(best[:kept], hits[:kept] / seconds[:kept], out=best[:kept])
        survive *= lasting[ahead:]
    found: FloatArray = best.T[[rows[name] for name in names]]
    return found
