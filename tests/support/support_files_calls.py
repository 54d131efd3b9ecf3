"""File calls of the `files` layout that fail one by one, wherever they are made."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

from kvtier_fs.shared import block_file, bucket

OS_CALLS = (
    *("open", "close", "read", "pread", "pwrite", "stat", "fstat", "lstat", "fstatvfs", "access", "listdir"),
    *("mkdir", "rmdir", "unlink", "rename", "link", "fchmod", "chmod", "ftruncate", "fsync", "utime"),
)
"""What a backend asks the system for by way of `os`; `flock`, `fallocate` and the rename of blocks come on top."""
PACKAGE = "kvtier_fs"
SPARED = ("kvtier_fs.testing", "kvtier_fs.io.threads", "kvtier_fs.io.uring", "kvtier_fs.io.probe")
"""Modules that move payloads, whose failures other tests are about."""


class FailingCalls:
    """Counts the file calls of the package; the N-th fails with an errno. A close that fails has closed all the same.

    `struck` says which call it was, empty if there were not so many.
    """

    def __init__(self, number: int, errno: int) -> None:
        self.number, self.errno = number, errno
        self.count = 0
        self.struck = ""
        self._guard = threading.Lock()

    @contextmanager
    def everywhere(self):
        """While this lasts, in every module of the package but the spared ones."""
        files = self._instead_of(os, OS_CALLS)
        locks = self._instead_of(fcntl, ("flock",))
        undo: list[tuple[object, str, object]] = []
        for name, module in list(sys.modules.items()):
            if (name == PACKAGE or name.startswith(f"{PACKAGE}.")) and name not in SPARED:
                undo += [
                    (module, place, old) for place, old in (("os", os), ("fcntl", fcntl)) if hasattr(module, place)
                ]
        undo += [(bucket, "fallocate", bucket.fallocate), (block_file, "rename_new", block_file.rename_new)]
        for module, place, old in undo:
            setattr(module, place, {"os": files, "fcntl": locks}.get(place) or self._counted(place, old))
        try:
            yield self
        finally:
            for module, place, old in undo:
                setattr(module, place, old)

    def _instead_of(self, module: object, names: tuple[str, ...]) -> SimpleNamespace:
        proxy = SimpleNamespace(**{name: getattr(module, name) for name in dir(module) if not name.startswith("__")})
        for name in names:
            setattr(proxy, name, self._counted(name, getattr(module, name)))
        return proxy

    def _counted(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments, **more):
            with self._guard:
                self.count += 1
                strikes = self.count == self.number
            if not strikes:
                return call(*arguments, **more)
            self.struck = f"{name}{arguments}, call {self.count}"
            if name == "close":
                call(*arguments)
            raise OSError(self.errno, os.strerror(self.errno))

        return counted
