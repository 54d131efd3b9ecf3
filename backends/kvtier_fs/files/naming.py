"""Giving a whole temporary its name, without taking anybody else's: one system call the standard library lacks."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from typing import Any

_NOREPLACE = 1
_NO_SUPPORT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@cache
def _renameat2() -> Callable[..., Any] | None:
    found: Callable[..., Any] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return found


def rename_new(old: str, new: str, old_folder_fd: int, new_folder_fd: int) -> bool:
    """Rename a file to a name that nobody has. False, with nothing done, where the file system cannot promise that.

    Raises FileExistsError if the name is taken, OSError for what else the disk does.
    """
    call = _renameat2()
    while call is not None:
        if call(old_folder_fd, os.fsencode(old), new_folder_fd, os.fsencode(new), _NOREPLACE) == 0:
            return True
        number = ctypes.get_errno()
        if number in _NO_SUPPORT:
            break
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), new)
    return False
