"""The scheduler's side: answers vLLM from a tier stack in this process.

vLLM scans prefixes from the left and windows from the right. It repeats the scan in every step in which a request
waits, and does not report a hit that it did not use. So the keys of a step's scans are collected and reserved when the
step ends. Later scans are answered from the reservation.
"""

import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import LookupResult as Answer
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
from kvtier.control.reservations import KeyState, Reservation
from kvtier.errors import IntegrityError, ResourceError
from kvtier.integrations.vllm.identity import refine
from kvtier.integrations.vllm.metrics import Meter
from kvtier.integrations.vllm.primary.inflight_copies import InflightCopies
from kvtier.integrations.vllm.primary.wire import RowsSpec, rows_spec
from kvtier.integrations.vllm.settings import EnginePlan, GroupIds
from kvtier.stack import EngineStack
from kvtier.stack.workers.engine_copier import EngineCopies
from kvtier.tier_api.contract import LookupResult, ProvidesRows
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import CPU, OffloadKey, RequestId, key_group

PATIENCE_SECONDS = 1.0
"""How long a store waits for rows that are about to be free before it takes what there is."""
RESET_SECONDS = 5.0
STORE_SECONDS = 60.0
IDLE_SECONDS = 0.002

_ANSWERS = {result: Answer[result.name] for result in LookupResult}
_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
    """The lookups of one request. `keys` are those found in this step's scans, in lookup order.

    `deferred`: one of them was not a hit. `from_below` are the keys that were not in a row at their first lookup: vLLM
    reports them as disk hits.
    """

    keys: dict[OffloadKey, None] = dataclasses.field(default_factory=dict)
    deferred: bool = False
    refused_since: float | None = None
    from_below: set[OffloadKey] = dataclasses.field(default_factory=set)
    _last: dict[int, int] = dataclasses.field(default_factory=dict)

    def found(self, key: OffloadKey, result: LookupResult) -> None:
        """Record an answer that is not a miss."""
        if result is LookupResult.HIT:
            self.keys[key] = None
            return
        self.deferred = True
        if result is LookupResult.HIT_PENDING:
            self.keys[key] = None
            self.from_below.add(key)

    def waiting(self, key: OffloadKey, position: int | None) -> LookupResult:
        """The O(1) answer while the request's reservation is not served.

        A prefix scan ends at a miss after its first pending key; a window scan goes from right to left and ends once
        its window is full, so there every key is pending.
        """
        group = key_group(key)
        last = self._last.get(group)
        self._last[group] = 0 if position is None else position
        if last is None or position is None or position < last:
            return LookupResult.HIT_PENDING
        return LookupResult.MISS

    def end_step(self) -> None:
        """The scans of this step are over."""
        self.keys.clear()
        self._last.clear()
        self.deferred = False


def reserved_answer(reservation: Reservation, key: OffloadKey) -> LookupResult | None:
    """The answer of a served reservation for a key; None if the key is not part of it."""
    index = reservation.index.get(key)
    if index is None:
        return None
    return LookupResult.HIT if reservation.state[index] is KeyState.LEASED else LookupResult.MISS


class KVTierManager(OffloadingManager):  # type: ignore[misc]
    """Answers vLLM from a stack. Called by the scheduler's thread alone; no call but `reset_cache` and `shutdown`
    waits for I/O.

    A hit is reported only for a block whose verified bytes are in a row. It needs no lease until the end of the step,
    because between a request's scan and its load no delivery is recorded and no row is evicted.
    """

    def __init__(self, plan: EnginePlan, *, events: bool) -> None:
        layout = plan.namespace.layout
        self._factor = layout.block_size_factor
        self._num_groups = len(layout.groups)
        self._ids = GroupIds(plan.group_ids)
        copiers = [EngineCopies() for _ in range(layout.world_size)]
        parts = stack_parts(plan.stack, plan.namespace, workers=copiers)
        settings = dataclasses.replace(
            parts.settings, store_seconds=STORE_SECONDS, events_max=parts.settings.events_max if events else 0
        )
        self._stack = EngineStack(
            dataclasses.replace(parts, engine_id=plan.engine_id, settings=settings, refine=refine)
        )
        self._requests: defaultdict[str, RequestState] = defaultdict(RequestState)
        self._scanned: dict[str, RequestState] = {}
        self._reserved: set[str] = set()
        self._in_step = False
        self._meter = Meter()
        self._stack.open()
        cpu = parts.tiers[0]
        assert isinstance(cpu, ProvidesRows)
        self._copies = InflightCopies(cpu.rows, copiers, layout.num_copies)

    # -- lookups -------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request whose keys vLLM will look up."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> Answer:
        """HIT: in a row, verified. HIT_PENDING: below, or being loaded. RETRY: a shared tier's answer is in flight."""
        self._begin_step()
        request_id = req_context.req_id
        state = self._scanned[request_id] = self._requests[request_id]
        own = self._ids.to_kvtier(key)
        if request_id in self._reserved:
            reservation = self._stack.reservation(RequestId(request_id))
            if reservation is not None and not reservation.served:
                return _ANSWERS[state.waiting(own, req_context.get_offload_key_position(key))]
            answer = None if reservation is None else reserved_answer(reservation, own)
            if answer is not None:
                return _ANSWERS[answer]
        result = self._stack.lookup((own,))[0]
        if result is not LookupResult.MISS:
            state.found(own, result)
        return _ANSWERS[result]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Where a hit came from: a tier below if it was not in a row at its first lookup."""
        state = self._requests.get(req_context.req_id)
        below = state is not None and self._ids.to_kvtier(key) in state.from_below
        return CacheHitSource.DISK if below else CacheHitSource.HOST

    # -- loads and stores ----------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> RowsSpec:
        """Pin the rows of keys that were hits in this step. Raises IntegrityError if one no longer is."""
        order = [self._ids.to_kvtier(key) for key in keys]
        placed = self._place(JobKind.LOAD, order, RequestId(req_context.req_id))
        if placed is None or placed.num_blocks != len(order):
            raise IntegrityError(f"request {req_context.req_id} was promised blocks that are not there")
        self._copies.issue((req_context.req_id,), placed)
        self._requests[req_context.req_id].refused_since = None
        self._reserved.discard(req_context.req_id)
        return rows_spec(placed.gpu_groups, self._num_groups, stamped=False)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Every worker has copied: the rows are unpinned."""
        self._copies.end((req_context.req_id,))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Rows for the blocks that have none, in the order of the keys; None while too few are free.

        vLLM does not offer a block again that was left out. So a store waits for all its rows, but for a second at
        most. After that it takes the rows there are, for the front of the prefix.
        """
        new, room = self._stack.storable([self._ids.to_kvtier(key) for key in keys])
        if len(new) > room:
            if not room or self._may_wait(req_context.req_id):
                return None
            new = new[:room]
        placed = self._place(JobKind.STORE, new) if new else None
        groups = placed.gpu_groups if placed is not None else ()
        stored = [key for group in groups for key in group.keys]
        if placed is not None:
            self._copies.issue(stored, placed)
        spec = rows_spec(groups, self._num_groups, stamped=True)
        return PrepareStoreOutput([self._ids.to_vllm(key) for key in stored], spec, [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Every worker has ended. Which rows are complete is read from the workers' stamps, not from `success`."""
        self._copies.end(map(self._ids.to_kvtier, keys))

    def _may_wait(self, request_id: str) -> bool:
        state, now = self._requests[request_id], time.monotonic()
        if state.refused_since is None:
            state.refused_since = now
        return now < state.refused_since + PATIENCE_SECONDS

    def _place(
        self, kind: JobKind, keys: Sequence[OffloadKey], request_id: RequestId | None = None
    ) -> TransferJob | None:
        """The placed job. Its runs are placeholders: vLLM sends the GPU blocks to its workers itself."""
        groups = []
        for group, members in groupby(sorted(keys, key=key_group), key_group):
            names = tuple(members)
            runs = GPURuns.whole(range(len(names) * self._factor), self._factor)
            groups.append(GPUGroup(group, names, runs))
        return self._stack.place(self._stack.job(kind, groups), request_id)

    # -- the step ------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Record what arrived, before the first lookup of a step is answered."""
        if not self._in_step:
            self._in_step = True
            self._turn()

    def _turn(self) -> None:
        self._copies.poll()
        self._stack.step()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Reserve what this step's requests wait for; end the leases of those that no longer look keys up."""
        for request_id in context.new_req_ids:
            self._end_leases(request_id)
        for request_id, state in self._scanned.items():
            if state.deferred and state.keys:
                self._stack.reserve(RequestId(request_id), list(state.keys))
                self._reserved.add(request_id)
        for request_id in list(self._reserved):
            reservation = self._stack.reservation(RequestId(request_id))
            if reservation is None or (reservation.served and request_id not in self._scanned):
                self._end_leases(request_id)
        for state in self._scanned.values():
            state.end_step()
        self._scanned.clear()
        self._turn()
        self._in_step = False

    def _end_leases(self, request_id: str) -> None:
        if request_id in self._reserved:
            self._reserved.remove(request_id)
            self._stack.end_request(RequestId(request_id))

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No further lookups come for this request; copies in flight go on."""
        self._end_leases(req_context.req_id)
        self._requests.pop(req_context.req_id, None)
        self._scanned.pop(req_context.req_id, None)

    def has_pending_work(self) -> bool:
        """True while blocks are in flight between tiers.

        vLLM calls it in a loop when no request is left. A short wait here keeps that loop from using a whole core.
        """
        if not (self._stack.has_pending_work or self._copies.forgotten):
            return False
        self._stack.wait(IDLE_SECONDS)
        return True

    # -- the rest ------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that became reachable in a tier or ceased to be, on disk as well."""
        for event in self._stack.take_events():
            medium = Medium.CPU if event.medium == CPU else Medium.STORAGE
            yield OffloadingEvent([self._ids.to_vllm(key) for key in event.keys], medium, event.removed)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Figures of every tier, once a second."""
        return self._meter.read(self._stack.stats)

    def reset_cache(self) -> None:
        """Nothing stored before is served any more, also after a crash.

        Rows that workers still copy are not reused until those copies have ended; vLLM does not report when.
        """
        for request_id in list(self._reserved):
            self._end_leases(request_id)
        self._scanned.clear()
        self._copies.forget()
        try:
            self._stack.reset(RESET_SECONDS)
        except ResourceError as error:
            _log.error("a reset of the cache holds in memory, but not yet over a crash: %s", error)

    def shutdown(self) -> None:
        """Drain what is queued for lower tiers within the deadline, and log what was dropped."""
        report = self._stack.close()
        if report.dropped_blocks or report.unfinished_jobs:
            _log.warning("kvtier closed: %s", report)
