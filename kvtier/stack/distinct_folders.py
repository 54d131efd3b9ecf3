"""The rule for the folders of a stack: each belongs to one tier, whatever links and mounts lead there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.errors import ConfigError, ResourceError
from kvtier.options import TierOptions, folders_of

Keyed = tuple[str, TierOptions]
"""The path of a tier's key, as `tiers[1]`, and the tier's options."""


async def check_folders(tiers: Sequence[Keyed], seconds: float) -> None:
    """Look at the folders on a thread. Raises ConfigError that names two keys of one folder, ResourceError when a
    file system does not answer in time."""
    if sum(len(folders_of(options)) for _, options in tiers) < 2:
        return
    pool = DaemonPool("kvtier-folders", 1)
    try:
        async with asyncio.timeout(seconds):
            problems = await pool.run(folder_problems, tiers)
    except TimeoutError:
        raise ResourceError(f"the folders of the tiers could not be compared within {seconds:g} s") from None
    except OSError as error:  # such as a system without a thread to give
        raise ResourceError(f"the folders of the tiers could not be compared: {error}") from error
    finally:
        pool.shutdown()
    for problem in problems:
        raise problem


def folder_problems(tiers: Sequence[Keyed], look: bool = True) -> list[ConfigError]:
    """A problem for each folder that an earlier key names already, under the path of its own key.

    With `look` this blocks, and compares what the paths lead to on this machine; a folder that is not there yet is
    known by the one that it would be made in. Without, it compares paths only. A folder inside another is no problem:
    either tier leaves alone what is not its own.
    """
    found: dict[object, str] = {}
    problems: list[ConfigError] = []
    for at, options in tiers:
        for folder in folders_of(options):
            key = ".".join(filter(None, (at, _key(options, folder))))
            place = _place(folder) if look else folder
            if place in found:
                problems.append(ConfigError(f"{folder} is the folder of {found[place]} too; give each its own", key))
            else:
                found[place] = key
    return problems


def _key(options: TierOptions, folder: str) -> str:
    """The option that names a folder; empty where none does literally."""
    for name in type(options).model_fields:
        value = getattr(options, name)
        if value == folder:
            return name
        if isinstance(value, list | tuple) and folder in value:
            return f"{name}[{value.index(folder)}]"
    return ""


def _place(folder: str) -> tuple[int, int, str]:
    """(device, inode, the rest of the path) of the nearest folder that is there, links followed."""
    there, rest = os.path.realpath(folder), ""
    while True:
        try:
            status = os.stat(there)
        except OSError:
            if there == os.sep:
                raise
            there, name = os.path.split(there)
            rest = os.path.join(name, rest)
        else:
            return status.st_dev, status.st_ino, rest
