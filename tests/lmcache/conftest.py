"""The LMCache lane: tests against a real LMCache. Where it is not installed they are skipped and say so; where the lane
is asked for, with `-m lmcache`, a missing LMCache is an error."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings

import pytest

HAS_LMCACHE = importlib.util.find_spec("lmcache") is not None
UNITS = ["test_adapter.py", "test_objects.py", "test_random_operations.py"]
collect_ignore = [] if HAS_LMCACHE else UNITS

if HAS_LMCACHE:
    os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    with warnings.catch_warnings():  # our tests treat warnings as errors; what LMCache's imports warn of is not ours
        warnings.simplefilter("ignore")
        importlib.import_module("support_lmcache")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_LMCACHE:
        return
    asked = "lmcache" in (config.getoption("-m") or "").replace("(", " ").replace(")", " ").split()
    for item in items:
        if item.get_closest_marker("lmcache"):
            if asked:
                item.add_marker(pytest.mark.usefixtures("lmcache_is_missing"))
            else:
                item.add_marker(pytest.mark.skip(reason="needs LMCache: see docs/lmcache.md for its lane"))


@pytest.fixture
def lmcache_is_missing() -> None:
    pytest.fail("the LMCache lane was asked for, but LMCache is not installed")
