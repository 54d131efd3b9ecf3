"""A slab root opened for inspection: its lock, its superblock, the formats of its regions, pages read and written."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from kvtier.errors import RootBusyError, RootError
from kvtier.tier.inspection import Access, StoreAbout, StoredNamespace
from kvtier_fs.format.region_header import RegionHeader, RegionPlan, decode_region_header
from kvtier_fs.format.snapshot import Snapshot, decode_snapshot, is_of_other_version
from kvtier_fs.format.superblock import COPY_BYTES, SUPERBLOCK_BYTES, Superblock, encode_superblock
from kvtier_fs.inspect.store import FolderInspection, SlotContent
from kvtier_fs.local.folder import SlabFolder
from kvtier_fs.options import FSOptions
from kvtier_fs.roots.folder import SUPERBLOCK_NAME

_SNAPSHOT_BYTES_PER_SLOT = 96
_SNAPSHOT_SLACK_BYTES = 1 << 20
_RUN_BYTES = 16 << 20
_KEPT_NOT = "when blocks were used last and how often they were hit is not kept on disk"
_UNCLEAN = "the last session did not close in order; a few torn slots are to be expected then"
_NO_LOCK = "there is no lock file, so it is unknown whether the root is in use"


class InspectedFormat(NamedTuple):
    """The format of a region, by the header in front of it. `own` is false if the header is another root's."""

    region: int
    slot_bytes: int
    generation: int
    own: bool


class SlotRun(NamedTuple):
    """Some slots of one region, in a row: what one thread reads at a time."""

    fmt: InspectedFormat
    first: int
    slots: int


class InspectedRoot(FolderInspection[SlotContent, SlotRun]):
    """The records and files of one slab root, which is a single part. Reading is safe from several threads.

    Raises RootError for what keeps it from being inspected at all.
    """

    folder: SlabFolder

    def __init__(self, path: str, access: Access) -> None:
        super().__init__(path, access)
        options = FSOptions(roots=[path], capacity=1, create=False, allow_network_fs=True)
        self.folder = SlabFolder(path, options)
        self.owner = ""
        self.data = b""
        self.superblock: Superblock
        self.plan: RegionPlan
        self.fds: dict[int, int] = {}
        self.formats: list[InspectedFormat] = []
        self.bad_regions: list[tuple[int, str]] = []
        self.snapshot_there = False
        self.snapshot: Snapshot | None = None
        self._snapshot_of: Superblock | None = None
        self._changed = False
        self._was_clean = False

    def _open(self) -> StoreAbout | None:
        """Read the owner, superblock and region headers."""
        if self.holds_files() or not (self.folder.existing_slabs() or SUPERBLOCK_NAME in os.listdir(self.folder.fd)):
            return None
        has_lock = self._look_at_lock()
        self.read_superblock()
        self.plan = RegionPlan(self.superblock.stride, self.superblock.header_bytes, self.superblock.regions)
        self._open_slabs()
        self.read_regions()
        block, notes = self.superblock, [_KEPT_NOT]
        if not block.clean and not self.owner:
            notes.append(_UNCLEAN)
        if not has_lock:
            notes.append(_NO_LOCK)
        about = self._describe("slab", block.root_uuid, block.regions, notes)
        return replace(about, region_bytes=block.stride, session=block.session, clean=block.clean)

    def _parts(self) -> Iterable[int]:
        return (0,)

    def runs(self, part: int) -> Iterator[SlotRun]:
        """Every slot of the regions that are formatted, some of one region at a time."""
        for fmt in list(self.formats):
            slots, step = self.slots_in_file(fmt), max(1, _RUN_BYTES // fmt.slot_bytes)
            for first in range(0, slots, step):
                yield SlotRun(fmt, first, min(step, slots - first))

    def slots_in_file(self, fmt: InspectedFormat) -> int:
        """Slots of a region that begin before its file ends, and one at least."""
        return max(1, min(self.plan.slots(fmt.slot_bytes), -(-self.bytes_in_file(fmt.region) // fmt.slot_bytes)))

    def bytes_in_file(self, region: int) -> int:
        """Bytes of a region behind its header page that its file has, however long the superblock says that it is."""
        plan = self.plan
        length = os.fstat(self.fds[plan.file_of(region)]).st_size - plan.region_offset(region) - plan.header_bytes
        return max(0, min(length, plan.region_bytes))

    def where(self, region: int) -> str:
        """A region in words."""
        return f"slab-{self.plan.file_of(region):05d}, region {region}"

    def _look_at_lock(self) -> bool:
        """Record a live owner, or lock the root against owners, as the access says. False if there is no lock file.

        Raises RootBusyError.
        """
        try:
            if self.access is Access.READ:  # a tool that only reads must not keep a tier from opening the root
                self.owner = self.folder.live_owner()
            elif not self.folder.try_lock(shared=self.access is Access.CHECK):
                raise RootBusyError(self.path, self.folder.owner())
        except FileNotFoundError:
            return False
        if self.access is Access.CHANGE:
            self.folder.write_owner()
        return True

    def read_superblock(self) -> None:
        """Read what the root states of itself. Raises RootError if no copy is whole."""
        self.data = self.folder.read_superblock()
        block = self.folder.known_superblock(self.data)
        if block is None:
            raise RootError(
                self.path, "cannot be checked: its superblock has no whole copy; a tier that opens it starts empty"
            )
        self.superblock = block

    @property
    def copies_agree(self) -> bool:
        """True if both copies of the superblock are the same."""
        return self.data[:COPY_BYTES] == self.data[COPY_BYTES : 2 * COPY_BYTES]

    def read_regions(self) -> None:
        """Read the header of every region."""
        self.formats, self.bad_regions = [], []
        for number, fd in self.fds.items():
            for region in self.plan.regions_of(number):
                fmt = self._look_at_region(fd, region)
                if isinstance(fmt, InspectedFormat):
                    self.formats.append(fmt)
                elif fmt:
                    self.bad_regions.append((region, fmt))

    def format_now(self, region: int) -> InspectedFormat | None:
        """The format that the header of a region states now; None if it states none."""
        fmt = self._look_at_region(self.fds[self.plan.file_of(region)], region)
        return fmt if isinstance(fmt, InspectedFormat) else None

    def _open_slabs(self) -> None:
        flags = os.O_RDWR if self.access is Access.CHANGE else os.O_RDONLY
        for number in self.folder.existing_slabs():
            if number < self.plan.files:
                self.fds[number] = self.folder.open_file(f"slab-{number:05d}", flags)
                self.closing.callback(os.close, self.fds[number])

    def _look_at_region(self, fd: int, region: int) -> InspectedFormat | str:
        """The format of a region, or what is wrong with its header; empty for a region that never had one."""
        try:
            page = memoryview(os.pread(fd, self.plan.header_bytes, self.plan.region_offset(region)))
        except OSError:
            return "unreadable"
        if len(page) < self.plan.header_bytes or not any(page):
            return ""
        header = decode_region_header(page)
        if header is None:
            return "header_checksum"
        if not self.can_be_formatted(header):
            return "slot_size"
        own = header.root_uuid == self.superblock.root_uuid
        if own and header.region != region:
            return "region"
        return InspectedFormat(region, header.slot_bytes, header.generation, own)

    def can_be_formatted(self, header: RegionHeader) -> bool:
        """True if a region can have the format that a header states."""
        return header.generation > 0 and self.plan.can_be_formatted(header.slot_bytes)

    def read_snapshot(self) -> None:
        """Read the snapshot that the next open would use, if there is one. Raises OSError."""
        block = self.superblock
        slots_max = sum(os.fstat(fd).st_size for fd in self.fds.values()) // self.plan.header_bytes
        limit = _SNAPSHOT_SLACK_BYTES + slots_max * _SNAPSHOT_BYTES_PER_SLOT
        data = self.folder.read_snapshot(limit) if block.clean else b""
        self.snapshot_there = bool(data) and not is_of_other_version(data)
        self.snapshot = decode_snapshot(data, block)
        self._snapshot_of = block

    def is_snapshot_current(self) -> bool:
        """True unless a tier, which READ access does not keep out, has opened the root since the snapshot was read."""
        if self.access is not Access.READ:
            return True
        return self.folder.known_superblock(self.folder.read_superblock()) == self._snapshot_of

    def place(self, fmt: InspectedFormat, index: int) -> tuple[int, int]:
        """The file and the offset of a slot."""
        return self.fds[self.plan.file_of(fmt.region)], self.plan.slot_offset(fmt.region, index, fmt.slot_bytes)

    def write(self, fd: int, offset: int, data: bytes) -> bool:
        """Write a page of a slab in place. False if the disk fails."""
        self.begin_change()
        with suppress(OSError):
            return os.pwrite(fd, data, offset) == len(data)
        return False

    def begin_change(self) -> None:
        """Before the first write: mark the root as in use, durably, and remove the snapshot that would not be true.

        If the process dies then, the next open reads every header. Raises RootError or OSError.
        """
        if self._changed:
            return
        assert self.access is Access.CHANGE
        self._was_clean = self.superblock.clean
        self._mark(clean=False)
        self.folder.drop_snapshot()
        self.folder.sync(self.folder.fd)
        self._changed = True

    def _mark(self, clean: bool) -> None:
        self.write_superblock(replace(self.superblock, clean=clean, sequence=self.superblock.sequence + 1))

    def write_superblock(self, block: Superblock) -> None:
        """Make a superblock durable. Raises RootError."""
        copy = encode_superblock(block)
        try:
            self.folder.write_superblock(copy)
        except OSError as error:
            raise RootError(self.path, f"the superblock cannot be written ({error.strerror})") from error
        self.superblock, self.data = block, copy + copy + self.data[SUPERBLOCK_BYTES:]

    def _sync(self) -> None:
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

    def _namespaces(self) -> tuple[StoredNamespace, ...]:
        """The one opened last comes first."""
        known = sorted(self.superblock.namespaces, key=lambda item: item[1].session, reverse=True)
        return tuple(self.with_manifest(StoredNamespace(digest, entry.epoch, entry.session)) for digest, entry in known)
