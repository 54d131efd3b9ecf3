"""A slab root opened for inspection: its lock, its superblock, how its regions are cut, pages read and written."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from kvtier.errors import RootBusyError, RootError
from kvtier.inspection import Access, StoredNamespace
from kvtier_fs.folder import LOCK_NAME, SUPERBLOCK_NAME, RootFolder
from kvtier_fs.inspect_reading import read_manifest
from kvtier_fs.inspect_slots import Cut
from kvtier_fs.options import FSOptions
from kvtier_fs.regions import RegionHeader, RegionPlan, decode_region_header
from kvtier_fs.snapshot import Snapshot, SnapshotOf, decode_snapshot
from kvtier_fs.superblock import (
    COPY_BYTES,
    SUPERBLOCK_BYTES,
    Superblock,
    decode_superblock,
    encode_superblock,
    foreign_version,
)
from kvtier_fs.texts import OWNER_BYTES_MAX, manifest_name, owner_in_words

_SNAPSHOT_BYTES_PER_SLOT = 96
_SNAPSHOT_SLACK_BYTES = 1 << 20


class InspectedRoot:
    """One slab root while a tool looks at it. Reading is safe from several threads; nothing is written but by CHANGE.

    Raises RootError for what keeps it from being inspected at all.
    """

    def __init__(self, path: str, access: Access) -> None:
        options = FSOptions(roots=[path], capacity=1, create=False, allow_network_fs=True)
        self.path = path
        self.access = access
        self.folder = RootFolder(path, options)
        self.owner = ""
        self.has_lock = True
        self.data = b""
        self.superblock: Superblock
        self.plan: RegionPlan
        self.fds: dict[int, int] = {}
        self.cuts: list[Cut] = []
        self.bad_regions: list[tuple[int, str]] = []
        self.snapshot_there = False
        self.snapshot: Snapshot | None = None
        self._lock_fd = -1
        self._changing = threading.Lock()
        self._changed = False
        self._was_clean = False

    def open(self) -> bool:
        """Enter, look who owns it, read superblock and region headers. False if the folder holds no slab root."""
        try:
            if not self.folder.enter():
                raise RootError(self.path, "is not there")
            if not self.folder.existing_slabs() and SUPERBLOCK_NAME not in os.listdir(self.folder.fd):
                return False
            self._look_at_lock()
            self._read_superblock()
            self._open_slabs()
        except OSError as error:
            raise self.folder.refusal(error) from error
        for region in range(self.plan.regions):
            self._look_at_region(region)
        return True

    def close(self) -> None:
        """Close every file and let go of the lock. Idempotent."""
        for fd in (*self.fds.values(), self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self.fds, self._lock_fd = {}, -1
        self.folder.leave()

    def _look_at_lock(self) -> None:
        """Note a live owner, or keep owners out, as the access wants. Raises RootBusyError."""
        changing = self.access is Access.CHANGE
        try:
            fd = self.folder.open_file(LOCK_NAME, os.O_RDWR | os.O_CREAT if changing else os.O_RDONLY)
        except FileNotFoundError:
            self.has_lock = False
            return
        self._lock_fd = fd
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if changing else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.owner = owner_in_words(os.pread(fd, OWNER_BYTES_MAX, 0))
            if self.access is not Access.LOOK:
                raise RootBusyError(self.path, self.owner) from error
        if self.access is Access.LOOK:
            # Whoever wants to open the root meanwhile must not be kept out by somebody who only looks.
            os.close(fd)
            self._lock_fd = -1
        elif changing:
            owner = {"pid": os.getpid(), "host": socket.gethostname()[:64], "start": round(time.time())}
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(owner).encode(), 0)

    def _read_superblock(self) -> None:
        self.data = self.folder.read_superblock()
        block = decode_superblock(self.data)
        if block is None:
            version = foreign_version(self.data)
            if version is not None:
                raise RootError(self.path, f"holds format version {version}, which this release does not know")
            raise RootError(
                self.path,
                "cannot be checked: its superblock has no whole copy; a tier that opens it starts empty",
            )
        self.superblock = block
        self.plan = RegionPlan(block.stride, block.header_bytes, block.regions)

    def _open_slabs(self) -> None:
        flags = os.O_RDWR if self.access is Access.CHANGE else os.O_RDONLY
        for number in self.folder.existing_slabs():
            if number < self.plan.files:
                self.fds[number] = self.folder.open_file(f"slab-{number:05d}", flags)

    def _look_at_region(self, region: int) -> None:
        fd = self.fds.get(self.plan.file_of(region))
        if fd is None:
            return
        try:
            page = memoryview(os.pread(fd, self.plan.header_bytes, self.plan.region_offset(region)))
        except OSError:
            self.bad_regions.append((region, "unreadable"))
            return
        if len(page) < self.plan.header_bytes or not any(page):
            return
        header = decode_region_header(page)
        if header is None:
            self.bad_regions.append((region, "header_checksum"))
        elif not self.is_cut(header):
            self.bad_regions.append((region, "slot_size"))
        elif header.root_uuid != self.superblock.root_uuid:
            self.cuts.append(Cut(region, header.slot_bytes, header.generation, False))
        elif header.region != region:
            self.bad_regions.append((region, "region"))
        else:
            self.cuts.append(Cut(region, header.slot_bytes, header.generation, True))

    def is_cut(self, header: RegionHeader) -> bool:
        """True if a region can be cut as a header says."""
        return header.generation > 0 and self.plan.can_be_cut(header.slot_bytes)

    def read_snapshot(self) -> None:
        """Read the snapshot that the next open would ask, if there is one. Raises RootError."""
        block, plan = self.superblock, self.plan
        limit = _SNAPSHOT_SLACK_BYTES + plan.regions * plan.stride // plan.header_bytes * _SNAPSHOT_BYTES_PER_SLOT
        try:
            data = self.folder.read_snapshot(limit) if block.clean else b""
        except OSError as error:
            raise self.folder.refusal(error) from error
        self.snapshot_there = bool(data)
        self.snapshot = decode_snapshot(data, SnapshotOf(block.root_uuid, block.session, block.stride))
        if self.snapshot is not None and len(self.snapshot.cuts) != plan.regions:
            self.snapshot = None

    def place(self, cut: Cut, index: int) -> tuple[int, int]:
        """The file and the offset of a slot."""
        return self.fds[self.plan.file_of(cut.region)], self.plan.slot_offset(cut.region, index, cut.slot_bytes)

    def write(self, fd: int, offset: int, data: bytes) -> bool:
        """Write a page of a slab in place. False if the disk will not have it."""
        self.begin_change()
        try:
            return os.pwrite(fd, data, offset) == len(data)
        except OSError:
            return False

    def begin_change(self) -> None:
        """Before the first write: mark the root as in use, durably, and remove the snapshot that would not be true.

        Should this be the last that is heard of us, the next open reads every header. Raises RootError.
        """
        with self._changing:
            if self._changed:
                return
            assert self.access is Access.CHANGE
            self.heal_superblock()
            self._was_clean = self.superblock.clean
            self._mark(clean=False)
            self._superblock_io(self._drop_snapshot)
            self._changed = True

    def _mark(self, clean: bool) -> None:
        block = replace(self.superblock, clean=clean, sequence=self.superblock.sequence + 1)
        copy = encode_superblock(block)
        self._superblock_io(lambda: self.folder.write_superblock(copy))
        self.superblock, self.data = block, copy + copy + self.data[SUPERBLOCK_BYTES:]

    def _drop_snapshot(self) -> None:
        self.folder.drop_snapshot()
        self.folder.sync(self.folder.fd)

    def heal_superblock(self) -> None:
        """Write the copy that counts over one that is not the same; the whole one is not touched. Raises RootError."""
        good = encode_superblock(self.superblock)
        bad = [at for at in (0, COPY_BYTES) if self.data[at : at + COPY_BYTES] != good]
        if bad:
            self._superblock_io(lambda: self._write_copies(good, bad))
            self.data = good + good + self.data[SUPERBLOCK_BYTES:]

    def _write_copies(self, copy: bytes, offsets: list[int]) -> None:
        fd = self.folder.open_file(SUPERBLOCK_NAME, os.O_RDWR)
        try:
            for at in offsets:
                os.pwrite(fd, copy, at)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def _superblock_io(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            raise RootError(self.path, f"the superblock cannot be written ({error.strerror})") from error

    def sync(self) -> None:
        """Make what was changed durable; then the root is as clean as it was found. Raises RootError."""
        if not self._changed:
            return
        try:
            for fd in self.fds.values():
                os.fdatasync(fd)
        except OSError as error:
            raise RootError(self.path, f"changes cannot be made durable ({error.strerror})") from error
        if self._was_clean:
            self._mark(clean=True)
        self._changed = False

    def remove_manifest(self, namespace: bytes) -> None:
        """Remove the readable description of a namespace, if there is one."""
        with suppress(OSError):
            os.unlink(manifest_name(namespace), dir_fd=self.folder.fd)

    def namespaces(self) -> tuple[StoredNamespace, ...]:
        """The namespaces of the superblock, the one opened last first, with what their manifests tell people."""
        known = sorted(self.superblock.namespaces, key=lambda item: item[1].session, reverse=True)
        return tuple(
            StoredNamespace(digest, entry.epoch, entry.session, *read_manifest(self.folder.fd, digest))
            for digest, entry in known
        )
