"""The stack in a process of its own, as `KVTierManager` uses it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from itertools import islice

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.client.connection import OPEN_SECONDS, Identity
from kvtier.client.engine import SchedulerClient
from kvtier.client.request import ClientRequest, hint_item
from kvtier.engines.digests import Confirmation
from kvtier.engines.vllm.compat import LOGGER
from kvtier.engines.vllm.identity import measure, refine
from kvtier.engines.vllm.metrics import INTERVAL_SECONDS, counted
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
from kvtier.types.keys import CPU, JobId, Medium, OffloadKey
from kvtier.types.namespace import Namespace
from kvtier.types.requests import RequestInfo

IDLE_SECONDS = 0.002
TURN_SECONDS = 0.05
"""How often the end of a step that has nothing to say takes in what came: no lookup and no store waits for that."""
FIGURES_SECONDS = 10.0
"""How long an engine without requests steps for the last figures, if the stack process does not send them."""
IDENTITY_SECONDS = 10.0
"""How long a start waits for the name of the weights, which takes as long as reading them, the first time."""
EVICTED, RECOVERED = "kvtier_evicted_blocks_total", "kvtier_recovered_blocks"
OPTIONAL_SECONDS = 30.0
"""How long a start waits for workers where the stack process is not required: they have connected, or cannot."""
CLOSE_GRACE_SECONDS = 1.0
"""What the answer of a stack process that has written back may take, beside its closing time: vLLM waits for five
seconds in all."""
REACHABLE_MAX = 1 << 20
"""Blocks of a tier that are remembered as reachable, where vLLM publishes events; each takes about 120 bytes."""
KEYS_AT_ONCE = 512
"""Keys of events published in one turn, unless ever more come. Each takes vLLM about 8 us."""
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
        self._close_seconds = plan.stack.close_timeout_seconds + CLOSE_GRACE_SECONDS
        self.measures_prefill = plan.stack.prefill_tokens_per_second == "measured"
        self._core = self.client.core
        self._naming = Naming(plan.namespace)
        self._is_refuted = False
        self._question = 0
        self._is_unsure_of_weights = False
        self._unsure: dict[OffloadKey, JobId] = {}
        self._tiers: dict[str, TierStats] = {}
        self._loads: dict[str, JobId] = {}
        self._forgotten: list[JobId] = []
        self._forgotten_turns = 0
        self._restarts_counted = 0
        self._figures_until = self._figures_at = self._turn_at = 0.0
        self._figures_are_old = True
        self._reachable = ReachableBlocks()
        self._life = self.client.life
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

    def look_up_one(self, request: ClientRequest | None, key: OffloadKey) -> LookupResult:
        """Presence of a key, as `look_up`: vLLM asks for each alone."""
        if request is not None and key in request.leased:
            return LookupResult.HIT
        return self.look_up(request, (key,))[0]

    def storable(self, request: ClientRequest | None, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], int]:
        """(the keys that are in no row, as far as is known, in order; how many rows can be had now)."""
        new, room = self._core.storable(request, keys), self._core.room
        if len(new) > room:
            self._core.need_rows(len(new))
        return new, room

    def in_rows(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """True for a key that is in a row, None for one of this engine on its way into one, False for others.

        For engines that publish events: what is in a row is known from those.
        """
        rows = self._reachable.in_rows
        return [key in rows or (None if self._core.in_row(key) is None else False) for key in keys]

    # -- loads and stores ----------------------------------------------------------------------------------------

    def begin_load(self, request: ClientRequest, groups: Sequence[GPUGroup]) -> TransferJob | None:
        """Begin to copy blocks out of rows leased to the request; None, or a part, if some are not."""
        copy = self._core.begin_load(_job(JobKind.LOAD, groups), request)
        if copy is not None:
            self._loads[request.id] = copy.job_id
        return copy

    def begin_store(self, groups: Sequence[GPUGroup], waits: bool) -> TransferJob | None:
        """Begin to copy blocks into rows; None, or a part of them, if there are too few.

        With `waits` they count once `end_store` was called too.
        """
        copy = self._core.begin_store(_job(JobKind.STORE, groups), waits)
        if copy is not None and waits:
            self._unsure.update((key, copy.job_id) for group in copy.groups for key in group.keys)
        return copy

    def name(self, copy: TransferJob | None) -> tuple[int, str]:
        """The number by which workers report the end of a copy, and the session of its rows."""
        return NO_REPORT if copy is None else copy.job_id, self.client.life

    def end_load(self, request_id: str) -> None:
        """Every worker has copied. The stack process has that from them; without one it counts here."""
        job = self._loads.pop(wire.bounded_text(request_id), None)
        if job is not None:
            self._core.on_load_end(job)

    def end_store(self, keys: Collection[OffloadKey], reason: int) -> None:
        """Every worker has ended a store, as they report themselves; with an errno as `reason` it is of no use."""
        for job in {self._unsure.pop(key) for key in keys if key in self._unsure}:
            self._core.end_store(job, reason)

    # -- the step ------------------------------------------------------------------------------------------------

    def end_step(self) -> bool:
        """A `turn`, unless there is nothing to send and one was not long ago."""
        due = self._core.out or self._forgotten or time.monotonic() >= self._turn_at or self.has_pending_work
        return bool(due) and self.turn()

    def turn(self) -> bool:
        """Take in what came, send what was decided. False: nothing but this engine's own reset makes leases void."""
        self._turn_at = time.monotonic() + TURN_SECONDS
        self.client.turn()
        core = self._core
        core.ended.clear()  # vLLM goes by the reports of its workers
        self._figures_are_old = self._figures_are_old or bool(core.requests)
        self._take_in_events()
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
                core.hold_back(REPLACED[verdict])
        if core.loaded_weights:
            core.loaded_weights = self._is_unsure_of_weights = False
            core.reset()
            self._question = 0
            core.hold_back(REPLACED[Verdict.CHANGED])
            return True
        if reason := self._refutation():
            core.reset()
            core.hold_back(reason)
            self._is_refuted = True
            return True
        if self._is_refuted and core.serves and not core.fault:
            self._is_refuted = False
            self._naming.accept()  # the reset is durable
        return False

    def _refutation(self) -> str:
        """The reason to distrust what was stored where samples of the weights were wrong; empty once that was done."""
        return "" if self._core.held_back else self._naming.refutation()

    def _take_in_events(self) -> None:
        """Take in events; once the connection has ended, nothing that they named is reachable any more."""
        core = self._core
        self._reachable.begin_turn()
        if core.events:
            self._reachable.record(core.events)
            core.events = []
        if not core.connected or self._life != self.client.life:
            self._life = self.client.life
            self._reachable.clear()

    def _on_joined(self) -> None:
        """The stack process serves this engine from now on, and was not sent what one before was."""
        self._core.is_new = False
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
        """True while an answer is to come that an idle engine has to take in: of a reset, or figures; or while there
        are events that it has yet to publish. Copies end without it: workers report them."""
        core = self._core
        if self._reachable.has_more:
            return True
        if not core.connected:
            return bool(self._forgotten)
        figures = core.stats_pending > 0 and time.monotonic() < self._figures_until
        return core.resetting or figures or bool(self._question or core.series)

    def wait(self) -> None:
        """Send what waits, then wait a little, whatever comes: a step of an engine without requests costs more than
        what it takes in."""
        self.client.rest()
        time.sleep(IDLE_SECONDS)

    def rest(self) -> bool:
        """Give back the rows that are lent: there is nothing to do. True if the engine has to step for figures.

        They are asked for here, so that the next step has them. What tiers write after that is not in them.
        """
        if not (self._core.connected and self._figures_are_old):
            self.client.rest()
            return False
        self._figures_are_old = False
        self._core.ask_stats(rests=True)
        self._figures_until = time.monotonic() + FIGURES_SECONDS
        self.wait()
        return True

    def reset(self) -> None:
        """Nothing stored before is found from now on, and nothing is found or stored before the stack process has made
        that durable and the workers have said whether their weights are those of the start."""
        self._core.reset()
        self._figures_are_old = True
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

    # -- the rest ------------------------------------------------------------------------------------------------

    def hint(self, hint: KVHint) -> None:
        """Pass on what an application says of blocks."""
        keys: Sequence[OffloadKey] = getattr(hint, "keys", ())
        for _, part in wire.split(keys) if keys else [(0, ())]:
            self._core.say(hint_item(hint, part))

    def prompt_computed(self, tokens: int, begun: float, ended: float) -> None:
        """The engine has computed so many tokens of a prompt between two times of `time.monotonic`."""
        now = time.monotonic()
        self._core.say(wire.Computed(tokens, now - begun, now - ended))

    def announce(self, keys: Sequence[OffloadKey]) -> None:
        """Have `take_events` return once more which tiers have these keys."""
        for _, part in wire.split(keys):
            self._core.say(wire.Announce(wire.Keys.of(part)))

    def take_events(self) -> list[OffloadingEvent]:
        """Blocks that became reachable in a tier or ceased to be since the last call, the first of many."""
        return self._reachable.take()

    def left_elsewhere(self, removals: Iterable[OffloadingEvent]) -> list[OffloadingEvent]:
        """The blocks that one lower tier has removed and another one has, as removed and stored.

        That is known here. To ask the process would have no end: its answer names removals as well.
        """
        return [each for event in removals for each in self._reachable.elsewhere(event)]

    def figures(self) -> OffloadingConnectorStats | None:
        """The figures that came since the last call; they are asked for once an interval."""
        core, now = self._core, time.monotonic()
        if not core.series:
            if now < self._figures_at:
                return None
            if core.connected and not core.stats_pending:
                core.ask_stats()
        self._figures_at = now + INTERVAL_SECONDS
        restarts = self._restarts() - self._restarts_counted
        if not (core.series or restarts):
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
        """Leave. A private stack process that serves no other engine writes back and ends before, if there is time.

        Samples refuted since the last step, as of an idle engine, are taken for refuted by the next start too: that it
        is durable is not answered here.
        """
        reason = self._refutation()
        self._naming.close()
        left = self.client.say_goodbye(self._close_seconds, reason)
        if left is not None and left.dropped:
            _log.warning("closed: %d blocks were dropped", left.dropped)
        self.client.close()


def _job(kind: JobKind, groups: Sequence[GPUGroup]) -> TransferJob:
    """A job whose copy alone has a number."""
    return TransferJob(JobId(0), kind, tuple(groups))


class ReachableBlocks:
    """The blocks that events named as reachable in a tier, and the events themselves until they are taken, in order.

    A stack process that has ended says nothing of its blocks any more: `clear` makes the events of their removal.
    Another one begins with an event of each block that it has. `has_more`: events were left by the last `take`;
    `in_rows`: those in the CPU tier.
    """

    def __init__(self) -> None:
        self.has_more = False
        self.in_rows: Collection[OffloadKey] = ()
        self._left, self._times = KEYS_AT_ONCE, 1
        self._waiting = self._waited = 0
        self._events: deque[OffloadingEvent] = deque()
        self._blocks: dict[tuple[str, Medium], dict[OffloadKey, None]] = {}

    def record(self, events: Iterable[OffloadingEvent]) -> None:
        """Keep events. Beyond `REACHABLE_MAX` blocks of a tier the oldest are not removed by `clear`."""
        for event in events:
            self._append(event)
            blocks = self._blocks.setdefault((event.tier, event.medium), {})
            if event.medium == CPU:
                self.in_rows = blocks
            if event.removed:
                for key in event.keys:
                    blocks.pop(key, None)
            else:
                blocks.update(dict.fromkeys(event.keys))
                for key in list(islice(blocks, max(0, len(blocks) - REACHABLE_MAX))):
                    del blocks[key]

    def clear(self) -> None:
        """No block is reachable any more, in any tier."""
        for (tier, medium), blocks in self._blocks.items():
            if blocks:
                self._append(OffloadingEvent(tuple(blocks), medium, True, tier))
        self._blocks.clear()
        self.in_rows = ()

    def _append(self, event: OffloadingEvent) -> None:
        self._events.append(event)
        self._waiting += len(event.keys)

    def elsewhere(self, event: OffloadingEvent) -> list[OffloadingEvent]:
        """The blocks of an event that another lower tier has, as removed and stored."""
        found = []
        for (tier, medium), blocks in self._blocks.items():
            keys = tuple(key for key in event.keys if key in blocks) if medium != CPU and tier != event.tier else ()
            if keys:
                found += [OffloadingEvent(keys, medium, removed, tier) for removed in (True, False)]
        return found

    def begin_turn(self) -> None:
        """Begin a turn, in which `take` may return as much as in the one before."""
        self._left = KEYS_AT_ONCE * self._times

    def take(self) -> list[OffloadingEvent]:
        """The next events, of `KEYS_AT_ONCE` keys in a turn: each takes the engine's thread some time.

        When a call leaves some and the next one more, as many come all the time: it is twice as many from then on,
        until none is left.
        """
        taken = []
        while self._events and self._left:
            event = self._events.popleft()
            if len(event.keys) > self._left:
                self._events.appendleft(replace(event, keys=event.keys[self._left :]))
                event = replace(event, keys=event.keys[: self._left])
            self._left -= len(event.keys)
            self._waiting -= len(event.keys)
            taken.append(event)
        self.has_more = bool(self._events)
        if not self.has_more:
            self._times = 1
        elif self._waiting > self._waited > 0:
            self._times *= 2
        self._waited = self._waiting
        return taken


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

    def accept(self) -> None:
        """Have the next start take the files for what they are: what samples of them had named is reset for good."""
        self._confirmation.accept()

    def close(self) -> None:
        """End the thread."""
        self._confirmation.close()
        self._thread.shutdown()
