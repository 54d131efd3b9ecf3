"""Client threads measure how late the event loop learns of the ends of calls."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_remote import client_threads
from kvtier_remote.call_limit import CompletionDelay
from kvtier_remote.client_threads import ClientThreads


class Client:
    silent = False

    def close(self) -> None:
        """Nothing is open."""


def refuse(_: Client) -> None:
    raise OSError("refused")


async def test_it_learns_how_late_the_ends_of_calls_are_known(monkeypatch: Any) -> None:
    times = iter([100.0, 103.0, 200.0, 201.0])
    lateness = CompletionDelay()
    one = ClientThreads("lane", 1, Client, lateness=lateness)
    await one.open()
    monkeypatch.setattr(client_threads, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert await one.run(lambda _: "answer") == "answer"
    after_one = lateness.seconds
    assert 0 < after_one < 3.0
    with pytest.raises(OSError, match="refused"):
        await one.run(refuse)
    assert lateness.seconds == pytest.approx(after_one + (1.0 - after_one) * after_one / 3.0)
    assert await one.close(10.0) == 0


async def test_a_call_that_was_not_made_says_nothing() -> None:
    lateness = CompletionDelay()
    one = ClientThreads("lane", 1, Client, lateness=lateness)
    await one.open()
    assert await one.close(10.0) == 0
    with pytest.raises(OSError, match="closed"):
        await one.run(lambda _: None)
    assert lateness.seconds == 0.0


async def test_no_thread_ends_before_the_last_call():
    """A client that is a process of its own ends with the thread that made it, whichever thread has it in use."""
    goes_on, begun, made = threading.Event(), threading.Event(), list[threading.Thread]()
    both = threading.Barrier(2)

    class Made(Client):
        def __init__(self) -> None:
            super().__init__()
            both.wait(30)
            made.append(threading.current_thread())

    def call(client: Made) -> bool:
        begun.set()
        goes_on.wait(30)
        return all(thread.is_alive() for thread in made)

    lane = ClientThreads("lane", 2, Made)
    await lane.open()
    running = asyncio.create_task(lane.run(call))
    await asyncio.to_thread(begun.wait, 30)
    closing = asyncio.create_task(lane.close(30.0))
    await asyncio.sleep(0.2)
    goes_on.set()
    assert await running
    assert await closing == 0
