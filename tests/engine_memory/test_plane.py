"""The plane of a tier below an engine's memory under random orders of events: no I/O, no clock, no engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvtier.control.tiers.lower_tier import LowerTier, TierSpec
from kvtier.engines.engine_memory.plane import EngineMemoryPlane, PlaneLimits
from kvtier.engines.engine_memory.staging import CopyPermits
from kvtier.engines.engine_memory.transfers import EngineTransfer
from kvtier.tier.block_age import BlockAges
from kvtier.tier.contract import LookupResult, Opened, SlotSpace
from kvtier.types.arrays import int_array
from kvtier.types.jobs import (
    CANCELLED,
    CORRUPT,
    LOADED,
    MISSING,
    STORED,
    BlockOutcome,
    DropReason,
    JobKind,
    JobResult,
    RowGroup,
    SkipReason,
    TransferJob,
    dropped,
    failed,
)
from kvtier.types.keys import FS, OffloadKey, make_key

SLOT = 8192
TURN_SECONDS = 0.4
BEGIN_NS = 1_700_000_000 * 10**9
LIMITS = PlaneLimits(3, 8, 10.0, part_frames=3, frame_blocks=(1, 2))


def key(number: int) -> OffloadKey:
    return make_key(number.to_bytes(16, "big"), number % 2)


@dataclass
class Disk:
    """Slots, and jobs under way on them: a job's bytes move at any moment between its start and its end."""

    rng: random.Random
    slots: dict[int, tuple[OffloadKey, int]] = field(default_factory=dict)
    running: list[TransferJob] = field(default_factory=list)
    late: list[TransferJob] = field(default_factory=list)
    wrong: int = 0

    def blocks(self, job: TransferJob) -> list[tuple[OffloadKey, int, int]]:
        return [
            (name, slot, generation)
            for group in job.groups
            for name, slot, generation in zip(group.keys, group.slots, group.generations, strict=True)
        ]

    def move(self, job: TransferJob) -> JobResult:
        """The job's bytes move now, block by block with one's own luck."""
        outcomes = iter([self._block(job.kind, *block) for block in self.blocks(job)])
        return JobResult(job.job_id, tuple(tuple(next(outcomes) for _ in group.keys) for group in job.groups))

    def _block(self, kind: JobKind, name: OffloadKey, slot: int, generation: int) -> BlockOutcome:
        luck = self.rng.random()
        if kind is JobKind.STORE:
            if luck < 0.1:
                return dropped(DropReason.DISK_FULL) if luck < 0.05 else failed(5)
            self.slots[slot] = (name, generation)
            return STORED
        if luck < 0.1:
            return CORRUPT if luck < 0.05 else failed(5)
        found = self.slots.get(slot) == (name, generation)
        self.wrong += not found
        return LOADED if found else MISSING


class World:
    """A plane above such a disk, below somebody who asks at random."""

    def __init__(
        self,
        seed: int,
        policy: str = "",
        shared: bool = False,
        max_age: int | None = None,
        limits: PlaneLimits = LIMITS,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.max_age = max_age
        space = SlotSpace(8 * SLOT, (2, 1), (SLOT, SLOT))
        policy = policy or self.rng.choice(["lru", "arc"])
        opened = Opened(24 * SLOT, None if shared else space, ages=BlockAges(self.wall_ns, max_age))
        plan = TierSpec("fs", FS, opened, policy, timeout_seconds=5.0, by_root=False)
        self.lower = LowerTier(1, plan, rows_max=6)
        self.permits: CopyPermits = {}
        self.plane = EngineMemoryPlane(self.lower, self.permits, limits)
        self.disk = Disk(self.rng)
        self.begun: set[int] = set()
        self.ended: list[int] = []
        self.good = 0

    def wall_ns(self) -> int:
        return BEGIN_NS + int(self.now * 1e9)

    def transfer(self, kind: JobKind, names: list[OffloadKey], request: str) -> EngineTransfer:
        job_id = len(self.begun)
        self.begun.add(job_id)
        return EngineTransfer(job_id, kind, names, int_array(range(len(names))), request, self.now)

    def take(self) -> None:
        for emission in self.plane.take_jobs():
            self.permits[emission.job.job_id]  # raises unless the job has one
            if emission.job.kind is JobKind.LOAD and self.max_age is not None:
                oldest = min(generation for _, _, generation in self.disk.blocks(emission.job))
                decided_at = self.now - TURN_SECONDS
                assert decided_at <= self.max_age + (oldest - BEGIN_NS) / 1e9, "what is too old is not loaded"
            self.disk.running.append(emission.job)
        for transfer in self.plane.take_ended():
            self.ended.append(transfer.job_id)
            if transfer.kind is JobKind.LOAD:
                self.good += len(transfer.good_keys)

    def ask(self) -> None:
        """A request looks a prefix up and loads what it is promised, with stores in between."""
        request, start = f"r{self.rng.randrange(4)}", self.rng.randrange(60)
        self.plane.begin_request(request)
        names = [key(number) for number in range(start, start + self.rng.randrange(1, 8))]
        hits = [name for name in names if self.plane.lookup(name, request, self.now) is LookupResult.HIT]
        if self.rng.random() < 0.5:
            self.store()
        if hits and self.rng.random() < 0.9:
            transfer = self.transfer(JobKind.LOAD, hits, request)
            self.plane.submit(transfer, self.now)
            owned = self.lower.owned
            assert owned is not None
            kept = [name for name in hits if owned.ready(name) is not None]
            assert kept == hits, "a promise of this step was evicted"
        self.plane.end_step()
        if self.rng.random() < 0.5:
            self.plane.end_request(request)

    def store(self) -> None:
        start = self.rng.randrange(60)
        names = [key(number) for number in range(start, start + self.rng.randrange(1, 12))]
        self.plane.submit(self.transfer(JobKind.STORE, names, "writer"), self.now)

    def deliver(self) -> None:
        """Something ends, or passes its deadline; a late job's bytes may move before and after that."""
        if self.disk.late and self.rng.random() < 0.4:
            job = self.disk.late.pop(self.rng.randrange(len(self.disk.late)))
            if self.rng.random() < 0.5:
                self.disk.move(job)
            self.plane.on_end(job.job_id, self.now)
        elif self.disk.running:
            job = self.disk.running.pop(self.rng.randrange(len(self.disk.running)))
            luck = self.rng.random()
            if luck < 0.1:
                self.plane.on_late(job.job_id, self.now)
                self.disk.late.append(job)
            elif luck < 0.15:
                self.plane.finish(JobResult.uniform(job, CANCELLED), self.now)
            else:
                self.plane.finish(self.disk.move(job), self.now)

    def turn(self) -> None:
        choice = self.rng.random()
        if choice < 0.3:
            self.ask()
        elif choice < 0.5:
            self.store()
        elif choice < 0.95:
            self.deliver()
        elif choice < 0.97:
            self.plane.give_up(self.now)
        else:
            self.plane.relieve(self.now)
        self.now += self.rng.random() * TURN_SECONDS
        self.take()
        owned = self.lower.owned
        assert owned is not None
        self.plane.check_integrity()
        assert owned.used_bytes <= 24 * SLOT

    def end(self) -> None:
        self.take()
        while self.disk.running or self.disk.late:
            self.deliver()
            self.take()


TURNS, TURNS_MAX = 300, 3000
"""In one of a thousand worlds no load has brought a block after 300 turns: such a world goes on. One with an age need
not: in one of a hundred every block is too old when it is wanted."""


@pytest.mark.parametrize("number", range(40))
def test_every_job_ends_once_and_nothing_is_left_whatever_the_disk_does(seed, number):
    world = World(seed + number, max_age=5 if number % 2 else None)
    for turn in range(TURNS_MAX):
        world.turn()
        if turn + 1 >= TURNS and (world.good or world.max_age):
            break
    world.end()
    owned = world.lower.owned
    assert owned is not None
    assert sorted(world.ended) == sorted(world.begun), "each job is reported exactly once"
    assert world.disk.wrong == 0, "no load was sent to a slot that held something else"
    assert world.good > 0 or world.max_age, "no load brought a block"
    assert not world.plane.busy
    assert not world.lower.rows_in_flight
    assert not world.plane.backlog
    assert not any(owned.table.pins)
    assert (owned.expired > 0) == (number % 2)
    assert world.lower.rows_late == 0
    assert not world.permits
    world.plane.check_integrity()


def test_a_late_store_is_not_loadable_and_its_slot_waits_for_the_end_of_its_io():
    world = World(1)
    names = [key(number) for number in range(3)]
    world.plane.submit(world.transfer(JobKind.STORE, names, "writer"), 0.0)
    world.take()
    (job,) = world.disk.running
    world.plane.on_late(job.job_id, 5.0)
    world.take()
    assert world.ended == [0]
    assert {world.plane.lookup(name, "reader", 5.0) for name in names} == {LookupResult.MISS}
    owned = world.lower.owned
    assert owned is not None
    for number in range(100, 124):
        world.plane.submit(world.transfer(JobKind.STORE, [key(number)], "writer"), 5.0)
    taken = {slot for emission in world.plane.take_jobs() for _, slot, _ in world.disk.blocks(emission.job)}
    assert taken.isdisjoint({slot for _, slot, _ in world.disk.blocks(job)})
    assert len(taken) == 21
    world.plane.on_end(job.job_id, 6.0)
    world.plane.submit(world.transfer(JobKind.STORE, names, "writer"), 6.0)
    assert len(world.plane.take_jobs()[0].job.groups) == 2


def test_a_key_that_failed_is_a_miss_for_its_request_until_it_is_finished():
    world = World(1)
    world.plane.submit(world.transfer(JobKind.STORE, [key(0)], "writer"), 0.0)
    job = world.plane.take_jobs()[0].job
    world.plane.finish(JobResult.uniform(job, STORED), 0.0)
    world.plane.begin_request("a")
    world.plane.begin_request("b")
    assert world.plane.lookup(key(0), "a", 0.0) is LookupResult.HIT
    world.plane.submit(world.transfer(JobKind.LOAD, [key(0)], "a"), 0.0)
    world.plane.on_late(world.plane.take_jobs()[0].job.job_id, 5.0)
    assert world.plane.lookup(key(0), "a", 5.0) is LookupResult.MISS
    assert world.plane.lookup(key(0), "b", 5.0) is LookupResult.HIT
    world.plane.end_request("a")
    world.plane.begin_request("a")
    assert world.plane.lookup(key(0), "a", 5.0) is LookupResult.HIT


def test_a_tier_that_erred_again_and_again_is_left_alone_then_probed_with_one_job():
    world = World(1)
    for number in range(5):
        world.plane.submit(world.transfer(JobKind.STORE, [key(number)], "writer"), 0.0)
        job = world.plane.take_jobs()[0].job
        world.plane.finish(JobResult.uniform(job, failed(5)), 0.0)
    world.plane.submit(world.transfer(JobKind.STORE, [key(9)], "writer"), 1.0)
    assert not world.plane.take_jobs()
    assert world.lower.counters.dropped == {DropReason.TIER_DOWN: 1}
    many = [key(2 * number) for number in range(10, 18)]
    world.plane.submit(world.transfer(JobKind.STORE, many, "writer"), 6.0)
    (probe,) = world.plane.take_jobs()
    assert probe.job.num_blocks == 3
    world.plane.submit(world.transfer(JobKind.STORE, [key(50)], "writer"), 6.0)
    assert not world.plane.take_jobs(), "one probe at a time"
    world.plane.finish(JobResult.uniform(probe.job, CANCELLED), 6.0)
    world.plane.submit(world.transfer(JobKind.STORE, [key(51)], "writer"), 12.0)
    (probe,) = world.plane.take_jobs()
    world.plane.finish(JobResult.uniform(probe.job, STORED), 12.0)
    world.plane.submit(world.transfer(JobKind.STORE, many, "writer"), 12.0)
    assert len(world.plane.take_jobs()) == 3


def test_nothing_is_promised_from_a_tier_that_cannot_be_read():
    world = World(1)
    stored(world, [key(number) for number in range(6)])
    for number in range(5):
        assert world.plane.lookup(key(5), "r", 0.0) is LookupResult.HIT
        world.plane.submit(world.transfer(JobKind.LOAD, [key(number)], "r"), 0.0)
        world.plane.finish(JobResult.uniform(world.plane.take_jobs()[0].job, failed(5)), 0.0)
    assert world.plane.lookup(key(5), "r", 1.0) is LookupResult.MISS
    assert world.plane.lookup(key(5), "r", 6.0) is LookupResult.HIT, "to be probed"


def test_parts_that_end_out_of_order_age_in_the_order_of_the_prefix():
    world = World(1)
    names = [key(2 * number) for number in range(9)]
    world.plane.submit(world.transfer(JobKind.STORE, names, "writer"), 0.0)
    for emission in reversed(world.plane.take_jobs()):
        world.plane.finish(JobResult.uniform(emission.job, STORED), 0.0)
    owned = world.lower.owned
    assert owned is not None
    assert [owned.table.keys[slot] for slot in owned.policy.coldest()] == names[::-1]


def stored(world: World, names: list[OffloadKey]) -> list[TransferJob]:
    """Store keys, all well; the tier's jobs for that."""
    world.plane.submit(world.transfer(JobKind.STORE, names, "writer"), world.now)
    jobs = [emission.job for emission in world.plane.take_jobs()]
    for job in jobs:
        world.plane.finish(JobResult.uniform(job, STORED), world.now)
    return jobs


def test_a_block_that_is_too_old_is_a_miss_is_stored_anew_and_gives_up_its_slot():
    world = World(1, max_age=3600)
    stored(world, [key(0), key(2)])
    world.now += 3599
    assert world.plane.lookup(key(0), "r", world.now) is LookupResult.HIT
    world.plane.end_step()
    world.now += 2
    assert world.plane.lookup(key(0), "r", world.now) is LookupResult.MISS
    assert len(stored(world, [key(0)])) == 1, "and not refused as there already"
    assert world.plane.lookup(key(0), "r", world.now) is LookupResult.HIT
    world.plane.end_step()
    owned = world.lower.owned
    assert owned is not None
    assert key(2) in owned.directory
    world.plane.relieve(world.now)
    assert set(owned.directory) == {key(0)}, "what none asks for goes too"
    world.plane.check_integrity()


def test_what_was_loaded_or_offered_again_is_kept_longest():
    world = World(1, "lru")
    for number in range(24):
        stored(world, [key(number)])
    world.plane.submit(world.transfer(JobKind.LOAD, [key(0)], "reader"), 0.0)
    world.plane.finish(JobResult.uniform(world.plane.take_jobs()[0].job, LOADED), 0.0)
    assert not stored(world, [key(1)]), "it is there: nothing is written"
    for number in range(100, 122):
        stored(world, [key(number)])
    found = [number for number in range(24) if world.plane.lookup(key(number), "r", 0.0) is LookupResult.HIT]
    assert found == [0, 1]


def test_a_region_is_formatted_by_the_first_job_that_writes_into_it_and_by_no_later_one():
    world = World(1)
    formats = [job.formats for number in range(24) for job in stored(world, [key(number)])]
    assert len([made for each in formats for made in each]) == 3


def test_a_job_has_no_more_blocks_than_fit_into_its_frames():
    world = World(1)
    large = [key(number) for number in range(0, 12, 2)]
    small = [key(number) for number in range(1, 13, 2)]
    assert [len(job.groups[0].keys) for job in stored(world, large)] == [3, 3]
    assert [len(job.groups[0].keys) for job in stored(world, small)] == [3, 3], "as many as a job may have"
    world = World(1, limits=PlaneLimits(8, 8, 10.0, part_frames=3, frame_blocks=(1, 2)))
    assert [len(job.groups[0].keys) for job in stored(world, large)] == [3, 3]
    assert [len(job.groups[0].keys) for job in stored(world, small)] == [6]
    mixed = [key(number) for number in range(20, 26)]
    jobs = stored(world, mixed)
    assert [sorted(len(group.keys) for group in job.groups) for job in jobs] == [[2, 2], [1, 1]]


def test_the_groups_of_a_job_keep_their_rows():
    world = World(1)
    names = [key(number) for number in (4, 7, 1)]
    world.plane.submit(world.transfer(JobKind.STORE, names, "writer"), 0.0)
    (emission,) = world.plane.take_jobs()
    row_of = {
        name: int(row)
        for group in emission.job.groups
        for name, row in zip(group.keys, group.rows, strict=True)  # type: ignore[arg-type]
    }
    assert row_of == {names[0]: 0, names[1]: 1, names[2]: 2}
    assert all(isinstance(group, RowGroup) for group in emission.job.groups)


def test_a_full_disk_is_left_alone_for_a_while_and_tried_again_with_one_job():
    world = World(1)
    full = dropped(DropReason.DISK_FULL)
    world.plane.submit(world.transfer(JobKind.STORE, [key(0)], "writer"), 0.0)
    world.plane.finish(JobResult.uniform(world.plane.take_jobs()[0].job, full), 0.0)
    assert world.lower.disk_full
    stored(world, [key(10)])
    assert world.lower.counters.stored == 1, "another root has room"
    for number in range(20, 60):
        world.plane.submit(world.transfer(JobKind.STORE, [key(number)], "writer"), 1.0)
        for emission in world.plane.take_jobs():
            world.plane.finish(JobResult.uniform(emission.job, full), 1.0)
    assert world.lower.counters.dropped[DropReason.DISK_FULL] == 41, "each is dropped with this reason"
    many = [key(2 * number) for number in range(40, 48)]
    world.plane.submit(world.transfer(JobKind.STORE, many, "writer"), 20.0)
    (probe,) = world.plane.take_jobs()
    assert probe.job.num_blocks == 3
    world.plane.finish(JobResult.uniform(probe.job, STORED), 20.0)
    assert len(stored(world, many[3:])) == 2, "there is room again"


def test_a_full_shared_tier_is_left_alone_for_a_while():
    """It has no old places to try: each block would be sent in vain."""
    world = World(1, shared=True)
    for number in range(8):
        world.plane.submit(world.transfer(JobKind.STORE, [key(number)], "writer"), 0.0)
        for emission in world.plane.take_jobs():
            world.plane.finish(JobResult.uniform(emission.job, dropped(DropReason.DISK_FULL)), 0.0)
    assert world.lower.room_breaker.opened == 1
    assert world.lower.counters.dropped == {DropReason.DISK_FULL: 8}
    assert world.lower.may_load(0.0)


def test_what_a_shared_tier_is_known_to_hold_is_not_sent_again():
    world = World(1, shared=True)
    names = [key(0), key(2), key(4)]
    assert len(stored(world, names[:2])) == 1
    (job,) = stored(world, names)
    assert [name for group in job.groups for name in group.keys] == [key(4)]
    assert world.lower.counters.skipped == {SkipReason.ALREADY_THERE: 2}
    assert world.plane.take_ended()[-1].ok
