"""What may become of a value that another process can write to."""

from __future__ import annotations

from collections.abc import Callable

DAMAGED_VALUES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit of the header": lambda value: value[:40] + bytes([value[40] ^ 1]) + value[41:],
    "a flipped bit of the payload": lambda value: value[:-1] + bytes([value[-1] ^ 1]),
    "truncated": lambda value: value[:-1],
    "one byte longer": lambda value: value + b"\0",
    "much longer": lambda value: value * 3,
    "zeros": lambda value: bytes(len(value)),
    "empty": lambda value: b"",
    "another epoch": lambda value: value[:48] + b"\1" + value[49:],
}
"""By name: how a value of a header and a payload is changed."""
