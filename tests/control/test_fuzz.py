"""Every mixture of tiers under every order of events: right bytes or a miss, sums that hold, an end to everything."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support_control import ROW_BYTES, World, cpu_setup, fs_setup, key, plane_settings, shared_setup
from support_counts import examples

from kvtier.control.jobs import TierJob
from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.control.tiers.slot_table import FILLING, QUARANTINED, READY
from kvtier.types.hints import Demote, KVHint, Pin, Prefetch, Release, Retain
from kvtier.types.jobs import (
    CANCELLED,
    CORRUPT,
    LATE,
    LOADED,
    MISSING,
    STORED,
    BlockOutcome,
    DropReason,
    JobKind,
    dropped,
    failed,
)
from kvtier.types.keys import GroupIndex, Medium, RequestId
from kvtier.types.requests import NO_INFO

STORE, LOAD = JobKind.STORE, JobKind.LOAD
FAULTS = {
    STORE: [STORED, STORED, STORED, failed(5), LATE, CANCELLED, dropped(DropReason.DISK_FULL)],
    LOAD: [LOADED, LOADED, LOADED, failed(5), LATE, CANCELLED, CORRUPT, MISSING],
}


def lower_tiers(rng: random.Random) -> list[TierSpec]:
    """None to three tiers of any kind, each with bounds of its own; only the first may be `on_evict`."""
    plans = []
    for number in range(rng.randrange(4)):
        write_policy = "write_through" if number else rng.choice(["write_through", "on_evict"])
        bound = rng.choice([1, 3, 1024])
        if rng.random() < 0.25:
            plan = shared_setup(write_policy=write_policy, inflight_blocks=bound, hint_seconds=rng.choice([0.5, 5.0]))
            plan = replace(plan, probed_groups=frozenset(map(GroupIndex, range(rng.randrange(3)))))
        else:
            sizes = rng.choice([(ROW_BYTES, ROW_BYTES), (ROW_BYTES, 3 * ROW_BYTES), (2 * ROW_BYTES, ROW_BYTES)])
            slots, roots = rng.choice([(4, 1), (16, 1), (16, 2), (64, 4)])
            policy = rng.choice(["lru", "arc", "reuse"])
            plan = fs_setup(slots, 4, sizes, roots, policy=policy, write_policy=write_policy, inflight_blocks=bound)
        admit = rng.choice(["always", "always", "second_use"])
        retained = rng.choice([0, 3 * ROW_BYTES, 1 << 20])
        more = {"medium": Medium(f"M{number}"), "admit": admit, "retained_bytes_max": retained}
        plans.append(replace(plan, name=f"tier{number}", **more))
    return plans


def limited(setup: TierSpec, rng: random.Random) -> TierSpec:
    """This tier with a write budget, of a few rows an hour or of more than is ever written."""
    return replace(
        setup, admit="predicted", block_bytes=ROW_BYTES, write_bytes_per_day=rng.choice([1 << 19, 1 << 22, 1 << 40])
    )


class Engine:
    """Does whatever an engine and its disks may do, in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        limits = plane_settings(
            watermark_rows=rng.randrange(4),
            reservation_seconds=rng.choice([0.5, 5.0]),
            lease_seconds=rng.choice([0.5, 5.0]),
            patience_seconds=rng.choice([0.0, 0.3, 5.0]),
            gather_seconds=rng.choice([0.0, 0.3, 5.0]),
            retained_sets=rng.choice([1, 3]),
            retain_time=rng.choice([1.0, 50.0]),
            prefetch_blocks=rng.choice([4, 100]),
        )
        cpu = cpu_setup(rng.choice([1, 2, 5, 9, 17]), rng.choice(["lru", "arc", "reuse"]), groups=2)
        cpu = replace(cpu, retained_bytes_max=rng.choice([0, 3 * ROW_BYTES, 1 << 20]))
        self.world = World(cpu, lower_tiers(rng), rng.choice([1, 1, 3]), limits)
        self.keys = rng.choice([6, 30])
        self.announced = False

    def blocks(self) -> list:
        rng = self.rng
        start = rng.randrange(self.keys)
        if rng.random() < 0.5:
            return [key((start + i) % self.keys, rng.randrange(2)) for i in range(rng.randint(1, 10))]
        return [key(start + i, 0) for i in range(rng.randint(1, 14))]

    def faults(self, emission: TierJob) -> list[BlockOutcome]:
        """An outcome for each block; no backend says LOADED of what it has not."""
        blocks = [k for group in emission.job.groups for k in group.keys]
        lost = emission.job.kind is LOAD and emission.position in self.world.shared
        chosen = [self.rng.choice(FAULTS[emission.job.kind]) for _ in blocks]
        gone = [lost and k not in self.world.remote for k in blocks]
        return [MISSING if missing else outcome for missing, outcome in zip(gone, chosen, strict=True)]

    def hint(self) -> KVHint:
        rng, session = self.rng, f"s{self.rng.randrange(4)}"
        there = list(rng.choice(self.world.plane.control.owned_tiers).directory)
        some = rng.choice([self.blocks(), rng.sample(there, min(len(there), rng.randint(1, 8))), []])
        seconds = rng.choice([0.5, 5.0])
        hints = (Retain(some, seconds, session), Pin(some, seconds, session), Prefetch(some, session))
        return rng.choice([*hints, Demote(some, session), Release(session)])

    def step(self) -> None:
        rng, world = self.rng, self.world
        asked = ["store", "load", "reserve", "end request", "touch", "cancel", "fault", "late", "hint", "hint"]
        match rng.choice([*asked, *["end"] * 6]):
            case "store" | "load" as kind:
                blocks = self.blocks()
                if self.announced:
                    world.plane.uses.begin(RequestId(f"r{len(world.jobs) % 5}"), blocks, world.now, None, NO_INFO)
                world.submit(JobKind(kind), blocks, rng.choice([None, 0.5, 50.0]))
            case "reserve":
                world.plane.reserve(RequestId(f"r{rng.randrange(5)}"), self.blocks(), world.now)
            case "end request":
                world.plane.end_request(RequestId(f"r{rng.randrange(5)}"), world.now)
            case "touch":
                keys = self.blocks()
                world.plane.lookup(keys, world.now)
                world.plane.touch(keys)
            case "hint":
                result = world.plane.hint(self.hint(), world.now)
                assert result.accepted >= 0
                assert all(count > 0 for count in result.refused.values())
            case "cancel" if opened := [j for j in world.jobs if j not in world.results]:
                world.plane.cancel(rng.choice(opened), world.now)
            case "fault" if world.running:
                job = rng.choice(list(world.running))
                world.end(job, *self.faults(world.running[job]))
            case "late":
                if world.late and rng.random() < 0.6:
                    world.end_late(rng.choice(list(world.late)), rng.random() < 0.5)
                elif timed := [j for j, e in world.running.items() if e.job.deadline is not None]:
                    world.make_late(rng.choice(timed))
            case "end" if world.running:
                world.finish(rng.choice(list(world.running)))
        if rng.random() < 0.02:
            world.plane.reset(world.now)
            world.remote.clear()
        world.pass_time(rng.choice([0.0, 0.0, 0.1, 1.0]))
        world.check()

    def end(self) -> None:
        """From some moment on all goes well: then everything ends, without anybody being told twice."""
        world = self.world
        for job in list(world.late):
            world.end_late(job, landed=False)
        for _ in range(200):
            world.run_all()
            deadline = world.plane.next_deadline(world.now)
            if deadline is None:
                break
            assert deadline > world.now, "an alarm that changes nothing"
            world.now = deadline
            world.step()
            world.check()
        still = [job for job in world.jobs if job not in world.results]
        assert not still, f"never ended: {still}"
        assert not world.plane.control.fills, "nobody waits for a fill any more"
        counts = world.plane.control.cpu.table.counts
        assert counts[FILLING] == counts[QUARANTINED] == 0
        assert not world.plane.hints.retention, "every set has lapsed"
        assert not world.plane.hints.prefetches.waiting
        assert not world.plane.hints.prefetches.filling
        for number in range(5):
            world.plane.end_request(RequestId(f"r{number}"), world.now)
        world.plane.abandon()
        assert world.plane.control.cpu.table.evictable == world.plane.control.cpu.table.counts[READY]
        world.check()


@examples(150)
@given(st.integers(0, 2**48))
@example(348)  # a full disk left one slot of a size: two rows took it from each other without end
@example(1876)
@example(18342)  # a load named a block twice, and its row was sent twice at its second use
def test_whatever_happens_bytes_are_right_sums_hold_and_everything_ends(seed):
    engine = Engine(seed)
    for _ in range(60):
        engine.step()
    engine.end()


class LimitedEngine(Engine):
    """As `Engine`, with at least one lower tier, each with a write budget, and each request is announced."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng, control = random.Random(seed + 1), self.world.plane.control
        lowers = [limited(lower.spec, rng) for lower in control.lowers] or [
            limited(fs_setup(16, 4, (ROW_BYTES, ROW_BYTES)), rng)
        ]
        lowers[0] = replace(lowers[0], write_policy="on_evict")
        cpu = replace(control.cpu_spec, opened=cpu_setup(control.num_rows, groups=2).opened)
        self.world = World(cpu, lowers, rng.choice([1, 3]), plane_settings(watermark_rows=rng.randrange(4)))
        self.announced = True
        self.world.submit(STORE, self.blocks())
        self.world.run_all()  # its budget counts as used by then
        self.world.pass_time(3600.0)


@examples(150)
@given(st.integers(0, 2**48))
@example(36300911)  # a load that names a block twice, whose slot was chosen for eviction ahead
def test_whatever_happens_within_a_write_budget(seed):
    engine = LimitedEngine(seed)
    for _ in range(60):
        engine.step()
    engine.end()


@pytest.mark.long
@settings(max_examples=20_000, deadline=None)
@given(st.integers(0, 2**48))
def test_whatever_happens_for_long(seed):
    engine = Engine(seed)
    for _ in range(400):
        engine.step()
    engine.end()
