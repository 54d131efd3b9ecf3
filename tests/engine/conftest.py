"""The engine lane: tests against a real vLLM, off unless it is installed. `KVTIER_ENGINE_LANE` is not needed: where the
lane is asked for with `-m engine`, a missing vLLM is an error and not a skip."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is not None:
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
