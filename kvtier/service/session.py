"""An engine at a pool: its life, and what becomes of each item that it and its workers send.

No I/O and no clock. A session is given what its engine sent (`handle`) and what its workers sent (`on_worker_item`).
The pool sends `take_items` and `take_questions`, pumps the control plane and calls `advance`. Every number of an engine
is compared with what it was given: a wrong one is a `Breach`, which ends the connection and nothing else.

The items of an engine and of its workers come over sockets of their own, in any order between them: a worker may report
a copy before its engine has said that it began. A promise ends by the engine's word or with its processes, never by
time. After `lose` nothing is promised any more; rows that the engine holds stay as they are until `on_exit`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from kvtier.service import wire
from kvtier.service.copying import Copy, Copying
from kvtier.service.figures import EngineFigures
from kvtier.service.leasing import Leasing
from kvtier.service.namespaces import KeySpace
from kvtier.service.quotas import PoolState
from kvtier.service.requests import EngineRequests
from kvtier.service.weights import WeightsCheck
from kvtier.service.wire import Breach, Item
from kvtier.stack.watching.stats import EngineStats
from kvtier.types.events import OffloadingEvent
from kvtier.types.hints import HintRefusal, HintResult
from kvtier.types.keys import GROUP_BYTES, OffloadKey

NOTE_BYTES_MAX = 24 << 10
REVOKED_AT_ONCE = 12
"""Requests of one `Revoke`, whose names fit a message."""
FIGURES_SECONDS = 0.02
"""Figures are collected for an engine at most once in this time in the mean; they take milliseconds."""
FIGURES_AT_ONCE = 5
"""Times that they may be collected at once: the last ones before a rest may follow soon after others."""
EVENTS_MAX = 4096
"""Events that are kept for an engine; the keys of one are kept once for all engines."""
EVENT_KEYS_AT_ONCE, EVENTS_PAUSE_SECONDS = 1024, 0.01
"""Keys of events that are sent to an engine at once, and the time until there may be more: its thread reads them."""
RESETS_MAX = 64
"""Resets that an engine may begin before the first of them is durable."""


class EventFeed:
    """The events that an engine has yet to be sent, the oldest first. `lost` counts keys of those that were dropped."""

    def __init__(self) -> None:
        self.lost = 0
        self.due_at = -math.inf
        self._left = 0
        self._events: deque[OffloadingEvent] = deque()
        self._at = 0

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, events: Sequence[OffloadingEvent]) -> None:
        """Keep these events; the oldest are dropped where there are too many."""
        self._events.extend(events)
        while len(self._events) > EVENTS_MAX:
            self.lost += len(self._events.popleft().keys) - self._at
            self._at = 0

    def refill(self, now: float) -> None:
        """It may be time for more of them."""
        if now >= self.due_at:
            self._left, self.due_at = EVENT_KEYS_AT_ONCE, now + EVENTS_PAUSE_SECONDS

    def take(self, space: KeySpace) -> list[wire.Events]:
        """The next of them that are due, as far as they are of the engine's namespace."""
        items: list[wire.Events] = []
        while self._events and self._left > 0:
            event = self._events[0]
            some = event.keys[self._at : self._at + self._left]
            self._left -= len(some)
            self._at += len(some)
            if self._at >= len(event.keys):
                self._events.popleft()
                self._at = 0
            for _, part in wire.split(space.of_engine(some)):
                items.append(wire.Events([(event.tier, event.medium, event.removed, wire.Keys.of(part))]))
        return items


class SessionHost(Protocol):
    """Calls of a session to its pool."""

    @property
    def shared(self) -> PoolState:
        """State that its sessions share."""

    def end_fill(self, session: Session, copy: Copy, now: float) -> None:
        """All workers have reported a fill."""

    def join(self, session: Session, manifest: bytes) -> None:
        """`on_joined` follows. Raises WireError for a manifest that is none."""

    def begin_reset(self, session: Session) -> object:
        """`on_reset` of all sessions follows at once, `on_reset_done` of this one later."""

    def hold_back(self, session: Session, reason: str) -> None:
        """The engine's weights are others than those of its namespace."""

    def announce(self, session: Session, keys: Sequence[OffloadKey]) -> None:
        """Add to the session's events which tiers have these keys."""

    def send_figures(self, session: Session) -> None:
        """Add the figures to the session's items."""

    def send_all_figures(self, session: Session, number: int) -> None:
        """Add all figures as they are to the session's items."""

    def begin_events(self, session: Session) -> None:
        """Add what the tiers have to the session's events, and all events from here on."""


class Session:
    """An engine of a pool. `number` distinguishes it. `space` are its keys once it has joined.

    `shut`: why it is served nothing any more, for the rest of its life. `lent_in_turn` is the turn of its last loan.
    `counts` are added to.
    """

    def __init__(
        self, number: int, host: SessionHost, requests: EngineRequests, counts: EngineStats | None = None
    ) -> None:
        self.number = number
        self.counts = EngineStats() if counts is None else counts
        self.space: KeySpace | None = None
        self.joins = False
        self.shut = ""
        self.lost = False
        self.events: EventFeed | None = None
        self.figures = EngineFigures()
        self.lent_in_turn = 0
        self._host = host
        self._pool = pool = host.shared
        self._requests = requests
        self._items: list[Item] = []
        self._questions: list[Item] = []
        self.copying = Copying(pool, self._items, partial(host.end_fill, self), self.counts)
        self.leasing = Leasing(number, pool, self._items, self.copying)
        self._workers = pool.geometry.world_size
        self._groups = {group.to_bytes(GROUP_BYTES, "big") for group in range(pool.geometry.num_groups)}
        self._notes: dict[int, str] = {}
        self._resuming: set[int] = set()
        self._has_scheduler = False
        self._manifest = b""
        self._weights = WeightsCheck()
        self._wanted = 0
        self._reads_only = False
        self._figures_at = -math.inf
        self._figures_due = False
        self._figures_asked: int | None = None
        self._resets: list[int] = []
        self._resets_begun = 0
        self._loads_known = 0
        self._asks = False

    @property
    def is_engine(self) -> bool:
        """True while the engine is served, or would be but for its weights."""
        return self.space is not None and not self.lost

    @property
    def serves(self) -> bool:
        """True if lookups are answered and fills are stored."""
        return self.space is not None and not (self.lost or self.shut or self._weights.is_open)

    # -- from the engine -----------------------------------------------------------------------------------------

    def handle(self, item: Any, now: float) -> None:
        """Take in one item. Raises Breach, WireError, UsageError. Pump the control plane afterwards, then `advance`."""
        handler = _HANDLERS.get(type(item))
        if handler is None:
            raise Breach(f"{type(item).__name__} is no item of an engine")
        for name in _TEXTS[type(item)]:
            if len(getattr(item, name)) > wire.TEXT_CHARACTERS_MAX:
                raise Breach(f"a text of {type(item).__name__} is too long")
        handler(self, item, now)

    def _look_up(self, item: wire.Ask | wire.Look, now: float) -> None:
        keys = self._keys(item.keys)
        if isinstance(item, wire.Ask):
            self.counts.looked_up += len(keys)
            self._asks = True
        if self.serves:
            self.leasing.lookups.take(item, keys, now)
        else:
            self.leasing.lookups.refuse(item, len(keys))

    def _reserve(self, item: wire.Reserve, now: float) -> None:
        keys = self._keys(item.keys)
        if not self._asks:  # one that looks up before is counted there
            self.counts.looked_up += len(keys)
        if self.serves:
            self.leasing.reserve(item, keys, now)
        else:
            self.leasing.lookups.answer_missing(item.number, len(keys))

    def _locate(self, item: wire.Locate, now: float) -> None:
        keys = self._keys(item.keys)
        found = self._pool.plane.locate(keys, now) if self.serves else [None] * len(keys)
        tiers = list(dict.fromkeys(filter(None, found)))
        places = bytes(0 if tier is None else 1 + tiers.index(tier) for tier in found)
        self._items.append(wire.Located(item.number, tiers, places))

    def _drop(self, item: wire.Drop, now: float) -> None:
        self.leasing.drop(item.request, now)

    def _load(self, item: wire.Load, now: float) -> None:
        if self.copying.load(item, self.leasing.leases.get(item.request), now):
            self.leasing.drop(item.request, now)

    def _fill(self, item: wire.Fill, now: float) -> None:
        if self._reads_only:
            raise Breach("an engine fills rows that a worker of it cannot write")
        keys = self._keys(item.keys)
        self.copying.fill(item, keys, self.serves, now)

    def _on_filled(self, item: wire.Filled, now: float) -> None:
        self.copying.on_filled(item, now)

    def _return(self, item: wire.Return, now: float) -> None:
        self.copying.take_back(item.places)

    def _want(self, item: wire.Want, now: float) -> None:
        if not self._reads_only:
            self._wanted, self.copying.needed = max(0, item.rows), max(0, item.needed)

    def _announce(self, item: wire.Announce, now: float) -> None:
        keys = self._keys(item.keys)
        if self.is_engine and self.events is not None:
            self._host.announce(self, keys)

    def _ask_stats(self, item: wire.AskStats, now: float) -> None:
        if item.rests and self.copying.is_busy:
            self._figures_due = True
        else:
            self._send_figures(now)

    def _send_figures(self, now: float) -> None:
        self._figures_due = False
        if self._figures_at > now + (FIGURES_AT_ONCE - 1) * FIGURES_SECONDS:
            self._items.append(wire.Stats([], last=True))
        else:
            self._figures_at = max(self._figures_at, now) + FIGURES_SECONDS
            self._host.send_figures(self)

    def _ask_figures(self, item: wire.AskFigures, now: float) -> None:
        """Answer the last of those of one turn: a document is a thousand times as long as the item that asks for it."""
        self._figures_asked = item.number

    def _ask_events(self, item: wire.AskEvents, now: float) -> None:
        if self.is_engine and self.events is None:
            self._host.begin_events(self)

    def _hint(self, item: wire.Hint, now: float) -> None:
        keys = self._keys(item.keys)
        stopped = HintResult(0, {HintRefusal.STOPPED: len(keys)} if keys else {})
        result = self._requests.hint(item, keys, now) if self.is_engine else stopped
        if item.number:
            refused = {reason.value: count for reason, count in result.refused.items()}
            self._items.append(wire.Hinted(item.number, result.accepted, refused))

    def _on_request_item(self, item: Item, now: float) -> None:
        """Pass on what policies, the recorder, the choice of loads and hints are given."""
        if isinstance(item, wire.End) and not item.more:
            self.leasing.drop(item.request, now)
        if self.is_engine:
            self._requests.handle(item, self._keys, now)

    def on_worker_item(self, worker: int, item: Any, now: float) -> None:
        """Take in what a worker sent. Raises Breach."""
        if isinstance(item, wire.Copied):
            self.copying.on_copied(worker, item, now)
        elif isinstance(item, wire.Answer):
            self._items += filter(None, (self._weights.on_answer(worker, item.number, item.verdict),))
        elif isinstance(item, wire.Loaded):
            self._items.append(self._weights.on_load())
            self.copying.spoil_fills()
        elif isinstance(item, wire.Ready):
            self._on_ready(worker)
        else:
            raise Breach(f"{type(item).__name__} is no item of a worker")

    # -- joining -------------------------------------------------------------------------------------------------

    def on_scheduler(self, events: bool, manifest: bytes = b"") -> None:
        """The scheduler has connected. With `events` it is sent those of the pool.

        With a `manifest` the engine joins as soon as its workers are there.
        """
        self.events = EventFeed() if events else None
        self._has_scheduler, self._manifest = True, manifest
        self._send_drained()
        self._join_at_once()

    def on_worker(self, worker: int, note: str, resumes: bool = False, reads_only: bool = False) -> None:
        """A worker has connected; one that resumes has yet to be ready. Raises Breach.

        If one with a slice of its own in a row reads only, the engine is lent no rows.
        """
        if len(note.encode()) > NOTE_BYTES_MAX or worker in self._notes:
            raise Breach(f"worker {worker} connects twice, or with a note of {len(note)} characters")
        self._notes[worker] = note
        self._reads_only |= reads_only and worker < self._pool.geometry.num_copies
        if resumes:
            self._resuming.add(worker)
            self._send_drained()
        else:
            self._send_notes()

    @property
    def _has_workers(self) -> bool:
        return len(self._notes) == self._workers and not self._resuming

    def _join_at_once(self) -> None:
        if self._manifest and self._has_workers and not self.joins:
            self._host.join(self, self._manifest)

    def _send_drained(self) -> None:
        if self._has_scheduler and self._resuming:
            self._questions.append(wire.Drained())

    def _on_ready(self, worker: int) -> None:
        if worker not in self._resuming:
            raise Breach(f"worker {worker} is ready twice, or without having been connected before")
        self._resuming.discard(worker)
        self._send_notes()

    def _send_notes(self) -> None:
        """Send the engine the notes of its workers, when all are there."""
        if not self._has_workers:
            return
        self._join_at_once()
        notes = [self._notes[each] for each in range(self._workers)]
        for first, count in _parts(notes):
            last = first + count == len(notes)
            self._items.append(wire.Notes(first, notes[first : first + count], last))

    def _join(self, item: wire.Join, now: float) -> None:
        if self.joins:
            raise Breach("an engine joins once")
        self._host.join(self, item.manifest)

    def on_joined(self, space: KeySpace | None, fault: str, follows: bool) -> None:
        """The pool serves the engine with these keys from here on, or does not."""
        self.space = space
        self._items.append(wire.Joined(fault[: wire.TEXT_CHARACTERS_MAX], follows))

    # -- weights and resets --------------------------------------------------------------------------------------

    def _reset(self, item: wire.Reset, now: float) -> None:
        """Begin a reset. If one is under way, another follows it, for all that came meanwhile: each takes long."""
        if len(self._resets) >= RESETS_MAX:
            raise Breach(f"an engine begins more than {RESETS_MAX} resets at once")
        self._resets.append(item.number)
        self._loads_known = item.loads
        if not self._resets_begun:
            self._begin_resets()

    def _begin_resets(self) -> None:
        self._resets_begun = len(self._resets)
        if self._resets and not self.lost:
            self._host.begin_reset(self)

    def on_reset(self, own: bool, now: float) -> None:
        """Nothing stored before is reachable. The engine that reset has forgotten all; the others are sent `Void`."""
        if self.lost:
            return
        self._requests.on_reset()
        if own:
            self.leasing.drop_all(now)
            self._weights.on_reset(self._loads_known)
        else:
            self.leasing.on_reset(now)
            if self.space is not None:
                self._items.append(wire.Void())

    def on_reset_done(self, fault: str) -> None:
        """A reset of this engine is durable, or is not."""
        done, self._resets = self._resets[: self._resets_begun], self._resets[self._resets_begun :]
        self._items += [wire.ResetDone(number, fault[: wire.TEXT_CHARACTERS_MAX]) for number in done]
        self._begin_resets()

    def _hold_back(self, item: wire.HoldBack, now: float) -> None:
        self._host.hold_back(self, item.reason)
        self._weights.on_hold_back()

    def shut_out(self, reason: str) -> None:
        """The engine is served nothing any more. What it holds it holds until it gives it back."""
        self.shut = self.shut or reason

    def on_closing(self) -> None:
        """The pool closes. The engine uses its GPU blocks again once it knows, while workers still copy out of them."""
        self.shut_out("the stack process ends")
        self.copying.spoil_fills()

    def _ask_weights(self, item: wire.AskWeights, now: float) -> None:
        answer = self._weights.ask(item.number, self._notes.keys(), self._workers)
        if answer is None:
            self._questions.append(wire.Question(item.number))
        else:
            self._items.append(answer)

    # -- as the pool drives it -----------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Rows that the engine holds."""
        return self.leasing.held

    @property
    def has_work(self) -> bool:
        """True if there may be something to do for the engine in a step; all else of it waits for its next message."""
        return bool(
            self._items
            or self._questions
            or self._figures_due
            or self._figures_asked is not None
            or self.events
            or self.leasing.has_work
            or self.copying.has_work(self._wanted)
        )

    @property
    def rows_wanted(self) -> int:
        """Rows that the engine would like to be lent, and may be: none while a reservation of it lacks some."""
        lacking = self.copying.rows_lacking(self._wanted)
        if lacking <= 0 or not self.serves or self.leasing.rows_wanted_back:
            return 0
        return max(0, min(lacking, self._pool.quotas.pinned_most - self.held))

    @property
    def will_return_rows(self) -> bool:
        """True if some rows of this engine will be free although no other gets any."""
        return not self.lost and (self.copying.is_busy or self.leasing.will_return_rows)

    def advance(self, now: float) -> bool:
        """Answer what waited, begin reservations. True if the control plane is to be pumped again."""
        if self._figures_due and not self.copying.is_busy:
            self._send_figures(now)
        if self._figures_asked is not None:
            number, self._figures_asked = self._figures_asked, None
            self._host.send_all_figures(self, number)
        return self.leasing.advance(now)

    def take_back(self, rows: int, for_loans: bool) -> int:
        """Ask the engine for so many rows of leases, and for what is beyond its bounds. Returns the rows asked for.

        Rows that are lent come back where leases are too few, but not to be lent again.
        """
        if self.lost:
            return 0
        beyond = self.leasing.rows_wanted_back
        wanted = max(rows, beyond)
        requests = self.leasing.revocable(wanted) if wanted else []
        leased = sum([count for _, count in requests]) if requests else 0
        lent = self.copying.take_excess((beyond if for_loans else wanted) - leased)
        if lent:
            self._items.append(wire.Revoke([], lent))
        for first in range(0, len(requests), REVOKED_AT_ONCE):
            self._items.append(wire.Revoke([request for request, _ in requests[first : first + REVOKED_AT_ONCE]]))
        self.counts.revoked_rows += lent + leased
        return lent + leased

    def lose(self, now: float) -> None:
        """The connection has ended. What the engine holds, its workers may use until all its processes have exited."""
        if not self.lost:
            self.lost = True
            self.leasing.end_waiting(now, answers=False)
            self._requests.end_all()

    def on_exit(self, now: float) -> None:
        """No process of the engine copies any more."""
        self.lose(now)
        self.leasing.drop_all(now)
        self.copying.end_all(now)

    # -- to the engine -------------------------------------------------------------------------------------------

    def take_items(self, events: bool = True) -> list[Item]:
        """The items to be sent to the engine, in order; with events if there is room for them."""
        items = self._items + self.copying.take_lent_now()
        self._items.clear()
        if events and self.events and self.space is not None:
            items += self.events.take(self.space)
        return items

    def add_items(self, items: Sequence[Item]) -> None:
        """Items of the pool for the engine."""
        self._items += items

    def take_questions(self) -> list[Item]:
        """The items to be sent to each worker."""
        questions, self._questions = self._questions, []
        return questions

    def _keys(self, packed: wire.Keys) -> list[OffloadKey]:
        """Keys of an item, as the pool has them. Raises Breach, WireError."""
        keys = packed.unpack()
        least = min(map(len, keys), default=GROUP_BYTES + 1)
        known = self._groups.issuperset([key[-GROUP_BYTES:] for key in keys])
        if len(keys) > wire.ITEM_KEYS_MAX or least <= GROUP_BYTES or not known:
            raise Breach("too many keys, or one of a group that the layout does not have")
        return self.space.to_pool(keys) if self.space is not None else keys


def _parts(notes: Sequence[str]) -> Iterator[tuple[int, int]]:
    """(first, count) of notes that fit a message."""
    first = size = 0
    for at, note in enumerate(notes):
        if size and size + len(note.encode()) > 2 * NOTE_BYTES_MAX:
            yield first, at - first
            first, size = at, 0
        size += len(note.encode())
    yield first, len(notes) - first


_HANDLERS: dict[type[Item], Callable[[Session, Any, float], None]] = {
    wire.Ask: Session._look_up,
    wire.Look: Session._look_up,
    wire.Reserve: Session._reserve,
    wire.Drop: Session._drop,
    wire.Load: Session._load,
    wire.Fill: Session._fill,
    wire.Filled: Session._on_filled,
    wire.Return: Session._return,
    wire.Want: Session._want,
    wire.Reset: Session._reset,
    wire.AskStats: Session._ask_stats,
    wire.Announce: Session._announce,
    wire.HoldBack: Session._hold_back,
    wire.Join: Session._join,
    wire.AskWeights: Session._ask_weights,
    wire.Locate: Session._locate,
    wire.AskFigures: Session._ask_figures,
    wire.AskEvents: Session._ask_events,
    wire.Hint: Session._hint,
    **dict.fromkeys((wire.Begin, wire.Extend, wire.End, wire.Touch, wire.Computed), Session._on_request_item),
}
_TEXTS = {kind: {"request", "session", "reason"}.intersection(kind.__struct_fields__) for kind in _HANDLERS}
"""The fields of an item whose length is bounded here."""
