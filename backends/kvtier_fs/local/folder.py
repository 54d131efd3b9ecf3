"""The files of a slab root. Blocking calls, made on the root's own threads only, never on the event loop."""

import errno
import logging
import os
import re

from kvtier.errors import RootError
from kvtier.tier.stack_files import MODEL_FILE
from kvtier_fs.format.region_header import REGIONS_PER_FILE, RegionPlan, decode_region_header
from kvtier_fs.format.superblock import (
    COPY_BYTES,
    SUPERBLOCK_BYTES,
    Superblock,
    decode_superblock,
    foreign_version,
    write_order,
)
from kvtier_fs.io.syscalls import fallocate, overwrites_in_place
from kvtier_fs.options import RootOptions
from kvtier_fs.roots.disk import unknown_version
from kvtier_fs.roots.folder import SUPERBLOCK_NAME, GuardedFolder, close_quietly, keeps_free, write_all

SNAPSHOT_NAME = "snapshot"
_SNAPSHOT_TEMPORARY = f"{SNAPSHOT_NAME}.new"
_SLAB_NAME = re.compile(r"slab-([0-9]{5,9})")
_OWN_NAME = re.compile(rf"superblock|lock|snapshot(\.new)?|{_SLAB_NAME.pattern}|manifest-[0-9a-f]{{32}}\.json(\.new)?")
_SUPERBLOCK_READ_BYTES = 1 << 16
_COPIED_ON_WRITE = (
    "the file system writes elsewhere what is overwritten (copy-on-write), so this root may take several times its "
    "capacity; close it and remove its slab files, which are then made anew, or choose another disk"
)
_log = logging.getLogger("kvtier.fs")


class SlabFolder(GuardedFolder):
    """The files of one root. Raises RootError for what a person must put right, OSError for what the disk does."""

    def __init__(self, path: str, options: RootOptions) -> None:
        super().__init__(path, options)
        self._slabs: dict[int, int] = {}
        self.direct = False
        self.preallocates = True
        self.in_place = True

    def read_superblock(self) -> bytes:
        """The superblock file's bytes; empty if there is none."""
        return self._read(SUPERBLOCK_NAME, _SUPERBLOCK_READ_BYTES)

    def known_superblock(self, data: bytes) -> Superblock | None:
        """The newest whole copy in a superblock file; None if there is none. Raises RootError for another release's."""
        version = foreign_version(data)
        if version is not None:
            raise unknown_version(self.path, version)
        return decode_superblock(data)

    def _read(self, name: str, limit: int) -> bytes:
        """At most `limit` bytes of a file of the root; empty if it is not there."""
        try:
            with self.opened(name, os.O_RDONLY) as fd, open(fd, "rb", closefd=False) as file:
                return file.read(limit)
        except FileNotFoundError:
            return b""

    def write_superblock(self, copy: bytes) -> None:
        """Write both copies, a damaged or older one first, each on the disk before the next is touched.

        When this returns, the superblock is durable, and no single damaged copy can bring an older one back. Raises
        RootError if the lock file was taken away, because then another process may own the root by now.
        """
        if not self.keeps_lock():
            raise RootError(
                self.path, "its lock file was removed or replaced, so its superblock is not written; restart this one"
            )
        with self.opened(SUPERBLOCK_NAME) as fd:
            try:
                order = write_order(os.pread(fd, SUPERBLOCK_BYTES, 0))
            except OSError:  # a copy that cannot be read may be written all the same
                order = [0, COPY_BYTES]
            for at in order:
                self.write_at(fd, copy, at)
                self.sync(fd)
            self.sync(self.fd)

    def read_snapshot(self, limit: int) -> bytes:
        """The bytes of the snapshot that a clean close left; empty if there is none, or if it is over `limit`."""
        data = self._read(SNAPSHOT_NAME, limit + 1)
        return data if len(data) <= limit else b""

    def drop_snapshot(self) -> None:
        """Remove the snapshot, and what a crash left of one that was being written."""
        for name in (SNAPSHOT_NAME, _SNAPSHOT_TEMPORARY):
            try:
                self.unlink(name)
            except FileNotFoundError:
                continue
            except IsADirectoryError as error:
                raise RootError(self.path, f"{name} is not a plain file; remove it") from error

    def write_snapshot(self, data: bytes) -> None:
        """Put a snapshot in place in one step. Raises OSError, and leaves none, if there is no room for it."""
        self.drop_snapshot()
        try:
            with self.opened(_SNAPSHOT_TEMPORARY, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                self._keep_free(fd, len(data))
                self.write_at(fd, data, 0)
            self.rename(_SNAPSHOT_TEMPORARY, SNAPSHOT_NAME)
        except OSError:
            self.drop_snapshot()
            raise

    def write_at(self, fd: int, data: bytes, at: int) -> None:
        """Write all bytes at an offset. Raises OSError. With the four below: all that this class changes on a disk."""
        write_all(fd, data, at)

    def sync(self, fd: int) -> None:
        """Make a file's contents durable, or the folder's entries."""
        os.fsync(fd) if fd == self.fd else os.fdatasync(fd)

    def unlink(self, name: str) -> None:
        """Remove a file of the root."""
        os.unlink(name, dir_fd=self.fd)

    def rename(self, old: str, new: str) -> None:
        """Give a file of the root another name, which it takes over."""
        os.replace(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def truncate(self, fd: int, size: int) -> None:
        """Cut a file's tail off."""
        os.ftruncate(fd, size)

    def trim(self, plan: RegionPlan | None) -> None:
        """Remove what lies outside a plan: files and tails of regions it does not have; everything if there is none."""
        for name in os.listdir(self.fd):
            match = _SLAB_NAME.fullmatch(name)
            if match is None:
                continue
            number = int(match[1])
            if plan is None or number >= plan.files:
                self.unlink(name)
                self._close_slab(number)
                continue
            with self.opened(name) as fd:
                last = min(plan.regions - number * REGIONS_PER_FILE, REGIONS_PER_FILE)
                if os.fstat(fd).st_size > last * plan.stride:
                    self.truncate(fd, last * plan.stride)

    def _close_slab(self, number: int) -> None:
        """A file that is open keeps its blocks, without a name as well."""
        with self._guard:
            if number in self._slabs:
                close_quietly(self._slabs.pop(number))

    def slab_bytes(self) -> int:
        """Bytes of disk of all slab files."""
        names = (name for name in os.listdir(self.fd) if _SLAB_NAME.fullmatch(name))
        return sum(os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_blocks * 512 for name in names)

    def first_slot_bytes(self, header_bytes: int) -> int:
        """The size of the slots of the first region; 0 where no whole header states one."""
        page = self._read("slab-00000", header_bytes)
        header = decode_region_header(memoryview(page)) if len(page) == header_bytes else None
        return 0 if header is None else header.slot_bytes

    def existing_slabs(self) -> list[int]:
        """Numbers of the slab files that are there, in order."""
        matches = (_SLAB_NAME.fullmatch(name) for name in os.listdir(self.fd))
        return sorted(int(match[1]) for match in matches if match)

    def slab(self, number: int) -> int:
        """The open slab file of a number, created empty if it is not there. Stays open until `leave`."""
        with self._guard:
            self._check_not_left()
            if number not in self._slabs:
                flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.direct else 0)
                fd = self._slabs[number] = self.open_file(f"slab-{number:05d}", flags)
                if self.in_place and not overwrites_in_place(fd):
                    self.in_place = False
                    _log.warning("%s: %s", self.path, _COPIED_ON_WRITE)
            return self._slabs[number]

    def allocate(self, plan: RegionPlan, region: int) -> int:
        """Reserve a region's blocks, keeping `min_free_bytes`, and return its file.

        Raises OSError: ENOSPC if there is no room. Where the file system cannot reserve, the place arithmetic alone
        holds the bound.
        """
        fd = self.slab(plan.file_of(region))
        self._keep_free(fd, plan.stride)
        if self.preallocates:
            self.preallocates = fallocate(fd, plan.region_offset(region), plan.stride)
        return fd

    def _keep_free(self, fd: int, growth: int) -> None:
        """Raise OSError (ENOSPC) if the file system would be left with less than `min_free_bytes`."""
        if not keeps_free(fd, growth, self._options.min_free_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def unknown(self) -> list[str]:
        """Names in the folder that are none of ours, in order."""
        return sorted(name for name in os.listdir(self.fd) if not self.is_own(name))

    def is_own(self, name: str) -> bool:
        return any(own.fullmatch(name) for own in (_OWN_NAME, MODEL_FILE))

    def _close_files(self) -> None:
        while self._slabs:
            close_quietly(self._slabs.popitem()[1])
