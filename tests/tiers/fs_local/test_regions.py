"""Places never overlap and never leave the bound, whatever the capacity and the block sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_counts import examples

from kvtier.errors import GeometryError
from kvtier_fs.format.region_header import (
    LARGE_REGION_BYTES,
    REGIONS_PER_FILE,
    SMALL_REGION_BYTES,
    RegionDemand,
    RegionHeader,
    RegionPlan,
    choose_plan,
    decode_region_header,
    encode_region_header,
    reserve_bytes,
)

HEADER = 4096
sizes = st.lists(st.integers(2, 600).map(lambda pages: pages * HEADER), min_size=1, max_size=4).map(tuple)
demands = st.builds(
    RegionDemand,
    share=st.integers(1, 1 << 22).map(lambda pages: pages * HEADER),
    roots=st.integers(1, 8),
    slot_sizes=sizes,
    header_bytes=st.just(HEADER),
)


@examples(400)
@given(demands, st.none() | st.integers(1, 1 << 28))
def test_a_plan_holds_the_bound_and_serves_every_size_or_names_the_bytes_needed(demand, region_bytes):
    if region_bytes is None and demand.share * demand.roots < demand.bytes_needed:
        with pytest.raises(GeometryError, match=str(demand.bytes_needed)):
            choose_plan(demand)
        return
    try:
        plan = choose_plan(demand, region_bytes)
    except GeometryError:
        assert region_bytes is not None
        return
    assert plan.regions * plan.stride + reserve_bytes(demand.share, min(demand.slot_sizes)) <= demand.share
    assert plan.regions * demand.roots >= len(set(demand.slot_sizes))
    assert all(plan.slots(size) >= 1 for size in demand.slot_sizes)
    assert plan.stride % demand.header_bytes == 0


@examples(200)
@given(demands)
def test_the_bytes_named_are_enough_and_not_a_root_more(demand):
    enough = RegionDemand(demand.bytes_needed // demand.roots, demand.roots, demand.slot_sizes, demand.header_bytes)
    choose_plan(enough)
    too_little = RegionDemand(enough.share - HEADER, demand.roots, demand.slot_sizes, demand.header_bytes)
    with pytest.raises(GeometryError):
        choose_plan(too_little)


@examples(100)
@given(demands, st.data())
def test_slots_never_overlap_nor_leave_their_region(demand, data):
    try:
        plan = choose_plan(demand)
    except GeometryError:
        return
    regions = data.draw(st.lists(st.integers(0, plan.regions - 1), min_size=1, max_size=4, unique=True))
    taken = []
    for region in regions:
        size = data.draw(st.sampled_from(demand.slot_sizes))
        begin = plan.region_offset(region)
        taken.append((plan.file_of(region), begin, begin + HEADER))
        count = plan.slots(size)
        for index in {0, 1, count // 2, count - 1} & set(range(count)):
            at = plan.slot_offset(region, index, size)
            assert begin + HEADER <= at
            assert at + size <= begin + plan.stride
            assert at % HEADER == 0
            taken.append((plan.file_of(region), at, at + size))
    taken.sort()
    for (file, _, end), (next_file, start, _) in pairwise(taken):
        assert file != next_file or end <= start


def test_large_capacities_get_regions_of_64_to_256_mib_with_16_slots():
    for capacity in (8 << 30, 100 << 30, 2 << 40):
        plan = choose_plan(RegionDemand(capacity, 1, (65536 + HEADER,), HEADER))
        assert SMALL_REGION_BYTES // 2 <= plan.stride <= LARGE_REGION_BYTES
        assert plan.regions * plan.slots(65536 + HEADER) * (65536 + HEADER) > 0.98 * capacity
    huge = choose_plan(RegionDemand(2 << 40, 1, ((64 << 20) + HEADER,), HEADER))
    assert huge.slots((64 << 20) + HEADER) >= 16


@pytest.mark.parametrize("capacity", [1 << 20, 2 << 20, 8 << 20, 64 << 20, 1 << 30])
def test_little_is_wasted_on_one_block_size_unless_the_capacity_is_tiny(capacity):
    slot = 16384 + HEADER
    plan = choose_plan(RegionDemand(capacity, 1, (slot,), HEADER))
    assert plan.regions * plan.slots(slot) * slot > 0.88 * capacity


def test_a_plan_for_the_largest_capacity_there_is_comes_at_once():
    demand = RegionDemand(share=1 << 62, roots=1, slot_sizes=(69632,), header_bytes=HEADER)
    plan = choose_plan(demand, None)
    assert 0.99 * demand.share < plan.regions * plan.stride <= demand.share


def test_regions_follow_each_other_in_files_of_64():
    plan = RegionPlan(1 << 20, HEADER, 3 * REGIONS_PER_FILE - 1)
    places = [(plan.file_of(region), plan.region_offset(region)) for region in range(plan.regions)]
    assert places == [(file, index << 20) for file in range(3) for index in range(REGIONS_PER_FILE)][:-1]
    assert plan.files == 3


def test_a_region_header_comes_back_and_any_flipped_bit_makes_it_none():
    header = RegionHeader(bytes(range(16)), 7, 69632, 3)
    page = bytearray(HEADER)
    encode_region_header(header, memoryview(page))
    assert decode_region_header(memoryview(page)) == header
    for bit in range(0, HEADER * 8, 7):
        page[bit // 8] ^= 1 << bit % 8
        assert decode_region_header(memoryview(page)) is None
        page[bit // 8] ^= 1 << bit % 8
