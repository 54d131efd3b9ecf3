"""Servers of tests: found on the machine, or the test is skipped with a reason or fails; and frozen for a while."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

REQUIRED = "KVTIER_REMOTE_SERVERS"
"""Set to `required` by `-m remote`, whose tests fail without their server; processes that tests start inherit it."""


def needs_server(name: str, why: str) -> NoReturn:
    """End this test, because the server `name` is not here: a failure where the lane of servers was asked for, with
    `-m remote`, else a skip. `why` says what is missing and how it is installed, such as `apt-get install radosgw`."""
    reason = f"needs {name}: {why}"
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def server_program(program: str, install: str) -> str:
    """The path of a server's program, by PATH. Where there is none the test ends as `needs_server` says."""
    found = shutil.which(program)
    if found is None:
        needs_server(program, install)
    return found


@contextmanager
def frozen(pid: int, awake: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A process does not run for a while; its connections stay. `awake` returns once it answers again."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
        awake()
