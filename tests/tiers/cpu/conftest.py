"""What tests of the CPU tier share: no region of others."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def nothing_lost() -> None:
    """Give back the regions of stacks that earlier tests of this process lost: the tests here read its mappings."""
    gc.collect()
