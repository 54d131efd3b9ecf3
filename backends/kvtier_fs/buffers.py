"""Aligned header pages for I/O: one stretch of memory, handed out page by page."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np


class HeaderPages:
    """`count` pages of `page_bytes`, aligned to their size (a power of two); each has one holder at a time.

    There is nothing to close: the memory goes when nobody, an engine with I/O under way included, holds a page.
    """

    def __init__(self, count: int, page_bytes: int) -> None:
        view = memoryview(mmap.mmap(-1, (count + 1) * page_bytes))
        base = _address(view)
        start = -base % page_bytes
        places = range(start, start + count * page_bytes, page_bytes)
        self.pages = [view[at : at + page_bytes] for at in places]
        self.addresses = [base + at for at in places]
        self._free = list(range(count))

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def acquire(self) -> int:
        """The number of a free page; its bytes are whatever its last holder left. IndexError if there is none."""
        return self._free.pop()

    def release(self, number: int) -> None:
        """Give a page back, once no I/O uses it any more."""
        self._free.append(number)

    def acquire_all(self, count: int) -> list[int]:
        """The numbers of `count` free pages. IndexError if there are not so many."""
        return [self._free.pop() for _ in range(count)]

    def release_all(self, numbers: Sequence[int]) -> None:
        """Give pages back, once no I/O uses them any more."""
        self._free.extend(numbers)


def _address(view: memoryview) -> int:
    """Where a buffer lies in memory."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
