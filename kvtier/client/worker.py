"""A worker's end of a stack process: it maps the rows, copies between them and its GPU blocks, and reports."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
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
from kvtier.tier.contract import AttachesRows, LoadStore, TierContext
from kvtier.tier.registry import discover
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import BlockOutcome, JobKind, TransferJob
from kvtier.types.keys import JobId

if TYPE_CHECKING:
    import torch

OUTBOX_BYTES_MAX = 1 << 20
Report = Callable[[JobId, Sequence[BlockOutcome]], None]


class WorkerClient:
    """Copies for one worker of an engine, on a thread of its own. `report` is called there at the end of each copy."""

    def __init__(self, identity: Identity, worker: int, tensors: Sequence[torch.Tensor], gpu: LoadStore) -> None:
        self._gpu = gpu
        self._thread = LoopThread("kvtier-worker", "worker")
        self._thread.open()
        self.report: Report | None = None
        try:
            self._thread.run(lambda: self._open(identity, worker, tensors), 60.0)
        except BaseException:
            self._thread.close(5.0)
            raise

    async def _open(self, identity: Identity, worker: int, tensors: Sequence[torch.Tensor]) -> None:
        sock, welcome, descriptors = connect(identity, "worker", worker)
        try:
            geometry = Geometry(identity.namespace.layout, welcome.alignment)
            context = TierContext("gpu", geometry, identity.namespace, time.monotonic, worker=worker, kv_caches=tensors)
            cpu: Any = discover().get("cpu")
            if not issubclass(cpu, AttachesRows):
                raise ConfigError("the CPU tier cannot map rows of another process")
            self._rows = cpu.attach(context, welcome.num_rows, *descriptors)
        finally:
            for fd in descriptors:
                os.close(fd)
        context = TierContext(
            "gpu", geometry, identity.namespace, time.monotonic, worker=worker, kv_caches=tensors, rows=self._rows
        )
        await self._gpu.open(context)
        self._channel = Channel(sock, TO_WORKER, OUTBOX_BYTES_MAX)
        self._loop = asyncio.get_running_loop()

    def begin(self, job: TransferJob) -> None:
        """Begin a copy. From any thread: STORE jobs copy GPU blocks into rows, LOAD jobs rows into GPU blocks."""
        self._thread.start(partial(self._copy, job))

    async def _copy(self, job: TransferJob) -> None:
        try:
            result = await (self._gpu.load(job) if job.kind is JobKind.STORE else self._gpu.store(job))
            outcomes = list(chain.from_iterable(result.outcomes))
            errors = [0 if outcome.ok else outcome.errno or EIO for outcome in outcomes]
        except OSError as error:
            errors = [error.errno or EIO] * job.num_blocks
            outcomes = []
        runs = [(len(list(run)), error) for error, run in groupby(errors)]
        self._channel.send([wire.Copied(job.job_id, runs)])
        if self.report is not None and outcomes:
            self.report(job.job_id, outcomes)

    def close(self) -> None:
        """Let copies in flight end, and disconnect. Idempotent."""
        if self._thread.alive:
            self._thread.run(self._close, 10.0)
        self._thread.close(5.0)

    async def _close(self) -> None:
        await self._gpu.close()
        self._channel.close()
        self._rows.close()
