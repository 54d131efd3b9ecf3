"""The control plane of a tier below an engine's own CPU tier: jobs of the engine in, jobs of the tier out.

Synchronous and deterministic: no I/O and no clock of its own. One thread calls it. Directory, slots, eviction and
health of the tier are those of every lower tier (`kvtier.control`). There are no CPU rows here, because the engine has
its own and decides what it stores below.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.control.jobs import JobTable, PresenceQuery, Recipient, TierJob
from kvtier.control.tiers.aged_tier import AgedTier
from kvtier.control.tiers.breaker import BreakerState
from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.control.tiers.tier_index import TierIndex
from kvtier.engines.engine_memory.staging import CopyPermits
from kvtier.engines.engine_memory.transfers import EngineTransfer, TransferPart
from kvtier.errors import UsageError
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import (
    CANCELLED,
    LATE,
    MISSING,
    PRESENT,
    BlockOutcome,
    DropReason,
    JobKind,
    JobResult,
    SkipReason,
    dropped,
)
from kvtier.types.keys import JobId, OffloadKey, key_group


@dataclass(slots=True, eq=False)
class _Lease:
    key: OffloadKey
    slots: Sequence[int]
    until: float
    ended: bool = False


class BlockLeases:
    """Pins in the slots of one tier: a leased block is not evicted. A shared tier evicts by itself, and has none.

    A lease ends when it is released, or `seconds` after it was taken. There are at most `count_max`: a further one ends
    the oldest.
    """

    def __init__(self, index: TierIndex, seconds: float, count_max: int) -> None:
        self._index = index
        self._seconds = seconds
        self._count_max = count_max
        self._in_order: deque[_Lease] = deque()
        self._of_key: dict[OffloadKey, deque[_Lease]] = {}

    def take(self, key: OffloadKey, now: float) -> None:
        """Keep a block that is here."""
        slots = self._index.slots((key,))
        if not slots:
            return
        self.expire(now)
        while len(self._in_order) >= self._count_max:
            self._end(self._in_order.popleft())
        self._index.pin(slots)
        lease = _Lease(key, slots, now + self._seconds)
        self._in_order.append(lease)
        self._of_key.setdefault(key, deque()).append(lease)

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """End the oldest lease of each of these keys, where there is one."""
        for key in keys:
            if key in self._of_key:
                self._end(self._of_key[key][0])
        while self._in_order and self._in_order[0].ended:
            self._in_order.popleft()

    def release_all(self) -> None:
        """End every lease."""
        for lease in self._in_order:
            self._end(lease)
        self._in_order.clear()

    def expire(self, now: float) -> None:
        """End the leases whose time has passed."""
        while self._in_order and (self._in_order[0].ended or self._in_order[0].until <= now):
            self._end(self._in_order.popleft())

    def _end(self, lease: _Lease) -> None:
        if lease.ended:
            return
        lease.ended = True
        others = self._of_key[lease.key]
        others.remove(lease)
        if not others:
            del self._of_key[lease.key]
        self._index.unpin(lease.slots)


LOADS, STORES = 0, 1
"""Positions of the two queues: loads never wait behind stores for staging rows."""
PATIENCE_SECONDS = 1.0
"""How long stores may keep more of the engine's blocks than their share, and how long a tier may be silent."""
SILENT_JOBS = 2
"""After this number of jobs of one kind in a row during which nothing ended, the tier is left alone."""


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """A job of the tier has at most `part_blocks` blocks, and they fit into `part_frames` frames, in each of which
    `frame_blocks[g]` blocks of group g have room. Stores that have waited for a while may keep at most `pinned_max`
    blocks of the engine. A block that was found is kept for `lease_seconds`, at most."""

    part_blocks: int
    pinned_max: int
    lease_seconds: float
    part_frames: int
    frame_blocks: Sequence[int]


class EngineMemoryPlane(Recipient):
    """All decisions. After any call take the jobs to run with `take_jobs`, the keys to look up with `take_queries` and
    the engine's jobs that have ended with `take_ended`.

    `epoch` is that of the tier's namespace.
    """

    def __init__(self, lower: LowerTier, permits: CopyPermits, limits: PlaneLimits, epoch: int = 0) -> None:
        self.lower = lower
        self._limits = limits
        self._jobs: JobTable[TransferPart] = JobTable(epoch)
        slots = len(lower.owned.table) if lower.owned is not None else 0
        self._leases = BlockLeases(lower.index, limits.lease_seconds, max(1, slots))
        self._permits = permits
        self._transfers: dict[int, EngineTransfer] = {}
        self._refused: dict[str, set[OffloadKey]] = {}
        self._silent = dict.fromkeys(JobKind, 0)
        self._ended: list[EngineTransfer] = []

    # -- requests ------------------------------------------------------------------------------------------------

    def begin_request(self, request_id: str) -> None:
        """A request whose keys will be looked up."""
        self._refused.setdefault(request_id, set())

    def end_request(self, request_id: str) -> None:
        """No further lookups come for this request."""
        self._refused.pop(request_id, None)

    def lookup(self, key: OffloadKey, request_id: str, now: float) -> LookupResult:
        """HIT: loadable, and leased until `end_step`. RETRY: a lookup in a shared tier is in flight.

        A key whose load failed for a request is a miss for that request from then on.
        """
        lower = self.lower
        if key in self._refused.get(request_id, ()) or not lower.may_load(now):
            return LookupResult.MISS
        presence = lower.index.presence(key, now)
        if presence is None:
            lower.index.request(key, now)
            return LookupResult.RETRY
        lower.counters.look_up(1, int(not presence))
        if not presence:
            return LookupResult.MISS
        self._leases.take(key, now)
        return LookupResult.HIT

    def find(self, keys: Sequence[OffloadKey], now: float) -> list[bool | None]:
        """Presence of each key of a prompt, in prefix order; None while a lookup in a shared tier is in flight."""
        lower = self.lower
        if not lower.may_load(now):
            return [False] * len(keys)
        found = [there and not lower.silent(key) for key, there in zip(keys, lower.index.find(keys, now), strict=True)]
        if None not in found:
            lower.counters.look_up(len(keys), found.count(False))
        return found

    def lease(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Keep blocks for the loads that follow: until `release`, or for a bounded time. One that is not here stays a
        miss."""
        for key in keys:
            if self.lower.index.presence(key, now):
                self._leases.take(key, now)

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """End a lease of each of these keys."""
        self._leases.release(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks, given in prefix order, were used although they were not loaded."""
        owned = self.lower.owned
        if owned is not None:
            slots = [slot for key in reversed(keys) if (slot := owned.ready(key)) is not None]
            owned.touch(slots)

    def remove(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Drop blocks that are wanted no more, unless they are leased or being loaded; of a shared tier, what is
        believed of them.

        As after any eviction, a crash may bring back what was dropped just before it.
        """
        owned = self.lower.owned
        if owned is None:
            for key in keys:
                self.lower.index.note_presence(key, False, now)
            return
        slots = dict.fromkeys(slot for key in keys if (slot := owned.ready(key)) is not None)
        owned.remove([slot for slot in slots if not owned.table.pins[slot]])

    def end_step(self) -> None:
        """The loads of this step were submitted: its hits need not be kept any longer."""
        self._leases.release_all()

    # -- the engine's jobs ---------------------------------------------------------------------------------------

    def submit(self, transfer: EngineTransfer, now: float) -> None:
        """Begin to store or load blocks. Of a store, blocks nearest to the root of their prefix get slots first."""
        if transfer.job_id in self._transfers:
            raise UsageError(f"job {transfer.job_id} is in flight")
        self._transfers[transfer.job_id] = transfer
        if transfer.kind is JobKind.STORE:
            members = self._with_slots(transfer, self._admit(transfer, self._without_present(transfer, now), now), now)
            members.reverse()  # leaves go first, so that a parent never ages before its children
        else:
            members = self._admit(transfer, self._found(transfer, now), now)
        deadline = now + self.lower.spec.timeout_seconds
        for part in self._parts(transfer, members):
            self._send(TransferPart(self.lower, transfer, part), deadline)
        self._conclude(transfer, now)

    def _parts(self, transfer: EngineTransfer, members: Sequence[int]) -> Iterator[list[int]]:
        """The blocks of each job of the tier."""
        limits, part, frames = self._limits, list[int](), 0
        counts: Counter[int] = Counter()
        for block in members:
            group = key_group(transfer.keys[block])
            opens = counts[group] % limits.frame_blocks[group] == 0
            if len(part) == limits.part_blocks or frames + opens > limits.part_frames:
                yield part
                part, frames, opens = [], 0, True
                counts.clear()
            part.append(block)
            counts[group] += 1
            frames += opens
        if part:
            yield part

    def _without_present(self, transfer: EngineTransfer, now: float) -> list[int]:
        """The blocks that are not here. A block that another job is storing is left to that job."""
        owned = self.lower.owned
        if owned is None:
            return self._without_known(transfer, now)
        todo: dict[OffloadKey, int] = {}
        present = []
        for i, key in enumerate(transfer.keys):
            slot = owned.ready(key)
            if slot is not None:
                transfer.complete((i,), PRESENT)
                present.append(slot)
            elif key in owned.directory or key in todo:
                self._drop(transfer, (i,), DropReason.IN_FLIGHT)
            else:
                todo[key] = i
        owned.touch(present[::-1])
        return list(todo.values())

    def _without_known(self, transfer: EngineTransfer, now: float) -> list[int]:
        """The blocks that a shared tier is not known to have."""
        needed = [i for i, key in enumerate(transfer.keys) if self.lower.index.needs(key, now)]
        known = transfer.complete(set(range(len(transfer.keys))).difference(needed), PRESENT)
        if known:
            self.lower.counters.skip(SkipReason.ALREADY_THERE, known)
        return needed

    def _found(self, transfer: EngineTransfer, now: float) -> list[int]:
        """The blocks that may be loaded, in an owned tier with their slots."""
        lower = self.lower
        found = [i for i, key in enumerate(transfer.keys) if lower.holds_key(key, now)]
        transfer.complete(set(range(len(transfer.keys))).difference(found), MISSING)
        transfer.slots.update(zip(found, lower.index.slots([transfer.keys[i] for i in found]), strict=False))
        return found

    def _admit(self, transfer: EngineTransfer, blocks: list[int], now: float) -> list[int]:
        """The blocks that may be sent: none to a tier that is down, one job's worth to one that is being probed."""
        lower = self.lower
        if transfer.kind is JobKind.STORE:
            allowed, breakers = lower.may_store(now), [lower.store_breaker, lower.room_breaker]
            reason = lower.refusal or DropReason.TIER_DOWN
        else:
            allowed, breakers, reason = lower.may_load(now), [lower.load_breaker], DropReason.TIER_DOWN
        probing = any(breaker.state is BreakerState.HALF_OPEN for breaker in breakers)
        one_job = min(self._limits.part_blocks, self._limits.part_frames)
        room = 0 if not allowed else one_job if probing else len(blocks)
        self._drop(transfer, blocks[room:], reason)
        return blocks[:room]

    def _with_slots(self, transfer: EngineTransfer, blocks: list[int], now: float) -> list[int]:
        """The blocks that got a slot; all of them in a shared tier."""
        owned = self.lower.owned
        if owned is None:
            return blocks
        owned.placement.try_full_disks(now)
        slots = owned.reserve([transfer.keys[i] for i in blocks])
        self._drop(transfer, blocks[len(slots) :], self.lower.no_slot_reason)
        transfer.slots.update(zip(blocks, slots, strict=False))
        return blocks[: len(slots)]

    def _drop(self, transfer: EngineTransfer, blocks: Sequence[int], reason: DropReason) -> None:
        if blocks:
            self.lower.counters.drop(reason, transfer.complete(blocks, dropped(reason)))

    def _send(self, part: TransferPart, deadline: float) -> None:
        part.begin()
        part.transfer.parts.add(part)
        position = STORES if part.kind is JobKind.STORE else LOADS
        job_id = self._jobs.emit(position, part.kind, part.groups, deadline, part, part.formats)
        self._permits[job_id] = part.permit

    # -- deliveries of the data plane ----------------------------------------------------------------------------

    def finish(self, result: JobResult, now: float) -> None:
        """A job ended in time."""
        part = self._jobs.finish(result, now)
        del self._permits[result.job_id]
        if part.answered:
            self._silent[part.kind] = 0
        self._conclude(part.transfer, now)

    def on_late(self, job_id: JobId, now: float) -> None:
        """A job passed its deadline; `on_end` follows when its I/O has ended. The engine's memory is left alone."""
        self._conclude(self._jobs.on_late(job_id, now).transfer, now)

    def on_end(self, job_id: JobId, now: float) -> None:
        """The I/O of a late job has ended, however it ended."""
        self._jobs.on_end(job_id, now)
        del self._permits[job_id]

    def answer(self, query: PresenceQuery, results: Sequence[LookupResult], now: float) -> None:
        """A shared tier's answer to a query. Those to queries before a reset are ignored."""
        if query.epoch == self.epoch:
            self.lower.index.take_answers(query.keys, results, now)

    def relieve(self, now: float) -> None:
        """Give up jobs that were lost, and the newest stores while stores keep too many blocks and the oldest waits.

        A slow disk must not take the engine's CPU tier away. What was copied out of it by then is stored. Also ends
        leases whose time has passed, frees slots whose blocks are too old, and takes note of the time.
        """
        self._leases.expire(now)
        if self.lower.owned is not None:
            self.lower.owned.uses.time.advance(now)
        if isinstance(self.lower.owned, AgedTier):
            self.lower.owned.reclaim(now)
        lost_before = now - self.lower.spec.timeout_seconds - PATIENCE_SECONDS
        for transfer in [each for each in self._transfers.values() if each.started <= lost_before]:
            self._give_up(transfer, LATE, now)
        stores = [transfer for transfer in self._transfers.values() if transfer.kind is JobKind.STORE]
        if not stores or now < stores[0].started + PATIENCE_SECONDS:
            return
        pinned = sum(len(transfer.keys) for transfer in stores)
        while pinned > self._limits.pinned_max:
            newest = stores.pop()
            pinned -= len(newest.keys)
            count = self._give_up(newest, dropped(DropReason.BACKLOG), now)
            self.lower.counters.drop(DropReason.BACKLOG, count)

    def end(self, transfer: EngineTransfer, now: float) -> None:
        """End one job of the engine now: what has not ended is late, and no copy touches its memory any more."""
        self._give_up(transfer, LATE, now)

    def reset(self, now: float) -> int:
        """Nothing from before is found from here on, and no job of the engine is in flight. Returns the new epoch.

        Slots with transfers in flight are quarantined until those have ended.
        """
        self.give_up(now)
        for part in (*self._jobs.running.values(), *self._jobs.late_jobs.values()):
            part.current = False
        self.next_epoch()
        self._leases.release_all()
        self.lower.index.reset()
        return self._jobs.epoch

    def give_up(self, now: float) -> int:
        """End every job of the engine now: no copy touches its memory any more. Returns how many blocks were given up.

        I/O in flight goes on in memory of our own, and what it stores counts.
        """
        return sum(self._give_up(transfer, CANCELLED, now) for transfer in list(self._transfers.values()))

    def _give_up(self, transfer: EngineTransfer, outcome: BlockOutcome, now: float) -> int:
        for part in transfer.parts:
            part.permit.shut()
        transfer.parts.clear()
        count = transfer.complete(range(len(transfer.keys)), outcome)
        self._conclude(transfer, now)
        return count

    def _conclude(self, transfer: EngineTransfer, now: float) -> None:
        """A job of the engine has ended once none of its parts is in flight; one that was given up, before that."""
        if transfer.parts or self._transfers.get(transfer.job_id) is not transfer:
            return
        del self._transfers[transfer.job_id]
        transfer.ended = True
        transfer.seconds = now - transfer.started
        self._judge_silence(transfer, now)
        stores, owned = transfer.kind is JobKind.STORE, self.lower.owned
        if not stores and transfer.request_id in self._refused:
            self._refused[transfer.request_id].update(set(transfer.keys).difference(transfer.good_keys))
        if owned is not None:
            # Jobs end in any order and group by group; the leaf is the oldest all the same.
            good = ((transfer.keys[i], transfer.slots.get(i)) for i in reversed(transfer.good))
            ready = [slot for key, slot in good if slot is not None and owned.ready(key) == slot]
            (owned.reorder if stores else owned.touch)(ready)
        self._ended.append(transfer)

    def _judge_silence(self, transfer: EngineTransfer, now: float) -> None:
        """A disk is dead rather than slow when nothing of two jobs came back, and nothing of any other either.

        Waiting for several jobs to be late takes long where an engine has one call at a time.
        """
        if transfer.answered or transfer.seconds < PATIENCE_SECONDS or LATE not in transfer.outcomes:
            return
        self._silent[transfer.kind] += 1
        if self._silent[transfer.kind] >= SILENT_JOBS:
            stores = transfer.kind is JobKind.STORE
            (self.lower.store_breaker if stores else self.lower.load_breaker).trip(now)

    # -- taking out ----------------------------------------------------------------------------------------------

    def take_jobs(self) -> list[TierJob]:
        """The jobs to run, each once."""
        return self._jobs.take_jobs()

    def take_queries(self) -> list[PresenceQuery]:
        """The lookups of a shared tier to make, each once."""
        keys = self.lower.index.take_queries()
        return [PresenceQuery(self.lower.position, tuple(keys), self.epoch)] if keys else []

    def take_ended(self) -> list[EngineTransfer]:
        """The engine's jobs that have ended, each once."""
        ended, self._ended = self._ended, []
        return ended

    def take_changes(self) -> list[tuple[bool, list[OffloadKey]]]:
        """(removed, keys) of what became reachable here or ceased to be, in order."""
        return self.lower.index.take_changes()

    def next_epoch(self) -> None:
        """Count a reset."""
        self._jobs.epoch += 1

    @property
    def epoch(self) -> int:
        """The namespace's."""
        return self._jobs.epoch

    def announce(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Have the next changes name once more those of these keys in an owned tier: each is removed and then there."""
        there = [key for key in keys if self.lower.owned is not None and self.lower.owned.presence(key, now)]
        if there:
            self.lower.index.changes += [(True, there), (False, list(there))]

    @property
    def busy(self) -> bool:
        """True while a job of the engine has not ended."""
        return bool(self._transfers)

    @property
    def backlog(self) -> int:
        """Blocks of the engine's jobs that have not ended."""
        return sum(len(transfer.keys) for transfer in self._transfers.values())

    def check_integrity(self) -> None:
        """Raise IntegrityError unless states, directory and counters of an owned tier agree."""
        self.lower.index.check()
