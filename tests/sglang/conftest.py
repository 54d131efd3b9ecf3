"""The SGLang lane: tests against a real SGLang. Where it is not installed they are skipped and say so; where the lane
is asked for, with `-m sglang`, a missing SGLang is an error."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ON_CPU = FOLDER / "on_cpu"
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
UNITS = [
    "test_controller.py",
    "test_hicache.py",
    "test_hybrid.py",
    "test_peers.py",
    "test_pools.py",
    "test_random_operations.py",
    "test_service.py",
]
collect_ignore = ["on_cpu", *([] if HAS_SGLANG else UNITS)]
sys.path.insert(0, str(FOLDER))

if HAS_SGLANG:
    sys.path.insert(0, str(ON_CPU))
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    with warnings.catch_warnings():  # our tests treat warnings as errors; what SGLang's imports warn of is not ours
        warnings.simplefilter("ignore")
        importlib.import_module("cpu_engine")  # before anything of SGLang
        importlib.import_module("support_controller")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_SGLANG:
        return
    asked = "sglang" in (config.getoption("-m") or "").replace("(", " ").replace(")", " ").split()
    for item in items:
        if item.get_closest_marker("sglang"):
            if asked:
                item.add_marker(pytest.mark.usefixtures("sglang_is_missing"))
            else:
                item.add_marker(pytest.mark.skip(reason="needs SGLang: see docs/sglang.md for its lane"))


@pytest.fixture
def sglang_is_missing() -> None:
    pytest.fail("the SGLang lane was asked for, but SGLang is not installed")
