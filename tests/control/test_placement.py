"""Where blocks go below: regions of one slot size each, roots in turn, formats named until made; and recovery."""

from __future__ import annotations

import dataclasses

import pytest
from support_control import ROW_BYTES, World, below, cpu_setup, fs_setup, key

from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.slot_table import ABSENT, FREE, READY, RETIRED
from kvtier.errors import IntegrityError
from kvtier.tier.contract import Recovered, SlotSpace
from kvtier.types.arrays import int_array
from kvtier.types.jobs import LATE, DropReason, JobKind, RegionFormat, failed
from kvtier.types.keys import OffloadKey

STORE, LOAD = JobKind.STORE, JobKind.LOAD
SMALL, LARGE = ROW_BYTES, 3 * ROW_BYTES


def tier(regions: int = 8, sizes: tuple[int, ...] = (SMALL, LARGE), roots: int = 1, policy: str = "lru") -> OwnedTier:
    """Regions of twelve small slots or four large ones."""
    return OwnedTier("t", SlotSpace(12 * SMALL, (regions // roots,) * roots, sizes), policy)


def fill(owned: OwnedTier, keys: list[OffloadKey]) -> list[int]:
    slots = owned.reserve(keys)
    owned.commit(slots[::-1])
    owned.check()
    return slots


def keys(first: int, count: int, group: int = 0) -> list[OffloadKey]:
    return [key(n, group) for n in range(first, first + count)]


def regions_of(owned: OwnedTier, size: int) -> list[int]:
    return [region for region, found in enumerate(owned.placement.region_size) if found == size]


# -- several slot sizes ------------------------------------------------------------------------------------------------


def test_each_slot_lies_in_a_region_of_its_size():
    owned = tier()
    for number in range(40):
        (slot,) = fill(owned, [key(number, number % 2)])
        region, index = divmod(slot, owned.placement.per_region)
        assert owned.placement.region_size[region] == number % 2
        assert index < (12, 4)[number % 2]


def test_a_mixed_batch_is_served_from_its_front_on():
    owned = tier(regions=2)
    batch = [*keys(0, 12, 0), *keys(0, 4, 1), *keys(100, 3, 0)]
    slots = owned.reserve(batch)
    assert len(slots) == 16, "all regions are in use by slots that are being filled"
    assert [slot // owned.placement.per_region for slot in slots] == [0] * 12 + [1] * 4
    owned.commit(slots)
    owned.check()


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize(("first", "then"), [(0, 1), (1, 0)])
def test_after_one_size_filled_everything_the_other_gets_nine_tenths_of_it(first, then, policy):
    owned = tier(regions=12, policy=policy)
    room = (144, 48)
    for number in range(room[first]):
        fill(owned, [key(number, first)])
    assert len(owned.directory) == room[first]
    for number in range(2 * room[then]):
        fill(owned, [key(number, then)])
    now = sum(k.endswith(bytes([then])) for k in owned.directory)
    assert now >= 0.9 * room[then]
    assert len(regions_of(owned, first)) == 1, "each size keeps a region"


def test_a_size_keeps_at_least_one_region_and_without_one_its_stores_are_dropped():
    world = World(cpu_setup(16, groups=2), [fs_setup(12, 1, (SMALL, LARGE))])
    world.submit(STORE, keys(0, 4))
    world.run_all()
    world.submit(STORE, keys(0, 2, 1))
    world.run_all()
    assert world.plane.control.counters(1).dropped == {DropReason.NO_REGION: 2}
    assert world.plane.dirty_rows == 0
    assert world.plane.locate(keys(0, 4), world.now) == ["cpu"] * 4
    world.check()


def test_the_coldest_region_of_the_other_size_is_taken():
    owned = tier(regions=4)
    for number in range(36):
        fill(owned, [key(number, 0)])
    fill(owned, keys(0, 4, 1))
    region = {number: owned.directory[key(number, 0)] // owned.placement.per_region for number in (0, 12, 24)}
    for number in (12, 0):
        owned.touch([owned.directory[key(number, 0)]])
    fill(owned, [key(50, 1)])
    assert sorted(regions_of(owned, 0)) == sorted([region[0], region[12]])
    assert region[24] in regions_of(owned, 1)
    removed = [k for gone, ks in owned.take_changes() for k in ks if gone]
    assert len(removed) == 12, "evicted as a whole"


def test_a_region_warmer_than_its_own_is_not_taken():
    owned = tier(regions=3)
    fill(owned, keys(0, 4, 1))
    for start in (0, 12):
        fill(owned, keys(start, 12, 0))
    fill(owned, [key(50, 1)])
    assert len(regions_of(owned, 0)) == 2
    assert key(3, 1) not in owned.directory, "its own coldest block went instead"


@pytest.mark.parametrize("use", ["pinned", "filling", "quarantined"])
def test_a_region_in_use_is_never_cut_again(use):
    owned = tier(regions=2)
    slots = fill(owned, keys(0, 12, 0))
    if use == "pinned":
        owned.pin(slots[5:6])
    else:
        owned.evict(1)
        (slot,) = owned.reserve([key(99, 0)])
        if use == "quarantined":
            owned.quarantine([slot])
    more = fill(owned, keys(100, 12, 0))
    assert len(more) == 12
    held = slots[5] if use == "pinned" else slot
    other = more[0] // owned.placement.per_region
    got = owned.reserve([key(0, 1)])
    assert [g // owned.placement.per_region for g in got] in ([], [other])
    assert owned.placement.region_size[held // owned.placement.per_region] == 0
    owned.check()


def test_a_retired_place_stays_out_of_use_when_regions_change_their_size():
    owned = tier(regions=3)
    slots = fill(owned, keys(0, 36, 0))
    bad = slots[0]
    for number in (0, 77):
        slot = owned.directory.get(key(number, 0))
        assert slot == bad
        assert owned.discard(slot, owned.table.generation[slot])
        if number == 0:
            fill(owned, [key(77, 0)])
    assert owned.table.state[bad] == RETIRED
    owned.touch([slot for slot in slots if slot // owned.placement.per_region != bad // owned.placement.per_region])
    for number in range(60):
        fill(owned, [key(number, 1)])
    assert owned.table.state[bad] == RETIRED
    assert len(regions_of(owned, 1)) == 2


def test_of_places_whose_last_use_ends_at_once_only_the_bad_one_is_retired():
    owned = tier(regions=1, sizes=(SMALL,))
    bad, *others = fill(owned, keys(0, 4))
    assert owned.discard(bad, owned.table.generation[bad])
    fill(owned, keys(8, 9))
    assert owned.table.state[bad] == READY
    owned.table.pin([bad, *others])
    assert owned.discard(bad, owned.table.generation[bad])
    owned.remove(others)
    owned.check()
    owned.unpin([others[0], bad, *others[1:]])
    owned.check()
    assert [owned.table.state[slot] for slot in (bad, *others)] == [RETIRED, FREE, FREE, FREE]
    assert set(fill(owned, keys(20, 3))) == set(others)


def test_a_region_holds_what_the_sum_of_states_says():
    owned = tier(regions=2)
    assert owned.table.counts[ABSENT] == 24
    fill(owned, [key(0, 1)])
    assert owned.table.counts[ABSENT] == 20, "four large slots; the other eight ids do not exist"
    assert owned.used_bytes == LARGE
    assert owned.peak_bytes == LARGE
    fill(owned, [key(0, 0)])
    assert owned.used_bytes == owned.peak_bytes == LARGE + SMALL


# -- roots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("roots", [2, 3, 4])
def test_roots_are_used_in_turn_from_the_first_block_on(roots):
    owned = tier(regions=12, sizes=(SMALL,), roots=roots)
    used = [owned.placement.root_of_region[slot // 12] for slot in owned.reserve(keys(0, 12))]
    assert all(sorted(used[i : i + roots]) == list(range(roots)) for i in range(0, 12, roots))


def test_when_one_root_is_full_the_others_go_on():
    owned = OwnedTier("t", SlotSpace(12 * SMALL, (1, 3), (SMALL,)), "lru")
    slots = fill(owned, keys(0, 48))
    assert len(set(slots)) == 48
    assert len(fill(owned, keys(100, 48))) == 48
    assert owned.evictions == 48


# -- formats -----------------------------------------------------------------------------------------------------------


def demotion(world: World) -> tuple[object, tuple[RegionFormat, ...]]:
    (job,) = world.under_way(1, STORE)
    return job, world.running[job].job.formats


def test_a_cut_goes_out_with_the_first_job_that_writes_into_the_region():
    world = World(cpu_setup(64), [fs_setup(8, 2)])
    world.store(*range(3))
    world.run_tier(0)
    job, formats = demotion(world)
    assert formats == (RegionFormat(0, ROW_BYTES, 1),) or formats == (RegionFormat(1, ROW_BYTES, 1),)
    world.finish(job)
    world.store(10)
    world.run_tier(0)
    job, formats = demotion(world)
    assert formats == (), "the region is formatted already"
    world.finish(job)
    world.store(*range(20, 25))
    world.run_tier(0)
    _, formats = demotion(world)
    assert len(formats) == 1
    world.run_all()
    world.check()


@pytest.mark.parametrize("end", ["late in line", "failed", "late"])
def test_a_cut_is_told_again_until_a_job_carried_it_to_a_good_end(end):
    """Otherwise a region whose format was lost with its job would refuse every block from then on."""
    world = World(cpu_setup(16), [fs_setup(8, 1)])
    world.store(1)
    world.run_tier(0)
    job, formats = demotion(world)
    assert formats
    match end:
        case "late in line":
            world.end(job, LATE)
        case "failed":
            world.end(job, failed(5))
        case "late":
            world.make_late(job)
    world.store(2)
    world.run_tier(0)
    job, again = demotion(world)
    assert again == formats
    world.finish(job)
    world.store(3)
    world.run_tier(0)
    assert demotion(world)[1] == ()
    world.run_all()


def test_each_cut_of_a_region_has_the_next_generation():
    owned = tier(regions=2)
    seen: dict[int, list[int]] = {}
    for number in range(200):
        slots = fill(owned, [key(number, (number // 30) % 2)])
        formats = owned.placement.formats_for(slots)
        owned.placement.complete_formats(formats)
        for made in formats:
            assert made.slot_bytes == owned.placement.sizes[owned.placement.region_size[made.region]]
            seen.setdefault(made.region, []).append(made.generation)
    assert sum(map(len, seen.values())) >= 2
    assert all(generations == list(range(1, len(generations) + 1)) for generations in seen.values())


def test_an_older_cut_that_is_confirmed_late_does_not_silence_a_newer_one():
    owned = tier(regions=3)
    slots = fill(owned, keys(0, 24, 0))
    old = owned.placement.formats_for(slots)
    fill(owned, keys(0, 4, 1))
    more = fill(owned, keys(10, 4, 1))
    new = owned.placement.formats_for(more)
    assert [made.generation for made in new] == [2]
    owned.placement.complete_formats(old)
    assert owned.placement.formats_for(more) == new


# -- recovery ----------------------------------------------------------------------------------------------------------


def recovered(entries: list[tuple[int, int, int]], formats: list[RegionFormat]) -> Recovered:
    """Entries as (key number, slot, generation), oldest first."""
    numbers, slots, generations = zip(*entries, strict=True)
    return Recovered([key(n) for n in numbers], int_array(slots), int_array(generations), tuple(formats))


def reopened(*entries: tuple[int, int, int]) -> World:
    plan = fs_setup(16, 4)
    found = recovered(list(entries), [RegionFormat(0, ROW_BYTES, 4), RegionFormat(2, ROW_BYTES, 7)])
    return World(cpu_setup(8), [dataclasses.replace(plan, opened=dataclasses.replace(plan.opened, recovered=found))])


def test_recovered_entries_are_loadable_where_they_are():
    world = reopened((1, 9, 30), (2, 1, 41))
    world.bytes_at |= {("fs", 9): (key(1), 0), ("fs", 1): (key(2), 0)}
    assert world.plane.locate([key(1), key(2), key(3)], world.now) == ["fs", "fs", None]
    job = world.load(1, 2)
    (promotion,) = world.under_way(1, LOAD)
    (group,) = world.running[promotion].job.groups
    assert (group.slots, group.generations) == ([9, 1], [30, 41])
    world.run_all()
    assert world.statuses(job) == ["loaded", "loaded"]
    world.check()


def test_generations_continue_above_those_found():
    world = reopened((1, 9, 30), (2, 1, 41))
    fs = world.plane.control.lowers[0].owned
    world.store(5, 6)
    world.run_all()
    assert all(fs.table.generation[fs.ready(key(n))] > 41 for n in (5, 6))
    world.store(*range(20, 40))
    world.run_all()
    assert fs.placement.region_generation.tolist() == [4, 1, 7, 1]


def test_the_newest_generation_found_is_the_most_recent():
    world = reopened((1, 9, 30), (2, 1, 41), (3, 0, 50))
    fs = world.plane.control.lowers[0].owned
    assert [fs.table.keys[slot] for slot in fs.policy.coldest()] == [key(1), key(2), key(3)]


def test_slots_found_are_never_given_to_others():
    world = reopened((1, 9, 30), (2, 1, 41))
    world.store(*range(20, 34))
    world.run_all()
    fs = world.plane.control.lowers[0].owned
    assert (fs.ready(key(1)), fs.ready(key(2))) == (9, 1)
    assert len(fs.directory) == 16
    world.check()


def test_bytes_found_at_open_count_from_the_start():
    world = reopened((1, 9, 30), (2, 1, 41))
    fs = world.plane.control.lowers[0].owned
    assert fs.used_bytes == fs.peak_bytes == 2 * ROW_BYTES


def test_regions_of_a_size_nobody_uses_are_free_to_be_formatted():
    plan = fs_setup(8, 2)
    found = recovered([(1, 0, 3)], [RegionFormat(0, ROW_BYTES, 2), RegionFormat(1, 7 * ROW_BYTES, 9)])
    world = World(cpu_setup(8), [dataclasses.replace(plan, opened=dataclasses.replace(plan.opened, recovered=found))])
    world.store(*range(10, 14))
    world.run_tier(0)
    formats = {made for job in world.under_way(1, STORE) for made in world.running[job].job.formats}
    assert formats <= {RegionFormat(1, ROW_BYTES, 10)}
    world.run_all()
    world.store(*range(20, 24))
    world.run_all()
    assert world.plane.control.lowers[0].owned.placement.region_generation.tolist() == [2, 10]
    world.check()


@pytest.mark.parametrize("entries", [[(1, 0, 1), (1, 1, 2)], [(1, 5, 1)]])
def test_a_recovery_that_contradicts_itself_is_a_defect(entries):
    plan = fs_setup(8, 2)
    found = recovered(entries, [RegionFormat(0, ROW_BYTES, 1)])
    with pytest.raises(IntegrityError):
        World(cpu_setup(4), [dataclasses.replace(plan, opened=dataclasses.replace(plan.opened, recovered=found))])


def test_placement_stays_within_what_the_tier_offers():
    world = below(20, rows=8, slots=32)
    fs = world.plane.control.lowers[0].owned
    for number in range(200, 300):
        world.store(number)
        world.run_all()
        assert fs.used_bytes <= fs.peak_bytes <= 32 * ROW_BYTES
        assert len(fs.directory) <= 32
    world.check()
