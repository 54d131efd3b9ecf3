"""System calls the standard library lacks, through the C library: fallocate, renameat2, statfs, statx, and the
attributes of files, by ioctl."""

import ctypes
import errno
import fcntl
import os
import struct
from contextlib import suppress
from functools import cache
from typing import NamedTuple

_AT_EMPTY_PATH = 0x1000
_RENAME_NOREPLACE = 1
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_DIO_ALIGNS_AT = 0x98
_STATFS_BYTES = 256
_NO_SUPPORT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_FLAGS = "@i4x"
_COMPRESSION, _NO_COPY_ON_WRITE = 0x404, 0x00800000

BTRFS_MAGIC = 0x9123683E
EXT4_MAGIC = 0xEF53
OVERLAYFS_MAGIC = 0x794C7630
XFS_MAGIC = 0x58465342
NETWORK_MAGICS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x65735546: "FUSE",
    0x00C36400: "Ceph",
    0x01021997: "9P",
    0x5346414F: "AFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x73757245: "Coda",
    0x19830326: "BeeGFS",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0x786F4256: "VirtualBox shared folder",
    0xBACBACBC: "VMware shared folder",
}


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def fallocate(fd: int, offset: int, length: int) -> bool:
    """Reserve blocks for a stretch of a file, which reads as zeros; the file grows to its end. False, with nothing
    done, where the file system cannot do that.

    The raw system call: the C library's posix_fallocate would write every block there. Raises OSError.
    """
    while _libc().fallocate(fd, 0, ctypes.c_int64(offset), ctypes.c_int64(length)) != 0:
        number = ctypes.get_errno()
        if number in _NO_SUPPORT:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


class DirectAlignment(NamedTuple):
    """The alignment for direct I/O on a file, by statx, in bytes. `offset` 0: it would be buffered or refused."""

    memory: int
    offset: int


def statx_direct(fd: int) -> DirectAlignment | None:
    """The file system's own word on direct I/O for an open file; None where it has none (old kernels, some systems)."""
    statx, buffer = getattr(_libc(), "statx", None), ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return None
    (mask,) = struct.unpack_from("<I", buffer)
    return DirectAlignment._make(struct.unpack_from("<II", buffer, _DIO_ALIGNS_AT)) if mask & _STATX_DIOALIGN else None


def filesystem_magic(fd: int) -> int:
    """The type of the file system an open file or folder lies on. Raises OSError."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc().fstatfs(fd, buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def overwrites_in_place(fd: int) -> bool:
    """Have the blocks of a file overwritten where they are. False if the file system writes elsewhere and keeps a
    stretch of old blocks until all of it is overwritten, so that a full file takes several times its size (btrfs).

    That can be changed while a file is empty only, and not on every disk (a zoned one). Raises OSError.
    """
    magic = filesystem_magic(fd)
    if magic not in (BTRFS_MAGIC, OVERLAYFS_MAGIC):
        return True
    flags = 0
    with suppress(OSError):  # not the owner, read-only, another ABI, no btrfs below: the flag is the answer
        flags = _file_flags(fd)
        if not flags & _NO_COPY_ON_WRITE:
            for change in (0, _NO_COPY_ON_WRITE):  # compression excludes it, and has to go first
                fcntl.ioctl(fd, _SET_FLAGS, struct.pack(_FLAGS, flags & ~_COMPRESSION | change))
            flags = _file_flags(fd)
    return bool(flags & _NO_COPY_ON_WRITE) or magic != BTRFS_MAGIC


def _file_flags(fd: int) -> int:
    flags: int = struct.unpack(_FLAGS, fcntl.ioctl(fd, _GET_FLAGS, bytes(struct.calcsize(_FLAGS))))[0]
    return flags


def rename_new(old: str, new: str, old_folder_fd: int, new_folder_fd: int) -> bool:
    """Rename a file to a name that is free (renameat2). False, with nothing done, where that cannot be promised.

    Raises FileExistsError if the name is taken, OSError for other errors of the disk.
    """
    call = getattr(_libc(), "renameat2", None)
    while call is not None:
        if call(old_folder_fd, os.fsencode(old), new_folder_fd, os.fsencode(new), _RENAME_NOREPLACE) == 0:
            return True
        number = ctypes.get_errno()
        if number in _NO_SUPPORT:
            break
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), new)
    return False
