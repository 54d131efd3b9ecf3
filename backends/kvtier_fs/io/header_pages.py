"""Aligned header pages for I/O: one stretch of memory, handed out page by page."""

import mmap

import numpy as np


class HeaderPages:
    """`count` pages of `page_bytes`, aligned to their size (a power of two); each has one holder at a time.

    `free` holds the numbers of the pages without a holder. There is nothing to close: the memory is unmapped when no
    view of a page is left, in an engine with I/O in flight included.
    """

    def __init__(self, count: int, page_bytes: int) -> None:
        view = memoryview(mmap.mmap(-1, (count + 1) * page_bytes))
        base = _address(view)
        start = -base % page_bytes
        places = range(start, start + count * page_bytes, page_bytes)
        self.pages = [view[at : at + page_bytes] for at in places]
        self.addresses = [base + at for at in places]
        self.free = list(range(count))

    def acquire(self) -> int:
        """The number of a free page; its bytes are whatever its last holder left. IndexError if there is none."""
        return self.free.pop()

    def release(self, number: int) -> None:
        """Give a page back, once no I/O uses it any more."""
        self.free.append(number)

    def acquire_all(self, count: int) -> list[int]:
        """The numbers of `count` free pages. IndexError if there are not so many."""
        if not 0 < count <= len(self.free):
            raise IndexError(f"{count} pages were asked for, {len(self.free)} are free")
        taken = self.free[-count:]
        del self.free[-count:]
        return taken


def _address(view: memoryview) -> int:
    """Where a buffer lies in memory."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
