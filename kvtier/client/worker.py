"""A worker's end of a stack process: it maps the rows, reports what was copied, and answers about its weights."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from errno import EIO
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from kvtier.aio.loop_thread import LoopThread
from kvtier.client.connection import Identity, connect
from kvtier.errors import ConfigError
from kvtier.service import wire
from kvtier.service.channel import Channel
from kvtier.service.wire import TO_WORKER
from kvtier.tier.contract import AttachesRows, FencesCopies, LoadStore, SharedRows, TierContext
from kvtier.tier.registry import discover
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import BlockOutcome, JobKind, JobResult, TransferJob, failed
from kvtier.types.keys import JobId
from kvtier.types.namespace import Namespace

if TYPE_CHECKING:
    import torch

OUTBOX_BYTES_MAX = 1 << 20
Report = Callable[[JobId, Sequence[BlockOutcome]], None]


class WorkerLink:
    """A worker's connection, in one event loop. `compare` answers whether the weights are those of the start."""

    def __init__(self, identity: Identity, worker: int, note: str = "") -> None:
        """Connect. Raises ResourceError, ConfigError as `connect`."""
        self.compare: Callable[[], Awaitable[int]] | None = None
        sock, self.welcome, self._descriptors = connect(identity, "worker", worker, note)
        self._channel = Channel(sock, TO_WORKER, OUTBOX_BYTES_MAX)
        self._rows: Any = None
        self._answers: set[asyncio.Task[None]] = set()
        self._writes = False

    def attach(self, context: TierContext) -> tuple[Geometry, SharedRows]:
        """(the rows' geometry, the rows), mapped. Call in the loop. Raises ConfigError."""
        geometry = Geometry(context.geometry.layout, self.welcome.alignment)
        cpu: Any = discover().get("cpu")
        if not issubclass(cpu, AttachesRows):
            raise ConfigError("the CPU tier cannot map rows of another process")
        try:
            shared = replace(context, geometry=geometry, namespace=Namespace(geometry.layout))  # by all namespaces
            rows: SharedRows = cpu.attach(shared, self.welcome.num_rows, *self._descriptors)
        finally:
            for fd in self._descriptors:
                os.close(fd)
            self._descriptors = ()
        self._rows = rows
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel, self._on_readable)
        return geometry, rows

    def report(self, job: JobId, result: JobResult) -> None:
        """A copy has ended. Call in the loop."""
        errors = [0 if outcome.ok else outcome.errno or EIO for outcome in chain.from_iterable(result.outcomes)]
        self.report_errors(job, errors)

    def report_errors(self, job: JobId, errors: Sequence[int]) -> None:
        """A copy has ended, with an errno or 0 for each block. Call in the loop."""
        runs = [(len(list(run)), error) for error, run in groupby(errors)]
        for first in range(0, len(runs), wire.ITEM_KEYS_MAX):
            end = first + wire.ITEM_KEYS_MAX
            self._send(wire.Copied(job, runs[first:end], more=end < len(runs)))

    def on_load(self) -> None:
        """The worker has loaded weights. Call in the loop."""
        self._send(wire.Loaded())

    def _send(self, item: wire.Item) -> None:
        self._channel.send([item])
        if self._channel.waiting_bytes and not self._writes:
            self._writes = True
            self._loop.add_writer(self._channel, self._on_writable)

    def _on_writable(self) -> None:
        if self._channel.flush():
            self._writes = False
            self._loop.remove_writer(self._channel)

    def _on_readable(self) -> None:
        for question in self._channel.receive():
            task = self._loop.create_task(self._answer(question.number))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)
        if self._channel.closed:
            self._loop.remove_reader(self._channel)

    async def _answer(self, number: int) -> None:
        verdict = 0 if self.compare is None else int(await self.compare())
        self._send(wire.Answer(number, verdict))

    def close(self) -> None:
        """Disconnect and unmap. Call in the loop, once no copy is in flight. Idempotent."""
        if self._rows is not None:
            for task in self._answers:
                task.cancel()
            if not self._channel.closed:
                self._loop.remove_reader(self._channel)
                self._loop.remove_writer(self._channel)
            self._rows.close()
            self._rows = None
            self._channel.send([wire.Quiet()])
        self._channel.close()
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors = ()


class WorkerClient:
    """Copies for the one worker of an engine, on a thread of its own.

    `report` is called there at the end of each copy.
    """

    def __init__(self, identity: Identity, tensors: Sequence[torch.Tensor], gpu: LoadStore) -> None:
        self._gpu = gpu
        self._thread = LoopThread("kvtier-worker", "worker")
        self._thread.open()
        self.report: Report | None = None
        try:
            self._thread.run(lambda: self._open(identity, tensors), 60.0)
        except BaseException:
            self._thread.close(5.0)
            raise

    async def _open(self, identity: Identity, tensors: Sequence[torch.Tensor]) -> None:
        self._link = WorkerLink(identity, 0)
        nominal = Geometry(identity.namespace.layout, self._link.welcome.alignment)
        context = TierContext("gpu", nominal, identity.namespace, time.monotonic, worker=0, kv_caches=tensors)
        geometry, rows = self._link.attach(context)
        await self._gpu.open(replace(context, geometry=geometry, rows=rows))

    def begin(self, job: TransferJob) -> None:
        """Begin a copy. From any thread: STORE jobs copy GPU blocks into rows, LOAD jobs rows into GPU blocks.

        It begins after the work that the calling thread gave its device so far.
        """
        if isinstance(self._gpu, FencesCopies) and self._gpu.beside_engine:
            self._gpu.fence()
        self._thread.start(partial(self._copy, job))

    async def _copy(self, job: TransferJob) -> None:
        try:
            result = await (self._gpu.load(job) if job.kind is JobKind.STORE else self._gpu.store(job))
        except OSError as error:
            result = JobResult.uniform(job, failed(error.errno or EIO))
        self._link.report(job.job_id, result)
        if self.report is not None:
            self.report(job.job_id, list(chain.from_iterable(result.outcomes)))

    def close(self) -> None:
        """Let copies in flight end, and disconnect. Idempotent."""
        if self._thread.alive:
            self._thread.run(self._close, 10.0)
        self._thread.close(5.0)

    async def _close(self) -> None:
        await self._gpu.close()
        self._link.close()
