"""Simulated disks: files of 512-byte sectors that become durable when flushed, and two ways to crash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random

SECTOR_BYTES = 512
BLOCK_BYTES = 4096


class DiskFile:
    """One file: what reads see, what earlier contents may survive a power loss, which sectors are misplaced.

    `undo` holds what every write since the last flush has overwritten, as (first sector, bytes), oldest first.
    `misplaced[s]` is where the write was meant to go that put there what sector s holds, as (file, sector).
    `final_name` is the name a rename gave it: files that replace each other under one name are one place. `intended` is
    what was to be written to it, where a misplaced write or a power loss made that another thing than `data`.
    """

    def __init__(self, inode: int = 0, now: float = 0.0) -> None:
        self.inode = inode
        self.final_name = ""
        self.touched = now
        self.data = bytearray()
        self.undo: list[tuple[int, bytes]] = []
        self.blocks: set[int] = set()
        self.misplaced: dict[int, tuple[DiskFile, int]] = {}
        self.intended: bytearray | None = None
        self.flushed = False
        self.mode = 0o600
        self.owner: tuple[int, int] | None = None

    def write(self, offset: int, data: bytes | memoryview, meant: tuple[DiskFile, int] | None = None) -> None:
        """Change bytes in place, growing the file; what was there may come back at a power loss.

        `meant` is the (file, offset) that a misplaced write was to go to.
        """
        end = offset + len(data)
        self.grow(end)
        sectors = range(offset // SECTOR_BYTES, -(-end // SECTOR_BYTES))
        self.undo.append((sectors.start, bytes(self.data[sectors.start * SECTOR_BYTES : sectors.stop * SECTOR_BYTES])))
        if meant is not None and self.final_name:
            self._intend(0, b"")
            meant[0]._intend(meant[1], data)
        elif self.intended is not None:
            self._intend(offset, data)
        if meant is not None:
            for sector in sectors:
                self.misplaced[sector] = meant[0], meant[1] // SECTOR_BYTES + sector - sectors.start
        elif self.misplaced:
            for sector in sectors:
                self.misplaced.pop(sector, None)
        self.data[offset:end] = data
        self.blocks.update(range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)))

    def _intend(self, offset: int, data: bytes | memoryview) -> None:
        if self.intended is None:
            self.intended = bytearray(self.data)
        self.intended[offset : offset + len(data)] = data

    def grow(self, length: int) -> None:
        """The file is at least this long; what is new reads as zeros."""
        if length > len(self.data):
            self.data.extend(bytes(length - len(self.data)))

    def reserve(self, offset: int, length: int) -> None:
        """As fallocate(2): blocks for a stretch, and the file reaches to its end."""
        self.grow(offset + length)
        self.blocks.update(range(offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)))

    def truncate(self, length: int) -> None:
        """Shorten the file, durably."""
        del self.data[length:]
        last = -(-length // SECTOR_BYTES)
        self.undo = [(first, old[: (last - first) * SECTOR_BYTES]) for first, old in self.undo if first < last]
        self.blocks = {block for block in self.blocks if block < -(-length // BLOCK_BYTES)}
        self.misplaced = {sector: meant for sector, meant in self.misplaced.items() if sector < last}

    def meant_for(self, sector: int) -> tuple[DiskFile, int]:
        """The place that what a sector holds was written for."""
        return self.misplaced.get(sector, (self, sector))

    def is_place(self, sector: int, meant: tuple[DiskFile, int]) -> bool:
        """True if a (file, sector) is this sector, of this file or of one that replaced it or that it replaced.

        A temporary that never got its name is one of those if it was to hold the same block: the same payload.
        """
        file, number = meant
        return number == sector and (file is self or bool(self.final_name and self._same_block(file)))

    def _same_block(self, file: DiskFile) -> bool:
        if file.final_name:
            return file.final_name == self.final_name
        return file._intended_payload() == self._intended_payload()

    def _intended_payload(self) -> bytearray:
        return (self.data if self.intended is None else self.intended)[BLOCK_BYTES:]

    def page(self, offset: int) -> bytearray:
        """The page from an offset on."""
        return self.data[offset : offset + BLOCK_BYTES]

    def flush(self) -> None:
        """What was written is durable."""
        self.undo.clear()
        self.flushed = True

    def lose_power(self, rng: Random, share_kept: float) -> int:
        """Any subset of unflushed sectors survives; of several writes to one sector any may be the last that did.

        Some of the writes, in the order they were made, may have become durable by themselves before. A file that was
        never flushed may have lost its end, or all. Returns how many sectors are as they were before.
        """
        if self.undo and self.intended is None:
            self.intended = bytearray(self.data)
        before: dict[int, list[bytes]] = {}
        durable = rng.randint(0, len(self.undo)) if rng.random() < 0.5 else 0
        for first, old in self.undo[durable:]:
            for at in range(0, len(old), SECTOR_BYTES):
                before.setdefault(first + at // SECTOR_BYTES, []).append(old[at : at + SECTOR_BYTES])
        lost = 0
        for sector in sorted(before):
            if rng.random() >= share_kept:
                contents = before[sector]
                at = sector * SECTOR_BYTES
                size = min(SECTOR_BYTES, len(self.data) - at)
                survivor = contents[0] if rng.random() < 0.7 else rng.choice(contents)
                self.data[at : at + size] = survivor[:size].ljust(size, b"\0")
                self.misplaced.pop(sector, None)
                lost += 1
        self.undo.clear()
        if not self.flushed and rng.random() < 0.2:
            self.truncate(rng.randint(0, len(self.data) // BLOCK_BYTES) * BLOCK_BYTES)
        return lost


class Folder:
    """A folder: names now, and names as they were when it was last flushed. It takes one block of the disk."""

    def __init__(self, inode: int = 0) -> None:
        self.inode = inode
        self.mode = 0o700
        self.names: dict[str, DiskFile | Folder] = {}
        self.durable: dict[str, DiskFile | Folder] = {}

    def all_names(self) -> Iterator[str]:
        """Every name in here and in the folders inside."""
        for name, entry in self.names.items():
            yield name
            if isinstance(entry, Folder):
                yield from entry.all_names()

    @property
    def used_bytes(self) -> int:
        """Bytes on the disk, the folder's own block included."""
        used = 1
        for entry in self.names.values():
            used += entry.used_bytes // BLOCK_BYTES if isinstance(entry, Folder) else len(entry.blocks)
        return used * BLOCK_BYTES

    def flush(self) -> None:
        """The names are durable, not what they lead to."""
        self.durable = dict(self.names)

    def lose_power(self, rng: Random, share_kept: float) -> int:
        """Names made or removed since the last flush may be as they were; every file loses some sectors.

        Returns how many names and sectors are as they were before.
        """
        lost = 0
        for name in sorted(self.names.keys() | self.durable.keys()):
            if self.names.get(name) is not self.durable.get(name) and rng.random() >= share_kept:
                self.names.pop(name, None)
                if name in self.durable:
                    self.names[name] = self.durable[name]
                lost += 1
        lost += sum(self.names[name].lose_power(rng, share_kept) for name in sorted(self.names))
        self.flush()
        return lost


class SimulatedRoot(Folder):
    """The folder of one root, by its path, and the bytes it may take."""

    def __init__(self, path: str, bound_bytes: int) -> None:
        super().__init__()
        self.path = path
        self.bound_bytes = bound_bytes
        self.exists = False
        self.peak_bytes = 0


@dataclass(frozen=True, slots=True, eq=False)
class OrphanedWrite:
    """A write of a dead process that has yet to land; `before` is what was there when the process died."""

    file: DiskFile
    offset: int
    data: bytes
    meant: tuple[DiskFile, int] | None
    before: bytes


class Disks:
    """All folders of a seed. They outlive its processes."""

    def __init__(self, folders: Iterable[SimulatedRoot]) -> None:
        self.folders = {folder.path: folder for folder in folders}
        self.orphans: list[OrphanedWrite] = []
        self.files_made = 0
        self.covered: Counter[str] = Counter()

    def new_file(self, now: float) -> DiskFile:
        self.files_made += 1
        return DiskFile(self.files_made, now)

    def new_folder(self) -> Folder:
        self.files_made += 1
        return Folder(self.files_made)

    def lose_power(self, rng: Random) -> None:
        """Everything in flight is gone; of what is not flushed a random part survives."""
        share_kept = rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        self.orphans.clear()
        for folder in self.folders.values():
            self.covered["lost sectors and names"] += folder.lose_power(rng, share_kept)

    def land_orphans(self, rng: Random, outside: Callable[[float, Callable[[], None]], None]) -> None:
        """Let the writes of dead processes land, each at its own random time."""
        for orphan in list(self.orphans):
            outside(rng.expovariate(1 / rng.choice((0.002, 0.2, 2.0))), lambda orphan=orphan: self._land(orphan))  # type: ignore[misc]

    def _land(self, orphan: OrphanedWrite) -> None:
        """Apply one such write, unless a power loss has removed it."""
        if orphan not in self.orphans:
            return
        self.orphans.remove(orphan)
        end = orphan.offset + len(orphan.data)
        if end <= len(orphan.file.data):
            self.covered["landed after death"] += 1
            self.covered["landed on what others wrote since"] += orphan.file.data[orphan.offset : end] != orphan.before
            orphan.file.write(orphan.offset, orphan.data, orphan.meant)

    def over_bound(self) -> str:
        """Which folder takes more than it may; empty if none does."""
        for folder in self.folders.values():
            used = folder.used_bytes
            folder.peak_bytes = max(folder.peak_bytes, used)
            if used > folder.bound_bytes:
                return f"{folder.path} takes {used} bytes of {folder.bound_bytes}"
        return ""
