"""`max_age` of the tier `shared_fs`: a block that is too old is a miss and goes, whatever a clock did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support_files import account_errors, account_is_true, block_files, open_files, options
from support_fs import keys

from kvtier.types.jobs import LOADED, MISSING, PRESENT, STORED
from kvtier_fs.shared.root import FilesHooks

DAY = 86400.0
NAMES = keys(3)


class Clock:
    """A wall clock that tests set, in days."""

    def __init__(self) -> None:
        self.day = 20000.0

    def __call__(self) -> float:
        return self.day * DAY


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def unpruned(monkeypatch) -> None:
    """Only lookups and loads refuse blocks: the pruning, which runs beside, may come before or after any step."""

    async def leave(*arguments: object) -> None: ...

    monkeypatch.setattr("kvtier_fs.shared.root.SharedRoot.prune", leave)


def opened(path: Path, clock: Callable[[], float], **changes: object):
    changes = {"max_age": "7d"} | changes
    settings = options(path, **{name: value for name, value in changes.items() if value is not None})
    return open_files(settings, hooks=FilesHooks(lock_seconds=60, wall=clock))


async def until(true: Callable[[], bool], running: asyncio.Task[None]) -> None:
    """Until something is true while a task goes on; the test's own time limit ends it."""
    while not true():
        await asyncio.wait((running,), timeout=0.01)
        assert not running.done()


async def found(tier) -> list[str]:
    return [str(one) for one in await tier.backend.lookup(NAMES)]


async def test_a_block_that_is_too_old_is_neither_found_nor_loaded(tmp_path, clock, unpruned):
    async with opened(tmp_path / "root", clock) as tier:
        assert await tier.store(NAMES) == [STORED] * 3
        clock.day += 6.9
        assert (await found(tier), await tier.load(NAMES)) == (["hit"] * 3, [LOADED] * 3)
        clock.day += 0.2
        assert await found(tier) == ["miss"] * 3, "also one whose header was read before"
        assert await tier.load(NAMES) == [MISSING] * 3
        assert tier.counters["mismatch.generation"] == 3
        assert block_files(tmp_path / "root") == [], "a load removes it"
        assert not any(account_errors(tmp_path / "root").values())


async def test_a_load_alone_refuses_it(tmp_path, clock):
    async with opened(tmp_path / "root", clock, max_age=None) as old:
        await old.store(NAMES)
        clock.day += 8
        assert await old.load(NAMES) == [LOADED] * 3, "there is no limit unless one is given"
        async with opened(tmp_path / "root", clock) as tier:
            assert await tier.load(NAMES) == [MISSING] * 3


async def test_it_is_stored_anew(tmp_path, clock):
    async with opened(tmp_path / "root", clock) as tier:
        await tier.store(NAMES)
        assert await tier.store(NAMES) == [PRESENT] * 3
        clock.day += 8
        assert await tier.store(NAMES) == [STORED] * 3
        assert (await found(tier), await tier.load(NAMES)) == (["hit"] * 3, [LOADED] * 3)
        assert account_is_true(tier)


async def test_it_is_removed_though_none_asks_for_it(tmp_path, clock):
    async with opened(tmp_path / "root", clock, max_age=None) as tier:
        await tier.store(NAMES[:2])
        clock.day += 8
        await tier.store(NAMES[2:])
    async with opened(tmp_path / "root", clock) as tier:
        (pruning,) = [task for task in tier.backend._background if "_prune_old" in str(task.get_coro())]
        await until(lambda: tier.counters["pruned"] == 2, pruning)
        assert len(block_files(tmp_path / "root")) == 1
        assert await found(tier) == ["miss", "miss", "hit"]


async def test_a_clock_that_was_wrong_keeps_no_block_for_ever(tmp_path, clock):
    """What was stored by a clock that was ahead is used for twice the limit at most, and not at all if the clock was
    further ahead than that; a clock that goes back loses nothing that is young by both."""
    async with opened(tmp_path / "root", clock) as tier:
        clock.day += 365
        await tier.store(NAMES[:1])
        clock.day -= 365
        await tier.store(NAMES[1:2])
        clock.day -= 2
        await tier.store(NAMES[2:])
        assert await found(tier) == ["miss", "hit", "hit"]
        assert await tier.load(NAMES) == [MISSING, LOADED, LOADED]
        clock.day += 9.1
        assert await found(tier) == ["miss", "miss", "miss"]
