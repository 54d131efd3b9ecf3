"""The envelope of a stored block: a header page with its full key and checksum, and the verification of every load.

For every tier that keeps bytes. `docs/format.md` is the reference of the layout.
"""

import struct
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

import xxhash

from kvtier.tier.checksum import BODY_AT, CHECKSUM_BYTES, MAGIC_BYTES, checksum, seal, unseal
from kvtier.types.keys import GROUP_BYTES, OffloadKey, key_group

SLOT_MAGIC = b"KVTIERSL"
MAGIC = "magic"
"""The fault of a page that is no header of any version."""
ENVELOPE_VERSION = 1
"""Of the envelope alone: superblocks and other records have versions of their own. Where releases share a store, each
misses blocks of another version and lets them be."""
MIN_HEADER_BYTES = 4096
COUNTER_LIMIT = 1 << 62
"""Epochs, generations, sessions and sizes on a disk are below this: what is not was never counted up to, and neither it
nor what follows it would fit the 64-bit numbers of the control plane."""

_FIXED = struct.Struct("<II16sQ16sIIQQQQIHH")
_SHARED = struct.Struct("<II16sQ16s")
_OWN = struct.Struct("<IIQQQQIHH")
_STATED = struct.Struct("<II")
"""Version and length of a header, in front of its other fields."""
_NO_BYTES = memoryview(b"")
_GENERATION = struct.Struct("<Q")
_GENERATION_AT = BODY_AT + struct.calcsize("<II16sQ16sIIQQQ")
_PAYLOAD_DIGEST_AT = BODY_AT + _FIXED.size
KEY_AT = _PAYLOAD_DIGEST_AT + CHECKSUM_BYTES


class SlotHeader(NamedTuple):
    """Everything a slot says about itself. A named tuple, because one is made for every block moved.

    `region` counts within its root. `generation` orders the copies of a key, `region_generation` the formats of a
    region.
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


def pack_fixed(header: SlotHeader, header_bytes: int) -> bytes:
    """The fixed fields that a reader knows beforehand: everything between checksum and payload digest."""
    shared = pack_shared(header_bytes, header.namespace, header.epoch, header.root_uuid)
    return shared + PACK_OWN(*header[3:10], len(header.key), 0)


def pack_shared(header_bytes: int, namespace: bytes, epoch: int, root_uuid: bytes) -> bytes:
    """The first of the fixed fields: those that all blocks of a job on one root have in common."""
    return _SHARED.pack(ENVELOPE_VERSION, header_bytes, namespace, epoch, root_uuid)


PACK_OWN = _OWN.pack
"""Packs the other fixed fields: a header's own from `region` to `group`, the length of its key in bytes, and a zero."""


def encode_slot_header(header: SlotHeader, page: memoryview) -> None:
    """Fill a header page; whatever the header does not use is zero."""
    page[:] = encoded_header(header, len(page))


def encoded_header(header: SlotHeader, header_bytes: int) -> bytes:
    """A header page; whatever the header does not use is zero."""
    return seal(SLOT_MAGIC, pack_fixed(header, header_bytes) + header.payload_digest + header.key, header_bytes)


def checksum_holds(page: memoryview) -> bool:
    """True if the header page is as it was written, whatever its magic."""
    return bytes(page[MAGIC_BYTES:BODY_AT]) == xxhash.xxh3_128_digest(page[BODY_AT:])


def page_fault(page: memoryview) -> str:
    """Why a page is no whole header of this format; empty if it is all zeros."""
    if page[:MAGIC_BYTES] == SLOT_MAGIC:
        return Mismatch.VERSION if checksum_holds(page) else Mismatch.HEADER_CHECKSUM
    return MAGIC if any(page) else ""


def key_fault(header: SlotHeader) -> str:
    """Why a header's key is none; empty if it is one, of the group that the header names."""
    if len(header.key) <= GROUP_BYTES:
        return Mismatch.KEY
    return "" if key_group(OffloadKey(header.key)) == header.group else Mismatch.GROUP


def stated_length(page: memoryview) -> int:
    """The length of a header of this version as it states it; 0 for any other. It counts as `stated_generation`."""
    if len(page) < KEY_AT:
        return 0
    version, length = _STATED.unpack_from(page, BODY_AT)
    return int(length) if version == ENVELOPE_VERSION else 0


def version_suffix() -> str:
    """The end of block names in stores that releases share; nothing for version 1, whose names are older."""
    return "" if ENVELOPE_VERSION == 1 else f".v{ENVELOPE_VERSION}"


VERSION_SUFFIX = r"(?:\.v[1-9][0-9]{0,8})?"
"""The pattern of `version_suffix` for every version."""


def is_other_version(page: memoryview, payload: memoryview = _NO_BYTES) -> bool:
    """True if a block begins with a whole header of another version, of any length.

    Every version keeps its magic, checksum, version and length in the same places, and its checksum over the length.
    """
    if len(page) < KEY_AT or page[:MAGIC_BYTES] != SLOT_MAGIC:
        return False
    version, length = _STATED.unpack_from(page, BODY_AT)
    if version == ENVELOPE_VERSION or not BODY_AT + _STATED.size <= length <= len(page) + len(payload):
        return False
    header = bytes(page[:length]) + bytes(payload[: max(0, length - len(page))])
    return header[MAGIC_BYTES:BODY_AT] == xxhash.xxh3_128_digest(header[BODY_AT:])


def stated_generation(page: memoryview) -> int:
    """The generation as the header states it; it counts only once the header's checksum was compared."""
    generation: int = _GENERATION.unpack_from(page, _GENERATION_AT)[0]
    return generation


def payload_digest(page: memoryview) -> bytes:
    """The payload's checksum as the header states it."""
    return bytes(page[_PAYLOAD_DIGEST_AT:KEY_AT])


def decode_slot_header(page: memoryview) -> SlotHeader | None:
    """The header a page holds; None if it is no whole slot header of this format, with numbers that can be."""
    if len(page) < KEY_AT or unseal(SLOT_MAGIC, page) is None:
        return None
    fields = _FIXED.unpack_from(page, BODY_AT)
    version, header_bytes, _, epoch, _, _, _, formats, slot_bytes, payload_bytes, generation, _, key_bytes, _ = fields
    if version != ENVELOPE_VERSION or header_bytes != len(page) or KEY_AT + key_bytes > header_bytes:
        return None
    if epoch | formats | slot_bytes | payload_bytes | generation >= COUNTER_LIMIT:
        return None
    return SlotHeader._make((*fields[2:12], bytes(page[KEY_AT : KEY_AT + key_bytes]), payload_digest(page)))


def unpack_fixed(fixed: bytes | memoryview, key: bytes, payload_digest: bytes = b"") -> SlotHeader:
    """The header whose fixed fields were packed so."""
    return SlotHeader._make((*_FIXED.unpack(fixed)[2:12], key, payload_digest))


class Mismatch(StrEnum):
    """A field in which a slot differs from what its reader expects; also the names of the counters.

    Most are the names of fields of `SlotHeader`. The first of these that differs is reported.
    """

    HEADER_CHECKSUM = "header_checksum"
    VERSION = "version"
    ROOT_UUID = "root_uuid"
    REGION = "region"
    REGION_GENERATION = "region_generation"
    SLOT_INDEX = "slot_index"
    SLOT_BYTES = "slot_bytes"
    NAMESPACE = "namespace"
    EPOCH = "epoch"
    KEY = "key"
    GROUP = "group"
    PAYLOAD_BYTES = "payload_bytes"
    GENERATION = "generation"
    PAYLOAD = "payload"
    OTHER_VERSION = "other_version"
    """A block that another release stored, which is no damage: only in a store that releases share."""


def verify_slot(page: memoryview, payload: memoryview, expected: SlotHeader) -> Mismatch | bytes:
    """The payload's checksum if everything holds, else the first thing that does not."""
    return verify_block(page, payload, pack_fixed(expected, len(page)), expected.key)


def verify_block(
    page: memoryview, payload: memoryview, fixed: bytes, key: bytes, keep_gil: bool = False
) -> Mismatch | bytes:
    """`verify_slot` where the fixed fields that are expected are packed already."""
    if bytes(page[MAGIC_BYTES:BODY_AT]) != xxhash.xxh3_128_digest(page[BODY_AT:]):
        return Mismatch.HEADER_CHECKSUM
    front = bytes(page[: KEY_AT + len(key)])
    if not (front.startswith(SLOT_MAGIC) and front[BODY_AT:_PAYLOAD_DIGEST_AT] == fixed and front.endswith(key)):
        return _first_difference(page, unpack_fixed(fixed, key))
    stated = front[_PAYLOAD_DIGEST_AT:KEY_AT]
    return stated if checksum(payload, keep_gil) == stated else Mismatch.PAYLOAD


def found_by_sharer(found: Mismatch | bytes, page: memoryview, payload: memoryview) -> Mismatch | bytes:
    """The verdict of `verify_block` in a store that releases share: there a block of another version is no damage."""
    unknown = found in (Mismatch.VERSION, Mismatch.HEADER_CHECKSUM)
    return Mismatch.OTHER_VERSION if unknown and is_other_version(page, payload) else found


def _first_difference(page: memoryview, expected: SlotHeader) -> Mismatch:
    header = decode_slot_header(page)
    if header is None:
        return Mismatch.VERSION
    return first_difference(header, expected) or Mismatch.KEY


def first_difference(header: SlotHeader, expected: SlotHeader) -> Mismatch | None:
    """The first field of a header that differs from what is expected, the payload's checksum left out; None if none."""
    found, wanted = header._asdict(), expected._asdict()
    return next((place for place in Mismatch if found.get(place) != wanted.get(place)), None)


Check = tuple[memoryview, memoryview, bytes, bytes]
"""The first arguments of `verify_block` for one block."""


def verify_blocks(checks: Iterable[Check], keep_gil: bool = False) -> list[Mismatch | bytes]:
    """`verify_block` for each of a batch.

    What the front of a page has to hold is compared at once; only where it differs, `verify_block` finds out what does.
    """
    found: list[Mismatch | bytes] = []
    for page, payload, fixed, key in checks:
        digest = checksum(payload, keep_gil)
        front = b"".join((SLOT_MAGIC, xxhash.xxh3_128_digest(page[BODY_AT:]), fixed, digest, key))
        whole = bytes(page[: len(front)]) == front
        found.append(digest if whole else verify_block(page, payload, fixed, key, keep_gil))
    return found
