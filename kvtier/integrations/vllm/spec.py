"""The class that vLLM's OffloadingConnector is configured with."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.integrations.vllm import metrics
from kvtier.integrations.vllm.manager import KVTierManager
from kvtier.integrations.vllm.plan import engine_plan
from kvtier.integrations.vllm.worker import KVTierWorker


class KVTierSpec(OffloadingSpec):  # type: ignore[misc]
    """Serves from a kvtier stack: `stack: path/to/stack.yaml`, or the stack itself, in `kv_connector_extra_config`.

    Built in the scheduler and in every worker; nothing is opened before `get_manager` and `get_worker`. Raises
    ConfigError for a key or a stack that is wrong, and for a deployment that is not supported, by its name.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Every metric that the manager may report."""
        return metrics.definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.replicated_layout = config.replicated_layout  # vLLM then has rank 0 alone store
        self._plan = engine_plan(config)
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side; opens every tier. The workers' regions are there by then."""
        if self._manager is None:
            self._manager = KVTierManager(self._plan, events=self.config.enable_kv_cache_events)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """One rank's side; maps the shared region."""
        if self._worker is None:
            self._worker = KVTierWorker(self._plan, self.config.parallel.rank, kv_caches)
        return self._worker
