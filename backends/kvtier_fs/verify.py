"""Is this what was stored? Every load is checked here, on the root's threads, before anyone may use its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier.checksum import checksum
from kvtier_fs.slot import (
    KEY_AT,
    SlotHeader,
    checksum_holds,
    decode_slot_header,
    fixed_bytes,
    magic_holds,
    pack_fixed,
    payload_digest,
)


class Mismatch(StrEnum):
    """Where a slot differs from what its reader was promised; also the names of the counters."""

    HEADER_CHECKSUM = "header_checksum"
    VERSION = "version"
    ROOT = "root"
    REGION = "region"
    REGION_GENERATION = "region_generation"
    SLOT_INDEX = "slot_index"
    SLOT_SIZE = "slot_size"
    NAMESPACE = "namespace"
    EPOCH = "epoch"
    KEY = "key"
    GROUP = "group"
    LENGTH = "length"
    GENERATION = "generation"
    PAYLOAD = "payload"


_PLACES = (
    (Mismatch.ROOT, "root_uuid"),
    (Mismatch.REGION, "region"),
    (Mismatch.REGION_GENERATION, "region_generation"),
    (Mismatch.SLOT_INDEX, "slot_index"),
    (Mismatch.SLOT_SIZE, "slot_bytes"),
    (Mismatch.NAMESPACE, "namespace"),
    (Mismatch.EPOCH, "epoch"),
    (Mismatch.KEY, "key"),
    (Mismatch.GROUP, "group"),
    (Mismatch.LENGTH, "payload_bytes"),
    (Mismatch.GENERATION, "generation"),
)


@dataclass(frozen=True, slots=True)
class ReadSlot:
    """What was read and what it should be: the header page, the payload, the header expected."""

    page: memoryview
    payload: memoryview
    expected: SlotHeader


def verify_slot(read: ReadSlot) -> Mismatch | bytes:
    """The payload's checksum if everything holds, else the first thing that does not."""
    page, expected = read.page, read.expected
    if not checksum_holds(page):
        return Mismatch.HEADER_CHECKSUM
    key_end = KEY_AT + len(expected.key)
    if not (
        magic_holds(page)
        and fixed_bytes(page) == pack_fixed(expected, len(page))
        and page[KEY_AT:key_end] == expected.key
    ):
        return _first_difference(page, expected)
    stated = payload_digest(page)
    return stated if checksum(read.payload) == stated else Mismatch.PAYLOAD


def _first_difference(page: memoryview, expected: SlotHeader) -> Mismatch:
    found = decode_slot_header(page)
    if found is None:
        return Mismatch.VERSION
    differing = (place for place, name in _PLACES if getattr(found, name) != getattr(expected, name))
    return next(differing, Mismatch.KEY)


def verify_slots(reads: Sequence[ReadSlot]) -> list[Mismatch | bytes]:
    """`verify_slot` for each of a batch."""
    return [verify_slot(read) for read in reads]
