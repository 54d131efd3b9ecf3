"""Frames between a coordinator and its worker processes: fixed headers and raw int64 arrays.

A frame is a header (magic, version, type, body length) and a body, all little-endian; both ends run on one host. Every
length is checked against a bound and against the bytes that are there before anything is read by it. Keys do not
travel: a worker copies bytes between places and needs no identities.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.jobs import (
    BlockOutcome,
    BlockStatus,
    DropReason,
    GPURuns,
    GroupTransfer,
    IntArray,
    JobKind,
    JobResult,
    TransferJob,
    int_array,
)
from kvtier.keys import GroupIndex, JobId, OffloadKey

MAGIC = b"KVTW"
VERSION = 1
BODY_BYTES_MAX = 64 << 20
TEXT_BYTES_MAX = 4096
GROUPS_MAX = 4096

_HEADER = struct.Struct("<4sHHI")
_HELLO = struct.Struct("<IIQQ16s")
_WELCOME = struct.Struct("<Q")
_JOB = struct.Struct("<QBBqdqI")
_GROUP = struct.Struct("<IIIII")
_RESULT = struct.Struct("<QqQdI")
_COUNT = struct.Struct("<I")
_SEQUENCE = struct.Struct("<Q")

_STATUSES = tuple(BlockStatus)
_REASONS: tuple[DropReason | None, ...] = (None, *DropReason)
_KINDS = tuple(JobKind)
_ANONYMOUS = OffloadKey(b"")


class FrameType(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    JOB = 4
    RESULT = 5
    ERROR = 6


class Verb(IntEnum):
    """The LoadStore method a job frame asks for."""

    LOAD = 0
    STORE = 1


_FRAME_TYPES = frozenset(FrameType)
_VERBS = frozenset(Verb)


@dataclass(frozen=True, slots=True)
class Hello:
    """What both sides must agree on before the first job."""

    worker: int
    world_size: int
    num_rows: int
    row_bytes: int
    namespace_digest: bytes


def frame(kind: FrameType, body: bytes) -> bytes:
    """A whole frame. Raises UsageError if the body is over the bound."""
    if len(body) > BODY_BYTES_MAX:
        raise UsageError(f"a frame to or from a worker holds at most {BODY_BYTES_MAX} bytes, not {len(body)}")
    return _HEADER.pack(MAGIC, VERSION, kind, len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> tuple[FrameType, bytes]:
    """The next frame. Raises IncompleteReadError or OSError at the stream's end, UsageError for what is no frame."""
    magic, version, kind, length = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if magic != MAGIC or version != VERSION:
        raise UsageError(f"the peer does not speak version {VERSION} of the worker protocol")
    if length > BODY_BYTES_MAX or kind not in _FRAME_TYPES:
        raise UsageError(f"the peer sent a frame of type {kind} and {length} bytes")
    return FrameType(kind), await reader.readexactly(length)


class _Body:
    """Reads a frame's body from the front, never past its end."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, count: int) -> bytes:
        if count > len(self._body) - self._at:
            raise UsageError("the peer sent a frame that is shorter than it says")
        self._at += count
        return self._body[self._at - count : self._at]

    def fields(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def ids(self, count: int) -> IntArray:
        return int_array(np.frombuffer(self.take(8 * count), dtype="<i8"))

    def end(self) -> None:
        if self._at != len(self._body):
            raise UsageError("the peer sent a frame that is longer than it says")


def encode_hello(hello: Hello) -> bytes:
    return frame(
        FrameType.HELLO,
        _HELLO.pack(hello.worker, hello.world_size, hello.num_rows, hello.row_bytes, hello.namespace_digest),
    )


def decode_hello(body: bytes) -> Hello:
    parts = _Body(body)
    worker, world_size, num_rows, row_bytes = struct.unpack("<IIQQ", parts.take(24))
    digest = parts.take(16)
    parts.end()
    return Hello(worker, world_size, num_rows, row_bytes, digest)


def encode_welcome(capacity_bytes: int, mode: str) -> bytes:
    return frame(FrameType.WELCOME, _WELCOME.pack(capacity_bytes) + _text(mode))


def decode_welcome(body: bytes) -> tuple[int, str]:
    parts = _Body(body)
    (capacity_bytes,) = parts.fields(_WELCOME)
    return capacity_bytes, body[_WELCOME.size :][:TEXT_BYTES_MAX].decode(errors="replace")


def encode_refused(reason: str) -> bytes:
    return frame(FrameType.REFUSED, _text(reason))


def decode_refused(body: bytes) -> str:
    return body[:TEXT_BYTES_MAX].decode(errors="replace")


def encode_error(sequence: int, reason: str) -> bytes:
    return frame(FrameType.ERROR, _SEQUENCE.pack(sequence) + _text(reason))


def decode_error(body: bytes) -> tuple[int, str]:
    (sequence,) = _Body(body).fields(_SEQUENCE)
    return sequence, body[_SEQUENCE.size :][:TEXT_BYTES_MAX].decode(errors="replace")


def _text(words: str) -> bytes:
    return words.encode()[:TEXT_BYTES_MAX]


def encode_job(sequence: int, verb: Verb, job: TransferJob) -> bytes:
    """A job on the CPU tier. Raises UsageError for staging that is not GPURuns and for a job over the bound."""
    deadline = math.nan if job.deadline is None else job.deadline
    kind = _KINDS.index(job.kind)
    parts = [_JOB.pack(sequence, verb, kind, job.job_id, deadline, job.epoch, len(job.groups))]
    for group in job.groups:
        runs = group.staging
        if not isinstance(runs, GPURuns) or len(group.slots) != len(group.keys):
            raise UsageError("a worker is told its blocks by GPURuns and one row for each key")
        counts = (len(group.keys), len(group.generations), len(runs.blocks), len(runs.gpu_blocks))
        parts.append(_GROUP.pack(group.group, *counts))
        for ids in (group.slots, group.generations, runs.blocks, runs.firsts, runs.counts, runs.gpu_blocks):
            parts.append(ids.astype("<i8", copy=False).tobytes())
    return frame(FrameType.JOB, b"".join(parts))


def decode_job(body: bytes) -> tuple[int, Verb, TransferJob]:
    """The sequence number, the method and the job; its keys are empty, as many as there were."""
    parts = _Body(body)
    sequence, verb, kind, job_id, deadline, epoch, count = _JOB.unpack(parts.take(_JOB.size))
    if verb not in _VERBS or kind >= len(_KINDS) or count > GROUPS_MAX:
        raise UsageError(f"the peer sent a job of kind {kind} with verb {verb} and {count} groups")
    groups = []
    for _ in range(count):
        group, num_keys, num_generations, num_runs, num_pages = parts.fields(_GROUP)
        slots, generations = parts.ids(num_keys), parts.ids(num_generations)
        blocks, firsts, counts = parts.ids(num_runs), parts.ids(num_runs), parts.ids(num_runs)
        runs = GPURuns(blocks, firsts, counts, parts.ids(num_pages))
        groups.append(GroupTransfer(GroupIndex(group), (_ANONYMOUS,) * num_keys, runs, slots, generations))
    parts.end()
    when = None if math.isnan(deadline) else deadline
    return sequence, Verb(verb), TransferJob(JobId(job_id), _KINDS[kind], tuple(groups), when, epoch)


def encode_result(sequence: int, result: JobResult) -> bytes:
    parts = [
        _RESULT.pack(sequence, result.job_id, result.bytes_moved, result.seconds, len(result.outcomes)),
    ]
    for outcomes in result.outcomes:
        codes = [(_STATUSES.index(one.status), _REASONS.index(one.reason), one.errno) for one in outcomes]
        parts.append(_COUNT.pack(len(codes)))
        parts.append(np.array(codes, dtype="<i4").tobytes())
    return frame(FrameType.RESULT, b"".join(parts))


def decode_result(body: bytes) -> tuple[int, JobResult]:
    parts = _Body(body)
    sequence, job_id, bytes_moved, seconds, count = _RESULT.unpack(parts.take(_RESULT.size))
    if count > GROUPS_MAX:
        raise UsageError(f"the peer sent a result of {count} groups")
    outcomes = []
    for _ in range(count):
        (blocks,) = parts.fields(_COUNT)
        codes = np.frombuffer(parts.take(12 * blocks), dtype="<i4").reshape(blocks, 3)
        outcomes.append(_outcomes(codes))
    parts.end()
    return sequence, JobResult(JobId(job_id), tuple(outcomes), bytes_moved, seconds)


def _outcomes(codes: npt.NDArray[np.int32]) -> tuple[BlockOutcome, ...]:
    known: dict[tuple[int, int, int], BlockOutcome] = {}
    result = []
    for status, reason, errno in codes.tolist():
        code = (status, reason, errno)
        if code not in known:
            if not (0 <= status < len(_STATUSES) and 0 <= reason < len(_REASONS)):
                raise UsageError(f"the peer sent an outcome of status {status} and reason {reason}")
            known[code] = BlockOutcome(_STATUSES[status], _REASONS[reason], errno)
        result.append(known[code])
    return tuple(result)


def fits(job: TransferJob, result: JobResult) -> bool:
    """True when a result has one outcome for each block of a job."""
    want: Sequence[int] = [len(group.keys) for group in job.groups]
    return [len(outcomes) for outcomes in result.outcomes] == want
