"""Connecting an engine's scheduler again after its stack process has ended: in a thread, so that no step waits."""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import count

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.loop_thread import Latch
from kvtier.client.connection import Connected, Identity, Participant, connect
from kvtier.errors import ConfigError, KVTierError

PAUSE_SECONDS, LONG_PAUSE_SECONDS = 0.25, 1.0
SHORT_PAUSES = 10
"""How long is waited between two tries: the first ones, and all that follow."""
REFUSED_SECONDS_MAX = 10.0
"""How long at most by an engine that is refused: what is against it seldom changes, and each try costs the others."""

_log = logging.getLogger(__name__)


class Pauses:
    """The seconds to wait before each next try."""

    def __init__(self) -> None:
        self._tries = self._refusals = 0

    def after(self, error: Exception) -> float:
        """The pause after a try that failed."""
        self._tries += 1
        self._refusals = self._refusals + 1 if isinstance(error, ConfigError) else 0
        if self._refusals:
            return min(math.ldexp(PAUSE_SECONDS, self._refusals), REFUSED_SECONDS_MAX)
        return PAUSE_SECONDS if self._tries <= SHORT_PAUSES else LONG_PAUSE_SECONDS


class Reconnection:
    """Connections of a scheduler, one after another. The thread starts the stack process again where it is one of the
    engine's own, which needs no word of the engine, and connects after `permit`.

    `permit`, `take`, `stop` and `close` are called by the engine's thread and never wait.
    """

    def __init__(self, identity: Identity, process: Participant, sock: socket.socket) -> None:
        """`sock` is connected. Raises OSError if the system has no descriptor or no thread to give."""
        self._identity = identity
        self._process = process
        self._connected: deque[Connected] = deque()
        self._permitted = self._stopped = False
        self._changed = Latch()
        self._waking = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = DaemonPool("kvtier-reconnect", 1)
        watched = -1
        try:
            watched = os.dup(sock.fileno())
            self._thread.submit(self._follow, watched)
        except BaseException:
            os.close(self._wake)
            if watched >= 0:
                os.close(watched)
            raise

    def fileno(self) -> int:
        """A descriptor that is readable when `take` has something to return."""
        return self._wake

    def permit(self) -> None:
        """Connect once more: no copy is in flight that the connection of before has to end for."""
        self._permitted = True
        self._changed.set()

    def take(self) -> Connected | None:
        """The next connection, once it is made."""
        if not self._connected:
            return None
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return self._connected.popleft()

    def stop(self) -> None:
        """Make no further connection, and start no process: this one is about to end. Idempotent."""
        with self._waking:
            self._stopped = True
        self._changed.set()

    def close(self) -> None:
        """Stop, and let the thread end once the socket of before is closed, whose end it waits for. Idempotent."""
        self.stop()
        if self._wake >= 0:
            self._thread.shutdown()
            if self._connected:
                _close(self._connected.popleft())
            os.close(self._wake)
            self._wake = -1

    # -- in the thread -------------------------------------------------------------------------------------------

    def _follow(self, watched: int) -> None:
        """Wait for the end of one connection after another, and make the next one."""
        while True:
            _wait_for_the_end(watched)
            if self._stopped or (made := self._connect_again()) is None:
                return
            connected, watched = made
            with self._waking:
                if not self._stopped:
                    self._connected.append(connected)
                    os.eventfd_write(self._wake, 1)
                    continue
            os.close(watched)
            _close(connected)
            return

    def _connect_again(self) -> tuple[Connected, int] | None:
        """The next connection and a descriptor to watch it by, after as many tries as it takes; None once stopped.

        Writes a line for each kind of failure, from the second try on: a process that was killed listens for a moment.
        """
        named: set[type[Exception]] = set()
        pauses = Pauses()
        for number in count():
            try:
                return self._try()
            except (KVTierError, OSError) as error:
                pause = pauses.after(error)
                if number and type(error) not in named:
                    named.add(type(error))
                    _log.warning("no stack process serves this engine, every lookup is a miss: %s", error)
            if self._is_stopped_within(pause):
                break
        return None

    def _try(self) -> tuple[Connected, int] | None:
        """Start the stack process if that is the engine's own, and connect once that is permitted."""
        private = self._identity.private
        while True:
            if private is not None:
                private.start(again=True)
            if self._permitted or self._stopped:
                break
            self._changed.wait(LONG_PAUSE_SECONDS)
        if self._stopped:
            return None
        connected = connect(self._identity, self._process, resumes=True)
        try:
            watched = os.dup(connected[0].fileno())
        except OSError:
            _close(connected)
            raise
        self._permitted = False
        return connected, watched

    def _is_stopped_within(self, seconds: float) -> bool:
        """Wait. True once stopped."""
        end = time.monotonic() + seconds
        while not self._stopped and (left := end - time.monotonic()) > 0:
            self._changed.wait(left)
        return self._stopped


def _wait_for_the_end(watched: int) -> None:
    """Wait until a connection has ended, at either end. Closes the descriptor."""
    poll = select.poll()
    poll.register(watched, 0)
    try:
        poll.poll()
    finally:
        os.close(watched)


def _close(connected: Connected) -> None:
    sock, _, descriptors = connected
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # another descriptor watches it
    sock.close()
    for fd in descriptors:
        os.close(fd)
