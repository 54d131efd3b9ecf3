"""What the two faces of a stack share: the life of one open stack, and every call that only its memory answers.

`TierStack` is the face of asyncio programs, `EngineStack` that of synchronous engines. Each drives the control plane
from one thread and the tiers in one event loop; for a `TierStack` both are the caller's own.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from kvtier.aio.process_guard import ProcessGuard
from kvtier.control.deliveries import Delivery, PresenceAnswers, PresenceQuery
from kvtier.control.plane import ControlPlane
from kvtier.control.reservations import Reservation
from kvtier.control.state import Emission
from kvtier.errors import UsageError
from kvtier.stack import shutdown
from kvtier.stack.assembled import Assembled
from kvtier.stack.assembly import StackParts, look_up
from kvtier.stack.job_checks import check_job
from kvtier.stack.shutdown import CloseReport
from kvtier.stack.stats import StackStats, collect
from kvtier.tier_api.contract import Clock, LoadStore, Resettable
from kvtier.types.events import OffloadingEvent
from kvtier.types.geometry import Geometry
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import JobId, OffloadKey, RequestId, key_group
from kvtier.types.requests import RequestInfo

BlockGroup = tuple[Sequence[OffloadKey], Sequence[int]]
"""Keys of one KV cache group, and their GPU blocks: `block_size_factor` consecutive ids for each key."""


class StackCore(ABC):
    """An open stack, driven from one thread. The base of `TierStack` and `EngineStack`."""

    def __init__(self, parts: StackParts) -> None:
        self.close_report: CloseReport | None = None
        self._parts = parts
        self._settings = parts.settings
        self._owner = ProcessGuard()
        self._assembled: Assembled | None = None
        self._clock: Clock = time.monotonic
        self._next_job = 1
        self._closing = False
        self._drain_until = 0.0
        self._lookups: set[asyncio.Task[None]] = set()

    def __del__(self) -> None:
        if self._assembled is not None and self.close_report is None and not self._owner.elsewhere:
            warnings.warn(f"unclosed {shutdown.UNCLOSED.format(self)}", ResourceWarning, stacklevel=1, source=self)

    # -- what a face provides ------------------------------------------------------------------------------------

    @abstractmethod
    def _decided(self, plane: ControlPlane) -> None:
        """The control plane may have decided something: send it, now or with the engine's next step."""

    @abstractmethod
    def _advance(self, plane: ControlPlane) -> None:
        """Send what the control plane decided."""

    @abstractmethod
    def _deliver(self, batch: Sequence[Delivery | PresenceAnswers]) -> None:
        """Pass on what arrived. Called in the loop."""

    # -- jobs ----------------------------------------------------------------------------------------------------

    def job(self, kind: JobKind, groups: Sequence[GPUGroup], timeout_seconds: float | None = None) -> TransferJob:
        """A job with a fresh id and a deadline from now; the stack's own default when no timeout is given."""
        self._opened()
        if timeout_seconds is None:
            timeout_seconds = self._settings.load_seconds if kind is JobKind.LOAD else self._settings.store_seconds
        job_id = JobId(self._next_job)
        self._next_job += 1
        return TransferJob(job_id, kind, tuple(groups), self._clock() + timeout_seconds)

    def _job_of(
        self,
        kind: JobKind,
        keys: Sequence[OffloadKey],
        gpu_blocks: Sequence[int],
        groups: Sequence[BlockGroup],
        timeout_seconds: float | None,
    ) -> TransferJob:
        """A job for whole blocks, of one group by `keys` and `gpu_blocks` or of several by `groups`."""
        if groups and (keys or gpu_blocks):
            raise UsageError("blocks are named by keys and gpu_blocks or by groups, not by both")
        factor = self.geometry.factor
        transfers = []
        for group_keys, blocks in groups or [(keys, gpu_blocks)]:
            if len(blocks) != len(group_keys) * factor:
                raise UsageError(f"{len(group_keys)} keys of {factor} GPU blocks each, but {len(blocks)} GPU blocks")
            if group_keys:
                runs = GPURuns.whole(blocks, factor)
                transfers.append(GPUGroup(key_group(group_keys[0]), tuple(group_keys), runs))
        return self.job(kind, transfers, timeout_seconds)

    def _begin(self, job: TransferJob, request_id: RequestId | None, info: RequestInfo | None) -> ControlPlane:
        assembled = self._opened()
        check_job(job, assembled.geometry)
        assembled.plane.submit(job, self._clock(), request_id, info)
        return assembled.plane

    def cancel(self, job_id: JobId) -> None:
        """End a job early; its result still comes, after the copies in flight."""
        plane = self._opened().plane
        plane.cancel(job_id, self._clock())
        self._decided(plane)

    # -- from memory ---------------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        """The layout in rows of the stack's alignment."""
        return self._opened().geometry

    def locate(self, keys: Sequence[OffloadKey]) -> list[str | None]:
        """For each key the name of the highest tier that holds it, or None. Synchronous, from memory."""
        return self._opened().plane.locate(keys, self._clock())

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """One request used these keys, given in prefix order; call it for the hits of a request after its stores."""
        self._opened().plane.touch(keys)

    def reserve(
        self, request_id: RequestId, keys: Sequence[OffloadKey], *, info: RequestInfo | None = None
    ) -> Reservation:
        """Bring keys into rows and lease them to a request; see `kvtier.control.reservations`."""
        plane = self._opened().plane
        reservation = plane.reserve(request_id, keys, self._clock(), info)
        self._decided(plane)
        return reservation

    def reservation(self, request_id: RequestId) -> Reservation | None:
        """What a request reserved and got so far, in O(1)."""
        return self._opened().plane.reservation(request_id)

    def end_request(self, request_id: RequestId) -> None:
        """The request's leases end."""
        plane = self._opened().plane
        plane.end_request(request_id, self._clock())
        self._decided(plane)

    def stats(self) -> StackStats:
        """Figures of every tier since the stack opened; also after it closed."""
        self._owner.check()
        if self._assembled is None:
            raise UsageError("the stack was never opened")
        return collect(self._assembled, self._clock())

    def take_events(self) -> list[OffloadingEvent]:
        """What became reachable or ceased to be since the last call, in order."""
        return self._opened().plane.take_events()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the state machine's sums agree. For tests and for suspicions."""
        self._owner.check()
        if self._assembled is not None:
            self._assembled.plane.check_integrity()

    # -- driving the control plane -------------------------------------------------------------------------------

    def _opened(self) -> Assembled:
        self._owner.check()
        if self._assembled is None:
            raise UsageError("the stack is not open")
        if self._closing:
            raise UsageError("the stack is closed")
        return self._assembled

    def _start(self, jobs: Sequence[Emission], queries: Sequence[PresenceQuery]) -> None:
        """In the loop: begin what was decided, in its order."""
        assert self._assembled is not None
        if jobs:
            self._assembled.dispatcher.submit(jobs)
        for query in queries:
            task = asyncio.get_running_loop().create_task(
                self._look_up(self._assembled.queues[query.position].tier, query)
            )
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)

    async def _look_up(self, tier: LoadStore, query: PresenceQuery) -> None:
        self._deliver(await look_up(tier, query))

    def _resets(self, epoch: int) -> list[Coroutine[Any, Any, None]]:
        assert self._assembled is not None
        tiers = [queue.tier for queue in self._assembled.queues]
        return [tier.reset(epoch) for tier in tiers if isinstance(tier, Resettable)]

    def _draining(self, plane: ControlPlane) -> Iterator[None]:
        """While closing, drain lower tiers until `_drain_until`. Yields where the face waits for progress."""
        plane.close(self._clock())
        self._advance(plane)
        while self._clock() < self._drain_until and (not plane.idle or plane.dirty_rows):
            plane.drain(self._clock())
            self._advance(plane)
            if plane.idle:
                return
            yield
