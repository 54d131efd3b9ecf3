"""Temporary space on the very file system a root lies on, that no tier reads, and that is removed afterwards."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvtier.cli.temporary_folders import temporary_folder
from kvtier.errors import ConfigError

PREFIX = ".kvtier-bench-"


@contextmanager
def folder_beside(root: str) -> Iterator[str]:
    """A path for a temporary root on the file system of `root`. It does not exist yet, and its content is removed.

    It lies in a new folder beside the root, or inside the root where that is a mount or its parent cannot be written.
    What a killed tool left there is removed first. Raises ConfigError if there is no place to write.
    """
    parent = _parent_for(root)
    with ExitStack() as temporary:
        try:
            folder = temporary.enter_context(temporary_folder(PREFIX, parent))
        except OSError as error:
            raise ConfigError(f"{parent}: no temporary folder can be made there: {error.strerror}") from error
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
