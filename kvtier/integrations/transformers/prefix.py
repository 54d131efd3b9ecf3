"""Saving and restoring the KV cache of a token prefix, in an asyncio program."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvtier.config import StackConfig, load_stack, stack_parts
from kvtier.errors import ConfigError, UsageError
from kvtier.integrations.transformers.chain import block_keys, token_array
from kvtier.integrations.transformers.generation import CacheClasses, cache_classes
from kvtier.integrations.transformers.model import ModelKV, model_kv, namespace
from kvtier.integrations.transformers.staging import Staging, Tensors, cached_tensors, make_cache
from kvtier.jobs import GPURuns, GroupTransfer, JobKind
from kvtier.keys import GroupIndex, OffloadKey
from kvtier.loadstore import LookupResult
from kvtier.planner import hit_limit
from kvtier.stack import StackStats, TierStack

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

TokenIds = Sequence[int] | torch.Tensor | npt.NDArray[np.integer]
"""The ids of one sequence; a tensor or an array may be (tokens,) or (1, tokens)."""

StackSource = str | os.PathLike[str] | StackConfig
"""The path of a stack file, or what `kvtier.config.parse_stack` or `load_stack` returned."""

MAX_BLOCK_SIZE = 4096


class Prepared:
    """A model's KV cache, its staging and the stack for both, found out and not opened.

    `unit` is the number of tokens that are stored under one key: `block_size`, times the stack's `block_size_factor`.
    Raises ConfigError for a stack, a model or a generation of transformers that will not do.
    """

    def __init__(self, config: StackConfig, model: PreTrainedModel, block_size: int, weights: str) -> None:
        self.config = config
        self.classes: CacheClasses = cache_classes()
        self.kv: ModelKV = model_kv(model, self.classes)
        factor = config.block_size_factor or 1
        self.factor = factor
        self.layout = self.kv.layout(block_size, factor)
        self.unit = block_size * factor
        self.staging = Staging(self.kv, block_size, factor)
        named = namespace(model, self.kv, self.layout, self.classes, weights)
        self.stack = TierStack(stack_parts(config, named, self.staging.caches))


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
        self._source = stack
        self._model = model
        self._block_size = block_size
        self._weights = weights
        self._prepared: Prepared | None = None
        self._room: int | None = None
        self._turn = asyncio.Lock()

    # -- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Run the model on one token, hash its weights, open every tier.

        Raises ConfigError for what is not supported, by its name, or a wrong stack; ResourceError as the tiers do.
        Nothing is left behind then.
        """
        await self.start(self.prepare())

    def prepare(self) -> Prepared:
        """The part of `open` that needs the model; it takes the caller's thread for as long as it takes."""
        config = self._source if isinstance(self._source, StackConfig) else load_stack(self._source)
        return Prepared(config, self._model, self._block_size, self._weights)

    async def start(self, prepared: Prepared) -> None:
        """The rest of `open`."""
        if self._prepared is not None:
            raise UsageError("a prefix cache is opened once")
        self._prepared = prepared
        await prepared.stack.open()
        self._room = _room(prepared.stack.stats())

    async def close(self) -> None:
        """Write what is still on its way to the lower tiers, until the stack's closing deadline; close every tier.

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
        UsageError for a cache that is not the model's; bad luck makes the number smaller.
        """
        opened = self._opened()
        tensors, cached = cached_tensors(cache, opened.kv, opened.classes)
        tokens = token_array(token_ids)
        if cached > len(tokens):
            raise UsageError(f"the cache holds {cached} tokens, but only {len(tokens)} are named")
        keys = block_keys(tokens[:cached], opened.unit, salt)[: self._room]
        async with self._turn:
            where = opened.stack.locate(keys)
            hits = [key for key, name in zip(keys, where, strict=True) if name is not None]
            # Before: or the new blocks would push them out. After: so that no block ages before those it precedes.
            opened.stack.touch(hits)
            await self._store(opened, keys, [index for index, name in enumerate(where) if name is None], tensors)
            opened.stack.touch(hits)
            return _front([name is not None for name in opened.stack.locate(keys)]) * opened.unit

    async def restore(self, token_ids: TokenIds, salt: bytes = b"") -> tuple[DynamicCache, int]:
        """The longest prefix the stack can vouch for: a cache of it, and its number of tokens; empty and 0 for a miss.

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
            opened.stack.touch(keys[:loaded])
        count = loaded * opened.unit
        cache: DynamicCache = make_cache(tensors, count, opened.classes)
        return cache, count

    # -- knowing and steering ------------------------------------------------------------------------------------

    @property
    def kv(self) -> ModelKV:
        """What the model's KV cache is like."""
        return self._opened().kv

    async def settle(self, timeout_seconds: float) -> bool:
        """Wait until everything saved is in the lower tiers too; False when the time ran out."""
        return await self._opened().stack.settle(timeout_seconds)

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
        deadline = self._now() + opened.config.store_timeout_seconds
        for batch in reversed(list(_batches(missing, opened.staging.capacity))):
            opened.staging.pack(tensors, batch)
            if not any(await self._move(opened, JobKind.STORE, [keys[position] for position in batch], deadline)):
                return

    async def _load(self, opened: Prepared, keys: list[OffloadKey], tensors: Tensors) -> int:
        """Load blocks from the first on, a staging pool at a time; returns how many came before the first that did
        not."""
        deadline = self._now() + opened.config.load_timeout_seconds
        loaded = 0
        for batch in _batches(keys, opened.staging.capacity):
            good = _front(await self._move(opened, JobKind.LOAD, batch, deadline))
            opened.staging.unpack(tensors, loaded, good)
            loaded += good
            if good < len(batch):
                break
        return loaded

    async def _move(self, opened: Prepared, kind: JobKind, keys: list[OffloadKey], deadline: float) -> list[bool]:
        """Store or load the first pages of the pool under these keys; for each key whether it went well."""
        runs = GPURuns.whole(range(len(keys) * opened.factor), opened.factor)
        groups = [GroupTransfer(GroupIndex(0), tuple(keys), runs)]
        job = opened.stack.job(kind, groups, max(0.0, deadline - self._now()))
        result = await (opened.stack.store(job) if kind is JobKind.STORE else opened.stack.load(job))
        return [outcome.ok for outcome in result.outcomes[0]]

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


T = TypeVar("T")


def _batches(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _room(stats: StackStats) -> int | None:
    """How many blocks of one sequence are worth storing: as many as the largest tier holds, or more would push out
    their own beginning. None where a shared tier does not say how many it holds."""
    sizes = [sum(tier.slots.values()) for tier in stats.tiers.values()]
    return max(sizes) if all(sizes) else None


def _front(flags: Sequence[bool]) -> int:
    """How many come before the first that is not so."""
    return next((index for index, flag in enumerate(flags) if not flag), len(flags))
