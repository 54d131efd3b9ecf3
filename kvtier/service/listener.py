"""The socket of a stack process: it accepts connections within a rate and bounds, and shows who is at the other end."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.config.access import UserAccess
from kvtier.errors import ConfigError
from kvtier.stack.watching.socket_file import LockTouches, SocketFile

CONNECTIONS_MAX = 1024
"""Connections, those that greet and processes that may still copy. More are closed unread."""
GREETINGS_PER_SECOND = 64.0
"""Greetings that are read, on average; at once `CONNECTIONS_MAX`."""
PROCESS_AT_ONCE, PROCESS_PER_SECOND = 512, 1.0
"""The same of one process: others find room whatever it does."""
REFUSAL_COST = 8
"""Greetings that one counts for which was refused: processes of an engine try again for as long as they live."""
FOREIGN_PER_SECOND = GREETINGS_PER_SECOND / 2
"""Greetings of a user's processes in other PID namespaces, on average: one looks like the other."""
PROCESSES_MAX = 1024
"""Processes whose greetings are counted; those of one that is forgotten count again from none."""
REST_SECONDS = 1.0
"""How long no connection is accepted after the process had no descriptor for one."""
_ACCEPTED_AT_ONCE = 8

_log = logging.getLogger(__name__)

Greet = Callable[[socket.socket], Coroutine[Any, Any, None]]
Process = tuple[int, int]
"""(process, user) at the other end of a connection; process 0 is in another PID namespace."""


@dataclass(slots=True)
class Budget:
    """Greetings that were `left` at a time, in seconds. They are earned at a rate, up to a bound."""

    left: float
    at: float

    def earn(self, now: float, per_second: float, most: float) -> None:
        """It is `now`."""
        self.left = min(most, self.left + (now - self.at) * per_second)
        self.at = now


class GreetingRates:
    """Bounds the greetings that are read: of each process, so that none takes what others need, and of all."""

    def __init__(self) -> None:
        self._all = Budget(float(CONNECTIONS_MAX), 0.0)
        self._of: OrderedDict[Process, Budget] = OrderedDict()

    def take(self, process: Process, now: float) -> bool:
        """True if this process may greet now: that is counted."""
        own = self._of.setdefault(process, Budget(float(PROCESS_AT_ONCE), now))
        self._of.move_to_end(process)
        if len(self._of) > PROCESSES_MAX:
            self._of.popitem(last=False)
        own.earn(now, PROCESS_PER_SECOND if process[0] else FOREIGN_PER_SECOND, PROCESS_AT_ONCE)
        self._all.earn(now, GREETINGS_PER_SECOND, CONNECTIONS_MAX)
        if own.left < 1 or self._all.left < 1:
            return False
        own.left -= 1
        self._all.left -= 1
        return True

    def on_refused(self, process: Process) -> None:
        """Count a greeting of a process as several: it was refused, and so may be those that follow."""
        if process[0] and process in self._of:
            own = self._of[process]
            own.left = max(0.0, own.left - REFUSAL_COST + 1)


class Listener:
    """Listens at a path in one event loop. `greet` is called with each connection, in a task; it owns the socket.

    `num_watched` gives the processes that were taken in; `on_change` is called when `is_greeting` may have changed.
    """

    def __init__(
        self, path: str, access: UserAccess, greet: Greet, num_watched: Callable[[], int], on_change: Callable[[], None]
    ) -> None:
        self.access = access
        self._path = path
        self._greet = greet
        self._num_watched = num_watched
        self._on_change = on_change
        self._greeting: set[asyncio.Task[None]] = set()
        self._rates = GreetingRates()
        self._file: SocketFile | None = None
        self._touches: LockTouches | None = None
        self._pool = DaemonPool("kvtier-socket", 1)
        self._resting: asyncio.TimerHandle | None = None

    def open(self, patience_seconds: float) -> None:
        """Listen. Raises ResourceError if the path is not free, ConfigError if its group cannot be set."""
        self._loop = asyncio.get_running_loop()
        self._file = SocketFile.claim(self._path, socket.SOCK_SEQPACKET, patience_seconds)
        try:
            self.access.share(self._path)
        except ConfigError:
            self._file.release()
            raise
        self._touches = LockTouches(self._file, self._pool)
        self._loop.add_reader(self._file.fd, self.accept)

    @property
    def is_open(self) -> bool:
        """True once it has listened."""
        return self._file is not None

    @property
    def is_greeting(self) -> bool:
        """True while a connection is being taken in."""
        return bool(self._greeting)

    def accept(self) -> None:
        """Take in those that wait, some in one turn of the loop."""
        assert self._file is not None
        try:
            for _ in range(_ACCEPTED_AT_ONCE):
                self._begin_greeting(self._file.accept())
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # such as no descriptor: what waits would call this at once again
            _log.warning("the socket %s rests for %g s: %s", self._path, REST_SECONDS, error)
            self._stop()
            self._resting = self._loop.call_later(REST_SECONDS, self._accept_again)

    def _accept_again(self) -> None:
        assert self._file is not None
        self._loop.add_reader(self._file.fd, self.accept)

    def _stop(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
        if self._file is not None and self._file.fd >= 0:
            self._loop.remove_reader(self._file.fd)

    def _begin_greeting(self, sock: socket.socket) -> None:
        taken = len(self._greeting) + self._num_watched()
        if taken >= CONNECTIONS_MAX or not self._rates.take(peer_of(sock), self._loop.time()):
            sock.close()
            return
        sock.setblocking(False)
        task = asyncio.ensure_future(self._greet(sock))
        self._greeting.add(task)
        task.add_done_callback(self._on_greeted)
        self._on_change()

    def on_refused(self, sock: socket.socket) -> None:
        """The greeting of a connection was refused: its process has fewer of them."""
        self._rates.on_refused(peer_of(sock))

    def _on_greeted(self, task: asyncio.Task[None]) -> None:
        self._greeting.discard(task)
        self._on_change()
        if not task.cancelled():
            task.result()  # what it raises is a defect

    def withdraw(self) -> None:
        """Let no process connect any more; the path stays claimed."""
        self._stop()
        if self._file is not None:
            self._file.withdraw()

    def end_greetings(self) -> None:
        """Cancel those under way."""
        for task in tuple(self._greeting):
            task.cancel()

    def release(self) -> None:
        """Let another process claim the path."""
        if self._touches is not None:
            self._touches.end()
        self._pool.shutdown()
        if self._file is not None:
            self._file.release()


def peer_of(sock: socket.socket) -> Process:
    """The process at the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def pidfd_fault(fd: int, pid: int) -> str:
    """A descriptor that shows the exit of no process, or of another one, would give rows away that are copied into."""
    try:
        signal.pidfd_send_signal(fd, 0)
    except OSError as error:
        if error.errno in (errno.EBADF, errno.ESRCH):
            return "its descriptor is no pidfd of a process that runs"  # EINVAL, EPERM: it is in another namespace
    with suppress(OSError):
        for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Pid" and pid > 0 and 0 < int(value) != pid:
                return "its pidfd is that of another process"
    return ""


async def readable(sock: socket.socket) -> None:
    """Return once there is something to read."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, partial(_set, future))
    try:
        await future
    finally:
        loop.remove_reader(sock)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
