"""The stack in the scheduler's own process, as `KVTierManager` uses it. It goes once every engine is a client."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from kvtier.config import stack_parts
from kvtier.engines.digests import Confirmation
from kvtier.engines.vllm.compat import LOGGER
from kvtier.engines.vllm.identity import measure, refine
from kvtier.engines.vllm.metrics import Meter
from kvtier.engines.vllm.primary.inflight_copies import InflightCopies
from kvtier.engines.vllm.primary.model_weights import REPLACED, EngineWeights, Verdict
from kvtier.engines.vllm.primary.wire import NO_REPORT
from kvtier.engines.vllm.settings import EnginePlan
from kvtier.errors import ResourceError
from kvtier.stack import EngineStack
from kvtier.stack.request import StackRequest
from kvtier.stack.workers.engine_copier import EngineCopies
from kvtier.tier.contract import HasWords, LookupResult, ProvidesRows
from kvtier.types.events import OffloadingEvent
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import OffloadKey, RequestId
from kvtier.types.requests import RequestInfo

RESET_SECONDS = 5.0
STORE_SECONDS = 60.0
IDLE_SECONDS = 0.002

_log = logging.getLogger(__name__)


class EmbeddedDriver:
    """Calls of the scheduler's thread alone; no call but `reset` and `close` waits for I/O.

    A hit is reported only for a block whose verified bytes are in a row. It needs no lease until the end of the step,
    because between a request's scan and its load no delivery is recorded and no row is evicted. `follows`: policies
    follow requests.
    """

    def __init__(self, plan: EnginePlan, events: bool) -> None:
        layout = plan.namespace.layout
        copiers = [EngineCopies() for _ in range(layout.world_size)]
        parts = stack_parts(plan.whole, plan.namespace, workers=copiers)
        events_max = parts.settings.events_max if events else 0
        self._settings = dataclasses.replace(parts.settings, store_timeout_seconds=STORE_SECONDS, events_max=events_max)
        self._confirmation = Confirmation()
        self.stack = EngineStack(
            dataclasses.replace(
                parts,
                engine_id=plan.engine_id,
                settings=self._settings,
                operator_log=LOGGER,
                refine=partial(refine, confirmation=self._confirmation),
                measure=measure,
            )
        )
        self.engine = self.stack.engine
        self._stale = False  # rows are of weights before; vLLM still has to report copies of them
        self._held_back = False
        self._meter = Meter()
        self._durable = True  # the last reset holds over a crash
        try:
            self.stack.open()
        except BaseException:
            self._confirmation.close()
            raise
        cpu = parts.tiers[0]
        assert isinstance(cpu, ProvidesRows)
        assert isinstance(cpu.rows, HasWords)
        self.num_rows, self.row_bytes = cpu.rows.num_rows, cpu.rows.row_bytes
        self.copies = InflightCopies(cpu.rows, copiers, layout.num_copies)
        self.weights = EngineWeights(cpu.rows.words)
        self.chooses, self.measures_prefill = self._settings.chooses, self._settings.measures_prefill
        self.follows = self.engine.follows_requests
        self.hint, self.stats, self.take_events = self.stack.hint, self.stack.stats, self.stack.take_events
        self.announce, self.prompt_computed = self.engine.announce, self.engine.prompt_computed

    def figures(self) -> OffloadingConnectorStats | None:
        """The figures that changed, once an interval."""
        return self._meter.read(self.stack.stats)

    @property
    def serves(self) -> bool:
        """False while rows are of weights before."""
        return not self._stale

    @property
    def will_serve(self) -> bool:
        """False: what makes it serve again is not far, and stores need not wait for it."""
        return False

    def left_elsewhere(self, removals: Iterable[OffloadingEvent]) -> list[OffloadingEvent]:
        """The blocks that one lower tier has removed and another one has, as removed and stored."""
        for event in removals:
            self.announce(event.keys)
        return self.take_events()

    # -- lookups -------------------------------------------------------------------------------------------------

    def request(self, request_id: str, info: RequestInfo | None) -> StackRequest:
        """A request, which begins when it is extended."""
        return self.stack.request(RequestId(request_id), info=info)

    def arrived(self, request_id: str, info: RequestInfo | None, keys: Sequence[OffloadKey]) -> None:
        """Nothing: lookups are answered from memory."""

    def look_up(
        self, request: StackRequest | None, keys: Sequence[OffloadKey], *, ask: bool = False
    ) -> list[LookupResult]:
        """Presence of each key: RETRY where a shared tier has yet to answer. With `ask` it is asked."""
        return self.stack.lookup(keys, ask=ask)

    def look_up_one(self, request: StackRequest | None, key: OffloadKey) -> LookupResult:
        """Presence of a key, as `look_up`: vLLM asks for each alone."""
        return self.stack.lookup((key,), ask=False)[0]

    def storable(self, request: StackRequest | None, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], int]:
        """(the keys that are in no row and on their way into none, in order; how many rows can be had now)."""
        return self.engine.storable(keys)

    def in_rows(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """True for a key that is in a row, None for one on its way into one, False for others."""
        absent = set(self.engine.storable(keys)[0])
        found = self.stack.lookup(keys, ask=False)
        return [
            False if key in absent else one is LookupResult.HIT or None for key, one in zip(keys, found, strict=True)
        ]

    # -- loads and stores ----------------------------------------------------------------------------------------

    def begin_load(self, request: StackRequest, groups: Sequence[GPUGroup]) -> TransferJob | None:
        """Begin to copy blocks out of rows; None, or a part of them, if some are in no row."""
        placed = self.engine.place(self.stack.job(JobKind.LOAD, groups), request)
        if placed is not None:
            self.copies.issue((request.id,), placed)
        return placed

    def begin_store(self, groups: Sequence[GPUGroup], waits: bool) -> TransferJob | None:
        """Begin to copy blocks into rows; None, or a part of them, if there are too few. All wait for `end_store`."""
        placed = self.engine.place(self.stack.job(JobKind.STORE, groups))
        if placed is not None:
            self.copies.issue([key for group in placed.groups for key in group.keys], placed)
        return placed

    def name(self, copy: TransferJob | None) -> tuple[int, str]:
        """Number of no report, in no session: workers stamp rows and count their uses."""
        return NO_REPORT, ""

    def end_load(self, request_id: str) -> None:
        """Every worker has copied: the rows are unpinned."""
        self.copies.end((request_id,))

    def end_store(self, keys: Collection[OffloadKey], reason: int) -> None:
        """Every worker has ended. Which rows are complete is read from the workers' stamps; with an errno as `reason`
        none of them is of use."""
        self.copies.end(keys, reason)

    # -- the step ------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Record what arrived, send what was decided. True if the stack was reset: leases from before are void."""
        if self.weights.loaded():
            self._stale = True
            self._hold_back(REPLACED[Verdict.CHANGED])
        if self._confirmation.refutation():
            self._stale = True
        resets = self._stale and not self.copies.reported
        if resets:
            self._reset()
            self._distrust_samples()
        self.copies.poll()
        self.stack.step()
        return resets

    end_step = turn

    @property
    def has_pending_work(self) -> bool:
        """True while blocks are in flight between tiers."""
        return self.stack.has_pending_work or bool(self.copies.forgotten)

    def wait(self) -> None:
        """Wait a little while blocks are in flight: vLLM calls in a loop when no request is left."""
        self.stack.wait(IDLE_SECONDS)

    def rest(self) -> bool:
        """There is nothing to do. True if the engine has to step once more for figures."""
        return self._meter.to_read()

    def reset(self) -> None:
        """Nothing stored before is served any more, also after a crash. Where the weights may be others than those at
        the start, which name what is on disk, the lower tiers are not used any more.

        Rows that workers still copy are not reused until those copies have ended.
        """
        self.copies.forget()
        self._reset()
        verdict = Verdict.CHANGED if self.weights.loaded() else self.weights.compare(RESET_SECONDS)
        if verdict is not Verdict.UNCHANGED:
            self._hold_back(REPLACED[verdict])

    def on_reset_flushed(self) -> None:
        """The workers have ended every copy from before the last reset."""
        self.copies.end_forgotten()

    def _hold_back(self, reason: str) -> None:
        """The lower tiers are named by the weights that the engine has started with."""
        if not self._held_back:
            self._held_back = True
            self.engine.hold_back(reason)

    def _distrust_samples(self) -> None:
        """After a reset: what was stored in the name of other weights is gone, and the lower tiers are held back."""
        if self._durable and (reason := self._confirmation.refutation()):
            self._hold_back(reason)
            self._confirmation.accept()

    def _reset(self) -> None:
        self._stale = False
        try:
            self.stack.reset(RESET_SECONDS)
            self._durable = True
        except ResourceError as error:
            self._durable = False
            _log.error("a reset of the cache holds in memory, but not yet over a crash: %s", error)

    def close(self) -> None:
        """Drain what is queued for lower tiers within the deadline, and log what was dropped."""
        if self._confirmation.refutation():
            self._reset()
            self._distrust_samples()
        self._confirmation.close()
        self.stack.close()
