"""The checksum that travels with a row: xxh3-128 over a group's aligned bytes, taken once, checked at every load."""

from __future__ import annotations

import xxhash

CHECKSUM_BYTES = 16
SHORT_BYTES = 1 << 20
"""Payloads up to here are hashed where they are at hand, be it an event loop: a thread's answer takes longer."""
_KEEPS_GIL_BYTES = 64 << 10


def checksum(payload: memoryview, keep_gil: bool = False) -> bytes:
    """The 16-byte checksum of a payload. `keep_gil`: without letting go of the GIL, which takes it 0.04 to 0.15 ms/MiB.

    xxhash lets go of it for more than about 64 KiB at a time, and beside a thread that is busy in Python getting it
    back takes a switch interval (5 ms).
    """
    if len(payload) <= _KEEPS_GIL_BYTES or not keep_gil:
        return xxhash.xxh3_128_digest(payload)
    state = xxhash.xxh3_128()
    for start in range(0, len(payload), _KEEPS_GIL_BYTES):
        state.update(payload[start : start + _KEEPS_GIL_BYTES])
    return state.digest()
