"""The calls of a synchronous engine that has no stack of its own: one message a step each way, nothing that waits."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from kvtier.client.connection import OPEN_SECONDS, Connected, Identity, Participant, connect, unconnected
from kvtier.client.core import EngineCore
from kvtier.client.reconnection import Reconnection
from kvtier.client.request import ClientRequest
from kvtier.errors import ConfigError, ResourceError
from kvtier.service import wire
from kvtier.service.channel import Channel
from kvtier.service.wire import TO_ENGINE, Found, Lent
from kvtier.tier.contract import LookupResult
from kvtier.types.keys import OffloadKey
from kvtier.types.requests import RequestInfo

_log = logging.getLogger(__name__)

OUTBOX_BYTES_MAX = 256 << 10
LOOKUP_WAIT_SECONDS = 0.001
"""How long the first lookup of a step without an answer waits for it."""
WANT_SECONDS = 1.0
WITHIN_A_STEP = (Found, Lent)
"""Items that are taken in before the next step."""
ANSWERS = (*WITHIN_A_STEP, wire.Located, wire.Hinted, wire.FiguresPart, wire.Left)
"""Items that are taken in by a call that waits for an answer."""
ANSWER_SECONDS = 1.0
"""How long such a call waits."""
SILENCE_SECONDS = 5.0
"""How long an answer is awaited while nothing comes, until the stack process is asked for a sign, and then for that."""


class SchedulerClient:
    """An engine's scheduler at a stack process. Call `turn` once per engine step, from one thread.

    What comes within a step are answers to lookups and rows: whatever ends a lease waits for the next step. When the
    connection ends all is a miss, until another one is made: see `Reconnection`. It counts as ended once a stack
    process that has an answer to give gives no sign.
    """

    has_own_worker: ClassVar[bool] = False
    """True if the ends of copies are given to the core."""

    def __init__(
        self, identity: Identity, *, complete: bool = True, events: bool = False, required: bool = True
    ) -> None:
        """Connect, with `complete` in a namespace of which all is known, else `join` later; with `events` they come.

        Raises ResourceError, ConfigError as `connect`. If it is not `required` it is tried again instead.
        """
        process = Participant("scheduler", complete=complete, events=events)
        try:
            connected = connect(identity, process)
        except (ConfigError, ResourceError) as error:
            if required:
                raise
            _log.error("no stack process serves this engine, every lookup is a miss: %s", error)
            connected = unconnected()
        self.core = EngineCore(stores=not identity.reads_only, own_worker=self.has_own_worker)
        if complete:
            self.core.joins, self.core.manifest = True, identity.namespace.manifest().encode()
        self._use(connected)
        try:
            self._reconnection = Reconnection(identity, process, connected[0])
        except OSError as error:
            self._channel.close()
            raise ResourceError(f"there is no thread or descriptor for a connection: {error}") from error
        self._is_permitted = self._resumes = False
        if not self.welcome.incarnation:
            self._lose()
        self._want_at = 0.0
        self._may_wait = True

    def _use(self, connected: Connected) -> None:
        sock, self.welcome, _ = connected
        self.life: str = self.welcome.life
        """The name of the session whose rows are leased and lent now. Workers copy for no other."""
        self._channel = Channel(sock, TO_ENGINE, OUTBOX_BYTES_MAX)
        self._later: list[Any] = []
        self._poll = select.poll()
        self._poll.register(self._channel, select.POLLIN)
        self._is_lost = False
        self._heard_at = time.monotonic()
        self._asked_for_sign = False

    def wait_notes(self, timeout_seconds: float = OPEN_SECONDS) -> list[str]:
        """The notes of all workers, once they have connected. Raises ResourceError if one has not in time."""
        self._turn_until(lambda: self.core.noted, "a worker has not connected", timeout_seconds)
        return self.core.notes

    def join(self, manifest: bytes) -> None:
        """Be served in the namespace of which all is known now."""
        self.core.join(manifest)
        self._send()

    def wait_joined(self, timeout_seconds: float = OPEN_SECONDS) -> None:
        """Wait until the stack process serves this engine. Raises ConfigError if it does not."""
        core = self.core
        self._turn_until(
            lambda: core.joined or core.fault, "the stack process did not serve this engine", timeout_seconds
        )
        if core.fault:
            raise ConfigError(f"the stack process does not serve this engine: {core.fault}")

    def _turn_until(self, done: Callable[[], object], fault: str, timeout_seconds: float) -> None:
        until = time.monotonic() + timeout_seconds
        while not done():
            if self._channel.closed or not self.wait(until - time.monotonic()):
                raise ResourceError(f"{fault}: {self._channel.fault or 'too late'}")
            self.turn()

    def request(
        self, request_id: str, keys: Sequence[OffloadKey] = (), info: RequestInfo | None = None
    ) -> ClientRequest:
        """A request; what it may find is asked for at once."""
        request = self.core.request(request_id, keys, info)
        self._send()
        return request

    def lookup(self, request: ClientRequest, keys: Sequence[OffloadKey], ask: bool = True) -> list[LookupResult]:
        """Presence of the keys of a request: RETRY where no answer has come within a millisecond.

        One lookup of a step waits, once. With `ask` it is asked what was not asked before.
        """
        found = self.core.lookup(request, keys)
        if LookupResult.RETRY in found:
            if ask:
                self.core.ask(request, keys)
            if self._may_wait and not request.served:
                self._may_wait = False
                self._wait_for_answers(request)
                found = self.core.lookup(request, keys)
        return found

    def _wait_for_answers(self, request: ClientRequest) -> None:
        self._send()
        until = time.monotonic() + LOOKUP_WAIT_SECONDS
        while not request.served and (left := until - time.monotonic()) > 0:
            self._poll.poll(left * 1e3)
            items = self._take_messages()
            if not items:
                break
            answers = [item for item in items if type(item) in WITHIN_A_STEP]
            self._later += [item for item in items if type(item) not in WITHIN_A_STEP]
            self.core.take_in(answers)

    def turn(self) -> None:
        """Once per engine step: take in what came, send what was decided. `core.ended` are the copies that ended."""
        self.core.begin_turn()
        self._receive()
        self._balance_rows()
        self._send()
        self._may_wait = True

    @property
    def _rests(self) -> bool:
        """True if the engine stores nothing before its next request. It may take no step until then."""
        return not self.core.requests

    def _balance_rows(self) -> None:
        """Have rows lent ahead while there are requests, as many as are used in two seconds; else give them back."""
        core = self.core
        if self._rests or not core.stores:
            core.rest()
            return
        now = time.monotonic()
        if (now >= self._want_at or not core.wanted) and core.serves:
            self._want_at = now + WANT_SECONDS
            core.want_rows()

    def rest(self) -> None:
        """Send what waits, rows that are not needed too. For an engine that may take no step until its next request."""
        self._balance_rows()
        self._send()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until something came, or the time is over."""
        return bool(self._later) or self._poll_within(self._poll, timeout_seconds)

    def _poll_within(self, poll: select.poll, timeout_seconds: float) -> bool:
        """True if something is readable within a time, in which what waits is sent as the socket has room."""
        until = time.monotonic() + timeout_seconds
        while self._channel.waiting_bytes:
            poll.modify(self._channel, select.POLLIN | select.POLLOUT)
            found = poll.poll(max(0.0, until - time.monotonic()) * 1e3)
            poll.modify(self._channel, select.POLLIN)
            if not found or any(events & ~select.POLLOUT for _, events in found):
                return bool(found)
            self._send()
        return bool(poll.poll(max(0.0, until - time.monotonic()) * 1e3))

    @property
    def has_pending_work(self) -> bool:
        """True while a job has not ended."""
        return self.core.busy

    def _take_messages(self) -> list[Any]:
        """The items that have come, each of them a sign. So is that the process reads, see `_send`."""
        items = self._channel.receive()
        if items:
            self._note_sign()
        return items

    def _note_sign(self) -> None:
        self._heard_at, self._asked_for_sign = time.monotonic(), False

    def _receive(self) -> None:
        items = self._later + self._take_messages()
        if items:
            self._later = []
            self.core.take_in(items)
        if not self.core.awaits_answer:
            self._note_sign()
        elif time.monotonic() - self._heard_at > SILENCE_SECONDS:
            self._on_silence()
        if self._resumes:
            self._watch_joining()
        if self._channel.closed:
            self._on_closed()

    def _on_silence(self) -> None:
        """Ask for a sign: what is waited for may take long. Without one the process is frozen."""
        if self._asked_for_sign:
            self._channel.give_up("it answers nothing")
            return
        self._asked_for_sign, self._heard_at = True, time.monotonic()
        self.core.say(wire.Locate(self.core.next_number(), wire.Keys.of(())))

    def _on_closed(self) -> None:
        """All is a miss, until there is another connection. That is made once no load needs the rows of this one."""
        core = self.core
        if not self._is_lost:
            reason = self._channel.fault
            _log.warning("the connection to the stack process has ended, every lookup is a miss: %s", reason)
            self._lose()
        if not self._is_permitted and core.is_drained:
            self._is_permitted = True
            self._reconnection.permit()
        if (connected := self._reconnection.take()) is not None:
            self._use(connected)
            core.on_connected()
            self._resumes = True

    def _lose(self) -> None:
        self._is_lost, self._is_permitted = True, False
        self.core.lose()
        self._channel.close()
        self._poll = select.poll()
        self._poll.register(self._reconnection, select.POLLIN)

    def _watch_joining(self) -> None:
        """Write a line when the engine is served again, or is not."""
        core = self.core
        if core.joined:
            _log.warning("a stack process serves this engine again")
        elif core.fault:
            _log.error("the stack process does not serve this engine, every lookup is a miss: %s", core.fault)
        self._resumes = core.connected and not (core.joined or core.fault)

    def _send(self) -> None:
        core, channel = self.core, self._channel
        waiting = channel.waiting_bytes
        core.is_behind = bool(waiting) and not channel.flush()
        if channel.waiting_bytes < waiting:
            self._note_sign()
        if core.is_behind:
            return  # what is to be sent is not encoded again and again
        try:
            if core.out and channel.send(core.out):
                core.out = []
        except (wire.WireError, ValueError, OverflowError) as error:  # else each later step of the engine raised it
            channel.give_up(f"an item fits no message: {error}")

    def _await(self, done: Callable[[], bool], timeout_seconds: float) -> bool:
        """Send, and take in answers alone until a condition holds. False once the time is over, or the connection."""
        self._send()
        until = time.monotonic() + timeout_seconds
        while not done():
            left = until - time.monotonic()
            if left <= 0 or self._channel.closed:
                return False
            self._poll_within(self._poll, left)
            items = self._take_messages()
            self._later += [item for item in items if type(item) not in ANSWERS]
            self.core.take_in([item for item in items if type(item) in ANSWERS])
            self._send()
        return True

    def _ask(self, items: Sequence[Callable[[int], wire.Item]], timeout_seconds: float = ANSWER_SECONDS) -> list[Any]:
        """The answers to questions, each of which is given its number. Waits; fewer answers if they do not come."""
        return self._exchange(items, timeout_seconds) if self.core.connected else []

    def _exchange(self, items: Sequence[Callable[[int], wire.Item]], timeout_seconds: float) -> list[Any]:
        """Ask as `_ask` does, also where nothing is served any more."""
        core = self.core
        numbers = [core.next_number() for _ in items]
        core.answers.update((number, []) for number in numbers)
        core.out += [make(number) for make, number in zip(items, numbers, strict=True)]
        self._await(lambda: all(map(self._is_answered, numbers)), timeout_seconds)
        return [answer for number in numbers for answer in core.answers.pop(number)]

    def _is_answered(self, number: int) -> bool:
        answers: Sequence[Any] = self.core.answers.get(number, ())
        return bool(answers) and getattr(answers[-1], "last", True)

    def say_goodbye(self, timeout_seconds: float, distrust: str = "") -> wire.Left | None:
        """Leave for good, also after a worker has. A private process that serves no other engine has written back when
        its answer comes. `distrust`: the reason why nothing that this engine stored may be found any more.

        None if there is no connection, or no answer in time.
        """
        self._reconnection.stop()
        answers: Sequence[wire.Left] = self._exchange([partial(wire.Leave, distrust=distrust)], timeout_seconds)
        return answers[0] if answers else None

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._reconnection.stop()
        self._channel.close()
        self._reconnection.close()
        self._is_lost = self._is_permitted = True
        self.core.lose()
