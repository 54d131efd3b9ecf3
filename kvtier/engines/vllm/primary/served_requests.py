"""vLLM's own request behind the context that its managers are given: its lengths and the hashes of its blocks.

vLLM makes the context of a request in one function. `requests_in_contexts` has that function leave the request in the
context's own scratch space, where it lives as long as the context does.
"""

import importlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.types.keys import OffloadKey

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
    """The keys of a request that vLLM knows so far, but the first `after` of them; each group's in prefix order.

    At the first lookup of a request those are the prompt's whole blocks, later those of the output too. None where vLLM
    does not keep them.
    """
    positions: dict[OffloadKey, int] = getattr(context, "_offload_key_positions", {})
    return list(islice(reversed(positions), max(0, len(positions) - after)))[::-1]


class _WithRequest:
    """Takes the place of vLLM's function."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __call__(self, request: Any) -> ReqContext:
        context = self._theirs(request)
        context.set_state(ServedRequest(request, time.monotonic()))
        return context
