"""Temporary space on the very file system a root lies on, that no tier looks into, and that is gone afterwards."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvtier.errors import ConfigError

PREFIX = ".kvtier-bench-"


@contextmanager
def folder_beside(root: str) -> Iterator[str]:
    """The path for a root of our own on the file system of `root`, not there yet; whatever is put there is removed.

    It lies in a new folder beside the root, or inside the root where that is a mount or its parent cannot be written.
    What a killed measurement left there is removed first. Raises ConfigError if there is no place to write.
    """
    parent = _parent_for(root)
    _sweep(parent)
    folder = os.path.join(parent, PREFIX + secrets.token_hex(8))
    try:
        os.mkdir(folder, 0o700)
    except OSError as error:
        raise ConfigError(f"{parent}: no temporary folder can be made there: {error.strerror}") from error
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        undo.callback(os.close, fd)
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
    """Remove folders of ours that nobody holds the lock of any more."""
    for name in os.listdir(parent):
        if not name.startswith(PREFIX):
            continue
        folder = os.path.join(parent, name)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
