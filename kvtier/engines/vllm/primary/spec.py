"""The class that vLLM's OffloadingConnector is configured with."""

from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.engines.vllm import metrics
from kvtier.engines.vllm.compat import require_tested
from kvtier.engines.vllm.primary.manager import KVTierManager
from kvtier.engines.vllm.primary.worker import KVTierWorker
from kvtier.engines.vllm.settings import engine_plan


class KVTierSpec(OffloadingSpec):  # type: ignore[misc]
    """Serves from a kvtier stack: `stack: path/to/stack.yaml`, or the stack itself, in `kv_connector_extra_config`.

    Built in the scheduler and in every worker; nothing is opened before `get_manager` and `get_worker`. Raises
    ConfigError for a key or a stack that is wrong, and for a deployment that is not supported, by its name.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Every metric that the manager may report."""
        return metrics.definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """The labels of the manager's `config_info`. Called by vLLM 0.33."""
        from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo

        keys: tuple[str, ...] = CPUOffloadingInfo.config_info_keys()
        return keys

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        require_tested(config.extra_config)
        self.replicated_layout = config.replicated_layout  # vLLM then has rank 0 alone store
        self._plan = engine_plan(config)

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side, opening every tier; called once. The workers' regions are there by then."""
        return KVTierManager(self._plan, self.config)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The side of one rank, which maps the shared region; called once."""
        return KVTierWorker(self._plan, self.config.parallel.rank, kv_caches)
