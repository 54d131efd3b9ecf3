"""Identities: offload keys, KV cache groups, jobs, requests, media of tiers.

An `OffloadKey` is the content hash of a prefix up to a block's end, any length of bytes, followed by the index of the
KV cache group in four big-endian bytes. One flat `bytes` object keeps directories small and lookups one hash each.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import NewType

OffloadKey = NewType("OffloadKey", bytes)
GroupIndex = NewType("GroupIndex", int)
JobId = NewType("JobId", int)
RequestId = NewType("RequestId", str)
Medium = NewType("Medium", str)

GPU = Medium("GPU")
CPU = Medium("CPU")
FS = Medium("FS")
REMOTE = Medium("REMOTE")

GROUP_BYTES = 4


def make_key(block_hash: bytes, group: int) -> OffloadKey:
    """Join a block hash (any length, not empty) and a group index into an offload key."""
    return OffloadKey(block_hash + group.to_bytes(GROUP_BYTES, "big"))


def block_keys(block_hashes: Iterable[bytes], group: int = 0) -> list[OffloadKey]:
    """The offload keys of blocks of one group, given the content hash of the prefix up to each block's end."""
    return [make_key(block_hash, group) for block_hash in block_hashes]


def key_group(key: OffloadKey) -> GroupIndex:
    """The KV cache group a key belongs to."""
    return GroupIndex(int.from_bytes(key[-GROUP_BYTES:], "big"))


def group_runs(keys: Iterable[OffloadKey]) -> list[tuple[GroupIndex, int]]:
    """(group, number of keys) of each run of keys of one group, in their order."""
    groups = groupby([key[-GROUP_BYTES:] for key in keys])
    return [(GroupIndex(int.from_bytes(group, "big")), len(list(run))) for group, run in groups]


def key_hash(key: OffloadKey) -> bytes:
    """The content hash of a key, without its group."""
    return key[:-GROUP_BYTES]
