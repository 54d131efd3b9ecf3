"""Lower tiers that join a control plane later, and tiers that are held back for good."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support_control import World, below, cpu_setup, fs_setup, key, key_number, shared_setup

from kvtier.control.jobs import JoiningTiers
from kvtier.control.reservations import KeyState
from kvtier.control.tiers.lower_tier import TierSpec, lower_tiers
from kvtier.tier.contract import LookupResult, Opened, Recovered
from kvtier.types.hints import Demote
from kvtier.types.jobs import DropReason, JobKind, RegionFormat
from kvtier.types.keys import RequestId

LOAD, STORE = JobKind.LOAD, JobKind.STORE
MISS, PENDING = LookupResult.MISS, LookupResult.HIT_PENDING


def with_keys(setup: TierSpec, count: int, epoch: int = 0) -> TierSpec:
    """An owned tier that recovered keys 1 .. count."""
    slots = np.arange(count, dtype=np.int64)
    space = setup.opened.space
    formats = tuple(RegionFormat(region, space.slot_bytes[0], 1) for region in range(space.num_regions))
    found = Recovered([key(n) for n in range(1, count + 1)], slots, slots + 1, formats)
    return replace(setup, opened=replace(setup.opened, recovered=found, epoch=epoch))


def held_back(rows: int, *setups: TierSpec) -> World:
    """Of tiers that are held back nothing is known yet."""
    world = World(cpu_setup(rows), [replace(setup, held_back=True, opened=Opened(0)) for setup in setups])
    world.shared = {i for i, setup in enumerate(setups, start=1) if setup.opened.space is None}
    return world


def join(world: World, *setups: TierSpec, epoch: int = 0, resets: int = 0) -> None:
    lowers = lower_tiers(setups, world.plane.control.num_rows, epoch)
    for lower, setup in zip(lowers, setups, strict=True):
        for name, slot in zip(setup.opened.recovered.keys, setup.opened.recovered.slots.tolist(), strict=True):
            if lower.index.presence(name, world.now):
                world.bytes_at[setup.name, slot] = (name, epoch)
    for place, (name, _) in list(world.bytes_at.items()):
        world.bytes_at[place] = (name, epoch)
    world.plane.join(JoiningTiers(lowers, epoch, resets), world.now)
    world.step()


def published(world: World, removed: bool = False) -> list[int]:
    return [key_number(k) for event in world.plane.take_events() if event.removed is removed for k in event.keys]


@pytest.mark.parametrize("policy", ["write_through", "on_evict"])
def test_rows_are_clean_while_the_tiers_are_held_back(policy):
    setups = fs_setup(16, write_policy=policy), shared_setup(write_policy=policy)
    world = held_back(4, *setups)
    world.store(1, 2, 3)
    world.run_all()
    assert (world.plane.dirty_rows, world.plane.backlog, world.plane.idle) == (0, 0, True)
    assert world.plane.control.cpu.available == 4
    assert [lower.counters.dropped for lower in world.plane.control.lowers] == [{DropReason.HELD_BACK: 3}] * 2
    assert world.plane.lookup([key(9)], world.now) == [MISS]
    assert not world.plane.collect().queries
    assert world.plane.next_deadline(world.now) is None
    world.check()


def test_what_a_tier_with_a_write_budget_lacks_may_be_hinted_as_soon_as_it_has_joined():
    setup = fs_setup(16, admit="predicted", write_bytes_per_day=1000, block_bytes=1)
    world = held_back(8, setup)
    for number in (101, 1, 2):  # 1 and 2 are below already, so nothing was offered to the tier yet
        world.store(number)
        world.run_all()
    join(world, with_keys(setup, 2))
    assert world.plane.hint(Demote([key(101)]), world.now).accepted
    world.run_all()
    world.check()


def test_what_they_hold_is_published_and_found_and_the_latest_rows_are_written_back():
    setups = with_keys(fs_setup(16), 4), replace(fs_setup(16), name="second")
    world = held_back(8, *setups)
    world.store(*range(101, 109))
    world.run_all()
    published(world)
    join(world, *setups)
    assert published(world) == [1, 2, 3, 4]
    assert world.plane.lookup([key(1), key(9)], world.now) == [PENDING, MISS]
    assert world.plane.dirty_rows == 2, "a quarter of the rows"
    world.pass_time(1.0)
    world.run_all()
    assert [lower.counters.stored for lower in world.plane.control.lowers] == [2, 2]
    load = world.load(1, 2, 3, 4)
    world.run_all()
    assert world.statuses(load) == ["loaded"] * 4
    world.check()


def test_a_reservation_finds_what_joins_and_keeps_what_was_missing():
    setup = with_keys(fs_setup(16), 4)
    world = held_back(8, setup)
    before = world.plane.reserve(RequestId("a"), [key(1)], world.now)
    world.step()
    assert before.state == [KeyState.MISSING]
    join(world, setup)
    after = world.plane.reserve(RequestId("b"), [key(1), key(2)], world.now)
    world.step()
    world.run_all()
    assert before.hits() == [False]
    assert after.hits() == [True, True]
    world.check()


def test_copies_in_flight_when_the_tiers_join_end_well():
    """The join changes the epoch, which is not a reset."""
    setup = with_keys(fs_setup(16), 2, epoch=7)
    world = held_back(8, setup)
    world.store(101)
    world.run_all()
    load, store = world.load(101), world.store(102)
    join(world, setup, epoch=7)
    world.run_all()
    assert world.statuses(load) == ["loaded"]
    assert world.statuses(store) == ["stored"]
    assert world.plane.reset(world.now) == 8
    world.step()


@pytest.mark.parametrize("late_join", [False, True])
def test_a_reset_makes_what_was_on_its_way_stale(late_join):
    setup = with_keys(fs_setup(16), 4, epoch=3)
    world = held_back(8, setup)
    world.plane.reset(world.now)
    join(world, setup, epoch=3, resets=0)
    assert world.plane.control.joining, "it does not hold for the reset"
    published(world)
    join(world, setup, epoch=4, resets=1)
    assert not published(world)
    assert not world.plane.control.joining
    assert world.plane.lookup([key(1)], world.now) == [MISS]
    if late_join:
        lowers = world.plane.control.lowers
        join(world, setup, epoch=4, resets=1)
        assert world.plane.control.lowers is lowers, "once"
    world.store(1)
    assert {emission.job.epoch for emission in world.running.values()} == {4}
    world.run_all()
    world.check()


def test_no_tier_joins_while_closing_or_after_they_were_held_back_for_good():
    setup = with_keys(fs_setup(16), 4)
    for end in ("close", "hold_back"):
        world = held_back(8, setup)
        getattr(world.plane, end)(world.now)
        join(world, setup)
        assert world.plane.lookup([key(1)], world.now) == [MISS]


# -- held back for good --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["write_through", "on_evict"])
def test_held_back_for_good_nothing_is_sent_and_what_is_in_flight_ends(policy):
    world = World(cpu_setup(8), [fs_setup(16, write_policy=policy), shared_setup()])
    world.store(1, 2)
    world.run_tier(0)
    world.store(3)
    world.pass_time(1.0)
    in_flight = [*world.under_way(1, STORE), *world.under_way(2, STORE)]
    assert in_flight
    published(world)
    world.plane.hold_back(world.now)
    world.step()
    world.run_all()
    world.store(4)
    world.run_all()
    assert not world.running
    assert (world.plane.dirty_rows, world.plane.backlog) == (0, 0)
    assert world.plane.locate([key(n) for n in (1, 2, 3, 4)], world.now) == ["cpu"] * 4
    first = world.plane.control.lowers[0]
    assert first.owned.used_bytes == 0, "slots are free again"
    world.check()


def test_held_back_for_good_what_a_tier_holds_is_unreachable_and_waiting_requests_end():
    """Loads whose promotion is in flight get it; those that wait for one end with misses."""
    world = below(6, rows=4)
    published(world)
    load = world.load(1, 2, 3, 4, 5, 6)
    reservation = world.plane.reserve(RequestId("a"), [key(n) for n in range(1, 7)], world.now)
    world.step()
    (promotion,) = world.under_way(1, LOAD)
    moving = world.numbers(promotion)
    assert moving
    assert len(moving) < 6
    world.plane.hold_back(world.now)
    world.step()
    assert set(published(world, removed=True)) >= set(range(1, 7))
    world.run_all()
    statuses = dict(zip(range(1, 7), world.statuses(load), strict=True))
    assert statuses == {n: "loaded" if n in moving else "missing" for n in range(1, 7)}
    assert reservation.served
    assert world.plane.lookup([key(6)], world.now) == [MISS]
    world.plane.end_request(RequestId("a"), world.now)
    world.step()
    assert world.plane.idle
    world.check()
