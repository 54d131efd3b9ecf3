"""Load or compute: what of a prefix arrives from the lower tiers sooner than the engine would have computed it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from kvtier.control.flow.promotions import PromotionRequest, Promotions
from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.control.tiers.slot_table import READY
from kvtier.tier.contract import LookupResult
from kvtier.types.keys import OffloadKey, key_group

PROBE_BLOCKS = 16
PROBE_SECONDS = 5.0
"""How often a tier that is slower than computing is tried out with PROBE_BLOCKS blocks, at most."""
PROMPTS = 8
"""Of so many prompts that were computed last the fastest counts: other work makes the others slower."""
PROBE_SHARE = 0.1
"""The share of that time for which a trial may keep the tier busy, at most, by what is known of its speed."""


class LoadOrCompute:
    """Compares a tier's loads of late with the engine's prefill.

    `block_seconds` is the time to compute a block; infinite: that of the prompts given to `computed`.

    A tier of which nothing is known yet counts as fast. One that is slower is not waited for: of what a request finds
    there, a few blocks are loaded behind it now and then, so that it is known when the tier is fast again.
    """

    def __init__(self, promotions: Promotions, block_seconds: float) -> None:
        self._promotions = promotions
        self._block_seconds = block_seconds
        self._computed: deque[float] = deque(maxlen=PROMPTS)
        self._probed_at: dict[int, float] = {}

    def on_compute(self, blocks: float, begun: float, ended: float) -> None:
        """The engine has computed so many blocks of a prompt, between these times."""
        self._computed.append((ended - begun) / blocks)
        self._block_seconds = min(self._computed)

    def worth_loading(self, keys: Sequence[OffloadKey], now: float) -> int:
        """The number of a request's keys, in prefix order, that are worth a load: those before the first one in a tier
        that would take longer than computing its blocks. Counts the others."""
        if self._block_seconds == math.inf:  # it is not known
            return len(keys)
        end = len(keys)
        for lower, found in self._below(keys, now):
            chain = sum(key_group(keys[index]) == 0 for index in found)
            wanted = [index for index in found if keys[index] not in self._promotions.control.cpu.directory]
            seconds = lower.speed.seconds(lower.rows_in_flight + len(wanted))
            if chain and seconds > chain * self._block_seconds:
                end = min(end, found[0])
                lower.counters.computed_sooner += len(found)
                self._probe(lower, [keys[index] for index in wanted], now)
        return end

    def _below(self, keys: Sequence[OffloadKey], now: float) -> list[tuple[LowerTier, list[int]]]:
        """The indices of the keys that are in no row yet, by the tier that would load them or that is doing so."""
        found: dict[int, list[int]] = {}
        cpu = self._promotions.control.cpu
        for index, key in enumerate(keys):
            row = cpu.directory.get(key)
            if row is None or cpu.table.state[row] != READY:
                lower = self._promotions.source(key, 0, now)
                if lower is not None:
                    found.setdefault(lower.position, []).append(index)
        return [(self._promotions.control.lowers[position - 1], indices) for position, indices in found.items()]

    def _probe(self, lower: LowerTier, keys: Sequence[OffloadKey], now: float) -> None:
        """Load a few blocks for no request, if it is time for that and nothing else tries the tier out.

        A trial is of one block at least. It takes rows and transfers that requests may need, so it is short.
        """
        if lower.rows_in_flight or now < self._probed_at.get(lower.position, -math.inf) + PROBE_SECONDS:
            return
        self._probed_at[lower.position] = now
        quota = self._promotions.quota(now)
        count = max(1, min(PROBE_BLOCKS, int(PROBE_SHARE * PROBE_SECONDS / lower.speed.seconds(1))))
        distinct = [key for key in list(dict.fromkeys(keys))[:count] if quota.take(lower, key)]
        self._promotions.start([PromotionRequest(key, lower, index) for index, key in enumerate(distinct)], now)


def answers(results: Sequence[LookupResult], end: int) -> list[LookupResult]:
    """The results of a lookup that waits no longer: a miss where an answer is missing, and where a block from `end` on
    is not in the CPU tier; `end` is how many are worth a load."""
    left = (LookupResult.RETRY, LookupResult.HIT_PENDING)
    late = [LookupResult.MISS if result in left else result for result in results[end:]]
    return [LookupResult.MISS if result is LookupResult.RETRY else result for result in results[:end]] + late
