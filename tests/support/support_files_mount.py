"""A small file system of one's own for a test, mounted nowhere: it goes with its last user, however that ends."""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_SET_STRING, _CREATE = 1, 6


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _mounted(settings: dict[str, str]) -> int:
    context = _call(_FSOPEN, b"tmpfs", 0)
    try:
        for key, value in settings.items():
            _call(_FSCONFIG, context, _SET_STRING, key.encode(), value.encode(), 0)
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
        return _call(_FSMOUNT, context, 0, 0)
    finally:
        os.close(context)


@contextmanager
def small_disk(size_bytes: int, inodes: int = 10_000):
    """A folder on a tmpfs of some bytes and inodes, as any process can name it. Skips where this is not allowed."""
    try:
        fd = _mounted({"size": str(size_bytes), "nr_inodes": str(inodes), "mode": "0700"})
    except OSError as error:
        pytest.skip(f"no file system of one's own here: {error}")
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


def used_bytes(folder: Path) -> int:
    """Bytes in use on a disk, as the file system itself says: files without a name included."""
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def fill(path: Path) -> None:
    """Write a file until its disk has no room left."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
