"""The directory of a root as a clean close writes it down: one checksummed file, read back in bulk."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.tier import block_envelope
from kvtier.tier.block_envelope import COUNTER_LIMIT, max_key_bytes
from kvtier.tier.checksum import BODY_AT, seal, unseal
from kvtier.types.keys import GROUP_BYTES
from kvtier_fs.format.slot_map import NO_OWNER, SlotMap
from kvtier_fs.format.superblock import Superblock

SNAPSHOT_MAGIC = b"KVTIERSN"

_HEADER = struct.Struct("<IIQ16sQIIQQ")
_HEADER_BYTES = 128
_REGION = np.dtype([("slot_bytes", "<u8"), ("generation", "<u8"), ("entries", "<u4"), ("reserved", "<u4")])
_OWNER = np.dtype([("namespace", "V16"), ("epoch", "<u8")])
_ENTRY_BYTES = 8 + 4 + 2 + 1


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """The format that a region had. `slot_bytes` 0: only its generation is known."""

    slot_bytes: int
    generation: int


def encode_snapshot(of: Superblock, formats: Sequence[StoredFormat], slot_map: SlotMap) -> bytes:
    """A snapshot's bytes: every block of the slot map that lies in a region of `formats` with a slot size.

    It speaks of one root, session and stride, those of the superblock `of`, and of blocks of one envelope version.
    """
    regions = np.zeros(len(formats), dtype=_REGION)
    regions["slot_bytes"] = [form.slot_bytes for form in formats]
    regions["generation"] = [form.generation for form in formats]
    owners = np.array([(owner.namespace, owner.epoch) for owner in slot_map.owners], dtype=_OWNER).tobytes()
    generations, indexes, owned, keys = [], [], [], list[bytes]()
    for region, slots in slot_map.regions():
        form = formats[region] if region < len(formats) else StoredFormat(0, 0)
        if not form.slot_bytes or form.generation != slots.region_generation:
            continue
        by_slot = slots.owner_array
        numbers = np.flatnonzero(by_slot != NO_OWNER)
        regions["entries"][region] = len(numbers)
        generations.append(np.frombuffer(slots.generations, dtype="<u8")[numbers].tobytes())
        indexes.append(numbers.astype("<u4").tobytes())
        owned.append(by_slot[numbers].tobytes())
        keys.extend(key for number in numbers.tolist() if (key := slots.keys[number]) is not None)
    lengths = np.fromiter(map(len, keys), dtype="<u2", count=len(keys)).tobytes()
    blob = b"".join(keys)
    counts = (len(formats), of.session, of.root_uuid, of.stride, len(slot_map.owners), 0, len(keys), len(blob))
    header = _HEADER.pack(block_envelope.ENVELOPE_VERSION, *counts).ljust(_HEADER_BYTES - BODY_AT, b"\0")
    columns = (header, regions.tobytes(), owners, *generations, *indexes, lengths, *owned, blob)
    return seal(SNAPSHOT_MAGIC, b"".join(columns))


class _Columns:
    """The bytes of a snapshot, taken from the front, column by column."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def take(self, dtype: np.dtype[np.void] | str, count: int) -> npt.NDArray[Any]:
        column: npt.NDArray[Any] = np.frombuffer(self._data, dtype=dtype, count=count, offset=self.at)
        self.at += column.nbytes
        return column


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A snapshot read back: the format of each region, and the entries, region after region."""

    formats: tuple[StoredFormat, ...]
    ends: npt.NDArray[np.int64]
    owners: tuple[tuple[bytes, int], ...]
    generations: npt.NDArray[np.uint64]
    indexes: npt.NDArray[np.uint32]
    owned: npt.NDArray[np.uint8]
    keys: list[bytes]

    def fill(self, slot_map: SlotMap, region: int, count: int) -> bool:
        """Enter the blocks of one region, which has `count` slots. False if they cannot be right."""
        part = slice(int(self.ends[region - 1]) if region else 0, int(self.ends[region]))
        indexes = self.indexes[part]
        if len(indexes) and (int(indexes[-1]) >= count or not (indexes[1:] > indexes[:-1]).all()):
            return False  # not so many slots, or two blocks in one
        translation = np.full(256, NO_OWNER, dtype=np.uint8)
        for number, (namespace, epoch) in enumerate(self.owners):
            translation[number] = slot_map.number_of(namespace, epoch)
        owned = translation[self.owned[part]]
        slots = slot_map.format(region, self.formats[region].generation, count)
        np.frombuffer(slots.owners, dtype=np.uint8)[indexes] = owned
        np.frombuffer(slots.generations, dtype=np.uint64)[indexes] = self.generations[part]
        for index, key, owner in zip(indexes.tolist(), self.keys[part], owned.tolist(), strict=True):
            slots.keys[index] = key if owner != NO_OWNER else None
        return True


def is_of_other_version(data: bytes) -> bool:
    """True for a whole snapshot of blocks of another envelope version."""
    whole = len(data) >= _HEADER_BYTES and unseal(SNAPSHOT_MAGIC, memoryview(data)) is not None
    return whole and _HEADER.unpack_from(data, BODY_AT)[0] != block_envelope.ENVELOPE_VERSION


def decode_snapshot(data: bytes, of: Superblock) -> Snapshot | None:
    """The snapshot that a file holds, whole; None unless it speaks of the root, the session and the stride of `of`."""
    if len(data) < _HEADER_BYTES or unseal(SNAPSHOT_MAGIC, memoryview(data)) is None:
        return None
    version, regions, session, uuid, stride, owners, _, entries, key_bytes = _HEADER.unpack_from(data, BODY_AT)
    stated = (version, uuid, session, stride, regions)
    if stated != (block_envelope.ENVELOPE_VERSION, of.root_uuid, of.session, of.stride, of.regions):
        return None
    fixed = _HEADER_BYTES + regions * _REGION.itemsize + owners * _OWNER.itemsize
    if owners >= NO_OWNER or len(data) != fixed + entries * _ENTRY_BYTES + key_bytes:
        return None
    columns = _Columns(data, _HEADER_BYTES)
    table = columns.take(_REGION, regions)
    names = columns.take(_OWNER, owners).tolist()
    generations, indexes = columns.take("<u8", entries), columns.take("<u4", entries)
    lengths, owned = columns.take("<u2", entries), columns.take("u1", entries)
    counts = table["entries"].astype(np.int64)
    if int(counts.sum()) != entries or int(lengths.sum(dtype=np.int64)) != key_bytes:
        return None
    if max(one.max(initial=0) for one in (generations, table["generation"])) >= COUNTER_LIMIT:
        return None
    if entries and not GROUP_BYTES < lengths.min() <= lengths.max() <= max_key_bytes(of.header_bytes):
        return None
    edges = columns.at + np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    formats = zip(table["slot_bytes"].tolist(), table["generation"].tolist(), strict=True)
    return Snapshot(
        formats=tuple(StoredFormat(*form) for form in formats),
        ends=np.cumsum(counts),
        owners=tuple((bytes(namespace), epoch) for namespace, epoch in names),
        generations=generations.astype(np.uint64),
        indexes=indexes.astype(np.uint32),
        owned=owned.astype(np.uint8),
        keys=[data[start:end] for start, end in pairwise(edges.tolist())],
    )
