"""The stack in a process of its own, as `KVTierManager` uses it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.client.connection import Identity
from kvtier.client.engine import OPEN_SECONDS, SchedulerClient
from kvtier.client.request import ClientRequest
from kvtier.engines.digests import Confirmation
from kvtier.engines.vllm.compat import LOGGER
from kvtier.engines.vllm.identity import measure, refine
from kvtier.engines.vllm.metrics import Meter, counted
from kvtier.engines.vllm.primary.model_weights import REPLACED, Verdict
from kvtier.engines.vllm.primary.wire import NO_REPORT
from kvtier.engines.vllm.settings import EnginePlan, engine_identity
from kvtier.errors import ConfigError, ResourceError
from kvtier.metrics.families import RESTARTS
from kvtier.service import wire
from kvtier.stack import StackStats, TierStats
from kvtier.tier.contract import LookupResult
from kvtier.types.events import OffloadingEvent
from kvtier.types.hints import KVHint
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import JobId, OffloadKey
from kvtier.types.namespace import Namespace
from kvtier.types.requests import RequestInfo

IDLE_SECONDS = 0.002
IDENTITY_SECONDS = 10.0
"""How long a start waits for the name of the weights, which takes as long as reading them, the first time."""
EVICTED, RECOVERED = "kvtier_evicted_blocks_total", "kvtier_recovered_blocks"
OPTIONAL_SECONDS = 30.0
"""How long a start waits for workers where the stack process is not required: they have connected, or cannot."""
FORGOTTEN_TURNS = 16
"""Turns after a reset, two a step, after which workers have ended all copies of before: vLLM has two steps in flight,
and has them wait for those copies in the first one."""
_log = logging.getLogger(LOGGER)


class ClientDriver:
    """Calls of the scheduler's thread alone; nothing waits but a step's first lookup, for a millisecond.

    A hit is a row leased to its request. Workers report the ends of copies themselves. When the stack process has ended
    all is a miss, until another one serves; vLLM says here which loads have ended, so that none finds its rows gone.
    """

    def __init__(self, plan: EnginePlan, events: bool) -> None:
        self.identity: Identity = engine_identity(plan)
        self.client = SchedulerClient(self.identity, complete=False, events=events, required=plan.required)
        self.num_rows, self.row_bytes = self.client.welcome.num_rows, self.client.welcome.row_bytes
        self.chooses = False  # the stack process does
        self.measures_prefill = plan.stack.prefill_tokens_per_second == "measured"
        self._core = self.client.core
        self._naming = Naming(plan.namespace)
        self._held_back = ""
        self._question = 0
        self._is_unsure_of_weights = False
        self._unsure: dict[OffloadKey, JobId] = {}
        self._tiers: dict[str, TierStats] = {}
        self._loads: dict[str, JobId] = {}
        self._forgotten: list[JobId] = []
        self._forgotten_turns = 0
        self._restarts_counted = 0
        try:
            self._open(plan.required)
        except BaseException:
            self.close()
            raise

    def _open(self, required: bool) -> None:
        """Wait until the engine is served. Raises ResourceError, ConfigError if it is not, and that is required."""
        if not self._core.connected:
            return
        try:
            self._naming.begin(self.client.wait_notes(OPEN_SECONDS if required else OPTIONAL_SECONDS))
            if (named := self._naming.take(IDENTITY_SECONDS)) is not None:
                self.client.join(named.manifest().encode())
                self.client.wait_joined()
        except (ConfigError, ResourceError) as error:
            if required:
                raise
            _log.error("the engine goes on without a stack: %s", error)

    @property
    def follows(self) -> bool:
        """True if policies follow requests."""
        return self._core.follows

    @property
    def serves(self) -> bool:
        """True if blocks may be found and stored now: not before it is known whose weights they are of."""
        return self._core.serves and not (self._question or self._is_unsure_of_weights)

    @property
    def will_serve(self) -> bool:
        """True while a reset is under way, or what the workers say of their weights: stores wait for that."""
        return self._core.connected and (self._core.resetting or bool(self._question))

    # -- lookups -------------------------------------------------------------------------------------------------

    def arrived(self, request_id: str, info: RequestInfo | None, keys: Sequence[OffloadKey]) -> ClientRequest:
        """A request has come: which of these keys are there is asked now."""
        return self.client.request(request_id, keys if self.serves else (), info)

    def request(self, request_id: str, info: RequestInfo | None) -> ClientRequest:
        """A request, which begins when it is extended."""
        return self._core.request(request_id, (), info)

    def look_up(
        self, request: ClientRequest | None, keys: Sequence[OffloadKey], *, ask: bool = False
    ) -> list[LookupResult]:
        """Presence of each key: RETRY where it is not known yet, and then it comes by itself.

        Keys that were not asked for when their request came are asked for with `ask`, all at once.
        """
        return [LookupResult.MISS] * len(keys) if request is None else self.client.lookup(request, keys, ask)

    def storable(self, request: ClientRequest | None, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], int]:
        """(the keys that are in no row, as far as is known, in order; how many rows can be had now)."""
        new, room = self._core.storable(request, keys), self._core.room
        if len(new) > room:
            self._core.need_rows(len(new))
        return new, room

    def in_rows(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """True for a key of this engine that is in a row, None for one on its way into one, False for others."""
        return list(map(self._core.in_row, keys))

    # -- loads and stores ----------------------------------------------------------------------------------------

    def begin_load(self, request: ClientRequest, groups: Sequence[GPUGroup]) -> TransferJob | None:
        """Begin to copy blocks out of rows leased to the request; None, or a part, if some are not."""
        copy = self._core.begin_load(self._core.job(JobKind.LOAD, groups), request)
        if copy is not None:
            self._loads[request.id] = copy.job_id
        return copy

    def begin_store(self, groups: Sequence[GPUGroup], waits: bool) -> TransferJob | None:
        """Begin to copy blocks into rows; None, or a part of them, if there are too few.

        With `waits` they count once `end_store` was called too.
        """
        copy = self._core.begin_store(self._core.job(JobKind.STORE, groups), waits)
        if copy is not None and waits:
            self._unsure.update((key, copy.job_id) for group in copy.groups for key in group.keys)
        return copy

    def name(self, copy: TransferJob | None) -> tuple[int, str]:
        """The number by which workers report the end of a copy, and the session of its rows."""
        return NO_REPORT if copy is None else copy.job_id, self.client.life

    def end_load(self, request_id: str) -> None:
        """Every worker has copied. The stack process has that from them; without one it counts here."""
        job = self._loads.pop(wire.request_name(request_id), None)
        if job is not None:
            self._core.on_load_end(job)

    def end_store(self, keys: Collection[OffloadKey], reason: int) -> None:
        """Every worker has ended a store, as they report themselves; with an errno as `reason` it is of no use."""
        for job in {self._unsure.pop(key) for key in keys if key in self._unsure}:
            self._core.end_store(job, reason)

    # -- the step ------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Take in what came, send what was decided. False: nothing but this engine's own reset makes leases void."""
        self.client.step()
        core = self._core
        if not core.joined:
            self._join_late()
        if self._forgotten:
            self._end_forgotten()
        if core.is_new:
            self._on_joined()
        elif not core.connected and self._question:
            self._question, self._is_unsure_of_weights = 0, True
        if self._question in core.verdicts:
            verdict = Verdict(core.verdicts.pop(self._question))
            self._question = 0
            if verdict is not Verdict.UNCHANGED:
                self._hold_back(REPLACED[verdict])
        if core.loaded_weights:
            core.loaded_weights = self._is_unsure_of_weights = False
            core.reset()
            self._question = 0
            self._hold_back(REPLACED[Verdict.CHANGED])
            return True
        if not self._held_back and (reason := self._naming.refutation()):
            core.reset()
            self._hold_back(f"the weights are not those that samples of them showed: {reason}")
            return True
        return False

    def _on_joined(self) -> None:
        """The stack process serves this engine from now on, and was not sent what one before was."""
        self._core.is_new = False
        if self._held_back:
            self._core.say(wire.HoldBack(self._held_back))
        if self._is_unsure_of_weights:
            self._is_unsure_of_weights = False
            self._question = self._core.ask_weights()

    def _end_forgotten(self) -> None:
        """Loads that vLLM forgot in a reset have ended once the steps are over in which workers were sent them."""
        self._forgotten_turns -= 1
        if self._forgotten_turns <= 0:
            self.on_reset_flushed()

    def _join_late(self) -> None:
        """Join once the name is known, if that took longer than the start. A contradiction ends as misses."""
        try:
            if self._core.noted and not self._naming.has_begun:
                self._naming.begin(self._core.notes)
            named = self._naming.take()
        except ConfigError as error:
            _log.error("nothing is served to this engine: %s", error)
            return
        if named is not None:
            self._core.join(named.manifest().encode())

    @property
    def has_pending_work(self) -> bool:
        """True while an answer is to come that an idle engine has to take in: of a reset, or figures. Copies end
        without it: workers report them."""
        core = self._core
        if not core.connected:
            return bool(self._forgotten)
        return core.resetting or core.stats_pending or bool(self._question or core.series)

    def wait(self) -> None:
        """Wait a little, whatever comes: a step of an engine without requests costs more than what it takes in."""
        time.sleep(IDLE_SECONDS)

    def reset(self) -> None:
        """Nothing stored before is found from now on, and nothing is found or stored before the stack process has made
        that durable and the workers have said whether their weights are those of the start."""
        self._core.reset()
        self._unsure.clear()
        self._forgotten += self._loads.values()
        self._loads.clear()
        self._forgotten_turns = FORGOTTEN_TURNS
        self._is_unsure_of_weights = not self._core.joined
        self._question = self._core.ask_weights() if self._core.joined else 0

    def on_reset_flushed(self) -> None:
        """The workers have ended every copy from before the last reset. Called by vLLM 0.33."""
        for job in self._forgotten:
            self._core.on_load_end(job)
        self._forgotten.clear()

    def _hold_back(self, reason: str) -> None:
        self._held_back = self._held_back or reason
        if self._core.joined:
            self._core.say(wire.HoldBack(self._held_back))

    # -- the rest ------------------------------------------------------------------------------------------------

    def hint(self, hint: KVHint) -> None:
        """Pass on what an application says of blocks."""
        keys: Sequence[OffloadKey] = getattr(hint, "keys", ())
        seconds: float = getattr(hint, "seconds", 0.0)
        for _, part in wire.split(keys) if keys else [(0, ())]:
            self._core.say(wire.Hint(type(hint).__name__.lower(), wire.Keys.of(part), hint.session, seconds))

    def prompt_computed(self, tokens: int, begun: float, ended: float) -> None:
        """The engine has computed so many tokens of a prompt between two times of `time.monotonic`."""
        now = time.monotonic()
        self._core.say(wire.Computed(tokens, now - begun, now - ended))

    def announce(self, keys: Sequence[OffloadKey]) -> None:
        """Have `take_events` return once more which tiers have these keys."""
        for _, part in wire.split(keys):
            self._core.say(wire.Announce(wire.Keys.of(part)))

    def take_events(self) -> list[OffloadingEvent]:
        """Blocks that became reachable in a tier or ceased to be since the last call."""
        found, self._core.events = self._core.events, []
        return found

    def figures(self, meter: Meter) -> OffloadingConnectorStats | None:
        """The figures that came since the last call; they are asked for once an interval."""
        core, restarts = self._core, self._restarts() - self._restarts_counted
        if not core.series:
            if core.connected and not core.stats_pending and meter.is_due():
                core.ask_stats()
            if not restarts:
                return None
        series, core.series = core.series, []
        self._note(series)
        if restarts:
            self._restarts_counted += restarts
            series.append(wire.MetricSeries(wire.COUNTER, RESTARTS, [], [restarts]))
        return counted(series) if series else None

    def _restarts(self) -> int:
        private = self.identity.private
        return 0 if private is None else private.restarts.count

    def _note(self, series: Sequence[wire.MetricSeries]) -> None:
        for each in series:
            if each.name in (EVICTED, RECOVERED):
                (tier,) = each.labels
                before, count = self._tiers.get(tier, TierStats()), int(each.values[0])
                if each.name == EVICTED:
                    self._tiers[tier] = replace(before, evictions=before.evictions + count)
                else:
                    self._tiers[tier] = replace(before, recovered=count)

    def stats(self) -> StackStats:
        """Figures of every tier, as far as `UnservedRequests` goes by them and they have come."""
        return StackStats(dict(self._tiers), 0)

    def close(self) -> None:
        """Disconnect; the stack process goes on until its last engine has gone."""
        self._naming.close()
        self.client.close()


class Naming:
    """Completes the engine's namespace by its workers' notes, in a thread: it may have to read all weights."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._confirmation = Confirmation()
        self._thread = DaemonPool("kvtier-naming", 1)
        self._named: Future[Namespace] | None = None
        self.has_begun = False

    def begin(self, notes: Sequence[str]) -> None:
        """Begin once all workers have connected."""
        self.has_begun = True
        self._named = self._thread.submit(self._name, list(notes))

    def _name(self, notes: Sequence[str]) -> Namespace:
        measured = replace(self._namespace, layout=measure(self._namespace.layout, notes))
        return asyncio.run(refine(measured, notes, self._confirmation))

    def take(self, timeout_seconds: float = 0.0) -> Namespace | None:
        """The namespace, once; None as long as it is not known, and if the machine does not say what it is.

        Raises ConfigError if the workers differ, or nothing identifies their weights.
        """
        if self._named is None or wait((self._named,), timeout_seconds).not_done:
            return None
        named, self._named = self._named, None
        try:
            return named.result()
        except (OSError, ResourceError) as error:
            _log.error("nothing is served to this engine: %s", error)
            return None

    def refutation(self) -> str:
        """The reason why samples of the weights were wrong; empty as long as they may be right."""
        return self._confirmation.refutation()

    def close(self) -> None:
        """End the thread."""
        self._confirmation.close()
        self._thread.shutdown()
