"""An engine of one process at a stack process: jobs of any size, lookups without a request, questions with an answer.

A call of a step waits for nothing but the first lookup of a step, for a millisecond. The calls that say so wait for an
answer of the stack process, for a second at most.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvtier.aio.eventfd import EventFD
from kvtier.client.connection import Connected, Identity
from kvtier.client.engine import LOOKUP_WAIT_SECONDS, SchedulerClient
from kvtier.client.reconnection import Reconnection
from kvtier.client.request import ClientRequest, hint_item
from kvtier.client.transfers import Transfers
from kvtier.client.worker import WorkerClient
from kvtier.errors import ResourceError
from kvtier.service import wire
from kvtier.service.channel import Channel
from kvtier.service.wire import UNKNOWN
from kvtier.tier.contract import LoadStore, LookupResult
from kvtier.types.events import EventQueue, OffloadingEvent
from kvtier.types.geometry import Geometry
from kvtier.types.hints import HintRefusal, HintResult, KVHint
from kvtier.types.jobs import BlockOutcome, DropReason, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey

if TYPE_CHECKING:
    import torch

COPIES_SECONDS = 10.0
"""How long closing waits for copies in flight."""
EVENTS_MAX = 65536
"""Events that are kept until they are taken (`EventQueue`)."""
LOOKS_NAME = "\0looks"
"""The request of lookups that name none."""
REFUSALS = {str(each): each for each in HintRefusal}
"""By name. Those of a later release count as STOPPED."""


class StackClient(SchedulerClient):
    """See the module's docstring. `geometry` is the layout in the process's rows, `transfers` the engine's jobs."""

    has_own_worker = True

    def __init__(self, identity: Identity, tensors: Sequence[torch.Tensor], gpu: LoadStore) -> None:
        """Connect and be served; `gpu` is the tier that copies. Raises ResourceError, ConfigError as `connect`."""
        self._copied: deque[tuple[JobId, Sequence[BlockOutcome]]] = deque()
        self._copy_ended = EventFD()
        self.events = EventQueue(EVENTS_MAX)
        self._has_submitted = False
        self._events_begun = False
        self._answered: list[OffloadKey] = []
        self._unfinished, self._unfinished_before = set[OffloadKey](), set[OffloadKey]()
        try:
            self._worker = WorkerClient(identity, tensors, gpu)
        except BaseException:
            self._close_event()
            raise
        self._worker.report = self._on_copied
        try:
            super().__init__(identity)
        except BaseException:
            self._worker.close()
            self._close_event()
            raise
        self.geometry = Geometry(identity.namespace.layout, self.welcome.alignment)
        self.transfers = Transfers(self.core, self._begin_copy, self.geometry, self.welcome.num_rows)
        self._looks = self.core.request(LOOKS_NAME)
        try:
            self.wait_joined()
        except BaseException:
            self.close()
            raise

    def _on_copied(self, job: JobId, outcomes: Sequence[BlockOutcome]) -> None:
        """In the worker's thread: a deque append is atomic, and the engine's thread drains it."""
        self._copied.append((job, outcomes))
        self._copy_ended.signal()

    def _begin_copy(self, copy: TransferJob) -> None:
        self._worker.begin(copy, self.life)

    def _use(self, connected: Connected) -> None:
        super()._use(connected)
        self._events_begun = False
        self._watch(self._channel)

    def _lose(self) -> None:
        super()._lose()
        self._watch(self._reconnection)

    def _watch(self, connection: Channel | Reconnection) -> None:
        self._idle = select.poll()
        self._idle.register(connection, select.POLLIN)
        self._idle.register(self._copy_ended.fd, select.POLLIN)

    def begin_job(self, job: TransferJob, request: ClientRequest | None) -> None:
        """Begin a job of any size; its result comes out of a later `step`, which has work now."""
        self.transfers.submit(job, request, time.monotonic())
        self._has_submitted = True

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> list[JobResult]:
        """Once per engine step: take in what came, begin parts of jobs, send, return the jobs that ended."""
        self._forget_answers()
        self._has_submitted = False
        self.turn()
        results, self.transfers.results = self.transfers.results, []
        return results

    def _receive(self) -> None:
        super()._receive()
        core = self.core
        for event in core.events:
            self.events.append(event)
        core.events = []
        while self._copied:
            core.on_copied_alone(*self._copied.popleft())
        self.transfers.advance(time.monotonic())

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until `step` has work, or the time is over. True unless the time was over first."""
        return bool(self.transfers.results or self._has_submitted) or self._wait_for_more(timeout_seconds)

    def _wait_for_more(self, timeout_seconds: float) -> bool:
        """Wait as `wait` does, whatever `step` has to return already."""
        if self._later or self._copied:
            return True
        due = self.transfers.next_deadline - time.monotonic()
        found = self._poll_within(self._idle, min(due, timeout_seconds))
        self._copy_ended.clear()  # here alone: a step takes in what came, whatever was signalled
        return found or due <= timeout_seconds

    def wake(self) -> None:
        """From any thread: have `wait` return."""
        self._copy_ended.signal()

    @property
    def _rests(self) -> bool:
        """Beside lookups that name no request there is none, and no store: a load alone needs no row ahead."""
        return not self.transfers.stores_soon(len(self.core.requests) - 1)

    @property
    def has_pending_work(self) -> bool:
        """True while a job or a reset has not ended."""
        return bool(self.transfers.in_flight or self.transfers.results or self._later or self.core.busy)

    # -- lookups -------------------------------------------------------------------------------------------------

    def look(self, keys: Sequence[OffloadKey], ask: bool) -> list[LookupResult]:
        """Presence of keys that no request names; RETRY until the answer has come.

        An answer holds until the second step after it, or after a lookup of this key that waits for others. One lookup
        of a step waits, once.
        """
        core, looks = self.core, self._looks
        found = core.lookup(looks, keys) if looks.states else [LookupResult.RETRY] * len(keys)
        if LookupResult.RETRY in found:
            core.look(looks, [key for key in keys if key not in looks.states], ask)
            if self._may_wait and not looks.served:
                self._may_wait = False
                self._await(lambda: looks.served, LOOKUP_WAIT_SECONDS)
            found = core.lookup(looks, keys)
            if LookupResult.RETRY in found:
                self._unfinished.update(keys)
        return found

    def _forget_answers(self) -> None:
        """Answers hold for a step in which they may be read, and while they are waited for together with others."""
        states, recent, before = self._looks.states, self._unfinished, self._unfinished_before
        if states:
            for key in self._answered:
                if states.get(key) != UNKNOWN and key not in recent and key not in before:
                    states.pop(key, None)
            self._answered = [key for key, state in states.items() if state != UNKNOWN]
        self._unfinished_before, self._unfinished = recent, set()

    # -- questions -----------------------------------------------------------------------------------------------

    def locate(self, keys: Sequence[OffloadKey]) -> list[str | None]:
        """The name of the highest tier that holds each key, or None. Waits for the answer."""
        items = [partial(_locate, part) for _, part in wire.split(keys)]
        found = [answer.tiers[place - 1] if place else None for answer in self._ask(items) for place in answer.places]
        return found if len(found) == len(keys) else [None] * len(keys)

    def hint(self, hint: KVHint) -> HintResult:
        """Pass a hint on. Waits for what becomes of it; STOPPED if no answer comes."""
        keys: Sequence[OffloadKey] = getattr(hint, "keys", ())
        parts = [part for _, part in wire.split(keys)] or [()]
        answers = self._ask([partial(hint_item, hint, part) for part in parts])
        if len(answers) < len(parts):
            return HintResult(0, {HintRefusal.STOPPED: len(keys)} if keys else {})
        refused: dict[HintRefusal, int] = {}
        for answer in answers:
            for reason, count in answer.refused.items():
                known = REFUSALS.get(reason, HintRefusal.STOPPED)
                refused[known] = refused.get(known, 0) + count
        return HintResult(sum(answer.accepted for answer in answers), refused)

    def figures(self) -> bytes:
        """The figures of the stack as JSON. Waits for them; empty if they do not come."""
        return b"".join(answer.part for answer in self._ask([wire.AskFigures]))

    def take_events(self) -> list[OffloadingEvent]:
        """The events that came since the last call. The first call has them sent, from what the tiers have then on."""
        if self.core.joined and not self._events_begun:
            self._events_begun = True
            self.core.say(wire.AskEvents())
        return self.events.take()

    def announce(self, keys: Sequence[OffloadKey]) -> None:
        """Have `take_events` return once more which tiers have these keys."""
        for _, part in wire.split(keys):
            self.core.say(wire.Announce(wire.Keys.of(part)))

    def touch(self, request: ClientRequest, keys: Sequence[OffloadKey]) -> None:
        """Count these keys as used by a request."""
        for _, part in wire.split(keys):
            self.core.say(wire.Touch(request.id, wire.Keys.of(part)))

    # -- resets and the end --------------------------------------------------------------------------------------

    def reset(self, timeout_seconds: float) -> None:
        """Make what was stored before unreachable. Waits until that is durable. Raises ResourceError if it is not."""
        core = self.core
        self.transfers.stop_all(DropReason.RESET)
        core.reset()
        until = time.monotonic() + timeout_seconds
        while core.resetting or core.resets_later:
            self._send()
            if (left := until - time.monotonic()) <= 0:
                raise ResourceError(f"the reset was not made durable within {timeout_seconds} s")
            self._wait_for_more(left)
            self._receive()
        fault, core.fault = core.fault, ""
        if fault or not core.connected:
            raise ResourceError(f"the reset was not made durable: {fault or self._channel.fault}")

    def leave(self, timeout_seconds: float) -> tuple[int, int]:
        """(blocks dropped, jobs that did not end): end all jobs and say goodbye."""
        self._reconnection.stop()
        self.transfers.stop_all(DropReason.CLOSING)
        until = time.monotonic() + COPIES_SECONDS
        while self.transfers.copies and time.monotonic() < until:
            self._send()
            self._wait_for_more(until - time.monotonic())
            self._receive()
        unfinished = self.transfers.copies
        left = self.say_goodbye(timeout_seconds)
        return (0, unfinished) if left is None else (left.dropped, max(unfinished, left.unfinished))

    def cut(self) -> None:
        """End copies in flight, and the connection for good, whatever else is under way."""
        self._reconnection.stop()
        try:
            self._worker.close()
        finally:
            super().close()

    def close(self) -> None:
        """End copies in flight and disconnect. Idempotent."""
        self.cut()
        self._close_event()

    def _close_event(self) -> None:
        if self._copy_ended.fd >= 0:
            self._copy_ended.close()
            self._copy_ended.fd = -1


def _locate(keys: Sequence[OffloadKey], number: int) -> wire.Item:
    return wire.Locate(number, wire.Keys.of(keys))
