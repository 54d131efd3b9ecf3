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
_SHARED = struct.Struct("<II16sQ16s")
_OWN = struct.Struct("<IIQQQQIHH")
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
    shared = pack_shared(header_bytes, header.namespace, header.epoch, header.root_uuid)
    return shared + pack_own(*header[3:10], len(header.key))


def pack_shared(header_bytes: int, namespace: bytes, epoch: int, root_uuid: bytes) -> bytes:
    """The first of the fixed fields: those that all blocks of a job on one root have in common."""
    return _SHARED.pack(FORMAT_VERSION, header_bytes, namespace, epoch, root_uuid)


def pack_own(*fields: int) -> bytes:
    """The other fixed fields: `SlotHeader`'s own from `region` to `group`, and the length of the key in bytes."""
    return _OWN.pack(*fields, 0)


def fixed_bytes(page: memoryview) -> memoryview:
    """Where `pack_fixed` lies in a page."""
    return page[_CHECKED_FROM:_PAYLOAD_DIGEST_AT]


def encode_slot_header(header: SlotHeader, page: memoryview) -> None:
    """Fill a header page; whatever the header does not use is zero on disk."""
    write_slot_header(page, pack_fixed(header, len(page)), header.payload_digest, header.key)


def write_slot_header(page: memoryview, fixed: bytes, payload_digest: bytes, key: bytes) -> None:
    """Fill a header page of which the fixed fields are packed already; what the header does not use is zero."""
    said = (fixed + payload_digest + key).ljust(len(page) - _CHECKED_FROM, b"\0")
    page[:] = SLOT_MAGIC + xxhash.xxh3_128_digest(said) + said


def checksum_holds(page: memoryview) -> bool:
    """True if the header page is as it was written."""
    return bytes(page[8:_CHECKED_FROM]) == header_checksum(page)


def magic_holds(page: memoryview) -> bool:
    """True if the page says it is a slot header, of whatever version."""
    return page[:8] == SLOT_MAGIC


def matching_digest(page: memoryview, fixed: bytes, key: bytes) -> bytes | None:
    """The payload's checksum that a header page states; None unless it is whole and says just `fixed` and `key`."""
    said = bytes(page[: KEY_AT + len(key)])
    same = said.startswith(SLOT_MAGIC) and said[_CHECKED_FROM:_PAYLOAD_DIGEST_AT] == fixed and said.endswith(key)
    return said[_PAYLOAD_DIGEST_AT:KEY_AT] if same and said[8:_CHECKED_FROM] == header_checksum(page) else None


def payload_digest(page: memoryview) -> bytes:
    """The payload's checksum as the header states it."""
    return bytes(page[_PAYLOAD_DIGEST_AT:KEY_AT])


def decode_slot_header(page: memoryview) -> SlotHeader | None:
    """The header a page holds; None if it is no whole slot header of this format."""
    if not magic_holds(page) or not checksum_holds(page):
        return None
    version, header_bytes, *_, key_bytes, _ = _FIXED.unpack_from(page, _CHECKED_FROM)
    if (version, header_bytes) != (FORMAT_VERSION, len(page)) or key_bytes > max_key_bytes(len(page)):
        return None
    return unpack_fixed(fixed_bytes(page), bytes(page[KEY_AT : KEY_AT + key_bytes]), payload_digest(page))


def unpack_fixed(fixed: bytes | memoryview, key: bytes, payload_digest: bytes = b"") -> SlotHeader:
    """The header whose fixed fields were packed so."""
    return SlotHeader._make((*_FIXED.unpack(fixed)[2:12], key, payload_digest))
