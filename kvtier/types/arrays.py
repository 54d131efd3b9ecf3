"""Arrays of ids: int64, contiguous."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError

IntArray = npt.NDArray[np.int64]


def int_array(values: Sequence[int] | IntArray) -> IntArray:
    """A contiguous int64 array of ids, always a new one: the caller may go on to use its own, such as a block table,
    while the ids wait for a copy. Raises UsageError for what are no whole numbers."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise UsageError(f"ids are whole numbers in a sequence: {error}") from error
    if array.dtype.kind not in "iu" and (array.size or not array.ndim):
        raise UsageError(f"ids are whole numbers, and not {array.dtype}")
    return np.array(array, dtype=np.int64, order="C")


def distinct(values: IntArray) -> IntArray:
    """The distinct values, ascending.

    Not `np.unique`: from 2.3 on it releases the GIL inside C++, and a daemon thread that is in it when the interpreter
    exits aborts the whole process ("terminate called without an active exception").
    """
    ordered = np.sort(values)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))] if len(ordered) else ordered


NO_IDS: IntArray = int_array(())
