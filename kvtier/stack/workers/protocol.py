"""Messages between a coordinator and its worker processes: a fixed header, then JSON of one of the models below.

Both ends run on one host. A message is checked against the model that is expected next before anything of it is used,
and its length against a bound before it is read. Keys do not travel: a worker copies bytes between places and needs no
identities.
"""

from __future__ import annotations

import asyncio
import struct
from itertools import groupby
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from kvtier.errors import UsageError
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import BlockOutcome, GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey

MAGIC = b"KVTW"
VERSION = 2
MESSAGE_BYTES_MAX = 64 << 20
TEXT_CHARACTERS_MAX = 4096

_HEADER = struct.Struct("<4sHI")
_ANONYMOUS = OffloadKey(b"")

Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Text = Annotated[str, AfterValidator(lambda text: text[:TEXT_CHARACTERS_MAX])]
Ids = bytes
"""An array of int64."""


class Message(BaseModel):
    """Base of every message: strict types, unknown fields refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", frozen=True, ser_json_bytes="base64", val_json_bytes="base64"
    )


class WorkerHello(Message):
    """The coordinator's first message: what both sides must agree on before the first job."""

    worker: int
    world_size: int
    num_rows: int
    row_bytes: int
    namespace: str


class WorkerWelcome(Message):
    """The worker's answer to `WorkerHello`. With a reason in `refused` it takes no job."""

    capacity_bytes: int = 0
    mode: Text = ""
    refused: Text = ""


class Call(Message):
    """A job that the worker executes. `method` says which method of its tier; `sequence` returns in the `WorkerAnswer`.

    A group is its index, its rows and generations, and the blocks, firsts, counts and GPU blocks of its runs.
    """

    sequence: int
    method: JobKind
    job_id: Int64
    kind: JobKind
    deadline: float | None
    epoch: Int64
    groups: list[tuple[Int64, Ids, Ids, Ids, Ids, Ids, Ids]]

    @staticmethod
    def of(sequence: int, method: JobKind, job: TransferJob) -> Call:
        """The call for a job on the CPU tier. Raises UsageError for a job of a lower tier."""
        groups = []
        for group in job.gpu_groups:
            if len(group.rows) != len(group.keys):
                raise UsageError("a worker needs one row for each key")
            runs = group.runs
            arrays = (group.rows, group.generations, runs.blocks, runs.firsts, runs.counts, runs.gpu_blocks)
            groups.append((group.group, *[array.tobytes() for array in arrays]))
        named: dict[str, Any] = {"job_id": job.job_id, "kind": job.kind, "deadline": job.deadline, "epoch": job.epoch}
        return Call.model_construct(sequence=sequence, method=method, groups=groups, **named)

    def job(self) -> TransferJob:
        """The job, with an empty key for each row. Raises UsageError for arrays that contradict each other."""
        groups = []
        for group, *arrays in self.groups:
            if any(len(array) % 8 for array in arrays):
                raise UsageError("the peer sent a part of a number")
            rows, generations, blocks, firsts, counts, gpu_blocks = (np.frombuffer(one, np.int64) for one in arrays)
            keys = (_ANONYMOUS,) * len(rows)
            runs = GPURuns(blocks, firsts, counts, gpu_blocks)
            groups.append(GPUGroup(GroupIndex(group), keys, runs, rows, generations))
        return TransferJob(JobId(self.job_id), self.kind, tuple(groups), self.deadline, self.epoch)


class WorkerAnswer(Message):
    """End of a call: for each group the runs of equal outcomes, or why the worker refused the job."""

    sequence: int
    outcomes: list[list[tuple[PositiveInt, BlockOutcome]]] = []
    bytes_moved: Int64 = 0
    seconds: float = 0.0
    refused: Text | None = None

    @staticmethod
    def of(sequence: int, result: JobResult) -> WorkerAnswer:
        """The answer for a job that has ended."""
        runs = [[(len(list(run)), outcome) for outcome, run in groupby(group)] for group in result.outcomes]
        return WorkerAnswer.model_construct(
            sequence=sequence, outcomes=runs, bytes_moved=result.bytes_moved, seconds=result.seconds
        )

    def result(self, job: TransferJob) -> JobResult:
        """The result. Raises UsageError unless it has one outcome for each block of the job."""
        lengths = [sum(length for length, _ in runs) for runs in self.outcomes]
        if lengths != [len(group.keys) for group in job.groups]:
            raise UsageError("a result that does not fit its job")
        outcomes = tuple(tuple(one for length, one in runs for _ in range(length)) for runs in self.outcomes)
        return JobResult(job.job_id, outcomes, self.bytes_moved, self.seconds)


M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """A message with its header. Raises UsageError if it is over the bound."""
    body = message.__pydantic_serializer__.to_json(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise UsageError(f"a message to or from a worker holds at most {MESSAGE_BYTES_MAX} bytes, not {len(body)}")
    return _HEADER.pack(MAGIC, VERSION, len(body)) + body


def decode(expected: type[M], body: bytes) -> M:
    """The message in a body. Raises UsageError if it is not of the model that is expected."""
    try:
        return expected.model_validate_json(body)
    except ValidationError as error:
        raise UsageError(f"the peer sent what is no {expected.__name__}") from error


async def read_message(reader: asyncio.StreamReader, expected: type[M]) -> M:
    """The next message.

    Raises IncompleteReadError or OSError at the stream's end, UsageError if the peer sent anything else.
    """
    magic, version, length = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if magic != MAGIC or version != VERSION:
        raise UsageError(f"the peer does not speak version {VERSION} of the worker protocol")
    if length > MESSAGE_BYTES_MAX:
        raise UsageError(f"the peer sent a message of {length} bytes")
    return decode(expected, await reader.readexactly(length))
