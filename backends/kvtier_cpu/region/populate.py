"""Reserving the region's memory and touching it before the first request does, without ever risking a SIGBUS."""

import ctypes
import errno
import mmap
import os
import threading
from functools import cache

import numpy as np

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.errors import RegionError, SharedMemoryError
from kvtier_cpu.region.shared_region import Pages, Populated, RegionSpec

MADV_WIPEONFORK = 18
"""Linux 4.14; the mmap module does not name it."""
MADV_POPULATE_WRITE = 23
"""Linux 5.14; the mmap module does not name it."""
PIECE_BYTES = 64 << 20
RESERVE_PIECE_BYTES = 256 << 20
"""A fallocate call is undone by a signal; pieces keep what was reserved before it."""
HUGE_BYTES = 2 << 20
"""A huge page. Of those that were set aside each is a piece, so that an error names how many there were."""
MAX_THREADS = 4

_NO_MEMORY = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG, errno.EFAULT})


def reserve(fd: int, size_bytes: int, spec: RegionSpec, stop: threading.Event) -> None:
    """Make the kernel set every page of the file aside.

    Raises SharedMemoryError naming need and have; nothing has been touched then, and closing the file frees all.
    Raises RegionError once `stop` is set.
    """
    done = 0
    while done < size_bytes:
        _check(stop)
        piece = min(HUGE_BYTES if spec.reserved else RESERVE_PIECE_BYTES, size_bytes - done)
        try:
            os.posix_fallocate(fd, done, piece)
        except OSError as error:
            if error.errno in _NO_MEMORY:
                raise SharedMemoryError(size_bytes, done, spec.where) from error
            raise RegionError(f"{spec.where} cannot reserve memory for the region: {error.strerror}") from error
        done += piece


def make_resident(fd: int, pages: Pages, spec: RegionSpec, stop: threading.Event) -> Populated:
    """Reserve the memory of a fresh region, still all zero, and fill its page table from a few threads.

    Keeps no view of `pages`, so a caller can unmap them whatever happened. MADV_POPULATE_WRITE does both at once, each
    thread its own part, and reports a full mount as an error where a touch would be a SIGBUS; `posix_fallocate` works
    on one thread, and puts small pages in place where a mount gives huge ones only on advice. Private memory (fd -1)
    has no file to reserve, so it is always populated. Raises SharedMemoryError.
    """
    if spec.huge_pages:
        _madvise(pages, 0, len(pages), mmap.MADV_HUGEPAGE)  # refused where there are none; then small pages serve
    writes = fd < 0 or (spec.populate and _kernel_takes(MADV_POPULATE_WRITE))
    if not writes:
        reserve(fd, len(pages), spec, stop)
    return _populate(pages, spec, stop, writes) if writes or spec.populate else Populated.SKIPPED


def private_works() -> bool:
    """True if the kernel can keep private pages from a fork and make them resident, tried on one page."""
    return _kernel_takes(MADV_WIPEONFORK, MADV_POPULATE_WRITE)


def keep_from_forks(pages: Pages) -> None:
    """Give a forked child zeros in place of these private pages.

    A fork would share them until one side writes, and direct reads in flight would land in the wrong copy. Raises
    RegionError if the kernel refuses.
    """
    if code := _madvise(pages, 0, len(pages), MADV_WIPEONFORK):
        raise RegionError(f"private memory cannot be kept from a fork: {os.strerror(code)}")


def keep_from_core_dumps(pages: Pages) -> None:
    """Leave these pages out of core dumps: they hold the users' prompts, and hundreds of gigabytes.

    The advice belongs to the mapping, so every process gives it for its own. Raises RegionError if the kernel refuses.
    """
    if code := _madvise(pages, 0, len(pages), mmap.MADV_DONTDUMP):
        raise RegionError(f"rows cannot be kept from core dumps: {os.strerror(code)}; allow them with dump_rows: true")


def map_populated(pages: Pages) -> Populated:
    """Fill this process's page table for a region another process has made resident.

    Changes no byte. Where the kernel cannot do it the pages are mapped at first use.
    """
    refused = _madvise(pages, 0, len(pages), MADV_POPULATE_WRITE)
    return Populated.SKIPPED if refused else Populated.POPULATE_WRITE


def _populate(pages: Pages, spec: RegionSpec, stop: threading.Event, writes: bool) -> Populated:
    """Fill in parallel, piece by piece: by MADV_POPULATE_WRITE, or by touching pages unless `writes`.

    Raises SharedMemoryError if the kernel finds no memory after all.
    """
    errors: list[int] = []

    def fill(start: int) -> int:
        """Returns how many bytes it filled: none after an error, or once the region is not wanted."""
        length = min(PIECE_BYTES, len(pages) - start)
        if errors or stop.is_set():
            return 0
        if not writes:
            np.frombuffer(pages, dtype=np.uint8)[start : start + length : mmap.PAGESIZE] = 0
        elif code := _madvise(pages, start, length, MADV_POPULATE_WRITE):
            errors.append(code)
            return 0
        return length

    with DaemonPool("kvtier-populate", min(MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        pieces = [threads.submit(fill, start) for start in range(0, len(pages), PIECE_BYTES)]
        threads.shutdown()  # they end with their work, also where the waiting is interrupted
        filled = sum(piece.result() for piece in pieces)
    _check(stop)
    if errors:
        if errors[0] in _NO_MEMORY:
            raise SharedMemoryError(len(pages), filled, spec.where)
        raise RegionError(f"{spec.where} refused to populate the region: {os.strerror(errors[0])}")
    return Populated.POPULATE_WRITE if writes else Populated.TOUCHED


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise RegionError("opening the region was given up before it was ready")


def _kernel_takes(*advices: int) -> bool:
    """True if the kernel takes all this advice, tried on one private page."""
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        return not any(_madvise(page, 0, len(page), advice) for advice in advices)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _madvise(pages: Pages, start: int, length: int, advice: int) -> int:
    """madvise(2) with the GIL free (the mmap module holds it); returns 0 or an errno."""
    libc = _libc()
    # the array lives for this expression only: an exported view would keep the mapping from being closed
    address = np.frombuffer(pages, dtype=np.uint8).ctypes.data
    while libc.madvise(address + start, length, advice) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            return code
    return 0
