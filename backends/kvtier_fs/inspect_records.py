"""What a root says of itself, checked and repaired: superblock copies, region headers, slab sizes, unknown files."""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvtier.inspection import Finding, FindingKind
from kvtier_fs.folder import SNAPSHOT_NAME, SUPERBLOCK_NAME
from kvtier_fs.inspect_root import InspectedRoot
from kvtier_fs.inspect_slots import Cut, Run
from kvtier_fs.regions import RegionHeader, encode_region_header
from kvtier_fs.slot import SlotHeader, decode_slot_header
from kvtier_fs.superblock import COPY_BYTES, decode_superblock
from kvtier_fs.syscalls import EXT4_MAGIC, XFS_MAGIC, fallocate, filesystem_magic

_PREALLOCATING = (EXT4_MAGIC, XFS_MAGIC, 0x9123683E, 0x01021994)
"""File systems that always reserve what is asked (btrfs and tmpfs are the last two): there a slab is never short."""
_NAME_MAX = 64


def check_records(root: InspectedRoot, repair: bool) -> Iterator[Finding]:
    """Check everything but the slots. Regions that repair brings back join `root.cuts`."""
    yield from _superblock_copies(root, repair)
    yield from _unknown_files(root)
    yield from _snapshot(root, repair)
    for region, reason in root.bad_regions:
        repaired = repair and _mend_region(root, region)
        yield Finding(FindingKind.CORRUPT, f"region_{reason}", _where(root, region), repaired)
    for cut in root.cuts:
        if not cut.own:
            yield Finding(FindingKind.FOREIGN, "region_root", _where(root, cut.region))
    yield from _slab_sizes(root, repair)


def _where(root: InspectedRoot, region: int) -> str:
    return f"slab-{root.plan.file_of(region):05d}, region {region}"


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
        root.heal_superblock()
    for finding in found:
        yield finding._replace(repaired=repair)


def _snapshot(root: InspectedRoot, repair: bool) -> Iterator[Finding]:
    """A snapshot that counts must be whole, and the regions it speaks of must be cut as it says."""
    if not root.snapshot_there:
        return
    if root.snapshot is None:
        yield Finding(FindingKind.BAD_SNAPSHOT, "checksum", SNAPSHOT_NAME, repair and _forget_snapshot(root))
        return
    cut_as = {cut.region: (cut.slot_bytes, cut.generation) for cut in root.cuts if cut.own}
    bad = {region for region, _ in root.bad_regions}
    for region, cut in enumerate(root.snapshot.cuts):
        if cut.slot_bytes and region not in bad and cut_as.get(region) != (cut.slot_bytes, cut.generation):
            repaired = repair and _forget_snapshot(root)
            yield Finding(FindingKind.CORRUPT, "lost_region", _where(root, region), repaired)


def _forget_snapshot(root: InspectedRoot) -> bool:
    root.begin_change()
    return True


def lost_slots(root: InspectedRoot, run: Run, whole: dict[int, bytes], repair: bool) -> Iterator[Finding]:
    """Slots of which the snapshot says that they hold a key, and they do not. Repair forgets the snapshot."""
    snapshot = root.snapshot
    region, first = run.cut.region, run.first
    if snapshot is None or not run.cut.own or snapshot.cuts[region].generation != run.cut.generation:
        return
    part = slice(int(snapshot.ends[region - 1]) if region else 0, int(snapshot.ends[region]))
    for index, key in zip(snapshot.indexes[part].tolist(), snapshot.keys[part], strict=True):
        if first <= index < first + run.slots and whole.get(index) != key:
            repaired = repair and _forget_snapshot(root)
            yield Finding(FindingKind.CORRUPT, "lost_block", f"{_where(root, region)}, slot {index}", repaired)


def _unknown_files(root: InspectedRoot) -> Iterator[Finding]:
    for name in root.folder.unknown():
        yield Finding(FindingKind.UNKNOWN_FILE, "name", ascii(name)[1:-1][:_NAME_MAX])
    for number in root.folder.existing_slabs():
        if number >= root.plan.files:
            yield Finding(FindingKind.UNKNOWN_FILE, "outside_the_plan", f"slab-{number:05d}")


def _slab_sizes(root: InspectedRoot, repair: bool) -> Iterator[Finding]:
    """A slab that ends before a region does that is cut in it, where the file system reserves whole regions."""
    if filesystem_magic(root.folder.fd) not in _PREALLOCATING:
        return
    for number, fd in root.fds.items():
        size = os.fstat(fd).st_size
        short = [
            cut.region
            for cut in root.cuts
            if root.plan.file_of(cut.region) == number and root.plan.region_offset(cut.region) + root.plan.stride > size
        ]
        for region in short:
            repaired = repair and _reserve(root, fd, region)
            yield Finding(FindingKind.TRUNCATED, "length", _where(root, region), repaired)


def _reserve(root: InspectedRoot, fd: int, region: int) -> bool:
    root.begin_change()
    try:
        fallocate(fd, root.plan.region_offset(region), root.plan.stride)
    except OSError:
        return False
    return True


def _mend_region(root: InspectedRoot, region: int) -> bool:
    """Write a region's header anew as its slots tell how it was cut, or make the region an empty one.

    Of what the slots tell the latest cut counts. Should a later one have left no slot, the mended header is as good as
    one whose write a crash lost: every slot still has to prove what it is.
    """
    fd, offset = root.fds[root.plan.file_of(region)], root.plan.region_offset(region)
    page = memoryview(bytearray(root.plan.header_bytes))
    told = max(_told(root, fd, region), key=lambda header: header.region_generation, default=None)
    cut = None
    if told is not None:
        header = RegionHeader(root.superblock.root_uuid, region, told.slot_bytes, told.region_generation)
        if root.is_cut(header):
            encode_region_header(header, page)
            cut = Cut(region, header.slot_bytes, header.generation, True)
    if not root.write(fd, offset, bytes(page)):
        return False
    if cut is not None:
        root.cuts.append(cut)
        root.cuts.sort()
    return True


def _told(root: InspectedRoot, fd: int, region: int) -> Iterator[SlotHeader]:
    """Every slot header of a region that lies where it says, whatever the region's header says."""
    plan = root.plan
    for at in range(plan.header_bytes, plan.stride - plan.header_bytes + 1, plan.header_bytes):
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
