"""Lookups by headers alone, and removal of blocks that a reset made unreachable."""

import os
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.tier.block_age import AgeLimit
from kvtier.tier.block_envelope import SlotHeader
from kvtier_fs.shared.block_file import ExpectedBlock, header_now
from kvtier_fs.shared.folder import LockBusy, TreeFolder
from kvtier_fs.shared.root import SharedRoot

_VALIDATED_MAX = 1 << 16
_NOTHING = ((-1, -1), 0)


class Presence:
    """Answers lookups. A header found right is not read again while its file stays the same. Blocking calls."""

    def __init__(self, folder: TreeFolder, namespace: bytes) -> None:
        self._folder = folder
        self._namespace = namespace
        self._validated: dict[str, tuple[tuple[int, int], int]] = {}

    def probe(self, wanted: Sequence[ExpectedBlock | None], epoch: int) -> list[bool]:
        """For each block: True if its file is there, of the right length, with a header that is right.

        All False where the root states another epoch for the namespace. A file that cannot be read is not
        there.
        """
        try:
            current = self._folder.epoch(self._namespace)
        except OSError:
            return [False] * len(wanted)
        if current != epoch:
            return [False] * len(wanted)
        return [one is not None and self._present(one) for one in wanted]

    def _present(self, wanted: ExpectedBlock) -> bool:
        place = wanted.place
        try:
            with self._folder.leaf(place.bucket, place.leaf) as leaf:
                status = os.stat(place.name, dir_fd=leaf, follow_symlinks=False)
                seen = status.st_ino, wanted.header.epoch
                known, generation = self._validated.get(place.name, _NOTHING)
                if status.st_size == wanted.file_bytes and known == seen and wanted.ages.allows(generation):
                    return True
                header = header_now(leaf, wanted)
        except OSError:
            return False
        if not isinstance(header, SlotHeader) or header.epoch != wanted.header.epoch:
            return False
        if len(self._validated) >= _VALIDATED_MAX:
            self._validated.clear()
        self._validated[place.name] = seen, header.generation
        return True


async def prune(root: SharedRoot, namespace: bytes, epoch: int, ages: Callable[[], AgeLimit] = AgeLimit) -> None:
    """Remove blocks that a reset made unreachable, and those that are too old when their bucket's turn comes. What
    is busy or fails is evicted later, as the oldest."""
    for number in range(root.tree.buckets):
        bucket = root.buckets[number]
        try:
            pruned = await root.with_bucket(bucket, partial(bucket.prune, namespace, epoch, ages))
        except OSError as error:
            root.note_failure("prune", error)
            continue
        if not isinstance(pruned, LockBusy):
            root.counters["pruned"] += pruned
