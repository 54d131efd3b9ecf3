"""Events: replaying them gives exactly what is reachable, at every step, and they say nothing of sizes."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_control import ROW_BYTES, World, below, cpu_setup, fs_setup, key, plane_settings, shared_setup
from support_counts import examples

from kvtier.control.plane.event_log import EventLog
from kvtier.control.tiers.slot_table import READY
from kvtier.tier.contract import Recovered
from kvtier.types.arrays import int_array
from kvtier.types.events import OffloadingEvent
from kvtier.types.jobs import JobKind, RegionFormat
from kvtier.types.keys import CPU, FS, RequestId

STORE, LOAD = JobKind.STORE, JobKind.LOAD


class Listener:
    """A router that hears every event and believes exactly that."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reachable: dict[str, set[bytes]] = {}

    def listen(self) -> None:
        """Nothing may be stored that is there already, nor removed that is not: every change is told once."""
        for event in self.world.plane.take_events():
            assert event.keys, "an empty event says nothing"
            known = self.reachable.setdefault(event.medium, set())
            for k in event.keys:
                assert (k in known) == event.removed, f"{k.hex()} {'removed' if event.removed else 'stored'} twice"
                (known.remove if event.removed else known.add)(k)

    def check(self) -> None:
        board = self.world.plane.control
        tiers = [(board.cpu_spec, board.cpu), *((low.spec, low.owned) for low in board.lowers if low.owned is not None)]
        for plan, tier in tiers:
            ready = {k for k, slot in tier.directory.items() if tier.table.state[slot] == READY}
            assert self.reachable.get(plan.medium, set()) == ready


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 10),
    slots=st.sampled_from([4, 8, 32]),
    kind=st.sampled_from(["through", "on_evict", "hybrid", "with shared"]),
    policy=st.sampled_from(["lru", "arc"]),
)
def test_replaying_the_events_gives_exactly_what_is_reachable_at_every_step(seed, rows, slots, kind, policy):
    rng = random.Random(seed)
    lowers = {
        "through": [fs_setup(slots, policy=policy)],
        "on_evict": [fs_setup(slots, policy=policy, write_policy="on_evict")],
        "hybrid": [fs_setup(slots, 4, (ROW_BYTES, 3 * ROW_BYTES), policy=policy)],
        "with shared": [fs_setup(slots, policy=policy), shared_setup(hint_seconds=1.0)],
    }[kind]
    world = World(cpu_setup(rows, policy, groups=2), lowers, limits=plane_settings(watermark_rows=rng.randrange(3)))
    listener = Listener(world)
    for _ in range(80):
        blocks = [key(rng.randrange(20), rng.randrange(2)) for _ in range(rng.randint(1, 6))]
        match rng.choice(
            ["store", "store", "load", "end", "end", "end", "end", "late", "late end", "reserve", "reset", "announce"]
        ):
            case "store":
                world.submit(STORE, list(dict.fromkeys(blocks)))
            case "load":
                world.submit(LOAD, blocks)
            case "end" if world.running:
                fault = rng.choice([None, None, None, "failed", "corrupt"])
                world.finish(rng.choice(list(world.running)), fault, rng.randint(1, 3))
            case "late" if timed := [j for j, e in world.running.items() if e.job.deadline is not None]:
                world.make_late(rng.choice(timed))
            case "late end" if world.late:
                world.end_late(rng.choice(list(world.late)), rng.random() < 0.5)
            case "reserve":
                request = RequestId(f"r{rng.randrange(3)}")
                world.plane.reserve(request, blocks, world.now)
                world.collect()
                world.plane.end_request(RequestId(f"r{rng.randrange(3)}"), world.now)
            case "announce":
                world.plane.announce(list(dict.fromkeys(blocks)), world.now)
            case "reset" if rng.random() < 0.1:
                world.plane.reset(world.now)
                world.remote.clear()
                world.collect()
        world.pass_time(rng.choice([0.0, 0.1, 1.0]))
        listener.listen()
        listener.check()


def test_events_come_in_the_order_things_happened():
    world = World(cpu_setup(2), [])
    world.store(1, 2)
    world.run_all()
    world.store(3)
    world.run_all()
    events = [
        (event.removed, [int.from_bytes(k[:16], "big") for k in event.keys]) for event in world.plane.take_events()
    ]
    assert events == [(False, [2, 1]), (True, [2]), (False, [3])]
    assert world.plane.take_events() == [], "each is told once"


def test_an_event_has_keys_a_medium_a_direction_and_a_tier_and_no_size():
    assert [field.name for field in dataclasses.fields(OffloadingEvent)] == ["keys", "medium", "removed", "tier"]


def test_an_event_names_the_tier_as_well_as_its_medium():
    upper, lower = (dataclasses.replace(fs_setup(8), name=name) for name in ("nvme", "sata"))
    world = World(cpu_setup(2), [upper, lower])
    world.store(1)
    world.run_all()
    assert {(event.tier, event.medium) for event in world.plane.take_events()} == {
        ("cpu", "CPU"),
        ("nvme", "FS"),
        ("sata", "FS"),
    }


def test_one_event_may_mix_groups_also_when_it_tells_of_removals():
    world = World(cpu_setup(4, groups=2), [])
    world.submit(STORE, [key(1, 0), key(2, 0), key(1, 1), key(2, 1)])
    world.run_all()
    world.submit(STORE, [key(n, 0) for n in range(10, 14)])
    world.run_all()
    first, removed, _ = world.plane.take_events()
    assert set(first.keys) == set(removed.keys) == {key(n, g) for n in (1, 2) for g in (0, 1)}
    assert removed.removed


def test_removals_from_disk_are_published_whatever_caused_them():
    """Evicted by slot, evicted with its region, refused by verification, reset."""
    small, large = ROW_BYTES, 3 * ROW_BYTES
    world = World(cpu_setup(2, groups=2), [fs_setup(8, 4, (small, large))])
    listener = Listener(world)
    for number in range(60):
        world.submit(STORE, [key(number, int(number >= 30))])
        world.run_all()
        listener.listen()
        listener.check()
    fs = world.plane.control.lowers[0].owned
    assert fs.evictions > 30
    last = next(iter(fs.directory))
    world.plane.control.cpu.reset()
    world.step()
    world.submit(LOAD, [last])
    world.finish(*world.under_way(1, LOAD), "corrupt")
    listener.listen()
    assert last not in listener.reachable["FS"]
    listener.check()
    world.plane.reset(world.now)
    listener.listen()
    assert listener.reachable == {"CPU": set(), "FS": set()}


def test_keys_found_at_open_are_published_as_stored():
    plan = fs_setup(8, 2)
    recovered = Recovered(
        [key(1), key(2)],
        int_array([5, 0]),
        int_array([3, 9]),
        (RegionFormat(0, ROW_BYTES, 1), RegionFormat(1, ROW_BYTES, 1)),
    )
    plan = dataclasses.replace(plan, opened=dataclasses.replace(plan.opened, recovered=recovered))
    world = World(cpu_setup(2), [plan])
    assert world.plane.take_events() == [OffloadingEvent((key(1), key(2)), plan.medium, False, plan.name)]


def test_blocks_that_never_became_whole_are_never_mentioned():
    world = World(cpu_setup(2), [fs_setup(8)])
    world.store(1, 2)
    (copy,) = world.under_way(0, STORE)
    world.finish(copy, "failed")
    world.store(3)
    world.make_late(*world.under_way(0, STORE))
    world.end_late(*world.late, landed=True)
    assert world.plane.take_events() == []


@pytest.mark.parametrize("most", [0, 3])
def test_events_that_nobody_takes_are_bounded_and_counted(most):
    world = World(cpu_setup(1), [], limits=plane_settings(events_max=most))
    for number in range(10):
        world.store(number)
        world.run_all()
    events = world.plane.take_events()
    assert len(events) == most
    if most:
        assert events[-1] == OffloadingEvent((key(9),), world.plane.control.cpu_spec.medium, False, "cpu")
        assert world.plane.events.lost == 19 - most


def test_keys_of_events_that_nobody_takes_are_bounded_too():
    world = World(cpu_setup(80), [], limits=plane_settings(events_max=40))
    log = world.plane.events
    keys_max, events = 640, 32  # of 20 keys each

    def store(first: int, last: int) -> None:
        for number in range(first, last, 20):
            world.store(*range(number, number + 20))
            world.run_all()
            assert sum(len(event.keys) for event in log.waiting) <= keys_max

    store(0, 1600)
    assert len(log.waiting) == events
    assert log.lost == 1600 + 1600 - 80 - keys_max
    assert len(world.plane.take_events()) == events
    store(2000, 2000 + keys_max // 2)
    assert len(log.waiting) == events, "what was taken counts no more"


def test_what_a_tier_held_when_it_was_opened_is_told_however_much_it_is():
    log = EventLog(2)
    log.record(cpu_setup(1), [key(n) for n in range(1000)], removed=False)
    log.record(cpu_setup(1), [key(1)], removed=True)
    assert [len(event.keys) for event in log.take()] == [1000, 1]
    assert log.lost == 0


def test_a_promotion_is_published_for_the_cpu_tier_alone():
    world = below(1)
    world.plane.take_events()
    world.load(1)
    world.run_all()
    events = world.plane.take_events()
    assert {event.medium for event in events} == {"CPU"}
    assert [event.keys for event in events if not event.removed] == [(key(1),)]


def test_what_is_announced_is_told_of_every_owned_tier_that_has_it_as_removed_and_then_as_stored():
    world = World(cpu_setup(2), [fs_setup(8), shared_setup()])
    world.store(1, 2)
    world.run_all()
    world.store(3)  # 1 and 2 were stored from the leaf on: the row of 2 is taken
    world.run_all()
    world.plane.take_events()
    world.plane.announce([key(1), key(2), key(4)], world.now)
    assert world.plane.take_events() == [
        OffloadingEvent((key(1),), CPU, True, "cpu"),
        OffloadingEvent((key(1),), CPU, False, "cpu"),
        OffloadingEvent((key(1), key(2)), FS, True, "fs"),
        OffloadingEvent((key(1), key(2)), FS, False, "fs"),
    ]


def test_a_block_that_is_being_filled_is_not_announced_and_one_evicted_meanwhile_is_told_as_removed_only():
    world = World(cpu_setup(2), [])
    world.store(1)
    world.plane.announce([key(1)], world.now)
    assert world.plane.take_events() == []
    world.run_all()
    world.plane.announce([key(1)], world.now)
    world.store(2, 3)
    world.run_all()
    told = [event.removed for event in world.plane.take_events() if key(1) in event.keys]
    assert told == [False, True, False, True]


def test_lower_tiers_that_are_held_back_for_good_are_told_as_removed_and_the_cpu_tier_is_not():
    world = World(cpu_setup(4), [fs_setup(8)])
    world.store(1, 2)
    world.run_all()
    world.plane.take_events()
    world.plane.hold_back(world.now)
    (event,) = world.plane.take_events()
    assert (event.medium, event.removed, set(event.keys)) == (FS, True, {key(1), key(2)})
    world.plane.announce([key(1)], world.now)
    assert {event.medium for event in world.plane.take_events()} == {CPU}


def test_nothing_is_announced_where_no_events_are_kept():
    world = World(cpu_setup(2), [], limits=plane_settings(events_max=0))
    world.store(1)
    world.run_all()
    world.plane.announce([key(1)], world.now)
    assert world.plane.take_events() == []
    assert world.plane.events.lost == 0
