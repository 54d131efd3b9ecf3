"""The checksum that travels with a row: xxh3-128 over a group's aligned bytes, taken once, checked at every load."""

from __future__ import annotations

import xxhash

CHECKSUM_BYTES = 16
ONE_SHOT_BYTES = 128 << 10


def checksum(payload: memoryview) -> bytes:
    """The 16-byte checksum of a payload.

    xxhash's one-shot function keeps the GIL and its object lets go of it; below 128 KiB getting the GIL back beside a
    busy thread takes longer than hashing.
    """
    if len(payload) <= ONE_SHOT_BYTES:
        return xxhash.xxh3_128_digest(payload)
    return xxhash.xxh3_128(payload).digest()
