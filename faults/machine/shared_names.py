"""The names in shared memory that one process makes. A look at /dev/shm shows those of every process of the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache

_PREFIX = "/dev/shm/kvtier"


def record_names(record: Callable[[str], object]) -> None:
    """Call `record` with the path of each file that this process makes under a name of kvtier, from now on.

    A process forked from this one calls its own copy of `record`. This cannot be turned off again.
    """

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("os.link", "os.rename"):
            path: object = arguments[1]
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT:
            path = arguments[0]
        else:
            return
        if isinstance(path, str) and path.startswith(_PREFIX):
            record(path)

    sys.addaudithook(hook)


@cache
def _made() -> set[str]:
    names: set[str] = set()
    record_names(names.add)
    return names


def names_left() -> list[str]:
    """The names that this process has made since its first call of this function, and that exist now."""
    return sorted(filter(os.path.lexists, _made()))
