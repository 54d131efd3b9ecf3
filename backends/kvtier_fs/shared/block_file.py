"""A block's file: written under a temporary name, verified when it is read, looked up by its header.

Blocking calls, for the root's threads.
"""

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from kvtier.tier.block_age import NO_AGE_LIMIT, AgeLimit
from kvtier.tier.block_envelope import (
    KEY_AT,
    Mismatch,
    SlotHeader,
    decode_slot_header,
    found_by_sharer,
    is_other_version,
    verify_slot,
)
from kvtier_fs.io.syscalls import rename_new
from kvtier_fs.roots.folder import close_quietly, open_plain, plain_file
from kvtier_fs.shared.folder import GONE, TreeFolder, vanished
from kvtier_fs.shared.paths import BlockPlace, occupied

_VALIDATED_MAX = 1 << 16
_NOTHING = ((-1, -1), 0)
_NO_FILE = (*GONE, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
"""The errors above, and those of a place where something that is no plain file came in between stat and open."""


@dataclass(frozen=True, slots=True)
class ExpectedBlock:
    """A block as its reader expects it: where it lies, its header but for the generation, the file's length, and the
    generations that are young enough."""

    place: BlockPlace
    header: SlotHeader
    file_bytes: int
    ages: AgeLimit = NO_AGE_LIMIT


@dataclass(frozen=True, slots=True)
class MismatchedFile:
    """A file in the place of a block that is not that block. `front` identifies it later.

    `is_other_version`: another release stored it, so it is left alone.
    """

    inode: int
    front: bytes = b""
    is_other_version: bool = False


@dataclass(slots=True, eq=False)
class OwnedFile:
    """A file whose owner makes this before it is opened, and closes it whatever is raised. `fd`: -1 unless open."""

    fd: int = field(default=-1, init=False)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            close_quietly(fd)


@dataclass(slots=True, eq=False)
class OpenBlock(OwnedFile):
    """A file of the right kind and length, open; nothing in it is trusted yet."""

    inode: int = -1
    touched: float = 0.0


def open_block(
    folder: TreeFolder, wanted: ExpectedBlock, direct: bool, there: OpenBlock
) -> OpenBlock | MismatchedFile | None:
    """Open what lies in a block's place as `there`; None if there is nothing. Raises OSError for what the disk does."""
    place = wanted.place
    with vanished(_NO_FILE), folder.leaf(place.bucket, place.leaf) as leaf:
        status = os.stat(place.name, dir_fd=leaf, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_size != wanted.file_bytes:
            return _wrong(leaf, wanted, status)
        there.fd = open_plain(leaf, place.name, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        status = os.fstat(there.fd)
        there.inode, there.touched = status.st_ino, status.st_mtime
        return there
    return None


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of a verification: the payload's checksum, or the first thing that differs."""

    found: Mismatch | bytes
    front: bytes
    epoch: int


def check_block(page: memoryview, payload: memoryview, wanted: ExpectedBlock) -> Verification:
    """Compare everything that was read with what is expected.

    The reader of a shared tier does not know the generation beforehand; the header's own counts if its checksum holds.
    """
    stated = decode_slot_header(page)
    expected = wanted.header if stated is None else wanted.header._replace(generation=stated.generation)
    found = found_by_sharer(verify_slot(page, payload, expected), page, payload)
    if stated is not None and isinstance(found, bytes) and not wanted.ages.allows(stated.generation):
        found = Mismatch.GENERATION
    return Verification(found, bytes(page[:KEY_AT]), -1 if stated is None else stated.epoch)


def header_now(leaf_fd: int, wanted: ExpectedBlock) -> SlotHeader | MismatchedFile | None:
    """The header of the file in a block's place if all of it but perhaps the epoch is right, and it is young enough.

    None if there is no file. Raises OSError.
    """
    with vanished(_NO_FILE):
        status = os.stat(wanted.place.name, dir_fd=leaf_fd, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_size != wanted.file_bytes:
            return _wrong(leaf_fd, wanted, status)
        header_bytes = wanted.file_bytes - wanted.header.payload_bytes
        page = memoryview(read_front(leaf_fd, wanted.place.name, header_bytes))
        stated = decode_slot_header(page) if len(page) == header_bytes else None
        if (
            stated is None
            or not wanted.ages.allows(stated.generation)
            or stated._replace(generation=0, epoch=0, payload_digest=b"")
            != wanted.header._replace(generation=0, epoch=0, payload_digest=b"")
        ):
            return MismatchedFile(status.st_ino, bytes(page[:KEY_AT]), is_other_version(page))
        return stated
    return None


def _wrong(leaf_fd: int, wanted: ExpectedBlock, status: os.stat_result) -> MismatchedFile:
    """A file that is not even a plain one of the right length. What cannot be read is no block of another version."""
    front = b""
    if stat.S_ISREG(status.st_mode):
        with suppress(OSError):
            front = read_front(leaf_fd, wanted.place.name, wanted.file_bytes - wanted.header.payload_bytes)
    return MismatchedFile(status.st_ino, is_other_version=is_other_version(memoryview(front)))


def read_front(leaf_fd: int, name: str, header_bytes: int) -> bytes:
    """The header page of a block's file, through the page cache. Raises OSError."""
    with plain_file(leaf_fd, name) as fd:
        return os.pread(fd, header_bytes, 0)


def remove_if(leaf_fd: int, name: str, wrong: MismatchedFile) -> bool:
    """Remove what lies in a block's place if it is still what was found wrong. Raises OSError.

    False if it is something else by now, not there, or a folder with something in it.
    """
    with vanished((*GONE, errno.ENOTEMPTY, errno.ELOOP)):
        status = os.stat(name, dir_fd=leaf_fd, follow_symlinks=False)
        if status.st_ino != wrong.inode or (wrong.front and read_front(leaf_fd, name, KEY_AT) != wrong.front):
            return False
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(name, dir_fd=leaf_fd)
        else:
            os.unlink(name, dir_fd=leaf_fd)
        return True
    return False


@dataclass(slots=True, eq=False)
class Temporary(OwnedFile):
    """A file that is being written, of full size from the beginning. `charged_bytes` are reserved in its bucket.

    `there`: it was made, and is not the block. Then its owner discards it, whatever is raised.
    """

    name: str
    charged_bytes: int = 0
    there: bool = False


class Published(Enum):
    """Outcomes of a temporary that should become a block."""

    NAMED = "named"
    """It is the block now."""
    REPLACED = "replaced"
    """It is the block now; what it replaced was not the block, and is still charged."""
    EXISTED = "existed"
    """Another process stored the block first. The temporary is still there."""
    GROWN = "grown"
    """It is complete and closed but takes more disk space than was charged, so it has no name yet."""


def publish(folder: TreeFolder, wanted: ExpectedBlock, temporary: Temporary, now: float) -> Published:
    """Close a whole temporary and give it its name. Raises OSError; then the temporary is still there, but closed."""
    try:
        os.utime(temporary.fd, (now, now))
        taken = occupied(os.fstat(temporary.fd))
    finally:
        fd, temporary.fd = temporary.fd, -1
        os.close(fd)  # network file systems write the last bytes now; an error of that is raised here
    if taken > temporary.charged_bytes:
        return Published.GROWN
    return give_name(folder, wanted, temporary)


def give_name(folder: TreeFolder, wanted: ExpectedBlock, temporary: Temporary) -> Published:
    """Make a whole temporary the block. Raises OSError; then the temporary is still there."""
    place, bucket = wanted.place, folder.bucket(wanted.place.bucket)
    with folder.leaf(place.bucket, place.leaf) as leaf:
        try:
            if rename_new(temporary.name, place.name, bucket, leaf):
                temporary.there = False
                return Published.NAMED
        except FileExistsError:
            pass
        there = header_now(leaf, wanted)
        if isinstance(there, SlotHeader) and there.epoch >= wanted.header.epoch:
            return Published.EXISTED
        if isinstance(there, MismatchedFile) and there.is_other_version:
            return Published.EXISTED
        os.rename(temporary.name, place.name, src_dir_fd=bucket, dst_dir_fd=leaf)
        temporary.there = False
        return Published.NAMED if there is None else Published.REPLACED


class Presence:
    """Lookups by headers alone. A header found right is not read again while its file stays the same."""

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
