"""The memory of LMCache's L1 with objects in it, and an adapter below it, used as LMCache's controllers use one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import create_l1_memory_desc, make_aligned_tensor, wait_eventfd
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj

from kvtier.engines.lmcache import KVTierL2Adapter

LONG = 60.0
MODEL = "test-model"


def object_key(number: int, **fields: Any) -> ObjectKey:
    """The key of an object with a number."""
    found = {"chunk_hash": number.to_bytes(16, "big"), "model_name": MODEL, "kv_rank": 0, **fields}
    return ObjectKey(**found)


def params(folder: Any, **keys: Any) -> dict[str, Any]:
    """`adapter_params` of a tier in a folder."""
    return {"roots": [str(folder)], "capacity": "64MiB", "namespace": "test", "piece_bytes": "256KiB", **keys}


class Memory:
    """Host memory as LMCache's L1 describes it."""

    def __init__(self, size: int) -> None:
        self.tensor = make_aligned_tensor(size, 4096)
        self.description = create_l1_memory_desc(self.tensor, 4096)

    def object(self, offset: int, size: int, fill: int | None = None) -> MemoryObj:
        """An object of bytes at a place; filled with a pattern that `fill` decides."""
        raw = self.tensor[offset : offset + size]
        if fill is not None:
            raw.copy_(pattern(fill, size))
        about = MemoryObjMetadata(
            shape=torch.Size([size]), dtype=torch.uint8, address=offset, phy_size=size,
            fmt=MemoryFormat.KV_2LTD, ref_count=1,
        )  # fmt: skip
        return TensorMemoryObj(raw_data=raw, metadata=about, parent_allocator=None)

    def holds(self, offset: int, size: int, fill: int) -> bool:
        return torch.equal(self.tensor[offset : offset + size], pattern(fill, size))


def pattern(fill: int, size: int) -> torch.Tensor:
    """Bytes that differ from those of another number, and along the object."""
    generator = torch.Generator().manual_seed(fill)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


class Listener:
    """What LMCache's listeners are sent."""

    def __init__(self) -> None:
        self.stored: list[tuple[ObjectKey, int]] = []
        self.accessed: list[ObjectKey] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.deleted += keys


class Controllers:
    """What LMCache's store and prefetch controllers do with an adapter: a task, its event, its result once."""

    def __init__(self, adapter: KVTierL2Adapter) -> None:
        self.adapter = adapter
        self.listener = Listener()
        adapter.register_listener(self.listener)
        self._ended: dict[int, Any] = {}

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a report, which may come from the tier's thread a moment after the call that caused it."""
        deadline = time.monotonic() + LONG
        while not condition():
            assert time.monotonic() < deadline, "nothing was reported"
            time.sleep(0.01)

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> bool:
        task = self.adapter.submit_store_task(list(keys), list(objects))
        while task not in self._ended:
            assert wait_eventfd(self.adapter.get_store_event_fd(), LONG), "no store ended"
            self._ended |= self.adapter.pop_completed_store_tasks()
        return bool(self._ended.pop(task).is_successful())

    def look_up(self, keys: Sequence[ObjectKey]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(list(keys), {})
        return self._bits(len(keys), task, self.adapter.get_lookup_and_lock_event_fd(), "query_lookup_and_lock_result")

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[bool]:
        task = self.adapter.submit_load_task(list(keys), list(objects))
        return self._bits(len(keys), task, self.adapter.get_load_event_fd(), "query_load_result")

    def _bits(self, count: int, task: int, event: int, query: str) -> list[bool]:
        result = getattr(self.adapter, query)
        while (found := result(task)) is None:
            assert wait_eventfd(event, LONG), "no task ended"
        assert result(task) is None, "a result is given once"
        return [found.test(at) for at in range(count)]


@contextmanager
def controllers(memory: Memory, keys: dict[str, Any]) -> Iterator[Controllers]:
    """An open adapter; it is closed at the end."""
    adapter = KVTierL2Adapter(keys, memory.description)
    try:
        yield Controllers(adapter)
    finally:
        adapter.close()
