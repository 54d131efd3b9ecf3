"""Tensor parallelism: the CPU tier's copies run in the processes that own the GPUs.

The coordinator holds one `RemoteWorker` for each worker process and treats it as that worker's GPU tier. In the worker
process `serve_worker` executes the jobs on a real GPU tier that is opened on the same shared region. Only places
travel over the socket; the bytes go through the region.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from typing import ClassVar, Literal

from pydantic import Field

from kvtier.aio.shielded_wait import shielded_wait
from kvtier.errors import ConfigError, KVTierError, ResourceError, UsageError
from kvtier.options import Seconds, TierOptions
from kvtier.stack.workers.protocol import Call, WorkerAnswer, WorkerHello, WorkerWelcome, encode, read_message
from kvtier.tier.contract import LoadStore, Opened, TierContext
from kvtier.types.jobs import DropReason, JobKind, JobResult, TransferJob, dropped, failed
from kvtier.types.keys import GPU, Medium

INFLIGHT_JOBS_MAX = 256

_log = logging.getLogger(__name__)


class WorkerLinkOptions(TierOptions):
    """Options of a link to a worker process."""

    type: Literal["worker"] = "worker"
    open_timeout_seconds: Seconds = Field(
        default=60.0, description="how long a worker may take to answer the first call"
    )
    close_timeout_seconds: Seconds = Field(default=5.0, description="how long closing waits for jobs in flight")


class RemoteWorker(LoadStore):
    """A worker process, as the coordinator sees it: a GPU tier whose jobs run over there.

    Calls end when the worker has answered, also when cancelled, because its copies go on. When the connection is lost,
    jobs in flight end as failed(ECONNRESET) and later ones as failed(EPIPE): nothing waits for a worker that is gone. A
    lost connection does not prove that the worker's copies have ended; the rows' count of uses ended does.
    """

    medium: ClassVar[Medium] = GPU
    Options: ClassVar[type[TierOptions]] = WorkerLinkOptions
    options: WorkerLinkOptions

    def __init__(self, options: TierOptions, sock: socket.socket) -> None:
        """`sock` is a connected stream socket; the link owns it from here on. Only the worker process may hold the
        other end, or its death goes unseen."""
        super().__init__(options)
        self._sock = sock
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._room = asyncio.Semaphore(INFLIGHT_JOBS_MAX)
        self._calls: dict[int, tuple[TransferJob, asyncio.Future[JobResult]]] = {}
        self._sequence = 0
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
                self._writer.write(encode(hello))
                welcome = await read_message(reader, WorkerWelcome)
            if welcome.refused:
                raise ConfigError(f"worker {context.worker} refuses: {welcome.refused}")
        except BaseException as error:
            await self._disconnect()
            if isinstance(error, (OSError, EOFError)):  # also the deadline
                raise ResourceError(f"worker {context.worker} did not answer: {type(error).__name__}") from error
            raise
        self._reading = asyncio.create_task(self._read_answers(reader))
        return Opened(welcome.capacity_bytes, mode=f"worker {context.worker}: {welcome.mode}")

    async def store(self, job: TransferJob) -> JobResult:
        """Have the worker copy rows into its GPU blocks. Raises UsageError if the worker finds the job ill-formed."""
        return await self._call(JobKind.STORE, job)

    async def load(self, job: TransferJob) -> JobResult:
        """Have the worker copy its GPU blocks into rows. Raises UsageError if the worker finds the job ill-formed."""
        return await self._call(JobKind.LOAD, job)

    async def close(self) -> None:
        """Wait for jobs in flight, at most until the deadline, and disconnect; the worker then ends. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._calls:
                answers = [answer for _, answer in self._calls.values()]
                await asyncio.wait(answers, timeout=self.options.close_timeout_seconds)
        finally:
            self._lose(errno.ECONNRESET)
            await self._disconnect()

    async def _call(self, method: JobKind, job: TransferJob) -> JobResult:
        writer = self._writer
        if writer is None or self._closed:
            raise UsageError("the worker link is not open")
        async with self._room:
            with contextlib.suppress(ConnectionError):  # a lost connection is seen just below
                await writer.drain()
            if self._closed:
                return JobResult.uniform(job, dropped(DropReason.CLOSING))
            if writer.is_closing():
                return JobResult.uniform(job, failed(errno.EPIPE))
            self._sequence += 1
            message = encode(Call.of(self._sequence, method, job))
            answer: asyncio.Future[JobResult] = asyncio.get_running_loop().create_future()
            self._calls[self._sequence] = job, answer
            writer.write(message)
            return await shielded_wait(answer)

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        reason = errno.ECONNRESET
        try:
            while True:
                self._complete(await read_message(reader, WorkerAnswer))
        except (OSError, EOFError):
            pass
        except UsageError as error:
            reason = errno.EPROTO
            _log.warning("a worker broke the protocol, its connection is closed: %s", error)
        finally:
            self._lose(reason)

    def _complete(self, message: WorkerAnswer) -> None:
        """Record an answer. Raises UsageError for one that does not fit its job."""
        if message.sequence not in self._calls:
            self.late_answers += 1
            return
        job, answer = self._calls[message.sequence]
        if message.refused is None:
            answer.set_result(message.result(job))
        else:
            answer.set_exception(UsageError(message.refused))
        del self._calls[message.sequence]

    def _lose(self, reason: int) -> None:
        """The connection is gone: everything in flight has failed, and no call waits."""
        calls, self._calls = self._calls, {}
        for job, answer in calls.values():
            answer.set_result(JobResult.uniform(job, failed(reason)))
        if self._writer is not None:
            self._writer.close()

    async def _disconnect(self) -> None:
        if self._writer is None:
            self._sock.close()
            return
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        await _close(self._writer, self.options.close_timeout_seconds)


async def serve_worker(sock: socket.socket, store: LoadStore, context: TierContext, opened: Opened) -> None:
    """Execute a coordinator's jobs on `store` until the coordinator disconnects; the worker process's whole life.

    `store` is the worker's GPU tier, opened with `context`; it answered `opened`. Jobs run at once, at most
    256 of them. Returns when the connection has ended and no copy is in flight; also on cancellation no copy is left
    behind. Raises UsageError if the peer does not speak the protocol. Closes the socket, not the store.
    """
    reader, writer = await asyncio.open_connection(sock=sock)
    jobs: set[asyncio.Task[None]] = set()
    try:
        theirs, ours = await read_message(reader, WorkerHello), _hello(context)
        if theirs != ours:
            names = [name for name in WorkerHello.model_fields if getattr(theirs, name) != getattr(ours, name)]
            writer.write(encode(WorkerWelcome(refused=f"it differs from the coordinator in {', '.join(names)}")))
            return
        writer.write(encode(WorkerWelcome(capacity_bytes=opened.capacity_bytes, mode=opened.mode)))
        while True:
            call = await read_message(reader, Call)
            task = asyncio.create_task(_execute(store, writer, call, call.job()))
            jobs.add(task)
            task.add_done_callback(jobs.discard)
            if len(jobs) >= INFLIGHT_JOBS_MAX:
                await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
    except (OSError, EOFError):
        return  # the coordinator is gone
    finally:
        try:
            if jobs:
                await shielded_wait(asyncio.wait(jobs))
        finally:
            await _close(writer, timeout_seconds=5.0)


async def _execute(store: LoadStore, writer: asyncio.StreamWriter, call: Call, job: TransferJob) -> None:
    """Run one job and answer; a coordinator that is gone by then gets no answer."""
    try:
        result = await (store.load(job) if call.method is JobKind.LOAD else store.store(job))
        answer = WorkerAnswer.of(call.sequence, result)
    except KVTierError as error:
        answer = WorkerAnswer(sequence=call.sequence, refused=str(error))
    except Exception:
        _log.exception("a job failed in the worker")
        answer = WorkerAnswer.of(call.sequence, JobResult.uniform(job, failed(errno.EIO)))
    with contextlib.suppress(ConnectionError):
        writer.write(encode(answer))
        await writer.drain()


def _hello(context: TierContext) -> WorkerHello:
    if context.rows is None:
        raise UsageError("workers share the region's rows; open them after the region")
    return WorkerHello(
        worker=context.worker,
        world_size=context.geometry.world_size,
        num_rows=context.rows.num_rows,
        row_bytes=context.rows.row_bytes,
        namespace=context.namespace.digest().hex(),
    )


async def _close(writer: asyncio.StreamWriter, timeout_seconds: float) -> None:
    """Flush and close a stream; what cannot be flushed by the deadline is thrown away."""
    writer.close()
    try:
        async with asyncio.timeout(timeout_seconds):
            await writer.wait_closed()
    except OSError:  # also the deadline
        writer.transport.abort()
