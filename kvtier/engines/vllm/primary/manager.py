"""The scheduler's side: answers vLLM from a tier stack in this process.

vLLM scans prefixes from the left and windows from the right. It repeats the scan in every step in which a request
waits, and does not report a hit that it did not use. So the keys of a step's scans are collected and reserved when the
step ends. Later scans are answered from the reservation. The keys that a shared tier has yet to be asked for are looked
up then too, all of a request at once.
"""

import dataclasses
import errno
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import LookupResult as Answer
from vllm.v1.kv_offload.base import (
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.config import stack_parts
from kvtier.engines.digests import Confirmation
from kvtier.engines.vllm.adapters import content_in_keys
from kvtier.engines.vllm.compat import LOGGER
from kvtier.engines.vllm.identity import measure, refine
from kvtier.engines.vllm.metrics import Meter
from kvtier.engines.vllm.primary.inflight_copies import InflightCopies
from kvtier.engines.vllm.primary.model_weights import EngineWeights, Verdict
from kvtier.engines.vllm.primary.request_hints import RequestHints, request_info
from kvtier.engines.vllm.primary.router_events import RouterEvents
from kvtier.engines.vllm.primary.served_requests import (
    Prefills,
    RequestState,
    ServedRequest,
    hashes_per_block,
    known_keys,
    requests_in_contexts,
    reserved_answer,
)
from kvtier.engines.vllm.primary.unserved import UnservedRequests, ends_alone
from kvtier.engines.vllm.primary.wire import RowsSpec, rows_spec
from kvtier.engines.vllm.settings import SHARED_PREFIXES_KEY, EnginePlan, GroupIds
from kvtier.errors import IntegrityError, ResourceError
from kvtier.stack import EngineStack
from kvtier.stack.request import StackRequest
from kvtier.stack.workers.engine_copier import EngineCopies
from kvtier.tier.contract import HasWords, LookupResult, ProvidesRows
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import OffloadKey, RequestId, key_group

PATIENCE_SECONDS = 1.0
"""How long a store waits for rows that are about to be free before it takes what there is."""
RESET_SECONDS = 5.0
STORE_SECONDS = 60.0
IDLE_SECONDS = 0.002

REPLACED = {
    Verdict.CHANGED: "the weights were replaced since the engine has started",
    Verdict.UNKNOWN: "the weights may have been replaced since the engine has started",
}

_NOT_STORED = (LookupResult.MISS, LookupResult.RETRY)
_ANSWERS = {result: Answer[result.name] for result in LookupResult}
_log = logging.getLogger(__name__)


class KVTierManager(OffloadingManager):  # type: ignore[misc]
    """Answers vLLM from a stack. Called by the scheduler's thread alone; no call but `reset_cache` and `shutdown`
    waits for I/O.

    A hit is reported only for a block whose verified bytes are in a row. It needs no lease until the end of the step,
    because between a request's scan and its load no delivery is recorded and no row is evicted.
    """

    def __init__(self, plan: EnginePlan, config: OffloadingConfig) -> None:
        self._config = config
        layout = plan.namespace.layout
        self._factor = layout.block_size_factor
        self._num_groups = len(layout.groups)
        self._ids = GroupIds(plan.group_ids)
        copiers = [EngineCopies() for _ in range(layout.world_size)]
        parts = stack_parts(plan.stack, plan.namespace, workers=copiers)
        events_max = parts.settings.events_max if config.enable_kv_cache_events else 0
        settings = dataclasses.replace(parts.settings, store_timeout_seconds=STORE_SECONDS, events_max=events_max)
        parts = dataclasses.replace(parts, engine_id=plan.engine_id, settings=settings, operator_log=LOGGER)
        self._confirmation = Confirmation()
        named = partial(refine, confirmation=self._confirmation)
        self._stack = EngineStack(dataclasses.replace(parts, refine=named, measure=measure))
        self._engine = self._stack.engine
        self._events = RouterEvents(self._stack, self._ids, config)
        self._requests: defaultdict[str, RequestState] = defaultdict(RequestState)
        self._scanned: dict[str, RequestState] = {}
        self._reserved: dict[str, StackRequest] = {}
        self._in_step = False
        self._keeps_blocks = plan.keeps_blocks
        self._stale = False  # rows are of weights before; vLLM still has to report copies of them
        self._held_back = False
        self._durable = True  # the last reset holds over a crash
        self._meter = Meter()
        ends = ends_alone(plan.lines, config.extra_config.get(SHARED_PREFIXES_KEY, True))
        self._unserved = UnservedRequests(self._stack.stats, self._num_groups, ends)
        self._chooses = settings.chooses
        served = requests_in_contexts()
        self._prefills = Prefills(self._engine.prompt_computed) if settings.measures_prefill and served else None
        self._records = plan.stack.record is not None and served
        self._hints = RequestHints(self._stack.hint)
        self._adapters = content_in_keys(self)
        try:
            self._stack.open()
            self._follows = self._engine.follows_requests and served
        except BaseException:
            self._adapters.release(self)
            self._confirmation.close()
            raise
        cpu = parts.tiers[0]
        assert isinstance(cpu, ProvidesRows)
        assert isinstance(cpu.rows, HasWords)
        self._rows = cpu.rows
        self._copies = InflightCopies(cpu.rows, copiers, layout.num_copies)
        self._weights = EngineWeights(cpu.rows.words)
        for line in plan.lines:
            logging.getLogger(LOGGER).warning(line)

    # -- lookups -------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request whose keys vLLM will look up."""
        if self._prefills is not None:
            self._prefills.arrived(req_context.req_id, req_context.get_state(ServedRequest))
        self._hints.arrived(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> Answer:
        """HIT: in a row, verified. HIT_PENDING: below, or being loaded. RETRY: a shared tier's answer is in flight."""
        self._begin_step()
        request_id = req_context.req_id
        state = self._scanned[request_id] = self._requests[request_id]
        own = self._ids.to_kvtier(key)
        if state.request is None:
            self._begin_request(req_context, state)
            if self._follows:
                self._announce(req_context, state)
        if self._stale or not self._keeps_blocks:
            return Answer.MISS
        if request_id in self._reserved:
            reservation = self._reserved[request_id].reservation
            if reservation is not None and not reservation.served:
                return _ANSWERS[state.waiting(own, req_context.get_offload_key_position(key))]
            answer = None if reservation is None else reserved_answer(reservation, own)
            if answer is not None:
                return _ANSWERS[answer]
        result = self._stack.lookup((own,), ask=False)[0]
        if state.computes and result is not LookupResult.HIT:
            return Answer.MISS
        if result is not LookupResult.MISS:
            state.found(own, result)
        return _ANSWERS[result]

    def _begin_request(self, req_context: ReqContext, state: RequestState) -> StackRequest:
        state.request = self._stack.request(RequestId(req_context.req_id), info=request_info(req_context))
        return state.request

    def stored_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Count the keys of one group that are stored, up to the first that is not. No answer is waited for."""
        found = self._stack.lookup([self._ids.to_kvtier(key) for key in keys], ask=False)
        ends = (number for number, result in enumerate(found) if result in _NOT_STORED)
        return next(ends, len(found))

    def _announce(self, req_context: ReqContext, state: RequestState) -> None:
        """The stack's policies follow requests: name the blocks of the prompt, with those that the GPU has.

        Called again, it names the blocks of the output that became full since.
        """
        keys = [self._ids.to_kvtier(key) for key in known_keys(req_context, state.announced)]
        if keys:
            (state.request or self._begin_request(req_context, state)).extend(keys)
        state.announced += len(keys)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """The source of a hit: a tier below if it was not in a row at its first lookup."""
        state = self._requests.get(req_context.req_id)
        below = state is not None and self._ids.to_kvtier(key) in state.from_below
        return CacheHitSource.DISK if below else CacheHitSource.HOST

    # -- loads and stores ----------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> RowsSpec:
        """Pin the rows of keys that were hits in this step. Raises IntegrityError if one no longer is."""
        order = [self._ids.to_kvtier(key) for key in keys]
        placed = self._place(JobKind.LOAD, order, self._requests[req_context.req_id].request)
        if placed is None or placed.num_blocks != len(order):
            raise IntegrityError(f"request {req_context.req_id} was promised blocks that are not there")
        self._copies.issue((req_context.req_id,), placed)
        self._events.used(order)
        state = self._requests[req_context.req_id]
        state.refused_since, state.loaded = None, True
        self._reserved.pop(req_context.req_id, None)
        return rows_spec(placed.gpu_groups, self._num_groups, stamped=False)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Every worker has copied: the rows are unpinned."""
        self._copies.end((req_context.req_id,))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Rows for the blocks that have none, in the order of the keys; None while too few are free.

        vLLM does not offer a block again that was left out. So a store waits for all its rows, but for a second at
        most. After that it takes the rows there are, for the front of the prefix.
        """
        state = self._requests[req_context.req_id]
        if self._follows:
            self._announce(req_context, state)
        wanted = self._keeps_blocks and not self._stale and self._adapters.storable(req_context.req_id)
        offered = [self._ids.to_kvtier(key) for key in keys] if wanted else []
        new, room = self._engine.storable(offered)
        if len(new) > room and not self._in_step:
            # vLLM 0.33 ends a step after its stores. Without lookups nothing was recorded since the step before.
            self._turn()
            new, room = self._engine.storable(offered)
        if len(new) > room:
            if not room or self._may_wait(req_context.req_id):
                return None
            new = new[:room]
        placed = self._place(JobKind.STORE, new) if new else None
        groups = placed.gpu_groups if placed is not None else ()
        stored = [key for group in groups for key in group.keys]
        if placed is not None:
            self._copies.issue(stored, placed)
            self._events.used(stored)
            self._hints.stored(req_context.req_id, stored)
        spec = rows_spec(groups, self._num_groups, stamped=True)
        return PrepareStoreOutput([self._ids.to_vllm(key) for key in stored], spec, [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Every worker has ended. Which rows are complete is read from the workers' stamps, not from `success`."""
        reason = 0 if self._adapters.storable(req_context.req_id) else errno.ESTALE
        stored = list(map(self._ids.to_kvtier, keys))
        self._copies.end(stored, reason)
        self._events.unsure(stored)

    def _may_wait(self, request_id: str) -> bool:
        state, now = self._requests[request_id], time.monotonic()
        if state.refused_since is None:
            state.refused_since = now
        return now < state.refused_since + PATIENCE_SECONDS

    def _place(
        self, kind: JobKind, keys: Sequence[OffloadKey], request: StackRequest | None = None
    ) -> TransferJob | None:
        """The placed job. Its runs are placeholders: vLLM sends the GPU blocks to its workers itself."""
        groups = []
        for group, members in groupby(sorted(keys, key=key_group), key_group):
            names = tuple(members)
            runs = GPURuns.whole(range(len(names) * self._factor), self._factor)
            groups.append(GPUGroup(group, names, runs))
        return self._engine.place(self._stack.job(kind, groups), request)

    # -- the step ------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Record what arrived, before the first lookup of a step is answered."""
        if not self._in_step:
            self._in_step = True
            self._turn()

    def _turn(self) -> None:
        if self._weights.loaded():
            self._stale = True
            self._hold_back(REPLACED[Verdict.CHANGED])
        if self._confirmation.refutation():
            self._stale = True
        if self._stale and not self._copies.reported:
            self._reset()
            self._distrust_samples()
        self._copies.poll()
        self._stack.step()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Reserve what this step's requests wait for; end the leases of those that no longer look keys up.

        vLLM 0.32 calls it before the step's stores, vLLM 0.33 after them. There the leases of requests that were
        scheduled hold rows while the stores ask for some; a store that gets none is offered again in the next step.
        """
        if self._prefills is not None:
            self._prefills.step(context.new_req_ids, context.preempted_req_ids)
        for request_id in context.new_req_ids:
            self._end_leases(request_id)
        for request_id, state in self._scanned.items():
            asked_before = bool(state.chain)
            self._ask(state)
            if state.deferred and state.keys and not (asked_before and state.unknown):
                self._reserve(request_id, state)
        for request_id, request in list(self._reserved.items()):
            reservation = request.reservation
            if reservation is None or (reservation.served and request_id not in self._scanned):
                self._end_leases(request_id)
        for state in self._scanned.values():
            state.end_step(self._num_groups)
        self._scanned.clear()
        self._turn()
        self._in_step = False

    def _ask(self, state: RequestState) -> None:
        """Look up all unknown keys of a request at once. They stay the same while answers come in, so that the lookups
        of prefix probing end in the time for one."""
        if not state.unknown.keys() <= state.chain.keys():
            state.chain = state.unknown
        if state.chain and LookupResult.RETRY not in self._stack.lookup(list(state.chain)):
            state.chain = {}

    def _reserve(self, request_id: str, state: RequestState) -> None:
        """Have what the request found be loaded, as far as that is sooner than computing it.

        Of several groups all is loaded or nothing: a prefix counts only if every group has its part.
        """
        keys, request = list(state.keys), state.request
        assert request is not None
        if self._chooses and not state.computes:
            end = request.worth_loading(keys)
            state.computes = end < len(keys)
            keys = [] if state.computes and self._num_groups > 1 else keys[:end]
        if keys:
            request.reserve(keys)
            self._reserved[request_id] = request

    def _end_leases(self, request_id: str) -> None:
        if request_id in self._reserved:
            self._reserved.pop(request_id).release()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No further lookups come for this request; copies in flight go on."""
        if self._prefills is not None:
            self._prefills.ended(req_context.req_id)
        self._hints.ended(req_context.req_id, lambda: map(self._ids.to_kvtier, known_keys(req_context)))
        self._reserved.pop(req_context.req_id, None)
        self._scanned.pop(req_context.req_id, None)
        state = self._requests.pop(req_context.req_id, RequestState())
        self._events.unsure(state.pending)
        self._unserved.on_end(state)
        self._end_request(req_context, state.request)

    def _end_request(self, req_context: ReqContext, request: StackRequest | None) -> None:
        """End the stack's request, which there is from the first lookup on. The trace has those without lookups too."""
        served = req_context.get_state(ServedRequest)
        output_tokens = None if served is None else served.request.num_output_tokens
        if served is not None and self._records:
            (request or self._begin_request(req_context, RequestState())).end(
                output_tokens,
                input_tokens=served.request.num_prompt_tokens,
                prompt=served.prompt_hashes(self._config.cache.tokens_per_hash, hashes_per_block(self._config)),
                arrived=served.arrived,
            )
        elif request is not None:
            request.end(output_tokens)

    def has_pending_work(self) -> bool:
        """True while blocks are in flight between tiers, and then once more for the figures.

        vLLM calls it in a loop when no request is left. A short wait here keeps that loop from using a whole core.
        """
        if not (self._stack.has_pending_work or self._copies.forgotten or self._events.waiting):
            return self._meter.to_read()
        self._stack.wait(IDLE_SECONDS)
        return True

    # -- the rest ------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that became reachable in a tier or ceased to be, on disk as well; for routers."""
        return self._events.take()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Figures of every tier, once a second."""
        return self._meter.read(self._stack.stats)

    def reset_cache(self) -> None:
        """Nothing stored before is served any more, also after a crash. Where the weights may be others than those at
        the start, which name what is on disk, the lower tiers are not used any more.

        Rows that workers still copy are not reused until those copies have ended.
        """
        self._copies.forget()
        self._reset()
        verdict = Verdict.CHANGED if self._weights.loaded() else self._weights.compare(RESET_SECONDS)
        if verdict is not Verdict.UNCHANGED:
            self._hold_back(REPLACED[verdict])

    def _hold_back(self, reason: str) -> None:
        """The lower tiers are named by the weights that the engine has started with."""
        if not self._held_back:
            self._held_back = True
            self._engine.hold_back(reason)

    def _distrust_samples(self) -> None:
        """After a reset: what was stored in the name of other weights is gone, and the lower tiers are held back."""
        if self._durable and (reason := self._confirmation.refutation()):
            self._hold_back(f"the weights are not those that samples of them showed: {reason}")
            self._confirmation.accept()

    def _reset(self) -> None:
        self._stale = False
        for request_id in list(self._reserved):
            self._end_leases(request_id)
        self._scanned.clear()
        try:
            self._stack.reset(RESET_SECONDS)
            self._durable = True
        except ResourceError as error:
            self._durable = False
            _log.error("a reset of the cache holds in memory, but not yet over a crash: %s", error)

    def on_reset_flushed(self) -> None:
        """The workers have ended every copy from before the last reset. Called by vLLM 0.33."""
        self._copies.end_forgotten()

    def config_info(self) -> Sequence[Mapping[str, str | int | float | bool]]:
        """The size of the CPU tier, for `vllm:kv_offload_config_info`. Called by vLLM 0.33."""
        from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo

        return [CPUOffloadingInfo.from_config(self._config, self._rows.num_rows, self._rows.row_bytes).as_config_info()]

    def shutdown(self) -> None:
        """Drain what is queued for lower tiers within the deadline, and log what was dropped."""
        if self._confirmation.refutation():
            self._reset()
            self._distrust_samples()
        self._confirmation.close()
        self._adapters.release(self)
        self._stack.close()
