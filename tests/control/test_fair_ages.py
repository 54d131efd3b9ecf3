"""Ages that order requests for rows."""

from __future__ import annotations

from kvtier.control.row_admission import OWNERS_MAX, TIE_BITS, FairAges


def test_ages_are_in_order_of_arrival_for_one_owner_and_in_turn_by_rows_for_several():
    ages = FairAges()
    assert (alone := [ages.next(1, rows) for rows in (8, 1, 8)]) == sorted(alone)
    order = sorted((ages.next(owner, rows), owner) for owner, rows in ((2, 8), (2, 8), (2, 8), (3, 4), (3, 4), (3, 4)))
    assert [owner for _, owner in order] == [2, 3, 3, 2, 3, 2]
    ages.now = max(age for age, _ in order)
    assert ages.next(4) > order[-1][0], "none is before what was served"


def test_ages_keep_no_owner_that_is_not_ahead_of_the_others():
    ages = FairAges()
    for owner in range(10 * OWNERS_MAX):
        ages.now = ages.next(owner, 1) + (1 << TIE_BITS)
    assert len(ages._ends) <= OWNERS_MAX + 1
