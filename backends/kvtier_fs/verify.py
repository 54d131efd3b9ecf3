"""Is this what was stored? Every load is checked here before anyone may use its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvtier.checksum import checksum
from kvtier_fs.slot import (
    SlotHeader,
    checksum_holds,
    decode_slot_header,
    matching_digest,
    pack_fixed,
    unpack_fixed,
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
    return verify_block(read.page, read.payload, pack_fixed(read.expected, len(read.page)), read.expected.key)


def verify_block(
    page: memoryview, payload: memoryview, fixed: bytes, key: bytes, keep_gil: bool = False
) -> Mismatch | bytes:
    """`verify_slot` where the fixed fields that are expected are packed already."""
    stated = matching_digest(page, fixed, key)
    if stated is None:
        whole = checksum_holds(page)
        return _first_difference(page, unpack_fixed(fixed, key)) if whole else Mismatch.HEADER_CHECKSUM
    return stated if checksum(payload, keep_gil) == stated else Mismatch.PAYLOAD


def _first_difference(page: memoryview, expected: SlotHeader) -> Mismatch:
    found = decode_slot_header(page)
    if found is None:
        return Mismatch.VERSION
    differing = (place for place, name in _PLACES if getattr(found, name) != getattr(expected, name))
    return next(differing, Mismatch.KEY)


class Check(NamedTuple):
    """What `verify_block` is asked about one block."""

    page: memoryview
    payload: memoryview
    fixed: bytes
    key: bytes


def verify_blocks(checks: Sequence[Check], keep_gil: bool = False) -> list[Mismatch | bytes]:
    """`verify_block` for each of a batch."""
    return [verify_block(*check, keep_gil) for check in checks]
