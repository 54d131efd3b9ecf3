"""The side of vLLM's scheduler: its questions, answered from a tier stack that lives in this process."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult as Answer,
)
from vllm.v1.kv_offload.base import (
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.config import stack_parts
from kvtier.errors import IntegrityError, ResourceError
from kvtier.integrations.vllm.asking import Asking, reserved_answer
from kvtier.integrations.vllm.identity import refine
from kvtier.integrations.vllm.metrics import Meter
from kvtier.integrations.vllm.outstanding import HandedOver, Outstanding
from kvtier.integrations.vllm.plan import EnginePlan
from kvtier.integrations.vllm.transfers import RowsSpec, rows_spec
from kvtier.jobs import GPURuns, GroupTransfer, JobKind, TransferJob
from kvtier.keys import CPU, GROUP_BYTES, GroupIndex, OffloadKey, RequestId, key_group
from kvtier.loadstore import LookupResult, ProvidesRows
from kvtier.stack import EngineStack
from kvtier.stack.handover import EngineCopies

PATIENCE_SECONDS = 1.0
"""How long a store waits for rows that are about to be free before it takes what there is."""
RESET_SECONDS = 5.0
STORE_SECONDS = 60.0
IDLE_SECONDS = 0.002

_ANSWERS = {
    LookupResult.HIT: Answer.HIT,
    LookupResult.HIT_PENDING: Answer.HIT_PENDING,
    LookupResult.RETRY: Answer.RETRY,
    LookupResult.MISS: Answer.MISS,
}
_log = logging.getLogger(__name__)


class KVTierManager(OffloadingManager):  # type: ignore[misc]
    """Answers vLLM from a stack. Touched by the scheduler's thread alone; no call but `reset_cache` and `shutdown`
    waits for I/O.

    A hit is given only for a block whose verified bytes are in a row. It needs no lease of its own until the end of
    the step, because nothing is taken in and no row is given away between a request's scan and its load.
    """

    def __init__(self, plan: EnginePlan, *, events: bool) -> None:
        layout = plan.namespace.layout
        self._factor = layout.block_size_factor
        self._num_groups = len(layout.groups)
        self._group_ids = plan.group_ids
        self._position = {group_id: position for position, group_id in enumerate(plan.group_ids)}
        self._same_ids = plan.group_ids == tuple(range(len(plan.group_ids)))
        self._copiers = [EngineCopies() for _ in range(layout.world_size)]
        parts = stack_parts(plan.stack, plan.namespace, workers=self._copiers)
        settings = dataclasses.replace(
            parts.settings, store_seconds=STORE_SECONDS, events_max=parts.settings.events_max if events else 0
        )
        self._stack = EngineStack(
            dataclasses.replace(parts, engine_id=plan.engine_id, settings=settings, refine=refine)
        )
        self._requests: dict[str, Asking] = {}
        self._asking: dict[str, Asking] = {}
        self._reserved: dict[str, Asking] = {}
        self._in_step = False
        self._meter = Meter()
        self._stack.open()
        cpu = parts.tiers[0]
        assert isinstance(cpu, ProvidesRows)
        self._outstanding = Outstanding(cpu.rows, layout.world_size, layout.num_copies)

    # -- questions -----------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request that vLLM will ask about."""
        self._requests.setdefault(req_context.req_id, Asking())
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> Answer:
        """HIT: in a row, verified. HIT_PENDING: below, or on its way. RETRY: a shared tier was asked. MISS."""
        self._begin_step()
        request_id = req_context.req_id
        asking = self._requests.setdefault(request_id, Asking())
        asking.asked = True
        self._asking[request_id] = asking
        own = self._to_stack(key)
        if asking.reserved:
            reservation = self._stack.reservation(RequestId(request_id))
            if reservation is not None and not reservation.served:
                return _ANSWERS[asking.waiting(own, req_context.get_offload_key_position(key))]
            answer = None if reservation is None else reserved_answer(reservation, own)
            if answer is not None:
                return _ANSWERS[answer]
        result = self._stack.lookup((own,))[0]
        if result is not LookupResult.MISS:
            asking.found(own, result)
        return _ANSWERS[result]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Where a hit came from: a tier below if it was not in a row when it was first asked for."""
        asking = self._requests.get(req_context.req_id)
        below = asking is not None and self._to_stack(key) in asking.from_below
        return CacheHitSource.DISK if below else CacheHitSource.HOST

    # -- loads and stores ----------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> RowsSpec:
        """Pin the rows of keys that were hits in this step. Raises IntegrityError if one is none any more."""
        order = [self._to_stack(key) for key in keys]
        placed = self._place(JobKind.LOAD, order, RequestId(req_context.req_id))
        if placed is None or placed.num_blocks != len(order):
            raise IntegrityError(f"request {req_context.req_id} was promised blocks that are not there")
        self._outstanding.load(req_context.req_id, placed)
        asking = self._requests.get(req_context.req_id)
        if asking is not None:
            asking.reserved = False
            asking.refused_since = None
        self._reserved.pop(req_context.req_id, None)
        return rows_spec(placed, order, self._num_groups)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Every worker has copied: the rows are free to go."""
        self._end(self._outstanding.end_load(req_context.req_id))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Rows for the blocks that are in none, in the order of the keys; None while too few are free.

        vLLM never offers a block again that was left out, so it is all of them; after a second of waiting, and for
        more blocks than there are rows, as many of the front as there are rows.
        """
        new, room = self._stack.storable([self._to_stack(key) for key in keys])
        if len(new) > room:
            if not room or self._may_wait(req_context.req_id):
                return None
            new = new[:room]
        placed = self._place(JobKind.STORE, new) if new else None
        if placed is None:
            return PrepareStoreOutput([], RowsSpec(*_nothing(), (0,) * self._num_groups), [])
        stored = {key for group in placed.groups for key in group.keys}
        self._outstanding.store(sorted(stored), placed)
        order = [key for key in new if key in stored]
        spec = rows_spec(placed, order, self._num_groups)
        return PrepareStoreOutput([self._to_vllm(key) for key in order], spec, [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Every worker is done. What became whole is told by the workers' stamps, not by `success`."""
        self._end(self._outstanding.end_store([self._to_stack(key) for key in keys]))

    def _may_wait(self, request_id: str) -> bool:
        asking = self._requests.setdefault(request_id, Asking())
        now = time.monotonic()
        if asking.refused_since is None:
            asking.refused_since = now
        return now < asking.refused_since + PATIENCE_SECONDS

    def _place(
        self, kind: JobKind, keys: Sequence[OffloadKey], request_id: RequestId | None = None
    ) -> TransferJob | None:
        """The placed job. Which GPU blocks take part is between vLLM and its workers: the runs only fill a form."""
        by_group: dict[GroupIndex, list[OffloadKey]] = {}
        for key in keys:
            by_group.setdefault(key_group(key), []).append(key)
        groups = [
            GroupTransfer(group, tuple(names), GPURuns.whole(range(len(names) * self._factor), self._factor))
            for group, names in sorted(by_group.items())
        ]
        return self._stack.place(self._stack.job(kind, groups), request_id)

    def _end(self, copies: Sequence[HandedOver]) -> None:
        for handed in copies:
            for copier in self._copiers[: handed.workers]:
                copier.end((handed.job_id,))

    # -- the step ------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Take in what arrived, before the first promise of a step is made."""
        if not self._in_step:
            self._in_step = True
            self._turn()

    def _turn(self) -> None:
        self._end(self._outstanding.ended())
        self._stack.step()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Reserve what this step's requests wait for; end the leases of those that no longer ask."""
        for request_id in context.new_req_ids:
            self._end_leases(request_id)
        for request_id, asking in self._asking.items():
            if asking.deferred and asking.keys:
                self._stack.reserve(RequestId(request_id), list(asking.keys))
                asking.reserved = True
                self._reserved[request_id] = asking
        for request_id, asking in list(self._reserved.items()):
            reservation = self._stack.reservation(RequestId(request_id))
            if reservation is None or (reservation.served and not asking.asked):
                self._end_leases(request_id)
        for asking in self._asking.values():
            asking.end_step()
        self._asking.clear()
        self._turn()
        self._in_step = False

    def _end_leases(self, request_id: str) -> None:
        asking = self._reserved.pop(request_id, None)
        if asking is not None:
            asking.reserved = False
            self._stack.end_request(RequestId(request_id))

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Nothing more is asked for this request; copies under way go on."""
        self._end_leases(req_context.req_id)
        self._requests.pop(req_context.req_id, None)
        self._asking.pop(req_context.req_id, None)

    def has_pending_work(self) -> bool:
        """True while blocks are on their way between tiers. vLLM asks only when it has no request left to step for,
        so a short wait here is what keeps an idle engine from spinning."""
        if not (self._stack.has_pending_work or self._outstanding.forgotten):
            return False
        self._stack.wait(IDLE_SECONDS)
        return True

    # -- the rest ------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that became reachable in a tier or ceased to be, on disk as well."""
        for event in self._stack.take_events():
            medium = Medium.CPU if event.medium == CPU else Medium.STORAGE
            yield OffloadingEvent([self._to_vllm(key) for key in event.keys], medium, event.removed)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Figures of every tier, once a second."""
        return self._meter.read(self._stack.stats()) if self._meter.due else None

    def reset_cache(self) -> None:
        """Nothing stored before is served any more, also after a crash. Rows that workers still use stay out of use
        until they have ended; vLLM will not say when."""
        for request_id in list(self._reserved):
            self._end_leases(request_id)
        self._asking.clear()
        self._outstanding.forget()
        try:
            self._stack.reset(RESET_SECONDS)
        except ResourceError as error:
            _log.error("a reset of the cache holds in memory, but not yet over a crash: %s", error)

    def shutdown(self) -> None:
        """Drain what is queued for lower tiers within the deadline, and say what was dropped."""
        report = self._stack.close()
        if report.dropped_blocks or report.unfinished_jobs:
            _log.warning("kvtier closed: %s", report)

    # -- keys ----------------------------------------------------------------------------------------------------

    def _to_stack(self, key: OffloadKey) -> OffloadKey:
        """vLLM's key with the position of its group in place of vLLM's own id."""
        if self._same_ids:
            return key
        position = self._position[int.from_bytes(key[-GROUP_BYTES:], "big")]
        return OffloadKey(key[:-GROUP_BYTES] + position.to_bytes(GROUP_BYTES, "big"))

    def _to_vllm(self, key: OffloadKey) -> OffloadKey:
        if self._same_ids:
            return key
        return OffloadKey(key[:-GROUP_BYTES] + self._group_ids[key_group(key)].to_bytes(GROUP_BYTES, "big"))


def _nothing() -> tuple[Any, Any]:
    import numpy as np

    return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)
