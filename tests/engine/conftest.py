"""The engine lane: tests against a real vLLM. Where it is not installed they are skipped and say so; where the lane is
asked for, with `-m engine`, a missing vLLM is an error."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore = [] if HAS_VLLM else ["test_vllm_contract.py", "test_vllm_secondary.py"]

if HAS_VLLM:
    with warnings.catch_warnings():  # our tests treat warnings as errors; what vLLM's imports warn of is not ours
        warnings.simplefilter("ignore")
        import kvtier.integrations.vllm  # noqa: F401


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_VLLM:
        return
    asked = "engine" in (config.getoption("-m") or "").replace("(", " ").replace(")", " ").split()
    for item in items:
        if item.get_closest_marker("engine"):
            if asked:
                item.add_marker(pytest.mark.usefixtures("vllm_is_missing"))
            else:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: see docs/vllm.md for the engine lane"))


@pytest.fixture
def vllm_is_missing() -> None:
    pytest.fail("the engine lane was asked for, but vLLM is not installed")
