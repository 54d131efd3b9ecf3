"""Simulated disks: files of 512-byte sectors that become durable when flushed, and two ways to crash."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

SECTOR_BYTES = 512
BLOCK_BYTES = 4096


class DiskFile:
    """One file: what reads see, what earlier contents may survive a power loss, which sectors are misplaced.

    `undo[s]` are the contents of sector s since the last flush, oldest first. `misplaced[s]` is where the write was
    meant to go that put there what sector s holds, as (file, sector).
    """

    def __init__(self) -> None:
        self.data = bytearray()
        self.undo: dict[int, list[bytes]] = {}
        self.blocks: set[int] = set()
        self.misplaced: dict[int, tuple[DiskFile, int]] = {}
        self.mode = 0o600
        self.owner = 0

    def write(self, offset: int, data: bytes | memoryview, meant: tuple[DiskFile, int] | None = None) -> None:
        """Change bytes in place, growing the file; what was there may come back at a power loss.

        `meant` is the (file, offset) that a misplaced write was to go to.
        """
        end = offset + len(data)
        self.grow(end)
        sectors = range(offset // SECTOR_BYTES, -(-end // SECTOR_BYTES))
        for sector in sectors:
            at = sector * SECTOR_BYTES
            self.undo.setdefault(sector, []).append(bytes(self.data[at : at + SECTOR_BYTES]))
        if meant is not None:
            for sector in sectors:
                self.misplaced[sector] = meant[0], meant[1] // SECTOR_BYTES + sector - sectors.start
        elif self.misplaced:
            for sector in sectors:
                self.misplaced.pop(sector, None)
        self.data[offset:end] = data
        self.blocks.update(range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)))

    def grow(self, length: int) -> None:
        """The file is at least this long; what is new reads as zeros."""
        if length > len(self.data):
            self.data.extend(bytes(length - len(self.data)))

    def reserve(self, offset: int, length: int) -> None:
        """As fallocate(2): blocks for a stretch, and the file reaches to its end."""
        self.grow(offset + length)
        self.blocks.update(range(offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)))

    def truncate(self, length: int) -> None:
        """Cut the file, durably."""
        del self.data[length:]
        last = -(-length // SECTOR_BYTES)
        self.undo = {sector: old for sector, old in self.undo.items() if sector < last}
        self.blocks = {block for block in self.blocks if block < -(-length // BLOCK_BYTES)}
        self.misplaced = {sector: meant for sector, meant in self.misplaced.items() if sector < last}

    def meant_for(self, sector: int) -> tuple[DiskFile, int]:
        """The place that what a sector holds was written for."""
        return self.misplaced.get(sector, (self, sector))

    def flush(self) -> None:
        """What was written is durable."""
        self.undo.clear()

    def lose_power(self, dice: Random, share_kept: float) -> None:
        """Any subset of unflushed sectors survives; of several writes to one sector any may be the last that did."""
        for sector in sorted(self.undo):
            if dice.random() >= share_kept:
                old = self.undo[sector]
                at = sector * SECTOR_BYTES
                survivor = old[0] if dice.random() < 0.7 else dice.choice(old)
                self.data[at : at + SECTOR_BYTES] = survivor.ljust(len(self.data[at : at + SECTOR_BYTES]), b"\0")
                self.misplaced.pop(sector, None)
        self.undo.clear()


class Folder:
    """One root's folder: names now, and names as they were when the folder was last flushed."""

    def __init__(self, path: str, bound_bytes: int) -> None:
        self.path = path
        self.bound_bytes = bound_bytes
        self.exists = False
        self.mode = 0o700
        self.names: dict[str, DiskFile] = {}
        self.durable: dict[str, DiskFile] = {}
        self.peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes on the disk, the folder's own block included."""
        return BLOCK_BYTES + BLOCK_BYTES * sum(len(file.blocks) for file in self.names.values())

    def flush(self) -> None:
        self.durable = dict(self.names)

    def lose_power(self, dice: Random, share_kept: float) -> None:
        """Names made or removed since the last flush may be as they were; every file loses some sectors."""
        for name in sorted(self.names.keys() | self.durable.keys()):
            if self.names.get(name) is not self.durable.get(name) and dice.random() >= share_kept:
                self.names.pop(name, None)
                if name in self.durable:
                    self.names[name] = self.durable[name]
        for name in sorted(self.names):
            self.names[name].lose_power(dice, share_kept)
        self.flush()


Landing = tuple[DiskFile, int, bytes, tuple[DiskFile, int] | None]
"""A write of a dead process that has yet to land: file, offset, bytes, where it was meant to go if elsewhere."""


class Disks:
    """All folders of a world. What is on them outlives every process of it."""

    def __init__(self, folders: Iterable[Folder]) -> None:
        self.folders = {folder.path: folder for folder in folders}
        self.orphans: list[Landing] = []
        self.files_made = 0

    def new_file(self) -> DiskFile:
        self.files_made += 1
        return DiskFile()

    def lose_power(self, dice: Random) -> None:
        """Everything in flight is gone; of what is not flushed a random part survives."""
        share_kept = dice.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        self.orphans.clear()
        for folder in self.folders.values():
            folder.lose_power(dice, share_kept)

    def haunt(self, dice: Random, outside: Callable[[float, Callable[[], None]], None]) -> None:
        """Let the writes of dead processes land, each at a time of its own."""
        for orphan in list(self.orphans):
            outside(dice.expovariate(1 / dice.choice((0.002, 0.2, 2.0))), lambda orphan=orphan: self._land(orphan))  # type: ignore[misc]

    def _land(self, orphan: Landing) -> None:
        if any(orphan is other for other in self.orphans):
            self.orphans = [other for other in self.orphans if other is not orphan]
            file, offset, data, meant = orphan
            if offset + len(data) <= len(file.data):
                file.write(offset, data, meant)

    def over_bound(self) -> str:
        """Which folder takes more than it may; empty if none does."""
        for folder in self.folders.values():
            used = folder.used_bytes
            folder.peak_bytes = max(folder.peak_bytes, used)
            if used > folder.bound_bytes:
                return f"{folder.path} takes {used} bytes of {folder.bound_bytes}"
        return ""
