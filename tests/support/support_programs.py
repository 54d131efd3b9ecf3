"""Programs of the system that a lane of tests needs: a browser, Prometheus, npm."""

from __future__ import annotations

import re
import shutil
from typing import NoReturn

import pytest


def asked_for(config: pytest.Config) -> set[str]:
    """The words of `-m` without a `not` before them: `-m long` and `-m "long and not gpu"` both ask for the long runs,
    neither for those of clouds."""
    words = re.findall(r"\w+", re.sub(r"\bnot\s+\w+", "", config.getoption("-m") or ""))
    return set(words) - {"and", "or"}


def absent(request: pytest.FixtureRequest, mark: str, reason: str) -> NoReturn:
    """End this test for what is not here: a failure where its marker was asked for, else a skip."""
    if mark in asked_for(request.config):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def needs(request: pytest.FixtureRequest, mark: str, *programs: str) -> None:
    """End this test as `absent` does where one of some programs is not installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        absent(request, mark, f"not installed: {', '.join(missing)}")
