"""Histograms: what is counted, and that it can be handed on as values."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from kvtier.control.tiers.histogram import DURATION_BOUNDS, Histogram
from kvtier.control.tiers.reuse_times import AGE_BOUNDS

BOUNDS = (1.0, 2.0, 5.0)


def counted(values: list[float]) -> Histogram:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    return histogram


@pytest.mark.parametrize("bounds", [DURATION_BOUNDS, AGE_BOUNDS])
def test_bounds_grow(bounds: tuple[float, ...]) -> None:
    assert all(low < high for low, high in pairwise((0.0, *bounds)))


def test_a_value_is_in_the_bucket_of_the_first_bound_that_it_does_not_exceed() -> None:
    figures = counted([0.0, 1.0, 1.5, 2.0, 5.0, 5.5, 1000.0]).figures()
    assert figures.counts == (2, 2, 1, 2)
    assert figures.sums == (1.0, 3.5, 5.0, 1005.5)
    assert (figures.count, figures.sum) == (7, 1015.0)


def test_figures_do_not_change_afterwards() -> None:
    histogram = counted([1.0])
    before = histogram.figures()
    histogram.observe(1.0)
    assert (before.count, histogram.figures().count) == (1, 2)


def test_values_in_place_of_the_new_ones_have_their_counts_and_their_sum(seed: int) -> None:
    values = np.random.default_rng(seed).exponential(2.0, 500).tolist()
    before = counted(values[:200]).figures()
    after = counted(values).figures()
    replayed = counted([*values[:200], *after.values_since(before)]).figures()
    assert replayed.counts == after.counts
    assert math.isclose(replayed.sum, after.sum, rel_tol=1e-9)
    assert counted(list(after.values_since(None))).figures().counts == after.counts
    assert list(after.values_since(after)) == []
