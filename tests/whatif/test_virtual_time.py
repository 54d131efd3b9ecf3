"""Virtual time: a clock that jumps, and runs that end early."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from kvtier.errors import IntegrityError
from kvtier.tools.whatif.stack import VirtualLoop


def run(main: Coroutine[object, object, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)


def test_the_clock_jumps_to_what_happens_next_and_on_until_nothing_is_left() -> None:
    async def main() -> None:
        loop, happened = asyncio.get_running_loop(), list[tuple[str, float]]()
        assert isinstance(loop, VirtualLoop)
        for name, at in (("last", 1e6), ("second", 7.0), ("first", 7.0)):
            loop.call_at(at, lambda name=name: happened.append((name, loop.time())))
        await asyncio.sleep(7.5)
        assert {name for name, _ in happened} == {"first", "second"}
        await loop.idle()
        assert (happened[-1], loop.time()) == (("last", 1e6), 1e6)

    run(main())


def test_what_a_callback_raises_ends_the_run_and_cancels_what_waits() -> None:
    cancelled = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(asyncio.get_running_loop().time())
            raise

    async def main() -> None:
        def fail() -> None:
            raise ValueError("wrong")

        asyncio.get_running_loop().call_later(1.0, fail)
        waiting = asyncio.ensure_future(wait())
        await waiting

    with pytest.raises(ValueError, match="wrong"):
        run(main())
    assert cancelled == [1.0]


def test_waiting_for_what_never_happens_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(IntegrityError, match="nothing is left to happen"):
        run(main())
