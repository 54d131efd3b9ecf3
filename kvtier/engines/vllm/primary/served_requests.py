"""Requests of vLLM: its own request behind the context that its managers are given, with its lengths and the hashes of
its blocks; the time of its prefill; and the manager's state while vLLM scans its keys.

vLLM makes the context of a request in one function. `requests_in_contexts` has that function leave the request in the
context's own scratch space, where it lives as long as the context does.
"""

import importlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.client.request import ClientRequest
from kvtier.tier.contract import LookupResult
from kvtier.types.keys import OffloadKey, key_group, make_key

_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
_FUNCTION = "_create_req_context"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ServedRequest:
    """vLLM's request, and when it came, by `time.monotonic`."""

    request: Any
    arrived: float

    def prompt_hashes(self, tokens_per_hash: int, hashes_per_block: int) -> Sequence[bytes]:
        """The hashes of the prompt's whole offloaded blocks, in prefix order: each is that of the block's end."""
        hashes: Sequence[bytes] = self.request.block_hashes
        whole = self.request.num_prompt_tokens // tokens_per_hash
        return hashes[hashes_per_block - 1 : whole : hashes_per_block]


def requests_in_contexts() -> bool:
    """Have contexts that are made from here on hold a `ServedRequest`; False, and a line in the log, if they cannot."""
    module = importlib.import_module(_MODULE)
    theirs = getattr(module, _FUNCTION, None)
    if theirs is None or not hasattr(ReqContext, "set_state"):
        _log.error(
            "this vLLM makes the contexts of requests in another way: none is recorded, no policy follows them, and "
            "their session_id is not known"
        )
        return False
    if isinstance(theirs, _WithRequest):
        return True
    setattr(module, _FUNCTION, _WithRequest(theirs))
    return True


def hashes_per_block(config: OffloadingConfig) -> int:
    """Hashes of vLLM in one offloaded block of the first group."""
    hashes: int = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk // config.cache.tokens_per_hash
    return hashes


def known_keys(context: ReqContext, after: int = 0) -> Sequence[OffloadKey]:
    """The keys of a request that vLLM has so far, but the first `after` of them; each group's in prefix order.

    At the first lookup of a request those are the prompt's whole blocks, later those of the output too. None where vLLM
    does not keep them.
    """
    positions: dict[OffloadKey, int] = getattr(context, "_offload_key_positions", {})
    return list(islice(reversed(positions), max(0, len(positions) - after)))[::-1]


def prompt_keys(served: ServedRequest, config: OffloadingConfig) -> list[OffloadKey]:
    """The keys of the whole offloaded blocks of a prompt, as kvtier names them; each group's in prefix order."""
    keys = []
    for position, group in enumerate(config.groups):
        step = group.tokens_per_block * config.cache.blocks_per_chunk // config.cache.tokens_per_hash
        keys += [make_key(bytes(each), position) for each in served.prompt_hashes(config.cache.tokens_per_hash, step)]
    return keys


class _WithRequest:
    """Takes the place of vLLM's function."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __call__(self, request: Any) -> ReqContext:
        context = self._theirs(request)
        context.set_state(ServedRequest(request, time.monotonic()))
        return context


@dataclass(slots=True)
class _Prefill:
    """A request that has no token yet: what it computes, and since when; None until it is scheduled."""

    served: ServedRequest
    tokens: int = 0
    begun: float | None = None


class Prefills:
    """Tells `computed` of each prompt: its tokens that came from no cache, and the times of its begin and its end."""

    def __init__(self, computed: Callable[[int, float, float], None]) -> None:
        self._computed = computed
        self._open: dict[str, _Prefill] = {}

    def arrived(self, request_id: str, served: ServedRequest | None) -> None:
        """A request has come."""
        if served is not None:
            self._open[request_id] = _Prefill(served)

    def step(self, new: Collection[str], preempted: Collection[str]) -> None:
        """A step was scheduled, in which new requests begin; those preempted count no more."""
        for request_id in preempted:
            self._open.pop(request_id, None)
        for request_id in list(self._open):
            if self._open[request_id].served.request.num_output_tokens:
                self.ended(request_id)
        now = time.monotonic()
        for request_id in new:
            if (prefill := self._open.get(request_id)) is not None:
                request = prefill.served.request
                prefill.tokens = request.num_prompt_tokens - request.num_computed_tokens
                prefill.begun = now

    def ended(self, request_id: str) -> None:
        """A request has its first token, or has ended without."""
        prefill = self._open.pop(request_id, None)
        if prefill is not None and prefill.begun is not None and prefill.served.request.num_output_tokens:
            self._computed(prefill.tokens, prefill.begun, time.monotonic())


@dataclass(slots=True, eq=False)
class RequestState:
    """The lookups of one request. `keys` are those found in this step's scans, in lookup order.

    `deferred`: one of them was not a hit. `unknown` are those that no tier could answer for in this step, `chain` those
    that are looked up until all are known.
    `request` is that of the stack from the first lookup on, `announced` how many of its keys the stack was given.
    `from_below` are the keys that were not in a row at their first lookup: vLLM reports them as disk hits. `pending`
    are those that were answered with HIT_PENDING. `groups` are those with a block that was found, `loaded` is True once
    blocks are loaded. `is_outdated`: a reset came since its last lookup, so what it computes is not stored until it
    begins anew.
    """

    keys: dict[OffloadKey, None] = field(default_factory=dict)
    unknown: dict[OffloadKey, None] = field(default_factory=dict)
    chain: dict[OffloadKey, None] = field(default_factory=dict)
    deferred: bool = False
    refused_since: float | None = None
    from_below: set[OffloadKey] = field(default_factory=set)
    pending: set[OffloadKey] = field(default_factory=set)
    request: ClientRequest | None = None
    announced: int = 0
    groups: set[int] = field(default_factory=set)
    loaded: bool = False
    is_outdated: bool = False
    _last: dict[int, int] = field(default_factory=dict)

    def found(self, key: OffloadKey, result: LookupResult) -> None:
        """Record an answer that is not a miss."""
        if result is LookupResult.HIT:
            self.keys[key] = None
            return
        self.deferred = True
        if result is LookupResult.RETRY:
            self.unknown[key] = None
        elif result is LookupResult.HIT_PENDING:
            self.from_below.add(key)
            self.pending.add(key)
            if not self.unknown:  # what is behind a key that turns out to be absent is of no use
                self.keys[key] = None

    def waiting(self, key: OffloadKey, position: int | None) -> LookupResult:
        """The O(1) answer while the request's reservation is not served.

        A prefix scan ends at a miss after its first pending key; a window scan goes from right to left and ends once
        its window is full, so there every key is pending.
        """
        group = key_group(key)
        last = self._last.get(group)
        self._last[group] = 0 if position is None else position
        if last is None or position is None or position < last:
            self.pending.add(key)
            return LookupResult.HIT_PENDING
        return LookupResult.MISS

    def end_step(self, num_groups: int) -> None:
        """The scans of this step are over."""
        if len(self.groups) < num_groups:
            self.groups.update(map(key_group, self.keys if num_groups > 1 else islice(self.keys, 1)))
        self.unknown = {}
        self.keys.clear()
        self._last.clear()
        self.deferred = False
