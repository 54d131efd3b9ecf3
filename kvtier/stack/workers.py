"""Tensor parallelism: the CPU tier's copies run in the processes that own the GPUs.

The coordinator holds one `WorkerLink` for each worker process and treats it as that worker's GPU tier. In the worker
process `serve_worker` executes the jobs on a real GPU tier that is opened on the same shared region. Only places
travel over the socket; the bytes go through the region.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

from pydantic import Field

from kvtier.errors import ConfigError, KVTierError, ResourceError, UsageError
from kvtier.jobs import DropReason, JobResult, TransferJob, dropped, failed
from kvtier.keys import GPU, Medium, OffloadKey
from kvtier.loadstore import LoadStore, LookupResult, Opened, Ownership, TierContext
from kvtier.options import Seconds, TierOptions
from kvtier.outlast import outlast
from kvtier.stack.worker_frames import (
    FrameType,
    Hello,
    Verb,
    decode_error,
    decode_hello,
    decode_job,
    decode_refused,
    decode_result,
    decode_welcome,
    encode_error,
    encode_hello,
    encode_job,
    encode_refused,
    encode_result,
    encode_welcome,
    fits,
    read_frame,
)

JOBS_UNDER_WAY_MAX = 256

_log = logging.getLogger(__name__)
T = TypeVar("T")


class WorkerLinkOptions(TierOptions):
    """What a link to a worker process can be told."""

    type: Literal["worker"] = "worker"
    open_timeout_seconds: Seconds = Field(
        default=60.0, description="how long a worker may take to answer the first call"
    )
    close_timeout_seconds: Seconds = Field(default=5.0, description="how long closing waits for jobs under way")


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    job: TransferJob
    answer: asyncio.Future[JobResult]


class WorkerLink(LoadStore):
    """A worker process, as the coordinator sees it: a GPU tier whose jobs run over there.

    Calls end when the worker has answered, also when cancelled, because its copies go on. When the connection is lost,
    jobs under way end as failed(ECONNRESET) and later ones as failed(EPIPE): nothing waits for the dead. A lost
    connection does not prove that the worker's copies have ended; the rows' count of uses ended does.
    """

    medium: ClassVar[Medium] = GPU
    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = 1
    ownership: ClassVar[Ownership] = Ownership.OWNED
    Options: ClassVar[type[TierOptions]] = WorkerLinkOptions

    def __init__(self, options: TierOptions, sock: socket.socket) -> None:
        """`sock` is a connected stream socket; the link owns it from here on. Only the worker process may hold the
        other end, or its death goes unseen."""
        if not isinstance(options, WorkerLinkOptions):
            raise ConfigError(f"a worker link takes WorkerLinkOptions, not {type(options).__name__}")
        self.options: WorkerLinkOptions = options
        self._sock = sock
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._room = asyncio.Semaphore(JOBS_UNDER_WAY_MAX)
        self._calls: dict[int, _Call] = {}
        self._sequence = 0
        self._lost = False
        self._closed = False
        self.late_answers = 0

    async def open(self, context: TierContext) -> Opened:
        """Agree with the worker on its place, the region's shape and the namespace.

        `context` must bring `rows`. Raises ResourceError if the worker is gone or does not answer in time, ConfigError
        if it refuses; the socket is closed then.
        """
        if self._writer is not None or self._closed:
            raise UsageError("a worker link is opened once")
        hello = _hello(context)
        try:
            async with asyncio.timeout(self.options.open_timeout_seconds):
                reader, self._writer = await asyncio.open_connection(sock=self._sock)
                self._writer.write(encode_hello(hello))
                capacity_bytes, mode = _welcome(context.worker, *await read_frame(reader))
        except (OSError, EOFError) as error:  # also the deadline
            await self._hang_up()
            raise ResourceError(f"worker {context.worker} did not answer: {type(error).__name__}") from error
        except BaseException:
            await self._hang_up()
            raise
        self._reading = asyncio.create_task(self._read_answers(reader))
        return Opened(capacity_bytes, mode=f"worker {context.worker}: {mode}")

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """Never answered here: the engine's own prefix cache knows what the GPU holds. Raises UsageError."""
        raise UsageError("a worker has no directory; ask the engine's prefix cache")

    async def store(self, job: TransferJob) -> JobResult:
        """Have the worker copy rows into its GPU blocks. Raises UsageError if the worker finds the job ill-formed."""
        return await self._ask(Verb.STORE, job)

    async def load(self, job: TransferJob) -> JobResult:
        """Have the worker copy its GPU blocks into rows. Raises UsageError if the worker finds the job ill-formed."""
        return await self._ask(Verb.LOAD, job)

    async def close(self) -> None:
        """Wait for jobs under way, at most until the deadline, and hang up; the worker then ends. Idempotent."""
        if self._closed:
            return
        self._closed = True
        answers = [call.answer for call in self._calls.values()]
        try:
            if answers:
                await asyncio.wait(answers, timeout=self.options.close_timeout_seconds)
        finally:
            self._lose(errno.ECONNRESET)
            await self._hang_up()

    async def _ask(self, verb: Verb, job: TransferJob) -> JobResult:
        writer = self._writer
        if writer is None or self._closed:
            raise UsageError("the worker link is not open")
        async with self._room:
            with contextlib.suppress(ConnectionError):  # a lost connection is seen just below
                await writer.drain()
            if self._closed:
                return JobResult.uniform(job, dropped(DropReason.CLOSING))
            if self._lost or writer.is_closing():
                return JobResult.uniform(job, failed(errno.EPIPE))
            self._sequence += 1
            frame = encode_job(self._sequence, verb, job)
            call = _Call(job, asyncio.get_running_loop().create_future())
            self._calls[self._sequence] = call
            writer.write(frame)
            return await outlast(call.answer)

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        reason = errno.ECONNRESET
        try:
            while True:
                kind, body = await read_frame(reader)
                self._take_answer(kind, body)
        except (OSError, EOFError):
            pass
        except UsageError as error:
            reason = errno.EPROTO
            _log.warning("a worker sent nonsense, its connection is closed: %s", error)
        finally:
            self._lose(reason)

    def _take_answer(self, kind: FrameType, body: bytes) -> None:
        refusal: UsageError | None = None
        result: JobResult | None = None
        if kind is FrameType.RESULT:
            sequence, result = decode_result(body)
        elif kind is FrameType.ERROR:
            sequence, reason = decode_error(body)
            refusal = UsageError(reason)
        else:
            raise UsageError(f"a {kind.name} frame where an answer was due")
        call = self._calls.get(sequence)
        if call is None:
            self.late_answers += 1
            return
        if result is not None and not fits(call.job, result):
            raise UsageError("a result that does not fit its job")
        del self._calls[sequence]
        if refusal is not None:
            call.answer.set_exception(refusal)
        elif result is not None:
            call.answer.set_result(result)

    def _lose(self, reason: int) -> None:
        """The connection is gone: everything under way has failed, and nobody waits."""
        self._lost = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.answer.set_result(JobResult.uniform(call.job, failed(reason)))
        if self._writer is not None:
            self._writer.close()

    async def _hang_up(self) -> None:
        if self._writer is None:
            self._sock.close()
            return
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        await _close(self._writer, self.options.close_timeout_seconds)


def _welcome(worker: int, kind: FrameType, body: bytes) -> tuple[int, str]:
    if kind is FrameType.REFUSED:
        raise ConfigError(f"worker {worker} refuses: {decode_refused(body)}")
    if kind is not FrameType.WELCOME:
        raise ResourceError(f"worker {worker} answered the first call with a {kind.name} frame")
    return decode_welcome(body)


async def serve_worker(sock: socket.socket, store: LoadStore, context: TierContext, opened: Opened) -> None:
    """Execute a coordinator's jobs on `store` until the coordinator hangs up; the worker process's whole life.

    `store` is the worker's GPU tier, opened with `context`; it answered `opened`. Jobs run at once, at most
    256 of them. Returns when the connection has ended and no copy is under way; also on cancellation no copy is left
    behind. Raises UsageError if the peer does not speak the protocol. Closes the socket, not the store.
    """
    reader, writer = await asyncio.open_connection(sock=sock)
    jobs: set[asyncio.Task[None]] = set()
    try:
        if not await _agree(reader, writer, context, opened):
            return
        while True:
            kind, body = await read_frame(reader)
            if kind is not FrameType.JOB:
                raise UsageError(f"a {kind.name} frame where a job was due")
            task = asyncio.create_task(_execute(store, writer, *decode_job(body)))
            jobs.add(task)
            task.add_done_callback(jobs.discard)
            if len(jobs) >= JOBS_UNDER_WAY_MAX:
                await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
    except (OSError, EOFError):
        return  # the coordinator is gone
    finally:
        try:
            if jobs:
                await outlast(asyncio.ensure_future(asyncio.wait(jobs)))
        finally:
            await _close(writer, timeout_seconds=5.0)


async def _agree(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: TierContext, opened: Opened
) -> bool:
    kind, body = await read_frame(reader)
    if kind is not FrameType.HELLO:
        raise UsageError(f"a {kind.name} frame where the first call was due")
    theirs, ours = decode_hello(body), _hello(context)
    if theirs != ours:
        names = [name for name in Hello.__dataclass_fields__ if getattr(theirs, name) != getattr(ours, name)]
        writer.write(encode_refused(f"it differs from the coordinator in {', '.join(names)}"))
        return False
    writer.write(encode_welcome(opened.capacity_bytes, opened.mode))
    return True


async def _execute(store: LoadStore, writer: asyncio.StreamWriter, sequence: int, verb: Verb, job: TransferJob) -> None:
    """Run one job and answer; a coordinator that is gone by then gets no answer."""
    try:
        result = await (store.load(job) if verb is Verb.LOAD else store.store(job))
        answer = encode_result(sequence, result)
    except KVTierError as error:
        answer = encode_error(sequence, str(error))
    except Exception:
        _log.exception("a job failed in the worker")
        answer = encode_result(sequence, JobResult.uniform(job, failed(errno.EIO)))
    with contextlib.suppress(ConnectionError):
        writer.write(answer)
        await writer.drain()


def _hello(context: TierContext) -> Hello:
    if context.rows is None:
        raise UsageError("workers share the region's rows; open them after the region")
    geometry = context.geometry
    digest = context.namespace.digest()
    return Hello(context.worker, geometry.world_size, context.rows.num_rows, context.rows.row_bytes, digest)


async def _close(writer: asyncio.StreamWriter, timeout_seconds: float) -> None:
    """Flush and close a stream; what cannot be flushed by the deadline is thrown away."""
    writer.close()
    try:
        async with asyncio.timeout(timeout_seconds):
            await writer.wait_closed()
    except OSError:  # also the deadline
        writer.transport.abort()
