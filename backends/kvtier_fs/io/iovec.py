"""I/O vectors that are used again and again.

The liburing package never lets go of the buffers an `Iovec` was made from (2026.3.30: its type has no traverse and no
release), so a vector for each request would keep every row mapped for ever and leak about 190 bytes a request. Here a
few vectors are made once, over memory that may stay, and pointed at a request's buffers in place. The package offers no
way to do that, so the object is written through ctypes, after checking that it is laid out as its source says.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

from kvtier.errors import ResourceError
from kvtier_fs.io.contract import MAX_BUFFERS


class _Part(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class _Object(ctypes.Structure):
    """The package's `Iovec` as CPython holds it: the object's head, then the length and the parts."""

    _fields_ = [("head", ctypes.c_char * object.__basicsize__), ("length", ctypes.c_size_t), ("parts", ctypes.c_void_p)]


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class Vector:
    """One `Iovec` for one request at a time. The caller keeps the buffers alive until the request ended."""

    __slots__ = ("_memory", "_object", "_parts", "_words", "iovec")

    def __init__(self, iovec_type: Any) -> None:
        """Raises ResourceError if the package's object is not laid out as expected."""
        self._memory = memoryview(bytearray(8))
        self.iovec = iovec_type([self._memory] * MAX_BUFFERS)
        self._object = _Object.from_address(id(self.iovec))
        if type(self.iovec).__basicsize__ < ctypes.sizeof(_Object) or self._object.length != MAX_BUFFERS:
            raise ResourceError("the liburing package lays its vectors out in an unknown way")
        self._parts = (_Part * MAX_BUFFERS).from_address(self._object.parts)
        if any((part.base, part.length) != (_address(self._memory), 8) for part in self._parts):
            raise ResourceError("the liburing package lays its vectors out in an unknown way")
        self._words = memoryview(self._parts).cast("B").cast("Q")

    def point(self, buffers: Sequence[memoryview], places: array[int] | None = None) -> None:
        """Let the vector name these writable buffers, at most MAX_BUFFERS.

        `places` are their addresses and lengths in turn, as 64-bit words. If they are given, they are not looked up.
        """
        self._object.length = len(buffers)
        if places is not None:
            self._words[: len(places)] = memoryview(places)
            return
        parts = self._parts
        for i, buffer in enumerate(buffers):
            part = parts[i]
            part.base = _address(buffer)
            part.length = buffer.nbytes
