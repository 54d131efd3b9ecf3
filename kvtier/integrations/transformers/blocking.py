"""Saving and restoring the KV cache of a token prefix, in a program without an event loop."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from kvtier.errors import UsageError
from kvtier.integrations.transformers.loopthread import LoopThread
from kvtier.integrations.transformers.model import ModelKV
from kvtier.integrations.transformers.prefix import AsyncPrefixCache, StackSource, TokenIds
from kvtier.stack import StackStats

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

T = TypeVar("T")


class PrefixCache:
    """`AsyncPrefixCache` for synchronous programs: `with PrefixCache(stack, model) as prefixes`.

    The stack runs in a thread of its own, so what was saved goes on to the lower tiers while the model computes. Calls
    may come from any thread and wait for their end. Left open, it is closed at the end of the program. In a child
    forked from the process that opened it every call raises UsageError, but `close`, which does nothing.
    """

    def __init__(self, stack: StackSource, model: PreTrainedModel, block_size: int = 16, weights: str = "") -> None:
        self._inner = AsyncPrefixCache(stack, model, block_size, weights)
        self._device: torch.device | None = None
        self._thread: LoopThread | None = None
        self._closing = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """As `AsyncPrefixCache.open`."""
        if self._thread is not None:
            raise UsageError("a prefix cache is opened once")
        prepared = self._inner.prepare()
        self._device = prepared.kv.device
        self._thread = LoopThread()
        try:
            self._thread.run(self._inner.start(prepared))
        except BaseException:
            self._closed = True
            self._thread.stop()
            raise
        atexit.register(self.close)

    def close(self) -> None:
        """As `AsyncPrefixCache.close`."""
        if self._thread is None or self._thread.elsewhere:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self.close)
            try:
                self._thread.run(self._inner.close())
            finally:
                self._thread.stop()

    def save(self, token_ids: TokenIds, cache: DynamicCache, salt: bytes = b"") -> int:
        """As `AsyncPrefixCache.save`."""
        return self._run(lambda: self._inner.save(token_ids, cache, salt))

    def restore(self, token_ids: TokenIds, salt: bytes = b"") -> tuple[DynamicCache, int]:
        """As `AsyncPrefixCache.restore`."""
        return self._run(lambda: self._inner.restore(token_ids, salt))

    @property
    def kv(self) -> ModelKV:
        """What the model's KV cache is like."""
        return self._inner.kv

    def settle(self, timeout_seconds: float) -> bool:
        """As `AsyncPrefixCache.settle`."""
        return self._run(lambda: self._inner.settle(timeout_seconds))

    def reset(self) -> None:
        """As `AsyncPrefixCache.reset`."""
        self._run(self._inner.reset)

    def stats(self) -> StackStats:
        """As `AsyncPrefixCache.stats`."""
        return self._inner.stats()

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a call in the stack's thread. What the caller's stream computes, or reads, has ended by then."""
        if self._thread is None or self._closed:
            raise UsageError("the prefix cache is not open")
        if self._thread.elsewhere:
            raise UsageError("the prefix cache belongs to the process that opened it, and this one was forked from it")
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return self._thread.run(work())
