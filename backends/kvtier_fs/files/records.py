"""The small files of a tree: superblock, epochs, bucket accounts, leases. Each is sealed by a checksum."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvtier_fs.slot import FORMAT_VERSION
from kvtier_fs.superblock import SUPERBLOCK_MAGIC

FILES_VERSION = 1000 + FORMAT_VERSION
"""The version in the superblock. It shares its place and its magic with slab roots, so that each refuses the other."""

SUPERBLOCK_COPY_BYTES = 4096
EPOCH_COPY_BYTES = 128
ACCOUNT_BYTES = 128
LEASE_BYTES_MAX = 1024

_EPOCH_MAGIC = b"KVTIEREP"
_ACCOUNT_MAGIC = b"KVTIERAC"
_LEASE_MAGIC = b"KVTIERLE"
_BODY_AT = 24
_TREE = struct.Struct("<II16sIII")
_EPOCH = struct.Struct("<I16sQ")
_ACCOUNT = struct.Struct("<I16sIQ")


def seal(magic: bytes, body: bytes, length: int = 0) -> bytes:
    """Magic, checksum and body, padded with zeros to `length`; the checksum covers the padding."""
    body = body.ljust(length - _BODY_AT, b"\0")
    return magic + xxhash.xxh3_128_digest(body) + body


def unseal(magic: bytes, data: bytes) -> bytes | None:
    """The body of a sealed record, None if it is not as it was written."""
    body = data[_BODY_AT:]
    if data[:8] != magic or data[8:_BODY_AT] != xxhash.xxh3_128_digest(body):
        return None
    return body


@dataclass(frozen=True, slots=True)
class Tree:
    """How a root is laid out, fixed when it was made. `fan_out`: hex digits of the folders inside each bucket."""

    root_uuid: bytes
    header_bytes: int
    row_alignment: int
    buckets: int
    fan_out: int


def encode_tree(tree: Tree) -> bytes:
    """A whole superblock file: two copies."""
    body = _TREE.pack(FILES_VERSION, tree.header_bytes, tree.root_uuid, tree.row_alignment, tree.buckets, tree.fan_out)
    return seal(SUPERBLOCK_MAGIC, body, SUPERBLOCK_COPY_BYTES) * 2


def decode_tree(data: bytes) -> Tree | None:
    """The tree a superblock file describes, from either copy; None if there is no whole one of this version."""
    for at in (0, SUPERBLOCK_COPY_BYTES):
        body = unseal(SUPERBLOCK_MAGIC, data[at : at + SUPERBLOCK_COPY_BYTES])
        if body is None or len(body) < _TREE.size:
            continue
        version, header_bytes, uuid, alignment, buckets, fan_out = _TREE.unpack_from(body)
        if version == FILES_VERSION:
            return Tree(uuid, header_bytes, alignment, buckets, fan_out)
    return None


def encode_epoch(namespace: bytes, epoch: int) -> bytes:
    """A whole epoch file: two copies."""
    return seal(_EPOCH_MAGIC, _EPOCH.pack(FILES_VERSION, namespace, epoch), EPOCH_COPY_BYTES) * 2


def decode_epoch(data: bytes, namespace: bytes) -> int | None:
    """The epoch an epoch file states for its namespace, from either copy; None if neither is whole."""
    for at in (0, EPOCH_COPY_BYTES):
        body = unseal(_EPOCH_MAGIC, data[at : at + EPOCH_COPY_BYTES])
        if body is None or len(body) < _EPOCH.size:
            continue
        version, owner, epoch = _EPOCH.unpack_from(body)
        if (version, owner) == (FILES_VERSION, namespace):
            return int(epoch)
    return None


def encode_account(tree: Tree, bucket: int, used_bytes: int) -> bytes:
    """What a bucket holds, in bytes of disk."""
    return seal(_ACCOUNT_MAGIC, _ACCOUNT.pack(FILES_VERSION, tree.root_uuid, bucket, used_bytes), ACCOUNT_BYTES)


def decode_account(data: bytes, tree: Tree, bucket: int) -> int | None:
    """What a bucket's account states; None if it is no whole account of this bucket."""
    body = unseal(_ACCOUNT_MAGIC, data)
    if body is None or len(body) < _ACCOUNT.size:
        return None
    version, uuid, number, used = _ACCOUNT.unpack_from(body)
    return int(used) if (version, uuid, number) == (FILES_VERSION, tree.root_uuid, bucket) else None


def encode_lease(text: str) -> bytes:
    """Who holds a lease, in the words of `leases.Holder`."""
    return seal(_LEASE_MAGIC, text.encode())


def decode_lease(data: bytes) -> str | None:
    """What a lease says, None if it is damaged."""
    body = unseal(_LEASE_MAGIC, data)
    return None if body is None else body.decode("utf-8", "replace")
