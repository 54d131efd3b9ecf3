"""Base of the two faces of a stack: the life of one open stack, and every call that only its memory answers.

`TierStack` is the face of asyncio programs, `EngineStack` that of synchronous engines. Each drives the control plane
from one thread and the tiers in one event loop; for a `TierStack` both are the caller's own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence, Sized
from functools import partial
from operator import methodcaller

import numpy as np

from kvtier.aio.process_guard import ProcessGuard
from kvtier.control.jobs import Arrival, PresenceQuery, TierJob
from kvtier.errors import IntegrityError, UsageError
from kvtier.stack import shutdown
from kvtier.stack.assembly import StackParts, assemble
from kvtier.stack.guard import GuardedCalls, answers_of, guard_step
from kvtier.stack.joining import reset_tiers
from kvtier.stack.lookups import Lookups
from kvtier.stack.open_stack import OpenStack
from kvtier.stack.request import ServesRequests, StackRequest
from kvtier.stack.shutdown import CloseReport
from kvtier.stack.watching.operator_log import OperatorLog, TierWatch
from kvtier.stack.watching.stats import StackStats, collect
from kvtier.tier.contract import Clock
from kvtier.tier.shared_epoch import fresh_epoch
from kvtier.types.checks import (
    check_hint,
    check_keys,
    check_number,
    check_text,
    check_timeout,
    check_types,
    check_whole,
    outside,
)
from kvtier.types.events import OffloadingEvent
from kvtier.types.geometry import Geometry
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.hints import HintResult, KVHint
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import GROUP_BYTES, JobId, OffloadKey, key_group

logger = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
"""How long after its deadline a job may take to end, and copies that were in flight then to be recorded."""

BlockGroup = tuple[Sequence[OffloadKey], Sequence[int]]
"""Keys of one KV cache group, and their GPU blocks: `block_size_factor` consecutive ids for each key."""


class StackCore(ServesRequests):
    """An open stack, driven from one thread. The base of `TierStack` and `EngineStack`."""

    def __init__(self, parts: StackParts) -> None:
        self.close_report: CloseReport | None = None
        self._parts = parts
        self._settings = parts.settings
        self._owner = ProcessGuard()
        self._assembled: OpenStack | None = None
        self._clock: Clock = time.monotonic
        self._next_job = 1
        self._closing = False
        self._drain_until = 0.0
        self._lookups = Lookups()
        self._jobs: dict[JobId, TransferJob] = {}
        self._overdue_at = math.inf
        self._overdue: set[JobId] = set()
        self._copies_then: set[JobId] = set()
        self._closing_since = 0.0
        self._reset_failed = False

    def __del__(self) -> None:
        if self._assembled is not None and self.close_report is None and not self._owner.is_forked_child:
            warnings.warn(f"unclosed {shutdown.UNCLOSED.format(self)}", ResourceWarning, stacklevel=1, source=self)

    # -- what a face provides ------------------------------------------------------------------------------------

    @abstractmethod
    def _advance(self) -> None:
        """Send what the control plane decided. Part of a step."""

    @abstractmethod
    def _stop_dispatcher(self) -> None:
        """Have the dispatcher begin no job any more."""

    @abstractmethod
    def _deliver(self, batch: Sequence[Arrival]) -> None:
        """Pass on what arrived. Called in the loop."""

    # -- jobs ----------------------------------------------------------------------------------------------------

    def job(self, kind: JobKind, groups: Sequence[GPUGroup], timeout_seconds: float | None = None) -> TransferJob:
        """A job with a fresh id and a deadline from now; the stack's own default when no timeout is given."""
        self._opened()
        check_types("a job", (kind, JobKind), (groups, tuple | list))
        if timeout_seconds is not None:
            check_timeout(timeout_seconds)
        else:
            settings = self._settings
            loads = kind is JobKind.LOAD
            timeout_seconds = settings.load_timeout_seconds if loads else settings.store_timeout_seconds
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
        return self.job(kind, whole_groups(keys, gpu_blocks, groups, self._opened().geometry), timeout_seconds)

    def _register(self, assembled: OpenStack, job: TransferJob, request: StackRequest | None) -> None:
        """Check a job; `_submit` it next."""
        check_job(job, assembled.geometry)
        if request is not None and type(request) is not StackRequest:
            check_types("a job's request", (request, StackRequest))
        if job.job_id in self._jobs:
            raise UsageError(f"job {job.job_id} is in flight already")
        self._jobs[job.job_id] = job
        self._overdue.discard(job.job_id)  # an earlier job had this id
        for copier in assembled.fenced:
            copier.fence()
        if job.deadline is not None:
            self._overdue_at = min(self._overdue_at, job.deadline + GRACE_SECONDS)

    @guard_step
    def _submit(self, job: TransferJob, request: StackRequest | None) -> None:
        assert self._assembled is not None
        self._assembled.plane.submit(job, self._clock(), None if request is None else request.id)
        self._carry_out()

    @guard_step
    def cancel(self, job_id: JobId) -> None:
        """End a job early; its result still comes, after the copies in flight."""
        check_whole("a job's id", job_id)
        self._opened().plane.cancel(job_id, self._clock())
        self._carry_out()

    # -- from memory ---------------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        """The layout in rows of the stack's alignment."""
        return self._opened().geometry

    @guard_step
    def locate(self, keys: Sequence[OffloadKey]) -> list[str | None]:
        """For each key the name of the highest tier that holds it, or None. Synchronous, from memory."""
        assembled = self._opened()
        check_keys(keys, assembled.geometry.num_groups)
        return assembled.plane.locate(keys, self._clock())

    @guard_step
    def hint(self, hint: KVHint) -> HintResult:
        """Follow what the application says of blocks: `Retain`, `Pin`, `Prefetch`, `Demote` or `Release`.

        Returns at once: how many blocks it is followed for, and why others are left as they are, which is no error.
        Raises UsageError for a hint that is none, or whose values are of wrong types.
        """
        assembled = self._opened()
        check_hint(hint, assembled.geometry.num_groups)
        result = assembled.plane.hint(hint, self._clock())
        self._carry_out()
        return result

    @property
    def engine(self) -> EngineCalls:
        """The calls for engine adapters alone."""
        return EngineCalls(self)

    def stats(self) -> StackStats:
        """Figures of every tier since the stack opened; also after it closed."""
        self._owner.check()
        if self._assembled is None:
            raise UsageError("the stack was never opened")
        return collect(self._assembled, self._clock(), self._errors + self._watch.errors)

    @guard_step
    def take_events(self) -> list[OffloadingEvent]:
        """Take the blocks that became reachable or ceased to be since the last call, in order."""
        return self._opened().plane.take_events()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the state machine's sums agree. For tests and for suspicions."""
        self._owner.check()
        if self._assembled is not None:
            self._assembled.plane.check_integrity()

    # -- driving the control plane -------------------------------------------------------------------------------

    def _start(self, jobs: Sequence[TierJob], queries: Sequence[PresenceQuery]) -> None:
        """In the loop: begin what was decided, in its order."""
        assert self._assembled is not None
        if jobs:
            self._assembled.dispatcher.submit(jobs)
        for query in queries:
            self._lookups.begin(self._assembled.dispatcher.queues[query.position].tier, query, self._deliver)

    def _begin_reset(self) -> Callable[[], Awaitable[object]]:
        """New weights, in memory. What is returned is called in the loop, and then awaited: it makes that durable."""
        assembled = self._opened()
        if self._reset_failed:  # repeated for the same weights, it must not count: others may have come to that number
            assembled.plane.control.epoch = fresh_epoch(assembled.plane.control.epoch) - 1
            self._reset_failed = False
        epoch = self._reset_plane()
        control, joining = assembled.plane.control, assembled.joining
        if joining is not None and control.joining:
            return partial(joining.reset, control.resets)
        down = [lower.position for lower in control.lowers if lower.spec.held_back]
        tiers = [queue.tier for position, queue in enumerate(assembled.dispatcher.queues) if position not in down]

        began = self._clock()

        def make_durable() -> asyncio.Future[None]:
            resets = reset_tiers(tiers, epoch)
            resets.add_done_callback(self._reset_ended)
            resets.add_done_callback(partial(self._log.reset, epoch, began))
            return resets

        return make_durable

    def _reset_ended(self, ended: asyncio.Future[None]) -> None:
        self._reset_failed = self._reset_failed or ended.cancelled() or ended.exception() is not None

    @guard_step
    def _reset_plane(self) -> int:
        assert self._assembled is not None
        return self._assembled.plane.reset(self._clock())

    @guard_step
    def _send_reset(self) -> None:
        self._advance()

    @guard_step
    def _abandon(self, assembled: OpenStack) -> shutdown.Abandoned:
        """Give up what is dirty: draining is over."""
        return shutdown.abandon(assembled)

    def _draining(self) -> Iterator[None]:
        """While closing, drain lower tiers until `_drain_until`. Yields where the face waits for progress."""
        self._closing_since = self._clock()
        self._end_stores()
        while self._clock() < self._drain_until and not self._is_drained():
            yield

    @guard_step
    def _end_stores(self) -> None:
        assert self._assembled is not None
        self._assembled.plane.close(self._clock())
        self._advance()

    @guard_step
    def _is_drained(self) -> bool:
        """Write back what is dirty as far as limits allow. True once nothing is in flight."""
        assert self._assembled is not None
        plane = self._assembled.plane
        if plane.dirty_rows or not plane.idle:
            plane.drain(self._clock())
            self._advance()
        return plane.idle

    def _report_closed(self, assembled: OpenStack, abandoned: shutdown.Abandoned) -> None:
        """Everything is closed: keep what that cost, with a line in the log."""
        self.close_report = shutdown.report(assembled, abandoned)
        self._log.closed(self.close_report, self._closing_since)

    # -- exceptions ----------------------------------------------------------------------------------------------

    async def _open_tiers(self) -> None:
        """Open the tiers, in the loop."""
        self._log = OperatorLog(logging.getLogger(self._parts.operator_log), self._clock)
        self._watch = TierWatch(self._log, self._clock)
        assembled = await assemble(self._parts, self._clock, self._deliver)
        try:
            await self._open_stats_socket(assembled)
            self._assembled = assembled
            control = assembled.plane.control
            self._log.opened(control.cpu_spec)
            waits = assembled.joining is not None
            reason = "what its blocks belong to is not known yet" if waits else "its root is damaged"
            self._watch.look(control.lowers, reason, logging.INFO if waits else logging.WARNING)
        except BaseException:
            await shutdown.end_tiers(assembled, self._settings.tier_close_seconds)
            raise

    async def _open_stats_socket(self, assembled: OpenStack) -> None:
        """Serve the figures if a path is given. The socket does not keep a stack alive that its program forgot."""
        if self._parts.stats_socket:
            from kvtier.stack.watching.stats_socket import StatsSocket

            stack = weakref.ref(self)
            served = StatsSocket(self._parts.stats_socket, lambda: one.stats() if (one := stack()) else None)
            assembled.stats_socket = served
            await served.open()

    def _give_up(self, error: BaseException) -> None:
        assembled = self._assembled
        assert assembled is not None
        failed, dispatcher = assembled.plane, assembled.dispatcher
        assembled.plane = answers_of(failed, self._jobs, lambda: dispatcher.stopped and not dispatcher.copies())
        logger.critical("the control plane has failed: every request ends as a miss from now on", exc_info=error)
        self._stop_dispatcher()
        self._advance()
        failed.give_up()

    def _look_for_overdue(self, now: float) -> None:
        """Raise IntegrityError for jobs that have not ended in time, and wait for no copy: nothing else would end them.

        Part of a step.
        """
        assert self._assembled is not None
        times = {number: job.deadline + GRACE_SECONDS for number, job in self._jobs.items() if job.deadline is not None}
        overdue = {number for number, time in times.items() if time <= now}
        self._overdue_at = now + GRACE_SECONDS if overdue else min(times.values(), default=math.inf)
        copies = self._assembled.dispatcher.copies()
        if self._overdue.isdisjoint(overdue):  # none of those before: these may wait for any copy
            self._overdue, self._copies_then = overdue, copies
        elif self._copies_then:  # the end of a copy may be on its way: then one look more
            self._overdue, self._copies_then = self._overdue & overdue, self._copies_then & copies
        elif not self._failed:
            raise IntegrityError("a job did not end by its deadline")


class EngineCalls(GuardedCalls):
    """`engine` of a stack: an adapter's facts about its engine, and what it needs beyond lookups and jobs."""

    _driver: StackCore

    @property
    def follows_requests(self) -> bool:
        """True if the policy of a tier follows requests, or with `curves`: the keys of a request have a use."""
        return self._driver._opened().plane.uses is not None

    @guard_step
    def prompt_computed(self, tokens: int, begun: float, ended: float) -> None:
        """Record that the engine has computed these tokens of a prompt, between two times by `time.monotonic`.

        `worth_loading` goes by that where the stack file says `prefill_tokens_per_second: measured`; less than a block
        says nothing of the speed, nor does a clock that stood still. Raises UsageError for a time that goes back.
        """
        check_number("the tokens of a prompt", tokens, least=0)
        check_number("when a prompt began", begun)
        check_number("when a prompt ended", ended, least=begun)
        stack = self._driver
        blocks = tokens / stack._parts.namespace.layout.tokens_per_offloaded_block(0)
        if stack._settings.measures_prefill and blocks >= 1 and ended > begun:
            stack._opened().plane.choice.on_compute(blocks, begun, ended)

    @guard_step
    def hold_back(self, reason: str) -> None:
        """Have no lower tier load or store from here on, for the life of the stack; `reason` is for the log.

        For weights that were replaced in a running engine: `reset` the stack, then call this. Transfers in flight end
        as usual. Loads and reservations that wait for a lower tier end with misses.
        """
        stack = self._driver
        assembled = stack._opened()
        check_text("the reason", reason)
        if assembled.joining is not None:
            assembled.joining.stop()
        assembled.plane.hold_back(stack._clock())
        stack._watch.look(assembled.plane.control.lowers, reason)
        stack._carry_out()

    @guard_step
    def announce(self, keys: Sequence[OffloadKey]) -> None:
        """Have `take_events` return once more which tiers have these keys: each is removed and then stored.

        For routers that have forgotten it. Shared tiers have no events.
        """
        assembled = self._driver._opened()
        check_keys(keys, assembled.geometry.num_groups)
        assembled.plane.announce(keys, self._driver._clock())

    def storable(self, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], int]:
        """(the keys that are in no row and on their way into none, in their order; how many rows can be had now)."""
        assembled = self._driver._opened()
        check_keys(keys, assembled.geometry.num_groups)
        cpu = assembled.plane.control.cpu
        if self._driver._failed:
            return [], 0
        return [key for key in dict.fromkeys(keys) if key not in cpu.directory], cpu.available


def whole_groups(
    keys: Sequence[OffloadKey], gpu_blocks: Sequence[int], groups: Sequence[BlockGroup], geometry: Geometry
) -> list[GPUGroup]:
    """The groups of a job for whole blocks. Raises UsageError for blocks that contradict the layout."""
    check_types("a job", (keys, Sized), (gpu_blocks, Sized), (groups, Sized))
    if not len(groups):
        groups = [(keys, gpu_blocks)]
    elif len(keys) or len(gpu_blocks):
        raise UsageError("blocks are named by keys and gpu_blocks or by groups, not by both")
    check_pairs(groups, geometry.num_groups)
    factor = geometry.factor
    found = []
    for group_keys, blocks in groups:
        if len(blocks) != len(group_keys) * factor:
            raise UsageError(f"{len(group_keys)} keys of {factor} GPU blocks each, but {len(blocks)} GPU blocks")
        if group_keys:
            found.append(GPUGroup(key_group(group_keys[0]), tuple(group_keys), GPURuns.whole(blocks, factor)))
    return found


def check_job(job: TransferJob, geometry: Geometry) -> None:
    """Raise UsageError for a job that names groups, blocks or sub-blocks that do not exist.

    Nothing below checks that again, but the bounds of memory and disks: a GPU block beyond the tensors fails its job.
    """
    if type(job) is not TransferJob or type(job.kind) is not JobKind or type(job.groups) is not tuple:
        check_types("a job", (job, TransferJob))
        check_types("a job", (job.kind, JobKind), (job.groups, tuple | list))
    if type(job.job_id) is not int or job.job_id < 0:
        check_whole("a job's id", job.job_id)
    if job.deadline is not None and not (type(job.deadline) is float and math.isfinite(job.deadline)):
        check_number("the deadline of a job", job.deadline)
    for group in job.gpu_groups:
        _check_group(group, geometry)


def check_pairs(groups: object, num_groups: int) -> None:
    """Raise UsageError unless these are pairs: keys of one group, and the numbers of their GPU blocks."""
    check_types("the groups of a job", (groups, tuple | list))
    for pair in groups:  # type: ignore[attr-defined]  # checked just now
        check_types("a group of a job", (pair, tuple | list))
        if len(pair) != 2:
            raise UsageError("a group of a job is a pair: keys, and their GPU blocks")
        check_keys(pair[0], num_groups)
        check_types("the GPU blocks of a group", (pair[1], Sized))


def _check_group(group: GPUGroup, geometry: Geometry) -> None:
    runs = group.runs
    if type(group.group) is not int or type(group.keys) is not tuple or type(runs) is not GPURuns:
        check_types("a GPUGroup", (group.group, int), (group.keys, tuple | list), (runs, GPURuns))
    for ids in (runs.blocks, runs.firsts, runs.counts, runs.gpu_blocks):
        if type(ids) is not np.ndarray or ids.dtype != np.int64 or ids.ndim != 1:
            raise UsageError("the numbers of GPURuns are one-dimensional arrays of int64")
    if not 0 <= group.group < geometry.num_groups:
        raise UsageError(f"there is no group {group.group} among {geometry.num_groups}")
    suffix = group.group.to_bytes(GROUP_BYTES, "big")
    if not {bytes}.issuperset(map(type, group.keys)):
        check_keys(group.keys, geometry.num_groups)
    if not all(map(methodcaller("endswith", suffix), group.keys)):
        raise UsageError(f"group {group.group}: it names a key of another group")
    if outside(runs.gpu_blocks, 1 << 62) is not None:
        raise UsageError(f"group {group.group}: a run names a negative GPU block")
    if runs.all_whole(len(group.keys), geometry.factor):
        return
    for what, values, most in (
        ("offloaded block", runs.blocks, len(group.keys) - 1),
        ("first sub-block", runs.firsts, geometry.factor),
        ("number of sub-blocks", runs.counts, geometry.factor),
        ("end of a run", runs.firsts + runs.counts, geometry.factor),
    ):
        wrong = outside(values, most + 1)
        if wrong is not None:
            raise UsageError(f"group {group.group}: {what} {wrong} is outside 0..{most}")
