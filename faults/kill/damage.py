"""What the harness does to the files between two lives: it tears what was in flight, and lets old writes land late."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .shared_log import SharedLog
from .slab_life import FILE_SHIFT
from .world import World

SECTOR = 512


@dataclass(frozen=True, slots=True)
class Lost:
    """A write of a dead victim that had not ended: where, and what it would have written."""

    file: int
    offset: int
    data: bytes

    def overlaps(self, file: int, offset: int, length: int) -> bool:
        return self.file == file and self.offset < offset + length and offset < self.offset + len(self.data)


def in_flight(log: SharedLog) -> list[Lost]:
    """The writes that had been submitted and had not ended."""
    return [Lost(write.file, write.offset, log.data(write)) for write in log.writes() if not write.ended]


def mixed(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """Some sectors old, some new: nothing landed, all of it, a front, all but one, or any."""
    sectors = len(new) // SECTOR
    landed = np.zeros(sectors, dtype=bool)
    how = rng.random()
    if how < 0.1:
        return old
    if how < 0.2:
        return new
    if how < 0.4:
        landed[: rng.randrange(1, sectors)] = True
    elif how < 0.6:
        landed[:] = True
        landed[rng.randrange(sectors)] = False
    else:
        landed = np.frombuffer(rng.randbytes(sectors), dtype=np.uint8) < rng.randrange(16, 240)
    both = np.stack([np.frombuffer(data, dtype=np.uint8).reshape(sectors, SECTOR) for data in (old, new)])
    return np.where(landed[:, None], both[1], both[0]).tobytes()


class SlabFiles:
    """The slab files of a world, and what every byte of them was before the writes that are in flight."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._before: dict[int, bytearray] = {}

    def path(self, file: int) -> Path:
        return self._world.roots[file >> FILE_SHIFT] / f"slab-{file & (1 << FILE_SHIFT) - 1:05d}"

    def note(self, log: SharedLog) -> None:
        """Take over the writes that ended."""
        for write in log.writes():
            if write.ended == 1:
                self._put(write.file, write.offset, log.data(write))

    def _put(self, file: int, offset: int, data: bytes) -> None:
        image = self._image(file, offset + len(data))
        image[offset : offset + len(data)] = data

    def _image(self, file: int, size: int) -> bytearray:
        image = self._before.setdefault(file, bytearray())
        if len(image) < size:
            image.extend(bytes(size - len(image)))
        return image

    def old(self, file: int, offset: int, length: int) -> bytes:
        """The bytes a place held before the last write into it; zeros where nothing was written."""
        return bytes(self._image(file, offset + length)[offset : offset + length])

    def tear(self, lost: list[Lost], rng: random.Random) -> int:
        """Leave some sectors of each write old and others new. Returns how many are neither."""
        torn = 0
        for one in lost:
            old = self.old(one.file, one.offset, len(one.data))
            now = mixed(old, one.data, rng)
            self.write(one, now)
            torn += now not in (old, one.data)
        return torn

    def tear_ended(self, log: SharedLog, rng: random.Random) -> int:
        """Tear some writes that ended, as if the power had failed. Returns how many. To be called before `note`."""
        ended = {(write.file, write.offset): write for write in log.writes() if write.ended == 1}
        chosen = rng.sample(sorted(ended.values()), min(len(ended), rng.randint(1, 4)))
        lost = [Lost(write.file, write.offset, log.data(write)) for write in chosen]
        return self.tear(lost, rng)

    def keep(self, lost: list[Lost], rng: random.Random) -> SlabLate:
        """Writes that are to land during the next life."""
        return SlabLate(self, lost, rng)

    def write(self, where: Lost, data: bytes) -> None:
        """Write into a slab file, past everything that guards it."""
        fd = os.open(self.path(where.file), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, data, where.offset)
        finally:
            os.close(fd)
        self._put(where.file, where.offset, data)


class SlabLate:
    """Writes of a dead victim that have not landed yet; `look` lands those whose place the living one has reused.

    Some land while the living one's own write is in flight, some only when that has ended.
    """

    def __init__(self, files: SlabFiles, lost: list[Lost], rng: random.Random) -> None:
        self._files = files
        self.waiting = [(one, rng.random() < 0.5) for one in lost]
        self.landed = self.landed_after_reuse = 0

    def look(self, log: SharedLog) -> None:
        """Land what the living victim has written over."""
        kept, writes = [], log.writes() if self.waiting else []
        for one, patient in self.waiting:
            over = [new for new in writes if one.overlaps(new.file, new.offset, new.length)]
            if over and (over[-1].ended or not patient):
                self._files.write(one, one.data)
                self.landed_after_reuse += 1
            else:
                kept.append((one, patient))
        self.waiting = kept

    def finish(self) -> None:
        """Land the rest."""
        self.landed = self.landed_after_reuse + len(self.waiting)
        for one, _ in self.waiting:
            self._files.write(one, one.data)
        self.waiting = []
