"""No call waits for ever for the loop of a thread that has ended, and no coroutine is lost on the way there."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from kvtier.aio.loop_thread import LoopThread
from kvtier.errors import UsageError


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def raises(error: type[BaseException]) -> None:
    raise error


async def nothing() -> int:
    return 1


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_coroutine_that_would_end_the_loop_ends_alone(error: type[BaseException]) -> None:
    thread = LoopThread("test", "thing")
    waiting = thread.start(forever())
    with pytest.raises(error):
        thread.run(raises(error), 20)
    assert thread.run(nothing(), 20) == 1
    assert not waiting.ended.done()
    assert thread.close()
    assert waiting.ended.cancelled()


def test_calls_end_when_somebody_else_stops_their_loop() -> None:
    async def stop() -> None:
        thread.loop.stop()
        await forever()

    thread = LoopThread("test", "thing")
    waiting = thread.start(forever())
    with pytest.raises(UsageError, match="closed before the call ended"):
        thread.run(stop(), 20)
    with pytest.raises(CancelledError):
        waiting.ended.result(20)
    with pytest.raises(UsageError, match="is closed"):
        thread.run(forever(), 20)
    thread.thread.join(20)
    assert thread.close()


def test_no_call_is_lost_between_many_threads_and_a_close() -> None:
    def call_until_closed() -> None:
        try:
            while True:
                assert thread.run(nothing(), 20) == 1
        except UsageError:
            ended.append(1)

    for _ in range(20):
        thread, ended = LoopThread("test", "thing"), []
        callers = [threading.Thread(target=call_until_closed, daemon=True) for _ in range(4)]
        for caller in callers:
            caller.start()
        assert thread.close()
        for caller in callers:
            caller.join(20)
        assert len(ended) == 4
