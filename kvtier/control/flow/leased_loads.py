"""Loads that an engine carries out itself, out of rows that were leased to it before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.control.flow.demotions import Demotions
from kvtier.types.jobs import CANCELLED, LOADED, BlockOutcome, JobKind, failed
from kvtier.types.keys import OffloadKey, key_group


class LeasedLoad:
    """A copy out of rows, which it pins until its end. Hits are those of the tiers that brought the blocks up."""

    def __init__(
        self,
        demotions: Demotions,
        keys: Sequence[OffloadKey],
        rows: Sequence[int],
        brought: Mapping[OffloadKey, int],
        now: float,
    ) -> None:
        self.keys = keys
        self._control = control = demotions.control
        self._rows = rows
        self._brought = brought
        self._resets = control.resets
        control.cpu.pin(rows)
        blocks = control.group_blocks[JobKind.LOAD]
        for key in keys:
            blocks[key_group(key)] += 1
        if not demotions.admits_all:
            demotions.on_use(rows[::-1], now)

    def end(self, errors: Sequence[int], bytes_moved: int) -> list[BlockOutcome]:
        """The outcome of each block by its errno, 0 for success. What a reset overtook is cancelled."""
        control = self._control
        counters = control.cpu_counters
        counters.load_bytes += bytes_moved
        outcomes = []
        for key, error in zip(self.keys, errors, strict=True):
            outcome = failed(error) if error else LOADED if self._resets == control.resets else CANCELLED
            outcomes.append(outcome)
            if outcome is not LOADED:
                counters.count(outcome)
                continue
            counters.loaded += 1
            control.counters(self._brought.get(key, 0)).hits += 1
        control.cpu.unpin(self._rows)
        return outcomes
