"""The checksum of a block (xxh3-128 over its aligned bytes), and records that are sealed with one."""

from typing import TypeVar

import xxhash

CHECKSUM_BYTES = 16
MAGIC_BYTES = 8
BODY_AT = MAGIC_BYTES + CHECKSUM_BYTES
"""Where the body of a sealed record begins: behind its magic and its checksum."""
SHORT_BYTES = 1 << 20
"""Payloads of at most this size are hashed in place, also on an event loop: handing them to a thread takes longer."""
_KEEPS_GIL_BYTES = 64 << 10


def checksum(payload: memoryview, keep_gil: bool = False) -> bytes:
    """The 16-byte checksum of a payload.

    xxhash releases the GIL for more than about 64 KiB at a time, and getting it back from a thread that is busy in
    Python takes a switch interval (5 ms). `keep_gil` hashes smaller pieces instead, which never release it; that holds
    the GIL for 0.04 to 0.15 ms/MiB.
    """
    if len(payload) <= _KEEPS_GIL_BYTES or not keep_gil:
        return xxhash.xxh3_128_digest(payload)
    state = xxhash.xxh3_128()
    for start in range(0, len(payload), _KEEPS_GIL_BYTES):
        state.update(payload[start : start + _KEEPS_GIL_BYTES])
    return state.digest()


Data = TypeVar("Data", bytes, memoryview)


def seal(magic: bytes, body: bytes, length: int = 0) -> bytes:
    """Magic, checksum and body, padded with zeros to `length`; the checksum covers the padding."""
    body = body.ljust(length - BODY_AT, b"\0")
    return magic + xxhash.xxh3_128_digest(body) + body


def unseal(magic: bytes, data: Data) -> Data | None:
    """The body of a sealed record; None unless it is as it was written."""
    body = data[BODY_AT:]
    if data[:MAGIC_BYTES] != magic or data[MAGIC_BYTES:BODY_AT] != xxhash.xxh3_128_digest(body):
        return None
    return body
