"""SGLang's contract of a storage backend: pools with rules of their own, keys of its configuration, ranks, figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.runtime_context import get_exec, get_lora, get_mm, get_model, get_spec
from sglang.srt.server_args import ServerArgs
from support_controller import extra_config, publish

from kvtier.engines import engine_release
from kvtier.engines.sglang import KVTierHiCache
from kvtier.engines.sglang.compat import RELEASE
from kvtier.engines.sglang.identity import ALSO, AREAS
from kvtier.engines.sglang.pools import HostPool
from kvtier.errors import ConfigError, UsageError

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]  # what SGLang warns of is not ours

PAGE, STATE = 48, 500
PAGES = 64


class Pool:
    """A host pool with one tensor: a row for each page of `page_size` tokens."""

    def __init__(self, page_bytes: int, page_size: int = 4) -> None:
        self.layout, self.page_size, self.size, self.dtype = "page_first", page_size, PAGES * page_size, torch.uint8
        self.rows = torch.zeros((PAGES, page_bytes), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        rows = [self.rows[int(index) // self.page_size] for index in indices[:: self.page_size]]
        return [row.data_ptr() for row in rows], [row.numel() for row in rows]

    def indices(self, pages: list[int]) -> torch.Tensor:
        return torch.cat([torch.arange(self.page_size) + page * self.page_size for page in pages])


def config(extra: dict[str, Any], **changes: Any) -> HiCacheStorageConfig:
    publish()
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    about = {"is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": True, "model_name": "m"}
    return HiCacheStorageConfig(**{**ranks, **about, "extra_config": extra, **changes})


Open = Callable[..., KVTierHiCache]


@pytest.fixture
def opened(tmp_path) -> Iterator[Open]:
    """Opens a backend over a pool of pages, a pool of states and one of a window."""
    backends: list[KVTierHiCache] = []

    def open_backend(
        keys: dict[str, Any] | None = None, sides: tuple[str, ...] = (), states: Any = None, **changes: Any
    ) -> KVTierHiCache:
        place = {"roots": [str(tmp_path / "kv")], "capacity": "64MiB"}
        if keys and keys.get("type") == "shared_fs":
            place = {"root": str(tmp_path / "shared"), "capacity": "64MiB"}
        backend = KVTierHiCache(config(extra_config(**place, **(keys or {})), **changes), {})
        backends.append(backend)
        backend.register_mem_pool_host(Pool(PAGE))
        for name in sides:
            pool = (states or Pool(STATE, 1)) if name == "mamba" else Pool(PAGE)
            backend.register_mem_host_pool_v2(pool, PoolName(name))
        backend.on_host_pools_registered()
        return backend

    yield open_backend
    for backend in backends:
        backend.close()


def names(count: int, first: int = 0) -> list[str]:
    return [f"{number:064x}" for number in range(first, first + count)]


def transfer(backend: KVTierHiCache, pool: str, keys: list[str], pages: list[int]) -> PoolTransfer:
    return PoolTransfer(PoolName(pool), backend.registered_pools[pool].indices(pages), keys=keys)


def write(backend: KVTierHiCache, pool: str, keys: list[str]) -> None:
    """Store pages, each filled with its own number."""
    for page, key in enumerate(keys):
        backend.registered_pools[pool].rows[page] = int(key, 16) % 251 + 1
    stored = backend.batch_set_v2([transfer(backend, pool, keys, list(range(len(keys))))])
    assert stored == {pool: [True] * len(keys)}
    backend.registered_pools[pool].rows[:] = 0


def asked(pool: str, policy: PoolHitPolicy, count: int = 1) -> PoolTransfer:
    return PoolTransfer(PoolName(pool), keys=names(count), hit_policy=policy)


def test_the_first_version_counts_loads_and_stores_consecutive_pages(opened):
    backend = opened()
    keys = names(6)
    write(backend, "kv", keys[:4])
    assert backend.batch_exists(keys) == 4
    assert backend.exists(keys[3])
    assert not backend.exists(keys[4])
    pool = backend.registered_pools["kv"]
    assert backend.batch_get_v1(keys, pool.indices([10, 11, 12, 13, 14, 15])) == [True] * 4 + [False] * 2
    assert pool.rows[10:14].eq(torch.arange(1, 5, dtype=torch.uint8).view(4, 1)).all()
    assert not pool.rows[14:].any()
    assert backend.batch_set_v1(keys[:4], pool.indices([10, 11, 12, 13])) == [True] * 4, "pages that are there count"


def test_what_does_not_fit_its_pool_is_a_miss(opened):
    backend = opened()
    pool = backend.registered_pools["kv"]
    assert backend.batch_set_v1(names(2), pool.indices([0])) == [False, False]
    assert backend.batch_get_v2([PoolTransfer(PoolName.SWA, torch.arange(4), keys=names(1))]) == {"swa": [False]}
    assert backend.batch_get_v2([]) == {}


def test_a_state_is_needed_at_the_end_of_a_prefix(opened):
    backend = opened(sides=("mamba",))
    keys = names(8)
    write(backend, "kv", keys[:7])
    write(backend, "mamba", [keys[2], keys[5]])
    found = backend.batch_exists_v2(keys, [asked("mamba", PoolHitPolicy.TRAILING_PAGES)])
    assert found.kv_hit_pages == 6
    assert found.restorable_prefix_pages == [3, 6]
    assert found.extra_pool_hit_pages == {"kv": 7, "mamba": 6}
    loads = [transfer(backend, "kv", keys[:6], list(range(20, 26))), transfer(backend, "mamba", [keys[5]], [30])]
    assert backend.batch_get_v2(loads) == {"kv": [True] * 6, "mamba": [True]}
    assert backend.registered_pools["mamba"].rows[30].eq(6).all()
    assert backend.registered_pools["kv"].rows[25].eq(6).all()


def test_a_window_is_needed_before_the_end_of_a_prefix(opened):
    backend = opened(sides=("swa",))
    keys = names(8)
    write(backend, "kv", keys)
    write(backend, "swa", [keys[at] for at in (0, 1, 2, 4, 5, 6)])
    found = backend.batch_exists_v2(keys, [asked("swa", PoolHitPolicy.TRAILING_PAGES, 2)])
    assert found.restorable_prefix_pages == [1, 2, 3, 6, 7]
    assert found.kv_hit_pages == 7


def test_every_page_of_a_pool_may_be_needed(opened):
    backend = opened(sides=("indexer", "mamba"))
    keys = names(6)
    write(backend, "kv", keys)
    write(backend, "indexer", keys[:4])
    write(backend, "mamba", [keys[1], keys[4]])
    sides = [asked("indexer", PoolHitPolicy.ALL_PAGES), asked("mamba", PoolHitPolicy.TRAILING_PAGES)]
    found = backend.batch_exists_v2(keys, sides)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [2])
    assert found.extra_pool_hit_pages == {"kv": 6, "indexer": 4, "mamba": 5}
    missing = backend.batch_exists_v2(keys, [asked("swa", PoolHitPolicy.ALL_PAGES)])
    assert (missing.kv_hit_pages, missing.restorable_prefix_pages) == (0, []), "a pool that is unknown has nothing"
    assert backend.batch_exists_v2(names(3, 100), sides).kv_hit_pages == 0


def test_block_groups_are_refused_by_name(opened):
    with pytest.raises(UsageError, match="the pool swa has the hit policy block_groups; kvtier serves all_pages"):
        opened().batch_exists_v2(names(2), [asked("swa", PoolHitPolicy.BLOCK_GROUPS)])


def test_a_pool_that_comes_later_is_served_too(opened):
    backend = opened()
    write(backend, "kv", names(2))
    backend.register_mem_host_pool_v2(Pool(PAGE), PoolName.DRAFT)
    write(backend, "draft", names(2))
    write(backend, "kv", names(2))
    assert backend.batch_exists_v2(names(2), [asked("draft", PoolHitPolicy.ALL_PAGES)]).kv_hit_pages == 2


def test_clear_holds_also_for_the_next_server(opened):
    backend = opened()
    write(backend, "kv", names(2))
    backend.clear()
    assert backend.batch_exists(names(2)) == 0
    write(backend, "kv", names(2)[1:])
    backend.close()
    backend = opened()
    assert [backend.exists(key) for key in names(2)] == [False, True]


def test_calls_after_closing_are_misses(opened):
    backend = opened()
    write(backend, "kv", names(1))
    backend.close()
    backend.close()
    assert backend.batch_exists(names(1)) == 0
    assert backend.batch_get_v1(names(1), backend.registered_pools["kv"].indices([3])) == [False]


@pytest.mark.parametrize("change", [
    {"keys": {"namespace": "other weights"}}, {"model_name": "n"}, {"attn_cp_size": 2}, {"pp_size": 2, "pp_rank": 0},
    {"logical_page_size": 64}, {"tp_size": 2}, {"sides": ("mamba",)},
])  # fmt: skip
def test_pages_of_another_engine_are_never_shared(change, opened, tmp_path):
    first = opened({"type": "shared_fs"})
    write(first, "kv", names(2))
    keys = {"type": "shared_fs", **change.pop("keys", {})}
    assert opened(keys, **change).batch_exists(names(2)) == 0
    assert opened({"type": "shared_fs"}).batch_exists(names(2)) == 2


def states(second: torch.dtype) -> MambaPoolHost:
    """SGLang's host pool of states, the second of this type."""
    first = torch.zeros((2, 8, 3, 32), dtype=torch.bfloat16)
    info = MambaStateBufferInfo(temporal=torch.zeros((2, 8, 4, 16, 16), dtype=second), conv=(first,))
    return MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first")


def test_states_of_another_type_and_the_same_size_are_never_shared(opened):
    keys = {"type": "shared_fs"}
    write(opened(keys, ("mamba",), states(torch.float16)), "kv", names(2))
    assert opened(keys, ("mamba",), states(torch.bfloat16)).batch_exists(names(2)) == 0
    assert opened(keys, ("mamba",), states(torch.float16)).batch_exists(names(2)) == 2
    usual = {HostPool.of("mamba", states(each)).dtype for each in (torch.bfloat16, torch.float32)}
    assert usual == {"torch.bfloat16"}, "what was stored before stays theirs"


def test_the_contents_of_a_model_folder_tell_weights_apart(opened, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    keys = {"type": "shared_fs", "namespace": "", "model_folder": str(folder)}
    with pytest.raises(ConfigError, match="has no files of weights"):
        opened(keys)
    (folder / "model.safetensors").write_bytes(b"weights")
    write(opened(keys), "kv", names(1))
    assert opened(keys).batch_exists(names(1)) == 1
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert opened(keys).batch_exists(names(1)) == 0


def test_an_adapter_trained_again_shares_no_pages_with_the_one_before(opened, tmp_path):
    """SGLang's keys have its name and path."""
    folder, keys = tmp_path / "adapter", {"type": "shared_fs"}
    folder.mkdir()
    adapter = LoRARef(LoRARef.deterministic_id("a", str(folder)), "a", str(folder))
    publish()
    with get_lora().override(lora_paths=[adapter]):
        for content, before in ((b"trained", 0), (b"trained", 1), (b"Trained", 0)):
            (folder / "adapter_model.safetensors").write_bytes(content)
            assert opened(keys).batch_exists(names(1)) == before
            write(opened(keys), "kv", names(1))
    with get_lora().override(lora_paths=[LoRARef("id", "b", "of/the-hub")]):
        write(opened(keys), "kv", names(1))
    assert opened(keys).batch_exists(names(1)) == 1, "what was stored before stays theirs"


@pytest.mark.parametrize(
    ("area", "given"),
    [
        (get_model, {"json_model_override_args": '{"rope_theta": 1000}'}),
        (get_model, {"quantization": "fp8"}),
        (get_model, {"context_length": 1 << 17}),
        (lambda: get_exec().kernel, {"attention_backend": "triton"}),
        (lambda: get_exec().moe, {"enable_w4a4_mxfp4_megamoe": True}),
        (lambda: get_exec().features, {"enable_tf32_matmul": True}),
        (get_mm, {"mm_process_config": {"image": {"max_pixels": 4096}}}),
        (get_spec, {"speculative_draft_model_path": "of/the-hub"}),
    ],
)
def test_a_server_of_other_arguments_shares_no_pages(area, given, opened):
    """With `model_folder` alone nothing else names them."""
    keys = {"type": "shared_fs"}
    write(opened(keys), "kv", names(1))
    with area().override(**given):
        assert opened(keys).batch_exists(names(1)) == 0
    assert opened(keys).batch_exists(names(1)) == 1


def test_arguments_and_variables_that_change_no_page_are_in_no_namespace(opened, monkeypatch):
    keys = {"type": "shared_fs"}
    write(opened(keys), "kv", names(1))
    monkeypatch.setenv("SGLANG_LOG_GC", "1")
    monkeypatch.setenv("SGLANG_PORT", "4000")
    with (
        get_model().override(download_dir="/models", model_path="/models/b", weight_loader_prefetch_num_threads=3),
        get_exec().moe.override(ep_num_redundant_experts=2, enable_eplb=True, moe_a2a_backend="deepep"),
        get_exec().kernel.override(sampling_backend="pytorch"),
    ):
        assert opened(keys).batch_exists(names(1)) == 1
    monkeypatch.setenv("SGLANG_INT4_WEIGHT", "1")
    assert opened(keys).batch_exists(names(1)) == 0


def test_a_draft_is_told_apart_by_its_files_not_by_its_place(opened, tmp_path):
    keys, found = {"type": "shared_fs"}, []
    publish()
    for place, content in (("a", b"draft"), ("b", b"draft"), ("c", b"Draft")):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        with get_spec().override(speculative_draft_model_path=str(folder)):
            backend = opened(keys)
            found.append(backend.batch_exists(names(1)))
            write(backend, "kv", names(1))
    assert found == [0, 1, 0]


def test_the_arguments_that_count_are_those_of_this_sglang():
    areas = namespace_of(ServerArgs)
    assert {areas[name] for name in ALSO} & set(AREAS) == set(), "those of these areas count without being named"
    assert set(AREAS) <= set(areas.values())


def test_ranks_with_pages_of_their_own_have_folders_of_their_own(opened, tmp_path):
    for rank in range(2):
        write(opened(tp_size=2, tp_rank=rank), "kv", names(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv-0", "kv-1"]


def test_ranks_of_mla_share_pages_but_not_states(opened):
    keys = {"type": "shared_fs"}
    ranks = [opened(keys, ("mamba",), tp_size=2, tp_rank=rank, is_mla_model=True) for rank in range(2)]
    write(ranks[0], "kv", names(3))
    write(ranks[0], "mamba", names(1))
    assert ranks[1].batch_exists(names(3)) == 3
    state = asked("mamba", PoolHitPolicy.TRAILING_PAGES)
    assert ranks[0].batch_exists_v2(names(3), [state]).kv_hit_pages == 1
    assert ranks[1].batch_exists_v2(names(3), [state]).kv_hit_pages == 0


def test_mla_with_several_ranks_needs_a_tier_that_they_share(opened):
    with pytest.raises(ConfigError, match="type: is fs, which belongs to one process; with MLA one of 2 ranks stores"):
        opened(tp_size=2, is_mla_model=True)


def test_figures_are_those_since_the_last_reading(opened):
    backend = opened()
    write(backend, "kv", names(3))
    backend.batch_get_v1(names(4), backend.registered_pools["kv"].indices([4, 5, 6, 7]))
    found = backend.get_stats()
    assert (found.backup_pgs, found.prefetch_pgs) == ([3], [3])
    assert min(*found.backup_bandwidth, *found.prefetch_bandwidth) > 0
    assert backend.get_stats().prefetch_pgs == []
    assert backend.stats().tiers["fs"].loaded == 3
    assert opened({"type": "shared_fs"}, enable_storage_metrics=False).get_stats() is None


WRONG = {
    "namespace": ({"namespace": ""}, "namespace: is required, because SGLang shows a storage backend no weights"),
    "unknown": ({"capacty": 1}, "extra_config.capacty: unknown key; did you mean 'capacity'?"),
    "interface": ({"interface_v1": 0}, "interface_v1: must be 1"),
    "type": ({"type": 3}, "type: is the name of a type of tier"),
    "no such type": ({"type": "fss"}, "fss"),
    "no lower tier": ({"type": "cpu"}, "cpu is no tier below the CPU"),
    "too long": ({"load_timeout_seconds": 9}, "load_timeout_seconds"),
    "on_evict": ({"write_policy": "on_evict"}, "write_policy: the engine hands blocks down"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_by_name(case, opened):
    keys, said = WRONG[case]
    with pytest.raises(ConfigError) as raised:
        opened(keys)
    assert said in str(raised.value)


def test_keys_of_sglang_pass(opened):
    opened({"prefetch_threshold": 16, "prefetch_timeout_base": 1, "storage_backend_tag": "a", "tp_lcm_size": 4})


def test_split_heads_and_the_older_interface_are_refused_by_name(opened):
    with pytest.raises(ConfigError, match="tp_lcm_size: pages of split heads are not served"):
        opened(should_split_heads=True)
    backend = opened()
    calls = [lambda: backend.get("k"), lambda: backend.set("k"), lambda: backend.batch_get(["k"])]
    for call in [*calls, lambda: backend.batch_set(["k"])]:
        with pytest.raises(UsageError, match="write interface_v1: 1"):
            call()


def test_an_untested_release_is_refused_unless_allowed(opened, monkeypatch):
    monkeypatch.setattr(engine_release.importlib.metadata, "version", lambda name: "0.6.0")
    with pytest.raises(ConfigError, match=r"allow_untested_engine: SGLang 0\.6\.0 is installed"):
        opened()
    KVTierHiCache(config(extra_config(roots=["/nowhere"], capacity="64MiB", allow_untested_engine=True)))


def test_another_interface_is_refused_by_name(monkeypatch):
    module = SimpleNamespace(HiCacheStorage=object, HiCacheStorageConfig=object, PoolHitPolicy=PoolHitPolicy)
    monkeypatch.setattr(engine_release.importlib, "import_module", lambda name: module)
    with pytest.raises(ConfigError, match=r"it lacks .*HiCacheStorage\.batch_exists_v2, .*PoolTransferResult"):
        RELEASE.require_supported()


def test_a_config_is_used_as_a_value():
    given = config(extra_config(roots=["/nowhere"], capacity="64MiB"))
    before = replace(given, extra_config=dict(given.extra_config))
    KVTierHiCache(given)
    assert given == before
