"""The calls of a synchronous engine that has no stack of its own: one message a step each way, nothing that waits."""

from __future__ import annotations

import secrets
import select
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from kvtier.client.connection import Identity, connect
from kvtier.client.core import ClientRequest, EngineCore
from kvtier.client.worker import WorkerClient
from kvtier.service.channel import Channel
from kvtier.service.wire import TO_ENGINE
from kvtier.tier.contract import LookupResult
from kvtier.tier.registry import discover
from kvtier.types.jobs import BlockOutcome, GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey
from kvtier.types.namespace import Namespace

if TYPE_CHECKING:
    import torch

OUTBOX_BYTES_MAX = 256 << 10
LOOKUP_WAIT_SECONDS = 0.001
"""How long the first lookup of a step without an answer waits for it."""
WANT_SECONDS = 1.0


class EngineClient:
    """An engine of one process at a stack process. Call `step` once per engine step, from one thread."""

    def __init__(self, path: str, namespace: Namespace, tensors: Sequence[torch.Tensor], engine_id: str = "") -> None:
        """Connect. Raises ResourceError, ConfigError as `connect`."""
        identity = Identity(path, namespace, engine_id, secrets.token_hex(16))
        gpu = discover().get("gpu")
        self._worker = WorkerClient(identity, 0, tensors, gpu(gpu.Options(type="gpu")))
        try:
            sock, _, _ = connect(identity, "scheduler")
        except BaseException:
            self._worker.close()
            raise
        self._channel = Channel(sock, TO_ENGINE, OUTBOX_BYTES_MAX)
        self._core = EngineCore()
        self._copied: deque[tuple[JobId, Sequence[BlockOutcome]]] = deque()
        self._worker.report = lambda job, outcomes: self._copied.append((job, outcomes))
        self._poll = select.poll()
        self._poll.register(self._channel, select.POLLIN)
        self._next_job = 1
        self._want_at = 0.0
        self._may_wait = True
        self._send()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def job(self, kind: JobKind, groups: Sequence[GPUGroup], timeout_seconds: float = 30.0) -> TransferJob:
        """A job with a number of its own."""
        self._next_job += 1
        return TransferJob(JobId(self._next_job), kind, tuple(groups), time.monotonic() + timeout_seconds)

    def request(self, request_id: str, keys: Sequence[OffloadKey] = ()) -> ClientRequest:
        """A request; what it may find is asked for at once."""
        request = self._core.request(request_id, keys)
        self._send()
        return request

    def lookup(self, request: ClientRequest, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Presence of the keys of a request: RETRY where no answer has come within a millisecond."""
        self._core.ask(request, keys)
        found = self._core.lookup(request, keys)
        if LookupResult.RETRY in found and self._may_wait:
            self._may_wait = False
            self._send()
            until = time.monotonic() + LOOKUP_WAIT_SECONDS
            while not request.served and (left := until - time.monotonic()) > 0:
                self._poll.poll(left * 1e3)
                self._receive()
            found = self._core.lookup(request, keys)
        return found

    def reserve(self, request: ClientRequest, keys: Sequence[OffloadKey]) -> None:
        """Have keys brought into rows; `request.served` says when, `request.leased` which."""
        self._core.reserve(request, keys)

    def end(self, request: ClientRequest) -> None:
        """The request has ended."""
        self._core.end(request)

    def submit(self, job: TransferJob, request: ClientRequest | None = None) -> None:
        """Begin a job; its result comes out of a later `step`."""
        if job.kind is JobKind.LOAD:
            assert request is not None
            part = self._core.begin_load(job, request)
        else:
            part = self._core.begin_store(job)
        if part is not None:
            self._worker.begin(part)

    def step(self) -> list[JobResult]:
        """Once per engine step: take in what came, send what was decided, return the jobs that ended."""
        self._receive()
        now = time.monotonic()
        if now >= self._want_at:
            self._want_at = now + WANT_SECONDS
            self._core.want_rows()
        self._send()
        self._may_wait = True
        results, self._core.results = self._core.results, []
        return results

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until something came, or the time is over."""
        return bool(self._poll.poll(timeout_seconds * 1e3))

    @property
    def has_pending_work(self) -> bool:
        """True while a job has not ended."""
        return self._core.busy

    def _receive(self) -> None:
        items = self._channel.receive()
        if items:
            self._core.take_in(items)
        if self._channel.closed and self._core.connected:
            self._core.lose()
        while self._copied:
            self._core.on_copied_alone(*self._copied.popleft())

    def _send(self) -> None:
        core = self._core
        if core.out and self._channel.send(core.out):
            core.out = []
        elif self._channel.waiting_bytes:
            self._channel.flush()

    def close(self) -> None:
        """End copies in flight and disconnect. Idempotent."""
        self._worker.close()
        self._channel.close()
        self._core.lose()
