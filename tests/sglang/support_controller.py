"""SGLang's real HiCacheController and host pool, without a server: pages are written and read as its scheduler does."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import cache
from queue import Empty
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

PAGE_TOKENS, LAYERS = 16, 3
ANSWER_SECONDS = 120.0


@cache
def publish() -> None:
    """What a server tells its parts once."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    ranks = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "attn_dcp_rank")
    get_parallel().override_permanently(**dict.fromkeys(ranks, 0))


def extra_config(**keys: Any) -> dict[str, Any]:
    """SGLang's configuration of the backend with keys of kvtier."""
    named = {"backend_name": "kvtier", "module_path": "kvtier.engines.sglang", "class_name": "KVTierHiCache"}
    return {**named, "interface_v1": 1, "namespace": "random weights", **keys}


def pools(layout: str, pages: int, mla: bool = False, head_num: int = 2) -> tuple[Any, Any]:
    """A device pool and a host pool of so many pages, each of 12 KiB for each head, or of 9 KiB with MLA."""
    publish()
    tokens = pages * PAGE_TOKENS
    shared = {"size": tokens, "page_size": PAGE_TOKENS, "dtype": torch.bfloat16, "layer_num": LAYERS, "device": "cpu"}
    if mla:
        device = MLATokenToKVPool(**shared, kv_lora_rank=64, qk_rope_head_dim=32, enable_memory_saver=False)
    else:
        device = MHATokenToKVPool(**shared, head_num=head_num, head_dim=64, enable_memory_saver=False)
    info = device.get_device_pool_infos()[0].buffer_info
    where = {"pin_memory": False, "device": "cpu", "device_capacity_tokens": tokens}
    where |= {"start_layer": 0, "end_layer": LAYERS}
    if mla:
        return device, MLATokenToKVPoolHost(info, 1.0, 0, PAGE_TOKENS, layout, target_layer_num=LAYERS, **where)
    return device, MHATokenToKVPoolHost(info, 1.0, 0, PAGE_TOKENS, layout, **where)


class Controller:
    """The controller, the pages of its host pool as bytes, and its answers."""

    def __init__(
        self, layout: str, pages: int, extra: dict[str, Any] | None, mla: bool = False, head_num: int = 2
    ) -> None:
        """`extra` is the configuration of a dynamic backend; None: SGLang's own files."""
        device, self.host = pools(layout, pages, mla, head_num)
        allocator = PagedTokenToKVPoolAllocator(
            device.size, page_size=PAGE_TOKENS, dtype=torch.bfloat16, device="cpu", kvcache=device, need_sort=False
        )
        backend = "file" if extra is None else "dynamic"
        self.controller = HiCacheController(
            allocator, self.host, PAGE_TOKENS, None, threading.Event(),
            write_policy="write_through", io_backend="direct", storage_backend=backend, prefetch_threshold=PAGE_TOKENS,
            model_name="dummy", storage_backend_extra_config=extra or {}, enable_storage_metrics=True,
        )  # fmt: skip

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def hashes(self, tokens: Sequence[int]) -> list[str]:
        return get_storage_hash_str(list(tokens), None, page_size=PAGE_TOKENS)

    def page(self, index: int) -> torch.Tensor:
        """The bytes of the page that begins at a host index, through SGLang's own accessor."""
        return self.host.get_data_page(int(index)).view(torch.int16)

    def write(self, index: int, content: torch.Tensor) -> None:
        """Put bytes into a page, through SGLang's own accessor."""
        self.host.set_from_flat_data_page(int(index), content.view(self.host.dtype))

    def content(self, name: str) -> torch.Tensor:
        """The bytes that belong to a page's hash."""
        seed = int(name[:12], 16)
        size = self.host.get_dummy_flat_data_page().numel()
        return torch.randint(-30_000, 30_000, (size,), dtype=torch.int16, generator=torch.Generator().manual_seed(seed))

    def back_up(self, tokens: Sequence[int]) -> int:
        """Compute the pages of a prompt, back them up and free them; how many tokens were stored."""
        names = self.hashes(tokens)
        indices = self.host.alloc(len(tokens))
        for number, name in enumerate(names):
            self.write(indices[number * PAGE_TOKENS], self.content(name))
        self.controller.write_storage(indices, list(tokens), hash_value=names)
        done: int = self.controller.ack_backup_queue.get(timeout=ANSWER_SECONDS).completed_tokens
        self.host.free(indices)
        return done

    def prefetch(self, tokens: Sequence[int], limit_seconds: float | None = None) -> tuple[int, int, int]:
        """(tokens found, tokens loaded, wrong pages) of a prompt. With a limit it is given up then, as SGLang does."""
        began = time.monotonic()
        operation = self.controller.prefetch("request", list(tokens))
        hit = self.controller.prefetch_hit_queue.get(timeout=ANSWER_SECONDS)
        assert hit is operation
        found = hit.storage_hit_count
        if not found:
            return 0, 0, 0
        indices = self.host.alloc(found)
        hit.host_indices = indices
        self.controller.prefetch_buffer.put(hit)
        loaded, acknowledged = 0, False
        while not acknowledged:
            if limit_seconds is not None and time.monotonic() > began + limit_seconds:
                self.controller.terminate_prefetch(operation)
            try:
                ack = self.controller.ack_prefetch_queue.get(timeout=0.05)
            except Empty:
                assert time.monotonic() < began + ANSWER_SECONDS, "the prefetch did not end"
                continue
            loaded = loaded if ack.completed_tokens is None else ack.completed_tokens
            acknowledged = bool(ack.completed_req)
        names = self.hashes(tokens)[: loaded // PAGE_TOKENS]
        wrong = sum(
            not torch.equal(self.page(indices[number * PAGE_TOKENS]), self.content(name))
            for number, name in enumerate(names)
        )
        self.host.free(indices)
        return found, loaded, wrong

    def close(self) -> None:
        self.controller.detach_storage_backend()
