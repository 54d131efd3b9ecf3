"""A victim's process: forked from the harness, watched from it, killed by it."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import select
import signal
import time
import traceback
from collections.abc import Awaitable, Callable
from enum import Enum

from .shared_log import SharedLog

HANG_SECONDS = 60.0
_DUMP_SECONDS, _DUMP_BYTES = 0.5, 1500
_SET_PARENT_DEATH_SIGNAL = 1


class Sign(Enum):
    """What a victim did in time: it reported that the timer may start, it ended by itself, or neither."""

    READY = "ready"
    ENDED = "ended"
    NOTHING = "nothing"


def die_with_parent() -> None:
    """Be killed when the process that started this one ends, so that nothing is left of an attack that was stopped."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


class Signals:
    """The pipe on which victims report that the timer may start; one for all of them."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def drain(self) -> None:
        """Discard what a dead victim wrote."""
        try:
            while os.read(self.read, 64):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.read)
        os.close(self.write)


class Stacks:
    """Shows where the threads of a victim are that does not answer. One for a process and all its children."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("stacks"), "w+b")
        faulthandler.register(signal.SIGUSR1, file=self._file)

    def of(self, pid: int) -> str:
        """The stacks of a child, as far as they fit into a report."""
        start = os.lseek(self._file.fileno(), 0, os.SEEK_END)
        os.kill(pid, signal.SIGUSR1)
        time.sleep(_DUMP_SECONDS)
        return os.pread(self._file.fileno(), _DUMP_BYTES, start).decode(errors="replace")

    def close(self) -> None:
        faulthandler.unregister(signal.SIGUSR1)
        self._file.close()


class Victim:
    """A child that runs a coroutine. Everything is imported already, so it costs some milliseconds."""

    def __init__(self, work: Callable[[], Awaitable[None]], log: SharedLog, signals: Signals) -> None:
        signals.drain()
        self._signals = signals
        self.status = 0
        self.pid = os.fork()
        if self.pid == 0:
            _live(work, log)
        self._pidfd = os.pidfd_open(self.pid)

    def wait(self, seconds: float = HANG_SECONDS) -> Sign:
        """Wait until it reports or ends."""
        watch = select.poll()
        watch.register(self._signals.read, select.POLLIN)
        watch.register(self._pidfd, select.POLLIN)
        seen = {fd for fd, _ in watch.poll(seconds * 1000)}
        if self._signals.read in seen:
            self._signals.drain()
            return Sign.READY
        return Sign.ENDED if seen else Sign.NOTHING

    def wait_end(self, seconds: float = HANG_SECONDS) -> Sign:
        """Wait until it ends."""
        watch = select.poll()
        watch.register(self._pidfd, select.POLLIN)
        return Sign.ENDED if watch.poll(seconds * 1000) else Sign.NOTHING

    def kill(self) -> bool:
        """SIGKILL, if it still runs, and wait for its end. True if that was what ended it."""
        os.kill(self.pid, signal.SIGKILL)
        return self.reap()

    def reap(self) -> bool:
        """Take note of its end. True if it was killed."""
        _, self.status = os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL


def _live(work: Callable[[], Awaitable[None]], log: SharedLog) -> None:
    """In the child: do the work; never return."""
    code = 1
    try:
        die_with_parent()
        asyncio.run(_as_coroutine(work))
        code = 0
    except BaseException:
        # The process's boundary: whatever it was, the harness must learn of it.
        log.say(traceback.format_exc())
    finally:
        os._exit(code)


async def _as_coroutine(work: Callable[[], Awaitable[None]]) -> None:
    await work()


def pause_until(moment: float) -> None:
    """Sleep until a moment of time.perf_counter, and no longer."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
