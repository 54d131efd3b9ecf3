"""A trace through what vLLM keeps of a model with windows or states, for `benchmarks.junctions`. It needs vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import LookupResult

from kvtier.engines.vllm.primary.connector import SeenPrefixes, StoredPrefixes
from kvtier.traces.read import read_trace
from kvtier.traces.requests import KeyChain, Request

WINDOW_TOKENS = 1024


@dataclass
class Replay:
    """A model's groups: `full` of full attention, `sparse` of windows or of states. Counts blocks and tokens."""

    full: int
    sparse: int
    manager: Any
    spec: Any
    rule: bool
    tokens: int
    stored: tuple[set[bytes], set[bytes]] = field(default_factory=lambda: (set(), set()))
    restored_tokens: int = 0

    def __post_init__(self) -> None:
        self._states: dict[str, Any] = {}
        self._chain = KeyChain()
        self._scheduler: Any = SimpleNamespace(_req_status=self._states, manager=self)
        stored, seen = StoredPrefixes(self._scheduler, {0: self.tokens}), SeenPrefixes(self._scheduler, self.tokens)
        self._rule: StoredPrefixes | SeenPrefixes = stored if self.full else seen
        self._window = 1 if self.manager is MambaManager else -(-WINDOW_TOKENS // self.tokens)

    @property
    def blocks(self) -> int:
        """Blocks stored, of all groups."""
        return self.full * len(self.stored[0]) + self.sparse * len(self.stored[1])

    def lookup(self, key: bytes, context: None) -> LookupResult:
        """The answer for a window or a state."""
        return LookupResult.HIT if key in self.stored[1] else LookupResult.MISS

    def stored_prefix(self, request_id: str, keys: Sequence[bytes]) -> int:
        """Count the stored blocks of full attention, as the adapter's manager does."""
        return next((number for number, key in enumerate(keys) if key not in self.stored[0]), len(keys))

    def serve(self, served: Request) -> None:
        """Look a prompt up, then store it."""
        keys = self._chain.digests(served)[: served.prompt_tokens // self.tokens]
        self._states["request"] = SimpleNamespace(group_states=[SimpleNamespace(offload_keys=keys)])
        request: Any = SimpleNamespace(
            request_id="request", num_tokens=served.prompt_tokens, num_prompt_tokens=served.prompt_tokens
        )
        most = (served.prompt_tokens - 1) // self.tokens
        found = keys[: min(most, self.stored_prefix("request", keys))] if self.full else keys[:most]
        reached = OffloadingConnectorScheduler._sliding_window_lookup(self._scheduler, found, self._window, None)
        boundaries = [served.prompt_tokens - 1]
        if self.rule and (junction := self._rule.end(request, reached * self.tokens)) > reached * self.tokens:
            boundaries.append(junction)
        self.restored_tokens += reached * self.tokens
        kept = self.manager.reachable_block_mask(
            start_block=reached,
            end_block=len(keys),
            alignment_tokens=self.tokens,
            kv_cache_spec=self.spec,
            use_eagle=False,
            retention_interval=0,
            reachable_boundaries=boundaries,
        )
        self.stored[0].update(keys if self.full else ())
        self.stored[1].update(key for key, keep in zip(keys[reached:], kept, strict=True) if keep)
        if isinstance(self._rule, SeenPrefixes):
            self._rule.on_finished(request)


def window_spec(tokens: int) -> SlidingWindowSpec:
    """A group of layers with sliding windows."""
    return SlidingWindowSpec(
        block_size=tokens, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=WINDOW_TOKENS
    )


def state_spec(tokens: int) -> MambaSpec:
    """A group of layers with recurrent states."""
    return MambaSpec(block_size=tokens, shapes=((8,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")


LAYOUTS: dict[str, tuple[int, int, Any, Any]] = {
    "Gemma 3: 1 group of full attention, 6 of windows": (1, 6, SlidingWindowManager, window_spec),
    "Qwen3-Next: 1 group of full attention, 3 of states": (1, 3, MambaManager, state_spec),
    "windows alone": (0, 1, SlidingWindowManager, window_spec),
}


def replay(layout: str, trace: Path, rule: bool, limit: int | None = None) -> Replay:
    """A replay of a trace's requests, with the rule or without."""
    source = read_trace(trace, limit)
    full, sparse, manager, spec = LAYOUTS[layout]
    made = Replay(full, sparse, manager, spec(source.block_tokens), rule, source.block_tokens)
    for request in source.requests():
        made.serve(request)
    return made
