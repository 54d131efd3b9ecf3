"""An engine at a stack process that steps by hand, for tests of both: each job is one copy, into rows lent before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from kvtier.client.connection import Identity
from kvtier.client.core import EngineCore
from kvtier.client.engine import SchedulerClient
from kvtier.client.request import ClientRequest
from kvtier.client.worker import WorkerClient
from kvtier.tier.contract import LoadStore
from kvtier.tier.registry import discover
from kvtier.types.jobs import BlockOutcome, GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey

if TYPE_CHECKING:
    import torch

BORROW_SECONDS = 1.0


def take_results(core: EngineCore) -> list[JobResult]:
    """The results of the jobs that have ended since the last call."""
    ended, core.ended = core.ended, []
    return [copy.result() for copy in ended]


class EngineClient(SchedulerClient):
    """An engine of one process at a stack process: scheduler and worker. It may store without a request."""

    has_own_worker = True

    def __init__(self, identity: Identity, tensors: Sequence[torch.Tensor], gpu: LoadStore | None = None) -> None:
        """Connect; `gpu` is the tier that copies. Raises ResourceError, ConfigError as `connect`."""
        kind = discover().get("gpu")
        self._worker = WorkerClient(identity, tensors, gpu or kind(kind.Options(type="gpu")))
        self._copied: deque[tuple[JobId, Sequence[BlockOutcome]]] = deque()
        self._last_job = 0
        self._worker.report = lambda job, outcomes: self._copied.append((job, outcomes))
        try:
            super().__init__(identity)
        except BaseException:
            self._worker.close()
            raise
        try:
            self.wait_joined()
            self._borrow()
        except BaseException:
            self.close()
            raise

    def _borrow(self) -> None:
        """Have rows ahead, so that the first store finds some. Where there are none it goes without."""
        core, until = self.core, time.monotonic() + BORROW_SECONDS
        self.turn()
        rests = self._rests or not core.stores
        while not (rests or core.room) and core.connected and self.wait(until - time.monotonic()):
            self.turn()

    @property
    def _rests(self) -> bool:
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def job(self, kind: JobKind, groups: Sequence[GPUGroup]) -> TransferJob:
        """A job with a number of its own."""
        self._last_job += 1
        return TransferJob(JobId(self._last_job), kind, tuple(groups))

    def reserve(self, request: ClientRequest, keys: Sequence[OffloadKey]) -> None:
        """Have keys brought into rows; `request.served` says when, `request.leased` which."""
        self.core.reserve(request, keys)

    def step(self) -> list[JobResult]:
        """Once per engine step: take in what came, send what was decided, return the jobs that ended."""
        self.turn()
        return take_results(self.core)

    def submit(self, job: TransferJob, request: ClientRequest | None = None) -> None:
        """Begin a job; its result comes out of a later `step`."""
        if job.kind is JobKind.LOAD:
            assert request is not None
            part = self.core.begin_load(job, request)
        else:
            part = self.core.begin_store(job)
        if part is not None:
            self._worker.begin(part, self.life)

    def _receive(self) -> None:
        super()._receive()
        while self._copied:
            self.core.on_copied_alone(*self._copied.popleft())

    def close(self) -> None:
        """End copies in flight and disconnect. Idempotent."""
        self._reconnection.stop()
        try:
            self._worker.close()
        finally:
            super().close()
