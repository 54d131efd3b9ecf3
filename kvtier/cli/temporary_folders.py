"""Temporary folders that show whether their process lives, so that those of killed processes are removed.

A folder holds a locked file as long as its process, or a process forked from it, lives. A folder whose lock is free was
abandoned. A creator that is overtaken between making the folder and locking it makes another one.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice

LOCK_NAME = ".kvtier-temporary"
NAMES_MAX = 1 << 16
"""Names that a search for abandoned folders reads, at most: others may put any number there."""
_ATTEMPTS = 100
_NAME = re.compile(r"\.?kvtier-[a-z]+-[a-z0-9_]{8}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def temporary_folder(prefix: str, parent: str | os.PathLike[str] | None = None) -> Iterator[str]:
    """A new folder in `parent` (the system's folder for temporary files if None), removed at the end with its content.

    `prefix` is `kvtier-`, a word and `-`, or hidden by a dot before them. What killed processes left in `parent` is
    removed first. Raises OSError if no folder can be made there.
    """
    parent = tempfile.gettempdir() if parent is None else os.fspath(parent)
    for abandoned in abandoned_folders(parent):
        remove_abandoned(abandoned)
    folder, lock = _make(prefix, parent)
    try:
        yield folder
    finally:
        with suppress(OSError), _open_folder(folder) as fd:
            _empty(folder, fd)
        os.close(lock)


def abandoned_folders(parent: str) -> list[str]:
    """The folders in `parent` whose process is gone, in order; empty if it cannot be listed. Changes nothing."""
    try:
        with os.scandir(parent) as entries:
            named = [entry.path for entry in islice(entries, NAMES_MAX) if _NAME.fullmatch(entry.name)]
    except OSError:
        return []
    return [folder for folder in sorted(named) if _visit(folder, remove=False)]


def remove_abandoned(folder: str) -> bool:
    """Remove a folder with its content if its process is gone. False, with nothing done, if it lives or if the folder
    is none of ours, and False if something of it stays."""
    return _visit(folder, remove=True)


def _make(prefix: str, parent: str) -> tuple[str, int]:
    """A folder, and the descriptor of the lock in it."""
    for _ in range(_ATTEMPTS):
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        try:
            lock = os.open(os.path.join(folder, LOCK_NAME), _LOCK | os.O_CREAT | os.O_EXCL, 0o600)
            if _try_lock(lock):
                return folder, lock
        except (FileNotFoundError, BlockingIOError):  # another process took it for an abandoned one
            continue
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    raise OSError(errno.EAGAIN, "every temporary folder was removed at once")


def _try_lock(lock: int) -> bool:
    """Lock an open lock file; it is closed unless this returns True. False if it was removed meanwhile."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    if not os.fstat(lock).st_nlink:
        os.close(lock)
        return False
    return True


def _visit(folder: str, remove: bool) -> bool:
    """True if a folder was abandoned; with `remove`, if it was and is gone."""
    with suppress(OSError), _open_folder(folder) as fd:
        if os.fstat(fd).st_uid != os.geteuid():
            return False
        with suppress(FileNotFoundError):
            lock = os.open(LOCK_NAME, _LOCK, dir_fd=fd)
            if not _try_lock(lock):
                return False
            try:
                return stat.S_ISREG(os.fstat(lock).st_mode) and (not remove or _empty(folder, fd))
            finally:
                os.close(lock)
        # without a lock: killed, or overtaken, before it was made, or no folder of ours
        if remove:
            os.rmdir(folder)
        return remove or not os.listdir(fd)
    return False


def _empty(folder: str, fd: int) -> bool:
    """Remove a folder whose lock this process holds, the lock last. False if something stays, the lock with it."""
    for name in set(os.listdir(fd)) - {LOCK_NAME}:
        shutil.rmtree(name, ignore_errors=True, dir_fd=fd)
        with suppress(OSError):  # it was no folder
            os.unlink(name, dir_fd=fd)
    if os.listdir(fd) != [LOCK_NAME]:
        return False
    os.unlink(LOCK_NAME, dir_fd=fd)
    os.rmdir(folder)
    return True


@contextmanager
def _open_folder(folder: str) -> Iterator[int]:
    """The descriptor of a folder that is no link."""
    fd = os.open(folder, _FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)
