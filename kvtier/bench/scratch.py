"""Temporary space on the very file system a root lies on, that no tier reads, and that is removed afterwards."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvtier.errors import ConfigError

PREFIX = ".kvtier-bench-"


@contextmanager
def folder_beside(root: str) -> Iterator[str]:
    """A path for a temporary root on the file system of `root`. It does not exist yet, and its content is removed.

    It lies in a new folder beside the root, or inside the root where that is a mount or its parent cannot be written.
    What a killed measurement left there is removed first. Raises ConfigError if there is no place to write.
    """
    parent = _parent_for(root)
    _sweep(parent)
    try:
        temporary = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(f"{parent}: no temporary folder can be made there: {error.strerror}") from error
    with temporary as folder, _directory(folder) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield os.path.join(folder, "root")


def _parent_for(root: str) -> str:
    parent = os.path.dirname(root)
    try:
        beside = os.stat(parent).st_dev
    except OSError as error:
        raise ConfigError(f"{root} cannot be reached: {parent}: {error.strerror}; mount the disk") from error
    try:
        here = os.stat(root).st_dev
    except OSError:
        return parent
    return parent if here == beside and os.access(parent, os.W_OK | os.X_OK) else root


def _sweep(parent: str) -> None:
    """Remove folders of earlier measurements whose lock is free: their process has ended."""
    for name in os.listdir(parent):
        if not name.startswith(PREFIX):
            continue
        folder = os.path.join(parent, name)
        with suppress(OSError), _directory(folder) as fd:  # a link, or a measurement that still runs
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _directory(path: str) -> Iterator[int]:
    """The descriptor of a directory that is no link."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
