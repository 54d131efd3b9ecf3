"""The folder of private stack processes, and a quick start of them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from support_service import peer_pid

from faults.machine import warm
from kvtier.client import private


@pytest.fixture
def folder() -> Iterator[str]:
    """A `runtime_dir` of a short path; what still runs there is killed at the end."""
    with tempfile.TemporaryDirectory() as base:
        yield base
        for path in Path(base).glob("*/*.sock"):
            with suppress(OSError):
                os.kill(peer_pid(str(path)), signal.SIGKILL)


@pytest.fixture
def warm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private stack processes are forked from a warm one, for tests to which it is all the same how they start."""
    monkeypatch.setattr(private, "subprocess", SimpleNamespace(Popen=warm.Popen, PIPE=subprocess.PIPE))
