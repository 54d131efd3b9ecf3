"""What decides for a tier below vLLM's own CPU tier: vLLM's jobs in, jobs of the tier out.

Synchronous and deterministic: no I/O and no clock of its own. One thread touches it. The directory, the slots, the
eviction and the health of the tier are those of every lower tier (`kvtier.control`); there is no CPU tier here, for
vLLM has one and says itself what it wants from below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.control.board import Emission, LowerTier
from kvtier.control.breaker import Breaker, BreakerState
from kvtier.errors import UsageError
from kvtier.integrations.vllm.secondary_metrics import count_outcome
from kvtier.integrations.vllm.secondary_staging import Passages
from kvtier.integrations.vllm.secondary_transfers import Part, Transfer
from kvtier.jobs import (
    CANCELLED,
    LATE,
    MISSING,
    PRESENT,
    BlockOutcome,
    BlockStatus,
    DropReason,
    JobKind,
    JobResult,
    RegionCut,
    TransferJob,
    dropped,
)
from kvtier.keys import JobId, OffloadKey
from kvtier.loadstore import LookupResult

LOADS, STORES = 0, 1
"""Positions of the two lanes: loads never wait behind stores for staging rows."""
PATIENCE_SECONDS = 1.0
"""How long stores may hold more of vLLM's rows than is their share."""
REFUSED = (BlockStatus.CORRUPT, BlockStatus.FAILED, BlockStatus.MISSING)


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """`part_blocks` are moved by one job of the tier at most; stores that have waited for a while hold at most
    `pinned_max` of vLLM's rows.
    """

    part_blocks: int
    pinned_max: int
    epoch: int = 0


class SecondaryPlane:
    """Everything that decides. After any call take what there is to do with `take_jobs` and `take_questions`, and what
    has ended with `take_ended`.
    """

    def __init__(self, lower: LowerTier, limits: PlaneLimits, passages: Passages) -> None:
        self.lower = lower
        self.limits = limits
        self._passages = passages
        self._transfers: dict[int, Transfer] = {}
        self._parts: dict[JobId, Part] = {}
        self._late: dict[JobId, Part] = {}
        self._next_job = 1
        self._pinned = 0
        self._leased: list[int] = []
        self._refused: dict[str, set[OffloadKey]] = {}
        self._outbox: list[Emission] = []
        self._ended: list[Transfer] = []
        self._changes: list[tuple[bool, list[OffloadKey]]] = []

    # -- requests ------------------------------------------------------------------------------------------------

    def begin_request(self, request_id: str) -> None:
        """A request that keys will be asked for."""
        self._refused.setdefault(request_id, set())

    def end_request(self, request_id: str) -> None:
        """Nothing more is asked for this request."""
        self._refused.pop(request_id, None)

    def lookup(self, key: OffloadKey, request_id: str, now: float) -> LookupResult:
        """HIT: loadable, and kept until `end_step`. RETRY: a shared tier was asked. MISS.

        A key whose load failed for a request is a miss for that request from then on.
        """
        lower = self.lower
        if key in self._refused.get(request_id, ()) or not lower.may_load(now):
            return LookupResult.MISS
        if lower.owned is not None:
            slot = lower.owned.ready(key)
            if slot is None:
                return LookupResult.MISS
            lower.owned.hold((slot,))
            self._leased.append(slot)
            return LookupResult.HIT
        assert lower.shared is not None
        presence = lower.shared.presence(key, now)
        if presence is None:
            lower.shared.ask(key, now)
            return LookupResult.RETRY
        return LookupResult.HIT if presence else LookupResult.MISS

    def end_step(self) -> None:
        """What was promised in this step has been asked for by now, or never will be."""
        if self._leased and self.lower.owned is not None:
            self.lower.owned.release(self._leased)
            self._leased.clear()

    # -- vLLM's jobs ---------------------------------------------------------------------------------------------

    def store(self, transfer: Transfer, now: float) -> None:
        """Begin to store blocks, those nearest to their prefix's root first in line for a place."""
        lower = self.lower
        self._begin(transfer)
        self._pinned += len(transfer.keys)
        todo = self._without_present(transfer)
        todo = self._cut_off(transfer, todo, self._room(lower.store_breaker, len(todo), now), DropReason.TIER_DOWN)
        if lower.owned is not None:
            slots = lower.owned.reserve([transfer.keys[i] for i in todo])
            todo = self._cut_off(transfer, todo, len(slots), DropReason.NO_SLOT)
            transfer.slots.update(zip(todo, slots, strict=True))
        # Leaves go first, so that a parent never ages before its children.
        self._send(transfer, todo[::-1], now)
        self._conclude(transfer, now)

    def _begin(self, transfer: Transfer) -> None:
        if transfer.job_id in self._transfers:
            raise UsageError(f"job {transfer.job_id} is under way already")
        self._transfers[transfer.job_id] = transfer

    def _without_present(self, transfer: Transfer) -> list[int]:
        """The blocks that are not here already. What another job stores just now is left to that job."""
        owned = self.lower.owned
        if owned is None:
            return list(range(len(transfer.keys)))
        todo: dict[OffloadKey, int] = {}
        present = []
        for i, key in enumerate(transfer.keys):
            slot = owned.ready(key)
            if slot is not None:
                transfer.settle((i,), PRESENT)
                present.append(slot)
            elif key in owned.directory or key in todo:
                transfer.settle((i,), dropped(DropReason.IN_FLIGHT))
                self.lower.counters.drop(DropReason.IN_FLIGHT)
            else:
                todo[key] = i
        owned.touch(present[::-1])
        return list(todo.values())

    def _room(self, breaker: Breaker, wanted: int, now: float) -> int:
        """How many blocks may be sent: none to a tier that is down, one job's worth to one that is being probed."""
        if self.lower.stuck or not breaker.allows(now):
            return 0
        return min(wanted, self.limits.part_blocks) if breaker.state is BreakerState.HALF_OPEN else wanted

    def _cut_off(self, transfer: Transfer, todo: list[int], room: int, reason: DropReason) -> list[int]:
        """The blocks there is room for; the others are dropped."""
        if room < len(todo):
            transfer.settle(todo[room:], dropped(reason))
            self.lower.counters.drop(reason, len(todo) - room)
        return todo[:room]

    def load(self, transfer: Transfer, now: float) -> None:
        """Begin to load blocks."""
        self._begin(transfer)
        lower = self.lower
        todo = []
        for i, key in enumerate(transfer.keys):
            if lower.holds_key(key, now):
                todo.append(i)
            else:
                transfer.settle((i,), MISSING)
        todo = self._cut_off(transfer, todo, self._room(lower.load_breaker, len(todo), now), DropReason.TIER_DOWN)
        if lower.owned is not None:
            transfer.slots.update((i, lower.owned.directory[transfer.keys[i]]) for i in todo)
        self._send(transfer, todo, now)
        self._conclude(transfer, now)

    def _send(self, transfer: Transfer, todo: Sequence[int], now: float) -> None:
        """Cut blocks into jobs of the tier."""
        size = self.limits.part_blocks
        for start in range(0, len(todo), size):
            self._emit(transfer, todo[start : start + size], now)

    def _emit(self, transfer: Transfer, members: Sequence[int], now: float) -> None:
        lower, storing = self.lower, transfer.kind is JobKind.STORE
        job_id = JobId(self._next_job)
        self._next_job += 1
        part = Part(transfer, members)
        cuts: tuple[RegionCut, ...] = ()
        if lower.owned is not None:
            part.take_slots(lower.owned.table.generation)
            if storing:
                cuts = part.cuts = lower.owned.placement.cuts_for(part.slots)
            else:
                lower.owned.hold(part.slots)
        deadline = now + lower.plan.timeout_seconds
        job = TransferJob(job_id, transfer.kind, part.groups(), deadline, self.limits.epoch, cuts)
        (lower.store_breaker if storing else lower.load_breaker).sent()
        self._passages.open(job_id)
        self._parts[job_id] = part
        transfer.parts.add(job_id)
        transfer.num_parts += 1
        self._outbox.append(Emission(STORES if storing else LOADS, job))

    # -- what the data plane tells -------------------------------------------------------------------------------

    def finish(self, result: JobResult, now: float) -> None:
        """A job ended in time."""
        part = self._parts.pop(result.job_id)
        self._passages.remove(result.job_id)
        lower, storing = self.lower, part.transfer.kind is JobKind.STORE
        outcomes = [outcome for group in result.outcomes for outcome in group]
        for outcome in outcomes:
            count_outcome(lower.counters, outcome)
        self._judge(lower.store_breaker if storing else lower.load_breaker, outcomes, now)
        good = [i for i, outcome in zip(part.order, outcomes, strict=True) if outcome.ok]
        if storing:
            lower.counters.stored += len(good)
            lower.counters.store_bytes += result.bytes_moved
            self._stored(part, set(good), now)
        else:
            lower.counters.loaded += len(good)
            lower.counters.load_bytes += result.bytes_moved
            self._loaded(part, outcomes, now)
        self._end_part(part, result.job_id, outcomes, result.bytes_moved, now)

    def _judge(self, breaker: Breaker, outcomes: Sequence[BlockOutcome], now: float) -> None:
        """What a job says about the tier's health; one that was given up says nothing, and ends a probe in vain."""
        if any(outcome.status is not BlockStatus.CANCELLED for outcome in outcomes):
            self.lower.judge(breaker, outcomes, now)
        elif breaker.state is BreakerState.HALF_OPEN:
            breaker.failed(now)

    def _stored(self, part: Part, good: set[int], now: float) -> None:
        owned, shared = self.lower.owned, self.lower.shared
        if owned is not None:
            slots = part.transfer.slots
            stored = [slots[i] for i in part.members if i in good]
            owned.commit(stored)
            owned.abort([slots[i] for i in part.members if i not in good])
            if stored:
                owned.placement.told(part.cuts)
        elif shared is not None:
            new = [part.transfer.keys[i] for i in part.members if i in good]
            for key in new:
                shared.learn(key, True, now)
            if new:
                self._changes.append((False, new))

    def _loaded(self, part: Part, outcomes: Sequence[BlockOutcome], now: float) -> None:
        """Entries that were refused or could not be read go."""
        owned, shared = self.lower.owned, self.lower.shared
        for at, (i, outcome) in enumerate(zip(part.order, outcomes, strict=True)):
            if outcome.status not in REFUSED:
                continue
            if owned is not None:
                owned.discard(part.slots[at], part.generations[at])
            elif shared is not None and outcome.status is not BlockStatus.FAILED:
                shared.learn(part.transfer.keys[i], False, now)
        if owned is not None:
            owned.release(part.slots)

    def late(self, job_id: JobId, now: float) -> None:
        """A job passed its deadline; `ended` will follow when its I/O is really over. vLLM's rows are left alone."""
        part = self._late[job_id] = self._parts.pop(job_id)
        lower, count = self.lower, len(part.members)
        self._passages.shut(job_id)
        lower.counters.late += count
        lower.rows_stuck += count
        if part.transfer.kind is JobKind.STORE:
            lower.store_breaker.failed(now)
            if lower.owned is not None:
                lower.owned.quarantine(part.slots)
        else:
            lower.load_breaker.failed(now)
        self._end_part(part, job_id, [LATE] * count, 0, now)

    def ended(self, job_id: JobId, now: float) -> None:
        """The I/O of a late job is over, however it ended."""
        part = self._late.pop(job_id)
        self._passages.remove(job_id)
        self.lower.rows_stuck -= len(part.members)
        if self.lower.owned is not None:
            self.lower.owned.release(part.slots)

    def answer(self, keys: Sequence[OffloadKey], answers: Sequence[LookupResult], now: float) -> None:
        """A shared tier's answer."""
        if self.lower.shared is not None:
            self.lower.shared.answer(keys, answers, now)

    def relieve(self, now: float) -> None:
        """While stores hold too many of vLLM's rows and the oldest has waited long, the youngest go without: a slow
        disk must not take vLLM's CPU tier away. What was copied out of vLLM's rows by then is stored all the same."""
        stores = [transfer for transfer in self._transfers.values() if transfer.kind is JobKind.STORE]
        if not stores or now < stores[0].started + PATIENCE_SECONDS:
            return
        while self._pinned > self.limits.pinned_max:
            self.lower.counters.drop(
                DropReason.BACKLOG, self._cut_short(stores.pop(), dropped(DropReason.BACKLOG), now)
            )

    def give_up(self, now: float) -> int:
        """End every job of vLLM now; nothing touches its rows any more. Returns how many blocks that cuts short.

        I/O under way goes on in memory of our own: what it stores counts.
        """
        return sum(self._cut_short(transfer, CANCELLED, now) for transfer in list(self._transfers.values()))

    def _cut_short(self, transfer: Transfer, outcome: BlockOutcome, now: float) -> int:
        for job_id in transfer.parts:
            self._passages.shut(job_id)
        transfer.parts.clear()
        count = transfer.settle_rest(outcome)
        self._conclude(transfer, now)
        return count

    # -- the end of vLLM's jobs ----------------------------------------------------------------------------------

    def _end_part(
        self, part: Part, job_id: JobId, outcomes: Sequence[BlockOutcome], bytes_moved: int, now: float
    ) -> None:
        transfer = part.transfer
        if job_id not in transfer.parts:
            return
        transfer.parts.discard(job_id)
        transfer.bytes_moved += bytes_moved
        for i, outcome in zip(part.order, outcomes, strict=True):
            transfer.settle((i,), outcome)
        self._conclude(transfer, now)

    def _conclude(self, transfer: Transfer, now: float) -> None:
        """If nothing of a job is under way any more, it has ended."""
        if transfer.parts:
            return
        del self._transfers[transfer.job_id]
        transfer.seconds = now - transfer.started
        if transfer.kind is JobKind.STORE:
            self._pinned -= len(transfer.keys)
            self._keep_order(transfer)
        else:
            bad = transfer.failed_keys
            if bad and transfer.request_id in self._refused:
                self._refused[transfer.request_id].update(bad)
            self._touch(transfer)
        self._ended.append(transfer)

    def _keep_order(self, transfer: Transfer) -> None:
        """Parts end in any order; what they stored ages from the leaf on all the same."""
        owned = self.lower.owned
        if owned is not None and transfer.num_parts > 1:
            owned.reorder(self._ready_slots(transfer))

    def _touch(self, transfer: Transfer) -> None:
        if self.lower.owned is not None:
            self.lower.owned.touch(self._ready_slots(transfer))

    def _ready_slots(self, transfer: Transfer) -> list[int]:
        """Where the blocks of a job are that went well, the leaf first."""
        owned = self.lower.owned
        assert owned is not None
        found = []
        for i in reversed(range(len(transfer.keys))):
            slot = transfer.slots.get(i)
            if slot is not None and transfer.succeeded(i) and owned.ready(transfer.keys[i]) == slot:
                found.append(slot)
        return found

    # -- taking out ----------------------------------------------------------------------------------------------

    def take_jobs(self) -> list[Emission]:
        """The jobs to run, each once."""
        jobs, self._outbox = self._outbox, []
        return jobs

    def take_questions(self) -> list[OffloadKey]:
        """The keys whose presence in a shared tier is to be looked up."""
        return self.lower.shared.take_questions() if self.lower.shared is not None else []

    def take_ended(self) -> list[Transfer]:
        """vLLM's jobs that have ended, each once."""
        ended, self._ended = self._ended, []
        return ended

    def take_changes(self) -> list[tuple[bool, list[OffloadKey]]]:
        """(removed, keys) of what became reachable here or ceased to be, in order."""
        if self.lower.owned is not None:
            return self.lower.owned.take_changes()
        changes, self._changes = self._changes, []
        return changes

    @property
    def busy(self) -> bool:
        """True while a job of vLLM has not ended."""
        return bool(self._transfers)

    @property
    def backlog(self) -> int:
        """Blocks of vLLM's jobs that have not ended."""
        return sum(len(transfer.keys) for transfer in self._transfers.values())

    @property
    def io_under_way(self) -> int:
        """Jobs of the tier whose I/O has not ended, those that were given up included."""
        return len(self._parts) + len(self._late)

    def check(self) -> None:
        """Raise IntegrityError unless the sums agree."""
        if self.lower.owned is not None:
            self.lower.owned.check()
