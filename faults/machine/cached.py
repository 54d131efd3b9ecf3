"""What of a file is in the page cache: the evidence of the kernel on whether I/O bypassed it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path


def cached_bytes(files: Iterable[Path]) -> int:
    """How many bytes of some files are in the page cache now."""
    inside = 0
    for path in files:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            inside += _resident(fd, os.fstat(fd).st_size) * mmap.PAGESIZE
        finally:
            os.close(fd)
    return inside


def _resident(fd: int, size: int) -> int:
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in pages)
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
