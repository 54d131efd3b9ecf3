"""What is there and what need not be: quick looks at headers, and removal of blocks that a reset made unreachable."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from functools import partial

from kvtier_fs.files.blockfile import Wanted, header_now
from kvtier_fs.files.folder import Busy, TreeFolder, let_go, open_plain
from kvtier_fs.files.root import SharedRoot
from kvtier_fs.slot import SlotHeader, decode_slot_header

_VALIDATED_MAX = 1 << 16


class Presence:
    """Answers lookups. A header found right is not read again while its file stays the same. Blocking calls."""

    def __init__(self, folder: TreeFolder, namespace: bytes) -> None:
        self._folder = folder
        self._namespace = namespace
        self._validated: dict[str, tuple[int, int]] = {}

    def look(self, wanted: Sequence[Wanted | None], epoch: int) -> list[bool]:
        """For each block: True if its file is there, of the right length, with a header that is right.

        All False where the root states another epoch for the namespace. A file that cannot be looked at is not
        there.
        """
        try:
            current = self._folder.epoch(self._namespace)
        except OSError:
            return [False] * len(wanted)
        if current != epoch:
            return [False] * len(wanted)
        return [one is not None and self._present(one) for one in wanted]

    def _present(self, wanted: Wanted) -> bool:
        place = wanted.place
        try:
            with self._folder.leaf(place.bucket, place.leaf) as leaf:
                status = os.stat(place.name, dir_fd=leaf, follow_symlinks=False)
                seen = status.st_ino, wanted.header.epoch
                if status.st_size == wanted.file_bytes and self._validated.get(place.name) == seen:
                    return True
                header = header_now(leaf, wanted)
        except OSError:
            return False
        if not isinstance(header, SlotHeader) or header.epoch != wanted.header.epoch:
            return False
        if len(self._validated) >= _VALIDATED_MAX:
            self._validated.clear()
        self._validated[place.name] = seen
        return True


def outdated(folder_fd: int, name: str, header_bytes: int, namespace: bytes, epoch: int) -> bool:
    """True if a file is a whole block header of a namespace, of an epoch before `epoch`."""
    try:
        fd = open_plain(folder_fd, name, os.O_RDONLY)
    except OSError:
        return False
    try:
        header = decode_slot_header(memoryview(os.pread(fd, header_bytes, 0)))
    except OSError:
        return False
    finally:
        let_go(fd)
    return header is not None and header.namespace == namespace and header.epoch < epoch


async def prune(root: SharedRoot, namespace: bytes, epoch: int) -> None:
    """Free the room of blocks that a reset made unreachable. What is busy or fails goes later, as the oldest."""

    def stale(folder_fd: int, name: str) -> bool:
        return outdated(folder_fd, name, root.tree.header_bytes, namespace, epoch)

    for number in range(root.tree.buckets):
        bucket = root.bucket(number)
        try:
            pruned = await root.visit(bucket, partial(bucket.prune, stale))
        except OSError as error:
            root.counters[f"prune.{errno.errorcode.get(error.errno or 0, 'EIO')}"] += 1
            continue
        if not isinstance(pruned, Busy):
            root.counters["pruned"] += pruned
