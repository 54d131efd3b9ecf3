"""Saving and restoring the KV cache of a token prefix: in an asyncio program, and in one without an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvtier.aio.loop_thread import LoopThread
from kvtier.config import StackConfig, load_stack, stack_parts
from kvtier.engines.transformers.compat import cache_classes
from kvtier.engines.transformers.model import ModelKV, block_keys, model_kv, namespace, token_array
from kvtier.engines.transformers.staging import Staging, Tensors, cached_tensors, make_cache, synchronize
from kvtier.errors import ConfigError, UsageError
from kvtier.planner import hit_limit
from kvtier.stack import StackStats, TierStack
from kvtier.tier.contract import LookupResult
from kvtier.types.hints import HintResult, KVHint
from kvtier.types.keys import OffloadKey, RequestId

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

TokenIds = Sequence[int] | torch.Tensor | npt.NDArray[np.integer]
"""The ids of one sequence; a tensor or an array may be (tokens,) or (1, tokens)."""

StackSource = str | os.PathLike[str] | StackConfig
"""The path of a stack file, or what `kvtier.config.parse_stack` or `load_stack` returned."""

MAX_BLOCK_SIZE = 4096

T = TypeVar("T")


class Prepared:
    """A model's KV cache, its staging pool and the stack for both, not opened.

    `unit` is the number of tokens that are stored under one key: `block_size`, times the stack's `block_size_factor`.
    Raises ConfigError for a stack, a model or a generation of transformers that will not do.
    """

    def __init__(self, stack: StackSource, model: PreTrainedModel, block_size: int, weights: str) -> None:
        self.config = config = stack if isinstance(stack, StackConfig) else load_stack(stack)
        self.classes = cache_classes()
        self.kv: ModelKV = model_kv(model, self.classes)
        self.factor = config.block_size_factor or 1
        self.layout = self.kv.layout(block_size, self.factor)
        self.unit = block_size * self.factor
        self.staging = Staging(self.kv, block_size, self.factor)
        named = namespace(model, self.kv, self.layout, weights)
        self.stack = TierStack(stack_parts(config, named, self.staging.kv_caches))


class AsyncPrefixCache:
    """Keeps the KV cache of prompts in a tier stack. Use it as `async with AsyncPrefixCache(stack, model) as prefixes`.

    `stack` is the path of a stack file or what `parse_stack` returned. Blocks of `block_size` tokens are stored whole,
    each under a hash of all tokens up to its end, once. `weights` names the model's weights; they are hashed when it is
    left out. The model must be in evaluation mode and keep its weights and adapters while this is open; after a change
    close it and open another. Calls from several tasks are served one at a time.
    """

    def __init__(self, stack: StackSource, model: PreTrainedModel, block_size: int = 16, weights: str = "") -> None:
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(f"must be between 1 and {MAX_BLOCK_SIZE} tokens, got {block_size}", "block_size")
        self.prepare = partial(Prepared, stack, model, block_size, weights)
        """The part of `open` that needs the model. It runs in the caller's thread."""
        self._prepared: Prepared | None = None
        self._room: int | None = None
        self._turn = asyncio.Lock()

    # -- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Run the model on one token, hash its weights, open every tier.

        Raises ConfigError for what is not supported, by its name, or a wrong stack; ResourceError as the tiers do.
        Nothing is left behind then.
        """
        await self.start(self.prepare())

    async def start(self, prepared: Prepared) -> None:
        """The rest of `open`."""
        if self._prepared is not None:
            raise UsageError("a prefix cache is opened once")
        self._prepared = prepared
        await prepared.stack.open()
        self._room = _room(prepared.stack.stats())

    async def close(self) -> None:
        """Write back what is dirty, until the stack's closing deadline; close every tier.

        Idempotent. What was dropped is in the log.
        """
        if self._prepared is not None:
            await self._prepared.stack.close()

    # -- prefixes ------------------------------------------------------------------------------------------------

    async def save(self, token_ids: TokenIds, cache: DynamicCache, salt: bytes = b"") -> int:
        """Store the whole blocks of a sequence; returns how many of its first tokens the stack holds now.

        `cache` holds the first tokens of the sequence, usually all or all but the last one sampled; blocks that the
        stack has already are not copied again. It must stay as it is until this returns. Positions must count from 0,
        without padding. `salt` stands for whatever else the cache depends on: images, an adapter, a tenant. Raises
        UsageError for a cache that is not the model's. Blocks that a tier could not keep make the number smaller.
        """
        opened = self._opened()
        tensors, cached = cached_tensors(cache, opened.kv, opened.classes)
        tokens = token_array(token_ids)
        if cached > len(tokens):
            raise UsageError(f"the cache holds {cached} tokens, but only {len(tokens)} are named")
        keys = block_keys(tokens[:cached], opened.unit, salt)[: self._room]
        async with self._turn:
            request = opened.stack.request(RequestId("save"))
            where = opened.stack.locate(keys)
            hits = [key for key, name in zip(keys, where, strict=True) if name is not None]
            # Before: the new blocks must not evict them. After: no block may age before those that follow it.
            request.touch(hits)
            await self._store(opened, keys, [index for index, name in enumerate(where) if name is None], tensors)
            request.touch(hits)
            return _front([name is not None for name in opened.stack.locate(keys)]) * opened.unit

    async def restore(self, token_ids: TokenIds, salt: bytes = b"") -> tuple[DynamicCache, int]:
        """The longest prefix whose blocks were verified: its cache and its number of tokens; empty and 0 for a miss.

        At least one token is left to compute. Every layer of the cache keeps all its tokens. A block that is missing,
        late or fails its verification ends the prefix before it.
        """
        opened = self._opened()
        tokens = token_array(token_ids)
        keys = block_keys(tokens[: hit_limit(opened.layout, len(tokens))], opened.unit, salt)
        answers = await opened.stack.lookup(keys)
        keys = keys[: _front([answer in (LookupResult.HIT, LookupResult.HIT_PENDING) for answer in answers])]
        tensors = opened.staging.empty(len(keys) * opened.unit)
        async with self._turn:
            loaded = await self._load(opened, keys, tensors)
            opened.stack.request(RequestId("restore")).touch(keys[:loaded])
        count = loaded * opened.unit
        cache: DynamicCache = make_cache(tensors, count, opened.classes)
        return cache, count

    # -- knowing and steering ------------------------------------------------------------------------------------

    @property
    def kv(self) -> ModelKV:
        """The shape of the model's KV cache."""
        return self._opened().kv

    def keys(self, token_ids: TokenIds, salt: bytes = b"") -> list[OffloadKey]:
        """The keys of a sequence's whole blocks, for hints: `save` stores under them what it has room for."""
        return block_keys(token_array(token_ids), self._opened().unit, salt)

    def hint(self, hint: KVHint) -> HintResult:
        """Passes a hint to the stack: `Retain`, `Pin`, `Prefetch`, `Demote` or `Release`, of `keys` or of a session."""
        return self._opened().stack.hint(hint)

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait until everything saved is in the lower tiers too; False when the time ran out."""
        return await self._opened().stack.drain(timeout_seconds)

    async def reset(self) -> None:
        """Forget everything stored under this namespace, durably. Raises ResourceError as `TierStack.reset` does."""
        await self._opened().stack.reset()

    def stats(self) -> StackStats:
        """Figures of every tier since opening; also after closing."""
        return self._opened().stack.stats()

    # -- moving blocks -------------------------------------------------------------------------------------------

    def _opened(self) -> Prepared:
        if self._prepared is None:
            raise UsageError("the prefix cache is not open")
        return self._prepared

    async def _store(self, opened: Prepared, keys: list[OffloadKey], missing: list[int], tensors: Tensors) -> None:
        """Store the missing blocks, a staging pool at a time, from the end of the sequence to its beginning: so the
        beginning is the youngest, and what is left in tiers too small for all of it. Stops when nothing is kept."""
        deadline = _now() + opened.config.store_timeout_seconds
        for batch in reversed(list(_batches(missing, opened.staging.capacity))):
            opened.staging.pack(tensors, batch)
            pages, left = range(len(batch) * opened.factor), max(0.0, deadline - _now())
            names = [keys[position] for position in batch]
            result = await opened.stack.store(names, gpu_blocks=pages, timeout_seconds=left)
            if not any(outcome.ok for outcome in result.outcomes[0]):
                return

    async def _load(self, opened: Prepared, keys: list[OffloadKey], tensors: Tensors) -> int:
        """Load blocks from the first on, a staging pool at a time; returns how many came before the first that did
        not."""
        deadline = _now() + opened.config.load_timeout_seconds
        loaded = 0
        for batch in _batches(keys, opened.staging.capacity):
            pages, left = range(len(batch) * opened.factor), max(0.0, deadline - _now())
            result = await opened.stack.load(batch, gpu_blocks=pages, timeout_seconds=left)
            good = _front([outcome.ok for outcome in result.outcomes[0]])
            opened.staging.unpack(tensors, loaded, good)
            loaded += good
            if good < len(batch):
                break
        return loaded


class PrefixCache:
    """`AsyncPrefixCache` for synchronous programs: `with PrefixCache(stack, model) as prefixes`.

    The stack runs in a thread of its own, so what was saved goes on to the lower tiers while the model computes. Calls
    may come from any thread and wait for their end. Left open, it is closed at the end of the program. In a child
    forked from the process that opened it every call raises UsageError, but `close`, which does nothing.
    """

    def __init__(self, stack: StackSource, model: PreTrainedModel, block_size: int = 16, weights: str = "") -> None:
        self._inner = AsyncPrefixCache(stack, model, block_size, weights)
        self._thread: LoopThread | None = None
        self._closing = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Synchronous form of `AsyncPrefixCache.open`."""
        if self._thread is not None:
            raise UsageError("a prefix cache is opened once")
        prepared = self._inner.prepare()
        self._thread = LoopThread("kvtier-prefixes", "prefix cache", at_exit=self.close)
        try:
            self._thread.open()
            self._thread.run(lambda: self._inner.start(prepared))
        except BaseException:
            self._closed = True
            self._thread.close()
            raise

    def close(self) -> None:
        """Synchronous form of `AsyncPrefixCache.close`."""
        if self._thread is None or self._thread.is_forked_child:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            try:
                self._thread.run(self._inner.close)
            finally:
                self._thread.close()

    def save(self, token_ids: TokenIds, cache: DynamicCache, salt: bytes = b"") -> int:
        """Synchronous form of `AsyncPrefixCache.save`."""
        return self._run(lambda: self._inner.save(token_ids, cache, salt))

    def restore(self, token_ids: TokenIds, salt: bytes = b"") -> tuple[DynamicCache, int]:
        """Synchronous form of `AsyncPrefixCache.restore`."""
        return self._run(lambda: self._inner.restore(token_ids, salt))

    @property
    def kv(self) -> ModelKV:
        """The shape of the model's KV cache."""
        return self._inner.kv

    def keys(self, token_ids: TokenIds, salt: bytes = b"") -> list[OffloadKey]:
        """Synchronous form of `AsyncPrefixCache.keys`."""
        return self._inner.keys(token_ids, salt)

    def hint(self, hint: KVHint) -> HintResult:
        """Synchronous form of `AsyncPrefixCache.hint`."""

        async def say() -> HintResult:
            return self._inner.hint(hint)

        return self._run(say)

    def drain(self, timeout_seconds: float) -> bool:
        """Synchronous form of `AsyncPrefixCache.drain`."""
        return self._run(lambda: self._inner.drain(timeout_seconds))

    def reset(self) -> None:
        """Synchronous form of `AsyncPrefixCache.reset`."""
        self._run(self._inner.reset)

    def stats(self) -> StackStats:
        """Synchronous form of `AsyncPrefixCache.stats`."""

        async def read() -> StackStats:
            return self._inner.stats()

        # The stack's thread changes the figures while it runs.
        return self._inner.stats() if self._closed else self._run(read)

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a call in the stack's thread. What the caller's stream computes, or reads, has ended by then."""
        if self._thread is None or self._closed:
            raise UsageError("the prefix cache is not open")
        if self._thread.is_forked_child:
            raise UsageError("the prefix cache belongs to the process that opened it, and this one was forked from it")
        synchronize(self.kv.device)
        return self._thread.run(work)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _batches(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _room(stats: StackStats) -> int | None:
    """The number of blocks of one sequence that are worth storing: as many as the largest tier holds. More would evict
    their own beginning. None where a shared tier has no number of slots."""
    sizes = [sum(tier.slots.values()) for tier in stats.tiers.values()]
    return max(sizes) if all(sizes) else None


def _front(flags: Sequence[bool]) -> int:
    """The number of values that are true before the first that is false."""
    return next((index for index, flag in enumerate(flags) if not flag), len(flags))
