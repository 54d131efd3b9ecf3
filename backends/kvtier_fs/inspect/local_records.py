"""The records of a slab root, checked and repaired: superblock copies, region headers, slab sizes, unknown files."""

import os
from collections.abc import Iterator
from contextlib import suppress

from kvtier.tier.block_envelope import SlotHeader, decode_slot_header
from kvtier.tier.inspection import Finding, FindingKind
from kvtier_fs.format.region_header import LARGE_REGION_BYTES, RegionHeader, encode_region_header
from kvtier_fs.format.superblock import COPY_BYTES, decode_superblock
from kvtier_fs.inspect.local_root import InspectedRoot
from kvtier_fs.inspect.local_slots import InspectedFormat, SlotRun
from kvtier_fs.inspect.store import shown
from kvtier_fs.io.syscalls import EXT4_MAGIC, XFS_MAGIC, fallocate, filesystem_magic
from kvtier_fs.local.folder import SNAPSHOT_NAME
from kvtier_fs.roots.folder import SUPERBLOCK_NAME

_PREALLOCATING = (EXT4_MAGIC, XFS_MAGIC, 0x9123683E, 0x01021994)
"""File systems that always reserve the whole range (btrfs and tmpfs are the last two): there a slab is never short."""


def check_records(root: InspectedRoot, repair: bool) -> Iterator[Finding]:
    """Check everything but the slots. Regions that repair brings back join `root.formats`."""
    yield from _superblock_copies(root, repair)
    yield from _unknown_files(root)
    yield from _snapshot(root, repair)
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


def lost_slots(
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
    stated = max(_stated_headers(root, fd, region), key=lambda header: header.region_generation, default=None)
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


def _stated_headers(root: InspectedRoot, fd: int, region: int) -> Iterator[SlotHeader]:
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
