"""What a slot's header page is, judged offline, without what a load expects: block, leftover, damage, nothing."""

from typing import NamedTuple

from kvtier.tier.block_envelope import MAGIC, Mismatch, checksum_holds, decode_slot_header, is_other_version, page_fault
from kvtier.tier.inspection import BlockState
from kvtier_fs.format.superblock import Superblock
from kvtier_fs.inspect.found import HeaderVerdict, judge_header


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


def judge(page: memoryview, index: int, fmt: InspectedFormat, superblock: Superblock) -> HeaderVerdict:
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
