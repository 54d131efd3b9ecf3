"""One block's file: written under a name nobody looks for, read with suspicion. Blocking, for the root's threads."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from kvtier_fs.files.folder import TreeFolder, let_go, open_plain
from kvtier_fs.files.naming import rename_new
from kvtier_fs.files.places import BlockPlace, occupied
from kvtier_fs.slot import KEY_AT, SlotHeader, decode_slot_header
from kvtier_fs.verify import Mismatch, ReadSlot, verify_slot

GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
"""Errors that mean: evicted, here or on another host, also while it was open."""
_NO_FILE = (*GONE, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
"""Those, and what it is called when something that is no plain file came in between a look and the opening."""


@contextmanager
def vanished() -> Iterator[None]:
    """For what is done to a file that anybody may remove at any moment: if it is gone, that was all."""
    try:
        yield
    except OSError as error:
        if error.errno not in GONE:
            raise


class Absent(Enum):
    """There is no such file."""

    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block as its reader expects it: where it lies, its header but for the generation, the file's length."""

    place: BlockPlace
    header: SlotHeader
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Wrong:
    """Something lies in a block's place that is not that block. `front` tells whether it is still the same later."""

    inode: int
    front: bytes = b""


@dataclass(frozen=True, slots=True)
class OpenBlock:
    """An open file of the right kind and length; nothing in it is trusted yet."""

    fd: int
    inode: int
    touched: float


def open_block(folder: TreeFolder, wanted: Wanted, direct: bool) -> OpenBlock | Wrong | Absent:
    """Open what lies in a block's place. Raises OSError for what the disk does."""
    place = wanted.place
    try:
        with folder.leaf(place.bucket, place.leaf) as leaf:
            status = os.stat(place.name, dir_fd=leaf, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_size != wanted.file_bytes:
                return Wrong(status.st_ino)
            fd = open_plain(leaf, place.name, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    except OSError as error:
        if error.errno in _NO_FILE:
            return Absent.ABSENT
        raise
    try:
        status = os.fstat(fd)
    except OSError:
        let_go(fd)
        raise
    return OpenBlock(fd, status.st_ino, status.st_mtime)


@dataclass(frozen=True, slots=True)
class Checked:
    """What verification found: the payload's checksum, or the first thing that differs."""

    found: Mismatch | bytes
    front: bytes
    epoch: int


def check_block(page: memoryview, payload: memoryview, wanted: Wanted) -> Checked:
    """Compare everything that was read with what is expected.

    The reader of a shared tier does not know the generation beforehand; the header's own counts if its checksum holds.
    """
    stated = decode_slot_header(page)
    expected = wanted.header if stated is None else wanted.header._replace(generation=stated.generation)
    found = verify_slot(ReadSlot(page, payload, expected))
    return Checked(found, bytes(page[:KEY_AT]), -1 if stated is None else stated.epoch)


def header_now(leaf_fd: int, wanted: Wanted) -> SlotHeader | Wrong | Absent:
    """The header of the file in a block's place if all of it is right but perhaps the epoch. Raises OSError."""
    try:
        status = os.stat(wanted.place.name, dir_fd=leaf_fd, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_size != wanted.file_bytes:
            return Wrong(status.st_ino)
        page = memoryview(read_front(leaf_fd, wanted))
    except OSError as error:
        if error.errno in _NO_FILE:
            return Absent.ABSENT
        raise
    stated = decode_slot_header(page) if len(page) == wanted.file_bytes - wanted.header.payload_bytes else None
    if stated is None or stated._replace(generation=0, epoch=0, payload_digest=b"") != wanted.header._replace(
        generation=0, epoch=0, payload_digest=b""
    ):
        return Wrong(status.st_ino, bytes(page[:KEY_AT]))
    return stated


def read_front(leaf_fd: int, wanted: Wanted) -> bytes:
    """The header page of the file in a block's place, through the page cache. Raises OSError."""
    fd = open_plain(leaf_fd, wanted.place.name, os.O_RDONLY)
    try:
        return os.pread(fd, wanted.file_bytes - wanted.header.payload_bytes, 0)
    finally:
        let_go(fd)


def remove_if(leaf_fd: int, wanted: Wanted, wrong: Wrong) -> bool:
    """Remove what lies in a block's place if it is still what was found wrong. Raises OSError.

    False if it is something else by now, not there, or a folder with something in it.
    """
    name = wanted.place.name
    try:
        status = os.stat(name, dir_fd=leaf_fd, follow_symlinks=False)
        if status.st_ino != wrong.inode:
            return False
        if wrong.front and read_front(leaf_fd, wanted)[:KEY_AT] != wrong.front:
            return False
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(name, dir_fd=leaf_fd)
        else:
            os.unlink(name, dir_fd=leaf_fd)
    except OSError as error:
        if error.errno in (*GONE, errno.ENOTEMPTY, errno.ELOOP):
            return False
        raise
    return True


@dataclass(frozen=True, slots=True)
class Temporary:
    """A file that is being written, of full size from the beginning. `charged_bytes` are reserved in its bucket."""

    name: str
    fd: int
    charged_bytes: int


class Published(Enum):
    """What became of a temporary that should become a block."""

    NAMED = "named"
    """It is the block now."""
    REPLACED = "replaced"
    """It is the block now, in the place of something that was none; what that took is still charged."""
    TAKEN = "taken"
    """Another process was faster. The temporary is still there."""
    GROWN = "grown"
    """It is whole and closed but takes more of the disk than was charged, so it has no name yet."""


def publish(folder: TreeFolder, wanted: Wanted, temporary: Temporary, now: float) -> Published:
    """Close a whole temporary and give it its name. Raises OSError; then the temporary is still there, but closed."""
    try:
        os.utime(temporary.fd, (now, now))
        taken = occupied(os.fstat(temporary.fd))
    finally:
        os.close(temporary.fd)  # network file systems send the last bytes now, and say here if they could not
    if taken > temporary.charged_bytes:
        return Published.GROWN
    return give_name(folder, wanted, temporary)


def give_name(folder: TreeFolder, wanted: Wanted, temporary: Temporary) -> Published:
    """Make a whole temporary the block. Raises OSError; then the temporary is still there."""
    place, bucket = wanted.place, folder.bucket(wanted.place.bucket)
    with folder.leaf(place.bucket, place.leaf) as leaf:
        try:
            if rename_new(temporary.name, place.name, bucket, leaf):
                return Published.NAMED
        except FileExistsError:
            pass
        there = header_now(leaf, wanted)
        if isinstance(there, SlotHeader) and there.epoch >= wanted.header.epoch:
            return Published.TAKEN
        os.rename(temporary.name, place.name, src_dir_fd=bucket, dst_dir_fd=leaf)
        return Published.NAMED if there is Absent.ABSENT else Published.REPLACED
