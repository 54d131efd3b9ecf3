"""What simulated code sees of files beside the system calls: file objects and `os.path`."""

from __future__ import annotations

import io
import os
from typing import Any, Protocol

from simulator.disk import Disks


class FileCalls(Protocol):
    """What this module needs of a simulated system."""

    disks: Disks
    alive: bool

    def read(self, fd: int, length: int) -> bytes: ...
    def write(self, fd: int, data: bytes) -> int: ...
    def close(self, fd: int) -> None: ...


class RawFile(io.RawIOBase):
    """A descriptor as a file object."""

    def __init__(self, system: FileCalls, fd: int, closefd: bool) -> None:
        self._system, self._fd, self._closefd = system, fd, closefd

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._system.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return self._system.write(self._fd, bytes(data))

    def close(self) -> None:
        if not self.closed and self._closefd and self._system.alive:
            self._system.close(self._fd)
        super().close()


class SimulatedPaths:
    """Stands in for `os.path`."""

    def __init__(self, system: FileCalls) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        if name in ("dirname", "basename", "join", "normpath", "isabs", "split"):
            return getattr(os.path, name)
        raise AttributeError(f"the simulated system has no os.path.{name}")

    def isdir(self, path: str) -> bool:
        folders = self._system.disks.folders
        if path in folders:
            return folders[path].exists
        return any(os.path.dirname(known) == path for known in folders)

    exists = isdir

    def islink(self, path: str) -> bool:
        return False
