"""Messages as bytes: keys and rows in them, their bounds, the base of items, and the errors of a peer."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import reduce
from hashlib import sha256
from itertools import accumulate, pairwise
from operator import or_
from typing import Any

import msgspec
import numpy as np

from kvtier.errors import KVTierError
from kvtier.types.arrays import IntArray
from kvtier.types.keys import OffloadKey

MESSAGE_BYTES_MAX = 64 << 10
"""Below the default SO_SNDBUF of Linux, 208 KiB."""
KEY_BYTES_MAX = 4096
KEYS_BYTES_MAX = 40 << 10
"""Bytes of the keys of one item, so that it fits a message with its rows and generations."""
ITEM_KEYS_MAX = 1024
"""Keys, rows or runs of outcomes of one item."""
JOB_BLOCKS_MAX = 1 << 17
"""Blocks of one job."""
TEXT_CHARACTERS_MAX = 1024
"""Characters of a request's name, of a session's, of a reason."""


class WireError(KVTierError):
    """A peer sent no message of this protocol."""


class Breach(KVTierError):
    """An engine named what it does not have, or broke an order of messages."""


class Keys(msgspec.Struct, array_like=True, frozen=True):
    """Some keys. `width`: bytes of each; 0: they differ, and each follows its length in two little-endian bytes."""

    width: int
    joined: bytes

    @staticmethod
    def of(keys: Sequence[OffloadKey]) -> Keys:
        """These keys, packed."""
        widths = set(map(len, keys))
        if len(widths) == 1:
            return Keys(widths.pop(), b"".join(keys))
        return Keys(0, b"".join(part for key in keys for part in (len(key).to_bytes(2, "little"), key)))

    def unpack(self) -> list[OffloadKey]:
        """The keys. Raises WireError for a width or a length that does not fit the bytes."""
        width, joined = self.width, self.joined
        if width:
            if not 0 < width <= KEY_BYTES_MAX or len(joined) % width:
                raise WireError(f"{len(joined)} bytes are no keys of {width} bytes")
            return [OffloadKey(joined[at : at + width]) for at in range(0, len(joined), width)]
        return list(self._unpack_different())

    def _unpack_different(self) -> Iterator[OffloadKey]:
        at, joined = 0, self.joined
        while at < len(joined):
            begin = at + 2
            at = begin + int.from_bytes(joined[at:begin], "little")
            if not begin < at <= len(joined):
                raise WireError("a key has no byte, or more than were sent")
            yield OffloadKey(joined[begin:at])


class Places(msgspec.Struct, array_like=True, frozen=True):
    """Rows and the generations of their fills, as many of each."""

    rows: bytes
    generations: bytes

    @staticmethod
    def of(rows: Sequence[int], generations: Sequence[int]) -> Places:
        """These rows, packed. Few of a list take a third of the time that numpy takes."""
        return Places(array("i", rows).tobytes(), array("q", generations).tobytes())

    def unpack(self) -> tuple[IntArray, IntArray]:
        """Rows and generations as int64. Raises WireError unless there are as many of both."""
        self._check()
        return np.frombuffer(self.rows, np.int32).astype(np.int64), np.frombuffer(self.generations, np.int64)

    def lists(self) -> tuple[list[int], list[int]]:
        """Rows and generations. Raises WireError unless there are as many of both."""
        self._check()
        return memoryview(self.rows).cast("i").tolist(), memoryview(self.generations).cast("q").tolist()

    def pairs(self) -> list[tuple[int, int]]:
        """Each row and its generation. Raises WireError unless there are as many of both."""
        return list(zip(*self.lists(), strict=True))

    def _check(self) -> None:
        if len(self.rows) % 4 or len(self.generations) != 2 * len(self.rows):
            raise WireError("rows and generations differ in number")


def bounded_text(text: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str:
    """This text, or a digest in the place of one that is too long for an item, or that UTF-8 has no bytes for."""
    if len(text) <= characters_max and (text.isascii() or text == text.encode(errors="ignore").decode()):
        return text
    return f"sha256:{sha256(text.encode(errors='surrogatepass')).hexdigest()}"


class Item(msgspec.Struct, array_like=True, frozen=True):
    """Base of what a message holds."""


def pieces(document: bytes) -> list[bytes]:
    """A document in parts that fit an item each."""
    return [document[at : at + KEYS_BYTES_MAX] for at in range(0, len(document), KEYS_BYTES_MAX)]


_ENCODER = msgspec.msgpack.Encoder()
_HEAD_BYTES = 1 + 9 + 5
"""Of a message: a list of two, a sequence number, and a list of up to 2^32 items."""


class Codec:
    """Messages of one direction: a sequence number, then items of these types."""

    def __init__(self, items: Sequence[type[Item]]) -> None:
        one_of: Any = reduce(or_, items)
        self._decoder = msgspec.msgpack.Decoder(tuple[int, list[one_of]])

    @staticmethod
    def encode(items: Sequence[Item], sequence: int) -> list[bytes]:
        """The messages that hold these items, in order, numbered from `sequence` on.

        Raises WireError for an item that no message holds: `split` it first.
        """
        whole = _ENCODER.encode((sequence, items))
        if len(whole) <= MESSAGE_BYTES_MAX:
            return [whole] if items else []
        encoded = list(map(_ENCODER.encode, items))
        if any(len(one) + _HEAD_BYTES > MESSAGE_BYTES_MAX for one in encoded):
            raise WireError(f"an item of {max(map(len, encoded))} bytes fits no message")
        messages: list[bytes] = []
        first = size = 0
        for at, one in enumerate(encoded):
            if size and size + len(one) + _HEAD_BYTES > MESSAGE_BYTES_MAX:
                messages.append(_message(sequence + len(messages), encoded[first:at]))
                first, size = at, 0
            size += len(one)
        return [*messages, _message(sequence + len(messages), encoded[first:])] if encoded else []

    def decode(self, message: bytes | bytearray | memoryview) -> tuple[int, list[Any]]:
        """(the sequence number, the items). Raises WireError."""
        if len(message) > MESSAGE_BYTES_MAX:
            raise WireError(f"a message of {len(message)} bytes")
        try:
            found: tuple[int, list[Any]] = self._decoder.decode(message)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError("what a peer sent is no message of this protocol") from error
        return found


def _message(sequence: int, encoded: Sequence[bytes]) -> bytes:
    return b"".join((b"\x92\xcf", sequence.to_bytes(8, "big"), b"\xdd", len(encoded).to_bytes(4, "big"), *encoded))


def split(keys: Sequence[OffloadKey]) -> list[tuple[int, Sequence[OffloadKey]]]:
    """(position, keys) of parts that fit an item each."""
    if len(keys) <= ITEM_KEYS_MAX and sum(map(len, keys)) + 2 * len(keys) <= KEYS_BYTES_MAX:
        return [(0, keys)] if keys else []
    ends = list(accumulate(len(key) + 2 for key in keys))
    first, base = 0, 0
    cuts = [0]
    for at, end in enumerate(ends):
        if at > first and (end - base > KEYS_BYTES_MAX or at - first >= ITEM_KEYS_MAX):
            cuts.append(at)
            first, base = at, ends[at - 1]
    return [(begin, keys[begin:end]) for begin, end in pairwise([*cuts, len(keys)])]
