"""Figures of a stack, read from any thread while the stack's own threads go on counting."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.control.tiers.lower_tier import TierCounters, TierSpec
from kvtier.stack.watching.stats import tier_stats
from kvtier.tier.contract import Opened
from kvtier.types.jobs import DropReason, SkipReason
from kvtier.types.keys import FS


class CountedMeanwhile(dict):  # type: ignore[type-arg]
    """Counts to which another thread adds a reason while they are gone through one by one."""

    def items(self) -> Iterator[tuple[object, int]]:  # type: ignore[override]
        for item in super().items():
            self[DropReason.TIER_DOWN] = 1
            yield item


def test_a_reason_that_is_counted_for_the_first_time_meanwhile_interrupts_no_reading() -> None:
    counters = TierCounters(hits=3, load_bytes=4096)
    counters.dropped = CountedMeanwhile({DropReason.NO_SLOT: 2})
    counters.skipped = CountedMeanwhile({SkipReason.NOT_ADMITTED: 5})
    figures = tier_stats(TierSpec("fs", FS, Opened(0)), None, counters, {}, 0.0)
    assert (figures.hits, figures.load_bytes) == (3, 4096)
    assert (figures.dropped, figures.skipped) == ({"no_slot": 2}, {"not_admitted": 5})
