"""vLLM's OffloadingConnector with what a model with windows or recurrent states needs to continue a shared prefix."""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec
from vllm.v1.request import Request

from kvtier.engines.vllm.compat import LOGGER
from kvtier.engines.vllm.primary.manager import KVTierManager
from kvtier.engines.vllm.settings import shares_prefixes
from kvtier.types.keys import OffloadKey

SEEN_MAX = 1 << 17
"""Blocks of prompts that are remembered, some 30 MB; 2 million tokens in blocks of 16."""
_log = logging.getLogger(LOGGER)


class KVTierConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's OffloadingConnector that also stores the end of a prefix that requests share.

    Of a sliding window or a recurrent state vLLM keeps the end of each prompt only. A second request with the same
    system prompt then finds no window or state to continue from. Here such a request marks the end of the prefix as
    `shared_prefix_boundary`, vLLM's own name for it. So its windows and states there are stored, and the third request
    continues from them. `"shared_prefixes": false` turns it off.

    It also looks for no more of a prefix than is stored, see `fit_groups`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._prefixes: StoredPrefixes | SeenPrefixes | None = None
        if role is KVConnectorRole.SCHEDULER:
            fit_groups(self.connector_scheduler)
            if shares_prefixes(vllm_config.kv_transfer_config):
                self._prefixes = shared_prefixes(self.connector_scheduler)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's answer; a request that cannot continue after all of a shared prefix marks its end."""
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is not None and self._prefixes is not None:
            reached = num_computed_tokens + tokens
            junction = self._prefixes.end(request, reached)
            if junction > max(reached, request.shared_prefix_boundary):
                request.shared_prefix_boundary = junction
        return tokens, is_async

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's answer; what the request had may be a prefix of others."""
        if isinstance(self._prefixes, SeenPrefixes):
            self._prefixes.on_finished(request)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return answer


class StoredPrefixes:
    """A model with full attention beside windows or states: a prefix is shared as far as full attention is stored."""

    def __init__(self, scheduler: Any, full: dict[int, int]) -> None:
        self._scheduler = scheduler
        self._full = full
        """Tokens of an offloaded block of each group with full attention, by the group's position."""

    def end(self, request: Request, reached: int) -> int:
        """The tokens of the prefix. The request continues after `reached`: up to there every group has its blocks."""
        groups = self._scheduler._req_status[request.request_id].group_states
        junction: int = request.num_tokens
        for position, tokens in self._full.items():
            first = reached // tokens
            keys = groups[position].offload_keys[first : junction // tokens]
            junction = min(junction, (first + self._scheduler.manager.stored_prefix(request.request_id, keys)) * tokens)
        return junction


class SeenPrefixes:
    """A model of windows or states alone: a prefix is shared as far as a prompt before had it, of `SEEN_MAX` blocks."""

    def __init__(self, scheduler: Any, tokens: int) -> None:
        self._scheduler = scheduler
        self._tokens = tokens
        self._seen: dict[OffloadKey, None] = {}

    def end(self, request: Request, reached: int) -> int:
        """The tokens of the prefix that an ended request had too."""
        keys = self._keys(request)
        return next((number for number, key in enumerate(keys) if key not in self._seen), len(keys)) * self._tokens

    def on_finished(self, request: Request) -> None:
        """Remember the blocks of its prompt, from its end on, so that the oldest ends are forgotten first."""
        for key in reversed(self._keys(request)):
            self._seen.pop(key, None)
            self._seen[key] = None
        while len(self._seen) > SEEN_MAX:
            del self._seen[next(iter(self._seen))]

    def _keys(self, request: Request) -> list[OffloadKey]:
        state = self._scheduler._req_status.get(request.request_id)
        keys: list[OffloadKey] = [] if state is None else state.group_states[0].offload_keys
        return keys[: request.num_prompt_tokens // self._tokens]


def fit_groups(scheduler: Any) -> None:
    """Have lookups want as many blocks as vLLM stores and loads.

    Of a window those without its own token. vLLM's lookup wants one more where the window is a multiple of the block
    and one, such as 4,097 tokens: it finds nothing where only the end of a prompt is stored. For other windows both
    numbers are the same. What a prompt that ends within a block needs besides, vLLM adds itself.

    Of a group that holds layers of an EAGLE or MTP draft the blocks that are loaded. vLLM 0.33 wants one more and drops
    the last, because the draft's entry of its last token depends on the next one. A stale entry costs the draft a guess
    at most: the model verifies each. vLLM 0.33 itself drops none where it knows of no such group. While a request is
    decoded, the last block of such a group is stored as early as that of any other.
    """
    groups = []
    for group in scheduler.config.kv_group_configs:
        spec = group.kv_cache_spec
        if isinstance(spec, SlidingWindowSpec):
            needed = spec.sliding_window - 1 + spec.extra_retained_tokens
            group = group._replace(sliding_window_size_in_chunks=max(1, -(-needed // group.tokens_per_chunk)))
        groups.append(group._replace(is_eagle_group=False))
    scheduler.config = scheduler.config._replace(kv_group_configs=tuple(groups))


def shared_prefixes(scheduler: Any) -> StoredPrefixes | SeenPrefixes | None:
    """None for a model of full attention alone. One line at start for the others."""
    groups = scheduler.config.kv_group_configs
    full = {
        position: group.tokens_per_chunk
        for position, group in enumerate(groups)
        if group.sliding_window_size_in_chunks is None
    }
    if len(full) == len(groups) or not isinstance(scheduler.manager, KVTierManager):
        return None
    _log.info("shared prefixes: the second request that has one stores the windows and states at its end")
    return StoredPrefixes(scheduler, full) if full else SeenPrefixes(scheduler, groups[0].tokens_per_chunk)
