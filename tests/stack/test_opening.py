"""A tier that does not open in time: the stack says which, leaves nothing open, and closes the tier when it opens."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

import pytest
from support_stack import PLAIN, Engine, parts_of, stack_file
from support_stack_tiers import backends

from kvtier.errors import ResourceError
from kvtier.stack import StackParts, TierStack


class Watched:
    """A tier that says when it was closed."""

    def __init__(self, tier) -> None:
        self.closed = threading.Event()
        self._open, self._close = tier.open, tier.close
        tier.open, tier.close = self.open, self.close

    async def open(self, context):
        return await self._open(context)

    async def close(self):
        await self._close()
        self.closed.set()


class Frozen(Watched):
    """A tier whose opening ends when its disk answers, and not when it is cancelled."""

    def __init__(self, tier) -> None:
        super().__init__(tier)
        self.answer = threading.Event()

    async def open(self, context):
        while not self.answer.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return await super().open(context)


def parts() -> StackParts:
    config = stack_file(PLAIN, 8, {"type": "memory", "name": "below"}, backends=backends())
    return parts_of(config, Engine(PLAIN, 8), backends(), open_timeout_seconds=0.2, tier_close_seconds=1.0)


@pytest.mark.parametrize(("position", "name"), [(0, "gpu"), (1, "cpu"), (2, "below")])
async def test_a_tier_that_never_opens_is_named_and_the_others_are_closed(position, name):
    made = parts()
    others = [Watched(tier) for index, tier in enumerate(made.tiers) if index != position]
    opened_before = {0: 1, 1: 0, 2: 2}[position]

    async def never(context):
        await asyncio.Event().wait()

    made.tiers[position].open = never
    started = time.monotonic()
    with pytest.raises(ResourceError, match=f"tier {name} did not open"):
        await TierStack(made).open()
    assert time.monotonic() - started < 10
    assert sum(other.closed.is_set() for other in others) == opened_before


async def test_a_tier_that_opens_too_late_is_closed_then():
    made = parts()
    frozen = Frozen(made.tiers[2])
    with pytest.raises(ResourceError, match="tier below did not open"):
        await TierStack(made).open()
    assert not frozen.closed.is_set()
    frozen.answer.set()
    assert await asyncio.to_thread(frozen.closed.wait, 10)


async def test_a_probe_that_is_not_answered_is_named():
    made = parts()

    async def never():
        await asyncio.Event().wait()

    made.tiers[2].probe_alignment = never
    with pytest.raises(ResourceError, match="tier below did not answer a probe"):
        await TierStack(made).open()
