"""Answers of servers, held to bounds before they are used: type, size, number, and time."""

from __future__ import annotations

import errno
import logging
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

NUMBER_MAX = 1 << 62
"""No server has more bytes, names or events."""
_DIGITS_MAX = 19
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""Exceptions of code and client libraries that take apart an answer of another kind than they expect."""
_PANIC = "RustPanic"
"""The class, which cannot be imported, of what a client library written in Rust raises for a defect of its own."""
_log = logging.getLogger("kvtier.remote")
_seen: set[tuple[str, str, int | None]] = set()
"""Places in the code where an answer could not be read, each of which is logged once."""


def bad_answer() -> OSError:
    """The error for an answer of another kind than was requested. Its text is not kept: servers write it."""
    return OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))


@contextmanager
def reading_answers() -> Iterator[None]:
    """Raise OSError (EBADMSG) for whatever is wrong with an answer that is taken apart inside.

    The log names the place in the code once, for a defect of this code raises the same errors.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, _UNREADABLE) and type(error).__name__ != _PANIC:
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = type(error).__name__, os.path.basename(last.filename), last.lineno
        if place not in _seen:
            _seen.add(place)
            _log.warning("an answer of a server could not be read (%s, %s:%s)", *place)
        raise bad_answer() from None


def number(answer: object, most: int = NUMBER_MAX) -> int:
    """A number from 0 to `most`. Raises OSError for anything else."""
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer <= most:
        raise bad_answer()
    return answer


def digits(text: str) -> int:
    """A number that is written in decimal digits. Raises OSError for anything else."""
    if not (text.isascii() and text.isdigit()) or len(text) > _DIGITS_MAX:
        raise bad_answer()
    return number(int(text))


def bytes_of(answer: object, most: int) -> bytes:
    """A string of at most `most` bytes. Raises OSError for anything else."""
    if not isinstance(answer, bytes | bytearray) or len(answer) > most:
        raise bad_answer()
    return bytes(answer)


def items_of(answer: object, least: int, most: int) -> Sequence[Any]:
    """A list of `least` to `most` items. Raises OSError for anything else."""
    if not isinstance(answer, list | tuple) or not least <= len(answer) <= most:
        raise bad_answer()
    return answer


class Deadline:
    """The time that questions after one another may take together."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        """Seconds that are left; below 0 afterwards."""
        return self._at - time.monotonic()

    def check(self) -> None:
        """Raises OSError (ETIMEDOUT) afterwards."""
        if self.left_seconds <= 0:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
