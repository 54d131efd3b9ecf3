"""Stores and files of the ranks of earlier releases: each rank had a stack and a part of each folder of its own.

The ranks of a launch share one stack process now, which uses the folders of the stack file itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from kvtier.config.load import StackConfig
from kvtier.errors import RootError
from kvtier.options import SharesHost, TierOptions, folders_of, in_folders, share_of, size_text
from kvtier.tier.inspection import Access, Inspectors, find_store

RANKS_MAX = 256
"""Ranks that are looked for, from 0 on."""


def adopt_ranks(config: StackConfig, say: Callable[[str], None]) -> StackConfig:
    """The stack, with the roots of a tier's one earlier rank in the place of its own where it has none yet.

    `say` is given a line for each store or file of a rank, with its size. One that a process uses is let alone.
    """
    tiers = tuple(_with_ranks(options, say) for options in config.tiers)
    for key, path in _files(config):
        for left in _ranks_of(lambda index, path=path: f"{path}-{index}"):  # type: ignore[misc]
            say(f"{key}: {left} ({size_text(_size(left))}) is of a rank of an earlier release and not used; remove it")
    return config.model_copy(update={"tiers": tiers})


def _files(config: StackConfig) -> Iterator[tuple[str, str]]:
    for key in ("state_dir", "stats_socket"):
        if path := getattr(config, key):
            yield key, path
    if config.record is not None:
        yield "record", config.record.folder


def _ranks_of(path: Callable[[int], str]) -> list[str]:
    return [found for index in range(RANKS_MAX) if os.path.lexists(found := path(index))]


def _with_ranks(options: TierOptions, say: Callable[[str], None]) -> TierOptions:
    if not isinstance(options, SharesHost) or not folders_of(options):
        return options
    ranks = [folders for index in range(RANKS_MAX) if any(map(os.path.lexists, folders := _folders(options, index)))]
    stores = [folders for folders in ranks if _is_idle_store(folders)]
    if len(ranks) == len(stores) == 1 and all(map(_is_empty, folders_of(options))):
        (adopted,) = stores
        say(f"{', '.join(adopted)} ({size_text(sum(map(_size, adopted)))}), of a rank of an earlier release, is used")
        return in_folders(options, adopted)
    for folders in stores:
        for root in folders:
            say(
                f"{root} ({size_text(_size(root))}) is of a rank of an earlier release and not used: drop it with "
                f"`kvtier gc {root} --older-than 1s`, then remove the folder"
            )
    return options


def _folders(options: TierOptions, index: int) -> Sequence[str]:
    """The folders that a rank had. The same as without ranks for a tier that has no part for each."""
    folders = folders_of(share_of(options, index, index + 2))
    return () if folders == folders_of(options) else folders


def _is_idle_store(folders: Sequence[str]) -> bool:
    """True if each folder holds blocks and no process uses it."""
    return all(map(_is_idle, folders))


def _is_idle(root: str) -> bool:
    try:
        store = find_store(root, Access.READ, Inspectors.find())
    except RootError:
        return False
    try:
        return not store.about.owner
    finally:
        store.close()


def _is_empty(root: str) -> bool:
    """True if there is nothing at a root's place, or an empty folder."""
    try:
        return not os.listdir(root)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _size(path: str) -> int:
    """The bytes that a file or a folder takes on its disk."""
    files = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names] or [path]
    return sum(_blocks(file) for file in files)


def _blocks(file: str) -> int:
    try:
        return os.lstat(file).st_blocks * 512
    except FileNotFoundError:  # removed meanwhile
        return 0
