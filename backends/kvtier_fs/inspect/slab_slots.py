"""What a slot's header page is, judged offline, without what a load expects: block, leftover, damage, nothing."""

from typing import NamedTuple

from kvtier.tier_api.block_envelope import Mismatch, SlotHeader, checksum_holds, decode_slot_header
from kvtier.tier_api.inspection import BlockState
from kvtier_fs.format.superblock import Superblock
from kvtier_fs.inspect.found import MAGIC, Judged, key_fault, page_fault


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


def judge(page: memoryview, index: int, fmt: InspectedFormat, superblock: Superblock) -> Judged:
    """Judge the header page of slot `index` of a region; the payload is not read.

    A page without a magic is damage in a region of the first format, which was all zeros before. In one that was
    formatted again it is some old payload, where a slot of the new size has not been written yet.
    """
    header = decode_slot_header(page)
    if header is None:
        fault = page_fault(page)
        if fault == MAGIC and not checksum_holds(page) and fmt.generation > 1:
            fault = ""
        return Judged(fault=fault)
    if header.root_uuid != superblock.root_uuid:
        return Judged(BlockState.FOREIGN, header)
    if header.region != fmt.region:
        return Judged(fault=Mismatch.REGION)
    if not fmt.own or header.region_generation != fmt.generation:
        return Judged(BlockState.ORPHANED, header)
    fault = _place_fault(header, index, fmt, len(page))
    if fault:
        return Judged(fault=fault)
    epoch = superblock.epoch(header.namespace)
    if header.epoch > epoch:
        return Judged(fault=Mismatch.EPOCH)
    return Judged(BlockState.CURRENT if header.epoch == epoch else BlockState.OLD, header)


def _place_fault(header: SlotHeader, index: int, fmt: InspectedFormat, header_bytes: int) -> str:
    """The first wrong field of a header that has the region's current format; empty if all are right."""
    if header.slot_index != index:
        return Mismatch.SLOT_INDEX
    if header.slot_bytes != fmt.slot_bytes:
        return Mismatch.SLOT_BYTES
    if not 0 < header.payload_bytes <= fmt.slot_bytes - header_bytes:
        return Mismatch.PAYLOAD_BYTES
    return key_fault(header)
