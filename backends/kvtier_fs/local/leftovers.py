"""Folders that an earlier configuration with another number of engines left beside a root. Blocking calls.

Their bytes are part of no capacity. One whose own record names the same source, and that no process uses, is removed.
"""

import os
import re
import shlex
from contextlib import suppress
from enum import Enum

from kvtier.errors import RootError
from kvtier.options import size_text
from kvtier_fs.local.folder import SlabFolder
from kvtier_fs.options import FSOptions
from kvtier_fs.roots.folder import LOCK_NAME, SUPERBLOCK_NAME

_SHOWN = 3
_LAST = (SUPERBLOCK_NAME, LOCK_NAME)
"""What is removed last: by these the rest of a folder is found again after a crash."""


class _Left(Enum):
    """What became of a folder that may be left over, in words."""

    REMOVED = "removed: an earlier configuration with another number of engines had left it"
    USED = "still in use by an engine of an earlier configuration, beyond the capacity; a later start removes it"
    STRANGE = "left by an earlier configuration, and it holds files of others too"
    FAILED = "left by an earlier configuration, and it could not be removed whole"
    UNKNOWN = "no part of the capacity, and perhaps left by an earlier configuration with another number of engines"

    @property
    def is_named_only(self) -> bool:
        """True if it is for a person to remove it."""
        return self not in (_Left.REMOVED, _Left.USED)


def remove_leftovers(root: str, options: FSOptions) -> list[str]:
    """Remove what an earlier configuration left of the source of a root. Returns notes, of removed folders and of
    those of which too little is known. Never raises."""
    source, found = options.source(root), dict[_Left, list[tuple[str, int]]]()
    for path in _candidates(source, options):
        left, size = _remove(path, source, options)
        if left is not None:
            found.setdefault(left, []).append((shlex.quote(path), size))
    return [_note(left, folders) for left, folders in found.items()]


def _note(left: _Left, folders: list[tuple[str, int]]) -> str:
    shown = ", ".join(f"{path} ({size_text(size)})" for path, size in folders[:_SHOWN])
    more = f" and {len(folders) - _SHOWN} more" if len(folders) > _SHOWN else ""
    command = f"; if nothing uses it: rm -r {' '.join(path for path, _ in folders[:_SHOWN])}"
    return f"{shown}{more}: {left.value}{command if left.is_named_only else ''}"


def _candidates(source: str, options: FSOptions) -> list[str]:
    """The places of the shares of a source, and its own, but for those that today's engines use."""
    parent, name = os.path.split(source)
    shares = re.compile(rf"{re.escape(name)}-(0|[1-9][0-9]{{0,3}})")
    try:
        names = os.listdir(parent)
    except OSError:
        return []  # what cannot be listed has had its root opened by name
    numbers = sorted(int(match[1]) for match in map(shares.fullmatch, names) if match)
    first = options.engines if options.engines > 1 else 0
    places = [f"{source}-{number}" for number in numbers if number >= first]
    if options.engines > 1:
        places.append(source)
    return [path for path in places if path not in options.roots]


def _remove(path: str, source: str, options: FSOptions) -> tuple[_Left | None, int]:
    """What became of a folder, and its bytes of disk; None for one that is no root, or that another stack uses."""
    folder = SlabFolder(path, options.model_copy(update={"create": False}))
    size = 0
    try:
        if not folder.enter():
            return None, 0
        names = os.listdir(folder.fd)
        size = sum(os.stat(name, dir_fd=folder.fd, follow_symlinks=False).st_blocks * 512 for name in names)
        if SUPERBLOCK_NAME not in names and folder.recorded_source() != source:
            return None, size
        recorded = folder.recorded_source() == source
        if not folder.try_lock(shared=not recorded):
            return (_Left.USED if recorded else None), size
        return (_remove_locked(folder, names, source) if recorded else _Left.UNKNOWN), size
    except (RootError, FileNotFoundError):
        return None, 0  # another's, or another engine of this configuration removes it
    except OSError:
        return _Left.FAILED, size
    finally:
        folder.leave()


def _remove_locked(folder: SlabFolder, names: list[str], source: str) -> _Left | None:
    if folder.recorded_source() != source:
        return None  # it was opened for something else until just now
    if not all(map(folder.is_own, names)):
        return _Left.STRANGE
    for name in sorted(names, key=lambda name: _LAST.index(name) if name in _LAST else -1):
        folder.unlink(name)
    with suppress(OSError):  # its parent may not be this user's; it is empty
        os.rmdir(folder.path)
    return _Left.REMOVED
