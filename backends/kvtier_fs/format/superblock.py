"""The superblock of a root: its identity, its regions, and the epoch of each namespace. Two checksummed copies."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from kvtier.tier.block_envelope import COUNTER_LIMIT, MIN_HEADER_BYTES
from kvtier.tier.checksum import BODY_AT, MAGIC_BYTES, seal, unseal
from kvtier.tier.shared_epoch import is_usable

FORMAT_VERSION = 1
"""Of the superblock and the region headers; blocks have the version of their envelope."""
COPY_BYTES = 4096
SUPERBLOCK_BYTES = 2 * COPY_BYTES
SUPERBLOCK_MAGIC = b"KVTIERSB"
MAX_NAMESPACES = 96
UUID_BYTES = 16
HEADER_BYTES_MAX = 1 << 20
"""No device aligns direct I/O to more."""

_FIXED = struct.Struct("<IIQ16sQIIQIIIIQ")
_NAMESPACES_AT = 512 - BODY_AT
_NAMESPACE = struct.Struct("<16sQQ")
_CLEAN = 1


@dataclass(frozen=True, slots=True)
class NamespaceEpoch:
    """A namespace's epoch, and the session that last opened it."""

    epoch: int
    session: int


@dataclass(frozen=True, slots=True)
class Superblock:
    """The state of one root. `sequence` orders the copies; `session` counts opens; `clean`: the last session closed.

    `header_bytes` comes from the device's alignment, `row_alignment` from the stack's; neither may change.
    `floor_epoch` is the epoch of a namespace the table does not (any longer) list.
    """

    root_uuid: bytes
    stride: int
    regions: int
    header_bytes: int
    row_alignment: int
    sequence: int = 0
    session: int = 0
    clean: bool = False
    floor_epoch: int = 0
    namespaces: tuple[tuple[bytes, NamespaceEpoch], ...] = ()

    @property
    def possible(self) -> bool:
        """True if a session can have stated these numbers. A checksum that holds does not say so."""
        entries = [entry for _, entry in self.namespaces]
        counters = (self.sequence, self.session, self.floor_epoch, *(max(one.epoch, one.session) for one in entries))
        return (
            can_be_aligned(self.header_bytes, self.row_alignment)
            and self.stride > self.header_bytes
            and self.stride % self.header_bytes == 0
            and 0 < self.regions * self.stride < COUNTER_LIMIT
            and max(counters) < COUNTER_LIMIT
            and len(dict(self.namespaces)) == len(entries)
        )

    def epoch(self, namespace: bytes) -> int:
        """The epoch entries of a namespace must carry to count."""
        listed = self.listed_epoch(namespace)
        return self.floor_epoch if listed is None else listed

    def listed_epoch(self, namespace: bytes) -> int | None:
        """The epoch in the table; None if it does not list the namespace."""
        return next((entry.epoch for digest, entry in self.namespaces if digest == namespace), None)

    def with_epoch(self, namespace: bytes, epoch: int) -> Superblock:
        """The same root with a namespace's epoch set, in this session; one that is listed and usable is not lowered.

        A full table forgets the namespace unused for longest. If that was raised above `floor_epoch`, its epoch lives
        on there, so that nothing of it that a reset made unreachable counts again in a stack of this disk alone. Where
        stores that others use state the epoch, they decide.
        """
        others = [(digest, entry) for digest, entry in self.namespaces if digest != namespace]
        floor = self.floor_epoch
        if len(others) >= MAX_NAMESPACES:
            oldest = min(others, key=lambda item: item[1].session)
            others.remove(oldest)
            floor = oldest[1].epoch + 1 if oldest[1].epoch > floor else floor
        listed = self.listed_epoch(namespace)
        lowest = listed if listed is not None and is_usable(listed) else 0
        entry = NamespaceEpoch(max(epoch, lowest), self.session)
        return replace(self, namespaces=(*others, (namespace, entry)), floor_epoch=floor)


def can_be_aligned(header_bytes: int, row_alignment: int) -> bool:
    """True if a root can have header pages of this size, and rows of this alignment."""
    power_of_two = header_bytes & (header_bytes - 1) == 0
    possible = power_of_two and MIN_HEADER_BYTES <= header_bytes <= HEADER_BYTES_MAX
    return possible and row_alignment > 0 and row_alignment % header_bytes == 0


def encode_superblock(block: Superblock) -> bytes:
    """The bytes of one copy, 4096."""
    flags, count = _CLEAN if block.clean else 0, len(block.namespaces)
    who = (FORMAT_VERSION, COPY_BYTES, block.sequence, block.root_uuid, block.session, flags)
    layout = (block.row_alignment, block.stride, block.header_bytes, block.regions)
    fixed = _FIXED.pack(*who, *layout, count, 0, block.floor_epoch).ljust(_NAMESPACES_AT, b"\0")
    table = [_NAMESPACE.pack(digest, entry.epoch, entry.session) for digest, entry in block.namespaces]
    return seal(SUPERBLOCK_MAGIC, b"".join((fixed, *table)), COPY_BYTES)


def decode_superblock(data: bytes) -> Superblock | None:
    """The newest valid copy of a superblock file; None if there is none."""
    valid = [block for copy in _copies(data) if (block := _decode_copy(copy)) is not None]
    return max(valid, key=lambda block: block.sequence, default=None)


def write_order(data: bytes) -> list[int]:
    """The offsets of both copies in a superblock file, the one that counts last, so that one is always whole."""
    blocks = dict(zip((0, COPY_BYTES), map(_decode_copy, _copies(data)), strict=True))
    return sorted(blocks, key=lambda at: -1 if (block := blocks[at]) is None else block.sequence)


def foreign_version(data: bytes) -> int | None:
    """The format version of a superblock that is ours by its magic but of another release; None if it is not that.

    One whole copy of another version is enough: another release began to use the root. A copy that is not whole says
    so only if the other one does not count either, for its version may be a flipped bit.
    """
    known = decode_superblock(data) is not None
    for copy in _copies(data):
        if len(copy) >= BODY_AT + 4 and copy[:MAGIC_BYTES] == SUPERBLOCK_MAGIC:
            version: int = struct.unpack_from("<I", copy, BODY_AT)[0]
            if version != FORMAT_VERSION and (_body(copy) is not None or not known):
                return version
    return None


def _body(page: bytes) -> bytes | None:
    return unseal(SUPERBLOCK_MAGIC, page) if len(page) == COPY_BYTES else None


def _copies(data: bytes) -> tuple[bytes, bytes]:
    return data[:COPY_BYTES], data[COPY_BYTES:SUPERBLOCK_BYTES]


def _decode_copy(page: bytes) -> Superblock | None:
    body = _body(page)
    if body is None:
        return None
    version, copy_bytes, sequence, uuid, session, flags, *layout, count, _, floor = _FIXED.unpack_from(body)
    if version != FORMAT_VERSION or copy_bytes != COPY_BYTES or count > MAX_NAMESPACES:
        return None
    table = _NAMESPACE.iter_unpack(body[_NAMESPACES_AT : _NAMESPACES_AT + count * _NAMESPACE.size])
    namespaces = tuple((digest, NamespaceEpoch(epoch, last)) for digest, epoch, last in table)
    clean = bool(flags & _CLEAN)
    alignment, stride, header, regions = layout
    block = Superblock(uuid, stride, regions, header, alignment, sequence, session, clean, floor, namespaces)
    return block if block.possible else None
