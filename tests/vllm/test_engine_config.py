"""What the adapter takes from vLLM's own configuration: how many engines share a stack file. With vLLM's real classes,
without an engine."""

from __future__ import annotations

import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, offloading_config, stack
from support_protections_engine import without_shares
from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig

from kvtier.errors import ConfigError
from kvtier.integrations.vllm.engine_config import engine_config
from kvtier.integrations.vllm.settings import engine_plan

pytestmark = pytest.mark.engine
CAPACITY = 8 << 20


@pytest.fixture(scope="module")
def tiering() -> Any:
    """vLLM behind its own spec."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import support_vllm_tiering
    return support_vllm_tiering


def launch(size: int, index: int) -> VllmConfig:
    """vLLM's configuration in the process of rank `index` of a dense model."""
    parallel = ParallelConfig(data_parallel_size=size)
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", engine_id=f"{uuid.uuid4().hex}_dp{index}"
    )
    config = VllmConfig(parallel_config=parallel, kv_transfer_config=transfer)
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


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ranks_of_a_dense_model_have_a_share_each_and_no_folder_in_common(root, size):
    plans = []
    for index in range(size):
        config = launch(size, index)
        plans.append(engine_plan(offloading_config(stack(root, 60), **named(config))))
    cpu, fs = zip(*(plan.stack.tiers for plan in plans), strict=True)
    assert len({path for options in fs for path in options.roots}) == size
    assert sum(options.capacity for options in fs) <= 32 << 20
    assert sum(options.cpu_bytes_to_use for options in cpu) <= 60 * 4096
    assert [options.roots[0] for options in fs] == ([str(root)] if size == 1 else [f"{root}-{i}" for i in range(size)])


def test_two_ranks_serve_and_stay_within_one_capacity(tmp_path):
    root = tmp_path / "root"
    with dense(root, 2, 0) as one, dense(root, 2, 1) as two:
        for engine in (one, two):
            fill(engine)
            assert engine.wrong == 0
    assert CAPACITY // 2 < stored_bytes(tmp_path) <= CAPACITY


def test_without_shares_two_ranks_outgrow_the_capacity(tmp_path, monkeypatch):
    without_shares(monkeypatch)
    root = tmp_path / "root"
    with dense(root, 2, 0) as one, dense(root, 2, 1) as two:
        for engine in (one, two):
            fill(engine)
    assert stored_bytes(tmp_path) > CAPACITY


def test_a_rank_whose_launch_is_hidden_is_refused_by_name(root):
    config = offloading_config(stack(root, 60), parallel={"data_parallel_index": 1})
    with pytest.raises(ConfigError, match=r"data_parallel_size.*hidden"):
        engine_plan(config)


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
