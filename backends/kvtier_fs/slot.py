"""The header page in front of every slot: its bytes, written and read back. `docs/format.md` is the reference."""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

SLOT_MAGIC = b"KVTIERSL"
FORMAT_VERSION = 1
DIGEST_BYTES = 16
MIN_HEADER_BYTES = 4096

_FRONT = struct.Struct("<8s16s")
_FIXED = struct.Struct("<II16sQ16sIIQQQQIHH")
_CHECKED_FROM = _FRONT.size
_PAYLOAD_DIGEST_AT = _CHECKED_FROM + _FIXED.size
KEY_AT = _PAYLOAD_DIGEST_AT + DIGEST_BYTES


class SlotHeader(NamedTuple):
    """Everything a slot says about itself. A named tuple, because one is made for every block moved.

    `region` counts within its root. `generation` orders the copies of a key, `region_generation` the cuts of a region.
    """

    namespace: bytes
    epoch: int
    root_uuid: bytes
    region: int
    slot_index: int
    region_generation: int
    slot_bytes: int
    payload_bytes: int
    generation: int
    group: int
    key: bytes
    payload_digest: bytes = b""


def max_key_bytes(header_bytes: int) -> int:
    """The longest key (group included) a header of this size takes."""
    return min(header_bytes - KEY_AT, 0xFFFF)


def header_checksum(page: memoryview) -> bytes:
    """The checksum of a header page: everything behind the checksum itself."""
    return xxhash.xxh3_128_digest(page[_CHECKED_FROM:])


def pack_fixed(header: SlotHeader, header_bytes: int) -> bytes:
    """The fixed fields that a reader can foretell, in one string: everything between checksum and payload digest."""
    return _FIXED.pack(
        FORMAT_VERSION,
        header_bytes,
        header.namespace,
        header.epoch,
        header.root_uuid,
        header.region,
        header.slot_index,
        header.region_generation,
        header.slot_bytes,
        header.payload_bytes,
        header.generation,
        header.group,
        len(header.key),
        0,
    )


def fixed_bytes(page: memoryview) -> memoryview:
    """Where `pack_fixed` lies in a page."""
    return page[_CHECKED_FROM:_PAYLOAD_DIGEST_AT]


def encode_slot_header(header: SlotHeader, page: memoryview, zeros: bytes) -> None:
    """Fill a header page. `zeros` is a page of zero bytes: whatever the header does not use is zero on disk."""
    key_end = KEY_AT + len(header.key)
    page[_CHECKED_FROM:_PAYLOAD_DIGEST_AT] = pack_fixed(header, len(page))
    page[_PAYLOAD_DIGEST_AT:KEY_AT] = header.payload_digest
    page[KEY_AT:key_end] = header.key
    page[key_end:] = zeros[key_end:]
    _FRONT.pack_into(page, 0, SLOT_MAGIC, header_checksum(page))


def checksum_holds(page: memoryview) -> bool:
    """True if the header page is as it was written."""
    return bytes(page[8:_CHECKED_FROM]) == header_checksum(page)


def magic_holds(page: memoryview) -> bool:
    """True if the page says it is a slot header, of whatever version."""
    return page[:8] == SLOT_MAGIC


def payload_digest(page: memoryview) -> bytes:
    """The payload's checksum as the header states it."""
    return bytes(page[_PAYLOAD_DIGEST_AT:KEY_AT])


def decode_slot_header(page: memoryview) -> SlotHeader | None:
    """The header a page holds; None if it is no whole slot header of this format."""
    if not magic_holds(page) or not checksum_holds(page):
        return None
    fields = _FIXED.unpack_from(page, _CHECKED_FROM)
    version, header_bytes, key_bytes = fields[0], fields[1], fields[12]
    if (version, header_bytes) != (FORMAT_VERSION, len(page)) or key_bytes > max_key_bytes(len(page)):
        return None
    key = bytes(page[KEY_AT : KEY_AT + key_bytes])
    return SlotHeader._make((*fields[2:12], key, payload_digest(page)))
