"""Shared switches of the test suite: Hypothesis profiles, one seed, and the long runs that are off unless asked for."""

from __future__ import annotations

import os
import random
import signal

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("normal", deadline=None, print_blob=True)
settings.register_profile(
    "long",
    deadline=None,
    print_blob=True,
    max_examples=5000,
    stateful_step_count=200,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay random tests with this seed")


LONG_SECONDS = 24 * 3600
"""The time limit of a long run; those of the fault suite have closer ones of their own."""


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs with SIGINT ignored, and processes inherit that: tests
        # of Ctrl-C would wait without end.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--hypothesis-profile", default=None) is None:
        settings.load_profile("long" if "long" in _marks_asked_for(config) else "normal")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long_runs = [item for item in items if item.get_closest_marker("long")]
    if "long" in _marks_asked_for(config):
        for item in long_runs:
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
        return
    if long_runs:
        config.hook.pytest_deselected(items=long_runs)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def _marks_asked_for(config: pytest.Config) -> set[str]:
    """The words of `-m`: `-m long` and `-m "long and not gpu"` both ask for the long runs."""
    return set((config.getoption("-m") or "").replace("(", " ").replace(")", " ").split())


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test, printed with the command that replays it; `--seed N` sets it."""
    given = request.config.getoption("--seed")
    value = random.SystemRandom().randrange(2**32) if given is None else given
    print(f"seed {value}: replay with python -m pytest {os.fspath(request.node.nodeid)!r} --seed {value}")
    return value
