"""One block's file: written under a name nobody looks for, read with suspicion. Blocking, for the root's threads."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from kvtier_fs.files.folder import TreeFolder, open_plain
from kvtier_fs.files.places import BlockPlace
from kvtier_fs.slot import KEY_AT, SlotHeader, decode_slot_header
from kvtier_fs.verify import Mismatch, ReadSlot, verify_slot

GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
"""Errors that mean: evicted, here or on another host, also while it was open."""


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
        if error.errno in GONE:
            return Absent.ABSENT
        raise
    try:
        status = os.fstat(fd)
    except OSError:
        os.close(fd)
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
        if error.errno in GONE:
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
        os.close(fd)


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


def publish(folder: TreeFolder, wanted: Wanted, temporary: Temporary, now: float) -> bool:
    """Close a whole temporary and give it its name. False, with it removed, if another process was faster.

    Raises OSError, having removed the temporary. The file is closed in any case.
    """
    try:
        try:
            os.utime(temporary.fd, (now, now))
        finally:
            os.close(temporary.fd)  # network file systems send the last bytes now, and say here if they could not
        bucket = folder.bucket(wanted.place.bucket)
        with folder.leaf(wanted.place.bucket, wanted.place.leaf) as leaf:
            there = header_now(leaf, wanted)
            if isinstance(there, SlotHeader) and there.epoch >= wanted.header.epoch:
                os.unlink(temporary.name, dir_fd=bucket)
                return False
            os.rename(temporary.name, wanted.place.name, src_dir_fd=bucket, dst_dir_fd=leaf)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary.name, dir_fd=folder.bucket(wanted.place.bucket))
        raise
    return True


def discard(folder: TreeFolder, wanted: Wanted, temporary: Temporary) -> None:
    """Close and remove a temporary that will not be published. Raises OSError."""
    try:
        os.close(temporary.fd)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary.name, dir_fd=folder.bucket(wanted.place.bucket))
