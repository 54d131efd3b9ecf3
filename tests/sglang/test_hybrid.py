"""SGLang's real hybrid caches over kvtier: full attention with a sliding window, and with Mamba states.

Its tree, its hybrid controller and its host pools are real; their copies from and to the GPU are left out, so what a
producer has in its host pools is written there by the test, and what a consumer got is read there.
"""

from __future__ import annotations

import importlib
import json
import sys
import unittest
import warnings
from array import array
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import torch
from support_controller import extra_config

from kvtier.engines.engine_memory.memory import PagedMemory
from kvtier.engines.sglang.pools import HostPool

with warnings.catch_warnings():  # our tests treat warnings as errors; what SGLang's imports warn of is not ours
    warnings.simplefilter("ignore")
    sys.modules["datasets"] = ModuleType("datasets")  # imported there, and not used by what is taken from it
    sys.modules["datasets"].load_dataset = None
    fixtures = importlib.import_module("sglang.test.kits.unified_radix_cache.fixtures")
    configs = importlib.import_module("sglang.test.kits.unified_radix_cache.config")
    storage = importlib.import_module("sglang.test.kits.unified_radix_cache.storage")
    del sys.modules["datasets"]

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]

Kit: Any = storage.UnifiedRadixCacheStorageFixtures
Component = configs.ComponentType
POOLS = {Component.FULL: "kv", Component.SWA: "swa", Component.MAMBA: "mamba"}
CASES = [each for each in configs.CONFIGS if configs.supports_hicache(each) and 4 <= each.page_size <= 64]


class World(Kit, unittest.TestCase):
    """One of SGLang's configurations of a cache, and a disk below it."""

    __test__ = False

    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__("run")
        self.cfg = config
        self.folder = folder

    def run(self) -> None:
        """Nothing: a test calls the parts."""

    def cache(self) -> tuple[Any, Any, Any]:
        """A cache with its pools, over the disk."""
        cache, allocator, requests = fixtures.build_fixture(self.cfg)
        parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
        self.enterContext(parallel.override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1))
        server_args = importlib.import_module("sglang.srt.server_args")
        keys = extra_config(roots=[str(self.folder / "kv")], capacity="256MiB", prefetch_threshold=1)
        args = server_args.ServerArgs(
            model_path="dummy", page_size=self.cfg.page_size, hicache_mem_layout="page_first_direct",
            hicache_io_backend="direct", hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(keys), hicache_storage_prefetch_policy="wait_complete",
        )  # fmt: skip
        args._mamba_cache_chunk_size = max(fixtures.FLA_CHUNK_SIZE, self.cfg.page_size)
        server_args.set_global_server_args_for_scheduler(args)
        cache.init_hicache(args, cache.cache_init_params)
        fixtures.drop_hicache_atexit_pin(cache)
        cache.cache_controller.prefetch_capacity_limit = cache.cache_controller.mem_pool_host.size
        return cache, allocator, requests

    def pages(self, cache: Any, node: Any, component: Any) -> list[bytes]:
        """What a node has in a host pool, page by page."""
        indices = fixtures.node_host_value(cache, node, component)
        if indices is None:
            return []
        pool = cache.cache_controller.mem_pool_host.entry_map[POOLS[component]].host_pool
        described = HostPool.of(POOLS[component], pool)
        memory = PagedMemory([[pieces.array() for pieces in described.pieces]])
        places = described.places(indices, len(indices) // described.page_size)
        return [b"".join(piece.tobytes() for piece in memory.pieces(0, place)) for place in places or []]

    def of_path(self, cache: Any, node: Any) -> dict[str, list[bytes]]:
        """The pages of all nodes from the root to this one, by pool."""
        path = self._path_chain(cache, node)
        parts = [component for component in self.cfg.components if component in POOLS]
        return {POOLS[part]: [page for each in path for page in self.pages(cache, each, part)] for part in parts}


@pytest.mark.parametrize("config", CASES, ids=lambda config: config.label)
def test_what_a_hybrid_cache_has_on_the_host_comes_back_from_the_disk(config):
    with TemporaryDirectory(prefix="kvtier-sglang-") as folder:
        world = World(config, Path(folder))
        producer, allocator, requests = world.cache()
        window = -(-(config.sliding_window_size or 1) // config.page_size)
        tokens = world._make_seq(1, window + 2)
        world._insert(producer, allocator, requests, tokens)
        leaf = fixtures.match_prefix(producer, tokens).last_device_node
        for entry in producer.cache_controller.mem_pool_host.entries:
            for number, piece in enumerate(HostPool.of(entry.name, entry.host_pool).pieces):
                filled = torch.from_numpy(piece.array())
                filled.copy_(torch.randint(0, 256, filled.shape, dtype=torch.uint8) + number)
        world._simulate_backup(producer, leaf)
        stored = world.of_path(producer, leaf)
        world._write_path_to_l3(producer, leaf)
        world._flush_l3_backups(producer)
        producer.cache_controller.detach_storage_backend()

        consumer, _, _ = world.cache()
        request = storage.CacheRequestHandle("request", 0)
        consumer.prefetch_from_storage(request, consumer.root_node_handle(), array("q", tokens), None, None)
        world._run_prefetch_to_completion(consumer, request)
        found = world.of_path(consumer, fixtures.match_prefix(consumer, tokens).last_host_node)
        consumer.cache_controller.detach_storage_backend()
        assert found["kv"] == stored["kv"]
        assert len(found["kv"]) == window + 2
        for side in set(found) - {"kv"}:
            assert found[side], f"nothing of the pool {side} was loaded"
            assert found[side] == stored[side][-len(found[side]) :]
