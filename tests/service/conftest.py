"""The folder of private stack processes."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support_service import peer_pid


@pytest.fixture
def folder() -> Iterator[str]:
    """A `runtime_dir` of a short path; what still runs there is killed at the end."""
    with tempfile.TemporaryDirectory() as base:
        yield base
        for path in Path(base).glob("*/*.sock"):
            with suppress(OSError):
                os.kill(peer_pid(str(path)), signal.SIGKILL)
