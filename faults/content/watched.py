"""A process under attack, watched: an alarm for each step, logs and loops that err, memory, descriptors, limits."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ADDRESS_BYTES = 4 << 30
FILE_BYTES = 64 << 20


class TookLong(KeyboardInterrupt):
    """A step did not end in time. Of this kind, so that no boundary of a task keeps it."""


class Watch(logging.Handler):
    """What went wrong in the process: late steps, errors that were logged or that belong to no call."""

    def __init__(self) -> None:
        super().__init__()
        self.late = False
        self.seen: list[str] = []

    def ring(self, signum: int, frame: FrameType | None) -> None:
        """The alarm of a step that takes too long."""
        self.late = True
        raise TookLong

    def loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that no task took."""
        self.seen.append(f"{context['message']}: {context.get('exception')!r}")

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what was logged as an error."""
        if record.levelno >= logging.ERROR:
            self.seen.append(record.getMessage() + (f": {record.exc_info[1]!r}" if record.exc_info else ""))


def open_below(folder: Path) -> list[str]:
    """What this process has open in a folder."""
    return [one for one in map(_target, os.listdir("/proc/self/fd")) if one.startswith(str(folder))]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def peak() -> int:
    """The most memory this process has had since `peak_reset`, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))


def peak_reset() -> int:
    """Forget the most memory so far. Returns what is in use now, in bytes."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return peak()


@contextmanager
def contained(watch: Watch) -> Iterator[None]:
    """An alarm, an eye on the logs, no flushes (no power is lost here), limits for what gets out of hand."""
    flushes, handler = (os.fsync, os.fdatasync), signal.signal(signal.SIGALRM, watch.ring)
    logs = [logging.getLogger(name) for name in ("kvtier", "asyncio")]
    for log in logs:
        log.addHandler(watch)
    limits = {which: resource.getrlimit(which) for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)}
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, limits[resource.RLIMIT_FSIZE][1]))
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_BYTES, limits[resource.RLIMIT_AS][1]))
    os.fsync = os.fdatasync = lambda fd: None
    try:
        yield
    finally:
        os.fsync, os.fdatasync = flushes
        signal.signal(signal.SIGALRM, handler)
        for log in logs:
            log.removeHandler(watch)
        for which, limit in limits.items():
            resource.setrlimit(which, limit)
