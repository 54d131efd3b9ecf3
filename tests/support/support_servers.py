"""Servers that pip does not bring: found on the machine, and where one is absent a skip with a reason or a failure."""

from __future__ import annotations

import os
import shutil
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
