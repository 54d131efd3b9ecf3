"""What programs do to a stack without meaning harm: cancel, fork, be killed, race for a region, go on for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..attack import Attack, Budget, Tally
from ..machine.belongings import belongings, left_behind


@contextmanager
def flat(tally: Tally) -> Iterator[Tally]:
    """What this process holds of the machine is the same afterwards."""
    before = belongings()
    yield tally
    left = left_behind(before)
    tally.leaks += len(left)
    tally.expect(not left, f"left behind: {left}")


def asyncio_cancel(budget: Budget) -> Tally:
    """Calls cancelled at every await, after up to 50 ms, by a group that fails; loops closed under transfers."""
    from support_cancels import asyncio_cancel

    with flat(Tally()) as tally:
        asyncio_cancel(budget, tally)
    return tally


def shutdown_and_fork(budget: Budget) -> Tally:
    """Programs ended in every way, closes at any point, children that use what is not theirs."""
    from support_lives_ended import shutdown_and_fork

    with flat(Tally()) as tally:
        shutdown_and_fork(budget, tally)
    return tally


def create_race(budget: Budget) -> Tally:
    """Eight processes open one region at once."""
    from support_races import create_race

    with flat(Tally()) as tally:
        create_race(budget, tally)
    return tally


def hostile_region(budget: Budget) -> Tally:
    """Files in a region's place that are not it."""
    from support_races import hostile_region

    with flat(Tally()) as tally:
        hostile_region(budget, tally)
    return tally


def leaks_and_soak(budget: Budget) -> Tally:
    """Stacks opened and closed, and a hundred times as many jobs with errors."""
    from support_soak import leaks_and_soak

    with flat(Tally()) as tally:
        leaks_and_soak(budget, tally)
    return tally


ATTACKS = (
    Attack(
        "asyncio cancel",
        "cancelled at every await, after 0-50 ms, by a TaskGroup that fails; the loop closed mid-transfer",
        50, 500, asyncio_cancel,
    ),
    Attack(
        "shutdown and fork",
        "programs that end in every way, SIGTERM, Ctrl-C, close() at many points, use after fork; then all is reopened",
        6, 100, shutdown_and_fork,
    ),
    Attack(
        "create race",
        "8 processes open one region at once; in a quarter of the rounds one dies at some step of it",
        5, 20_000, create_race, shards=2,
    ),
    Attack(
        "stale or hostile region file",
        "wrong magic, size, owner, mode, symlink, fifo, other geometry, random damage; SIGKILL of everyone",
        35, 350, hostile_region,
    ),
    Attack(
        "leaks and soak",
        "stacks opened and closed, and 100 times as many jobs over I/O that fails: fds, threads, memory, /dev/shm flat",
        24, 10_000, leaks_and_soak,
    ),
)  # fmt: skip
