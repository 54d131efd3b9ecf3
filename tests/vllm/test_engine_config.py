"""What the adapter takes from vLLM's own configuration: how many engines share a stack file, and whether blocks are of
any use. With vLLM's real classes, without an engine."""

from __future__ import annotations

import gc
import uuid
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, offloading_config, stack
from support_protections_engine import without_the_question_for_continuation
from vllm.config import CacheConfig, KVTransferConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvtier.engines.vllm.engine_config import (
    ENDS_ALONE,
    NUMBERED_ITEMS,
    WHOLE_PROMPTS,
    continues_after_prefix,
    engine_config,
    start_lines,
)
from kvtier.engines.vllm.settings import engine_plan

pytestmark = pytest.mark.engine
CAPACITY = 8 << 20


@pytest.fixture(scope="module")
def tiering() -> Any:
    """vLLM behind its own spec."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import support_vllm_tiering
    return support_vllm_tiering


def text_model(*, mla: bool = False, able: bool = True) -> SimpleNamespace:
    """A model's configuration as far as the adapter reads it: vLLM makes one of a model's folder alone."""
    return SimpleNamespace(
        max_model_len=4096,
        use_mla=mla,
        is_prefix_caching_supported=able,
        multimodal_config=None,
        quantization_config=None,
        code_revision=None,
    )


def launch(size: int, index: int) -> VllmConfig:
    """vLLM's configuration in the process of rank `index` of a dense model."""
    parallel = ParallelConfig(data_parallel_size=size)
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", engine_id=f"{uuid.uuid4().hex}_dp{index}"
    )
    config = VllmConfig(parallel_config=parallel, kv_transfer_config=transfer)
    config.model_config = text_model()  # type: ignore[assignment]
    parallel.data_parallel_index = index
    parallel.reconfigure_for_independent_dp_rank()
    return config


def named(config: VllmConfig) -> dict[str, Any]:
    """What vLLM's connector takes from it."""
    assert config.kv_transfer_config is not None
    parallel = config.parallel_config
    return {
        "engine_id": config.kv_transfer_config.engine_id,
        "parallel": {
            "data_parallel_index": parallel.data_parallel_index,
            "data_parallel_size": parallel.data_parallel_size,
        },
    }


def dense(root: Path, size: int, index: int) -> FakeEngine:
    """Rank `index` of a dense model, on a stack of CAPACITY bytes of disk."""
    config = launch(size, index)
    tiers = stack(root, 64, capacity=CAPACITY)
    engine = FakeEngine(offloading_config(tiers, **named(config)), seed=1, num_blocks=256)
    engine.launched = config  # type: ignore[attr-defined]
    return engine


def fill(engine: FakeEngine) -> None:
    """Store more than CAPACITY."""
    for number in range(3 * CAPACITY // (16 * 4096)):
        engine.add([number] * 16)
        engine.run()


def stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


# -- engines of one launch ---------------------------------------------------------------------------------------------


def test_the_ranks_of_a_dense_model_have_one_stack_in_a_process_of_its_own(root):
    plans = []
    for index in range(3):
        given = offloading_config(stack(root, 60), **named(launch(3, index)))
        plans.append(engine_plan(given))
    assert len({plan.stack.model_dump_json() for plan in plans}) == 1, "they find the same process"
    cpu, fs = plans[0].stack.tiers
    assert (cpu.cpu_bytes_to_use, fs.capacity, fs.roots) == (60 * 4096, 32 << 20, [str(root)])


def test_two_ranks_serve_and_stay_within_one_capacity(stacks, tmp_path):
    root = tmp_path / "root"
    with dense(root, 2, 0) as one, dense(root, 2, 1) as two:
        for engine in (one, two):
            fill(engine)
            assert engine.wrong == 0
    assert CAPACITY // 2 < stored_bytes(tmp_path) <= CAPACITY
    assert {path.name for path in tmp_path.iterdir()} == {"root"}


def test_the_root_of_a_rank_of_an_earlier_release_is_warm(stacks, tmp_path):
    """Each rank had a folder of its own; of this launch only the first one stored something."""
    with dense(tmp_path / "root-0", 1, 0) as engine:
        engine.add([1, 2, 3])
        engine.run()
    for index in range(2):
        with dense(tmp_path / "root", 2, index) as engine:
            found = engine.add([1, 2, 3, 4])
            engine.run()
            assert (found.hit, engine.wrong) == (3 + index, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"root-0"}


def test_a_rank_needs_not_know_its_launch(root):
    plan = engine_plan(offloading_config(stack(root, 60), parallel={"data_parallel_index": 1}))
    assert plan.stack.tiers[1].roots == [str(root)]


def test_a_copy_of_the_configuration_for_a_draft_hides_nothing():
    config = launch(2, 0)
    draft = VllmConfig(parallel_config=ParallelConfig(), kv_transfer_config=config.kv_transfer_config)
    assert config.kv_transfer_config is not None
    assert engine_config(str(config.kv_transfer_config.engine_id)) is config
    assert engine_config("another") is None
    del draft


def test_a_secondary_tier_of_each_rank_has_a_folder_and_a_share(tiering, tmp_path):
    root = tmp_path / "root"
    for index in range(2):
        config = launch(2, index)
        given = tiering.offloading_config(tiering.tier_config(root), **named(config))
        with tiering.Vllm(given) as vllm:
            names = tiering.keys(4)
            vllm.store(names)
            assert vllm.tier.stats().tiers["KVTierFs"].capacity_bytes <= 8 << 20
    assert {path.name for path in tmp_path.iterdir()} == {"root-0", "root-1"}


# -- attention that does not continue after a prefix -------------------------------------------------------------------


def model_config(*, chunks: bool = False, cache: bool = False, mla: bool = False, able: bool = True) -> VllmConfig:
    """An engine's configuration as far as it says what vLLM does with a prefix."""
    config = launch(1, 0)
    config.scheduler_config = SchedulerConfig.default_factory(
        enable_chunked_prefill=chunks, max_num_batched_tokens=8192
    )
    config.cache_config = CacheConfig(enable_prefix_caching=cache)
    config.model_config = text_model(mla=mla, able=able)  # type: ignore[assignment]
    return config


def sees(config: VllmConfig, cache_gb: float) -> VllmConfig:
    """The same for a model of images, whose processor's cache has a size."""
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=cache_gb)
    return config


def test_what_vllm_itself_continues_is_continued_and_what_it_turned_off_is_not(monkeypatch):
    assert continues_after_prefix(None)
    for chunks, cache in ((True, False), (False, True), (True, True)):
        assert continues_after_prefix(model_config(chunks=chunks, cache=cache, mla=True))
    assert continues_after_prefix(model_config()), "an operator turned both off for a Llama"
    assert not continues_after_prefix(model_config(mla=True)), "MLA on a CPU"
    assert not continues_after_prefix(model_config(able=False)), "an encoder and a decoder"
    monkeypatch.setattr(current_platform, "get_cpu_architecture", lambda: CpuArchEnum.RISCV)
    assert not continues_after_prefix(model_config())
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert not continues_after_prefix(model_config()), "a platform that nothing is known of"
    monkeypatch.setattr(current_platform, "is_cuda_alike", lambda: True)
    assert continues_after_prefix(model_config(mla=True)), "a GPU, where an operator turned both off"


def test_layers_without_a_causal_mask_do_not_continue():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, non_causal=True)
    assert not continues_after_prefix(model_config())
    del spec
    gc.collect()
    assert continues_after_prefix(model_config())


def repeat_hits(root: Path, config: VllmConfig) -> tuple[int, int]:
    """Chunks that were stored, and hits of the same prompt afterwards."""
    with FakeEngine(offloading_config(stack(root, 100), **named(config)), seed=1, num_blocks=256) as engine:
        for _ in range(2):
            engine.add([1, 2, 3])
            engine.run()
        return engine.counts["stored chunks"], engine.counts["hit chunks"]


def test_where_it_cannot_continue_nothing_is_stored_or_a_hit_and_one_line_says_so(stacks, root, caplog):
    assert repeat_hits(root, model_config(mla=True)) == (0, 0)
    assert caplog.messages.count(WHOLE_PROMPTS) == 1
    assert repeat_hits(root, model_config()) == (3, 3)
    assert caplog.messages.count(WHOLE_PROMPTS) == 1


def test_where_vllm_numbers_images_in_place_of_hashing_them_there_are_no_hits(stacks, root, caplog):
    """The first image of each process has one key."""
    assert repeat_hits(root, sees(model_config(chunks=True), cache_gb=0)) == (0, 0)
    assert caplog.messages.count(NUMBERED_ITEMS) == 1
    assert repeat_hits(root, sees(model_config(chunks=True), cache_gb=4)) == (3, 3)
    assert repeat_hits(root, sees(model_config(cache=True), cache_gb=0)) == (0, 6), "what was stored is found"
    assert caplog.messages.count(NUMBERED_ITEMS) == 1


def served(longest: int, connector: str = "OffloadingConnector", prefixes: bool = True) -> Any:
    """The parts of vLLM's configuration that the lines at start are about."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=longest),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
        kv_transfer_config=SimpleNamespace(kv_connector=connector),
    )


def test_a_line_at_start_names_what_makes_blocks_shorter_than_the_longest_prompt():
    config = offloading_config({}, factor=4)
    assert not list(start_lines(config, served(65)))
    for longest, prefixes, remedy in (
        (64, True, "set a smaller blocks_per_chunk"),
        (16, True, "set a larger max_model_len"),
        (16, False, "set enable_prefix_caching: true"),
    ):
        (line,) = start_lines(config, served(longest, prefixes=prefixes))
        assert line.startswith("nothing comes back: a block of KV cache group 0 has 64 tokens")
        assert line.endswith(remedy)


def test_a_line_at_start_names_the_connector_that_stores_the_ends_of_shared_prefixes():
    config = offloading_config({}, group_ids=(0, 1))
    assert list(start_lines(config, served(4096))) == [ENDS_ALONE]
    assert not list(start_lines(config, served(4096, "KVTierConnector")))
    assert not list(start_lines(offloading_config({}), served(4096)))


def test_without_the_question_the_attention_is_given_what_it_cannot_continue(stacks, root, monkeypatch):
    without_the_question_for_continuation(monkeypatch)
    assert repeat_hits(root, model_config(mla=True)) == (3, 3)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (lambda: model_config(mla=True), WHOLE_PROMPTS),
        (lambda: sees(model_config(chunks=True), cache_gb=0), NUMBERED_ITEMS),
    ],
)
def test_a_secondary_tier_offers_nothing_either(tiering, tmp_path, caplog, config, line):
    config = config()
    names = tiering.keys(4)
    with tiering.Vllm(tiering.offloading_config(tiering.tier_config(tmp_path / "root"), **named(config))) as vllm:
        vllm.store(names)
        vllm.forget()
        assert vllm.hits(names) == []
        assert vllm.tier.stats().tiers["KVTierFs"].stored == 0
    assert caplog.messages.count(line) == 1
