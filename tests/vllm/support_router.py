"""A router that counts what is published, as those of Dynamo and llm-d do, and an engine that publishes to it through
vLLM's own tracker of events."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from fake_engine import AS_0_33, FakeEngine, Request
from support_served_stacks import ServedStacks
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import LookupResult, OffloadingKVEventsConfig, get_offload_group_idx

TOKENS = 16


class Router:
    """Counts each hash in each medium: stored adds one, removed takes one away, and only what counts none is gone.

    `plain` has what a router knows that does not count, as Dynamo's indexer. `described` are the hashes it has tokens
    of. `owners` says which ownership and locality a medium's events had.
    """

    def __init__(self) -> None:
        self.counts: defaultdict[str, Counter[Any]] = defaultdict(Counter)
        self.plain: defaultdict[str, set[Any]] = defaultdict(set)
        self.described: defaultdict[str, dict[Any, tuple[int, ...]]] = defaultdict(dict)
        self.owners: defaultdict[str, set[tuple[str | None, str | None]]] = defaultdict(set)
        self.heard = 0

    def hear(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            self.heard += 1
            match event:
                case BlockStored(block_hashes=hashes, token_ids=tokens, medium=str(medium)):
                    self.counts[medium].update(hashes)
                    self.plain[medium].update(hashes)
                    self.owners[medium].add((event.ownership, event.locality))
                    for index, name in enumerate(hashes):
                        if tokens:
                            self.described[medium][name] = tuple(tokens[index * TOKENS : (index + 1) * TOKENS])
                case BlockRemoved(block_hashes=hashes, medium=str(medium)):
                    self.owners[medium].add((event.ownership, event.locality))
                    self.plain[medium].difference_update(hashes)
                    for name in hashes:
                        if self.counts[medium][name] < 2:
                            self.counts[medium].pop(name, None)
                            self.described[medium].pop(name, None)
                        else:
                            self.counts[medium][name] -= 1
                case AllBlocksCleared():
                    self.counts.clear()
                    self.plain.clear()
                    self.described.clear()
                case _:
                    raise AssertionError(event)


class PublishingEngine(FakeEngine):
    """The fake engine with vLLM's tracker between its manager and a router: each step ends with what it publishes."""

    def __init__(self, *args: Any, router: Router, **more: Any) -> None:
        super().__init__(*args, **more)
        self.router = router
        self.tracker = tracker()
        self.described: dict[str, Any] = {}
        manager = self.manager
        self.real = manager
        self.manager = SimpleNamespace(
            **{name: getattr(manager, name) for name in dir(manager) if not name.startswith("__")}
        )
        self.manager.lookup = self._lookup
        self.manager.prepare_store = self._prepare_store

    def add(self, words: Sequence[int]) -> Request:
        request = super().add(words)
        self.described[request.context.req_id] = tracked_request(request.keys[0], words, self.factor)
        return request

    def step(self) -> None:
        super().step()
        self.publish()

    def settle(self, stacks: ServedStacks) -> None:
        """Step until all is published that the stack has to say of its blocks. A stack process says it later."""
        self.step()
        pool, core, until = stacks.stack_of(self), self.real._driver._core, time.monotonic() + 60.0
        rounds = 0
        while rounds < 2:
            assert time.monotonic() < until
            heard = self.router.heard
            core.ask_stats()  # what it answers comes behind what it had to say
            stacks.eventually(self, lambda: not core.stats_pending)
            quiet = stacks.call(
                self, lambda: pool.plane.idle and not any(each.events for each in pool.sessions.values())
            )
            self.step()
            waits = not quiet or self.real._driver.has_pending_work or self.real._events.waiting
            rounds = 0 if waits or self.router.heard > heard else rounds + 1

    def publish(self) -> None:
        self.router.hear(self.tracker.take_events(list(self.real.take_events())))

    def reset_gpu(self) -> None:
        """vLLM resets the cache of the GPU alone: it clears all that routers know, and the manager hears nothing."""
        self.router.hear([AllBlocksCleared()])

    def reset(self) -> None:
        super().reset()
        self.tracker.reset()
        self.reset_gpu()

    def _lookup(self, key: bytes, context: Any) -> LookupResult:
        answer = self.real.lookup(key, context)
        if recorded(answer):
            self.tracker.record_lookup(*self._named(key, context))
        return answer

    def _prepare_store(self, keys: Collection[bytes], context: Any) -> Any:
        answer = self.real.prepare_store(keys, context)
        for key in answer.keys_to_store if answer is not None else ():
            self.tracker.record_store(*self._named(key, context))
        return answer

    def _named(self, key: bytes, context: Any) -> tuple[Any, Any, int, bytes]:
        window = None if get_offload_group_idx(key) == self.config.groups[0].group_id else self.window
        return as_tracked(self.described[context.req_id], key, context, self.factor, window)


def tracker() -> OffloadingEventsTracker:
    """vLLM's own, with events that carry tokens."""
    return OffloadingEventsTracker(OffloadingKVEventsConfig(True, True))


def recorded(answer: LookupResult) -> bool:
    """True if vLLM keeps the tokens of a block with this answer."""
    return answer is LookupResult.HIT or (AS_0_33 and answer is LookupResult.HIT_PENDING)


def as_tracked(request: Any, key: bytes, context: Any, factor: int, window: int | None = None) -> tuple[Any, ...]:
    """A key of a request as vLLM's tracker records it."""
    config = SimpleNamespace(
        sliding_window_size_in_chunks=window,
        hashes_per_chunk=factor,
        tokens_per_chunk=TOKENS * factor,
        tokens_per_block=TOKENS,
        group_idx=get_offload_group_idx(key),
        kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
    )
    return request, config, context.get_offload_key_position(key) // (TOKENS * factor) - 1, key


def tracked_request(keys: Sequence[bytes], words: Sequence[int], factor: int) -> Any:
    """A request of vLLM as its tracker reads it, of a prompt with these chunks; a word stands for one's tokens."""
    hashes = [name for key in keys for name in chunk_hashes(key, factor)]
    tokens = [1000 * word + i for word in words for i in range(TOKENS * factor)]
    return SimpleNamespace(block_hashes=hashes, all_token_ids=tokens, lora_request=None)


def chunk_hashes(key: bytes, factor: int) -> list[BlockHash]:
    """vLLM's hashes of one chunk: the last one is in the key."""
    name = key[:-4]
    inner = [hashlib.sha256(name + bytes([sub])).digest() for sub in range(factor - 1)]
    return [BlockHash(one) for one in (*inner, name)]


def on_wire(key: bytes, factor: int) -> list[Any]:
    """The same hashes as events name them."""
    return [maybe_convert_block_hash(name) for name in chunk_hashes(key, factor)]
