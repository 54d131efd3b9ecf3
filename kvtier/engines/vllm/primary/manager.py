"""The scheduler's side: answers vLLM from a tier stack in a process of its own.

vLLM scans prefixes from the left and windows from the right. It repeats the scan in every step in which a request
waits, and does not report a hit that it did not use. So the keys of a step's scans are collected and reserved when the
step ends. Later scans are answered from the reservation. The keys that a shared tier has yet to be asked for are looked
up then too, all of a request at once.
"""

import errno
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
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

from kvtier.client.request import ClientRequest
from kvtier.engines.vllm.adapters import content_in_keys
from kvtier.engines.vllm.compat import LOGGER
from kvtier.engines.vllm.primary.client_driver import ClientDriver
from kvtier.engines.vllm.primary.request_hints import RequestHints, request_info
from kvtier.engines.vllm.primary.router_events import RouterEvents
from kvtier.engines.vllm.primary.served_requests import (
    Prefills,
    RequestState,
    ServedRequest,
    hashes_per_block,
    known_keys,
    prompt_keys,
    requests_in_contexts,
)
from kvtier.engines.vllm.primary.unserved import UnservedRequests, ends_alone
from kvtier.engines.vllm.primary.wire import RowsSpec, rows_spec
from kvtier.engines.vllm.settings import SHARED_PREFIXES_KEY, EnginePlan, GroupIds
from kvtier.errors import IntegrityError
from kvtier.tier.contract import LookupResult
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup
from kvtier.types.keys import OffloadKey, key_group

PATIENCE_SECONDS = 1.0
"""How long a store waits for rows that are about to be free before it takes what there is."""

_NOT_STORED = (LookupResult.MISS, LookupResult.RETRY)
_ANSWERS = {result: Answer[result.name] for result in LookupResult}


class KVTierManager(OffloadingManager):  # type: ignore[misc]
    """Answers vLLM from a stack. Called by the scheduler's thread alone; no call but `reset_cache` and `shutdown`
    waits for I/O.
    """

    def __init__(self, plan: EnginePlan, config: OffloadingConfig) -> None:
        self._config = config
        layout = plan.namespace.layout
        self._factor = layout.block_size_factor
        self._num_groups = len(layout.groups)
        self._ids = GroupIds(plan.group_ids)
        self._requests: defaultdict[str, RequestState] = defaultdict(RequestState)
        self._scanned: dict[str, RequestState] = {}
        self._reserved: dict[str, ClientRequest] = {}
        self._in_step = False
        self._keeps_blocks = plan.keeps_blocks
        self._stores = plan.keeps_blocks and not plan.reads_only
        self._adapters = content_in_keys(self)
        try:
            self._driver = ClientDriver(plan, config.enable_kv_cache_events)
        except BaseException:
            self._adapters.release(self)
            raise
        self._served = served = requests_in_contexts()
        self._events = RouterEvents(self._driver, self._ids, config)
        ends = ends_alone(plan.lines, config.extra_config.get(SHARED_PREFIXES_KEY, True))
        self._unserved = UnservedRequests(self._driver.stats, self._num_groups, ends)
        measures = self._driver.measures_prefill and served
        self._prefills = Prefills(self._driver.prompt_computed) if measures else None
        self._records = plan.stack.record is not None and served
        self._hints = RequestHints(self._driver.hint)
        for line in plan.lines:
            logging.getLogger(LOGGER).warning(line)

    # -- lookups -------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request whose keys vLLM will look up."""
        if self._prefills is not None:
            self._prefills.arrived(req_context.req_id, req_context.get_state(ServedRequest))
        self._hints.arrived(req_context)
        served = req_context.get_state(ServedRequest)
        if served is not None and self._keeps_blocks:
            info, keys = request_info(req_context), prompt_keys(served, self._config)
            self._requests[req_context.req_id].request = self._driver.arrived(req_context.req_id, info, keys)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> Answer:
        """HIT: in a row, verified. HIT_PENDING: below, or being loaded. RETRY: a shared tier's answer is in flight."""
        self._begin_step()
        request_id = req_context.req_id
        state = self._scanned[request_id] = self._requests[request_id]
        state.is_outdated = False
        own = self._ids.to_kvtier(key)
        if state.request is None:
            self._begin_request(req_context, state)
        if self._follows and not state.announced:
            self._announce(req_context, state)
        if not (self._driver.serves and self._keeps_blocks):
            return Answer.MISS
        if request_id in self._reserved:
            reservation = self._reserved[request_id].reservation
            if reservation is not None and not reservation.served:
                return _ANSWERS[state.waiting(own, req_context.get_offload_key_position(key))]
            answer = None if reservation is None else reservation.answer(own)
            if answer is not None:
                return _ANSWERS[answer]
        result = self._driver.look_up_one(state.request, own)
        if result is not LookupResult.MISS:
            state.found(own, result)
        return _ANSWERS[result]

    def _begin_request(self, req_context: ReqContext, state: RequestState) -> ClientRequest:
        state.request = self._driver.request(req_context.req_id, request_info(req_context))
        return state.request

    @property
    def _follows(self) -> bool:
        """True if policies follow requests."""
        return self._driver.follows and self._served

    def stored_prefix(self, request_id: str, keys: Sequence[OffloadKey]) -> int:
        """Count the keys of one group that are stored, up to the first that is not. No answer is waited for."""
        found = self._driver.look_up(self._requests[request_id].request, [self._ids.to_kvtier(key) for key in keys])
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
        state = self._requests[req_context.req_id]
        assert state.request is not None
        placed = self._driver.begin_load(state.request, self._groups(order))
        if placed is None or placed.num_blocks != len(order):
            raise IntegrityError(f"request {req_context.req_id} was promised blocks that are not there")
        self._events.used(order)
        state.refused_since, state.loaded = None, True
        self._reserved.pop(req_context.req_id, None)
        return rows_spec(placed.gpu_groups, self._num_groups, self._driver.name(placed))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Every worker has copied: the rows are unpinned."""
        self._driver.end_load(req_context.req_id)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Rows for the blocks that have none, in the order of the keys; None while too few are free.

        vLLM does not offer a block again that was left out. So a store waits for all its rows, but for a second at
        most, and not where the request has finished: that is offered once. Then it takes the rows there are, for the
        front of the prefix.
        """
        state = self._requests[req_context.req_id]
        if self._follows:
            self._announce(req_context, state)
        if self._driver.will_serve and self._may_wait(req_context, state):
            return None
        new, room = self._storable(keys, req_context.req_id, state)
        if len(new) > room and not self._in_step:
            # vLLM 0.33 ends a step after its stores. Without lookups nothing was recorded since the step before.
            self._turn()
            new, room = self._storable(keys, req_context.req_id, state)
        if len(new) > room:
            if not room or self._may_wait(req_context, state):
                return None
            new = new[:room]
        elif new:
            state.refused_since = None
        placed = self._driver.begin_store(self._groups(new), self._adapters.used) if new else None
        groups = placed.gpu_groups if placed is not None else ()
        stored = [key for group in groups for key in group.keys]
        if placed is not None:
            self._events.used(stored)
            self._hints.stored(req_context.req_id, stored)
        spec = rows_spec(groups, self._num_groups, self._driver.name(placed))
        return PrepareStoreOutput([self._ids.to_vllm(key) for key in stored], spec, [])

    def _storable(
        self, keys: Collection[OffloadKey], request_id: str, state: RequestState
    ) -> tuple[list[OffloadKey], int]:
        """(the keys that are to be stored, in order; how many rows can be had now)."""
        wanted = self._stores and self._driver.serves and not state.is_outdated and self._adapters.storable(request_id)
        return self._driver.storable(state.request, [self._ids.to_kvtier(key) for key in keys] if wanted else [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Every worker has ended. `success` is not what says which rows are complete."""
        reason = 0 if self._adapters.storable(req_context.req_id) else errno.ESTALE
        stored = list(map(self._ids.to_kvtier, keys))
        self._driver.end_store(stored, reason)
        self._events.unsure(stored)

    @staticmethod
    def _may_wait(req_context: ReqContext, state: RequestState) -> bool:
        served, now = req_context.get_state(ServedRequest), time.monotonic()
        if served is not None and served.request.is_finished():
            return False
        if state.refused_since is None:
            state.refused_since = now
        return now < state.refused_since + PATIENCE_SECONDS

    def _groups(self, keys: Sequence[OffloadKey]) -> list[GPUGroup]:
        """The groups of a copy. Their runs are placeholders: vLLM sends the GPU blocks to its workers itself."""
        groups = []
        for group, members in groupby(sorted(keys, key=key_group), key_group):
            names = tuple(members)
            runs = GPURuns.whole(range(len(names) * self._factor), self._factor)
            groups.append(GPUGroup(group, names, runs))
        return groups

    # -- the step ------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Record what arrived, before the first lookup of a step is answered."""
        if not self._in_step:
            self._in_step = True
            self._turn()

    def _turn(self) -> None:
        if self._driver.turn():
            self._on_reset()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Reserve what this step's requests wait for; end the leases of those that no longer look keys up.

        vLLM 0.32 calls it before the step's stores, vLLM 0.33 after them. There the leases of requests that were
        scheduled hold rows while the stores ask for some; a store that gets none is offered again in the next step.
        """
        if self._prefills is not None:
            self._prefills.step(context.new_req_ids, context.preempted_req_ids)
        if self._scanned or self._reserved:
            self._reserve_scanned()
        for request_id in context.new_req_ids:  # their loads have leases of their own
            self._end_leases(request_id)
        if self._driver.end_step():
            self._on_reset()
        self._in_step = False

    def _reserve_scanned(self) -> None:
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

    def _ask(self, state: RequestState) -> None:
        """Look up all unknown keys of a request at once. They stay the same while answers come in, so that the lookups
        of prefix probing end in the time for one."""
        if not state.unknown.keys() <= state.chain.keys():
            state.chain = state.unknown
        if state.chain and LookupResult.RETRY not in self._driver.look_up(state.request, list(state.chain), ask=True):
            state.chain = {}

    def _reserve(self, request_id: str, state: RequestState) -> None:
        """Have what the request found be loaded, as far as that is sooner than computing it."""
        assert state.request is not None
        state.request.reserve(list(state.keys))
        self._reserved[request_id] = state.request

    def _end_leases(self, request_id: str) -> None:
        self._reserved.pop(request_id, None)
        if request_id in self._requests and (request := self._requests[request_id].request) is not None:
            request.release()

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

    def _end_request(self, req_context: ReqContext, request: ClientRequest | None) -> None:
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
        if not (self._driver.has_pending_work or self._events.waiting):
            return bool(self._driver.rest())
        self._driver.wait()
        return True

    # -- the rest ------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that became reachable in a tier or ceased to be, on disk as well; for routers."""
        return self._events.take()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Figures of every tier, once a second."""
        figures: OffloadingConnectorStats | None = self._driver.figures()
        return figures

    def reset_cache(self) -> None:
        """Nothing stored before is served any more, also after a crash. Where the weights may be others than those at
        the start, which name what is on disk, the lower tiers are not used any more.
        """
        self._driver.reset()
        self._on_reset()

    def _on_reset(self) -> None:
        """Forget all leases: they are void. What was computed so far is no base for what is stored from now on."""
        for request_id in list(self._reserved):
            self._end_leases(request_id)
        self._scanned.clear()
        for state in self._requests.values():
            state.is_outdated = True

    def on_reset_flushed(self) -> None:
        """The workers have ended every copy from before the last reset. Called by vLLM 0.33."""
        self._driver.on_reset_flushed()

    def config_info(self) -> Sequence[Mapping[str, str | int | float | bool]]:
        """The size of the CPU tier, for `vllm:kv_offload_config_info`. Called by vLLM 0.33."""
        from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo

        if not self._driver.num_rows:
            return []  # there is no stack process
        return [
            CPUOffloadingInfo.from_config(self._config, self._driver.num_rows, self._driver.row_bytes).as_config_info()
        ]

    def shutdown(self) -> None:
        """Drain what is queued for lower tiers within the deadline, and log what was dropped."""
        self._adapters.release(self)
        self._driver.close()
