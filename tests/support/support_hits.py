"""Blocks that tests of several processes on one store keep there, and how many of them each process finds."""

from __future__ import annotations

from kvtier.testing.conformance import make_keys
from kvtier.testing.driver import Driver

LARGE, SMALL = 0, 1
NAMES = [*make_keys(2, LARGE), *make_keys(2, SMALL)]


async def stored(driver: Driver) -> None:
    """Store all of them."""
    assert all(outcome.ok for outcome in (await driver.store(NAMES)).values())


async def hits(driver: Driver) -> int:
    """How many of the names are hits that load."""
    found = list(await driver.tier.lookup(NAMES))  # type: ignore[attr-defined]
    loaded = [outcome.ok for outcome in (await driver.load(NAMES)).values()]
    assert [one == "hit" for one in found] == loaded
    return sum(loaded)
