"""The place of a block's file: arithmetic over digests, no I/O.

Names are hex digits, and the version of the envelope unless it is 1: releases with different ones share a root.
"""

import hashlib
import os
import re
from typing import NamedTuple

from kvtier.errors import GeometryError
from kvtier.tier.block_envelope import VERSION_SUFFIX, version_suffix
from kvtier.types.geometry import round_up
from kvtier_fs.format.tree_records import BUCKETS_MAX, Tree

BLOCK_NAME = re.compile(r"[0-9a-f]{40}" + VERSION_SUFFIX)
"""Of a block of any version: all are counted, and evicted in one order."""
_DIGITS = 40
TEMPORARY_NAME = re.compile(r"new-([0-9a-f]{16})-[0-9a-f]{1,16}")
NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")
BUCKET_NAME = re.compile(r"bucket-([0-9a-f]{2})")
LEAF_NAME = re.compile(r"[0-9a-f]{1,2}")
DISK_BLOCK_BYTES = 4096
_FILES_WANTED = 64
ROOT_BYTES = 128 << 10
"""Set aside for the small files of a root, which lie in no bucket."""
_ENTRY_BYTES = 128
"""Bytes that a name may cost its folder: ext4 keeps folders half full at worst and never shrinks them."""


class BlockPlace(NamedTuple):
    """A block's bucket, the folder in it (empty where buckets have none) and its file's name."""

    bucket: int
    leaf: str
    name: str


def place_of(tree: Tree, namespace: bytes, key: bytes) -> BlockPlace:
    """The place of a key of a namespace; the same in every process and on every host."""
    name = hashlib.sha256(namespace + key).hexdigest()[:_DIGITS]
    return BlockPlace(int(name[:4], 16) % tree.buckets, name[4 : 4 + tree.fan_out], name + version_suffix())


def is_of_this_version(name: str) -> bool:
    """True for the name of a block of the envelope's version that this release stores."""
    return BLOCK_NAME.fullmatch(name) is not None and name[_DIGITS:] == version_suffix()


def bucket_name(bucket: int) -> str:
    """The folder of a bucket."""
    return f"bucket-{bucket:02x}"


def leaves(tree: Tree) -> list[str]:
    """The folders inside a bucket."""
    return [f"{number:0{tree.fan_out}x}" for number in range(16**tree.fan_out)] if tree.fan_out else []


def occupied(status: os.stat_result) -> int:
    """Bytes of disk of a file or folder: what the file system says, at least its size in whole blocks."""
    return max(status.st_blocks * 512, round_up(status.st_size, DISK_BLOCK_BYTES))


def choose_fan_out(files: int) -> int:
    """Hex digits of the folders inside a bucket of about this many files."""
    return 0 if files <= 1024 else 1 if files <= 32768 else 2


def choose_buckets(capacity_bytes: int, largest_bytes: int) -> int:
    """The number of buckets of a new root: a power of two, so that each holds some dozens of the largest files."""
    buckets = 1
    while buckets < BUCKETS_MAX and (capacity_bytes - ROOT_BYTES) // (2 * buckets) >= _FILES_WANTED * largest_bytes:
        buckets *= 2
    return buckets


def bucket_budget(tree: Tree, capacity_bytes: int, file_bytes: tuple[int, ...]) -> int:
    """The bytes that everything in one bucket may take: blocks, temporaries, its account, its folders as found.

    Set aside before: the root's own small files, and the growth of folders while they fill. Raises GeometryError if a
    bucket could not hold a single block.
    """
    share = (capacity_bytes - ROOT_BYTES) // tree.buckets
    growth = round_up(max(0, share) // min(file_bytes) * _ENTRY_BYTES, DISK_BLOCK_BYTES)
    folders = (3 + len(leaves(tree))) * DISK_BLOCK_BYTES
    budget = share - growth
    if budget < folders + max(file_bytes) + DISK_BLOCK_BYTES:
        needed = tree.buckets * (folders + max(file_bytes) + 2 * DISK_BLOCK_BYTES + growth) + ROOT_BYTES
        raise GeometryError(
            f"capacity is {capacity_bytes} bytes; {tree.buckets} buckets with a block of {max(file_bytes)} bytes each "
            f"need about {needed}"
        )
    return budget
