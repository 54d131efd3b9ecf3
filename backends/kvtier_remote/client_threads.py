"""A few threads for blocking calls, a client each: no client is used by two threads at once, nor closed in use."""

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, Protocol, TypeVar

from kvtier.aio.daemon_pool import DaemonPool, PoolClosed
from kvtier_remote.call_limit import CompletionDelay


class Connected(Protocol):
    """A client of some library, with its connection."""

    @property
    def silent(self) -> bool:
        """True if its last request was not answered, so that another connection should be tried."""

    def close(self) -> None:
        """Disconnect."""


_SILENT_IN_A_ROW = 2
Client = TypeVar("Client", bound=Connected)
T = TypeVar("T")


class ClientThreads(Generic[Client]):
    """`size` threads and as many clients, which `connect` makes on those threads. A client is closed by the thread that
    has it in use when the lane closes, or while no thread has.

    A client that is silent is closed, whatever a server still sends to it: a library keeps that without a bound. Once
    calls in a row have ended so, all clients that are as old are replaced before their next call: the server may have
    gone without a word, and the operating system waits a quarter of an hour before it says so. Others are made by
    `reconnect` (`connect` when left out). `lateness` learns when the event loop knows of the ends of calls.
    """

    def __init__(
        self,
        name: str,
        size: int,
        connect: Callable[[], Client],
        reconnect: Callable[[], Client] | None = None,
        lateness: CompletionDelay | None = None,
    ) -> None:
        self._pool = DaemonPool(name, size)
        self._size = size
        self._connect = connect
        self._reconnect = reconnect or connect
        self._round = self._silent_in_a_row = self._calls = 0
        self._lock = threading.Lock()
        self._idle: list[tuple[int, Client | None]] = []
        self._closed = False
        self._on_last_call: Callable[[], object] = bool
        self._lateness = lateness or CompletionDelay()

    async def open(self) -> None:
        """Connect every client. Raises what `connect` raises, once all attempts have ended."""
        attempts = [asyncio.ensure_future(self._pool.run(self._make)) for _ in range(self._size)]
        await asyncio.wait(attempts)
        errors = [attempt.exception() for attempt in attempts]
        for error in filter(None, errors):
            raise error

    def _make(self) -> None:
        self._give_back(self._round, self._connect())

    async def run(self, call: Callable[[Client], T]) -> T:
        """The result or exception of `call` for one of the clients. Cancelling gives up the result, not the call.

        Raises OSError for a call that had not begun when the lane was closed, and what `reconnect` raises.
        """
        ended = [0.0]
        try:
            return await self._pool.run(self._time_call, call, ended)
        except PoolClosed:
            raise _closed() from None
        finally:
            if ended[0]:
                self._lateness.learn(time.monotonic() - ended[0])

    def _time_call(self, call: Callable[[Client], T], ended: list[float]) -> T:
        """Make a call and note when it has ended."""
        try:
            return self._with_client(call)
        finally:
            ended[0] = time.monotonic()

    def _with_client(self, call: Callable[[Client], T]) -> T:
        with self._lock:
            if self._closed:
                raise _closed()
            number, client = self._idle.pop()  # there are as many as threads
            self._calls += 1
        try:
            if client is not None and number < self._round:
                old, client = client, None
                old.close()
            if client is None:
                number, client = self._round, self._reconnect()
            return call(client)
        finally:
            self._give_back(number, client)
            with self._lock:
                self._calls -= 1
                if self._closed and not self._calls:
                    with suppress(RuntimeError):  # the loop has ended without this call
                        self._on_last_call()

    def renew(self) -> None:
        """Replace each client before its next call."""
        with self._lock:
            self._round += 1

    def _give_back(self, number: int, client: Client | None) -> None:
        """Keep a client, which was made in this round; None if there was none to be had."""
        silent = client is not None and client.silent
        with self._lock:
            if client is not None:
                self._silent_in_a_row = self._silent_in_a_row + 1 if silent else 0
            if silent and self._silent_in_a_row >= _SILENT_IN_A_ROW and number == self._round:
                self._round += 1
            if not self._closed:
                self._idle.append((number, None if silent else client))
                if not silent:
                    return
        if client is not None:
            client.close()

    async def close(self, timeout_seconds: float) -> int:
        """Disconnect each client after its last call, and end the threads. Returns how many threads are stuck.

        The threads end after all calls: a client that is a process ends with the thread that started it.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        deadline = loop.time() + timeout_seconds
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._on_last_call = partial(loop.call_soon_threadsafe, ended.set)
            if not self._calls:
                ended.set()
        for _, client in idle:
            if client is not None:
                self._pool.submit(client.close)
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), timeout_seconds)
        return await self._pool.close(max(0.0, deadline - loop.time()))


def _closed() -> OSError:
    return OSError(errno.ENOTCONN, "the connections are closed")
