"""Huge pages for rows in shared memory: a mapping that has place for them, and a thread that makes them.

A host gives huge pages to a memfd at once only where its setting `shmem_enabled` says so, which is `never` on most, or
from those that it has set aside (`MFD_HUGETLB`).
`MADV_COLLAPSE` (Linux 6.1) makes them of pages that are there, without privileges and also while rows are used. A page
that I/O or a device has pinned just now cannot be moved, and is tried again.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import re
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from kvtier_cpu.region.populate import HUGE_BYTES

MADV_COLLAPSE = 25
LOWEST_PRIORITY = 19
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1.0, 60.0
"""Between two rounds over the pages that could not be moved."""
JOIN_SECONDS = 5.0
_PROT_NONE, _NORESERVE, _FIXED = 0, 0x4000, 0x10
_FAILED = ctypes.c_void_p(-1).value
_HUGE_FIELDS = ("ShmemPmdMapped:", "FilePmdMapped:", "AnonHugePages:", "Shared_Hugetlb:", "Private_Hugetlb:")
_LATER = (errno.EAGAIN, errno.EBUSY, errno.ENOMEM, errno.EINTR)

_log = logging.getLogger(__name__)


@cache
def _libc() -> ctypes.CDLL:
    """Calls with the GIL free."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def file_bytes(fd: int, size_bytes: int) -> int:
    """The length of a file for so many bytes: over huge pages that were set aside it is a multiple of them."""
    page = os.fstatvfs(fd).f_bsize
    return -(-size_bytes // page) * page if page >= HUGE_BYTES else size_bytes


def map_aligned(fd: int, size_bytes: int, writable: bool = True) -> Any:
    """A shared mapping of a file at a multiple of 2 MiB, as an object that is a buffer. Raises OSError.

    It is unmapped when the last view of it is gone. Of huge pages that were set aside it has whole ones. A write into
    one that is not `writable` ends the process.
    """
    size_bytes = file_bytes(fd, size_bytes)
    length = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    reserved = _map(None, length + HUGE_BYTES, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
    base = -(-reserved // HUGE_BYTES) * HUGE_BYTES
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _map(base, length, protection, mmap.MAP_SHARED | _FIXED, fd)
    except OSError:
        _libc().munmap(reserved, length + HUGE_BYTES)
        raise
    for start, end in ((reserved, base), (base + length, reserved + length + HUGE_BYTES)):
        if start < end:
            _libc().munmap(start, end - start)
    pages = (ctypes.c_char * size_bytes).from_address(base)
    weakref.finalize(pages, _libc().munmap, base, length).atexit = False  # threads may use it until the very end
    return pages


def _map(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    found = _libc().mmap(address, length, protection, flags, fd, 0)
    if found == _FAILED or found is None:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


def huge_bytes(pages: Any) -> int:
    """The bytes of a mapping that are in huge pages, as far as this process has touched them."""
    begin = np.frombuffer(pages, dtype=np.uint8).ctypes.data
    found, inside = 0, False
    with suppress(OSError), open("/proc/self/smaps") as file:
        for line in file:
            if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = begin <= int(head[1], 16) < begin + len(pages)
            elif inside and line.startswith(_HUGE_FIELDS):
                found += int(line.split()[1]) << 10
    return found


class HugePages:
    """A thread that makes huge pages of the resident pages of a mapping, from its begin on, at the lowest priority.

    `share` is that of the mapping's bytes in huge pages. Without Linux 6.1 nothing changes, and the log has one line.
    """

    def __init__(self, pages: Any, name: str) -> None:
        self._pages = pages
        self._name = name
        self._begin = np.frombuffer(pages, dtype=np.uint8).ctypes.data
        self._count = len(pages) // HUGE_BYTES
        self._done = bytearray(self._count)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-huge-pages", daemon=True)

    @property
    def share(self) -> float:
        """The share of the bytes that are in huge pages; 1.0 where there is no place for one."""
        return sum(self._done) / self._count if self._count else 1.0

    def open(self) -> None:
        """Begin. Where the system has no thread to give the pages stay small, with one line in the log."""
        try:
            self._thread.start()
        except RuntimeError as error:
            _log.warning("%s: no huge pages are made: %s", self._name, error)

    def close(self) -> None:
        """End, with a page that is being made. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)

    def wait(self, timeout_seconds: float) -> bool:
        """True once the thread has nothing more to do; False when the time is over."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError):  # a container may refuse it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        if huge_bytes(self._pages) >= self._count * HUGE_BYTES:  # as the host's setting may have it
            self._done = bytearray(b"\x01" * self._count)
        began, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while (code := self._make_round()) in _LATER:
            if self._stop.wait(pause):
                return
            pause = min(2 * pause, LAST_PAUSE_SECONDS)
        if code == errno.ECANCELED:
            return
        if code:
            _log.warning(
                "%s: rows have pages of 4 KiB (%s); direct reads into them take about twice the CPU: a Linux from 6.1 "
                "on, or shmem_enabled set to advise, gives huge ones",
                self._name,
                os.strerror(code),
            )
        else:
            _log.info(
                "event=huge_pages tier=%s share=%.3f seconds=%.1f", self._name, self.share, time.monotonic() - began
            )

    def _make_round(self) -> int:
        """Try each page that is not huge yet. 0 once all are, else an errno: of those to be tried again, or final."""
        later = 0
        for at in range(self._count):
            if self._stop.is_set():
                return errno.ECANCELED
            if self._done[at]:
                continue
            code = 0
            if _libc().madvise(self._begin + at * HUGE_BYTES, HUGE_BYTES, MADV_COLLAPSE):
                code = ctypes.get_errno()
            if not code:
                self._done[at] = 1
            elif code in _LATER:
                later = code
            else:
                return code
        return later
