"""The small files of a tree: superblock, epochs, bucket accounts, leases. Each is sealed by a checksum."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtier.tier.block_envelope import COUNTER_LIMIT
from kvtier.tier.checksum import seal, unseal
from kvtier.tier.shared_epoch import EPOCH_CEILING
from kvtier_fs.format.superblock import FORMAT_VERSION, SUPERBLOCK_MAGIC, can_be_aligned

FILES_VERSION = 1000 + FORMAT_VERSION
"""The version in the superblock. It shares its place and its magic with slab roots, so that each refuses the other."""

SUPERBLOCK_COPY_BYTES = 4096
EPOCH_COPY_BYTES = 128
ACCOUNT_BYTES = 128
LEASE_BYTES_MAX = 1024
BUCKETS_MAX = 256
FAN_OUT_MAX = 2

_EPOCH_MAGIC = b"KVTIEREP"
_ACCOUNT_MAGIC = b"KVTIERAC"
_LEASE_MAGIC = b"KVTIERLE"
_TREE = struct.Struct("<II16sIII")
_EPOCH = struct.Struct("<I16sQ")
_ACCOUNT = struct.Struct("<I16sIQ")


@dataclass(frozen=True, slots=True)
class Tree:
    """The layout of a root, fixed when it was made. `fan_out`: hex digits of the folders inside each bucket."""

    root_uuid: bytes
    header_bytes: int
    row_alignment: int
    buckets: int
    fan_out: int

    @property
    def possible(self) -> bool:
        """True if a root can have been laid out so. A checksum that holds does not say so."""
        numbers = 0 < self.buckets <= BUCKETS_MAX and self.fan_out <= FAN_OUT_MAX
        return numbers and can_be_aligned(self.header_bytes, self.row_alignment)


def encode_tree(tree: Tree) -> bytes:
    """A whole superblock file: two copies."""
    body = _TREE.pack(FILES_VERSION, tree.header_bytes, tree.root_uuid, tree.row_alignment, tree.buckets, tree.fan_out)
    return seal(SUPERBLOCK_MAGIC, body, SUPERBLOCK_COPY_BYTES) * 2


def _records(magic: bytes, data: bytes, copy_bytes: int, record: struct.Struct) -> Iterator[tuple[Any, ...]]:
    """The fields of each whole record of our version in a file of up to two copies, without the version."""
    for copy in (data[:copy_bytes], data[copy_bytes : 2 * copy_bytes]):
        body = unseal(magic, copy)
        if body is not None and len(body) >= record.size:
            version, *fields = record.unpack_from(body)
            if version == FILES_VERSION:
                yield tuple(fields)


def decode_tree(data: bytes) -> Tree | None:
    """The tree a superblock file describes, from either copy; None if there is no whole one of this version."""
    for header_bytes, uuid, alignment, buckets, fan_out in _records(
        SUPERBLOCK_MAGIC, data, SUPERBLOCK_COPY_BYTES, _TREE
    ):
        tree = Tree(uuid, header_bytes, alignment, buckets, fan_out)
        if tree.possible:
            return tree
    return None


def encode_epoch(namespace: bytes, epoch: int) -> bytes:
    """A whole epoch file: two copies."""
    return seal(_EPOCH_MAGIC, _EPOCH.pack(FILES_VERSION, namespace, epoch), EPOCH_COPY_BYTES) * 2


def decode_epoch(data: bytes, namespace: bytes) -> int | None:
    """The epoch an epoch file states for its namespace, from either copy; None if neither is whole and possible."""
    records = _records(_EPOCH_MAGIC, data, EPOCH_COPY_BYTES, _EPOCH)
    return next((int(epoch) for owner, epoch in records if owner == namespace and epoch < EPOCH_CEILING), None)


def other_epoch_version(data: bytes) -> int | None:
    """The version of a whole epoch file of another release; None if it is not that."""
    halves = (data[at : at + EPOCH_COPY_BYTES] for at in (0, EPOCH_COPY_BYTES))
    bodies = (unseal(_EPOCH_MAGIC, half) for half in halves)
    versions = (int.from_bytes(body[:4], "little") for body in bodies if body is not None and len(body) >= 4)
    return next((version for version in versions if version != FILES_VERSION), None)


def encode_account(tree: Tree, bucket: int, used_bytes: int) -> bytes:
    """An account of what a bucket holds, in bytes of disk."""
    return seal(_ACCOUNT_MAGIC, _ACCOUNT.pack(FILES_VERSION, tree.root_uuid, bucket, used_bytes), ACCOUNT_BYTES)


def decode_account(data: bytes, tree: Tree, bucket: int) -> int | None:
    """The bytes that a bucket's account states; None if it is no whole account of this bucket."""
    records = _records(_ACCOUNT_MAGIC, data, len(data), _ACCOUNT)
    owner = tree.root_uuid, bucket
    return next((int(used) for *of, used in records if (*of,) == owner and used < COUNTER_LIMIT), None)


def encode_lease(text: str) -> bytes:
    """Who holds a lease, in the words of `leases.Holder`."""
    return seal(_LEASE_MAGIC, text.encode())


def decode_lease(data: bytes) -> str | None:
    """The content of a lease, None if it is damaged."""
    body = unseal(_LEASE_MAGIC, data)
    return None if body is None else body.decode("utf-8", "replace")
