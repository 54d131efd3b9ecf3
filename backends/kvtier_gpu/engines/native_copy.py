"""The compiled loop over scattered pieces of memory, if this installation has it."""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np

from kvtier.types.arrays import IntArray

CopyScattered = Callable[[IntArray, IntArray, IntArray], None]
"""Copy `lengths[i]` bytes to address `to[i]` from address `from[i]`, all in one call without the GIL."""

LIBRARY = Path(__file__).with_name("native_copy.native.so")  # a name that no import machinery takes for a module


_int64 = partial(np.ascontiguousarray, dtype=np.int64)


@cache
def load() -> CopyScattered | None:
    """The compiled loop; None where there was no compiler when kvtier was installed."""
    try:
        function = ctypes.CDLL(str(LIBRARY)).kvtier_copy_scattered
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = None

    def copy(to: IntArray, source: IntArray, lengths: IntArray) -> None:
        if not len(to) == len(source) == len(lengths):
            raise ValueError(f"{len(to)} targets, {len(source)} sources, {len(lengths)} lengths")
        to, source, lengths = map(_int64, (to, source, lengths))
        function(len(to), to.ctypes.data, source.ctypes.data, lengths.ctypes.data)

    return copy
