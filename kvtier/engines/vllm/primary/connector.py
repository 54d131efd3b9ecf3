"""vLLM's OffloadingConnector with what a model with windows or recurrent states needs to continue a shared prefix."""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kvtier.engines.vllm.compat import LOGGER
from kvtier.engines.vllm.primary.manager import KVTierManager
from kvtier.engines.vllm.settings import shares_prefixes

_log = logging.getLogger(LOGGER)


class KVTierConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's OffloadingConnector that also stores the end of a prefix that requests share.

    Of a sliding window or a recurrent state vLLM keeps the end of each prompt only. A second request with the same
    system prompt then finds the blocks of full attention, but no window or state to continue from. Here such a request
    marks the end of the prefix as `shared_prefix_boundary`, vLLM's own name for it. So its windows and states there are
    stored, and the third request continues from them. `"shared_prefixes": false` turns it off.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._prefixes: SharedPrefixes | None = None
        if role is KVConnectorRole.SCHEDULER and shares_prefixes(vllm_config.kv_transfer_config):
            self._prefixes = shared_prefixes(self.connector_scheduler)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's answer; a request that cannot continue as far as full attention reaches marks the end of that."""
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is not None and self._prefixes is not None:
            self._prefixes.mark(request, num_computed_tokens + tokens)
        return tokens, is_async


class SharedPrefixes:
    """Finds where the stored prefix of a request ends in full attention, and marks the request."""

    def __init__(self, scheduler: Any, full: dict[int, int]) -> None:
        self._scheduler = scheduler
        self._full = full
        """Tokens of an offloaded block of each group with full attention, by the group's position."""

    def mark(self, request: Request, reached: int) -> None:
        """The request continues after `reached` tokens: up to there every group has its blocks."""
        groups = self._scheduler._req_status[request.request_id].group_states
        junction = request.num_tokens
        for position, tokens in self._full.items():
            first = reached // tokens
            keys = groups[position].offload_keys[first : junction // tokens]
            junction = min(junction, (first + self._scheduler.manager.stored_prefix(keys)) * tokens)
        if junction > max(reached, request.shared_prefix_boundary):
            request.shared_prefix_boundary = junction


def shared_prefixes(scheduler: Any) -> SharedPrefixes | None:
    """None for a model whose groups all have full attention, or none has. One line at start for the others."""
    groups = scheduler.config.kv_group_configs
    full = {
        position: group.tokens_per_chunk
        for position, group in enumerate(groups)
        if group.sliding_window_size_in_chunks is None
    }
    if not full or len(full) == len(groups) or not isinstance(scheduler.manager, KVTierManager):
        return None
    _log.info("shared prefixes: the second request that has one stores the windows and states at its end")
    return SharedPrefixes(scheduler, full)
