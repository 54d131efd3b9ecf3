"""Records on disk that lie: fields set to numbers that no process wrote, under a checksum that is made to hold again.

For fuzzers of a backend that keeps records. Everything follows from the rng that is handed in.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvtier.tier.checksum import BODY_AT, seal

_TOKEN = re.compile(r"(\d*)([a-zA-Z])")
_NESTED = 100_000
FORGED_JSON = (
    "0", "-1", "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1.5", "-0.0", "9223372036854775807",
    "9223372036854775808", "18446744073709551616", "9" * 400, "9" * 5000, "null", "true", "false", '""', '"1"',
    '"\\ud800"', '"\\u0000"', '"' + "x" * 3000 + '"', "[]", "{}", "[" * 200 + "]" * 200, "[" * _NESTED,
    '{"a":' * 200 + "1" + "}" * 200,
)  # fmt: skip
"""What may stand in the place of any value of a JSON text."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record: where it begins, how many bytes it has, and whether it is a number (little-endian)."""

    name: str
    at: int
    size: int
    number: bool


def fields_of(form: struct.Struct, at: int, name: str = "") -> list[Field]:
    """The fields of a packed struct that begins at an offset, one for each value."""
    found, offset = [], at
    for count, kind in _TOKEN.findall(form.format):
        size = struct.calcsize(f"<{count}{kind}")
        found.append(Field(f"{name}{offset}", offset, size, kind != "s"))
        offset += size
    return found


def forged_number(rng: Random, size: int) -> int:
    """A number of so many bytes: near a limit, near a power of two, or any."""
    bits = 8 * size
    chosen = rng.choice(("limit", "power", "power", "any", "small"))
    if chosen == "limit":
        number = rng.choice((0, 1, *((1 << high) - less for high in (bits, bits - 1, bits - 2) for less in (0, 1, 2))))
    elif chosen == "power":
        number = (1 << rng.randrange(bits)) + rng.choice((-1, 0, 1))
    else:
        number = rng.randrange(1 << bits if chosen == "any" else 300)
    return number & ((1 << bits) - 1)


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a store: `length` bytes of a file from `at` on, sealed under a magic; no magic: a JSON text.

    `kind` names records that are alike, whose bytes may stand for each other's. `whole_file`: it may be of any length.
    """

    kind: str
    file: str
    at: int
    length: int
    magic: bytes
    fields: tuple[Field, ...]
    whole_file: bool = False

    def of(self, data: bytes) -> bytes:
        """The record's bytes in its file."""
        return data[self.at : self.at + self.length]


@dataclass(frozen=True, slots=True)
class ForgedRecord:
    """A record as it is to be written. `forged`: more than numbers of it were changed."""

    record: Record
    data: bytes
    forged: bool


def forge_record(rng: Random, record: Record, data: bytes, peers: Sequence[bytes]) -> ForgedRecord:
    """Another content of a record whose bytes are `data`, its checksum made to hold. `peers`: records of its kind."""
    if not record.magic:
        return ForgedRecord(record, _forged_text(rng, data.decode()).encode("utf-8", "surrogatepass"), True)
    if not record.fields:
        text = _forged_text(rng, data[BODY_AT:].decode()).encode("utf-8", "surrogatepass")
        return ForgedRecord(record, seal(record.magic, text), True)
    page, forged = bytearray(data), False
    how = rng.choices(("fields", "peer's field", "peer", "noise", "length"), (14, 2, 1, 1, 2 * record.whole_file))[0]
    if how == "fields":
        for field in rng.sample(record.fields, min(len(record.fields), rng.choice((1, 1, 1, 2, 3)))):
            forged |= not field.number
            _set(page, field, _forged_bytes(rng, field))
    elif how == "peer's field":
        field = rng.choice(record.fields)
        other = rng.choice(peers)
        forged = not field.number
        _set(page, field, other[field.at : field.at + field.size])
    elif how == "peer":
        page[:], forged = rng.choice(peers), True
    elif how == "noise":
        at, forged = rng.randrange(BODY_AT, len(page)), True
        page[at : at + 16] = rng.randbytes(len(page[at : at + 16]))
    else:
        forged, cut = True, rng.choice((0, 1, 7, 16, 96, 111, rng.randrange(len(page))))
        page = page[: BODY_AT + cut] if rng.random() < 0.8 else page + bytes(rng.randrange(1, 9000))
    return ForgedRecord(record, seal(record.magic, bytes(page[BODY_AT:])), forged)


def _set(page: bytearray, field: Field, value: bytes) -> None:
    page[field.at : field.at + len(value)] = value


def _forged_bytes(rng: Random, field: Field) -> bytes:
    if field.number:
        return forged_number(rng, field.size).to_bytes(field.size, "little")
    return rng.choice((bytes(field.size), b"\xff" * field.size, rng.randbytes(field.size)))


def _forged_text(rng: Random, text: str) -> str:
    """A JSON text with one value replaced, or cut, or something else altogether."""
    how = rng.choice(("value", "value", "value", "value", "cut", "whole", "name"))
    if how == "cut":
        return text[: rng.randrange(len(text) + 1)]
    if how == "whole":
        return rng.choice(FORGED_JSON)
    document = json.loads(text)
    name = rng.choice(list(document))
    if how == "name":
        del document[name]
        return json.dumps(document)
    marked = json.dumps(document | {name: "<the lie>"})
    return marked.replace('"<the lie>"', rng.choice(FORGED_JSON))


def forge_records(
    rng: Random, records: Sequence[Record], files: Callable[[str], bytes], count: int
) -> Iterator[ForgedRecord]:
    """Forged records of a store. Some kinds are forged and others are not, so that a forged one does not always keep
    another from being read."""
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record.kind, []).append(record)
    forged_kinds = rng.sample(sorted(by_kind), rng.randrange(1, len(by_kind) + 1))
    for kind in rng.choices(forged_kinds, k=count):
        record = rng.choice(by_kind[kind])
        peers = [one.of(files(one.file)) for one in by_kind[kind][:8] if one.length == record.length]
        yield forge_record(rng, record, record.of(files(record.file)), peers or [record.of(files(record.file))])
