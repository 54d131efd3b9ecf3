"""An engine's state beside a stack process: what is leased and lent to it, and its jobs. No I/O and no clock.

Items to send wait in `out` until the engine's step sends them; `take_in` is given what has come. Without a connection
(`lose`) nothing is leased, every lookup is a MISS, and stores are dropped; copies in flight end all the same. After
`on_connected` it is as at the start; what must hold beyond a connection, a reset above all, is sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from errno import ESTALE
from itertools import chain, groupby
from typing import Any

from kvtier.client.copies import LentRows, RowCopy, keys_of, outcome_of
from kvtier.client.request import RESULTS, ClientRequest
from kvtier.service import wire
from kvtier.service.wire import ITEM_KEYS_MAX, LEASED, UNKNOWN, Item, Keys, Places, split
from kvtier.tier.contract import LookupResult
from kvtier.types.events import OffloadingEvent
from kvtier.types.jobs import CANCELLED, LOADED, MISSING, BlockOutcome, DropReason, JobKind, TransferJob, dropped
from kvtier.types.keys import JobId, Medium, OffloadKey
from kvtier.types.requests import RequestInfo

LENT_MIN = 64
BEHIND_ITEMS_MAX = 256
"""Items that wait for a process that does not read, until what is asked for is a miss."""
FILLED_MAX = 1 << 16
"""Keys of the engine's own stores that are remembered: they are not stored once more while they are in a row."""
NO_ROW = dropped(DropReason.NO_ROW)
LEASE_TURNS = 2
"""Turns for which a lease holds although it is asked back: vLLM takes two a step, and looks up between them. Requests
that want more rows than there are would else take them from each other for ever, before any is loaded."""


class EngineCore:
    """The state of one engine. `out` are the items that its next step sends, `ended` the copies that have ended.

    `serves` is False until the engine has joined, while a reset is under way, and once the connection has ended.
    `joins`: the stack process was sent the namespace. `is_new`: it serves this engine since then, and was not sent what
    one before was. The caller that sends such things resets it.
    """

    def __init__(self, stores: bool = True, *, own_worker: bool = False) -> None:
        """Without `stores` no rows are asked for. With `own_worker` the end of each copy comes to `on_copied_alone`."""
        self.stores = stores
        self._own_worker = own_worker
        self.out: list[Item] = []
        self.is_behind = False
        """True while the stack process does not read what was sent: little more is asked for."""
        self.connected = True
        self.joined = self.follows = self.joins = self.is_new = False
        self.manifest = b""
        self.notes: list[str] = []
        self.noted = self.loaded_weights = False
        self.stats_pending = 0
        self.ended: list[RowCopy] = []
        self.held_back = ""
        """The reason why no lower tier may serve this engine; sent to each stack process that it joins."""
        self.events: list[OffloadingEvent] = []
        self.series: list[wire.MetricSeries] = []
        self.fault = ""
        self.verdicts: dict[int, int] = {}
        self.answers: dict[int, list[Any]] = {}
        """By number, of the questions that are waited for: who asks adds a list, and takes it away."""
        self.requests: dict[str, ClientRequest] = {}
        """By name, those that have not ended."""
        self._asked: dict[int, tuple[ClientRequest, list[OffloadKey]]] = {}
        self._copies: dict[int, RowCopy] = {}
        self._lent = LentRows()
        self._filled: dict[OffloadKey, bool] = {}
        self._unsure: dict[JobId, None] = {}
        self._resetting = self._loads = 0
        self._reset_due = False
        self._number = self._last_copy = 0
        self.wanted = 0
        """Rows that the stack process was asked to lend ahead."""
        self._stored = self._needed = 0
        self._ahead = LENT_MIN
        self._needs = False
        self._turn = 0
        self._asked_back: dict[ClientRequest, None] = {}

    @property
    def serves(self) -> bool:
        """True if blocks may be found and stored now."""
        return self.connected and self.joined and not self._resetting

    @property
    def resetting(self) -> bool:
        """True until a reset of this engine is durable, or could not be made so."""
        return bool(self._resetting)

    @property
    def resets_later(self) -> bool:
        """True if a reset is sent as soon as the engine has joined, and it may still do so."""
        return self._reset_due and self.connected and not self.fault

    @property
    def awaits_answer(self) -> bool:
        """True while the stack process has an answer to give."""
        return self.connected and bool(self._asked or self._copies or self._resetting or self.stats_pending > 0)

    @property
    def room(self) -> int:
        """Rows that may be filled now."""
        return len(self._lent) if self.serves else 0

    def say(self, item: Item) -> None:
        """Send an item with the next step, if there is a connection."""
        if self.connected:
            self.out.append(item)

    # -- requests ------------------------------------------------------------------------------------------------

    def request(
        self, request_id: str, keys: Sequence[OffloadKey] = (), info: RequestInfo | None = None
    ) -> ClientRequest:
        """A request; what it may find is asked for with the next send. One of this id that is there ends: the stack
        process knows them by their names alone."""
        name = wire.bounded_text(request_id)
        if (before := self.requests.get(name)) is not None:
            before.end()
        request = self.requests[name] = ClientRequest(self, name, info)
        self.ask(request, keys)
        return request

    def free_id(self, request_id: str) -> str:
        """This id, or one like it while there is a request of this one."""
        free = request_id
        while wire.bounded_text(free) in self.requests:
            free = f"{request_id}#{self.next_number()}"
        return free

    def ask(self, request: ClientRequest, keys: Sequence[OffloadKey]) -> None:
        """Ask which of these keys are there, unless that is known or was asked.

        What is not there will be stored: after a rest the rows for that are asked for before, and come with the answer.
        """
        if self.serves and not request.ended:
            known = request.states
            asked = [key for key in dict.fromkeys(keys) if key not in known]
            if self._is_full:
                known.update(dict.fromkeys(asked, wire.MISSING))
                return
            if asked and not self.wanted:
                self._want(self._ahead, self._needed)
            for first, part in split(asked):
                more = first + len(part) < len(asked)
                self.out.append(wire.Ask(request.id, self._expect(request, part), Keys.of(part), more))

    @property
    def _is_full(self) -> bool:
        return self.is_behind and len(self.out) >= BEHIND_ITEMS_MAX

    def reserve(self, request: ClientRequest, keys: Sequence[OffloadKey]) -> None:
        """Have these keys brought into rows and leased; `served` says when that was answered."""
        request.reserved.update(dict.fromkeys(keys))
        if self.serves and not (request.ended or self._is_full):
            for _, part in split([key for key in dict.fromkeys(keys) if key not in request.leased]):
                self.out.append(wire.Reserve(request.id, self._expect(request, part), Keys.of(part)))

    def _expect(self, request: ClientRequest, keys: Sequence[OffloadKey]) -> int:
        """The number of a message whose answer has the states of these keys."""
        number = self.next_number()
        self._asked[number] = request, list(keys)
        request.waiting.add(number)
        request.states.update(dict.fromkeys(keys, UNKNOWN))
        return number

    def next_number(self) -> int:
        """The number of a message that has an answer."""
        self._number += 1
        return self._number

    def look(self, request: ClientRequest, keys: Sequence[OffloadKey], asks: bool = True) -> None:
        """Look keys up and lease none, for a request that holds nothing. With `asks` tiers are asked."""
        if self.serves:
            distinct = list(dict.fromkeys(keys))
            for first, part in split(distinct):
                more = first + len(part) < len(distinct)
                self.out.append(wire.Look(self._expect(request, part), Keys.of(part), asks, more))

    def lookup(self, request: ClientRequest, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Presence of these keys: HIT for leased ones, RETRY until an answer has come."""
        if not self.serves or request.ended:
            return [LookupResult.MISS] * len(keys)
        leased, states = request.leased, request.states
        if leased:
            found = [LookupResult.HIT if key in leased else RESULTS[states.get(key)] for key in keys]
        else:
            found = [RESULTS[state] for state in map(states.get, keys)]
        if LookupResult.MISS in found:
            self._look_again(states, keys, found)
        return found

    def _look_again(self, states: dict[OffloadKey, int], keys: Sequence[OffloadKey], found: list[LookupResult]) -> None:
        """Have keys asked for anew that were nowhere when they were asked for and were stored by this engine since."""
        for at, key in enumerate(keys):
            if found[at] is LookupResult.MISS and self._filled.get(key) and states.get(key) == wire.MISSING:
                del states[key]
                found[at] = LookupResult.RETRY

    def storable(self, request: ClientRequest | None, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """The keys that are in no row, and on their way into none, as far as this engine was informed."""
        present: Collection[OffloadKey] = () if request is None else request.present
        return [key for key in dict.fromkeys(keys) if key not in self._filled and key not in present]

    def in_row(self, key: OffloadKey) -> bool | None:
        """True if a block of this engine is in a row, None while it is copied into one."""
        filled = self._filled.get(key)
        return False if filled is None else filled or None

    def begin_turn(self) -> None:
        """A turn begins, in which leases end that were asked back when they were new. Those that a load has used have
        ended."""
        self._turn += 1
        for request in list(self._asked_back):
            self._give_back(request)

    def _give_back(self, request: ClientRequest) -> None:
        """End the leases of a request, new ones in a later turn."""
        if request.leased and self._turn < request.leased_in_turn + LEASE_TURNS:
            self._asked_back[request] = None
        else:
            self.release(request)

    def release(self, request: ClientRequest) -> None:
        """The request's leases end."""
        if request.states or request.reserved:
            self._forget(request)
            self.say(wire.Drop(request.id))

    def end(self, request: ClientRequest, drops: bool = True) -> None:
        """The request is over: its leases end, if not by a message that follows. Idempotent."""
        if not request.ended:
            if drops:
                self.release(request)
            else:
                self._forget(request)
            request.ended = True
            if self.requests.get(request.id) is request:
                del self.requests[request.id]

    def _forget(self, request: ClientRequest) -> None:
        self._asked_back.pop(request, None)
        request.leased.clear()
        request.states.clear()
        request.reserved.clear()
        for number in chain(request.waiting, request.updates):
            self._asked.pop(number, None)
        request.waiting.clear()
        request.updates.clear()

    def reset(self) -> None:
        """Everything stored before is a miss from now on; `serves` again once the stack process has made it durable.

        Before the engine has joined nothing is sent; it is once it has.
        """
        self._void_all()
        for job in list(self._unsure):
            self.end_store(job, ESTALE)  # an engine may forget its copies
        self._reset_due = not self.joined
        if self.joined:
            self._send_reset()

    def _send_reset(self) -> None:
        self._number += 1
        self._resetting = self._number
        self.out.append(wire.Reset(self._number, self._loads))

    def _void_all(self) -> None:
        """A reset: nothing of before is found, or loaded."""
        self._void()
        for copy in self._copies.values():
            copy.void = True

    def _void(self) -> None:
        for request in self.requests.values():
            self._forget(request)
            request.present.clear()
        self._filled.clear()

    def _on_void(self) -> None:
        """Another engine has reset the pool."""
        for request in self.requests.values():
            self.release(request)
        self._void_all()

    def _on_revoke(self, item: wire.Revoke) -> None:
        for request in filter(None, map(self.requests.get, item.requests)):
            self._give_back(request)
        self._return(item.lent)

    def _on_weights(self, item: wire.Weights) -> None:
        """A verdict; without a number of ours: weights were loaded."""
        if item.number:
            self.verdicts[item.number] = item.verdict
        else:
            self.loaded_weights = True
            self._loads += 1

    def join(self, manifest: bytes) -> None:
        """All is known of the namespace now."""
        self.manifest = manifest
        if self.noted and not self.joins:
            self.joins = True
            self.say(wire.Join(manifest))

    def hold_back(self, reason: str) -> None:
        """The engine has other weights than its namespace: no lower tier serves it, now and after each reconnection."""
        self.held_back = self.held_back or wire.bounded_text(reason[: wire.TEXT_CHARACTERS_MAX])
        if self.joined:
            self.say(wire.HoldBack(self.held_back))

    def ask_stats(self, rests: bool = False) -> None:
        """Ask for the figures that changed; they come into `series`. With `rests` all of this engine's jobs are in."""
        self.stats_pending += 1
        self.say(wire.AskStats(rests))

    def ask_weights(self) -> int:
        """Ask whether the workers' weights are those of the start; the verdict comes into `verdicts` by this number."""
        self._number += 1
        self.say(wire.AskWeights(self._number))
        return self._number

    # -- jobs ----------------------------------------------------------------------------------------------------

    def begin_load(self, job: TransferJob, request: ClientRequest) -> TransferJob | None:
        """Begin to load what is leased to the request; the rest is MISSING. Returns what a worker copies out of rows.

        The request's leases end with it, those of the copy when the workers have reported.
        """
        keys, leased = keys_of(job), request.leased
        found = [at for at, key in enumerate(keys) if key in leased]
        copy = self._new_copy(job, keys, found, MISSING)
        if not copy.keys:
            self._end_copy(copy)
            return None
        rows, generations = map(list, zip(*map(leased.__getitem__, copy.keys), strict=True))
        for first in range(0, len(rows), ITEM_KEYS_MAX):
            end = first + ITEM_KEYS_MAX
            places = Places.of(rows[first:end], generations[first:end])
            self.out.append(wire.Load(copy.number, request.id, places, more=end < len(rows)))
        request.present.update(copy.keys)
        self._forget(request)
        return copy.work(rows, generations)

    def begin_store(self, job: TransferJob, waits: bool = False) -> TransferJob | None:
        """Begin to store blocks into lent rows, the front of each prefix first; what gets no row is dropped.

        With `waits` they count once `end_store` was called too.
        """
        keys = keys_of(job)
        self._stored += len(keys)
        if self._needed:  # of this store; another one that waits says so
            self._needed = 0
            self.say(wire.Want(self.wanted))
        rows, generations = self._lent.take(len(keys) if self.serves else 0)
        copy = self._new_copy(job, keys, range(len(rows)), NO_ROW)
        if not rows:
            self._end_copy(copy)
            return None
        for first, some in split(copy.keys):
            end = first + len(some)
            places = Places.of(rows[first:end], generations[first:end])
            self.out.append(wire.Fill(copy.number, Keys.of(some), places, end < len(rows), waits))
        self._filled.update(dict.fromkeys(copy.keys, False))
        if waits:
            self._unsure[JobId(copy.number)] = None
        return copy.work(rows, generations)

    def _new_copy(
        self, job: TransferJob, keys: Sequence[OffloadKey], copied: Sequence[int], without: BlockOutcome
    ) -> RowCopy:
        self._last_copy += 1
        copy = self._copies[self._last_copy] = RowCopy(self._last_copy, job, keys, copied, without)
        return copy

    def end_store(self, number: JobId, errno: int) -> None:
        """A store that waits has ended; with an errno what it has copied is not what its keys name."""
        if number in self._unsure:
            del self._unsure[number]
            self.say(wire.Filled(number, errno))

    def _end_copy(self, copy: RowCopy) -> None:
        del self._copies[copy.number]
        self.ended.append(copy)

    @property
    def busy(self) -> bool:
        """True while a job or a reset has not ended."""
        return bool(self._copies or self.ended or self._resetting)

    # -- what comes ----------------------------------------------------------------------------------------------

    def take_in(self, items: Sequence[Any]) -> None:
        """Record what the stack process sent."""
        for item in items:
            match item:
                case wire.Found():
                    self._on_found(item)
                case wire.Ended():
                    self._on_ended(item)
                case wire.Lent():
                    self._lent.add(item.places)
                case wire.Revoke():
                    self._on_revoke(item)
                case wire.Void():
                    self._on_void()
                case wire.ResetDone():
                    self._on_reset_done(item)
                case wire.Events():
                    self.events += [
                        OffloadingEvent(tuple(keys.unpack()), Medium(medium), removed, tier)
                        for tier, medium, removed, keys in item.events
                    ]
                case wire.Stats():
                    self.series += item.series
                    self.stats_pending -= item.last
                case wire.Notes():
                    self._on_notes(item)
                case wire.Joined():
                    self._on_joined(item)
                case wire.Weights():
                    self._on_weights(item)
                case wire.Located() | wire.Hinted() | wire.FiguresPart() | wire.Left():
                    if item.number in self.answers:
                        self.answers[item.number].append(item)
                case wire.Closing():
                    self.lose()

    def _on_notes(self, item: wire.Notes) -> None:
        self.notes = [*self.notes[: item.first], *item.notes]
        self.noted = item.last
        if self.noted and self.manifest:
            self.join(self.manifest)

    def _on_joined(self, item: wire.Joined) -> None:
        self.joined, self.fault, self.follows = not item.fault, item.fault, item.follows
        self.is_new = self.joined
        if not self.joined:
            return
        if self._reset_due:
            self._reset_due = False
            self._send_reset()
        if self.held_back:  # after the reset, which reaches the lower tiers before they are held back
            self.hold_back(self.held_back)

    def _on_reset_done(self, item: wire.ResetDone) -> None:
        if item.number == self._resetting:
            self._resetting = 0
            self.fault = item.fault

    def _on_found(self, item: wire.Found) -> None:
        found = self._asked.pop(item.number, None)
        if found is None:
            return  # the request has ended
        request, keys = found
        if item.number in request.updates:
            self._on_update(request, keys, item)
            return
        request.waiting.discard(item.number)
        if item.more:
            self._asked[item.number] = found
            request.updates.add(item.number)
        places = iter(item.places.pairs())
        for key, state in zip(keys, item.states, strict=True):
            if state == UNKNOWN and not item.more:
                request.states.pop(key, None)  # no tier was asked for it
                continue
            request.states[key] = state
            if state == LEASED:
                request.leased[key] = next(places)
                request.present.add(key)
            elif self._filled.get(key):
                del self._filled[key]  # it is in no row any more
        request.leased_in_turn = self._turn

    def _on_update(self, request: ClientRequest, keys: Sequence[OffloadKey], item: wire.Found) -> None:
        """Tiers have answered."""
        request.updates.discard(item.number)
        for key, state in zip(keys, item.states, strict=True):
            if request.states.get(key) == UNKNOWN:
                request.states[key] = state

    def _on_ended(self, item: wire.Ended) -> None:
        copy = self._copies.get(item.job)
        if copy is None or copy.lost:
            return
        copy.runs += [(count, outcome_of(*said)) for count, *said in item.outcomes]
        if item.more:
            return
        if copy.job.kind is JobKind.STORE:
            self._on_filled(copy)
        self._end_copy(copy)

    def _on_filled(self, copy: RowCopy) -> None:
        """Keep which blocks are in rows now; the oldest are forgotten."""
        filled, first = self._filled, 0
        for count, outcome in copy.runs:
            for key in copy.keys[first : first + count]:
                if filled.pop(key, None) is not None and outcome.ok:
                    filled[key] = True
            first += count
        while len(filled) > FILLED_MAX:
            del filled[next(iter(filled))]

    def want_rows(self) -> None:
        """Ask for rows ahead: twice what was stored since the last call, and some at least. Once in a while."""
        self._ahead = max(LENT_MIN, 2 * self._stored)
        self._stored = 0
        needed = self._needed if self._needs else 0
        self._needs = False
        self._want(self._ahead, needed)

    def _want(self, ahead: int, needed: int) -> None:
        if self.connected and self.stores and (ahead, needed) != (self.wanted, self._needed):
            self.wanted, self._needed = ahead, needed
            self.out.append(wire.Want(ahead, needed))

    def rest(self) -> None:
        """The engine has nothing to do: other engines may have its rows. It asks for some with its next lookup."""
        self._want(0, 0)
        self._return(len(self._lent))

    def _return(self, count: int) -> None:
        """Give rows back that are lent."""
        while count > 0 and self._lent:
            rows, generations = self._lent.take(min(count, ITEM_KEYS_MAX))
            self.out.append(wire.Return(Places.of(rows, generations)))
            count -= len(rows)

    def need_rows(self, count: int) -> None:
        """A store waits for so many rows. It is said once a second that it still does."""
        self._needs = True
        if self.connected and count > self._needed:
            self._needed = count
            self.out.append(wire.Want(self.wanted, count))

    def lose(self) -> None:
        """The connection has ended: nothing is leased or lent any more. A store ends with it, once nothing reads its
        blocks any more."""
        self.connected = self.joined = self.joins = self.noted = self.is_new = False
        self.stats_pending = 0
        self.out.clear()
        self.notes.clear()
        self._void()
        self._lent.clear()
        self._unsure.clear()
        self._reset_due = self._reset_due or self.resetting
        self._resetting = self.wanted = self._needed = self._loads = 0
        for copy in list(self._copies.values()):
            if copy.job.kind is JobKind.STORE:
                copy.lost = True
                if copy.reported is not None or not self._own_worker:  # else it is given the end of its workers' copies
                    self._end_lost_store(copy)
            elif copy.reported is not None:  # the stack process did not come to say so
                self.on_copied_alone(JobId(copy.number), copy.reported)

    def _end_lost_store(self, copy: RowCopy) -> None:
        copy.runs = [(len(copy.keys), dropped(DropReason.TIER_DOWN))]
        self._end_copy(copy)

    @property
    def is_drained(self) -> bool:
        """True if no load is in flight that was begun beside a connection that has ended: the next may be made."""
        return not any(copy.job.kind is JobKind.LOAD for copy in self._copies.values())

    def on_connected(self) -> None:
        """There is a connection again. The engine joins once its workers are there."""
        self.connected = True
        self.fault = ""

    def on_load_end(self, number: JobId) -> None:
        """A load's copy has ended well, as its engine says."""
        copy = self._copies.get(number)
        if copy is not None:
            self.on_copied_alone(number, [LOADED] * len(copy.keys))

    def on_copied_alone(self, number: JobId, outcomes: Sequence[BlockOutcome]) -> None:
        """A copy has ended. What the worker says of a load holds: its rows were leased. The stack process has the same
        report from it; it has to say what became of a load that a reset overtook, and of every store."""
        copy = self._copies.get(number)
        if copy is None:
            return
        if copy.job.kind is JobKind.STORE:
            copy.reported = outcomes
            if copy.lost:
                self._end_lost_store(copy)
            return
        if copy.void and self.connected:
            copy.reported = outcomes
            return
        good = CANCELLED if copy.void else LOADED
        copy.runs = [(len(list(run)), good if outcome.ok else outcome) for outcome, run in groupby(outcomes)]
        self._end_copy(copy)
