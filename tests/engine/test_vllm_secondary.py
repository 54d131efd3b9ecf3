"""`KVTierFs` below vLLM's real tiering manager and its real shared region, on the CPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="session")
def tiering() -> Any:
    """vLLM behind its own spec, imported when it is needed: it takes seconds, and warns while it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import support_vllm_tiering
    return support_vllm_tiering


def test_what_was_cascaded_is_served_after_the_cpu_tier_was_emptied_and_after_a_restart(tiering: Any, tmp_path: Path):
    names = tiering.keys(24)
    config = tiering.tier_config(tmp_path / "root")
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        vllm.store(names)
        vllm.forget()
        assert vllm.hits(names) == names
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        assert vllm.hits(names) == names
        assert vllm.hits(tiering.keys(4, start=100)) == []
