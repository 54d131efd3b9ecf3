"""The stack of a `kvtier serve` as the serving loop calls one."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch

from kvtier.client.connection import Identity
from kvtier.client.request import ClientRequest
from kvtier.client.stack_client import StackClient
from kvtier.stack import StackStats
from kvtier.stack.watching.stats_socket import stats_from_document
from kvtier.tier.contract import LookupResult
from kvtier.tier.registry import discover
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey, RequestId
from kvtier.types.namespace import Namespace
from kvtier.types.requests import RequestInfo

NAME = "kvtier replay"
STEP_SECONDS = 0.002
ANSWER_SECONDS = 10.0
JOB_SECONDS = 60.0
CLOSE_SECONDS = 10.0


class ServiceStack:
    """An engine at a service, for `async with`: each call steps the engine until it has its answer.

    Between the steps the calls of other tasks go on. Without a stack process every lookup is a miss.
    """

    def __init__(self, service: str, namespace: Namespace, tensors: Sequence[torch.Tensor]) -> None:
        self._identity = Identity(os.path.abspath(service), namespace, NAME, secrets.token_hex(16))
        self._tensors = tensors
        self._ended: dict[JobId, JobResult] = {}
        self._stats = StackStats({}, 0)
        self._jobs = 0

    async def __aenter__(self) -> Self:
        gpu = discover().get("gpu")
        self._client = StackClient(self._identity, self._tensors, gpu(gpu.Options(type="gpu")))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._client.leave(CLOSE_SECONDS)
        finally:
            self._client.close()

    @property
    def geometry(self) -> Geometry:
        """The layout in rows of the service."""
        return self._client.geometry

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """Presence of each key; a miss where no answer comes."""
        found: list[LookupResult] = []

        def has_answer() -> bool:
            found[:] = self._client.look(keys, ask=True)
            return LookupResult.RETRY not in found

        await self._step_until(has_answer, ANSWER_SECONDS)
        return [LookupResult.MISS if one is LookupResult.RETRY else one for one in found]

    def locate(self, keys: Sequence[OffloadKey]) -> list[str | None]:
        """For each key the name of the highest tier that holds it, or None."""
        return self._client.locate(keys)

    def job(self, kind: JobKind, groups: Sequence[GPUGroup]) -> TransferJob:
        """A job with a fresh id and a deadline."""
        self._jobs += 1
        return TransferJob(JobId(self._jobs), kind, tuple(groups), time.monotonic() + JOB_SECONDS)

    async def run(self, job: TransferJob) -> JobResult:
        """Run a job to its end."""
        self._client.transfers.submit(job, None, time.monotonic())
        await self._step_until(lambda: job.job_id in self._ended)
        return self._ended.pop(job.job_id)

    def request(
        self, request_id: RequestId, keys: Sequence[OffloadKey], *, info: RequestInfo | None, time: float | None
    ) -> ServiceRequest:
        """A request; its time is the service's, whatever a trace says."""
        request = self._client.core.request(request_id, (), info)
        if self._client.core.follows:
            request.extend(keys)
        return ServiceRequest(self._client, request)

    async def drain(self, timeout_seconds: float, backlog: int) -> bool:
        """Wait until at most `backlog` blocks of all engines are on their way down. False once the time is over, or
        where no service says how many there are."""

        def is_over() -> bool:
            return not self._client.core.joined or self.stats().backlog <= backlog

        return await self._step_until(is_over, timeout_seconds) and self._client.core.joined

    def stats(self) -> StackStats:
        """Figures of the service since it opened, for all its engines; the last ones where no others come."""
        if document := self._client.figures():
            self._stats = stats_from_document(document, self._client.events.lost)
        return self._stats

    async def _step_until(self, done: Callable[[], bool], timeout_seconds: float = float("inf")) -> bool:
        until = time.monotonic() + timeout_seconds
        while not done():
            if time.monotonic() > until:
                return False
            self._client.wait(STEP_SECONDS)
            self._ended.update((result.job_id, result) for result in self._client.step())
            await asyncio.sleep(0)
        return True


class ServiceRequest:
    """A request of an engine at a service."""

    def __init__(self, client: StackClient, request: ClientRequest) -> None:
        self._client = client
        self._request = request

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count these keys as used."""
        self._client.touch(self._request, keys)

    def end(self, output_tokens: int | None) -> None:
        """End it."""
        self._request.end(output_tokens)
