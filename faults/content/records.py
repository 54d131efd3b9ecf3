"""Every record that a root of either layout keeps on disk, and the fields in it, taken from the structs themselves."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import numpy as np

from kvtier.tier import block_envelope
from kvtier.tier.block_envelope import KEY_AT, SLOT_MAGIC, decode_slot_header
from kvtier.tier.checksum import BODY_AT, CHECKSUM_BYTES
from kvtier_fs.format import region_header, snapshot, superblock, tree_records
from kvtier_fs.format.region_header import RegionPlan
from simulator.records import Field, Record, fields_of

HEADER = 4096
_KEYS = "key "
STRUCTS = (
    superblock._FIXED, superblock._NAMESPACE, region_header._HEADER, block_envelope._FIXED, snapshot._HEADER,
    snapshot._REGION, snapshot._OWNER, tree_records._TREE, tree_records._EPOCH, tree_records._ACCOUNT,
)  # fmt: skip
"""Everything that lays out bytes of a record; a test finds what is missing."""


def slab_records(files: Mapping[str, bytes]) -> list[Record]:
    """The records of a slab root that was closed in order."""
    found = list(_slab_superblock(files["superblock"]))
    block = superblock.decode_superblock(files["superblock"])
    assert block is not None
    plan = RegionPlan(block.stride, block.header_bytes, block.regions)
    for name, data in files.items():
        if name.startswith("slab-"):
            found += _regions(name, data, plan)
        elif name == "lock" or name.startswith("manifest-"):
            found.append(Record(name.partition("-")[0], name, 0, len(data), b"", (), True))
    fields = tuple(_snapshot_fields(files["snapshot"]))
    found.append(Record("snapshot", "snapshot", 0, len(files["snapshot"]), snapshot.SNAPSHOT_MAGIC, fields, True))
    return found


def _slab_superblock(data: bytes) -> Iterator[Record]:
    block = superblock.decode_superblock(data)
    assert block is not None
    fields = fields_of(superblock._FIXED, BODY_AT)
    for number in range(len(block.namespaces) + 1):
        fields += fields_of(superblock._NAMESPACE, 512 + number * superblock._NAMESPACE.size)
    for at in (0, superblock.COPY_BYTES):
        yield Record("superblock", "superblock", at, superblock.COPY_BYTES, superblock.SUPERBLOCK_MAGIC, tuple(fields))


def _regions(name: str, data: bytes, plan: RegionPlan) -> Iterator[Record]:
    for region in plan.regions_of(int(name.removeprefix("slab-"))):
        at = plan.region_offset(region)
        header = region_header.decode_region_header(memoryview(data)[at : at + HEADER])
        if header is None:
            continue
        fields = tuple(fields_of(region_header._HEADER, BODY_AT))
        yield Record("region header", name, at, HEADER, region_header.REGION_MAGIC, fields)
        for index in range(plan.slots(header.slot_bytes)):
            place = plan.slot_offset(region, index, header.slot_bytes)
            if decode_slot_header(memoryview(data)[place : place + HEADER]) is not None:
                yield Record("slot header", name, place, HEADER, SLOT_MAGIC, slot_fields(data[place:]))


def slot_fields(data: bytes) -> tuple[Field, ...]:
    """The fields of a slot's header: those of fixed size, the payload's checksum, and the key."""
    header = decode_slot_header(memoryview(data)[:HEADER])
    assert header is not None
    key = Field(_KEYS, KEY_AT, len(header.key), False)
    digest = Field("digest", KEY_AT - CHECKSUM_BYTES, CHECKSUM_BYTES, False)
    return (*fields_of(block_envelope._FIXED, BODY_AT), digest, key)


def _snapshot_fields(data: bytes) -> Iterator[Field]:
    _, regions, _, _, _, owners, _, entries, key_bytes = snapshot._HEADER.unpack_from(data, BODY_AT)
    yield from fields_of(snapshot._HEADER, BODY_AT)
    at = snapshot._HEADER_BYTES
    for table, count in ((snapshot._REGION, regions), (snapshot._OWNER, owners)):
        for _ in range(count):
            yield from _fields_of_row(table, at)
            at += table.itemsize
    for size in (8, 4, 2, 1):
        yield from (Field(f"column of {size}", at + i * size, size, True) for i in range(entries))
        at += entries * size
    yield Field(_KEYS, at, key_bytes, False)


def _fields_of_row(table: np.dtype[np.void], at: int) -> Iterator[Field]:
    assert table.fields is not None
    for name, (kind, offset, *_) in table.fields.items():
        yield Field(name, at + offset, kind.itemsize, kind.kind != "V")


SMALL = {
    "epoch": (tree_records._EPOCH_MAGIC, tree_records._EPOCH, tree_records.EPOCH_COPY_BYTES),
    "account": (tree_records._ACCOUNT_MAGIC, tree_records._ACCOUNT, tree_records.ACCOUNT_BYTES),
    "superblock": (superblock.SUPERBLOCK_MAGIC, tree_records._TREE, tree_records.SUPERBLOCK_COPY_BYTES),
}


def files_records(files: Mapping[str, bytes]) -> list[Record]:
    """The records of a root of layout `files`."""
    found: list[Record] = []
    for name, data in files.items():
        kind = "epoch" if name.startswith("epochs/") else name.rpartition("/")[2]
        if name.startswith("leases/"):
            found.append(Record("lease", name, 0, len(data), tree_records._LEASE_MAGIC, (), True))
        elif name.startswith("manifest-"):
            found.append(Record("manifest", name, 0, len(data), b"", (), True))
        elif kind in SMALL and data:
            found += _small(kind, name, data)
        elif data[:8] == SLOT_MAGIC:
            found.append(Record("block's header", name, 0, HEADER, SLOT_MAGIC, slot_fields(data)))
    return found


def _small(kind: str, name: str, data: bytes) -> Iterator[Record]:
    magic, form, size = SMALL[kind]
    fields = tuple(fields_of(form, BODY_AT))
    for at in range(0, len(data), size):
        yield Record(kind, name, at, size, magic, fields, kind == "account")


def known_structs() -> Iterator[tuple[str, object]]:
    """Everything in the modules of the format that lays out bytes, by name."""
    for module in (superblock, region_header, snapshot, tree_records, block_envelope):
        for name, value in vars(module).items():
            if isinstance(value, struct.Struct | np.dtype):
                yield f"{module.__name__}.{name}", value
