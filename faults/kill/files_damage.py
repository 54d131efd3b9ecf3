"""Damage for layout `files`: temporaries of the dead are torn and written into late, published blocks lose sectors."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path

from kvtier_fs.shared.paths import BLOCK_NAME

from .damage import Lost, mixed
from .shared_log import SharedLog, Word
from .world import World


class FilesLate:
    """Late writes into files that the dead victim had open; the sweep has taken their names away by then."""

    def __init__(self, lost: list[tuple[int, Lost]]) -> None:
        self.waiting = lost
        self.landed = self.landed_after_reuse = 0

    def look(self, log: SharedLog) -> None:
        """Land everything once the living victim has swept and has stored something."""
        words = log.words
        if self.waiting and words[Word.SWEPT] and words[Word.STORED]:
            self.landed_after_reuse = len(self.waiting)
            self._land()

    def _land(self) -> None:
        self.landed += len(self.waiting)
        for fd, one in self.waiting:
            os.pwrite(fd, one.data, one.offset)
            os.close(fd)
        self.waiting = []

    def finish(self) -> None:
        """Land the rest."""
        self._land()


class BlockFiles:
    """The files of a world, found by inode, which is what victims note."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _by_inode(self) -> dict[int, Path]:
        found = {}
        for bucket in self._world.roots[0].glob("bucket-*"):
            for folder, _, names in os.walk(bucket):
                for name in names:
                    path = Path(folder, name)
                    with suppress(FileNotFoundError):  # a companion may sweep and evict meanwhile
                        found[path.lstat().st_ino] = path
        return found

    def note(self, log: SharedLog) -> None:
        """Nothing: what a new file held before is zeros."""

    def tear(self, lost: list[Lost], rng: random.Random) -> int:
        """Leave some sectors of each write zero. Returns how many files are neither empty nor whole now."""
        paths = self._by_inode() if lost else {}
        return sum(self._tear(paths[one.file], one, rng) for one in lost if one.file in paths)

    def _tear(self, path: Path, one: Lost, rng: random.Random) -> bool:
        empty = bytes(len(one.data))
        now = mixed(empty, one.data, rng)
        fd = _open(path)
        if fd is None:
            return False
        try:
            times = os.fstat(fd)
            os.pwrite(fd, now, one.offset)
            os.utime(fd, ns=(times.st_atime_ns, times.st_mtime_ns))
        finally:
            os.close(fd)
        return now not in (empty, one.data)

    def tear_ended(self, log: SharedLog, rng: random.Random) -> int:
        """Tear some blocks that were published, as if the power had failed. Returns how many."""
        paths = {inode: path for inode, path in self._by_inode().items() if BLOCK_NAME.fullmatch(path.name)}
        ended = [write for write in log.writes() if write.ended == 1 and write.file in paths]
        chosen = rng.sample(ended, min(len(ended), rng.randint(1, 4)))
        lost = [Lost(write.file, write.offset, log.data(write)) for write in chosen]
        return sum(self._tear(paths[one.file], one, rng) for one in lost)

    def keep(self, lost: list[Lost], rng: random.Random) -> FilesLate:
        """Writes that are to land during the next life, into the files as they are open now."""
        paths = self._by_inode()
        opened = [(_open(paths[one.file]), one) for one in lost if one.file in paths]
        return FilesLate([(fd, one) for fd, one in opened if fd is not None])


def _open(path: Path) -> int | None:
    """The file for writing, None if it is gone."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
