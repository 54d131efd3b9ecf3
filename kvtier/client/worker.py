"""A worker's end of a stack process: it maps the rows, reports what was copied, and answers about its weights.

Its connections follow each other. Rows are an open file of the process that made them: once that has ended nothing else
writes them, and they stay as they are while they are mapped. So a worker maps those of its former connection until the
scheduler has said that no load of them comes any more, and copies for no other session than that whose rows it has.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from errno import EIO, ESTALE
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.loop_thread import LoopThread
from kvtier.aio.loop_waker import LoopWaker
from kvtier.client.connection import (
    CONNECT_SECONDS,
    OPEN_SECONDS,
    Connected,
    Identity,
    MemoryWantedError,
    Participant,
    connect,
)
from kvtier.client.reconnection import Pauses
from kvtier.errors import ConfigError, KVTierError, ResourceError
from kvtier.service import wire
from kvtier.service.channel import Channel
from kvtier.service.wire import TO_WORKER
from kvtier.tier.contract import AttachesRows, FencesCopies, LoadStore, Rows, TierContext
from kvtier.tier.registry import discover
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import BlockOutcome, JobKind, JobResult, TransferJob, failed
from kvtier.types.keys import JobId
from kvtier.types.namespace import Namespace

if TYPE_CHECKING:
    import torch

OUTBOX_BYTES_MAX = 1 << 20
END_SECONDS = 2.0
"""How long closing waits for copies that the tier has let go, and for their reports."""
UNUSED_SECONDS = 30.0
"""How long rows are mapped after their process has ended, while the next one refuses this engine."""
NOTE_SECONDS = 5.0
"""How long a stack process may take to note that weights are loaded."""

_log = logging.getLogger(__name__)

Report = Callable[[JobId, Sequence[BlockOutcome]], None]


def reads_only(identity: Identity, worker: int, tensors: Sequence[torch.Tensor]) -> bool:
    """True for a worker that fills no row, because its engine stores nothing or it has no slice of its own in a row.

    On CUDA it is False all the same: rows are registered there as memory that can be written.
    """
    fills_none = identity.reads_only or worker >= identity.namespace.layout.num_copies
    return fills_none and all(tensor.device.type == "cpu" for tensor in tensors)


class WorkerLink:
    """A connection of a worker and its rows, in one event loop. `compare` answers whether the weights are those of the
    start.

    `ended` is set, and `ended_at` its time, once the connection has ended; `drained` then, and once no load of an
    earlier one comes any more. `copies` are in flight, and `idle` is set while there are none. With `leaving` no copy
    begins any more.
    """

    def __init__(self, connected: Connected, compare: Callable[[], Awaitable[int]]) -> None:
        """Call in the loop. What is connected is the link's from here on."""
        sock, self.welcome, self._descriptors = connected
        self.drained, self.ended, self.idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.copies = 0
        self.leaving = False
        self.ended_at = math.inf
        self._compare = compare
        self._channel = Channel(sock, TO_WORKER, OUTBOX_BYTES_MAX)
        self._rows: Any = None
        self._answers: set[asyncio.Task[None]] = set()
        self._noting: deque[asyncio.Future[None]] = deque()
        self._writes = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel, self._on_readable)

    def attach(self, context: TierContext) -> tuple[Geometry, Rows]:
        """(the rows' geometry, the rows), mapped. Raises ConfigError, RegionError."""
        geometry = Geometry(context.geometry.layout, self.welcome.alignment)
        cpu: Any = discover().get("cpu")
        if not issubclass(cpu, AttachesRows):
            raise ConfigError("the CPU tier cannot map rows of another process")
        try:
            shared = replace(context, geometry=geometry, namespace=Namespace(geometry.layout))  # by all namespaces
            rows: Rows = cpu.attach(shared, self.welcome.num_rows, *self._descriptors)
        finally:
            self._close_descriptors()
        self._rows = rows
        return geometry, rows

    def _close_descriptors(self) -> None:
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors = ()

    def report(self, job: JobId, result: JobResult) -> None:
        """A copy has ended."""
        errors = [0 if outcome.ok else outcome.errno or EIO for outcome in chain.from_iterable(result.outcomes)]
        runs = [(len(list(run)), error) for error, run in groupby(errors)]
        for first in range(0, len(runs), wire.ITEM_KEYS_MAX):
            end = first + wire.ITEM_KEYS_MAX
            self.send(wire.Copied(job, runs[first:end], more=end < len(runs)))

    def send(self, item: wire.Item) -> None:
        """Send an item, unless the connection has ended."""
        self._channel.send([item])
        if self._channel.waiting_bytes and not self._writes:
            self._writes = True
            self._loop.add_writer(self._channel, self._on_writable)

    def _on_writable(self) -> None:
        if self._channel.flush():
            self._writes = False
            self._loop.remove_writer(self._channel)

    def _on_readable(self) -> None:
        for item in self._channel.receive():
            if isinstance(item, wire.Drained):
                self.drained.set()
                continue
            if isinstance(item, wire.LoadNoted):
                if self._noting:
                    self._noting.popleft().set_result(None)
                continue
            task = self._loop.create_task(self._answer(item.number))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)
        if self._channel.closed:
            self._end()

    def _end(self) -> None:
        if not self.ended.is_set():
            self._loop.remove_reader(self._channel)
            self._loop.remove_writer(self._channel)
            self.ended_at = time.monotonic()
            self.ended.set()
            self.drained.set()

    async def announce_load(self) -> bool:
        """Have the stack process serve nothing any more, because weights are loaded. False if it may not have heard."""
        noted = self._loop.create_future()
        self._noting.append(noted)
        self.send(wire.Loaded())
        ended = self._loop.create_task(self.ended.wait())
        await asyncio.wait((noted, ended), timeout=NOTE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not noted.done():
            self._end()
            self._channel.close()
        return noted.done()

    async def _answer(self, number: int) -> None:
        self.send(wire.Answer(number, int(await self._compare())))

    def close(self) -> None:
        """Disconnect and unmap. Rows that a copy may still write are held until this process exits. Idempotent."""
        for task in self._answers:
            task.cancel()
        self._end()
        if self._rows is not None:
            self._rows.close()
            self._rows = None
            if not self.copies:
                self._channel.send([wire.Quiet()])
        self._channel.close()
        self._close_descriptors()


OpenRows = Callable[[WorkerLink], Awaitable[object]]
"""Maps the rows of a link and opens the tier that copies between them and GPU blocks."""
CarryOut = Callable[[TransferJob], Awaitable[JobResult]]


class WorkerConnection:
    """A worker at its stack process, in one event loop; it connects again after each end of a connection.

    `gpu` copies between GPU blocks and the rows of one connection at a time. `compare` answers whether the weights are
    those of the start.
    """

    def __init__(self, identity: Identity, process: Participant, gpu: LoadStore, open_rows: OpenRows) -> None:
        self.compare: Callable[[], Awaitable[int]] | None = None
        self._identity = identity
        self._process = process
        self._gpu = gpu
        self._open_rows = open_rows
        self._threads = DaemonPool("kvtier-connect", 1)
        self._link: WorkerLink | None = None
        self._has_loaded = False
        self._following: asyncio.Task[None] | None = None

    async def open(self, required: bool = True) -> None:
        """Connect for the first time. Raises ResourceError, ConfigError as `connect`, and what `open_rows` raises.

        If it is not `required` it is tried again instead.
        """
        try:
            self._link = await self._first_link()
        except (ConfigError, ResourceError) as error:
            if required:
                self._threads.shutdown()
                raise
            _log.error("a worker is without a stack process: %s", error)
        except BaseException:
            self._threads.shutdown()
            raise
        self._following = asyncio.create_task(self._follow())

    async def _first_link(self) -> WorkerLink:
        link = await self._connect(resumes=False)
        try:
            await self._open_rows(link)
        except BaseException:
            link.close()
            raise
        return link

    async def _connect(self, resumes: bool) -> WorkerLink:
        connecting = self._threads.submit(lambda: connect(self._identity, self._process, resumes=resumes))
        try:
            connected = await asyncio.wrap_future(connecting)
            return WorkerLink(connected, self._answer)
        except BaseException:  # cancelled, or without a descriptor for the link
            connecting.add_done_callback(_close_unused)
            raise

    async def _answer(self) -> int:
        return 0 if self.compare is None else await self.compare()

    # -- copies --------------------------------------------------------------------------------------------------

    async def copy(self, job: TransferJob, number: int, life: str, carry_out: CarryOut) -> JobResult:
        """Carry a job out in the session of this name, and report it by its number. In another one it has failed."""
        link = self._link
        if link is None or link.leaving or link.welcome.life != life:
            return JobResult.uniform(job, failed(ESTALE))
        link.copies += 1
        link.idle.clear()
        try:
            result = await carry_out(job)
        except Exception as error:  # a tier may be anyone's; rows and the job wait for a report
            if not isinstance(error, OSError):
                _log.exception("the tier that copies between GPU blocks and rows raised")
            result = JobResult.uniform(job, failed(getattr(error, "errno", None) or EIO))
        finally:
            link.copies -= 1
            if not link.copies:
                link.idle.set()
        link.report(JobId(number), result)
        return result

    async def on_load(self) -> None:
        """The worker is about to load weights. Each stack process is sent that: it serves an engine of other weights.

        Returns once nothing of before is loaded any more: where no answer comes, no copy begins with these rows.
        """
        self._has_loaded = True
        link = self._link
        if link is not None and not await link.announce_load():
            link.leaving = True

    # -- connections ---------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Connect again after each end."""
        while True:
            if self._link is not None:
                await self._link.ended.wait()
            pauses = Pauses()
            while True:
                fault = await self._connect_again()
                if fault is None:
                    break
                await asyncio.sleep(pauses.after(fault))

    async def _connect_again(self) -> Exception | None:
        """Connect again; why not, if that did not succeed. The scheduler tries too, and writes it into the log."""
        try:
            link = await self._connect(resumes=True)
        except (KVTierError, OSError) as error:
            if isinstance(error, MemoryWantedError) or (isinstance(error, ConfigError) and self._is_unused):
                await self._leave()
            return error
        used = False
        try:
            await link.drained.wait()
            used = not link.ended.is_set() and await self._change_to(link)
        finally:
            if not used:
                link.close()
        return None if used else ResourceError("its connection has ended, or its rows are of no use")

    @property
    def _is_unused(self) -> bool:
        """True if the rows here are of a process that ended so long ago that no load of them comes any more: where the
        engine is idle its scheduler does not say so."""
        link = self._link
        return link is not None and link.ended_at + UNUSED_SECONDS < time.monotonic()

    async def _change_to(self, link: WorkerLink) -> bool:
        """Use the rows of another connection: no load of those before comes any more. False if they are of no use."""
        await self._leave()
        try:
            await self._open_rows(link)
        except (KVTierError, OSError) as error:
            _log.error("a worker cannot use the rows of its stack process: %s", error)
            return False
        self._link = link
        if self._has_loaded:
            await self.on_load()
        link.send(wire.Ready())
        return True

    async def _leave(self) -> None:
        """Unmap the rows once their copies have ended. Idempotent."""
        link = self._link
        if link is None:
            return
        link.leaving = True
        while link.copies:
            await link.idle.wait()
        await self._gpu.close()
        link.close()

    async def close(self) -> None:
        """Let copies in flight end, within the time that the tier takes for that, and disconnect. Idempotent."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))
        self._threads.shutdown()
        await self._gpu.close()
        link = self._link
        if link is not None:
            if link.copies:  # their tasks have yet to see that the tier has let them go
                with suppress(TimeoutError):
                    async with asyncio.timeout(END_SECONDS):
                        await link.idle.wait()
            if link.copies:
                _log.error("%d copies have not ended: their rows are held until this process exits", link.copies)
            link.close()


def _close_unused(connecting: Future[Connected]) -> None:
    """Close what was connected for a wait that was cancelled."""
    if not connecting.cancelled() and connecting.exception() is None:
        sock, _, descriptors = connecting.result()
        sock.close()
        for fd in descriptors:
            os.close(fd)


class WorkerClient:
    """Copies for the one worker of an engine, on a thread of its own.

    `report` is called there at the end of each copy.
    """

    def __init__(self, identity: Identity, tensors: Sequence[torch.Tensor], gpu: LoadStore) -> None:
        self._gpu = gpu
        self._fence: Callable[[], None] | None = None
        self._identity = identity
        self._tensors = tensors
        self._begun: deque[tuple[TransferJob, str]] = deque()
        self._copies: set[asyncio.Task[None]] = set()
        self._waker = LoopWaker(self._begin_copies)
        self._thread = LoopThread("kvtier-worker", "worker")
        self._thread.open()
        self.report: Report | None = None
        try:
            self._thread.run(self._open, OPEN_SECONDS + CONNECT_SECONDS)
        except BaseException:
            self._thread.close(5.0)
            raise

    async def _open(self) -> None:
        process = Participant("worker", reads_only=reads_only(self._identity, 0, self._tensors))
        self._connection = WorkerConnection(self._identity, process, self._gpu, self._open_rows)
        await self._connection.open()
        self._waker.attach()

    async def _open_rows(self, link: WorkerLink) -> None:
        namespace = self._identity.namespace
        nominal = Geometry(namespace.layout, link.welcome.alignment)
        context = TierContext("gpu", nominal, namespace, time.monotonic, worker=0, kv_caches=self._tensors)
        geometry, rows = link.attach(context)
        gpu = self._gpu
        await gpu.open(replace(context, geometry=geometry, rows=rows))
        self._fence = gpu.fence if isinstance(gpu, FencesCopies) and gpu.beside_engine else None

    def begin(self, job: TransferJob, life: str) -> None:
        """Begin a copy in the session of this name. From any thread: STORE jobs copy GPU blocks into rows, LOAD jobs
        rows into GPU blocks.

        It begins after the work that the calling thread gave its device so far.
        """
        if self._fence is not None:
            self._fence()
        self._begun.append((job, life))
        self._waker.wake()

    def _begin_copies(self) -> None:
        """In the loop."""
        while self._begun:
            task = self._thread.loop.create_task(self._copy(*self._begun.popleft()))
            self._copies.add(task)
            task.add_done_callback(self._copies.discard)

    async def _copy(self, job: TransferJob, life: str) -> None:
        result = await self._connection.copy(job, job.job_id, life, self._carry_out)
        if self.report is not None:
            self.report(job.job_id, list(chain.from_iterable(result.outcomes)))

    async def _carry_out(self, job: TransferJob) -> JobResult:
        return await (self._gpu.load(job) if job.kind is JobKind.STORE else self._gpu.store(job))

    def close(self) -> None:
        """Let copies in flight end, and disconnect. Idempotent."""
        if self._thread.alive:
            self._thread.run(self._close, 10.0)
        self._thread.close(5.0)

    async def _close(self) -> None:
        self._waker.detach()
        self._begin_copies()
        await self._connection.close()
        if self._copies:
            await asyncio.wait(self._copies, timeout=END_SECONDS)
