"""The directory of a root as a clean close writes it down: one checksummed file, read back in bulk."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier_fs.ledger import NOBODY, Ledger
from kvtier_fs.slot import FORMAT_VERSION

SNAPSHOT_MAGIC = b"KVTIERSN"

_CHECKED_FROM = 24
_HEADER = struct.Struct("<8s16sIIQ16sQIIQQ")
_HEADER_BYTES = 128
_REGION = np.dtype([("slot_bytes", "<u8"), ("generation", "<u8"), ("entries", "<u4"), ("reserved", "<u4")])
_OWNER = struct.Struct("<16sQ")
_ENTRY_BYTES = 8 + 4 + 2 + 1


@dataclass(frozen=True, slots=True)
class SnapshotOf:
    """Which root, which session and which cutting a snapshot speaks of; all must agree for it to count."""

    root_uuid: bytes
    session: int
    stride: int


@dataclass(frozen=True, slots=True)
class RegionCutAs:
    """How a region was cut. `slot_bytes` 0: only its generation is known."""

    slot_bytes: int
    generation: int


def encode_snapshot(of: SnapshotOf, cuts: Sequence[RegionCutAs], ledger: Ledger) -> bytes:
    """A snapshot's bytes: every block of the ledger that lies in a region of `cuts` with a slot size."""
    regions = np.zeros(len(cuts), dtype=_REGION)
    regions["slot_bytes"] = [cut.slot_bytes for cut in cuts]
    regions["generation"] = [cut.generation for cut in cuts]
    owners = b"".join(_OWNER.pack(owner.namespace, owner.epoch) for owner in ledger.owners)
    generations, indexes, owned, keys = [], [], [], list[bytes]()
    for region, slots in ledger.regions():
        if region >= len(cuts) or not cuts[region].slot_bytes or cuts[region].generation != slots.cut:
            continue
        by_slot = slots.owner_array
        numbers = np.flatnonzero(by_slot != NOBODY)
        regions["entries"][region] = len(numbers)
        generations.append(np.frombuffer(slots.generations, dtype="<u8")[numbers].tobytes())
        indexes.append(numbers.astype("<u4").tobytes())
        owned.append(by_slot[numbers].tobytes())
        keys.extend(key for number in numbers.tolist() if (key := slots.keys[number]) is not None)
    lengths = np.fromiter(map(len, keys), dtype="<u2", count=len(keys)).tobytes()
    blob = b"".join(keys)
    counts = (len(cuts), of.session, of.root_uuid, of.stride, len(ledger.owners), 0, len(keys), len(blob))
    header = _HEADER.pack(SNAPSHOT_MAGIC, bytes(16), FORMAT_VERSION, *counts).ljust(_HEADER_BYTES, b"\0")
    data = bytearray().join((header, regions.tobytes(), owners, *generations, *indexes, lengths, *owned, blob))
    data[8:_CHECKED_FROM] = xxhash.xxh3_128_digest(memoryview(data)[_CHECKED_FROM:])
    return bytes(data)


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
    """A snapshot read back: the cut of each region, and the entries, region after region."""

    cuts: tuple[RegionCutAs, ...]
    ends: npt.NDArray[np.int64]
    owners: tuple[tuple[bytes, int], ...]
    generations: npt.NDArray[np.uint64]
    indexes: npt.NDArray[np.uint32]
    owned: npt.NDArray[np.uint8]
    keys: list[bytes]

    def fill(self, ledger: Ledger, region: int, count: int) -> bool:
        """Enter the blocks of one region, which has `count` slots. False if they cannot be right."""
        part = slice(int(self.ends[region - 1]) if region else 0, int(self.ends[region]))
        indexes = self.indexes[part]
        if len(indexes) and int(indexes.max()) >= count:
            return False
        translation = np.full(256, NOBODY, dtype=np.uint8)
        for number, (namespace, epoch) in enumerate(self.owners):
            translation[number] = ledger.number_of(namespace, epoch)
        owned = translation[self.owned[part]]
        slots = ledger.cut(region, self.cuts[region].generation, count)
        np.frombuffer(slots.owners, dtype=np.uint8)[indexes] = owned
        np.frombuffer(slots.generations, dtype=np.uint64)[indexes] = self.generations[part]
        for index, key, owner in zip(indexes.tolist(), self.keys[part], owned.tolist(), strict=True):
            slots.keys[index] = key if owner != NOBODY else None
        return True


def decode_snapshot(data: bytes, of: SnapshotOf) -> Snapshot | None:
    """The snapshot of exactly this root, session and cutting that a file holds, whole; None if it is not that."""
    if len(data) < _HEADER_BYTES or data[:8] != SNAPSHOT_MAGIC:
        return None
    if data[8:_CHECKED_FROM] != xxhash.xxh3_128_digest(memoryview(data)[_CHECKED_FROM:]):
        return None
    version, regions, session, uuid, stride, owners, _, entries, key_bytes = _HEADER.unpack_from(data)[2:]
    if version != FORMAT_VERSION or SnapshotOf(uuid, session, stride) != of:
        return None
    fixed = _HEADER_BYTES + regions * _REGION.itemsize + owners * _OWNER.size
    if owners >= NOBODY or len(data) != fixed + entries * _ENTRY_BYTES + key_bytes:
        return None
    columns = _Columns(data, _HEADER_BYTES)
    table = columns.take(_REGION, regions)
    at = columns.at
    names = [_OWNER.unpack_from(data, at + number * _OWNER.size) for number in range(owners)]
    columns.at += owners * _OWNER.size
    generations, indexes = columns.take("<u8", entries), columns.take("<u4", entries)
    lengths, owned = columns.take("<u2", entries), columns.take("u1", entries)
    counts = table["entries"].astype(np.int64)
    if int(counts.sum()) != entries or int(lengths.sum(dtype=np.int64)) != key_bytes:
        return None
    cuts = zip(table["slot_bytes"].tolist(), table["generation"].tolist(), strict=True)
    return Snapshot(
        cuts=tuple(RegionCutAs(*cut) for cut in cuts),
        ends=np.cumsum(counts),
        owners=tuple((bytes(namespace), int(epoch)) for namespace, epoch in names),
        generations=generations.astype(np.uint64),
        indexes=indexes.astype(np.uint32),
        owned=owned.astype(np.uint8),
        keys=list(_keys(data, columns.at, lengths.astype(np.int64))),
    )


def _keys(data: bytes, at: int, lengths: npt.NDArray[np.int64]) -> Iterator[bytes]:
    ends = (at + np.cumsum(lengths)).tolist()
    start = at
    for end in ends:
        yield data[start:end]
        start = end
