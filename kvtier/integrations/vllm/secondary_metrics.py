"""What `KVTierFs` tells vLLM's `/metrics`."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from kvtier.control.board import LowerTier
from kvtier.control.breaker import BreakerState

USED_BYTES = "vllm:kvtier_fs_used_bytes"
CAPACITY_BYTES = "vllm:kvtier_fs_capacity_bytes"
EVICTED = "vllm:kvtier_fs_blocks_evicted"
LOST = "vllm:kvtier_fs_blocks_lost"
DROPPED = "vllm:kvtier_fs_blocks_dropped"
DOWN = "vllm:kvtier_fs_down"


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric of the tier, by name."""
    tier, why = ("tier",), ("tier", "reason")
    return {
        USED_BYTES: OffloadingGaugeMetadata("Bytes of slots that hold or receive a block.", tier),
        CAPACITY_BYTES: OffloadingGaugeMetadata("Bytes the tier may take, everything counted.", tier),
        EVICTED: OffloadingCounterMetadata("Blocks that made room for others.", tier),
        LOST: OffloadingCounterMetadata("Blocks whose transfer went wrong: corrupt, missing, failed or late.", why),
        DROPPED: OffloadingCounterMetadata("Blocks that were not stored, by reason.", why),
        DOWN: OffloadingGaugeMetadata(
            "1 while a direction is left alone after repeated errors.", ("tier", "direction")
        ),
    }


class TierMetrics:
    """Turns counts since the start into what has been added since the last look."""

    def __init__(self, label: str, lower: LowerTier, capacity_bytes: int) -> None:
        self._label = label
        self._lower = lower
        self._capacity_bytes = capacity_bytes
        self._told: dict[tuple[str, tuple[str, ...]], int] = {}

    def take(self) -> OffloadingConnectorStats:
        """What changed since the last call."""
        lower, label, stats = self._lower, self._label, OffloadingConnectorStats()
        counters = lower.counters
        stats.set_gauge(CAPACITY_BYTES, self._capacity_bytes, (label,))
        if lower.owned is not None:
            stats.set_gauge(USED_BYTES, lower.owned.used_bytes, (label,))
            self._add(stats, EVICTED, (label,), lower.owned.evictions)
        for reason in ("corrupt", "missing", "failed", "late"):
            self._add(stats, LOST, (label, reason), getattr(counters, reason))
        for dropped, count in counters.dropped.items():
            self._add(stats, DROPPED, (label, dropped.value), count)
        for direction, breaker in (("load", lower.load_breaker), ("store", lower.store_breaker)):
            down = lower.stuck or breaker.state is not BreakerState.CLOSED
            stats.set_gauge(DOWN, int(down), (label, direction))
        return stats

    def _add(self, stats: OffloadingConnectorStats, name: str, labels: tuple[str, ...], count: int) -> None:
        more = count - self._told.get((name, labels), 0)
        if more:
            self._told[name, labels] = count
            stats.increase_counter(name, more, labels)
