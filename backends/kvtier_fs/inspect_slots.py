"""What a slot's header page says offline, where no load tells what to expect: a block, a leftover, damage, nothing."""

from __future__ import annotations

from typing import NamedTuple

from kvtier.inspection import BlockState
from kvtier.keys import OffloadKey, key_group
from kvtier_fs.slot import SlotHeader, checksum_holds, decode_slot_header, magic_holds
from kvtier_fs.superblock import Superblock
from kvtier_fs.verify import Mismatch

MAGIC = "magic"
_GROUP_BYTES = 4


class Cut(NamedTuple):
    """How a region is cut, by the header in front of it. `own` is false if the header is another root's."""

    region: int
    slot_bytes: int
    generation: int
    own: bool


class Run(NamedTuple):
    """Some slots of one region, in a row: what one thread goes through at a time."""

    cut: Cut
    first: int
    slots: int


class Judged(NamedTuple):
    """What a header page is. Without a state it holds no block; with a `fault` it is damaged, and that is where."""

    state: BlockState | None = None
    header: SlotHeader | None = None
    fault: str = ""


NOTHING = Judged()


def judge(page: memoryview, index: int, cut: Cut, superblock: Superblock) -> Judged:
    """Judge the header page of slot `index` of a region; the payload is not looked at.

    A page without a magic is damage in a region of the first cut, which was all zeros before. In one that was cut again
    it is some old payload, where a slot of the new size has not been written yet.
    """
    header = decode_slot_header(page)
    if header is None:
        fault = page_fault(page)
        if fault == MAGIC and not checksum_holds(page) and cut.generation > 1:
            fault = ""
        return Judged(fault=fault) if fault else NOTHING
    if header.root_uuid != superblock.root_uuid:
        return Judged(BlockState.FOREIGN, header)
    if header.region != cut.region:
        return Judged(fault=Mismatch.REGION)
    if not cut.own or header.region_generation != cut.generation:
        return Judged(BlockState.ORPHANED, header)
    fault = _place_fault(header, index, cut, len(page))
    if fault:
        return Judged(fault=fault)
    epoch = superblock.epoch(header.namespace)
    if header.epoch > epoch:
        return Judged(fault=Mismatch.EPOCH)
    return Judged(BlockState.CURRENT if header.epoch == epoch else BlockState.OLD, header)


def page_fault(page: memoryview) -> str:
    """Why a page is no whole header of this format; empty if it is all zeros."""
    if magic_holds(page):
        return Mismatch.VERSION if checksum_holds(page) else Mismatch.HEADER_CHECKSUM
    return MAGIC if any(page) else ""


def key_fault(header: SlotHeader) -> str:
    """Why a header's key is none; empty if it is one, of the group that the header names."""
    if len(header.key) <= _GROUP_BYTES:
        return Mismatch.KEY
    return "" if key_group(OffloadKey(header.key)) == header.group else Mismatch.GROUP


def _place_fault(header: SlotHeader, index: int, cut: Cut, header_bytes: int) -> str:
    """What a header of the region's current cut says wrongly of its place or of itself; empty if nothing."""
    if header.slot_index != index:
        return Mismatch.SLOT_INDEX
    if header.slot_bytes != cut.slot_bytes:
        return Mismatch.SLOT_SIZE
    if not 0 < header.payload_bytes <= cut.slot_bytes - header_bytes:
        return Mismatch.LENGTH
    return key_fault(header)
