"""Virtual time: what ends a run early leaves no coroutine that was never awaited."""

from __future__ import annotations

import inspect

import pytest

from kvtier.tools.whatif.virtual_time import VirtualCondition, VirtualTime


def test_coroutines_that_wait_or_have_not_begun_are_closed_when_one_raises() -> None:
    time = VirtualTime()
    condition = VirtualCondition(time)

    async def fail() -> None:
        await time.sleep(1.0)
        time.spawn(late)
        raise ValueError("wrong")

    waits, late = condition.wait(), condition.wait()
    time.spawn(waits)
    time.spawn(fail())
    with pytest.raises(ValueError, match="wrong"):
        time.run()
    assert time.now == 1.0
    assert [inspect.getcoroutinestate(one) for one in (waits, late)] == [inspect.CORO_CLOSED] * 2
