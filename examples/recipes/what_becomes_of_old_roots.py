"""How a root of another format version is recognised and not read."""

import struct

import xxhash

from kvtier.tier.block_envelope import ENVELOPE_VERSION
from kvtier_fs.format.superblock import Superblock, decode_superblock, encode_superblock, foreign_version

page = bytearray(
    encode_superblock(Superblock(bytes(16), stride=1 << 20, regions=4, header_bytes=4096, row_alignment=4096))
)
assert decode_superblock(bytes(page) * 2) is not None
assert foreign_version(bytes(page) * 2) is None

struct.pack_into("<I", page, 24, ENVELOPE_VERSION + 1)  # a later release wrote it
page[8:24] = xxhash.xxh3_128_digest(memoryview(page)[24:])
assert decode_superblock(bytes(page) * 2) is None
assert foreign_version(bytes(page) * 2) == ENVELOPE_VERSION + 1
