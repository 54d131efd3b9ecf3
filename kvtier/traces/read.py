"""Readers of request traces: JSON lines, plain, gzip or zstd.

Each line is one request with `input_length`, `output_length` and one id for each block of the prompt, either as a
list (`hash_ids`) or run-length coded (`rle`: `[first_id, count]` pairs). With a `session` the ids are local to it;
without one they are global. The time is `timestamp`, in milliseconds, or `t`, in seconds; some publish `timestamp` in
another unit, which a reader has to be given. `block_tokens` are the tokens of a block. All other fields are ignored.
"""

import codecs
import gzip
import importlib
import logging
import math
import sys
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, Self, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvtier.errors import ConfigError
from kvtier.traces.requests import Request, RequestSource
from kvtier.types.arrays import NO_IDS, IntArray, int_array

try:
    zstd: Any = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
except ImportError:
    zstd = None

LINE_BYTES_MAX = 64 << 20
BLOCKS_MAX = 1 << 22
ID_MAX = (1 << 63) - 1
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
TimeUnit = Literal["s", "ms", "us"]
PER_SECOND: dict[TimeUnit, int] = {"s": 1, "ms": 1000, "us": 1_000_000}
BLOCK_TOKENS_TRIED = tuple(1 << power for power in range(13))

_ZSTD_ERRORS = () if zstd is None else (zstd.ZstdError,)
_log = logging.getLogger(__name__)

BlockId = Annotated[int, Field(ge=0, le=ID_MAX)]
Run = tuple[Annotated[int, Field(ge=0, le=ID_MAX - BLOCKS_MAX)], Annotated[int, Field(ge=1)]]


class TraceLine(BaseModel):
    """A line of a trace, checked. `session` is empty where ids are global."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True)

    session: str = ""
    input_length: int = Field(ge=1, le=ID_MAX)
    output_length: int = Field(ge=0, le=ID_MAX)
    block_tokens: int | None = Field(default=None, ge=1, le=ID_MAX)
    timestamp: float | None = Field(default=None, ge=-ID_MAX, le=ID_MAX, allow_inf_nan=False)
    t: float | None = Field(default=None, ge=-ID_MAX, le=ID_MAX, allow_inf_nan=False)
    hash_ids: Annotated[list[BlockId], Field(max_length=BLOCKS_MAX, fail_fast=True)] | None = None
    rle: Annotated[list[Run], Field(max_length=BLOCKS_MAX, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _one_form_within_bounds(self) -> Self:
        if (self.hash_ids is None) == (self.rle is None):
            raise ValueError("needs either hash_ids or rle")
        if sum(count for _, count in self.rle or ()) > BLOCKS_MAX:
            raise ValueError(f"rle names more than {BLOCKS_MAX} blocks")
        return self

    def seconds(self, unit: TimeUnit | None = None) -> float | None:
        """The time of the request, read in a unit or else in that of its field; None where there is no time."""
        if self.timestamp is not None:
            return self.timestamp / PER_SECOND[unit or "ms"]
        return None if self.t is None else self.t / PER_SECOND[unit or "s"]

    @property
    def ids(self) -> IntArray:
        """An id for each block of the prompt, in prefix order."""
        if self.hash_ids is not None:
            return int_array(self.hash_ids)
        runs = [np.arange(first, first + count, dtype=np.int64) for first, count in self.rle or ()]
        return np.concatenate([NO_IDS, *runs])


def read_trace(
    path: Path, limit: int | None = None, block_tokens: int | None = None, unit: TimeUnit | None = None
) -> RequestSource:
    """The first `limit` lines (all when None) of a trace as requests, whose times are in `unit` (None: see above).

    The file is read once as a whole here, so every line is checked before anything runs. The number of tokens
    in a block is `block_tokens`, or that of the lines, or else follows from the lengths. Raises ConfigError with the
    number of a bad line.
    """
    count = longest = 0
    first, last = math.inf, -math.inf
    candidates = list(BLOCK_TOKENS_TRIED)
    for line in islice(read_lines(path), limit):
        count += 1
        blocks = len(line.ids)
        longest = max(longest, blocks)
        if (seconds := line.seconds(unit)) is not None:
            first, last = min(first, seconds), max(last, seconds)
        block_tokens = block_tokens or line.block_tokens
        candidates = [tokens for tokens in candidates if _fits(line.input_length, blocks, tokens)]
    if not count:
        raise ConfigError("holds no request", str(path))
    if block_tokens is None:
        if not candidates:
            raise ConfigError("its lengths fit no block of 1 to 4096 tokens; say --block-tokens", str(path))
        block_tokens = candidates[-1]
    span = last - first if last >= first else None
    return RequestSource(path.name, count, longest, block_tokens, lambda: _requests(path, count, unit), span)


def read_lines(path: Path) -> Iterator[TraceLine]:
    """Every line of a trace, one at a time. Raises ConfigError for a file or a line that is none.

    A compressed file that ends too early, as after a crash of its writer, is read up to its last whole line.
    """
    try:
        with _open(path) as stream:
            for number, raw in enumerate(iter(lambda: stream.readline(LINE_BYTES_MAX + 1), b""), start=1):
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                if raw.strip():
                    yield _parse(raw, f"{path}:{number}")
    except EOFError:
        _log.warning("%s ends too early; what is whole of it is read", path)
    except (zlib.error, gzip.BadGzipFile, *_ZSTD_ERRORS) as error:
        raise ConfigError(f"broken compressed data: {error}", str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot read the trace: {error.strerror or error}", str(path)) from None


def _requests(path: Path, limit: int, unit: TimeUnit | None) -> Iterator[Request]:
    """The requests in the order of the file. The last id of a prompt may stand for a partial block."""
    for line in islice(read_lines(path), limit):
        ids = line.ids
        root = f"trace:{path.name}:{line.session}"
        yield Request(root, line.session, ids, len(ids), line.input_length, line.output_length, line.seconds(unit))


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as stream:
        magic = stream.read(len(ZSTD_MAGIC))
    if magic == ZSTD_MAGIC:
        if zstd is None:
            raise ConfigError("is compressed by zstd: pip install 'kvtier[zstd]', or `zstd -d` it", str(path))
        return cast(BinaryIO, zstd.open(path, "rb"))
    return cast(BinaryIO, gzip.open(path, "rb")) if magic.startswith(GZIP_MAGIC) else path.open("rb")


def _fits(input_length: int, blocks: int, tokens: int) -> bool:
    return blocks in (input_length // tokens, -(-input_length // tokens))


def _parse(raw: bytes, at: str) -> TraceLine:
    """A line, checked. Raises ConfigError with the first thing that is wrong."""
    if len(raw) > LINE_BYTES_MAX:
        raise ConfigError(f"the line is longer than {LINE_BYTES_MAX} bytes", at)
    try:
        return TraceLine.model_validate_json(raw)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
    if detail["type"] in ("json_invalid", "model_type"):
        raise ConfigError("not a JSON object", at)
    message = detail["msg"].removeprefix("Value error, ")
    where = ": ".join(map(str, detail["loc"][:1]))
    raise ConfigError(f"{where}: {message}" if where else message, at)
