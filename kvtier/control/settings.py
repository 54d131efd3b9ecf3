"""Settings of a stack, by the names that they have in a stack file: deadlines, limits, bounds of hints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Speed = float | Literal["measured"]
"""Tokens of a prompt that an engine computes in a second; 0: not known."""


@dataclass(frozen=True, slots=True)
class StackSettings:
    """Times in seconds, and limits, of a stack and its control plane, beside those of each tier.

    A load that passes its deadline (`load_timeout_seconds`) ends with what it has; a store that finds no row by its
    deadline is dropped. Closing drains lower tiers for at most `close_timeout_seconds` and then gives each tier
    `tier_close_seconds` to end its I/O. Opening gives each tier `open_timeout_seconds`, in which the CPU tier may have
    to fill a large region with pages.

    `prefill_tokens_per_second` is the engine's speed; `measured`: that of the prompts given to
    `EngineCalls.prompt_computed`. `block_seconds` is how long the engine takes to compute an offloaded block, for
    `LoadOrCompute`; without it everything found is worth a load. `watermark_rows` rows are kept free or clean by
    background demotion. A stack computes both, whatever is given here.

    `reservation_seconds` is how long the oldest reservation may wait; `lease_seconds` how long a reported hit is kept
    for an engine that does not load it. `patience_seconds` is how long a store waits for rows that are to be written
    below, and a load or a reservation for those that an `on_evict` tier is to have, before they take them anyway.
    `gather_seconds` is how long the write-back of a row may wait for more rows, so that one job takes those of several
    engine steps. `events_max` bounds the events kept for `take_events`, and their keys (`EventLog`); 0 records none.
    With `curves` it is counted what owned tiers of other sizes would hit (`SizeCurve`).

    `retained_sets` sessions may retain or pin blocks, none of them for longer than `retain_time`; `prefetch_blocks`
    blocks may wait to be promoted.
    """

    open_timeout_seconds: float = 300.0
    load_timeout_seconds: float = 30.0
    store_timeout_seconds: float = 10.0
    lookup_timeout_seconds: float = 1.0
    close_timeout_seconds: float = 10.0
    tier_close_seconds: float = 60.0
    prefill_tokens_per_second: Speed = 0.0
    block_seconds: float = math.inf
    watermark_rows: int = 0
    reservation_seconds: float = 10.0
    lease_seconds: float = 10.0
    patience_seconds: float = 1.0
    gather_seconds: float = 0.05
    events_max: int = 65536
    curves: bool = False
    retained_sets: int = 1024
    retain_time: float = 3600.0
    prefetch_blocks: int = 8192

    @property
    def measures_prefill(self) -> bool:
        """True if the engine's speed is that of its prompts."""
        return self.prefill_tokens_per_second == "measured"

    @property
    def chooses(self) -> bool:
        """True if what a tier would load later than the engine computes it is a miss."""
        return self.prefill_tokens_per_second != 0
