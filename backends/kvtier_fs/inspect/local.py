"""A slab root for `kvtier fsck`, `ls`, `du` and `gc`: its records and every slot judged, damaged ones emptied."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from kvtier.errors import RootError
from kvtier.tier.block_envelope import (
    MAGIC,
    Mismatch,
    SlotHeader,
    checksum_holds,
    decode_slot_header,
    is_other_version,
    page_fault,
)
from kvtier.tier.inspection import Access, BlockState, Finding, FindingKind
from kvtier.tier.store_inspection import CheckedPage
from kvtier_fs.format.region_header import LARGE_REGION_BYTES, RegionHeader, encode_region_header
from kvtier_fs.format.superblock import COPY_BYTES, Superblock, decode_superblock
from kvtier_fs.inspect.local_root import InspectedFormat, InspectedRoot, SlotRun
from kvtier_fs.inspect.store import CheckedRun, HeaderVerdict, SlotContent, judge_header, read_fault, shown
from kvtier_fs.io.syscalls import EXT4_MAGIC, XFS_MAGIC, fallocate, filesystem_magic
from kvtier_fs.local.folder import SNAPSHOT_NAME
from kvtier_fs.roots.folder import SUPERBLOCK_NAME

_SECOND_LOOK_SECONDS = 2.0
"""How long what looks damaged beside an owner is left alone before it is read once more."""
_CHANGING = "being_written"
_PREALLOCATING = (EXT4_MAGIC, XFS_MAGIC, 0x9123683E, 0x01021994)
"""File systems that always reserve the whole range (btrfs and tmpfs are the last two): there a slab is never short."""


class LocalInspection(InspectedRoot):
    """The inspection of one slab root with its blocks. A block is removed by zeroing its header.

    With READ access a tier may own the root and write meanwhile. Damage is then what looks the same twice.
    """

    def _read_places(self, run: SlotRun) -> Iterator[SlotContent]:
        fmt, header_bytes = run.fmt, self.plan.header_bytes
        zeros = bytes(header_bytes)
        page = memoryview(bytearray(header_bytes))
        for index in range(run.first, run.first + run.slots):
            fd, offset = self.place(fmt, index)
            try:
                length = os.preadv(fd, [page], offset)
            except OSError as error:
                judged = HeaderVerdict(fault=read_fault(error))
            else:
                if length != header_bytes or page == zeros:
                    continue
                judged = _judge(page, index, fmt, self.superblock)
            yield SlotContent(judged, fmt.region, index, fmt.slot_bytes, fd, offset + header_bytes, None)

    def _verify(self, run: SlotRun) -> CheckedRun[SlotContent, SlotRun]:
        checked = self._twice(super()._verify(run))
        fd, begin = self.place(run.fmt, run.first)
        # Not kept in memory: it would push out what is in use, and the next check would not read the disk.
        os.posix_fadvise(fd, begin, run.slots * run.fmt.slot_bytes, os.POSIX_FADV_DONTNEED)
        return checked

    def _twice(self, checked: CheckedRun[SlotContent, SlotRun]) -> CheckedRun[SlotContent, SlotRun]:
        """Read once more what looks damaged, if a tier may be writing it: it is damaged if it looks the same."""
        first = {one.slot: (one.judged, fault) for one, fault in checked.others if fault}
        if not first or self.access is not Access.READ:
            return checked
        time.sleep(_SECOND_LOOK_SECONDS)
        self.read_superblock()  # a reset raises an epoch
        if self.format_now(checked.run.fmt.region) != checked.run.fmt:
            return checked._replace(others=[(one, fault and _CHANGING) for one, fault in checked.others])
        again = super()._verify(checked.run)
        return again._replace(
            others=[
                (one, fault if not fault or first.get(one.slot) == (one.judged, fault) else _CHANGING)
                for one, fault in again.others
            ]
        )

    def _check_part(self, part: int, repair: bool) -> Iterator[CheckedPage[SlotContent]]:
        for checked in self._in_order(self._verify, self.runs(part)):
            faults = {one: fault for one, fault in checked.others if fault}
            changing = [one for one, fault in faults.items() if fault == _CHANGING]
            findings = [Finding(FindingKind.UNCHECKED, _CHANGING, self._place_in_words(one)) for one in changing]
            lost = _find_lost_slots(self, checked.run, checked.whole, {one.slot for one in faults}, repair)
            findings += _by_snapshot(self, lost)
            page = checked.page(findings)
            yield page._replace(others=[(one, fault) for one, fault in page.others if fault != _CHANGING])

    def _place_in_words(self, one: SlotContent) -> str:
        return f"{self.where(one.region)}, slot {one.slot}"

    def _remove(self, contents: Sequence[SlotContent], must: bool) -> set[SlotContent]:
        header_bytes, gone = self.plan.header_bytes, set()
        for one in contents:
            if self.write(one.fd, one.payload_at - header_bytes, bytes(header_bytes)):
                gone.add(one)
            elif must:
                raise RootError(self.path, f"region {one.region}, slot {one.slot} cannot be written")
        return gone

    def _check_records(self, repair: bool) -> Iterator[Finding]:
        if self.access is Access.READ and (self.bad_regions or not self.copies_agree):
            time.sleep(_SECOND_LOOK_SECONDS)
            self.read_superblock()
            self.read_regions()
        self.read_snapshot()
        yield from _check_records(self, repair)

    def _end_check(self, repair: bool) -> Iterable[Finding]:
        self._sync()
        return ()


def _judge(page: memoryview, index: int, fmt: InspectedFormat, superblock: Superblock) -> HeaderVerdict:
    """Judge the header page of slot `index` of a region; the payload is not read.

    A page without a magic is damage in a region of the first format, which was all zeros before. In one that was
    formatted again it is some old payload, where a slot of the new size has not been written yet.
    """
    header = decode_slot_header(page)
    if header is None and is_other_version(page):
        return HeaderVerdict()  # another release stored it; a tier that opens the root writes over it
    if header is None:
        fault = page_fault(page)
        if fault == MAGIC and not checksum_holds(page) and fmt.generation > 1:
            fault = ""
        return HeaderVerdict(fault=fault)
    if header.root_uuid != superblock.root_uuid:
        return HeaderVerdict(BlockState.FOREIGN, header)
    if header.region != fmt.region:
        return HeaderVerdict(fault=Mismatch.REGION)
    if not fmt.own or header.region_generation != fmt.generation:
        return HeaderVerdict(BlockState.ORPHANED, header)
    payload_bytes = max(1, min(header.payload_bytes, fmt.slot_bytes - len(page)))
    expected = header._replace(slot_index=index, slot_bytes=fmt.slot_bytes, payload_bytes=payload_bytes)
    return judge_header(header, expected, superblock.epoch(header.namespace))


# -- records ---------------------------------------------------------------------------------------------------------


def _check_records(root: InspectedRoot, repair: bool) -> Iterator[Finding]:
    """Check everything but the slots. Regions that repair brings back join `root.formats`."""
    yield from _superblock_copies(root, repair)
    yield from _unknown_files(root)
    yield from _by_snapshot(root, _snapshot(root, repair))
    for region, reason in root.bad_regions:
        repaired = repair and _mend_region(root, region)
        yield Finding(FindingKind.CORRUPT, f"region_{reason}", root.where(region), repaired)
    for fmt in root.formats:
        if not fmt.own:
            yield Finding(FindingKind.FOREIGN, "region_root", root.where(fmt.region))
    yield from _slab_sizes(root, repair)


def _superblock_copies(root: InspectedRoot, repair: bool) -> Iterator[Finding]:
    found = []
    for number, at in enumerate((0, COPY_BYTES)):
        copy = root.data[at : at + COPY_BYTES]
        block = decode_superblock(copy)
        where = f"{SUPERBLOCK_NAME}, copy {number}"
        if not copy:
            found.append(Finding(FindingKind.STALE_SUPERBLOCK, "missing", where))
        elif block is None:
            found.append(Finding(FindingKind.BAD_SUPERBLOCK, "checksum", where))
        elif block != root.superblock:
            found.append(Finding(FindingKind.STALE_SUPERBLOCK, "sequence", where))
    if found and repair:
        root.write_superblock(root.superblock)
    for finding in found:
        yield finding._replace(repaired=repair)


def _by_snapshot(root: InspectedRoot, findings: Iterator[Finding]) -> list[Finding]:
    """Findings that follow from the snapshot. Once a tier has opened the root it says nothing any more."""
    found = list(findings)
    if not found or root.is_snapshot_current():
        return found
    root.snapshot = None
    return [Finding(FindingKind.UNCHECKED, _CHANGING, SNAPSHOT_NAME)]


def _snapshot(root: InspectedRoot, repair: bool) -> Iterator[Finding]:
    """A snapshot that counts must be complete, and its regions must have the formats it states."""
    if not root.snapshot_there:
        return
    if root.snapshot is None:
        yield Finding(FindingKind.BAD_SNAPSHOT, "checksum", SNAPSHOT_NAME, repair and _forget_snapshot(root))
        return
    formatted_as = {fmt.region: (fmt.slot_bytes, fmt.generation) for fmt in root.formats if fmt.own}
    bad = {region for region, _ in root.bad_regions}
    for region, fmt in enumerate(root.snapshot.formats):
        if fmt.slot_bytes and region not in bad and formatted_as.get(region) != (fmt.slot_bytes, fmt.generation):
            repaired = repair and _forget_snapshot(root)
            yield Finding(FindingKind.CORRUPT, "lost_region", root.where(region), repaired)


def _forget_snapshot(root: InspectedRoot) -> bool:
    root.begin_change()
    return True


def _find_lost_slots(
    root: InspectedRoot, run: SlotRun, whole: dict[int, bytes], corrupt: set[int], repair: bool
) -> Iterator[Finding]:
    """Slots that hold another key than the snapshot states, or none; not those found corrupt already.

    Repair removes the snapshot.
    """
    snapshot = root.snapshot
    region, first = run.fmt.region, run.first
    if snapshot is None or not run.fmt.own or snapshot.formats[region].generation != run.fmt.generation:
        return
    part = slice(int(snapshot.ends[region - 1]) if region else 0, int(snapshot.ends[region]))
    end = first + run.slots
    last = end == root.slots_in_file(run.fmt)  # a block behind the end of the file is lost as well
    for index, key in zip(snapshot.indexes[part].tolist(), snapshot.keys[part], strict=True):
        if first <= index and (index < end or last) and index not in corrupt and whole.get(index) != key:
            repaired = repair and _forget_snapshot(root)
            yield Finding(FindingKind.CORRUPT, "lost_block", f"{root.where(region)}, slot {index}", repaired)


def _unknown_files(root: InspectedRoot) -> Iterator[Finding]:
    for name in root.folder.unknown():
        yield Finding(FindingKind.UNKNOWN_FILE, "name", shown(name))
    for number in root.folder.existing_slabs():
        if number >= root.plan.files:
            yield Finding(FindingKind.UNKNOWN_FILE, "outside_the_plan", f"slab-{number:05d}")


def _slab_sizes(root: InspectedRoot, repair: bool) -> Iterator[Finding]:
    """A slab that ends before a region does is truncated, where the file system reserves whole regions."""
    if filesystem_magic(root.folder.fd) not in _PREALLOCATING:
        return
    for region in [fmt.region for fmt in root.formats]:
        fd = root.fds[root.plan.file_of(region)]
        length = os.fstat(fd).st_size
        missing = root.plan.region_offset(region) + root.plan.stride - length
        if missing > 0:
            # Only the superblock says how much: it may take twice what is there, or what regions usually take.
            repaired = repair and missing <= max(length, LARGE_REGION_BYTES) and _reserve(root, fd, region)
            yield Finding(FindingKind.TRUNCATED, "length", root.where(region), repaired)


def _reserve(root: InspectedRoot, fd: int, region: int) -> bool:
    root.begin_change()
    with suppress(OSError):
        return fallocate(fd, root.plan.region_offset(region), root.plan.stride)
    return False


def _mend_region(root: InspectedRoot, region: int) -> bool:
    """Write a region's header anew as its slots state its format, or make the region an empty one.

    Of what the slots state the latest format counts. Should a later one have left no slot, the mended header is
    as good as one whose write a crash lost: every slot is still verified by itself.
    """
    fd, offset = root.fds[root.plan.file_of(region)], root.plan.region_offset(region)
    page = memoryview(bytearray(root.plan.header_bytes))
    stated = max(_read_slot_headers(root, fd, region), key=lambda header: header.region_generation, default=None)
    fmt = None
    if stated is not None:
        header = RegionHeader(root.superblock.root_uuid, region, stated.slot_bytes, stated.region_generation)
        if root.can_be_formatted(header):
            encode_region_header(header, page)
            fmt = InspectedFormat(region, header.slot_bytes, header.generation, True)
    if not root.write(fd, offset, bytes(page)):
        return False
    if fmt is not None:
        root.formats.append(fmt)
        root.formats.sort()
    return True


def _read_slot_headers(root: InspectedRoot, fd: int, region: int) -> Iterator[SlotHeader]:
    """Every slot header of a region that lies where it says, whatever the region's header says."""
    plan = root.plan
    for at in range(plan.header_bytes, root.bytes_in_file(region) + 1, plan.header_bytes):
        try:
            page = memoryview(os.pread(fd, plan.header_bytes, plan.region_offset(region) + at))
        except OSError:
            continue
        header = decode_slot_header(page)
        if (
            header is not None
            and header.root_uuid == root.superblock.root_uuid
            and header.region == region
            and plan.header_bytes + header.slot_index * header.slot_bytes == at
        ):
            yield header
