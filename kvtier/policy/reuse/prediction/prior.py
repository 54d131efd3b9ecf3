"""What the life tables of a new stack hold: how requests come back before any was seen.

So many segments are used again, half of them after a pause as programs make it and half after one as people do. Of
public traces, those of agents have a median pause of 18 to 37 s, one of conversations has 141 s, and in both a third
to a half of the prompts come back. No trace's own counts are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from kvtier.policy.reuse.prediction.classes import BUCKET_BOUNDS, BUCKET_RATIO

RETURNING = 0.5
MEDIANS: Sequence[float] = (20.0, 140.0)
"""Seconds of the median pause, of programs and of people. A pause is log-normal."""
DEVIATION = 1.2
"""The standard deviation of a pause's logarithm."""


def prior_rates() -> npt.NDArray[np.float64]:
    """For each bucket of age, how many of the segments that get there are used in it."""
    ages, pause = (*BUCKET_BOUNDS, BUCKET_BOUNDS[-1] * BUCKET_RATIO), NormalDist(sigma=DEVIATION)
    came = [sum(pause.cdf(log(age / median)) for median in MEDIANS) * RETURNING / len(MEDIANS) for age in ages]
    return np.array([(after - before) / (1.0 - before) for before, after in pairwise([0.0, *came])])
