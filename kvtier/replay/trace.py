"""Readers of request traces: JSON lines, plain or gzip.

Each line is one request with `input_length`, `output_length` and one id for each block of the prompt, either as a
list (`hash_ids`) or run-length coded (`rle`: `[first_id, count]` pairs). With a `session` the ids are local to it;
without one they are global. Times (`timestamp`, `t`) are read by nobody: a replay goes as fast as it can.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from kvtier.errors import ConfigError
from kvtier.jobs import IntArray, int_array
from kvtier.replay.requests import Request, SourceShape

LINE_BYTES_MAX = 64 << 20
BLOCKS_MAX = 1 << 22
ID_MAX = (1 << 63) - 1
GZIP_MAGIC = b"\x1f\x8b"
BLOCK_TOKENS_TRIED = tuple(1 << power for power in range(13))


@dataclass(frozen=True, slots=True, eq=False)
class TraceLine:
    """One line of a trace, checked. `session` is empty where ids are global."""

    session: str
    ids: IntArray
    input_length: int
    output_length: int


class Trace:
    """A trace file as a source of requests.

    `read` passes over the whole file once: every line is checked before anything runs, the tokens of a block are
    found from the lengths, and the longest request is known. Raises ConfigError with the line's number.
    """

    def __init__(self, path: Path, shape: SourceShape) -> None:
        self._path = path
        self._shape = shape

    @staticmethod
    def read(path: Path, limit: int | None = None, block_tokens: int | None = None) -> Trace:
        """Check the first `limit` lines (all when None) of a trace. `block_tokens` overrides what they suggest."""
        count = longest = 0
        candidates = list(BLOCK_TOKENS_TRIED)
        for line in islice(read_lines(path), limit):
            count += 1
            blocks = len(line.ids)
            longest = max(longest, blocks)
            candidates = [tokens for tokens in candidates if _fits(line.input_length, blocks, tokens)]
        if not count:
            raise ConfigError("holds no request", str(path))
        if block_tokens is None:
            if not candidates:
                raise ConfigError("its lengths fit no block of 1 to 4096 tokens; say --block-tokens", str(path))
            block_tokens = candidates[-1]
        return Trace(path, SourceShape(count, longest, block_tokens))

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def shape(self) -> SourceShape:
        return self._shape

    def requests(self) -> Iterator[Request]:
        """The requests in the order of the file. The last id of a prompt may stand for a partial block."""
        for line in islice(read_lines(self._path), self._shape.num_requests):
            root = f"trace:{self._path.name}:{line.session}"
            yield Request(root, line.session, line.ids, len(line.ids), line.input_length, line.output_length)


def read_lines(path: Path) -> Iterator[TraceLine]:
    """Every line of a trace, one at a time. Raises ConfigError for a file or a line that is none."""
    try:
        with _open(path) as stream:
            for number, raw in enumerate(iter(lambda: stream.readline(LINE_BYTES_MAX + 1), b""), start=1):
                if raw.strip():
                    try:
                        yield _parse(raw)
                    except ValueError as error:
                        raise ConfigError(str(error), f"{path}:{number}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"broken gzip data: {error}", str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot read the trace: {error.strerror or error}", str(path)) from None


def _open(path: Path) -> BinaryIO:
    stream = path.open("rb")
    try:
        zipped = stream.read(2) == GZIP_MAGIC
        stream.seek(0)
    except OSError:
        stream.close()
        raise
    if not zipped:
        return stream
    stream.close()
    return cast(BinaryIO, gzip.open(path, "rb"))


def _fits(input_length: int, blocks: int, tokens: int) -> bool:
    return blocks in (input_length // tokens, -(-input_length // tokens))


def _parse(raw: bytes) -> TraceLine:
    """One line, checked. Raises ValueError."""
    if len(raw) > LINE_BYTES_MAX:
        raise ValueError(f"the line is longer than {LINE_BYTES_MAX} bytes")
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON object: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one kind of error for every fault of a line
    session = fields.get("session", "")
    if not isinstance(session, str):
        raise ValueError("session must be text")  # noqa: TRY004 - as above
    if ("hash_ids" in fields) == ("rle" in fields):
        raise ValueError("needs either hash_ids or rle")
    ids = _plain_ids(fields["hash_ids"]) if "hash_ids" in fields else _run_length_ids(fields["rle"])
    return TraceLine(session, ids, _count(fields, "input_length", 1), _count(fields, "output_length", 0))


def _count(fields: dict[str, object], name: str, least: int) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= ID_MAX:
        raise ValueError(f"{name} must be a whole number of at least {least}")
    return value


def _plain_ids(value: object) -> IntArray:
    if not isinstance(value, list) or not all(type(entry) is int and 0 <= entry <= ID_MAX for entry in value):
        raise ValueError("hash_ids must be a list of whole numbers of at least 0")
    if len(value) > BLOCKS_MAX:
        raise ValueError(f"names more than {BLOCKS_MAX} blocks")
    return int_array(value)


def _run_length_ids(value: object) -> IntArray:
    """`[[first, count], ...]` expanded. The sum of the counts is checked before anything is."""
    runs: list[tuple[int, int]] = []
    total = 0
    for run in value if isinstance(value, list) else [None]:
        if not isinstance(run, list) or len(run) != 2 or any(type(entry) is not int for entry in run):
            raise ValueError("rle must be a list of [first_id, count] pairs of whole numbers")
        first, count = run
        total += count
        if first < 0 or count < 1 or first + count > ID_MAX or total > BLOCKS_MAX:
            raise ValueError(f"rle needs first_id >= 0 and count >= 1, and at most {BLOCKS_MAX} blocks in all")
        runs.append((first, count))
    if not runs:
        return int_array(())
    return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in runs])
