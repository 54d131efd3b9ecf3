"""The abilities of a root's disk: direct I/O and its alignment, asked of the kernel and tried out."""

import errno
import mmap
import os
from dataclasses import dataclass

from kvtier_fs.io.contract import HeaderPages
from kvtier_fs.io.syscalls import EXT4_MAGIC, XFS_MAGIC, DirectAlignment, filesystem_magic, statx_direct

_PROBE_NAME = "probe-direct"
_TRUSTED_UNASKED = (EXT4_MAGIC, XFS_MAGIC)


@dataclass(frozen=True, slots=True)
class DirectProbe:
    """`direct`: reads and writes really pass the page cache; `reason` says why not. Alignments in bytes, powers of two:
    `alignment` suits buffers and offsets and is at least a page, `offset_alignment` suits offsets."""

    direct: bool
    alignment: int = mmap.PAGESIZE
    offset_alignment: int = 512
    reason: str = ""


def probe_direct(folder_fd: int) -> DirectProbe:
    """Write and read an aligned page with O_DIRECT in a folder, in a file without a name; nothing is left behind.

    Answers `direct` only where the file system says so too: several accept the flag and buffer all the same.
    """
    try:
        fd = _open_nameless(folder_fd)
    except OSError as error:
        return DirectProbe(False, reason=f"O_DIRECT is refused ({error.strerror})")
    try:
        return _try_out(fd)
    except OSError as error:
        return DirectProbe(False, reason=f"a direct write failed ({error.strerror})")
    finally:
        os.close(fd)


def _open_nameless(folder_fd: int) -> int:
    flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        return os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=folder_fd)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    fd = os.open(_PROBE_NAME, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder_fd)
    try:
        os.unlink(_PROBE_NAME, dir_fd=folder_fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _try_out(fd: int) -> DirectProbe:
    stated = statx_direct(fd)
    if stated is None and filesystem_magic(fd) not in _TRUSTED_UNASKED:
        return DirectProbe(False, reason="the file system does not say whether direct I/O is real")
    if stated is None:
        stated = DirectAlignment(mmap.PAGESIZE, mmap.PAGESIZE)
    if stated.offset == 0:
        return DirectProbe(False, reason="the file system buffers direct I/O")
    alignment = max(mmap.PAGESIZE, stated.memory, stated.offset)
    written, read = HeaderPages(2, alignment).pages
    written[:] = b"k" * alignment
    try:
        moved = os.pwritev(fd, [written], 0), os.preadv(fd, [read], 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # A full disk must not change how a tier does its I/O: the kernel's word has to do.
        return DirectProbe(True, alignment, max(512, stated.offset))
    if moved != (alignment, alignment) or written != read:
        return DirectProbe(False, reason="a direct write did not come back whole")
    return DirectProbe(True, alignment, max(512, stated.offset))


def probe_path(path: str) -> int:
    """The alignment of the disk a root lies on, or will lie on; a page where it cannot be looked at. Blocks."""
    for folder in (path, os.path.dirname(path)):
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            return probe_direct(fd).alignment
        finally:
            os.close(fd)
    return mmap.PAGESIZE
