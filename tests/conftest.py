"""Shared switches of the test suite: Hypothesis profiles, one seed, and the runs that are off unless asked for."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from support_counts import choose_full_counts, count
from support_programs import asked_for
from support_servers import REQUIRED

if TYPE_CHECKING:
    from support_azurite import Azurite
    from support_ceph import Ceph

    from kvtier.testing.faults import FaultyBackend

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


OFF = ("long", "cloud", "remote", "prometheus", "browser")
"""Markers of tests that run where they are asked for alone: those of servers and programs have lanes of their own."""
LONG_SECONDS = 24 * 3600
"""The time limit of a long run; those of the fault suite have closer ones of their own."""


def begin_elsewhere(config: pytest.Config) -> None:
    """Have each process of a whole run begin to collect with another folder: what one has compiled the others find."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    tests = config.rootpath / "tests"
    folders = sorted({str(tests / path.relative_to(tests).parts[0]) for path in tests.glob("**/test_*.py")})
    first = len(folders) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    config.args = folders[first:] + folders[:first]


def pytest_configure(config: pytest.Config) -> None:
    begin_elsewhere(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs with SIGINT ignored, and processes inherit that: tests
        # of Ctrl-C would wait without end.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked_for(config):
        choose_full_counts()
    if "remote" in asked_for(config):
        os.environ[REQUIRED] = "required"
    if config.getoption("--hypothesis-profile", default=None) is None:
        settings.load_profile("long" if "long" in asked_for(config) else "normal")


TESTS_UNTIL_SET_ASIDE = 20
_tests = itertools.count(1)


def set_aside() -> None:
    """Exclude what is there between two tests from later searches for lost objects: modules and libraries stay to the
    end, and each search would walk them, up to a quarter of a second at a time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        found = yield
    finally:
        gc.enable()
    set_aside()
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    ran = yield
    if not next(_tests) % TESTS_UNTIL_SET_ASIDE:
        set_aside()
    return ran


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path)  # wherever this process began
    for item in items:
        if "dial" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.full)
    off = [mark for mark in OFF if mark not in asked_for(config)]
    kept = [item for item in items if not any(item.get_closest_marker(mark) for mark in off)]
    for item in kept:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[*set(items).difference(kept)])
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the warm process of tests that fork from one, so that none of them finds a descriptor more than it began
    with."""
    if session.items and not session.config.option.collectonly and "faults.machine.warm" in sys.modules:
        sys.modules["faults.machine.warm"].start()


@pytest.fixture
def dial() -> Callable[[int, int], int]:
    """The count of a test that gains by more of the same: the first argument with `-m full`, else the second."""
    return count


@pytest.fixture(scope="session")
def ceph() -> Iterator[Ceph]:
    """A Ceph cluster of this process, whose gateway a test may freeze or kill if it brings it back."""
    from support_ceph import ceph_cluster  # here, because it imports the library of object stores

    with ceph_cluster() as one:
        yield one


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """Azure's emulator for this process, which a test may freeze."""
    import support_azurite  # here, because it imports the library of object stores

    with support_azurite.azurite() as one:
        yield one


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> list[FaultyBackend]:
    """Every backend that engine memory makes from here on goes wrong as planned; the last one made is the one that
    serves."""
    from support_faulty_tiers import faulty_tiers  # here, because most tests need none of the tiers that it imports

    return faulty_tiers(monkeypatch)


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A folder whose path is short enough for a socket in it."""
    folder = tempfile.mkdtemp(prefix="kvtier-", dir="/tmp")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test, printed with the command that replays it; `--seed N` sets it, and with `--last-failed` it
    is the one it failed with."""
    value, cache = request.config.getoption("--seed"), getattr(request.config, "cache", None)
    kept = f"kvtier/seeds/{hashlib.sha256(request.node.nodeid.encode()).hexdigest()}"
    if value is None and cache is not None and request.config.getoption("--last-failed"):
        value = cache.get(kept, None)
    if value is None:
        value = random.SystemRandom().randrange(2**32)
    if cache is not None:
        cache.set(kept, value)
    print(f"seed {value}: replay with python -m pytest {os.fspath(request.node.nodeid)!r} --seed {value}")
    return value
