"""What tests of the CPU tier share: a folder in shared memory that no other process uses."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty folder in shared memory.

    In /dev/shm itself every process that opens a region removes what dead processes left, also those of other tests.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvtier-test-") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def nothing_lost() -> None:
    """Give back the regions of stacks that earlier tests of this process lost: the tests here read its mappings."""
    gc.collect()
