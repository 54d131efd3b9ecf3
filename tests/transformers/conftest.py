"""What tests with transformers share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator

import pytest

MODELS = "transformers.modeling_utils"
_aside: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Set the library aside once a test has imported it: each search for lost objects, in any later test of this
    process, would walk its 175,000."""
    torn_down = yield
    if MODELS in sys.modules and not _aside:
        _aside.append(MODELS)
        gc.collect()
        gc.freeze()
    return torn_down
