"""The speed at which the engine computes prompts, seen from the scheduler: from a request's first step to its first
token."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvtier.engines.vllm.primary.served_requests import ServedRequest


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
