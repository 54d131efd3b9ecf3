"""Rows: never over budget, never overlapping, every page at one place, padding only at the end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import GeometryError
from kvtier.types.geometry import Geometry, GroupKind, GroupLayout, KVLayout, TensorRef, round_up, stack_alignment

ALIGNMENTS = st.sampled_from([1, 2, 3, 512, 4096, 12288])


@st.composite
def layouts(draw: st.DrawFn, largest_page: int = 2000) -> KVLayout:
    """Layouts of up to four groups of up to three tensors, up to three workers, alike or not, factors up to five."""
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        pages = draw(st.lists(st.integers(1, largest_page), min_size=1, max_size=3))
        refs = tuple(TensorRef(tensor, page) for tensor, page in enumerate(pages))
        groups.append(GroupLayout(refs, draw(st.integers(1, 64)), padding_bytes=draw(st.sampled_from([0, 0, 1, 700]))))
    return KVLayout(tuple(groups), draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.booleans()))


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    return Geometry(draw(layouts()), draw(ALIGNMENTS))


def places(geometry: Geometry, group: int) -> list[tuple[int, int]]:
    """(start, end) in the row of every page of a group, in the order worker with a slice, sub-block, tensor."""
    refs = geometry.layout.groups[group].refs
    return [
        (start, start + ref.page_size_bytes)
        for worker in range(geometry.num_copies)
        for sub_block in range(geometry.factor)
        for index, ref in enumerate(refs)
        for start in [geometry.offset(group, worker, sub_block, index)]
    ]


@given(geometries(), st.integers(0, 10_000_000))
def test_the_budget_is_never_exceeded_and_one_block_more_would_not_fit(geometry: Geometry, spare: int) -> None:
    budget = geometry.row_bytes + spare
    rows = geometry.num_blocks(budget)
    assert rows >= 1
    assert rows * geometry.row_bytes <= budget
    assert (rows + 1) * geometry.row_bytes > budget


@given(geometries(), st.integers(1, 50))
def test_a_budget_of_exactly_n_rows_gives_n_rows_and_a_byte_less_gives_one_fewer(geometry: Geometry, rows: int) -> None:
    budget = rows * geometry.row_bytes
    assert geometry.num_blocks(budget) == rows
    if rows > 1:
        assert geometry.num_blocks(budget - 1) == rows - 1


@given(geometries())
def test_a_budget_under_one_block_is_refused_and_names_the_bytes_needed(geometry: Geometry) -> None:
    with pytest.raises(GeometryError, match=rf"one block needs {geometry.row_bytes}\b"):
        geometry.num_blocks(geometry.row_bytes - 1)


@given(geometries())
def test_the_pages_of_a_group_and_what_no_tensor_fills_tile_its_block_without_overlap(geometry: Geometry) -> None:
    for group in range(geometry.num_groups):
        end_of_last = 0
        for start, end in sorted(places(geometry, group) + geometry.gaps(group)):
            assert start == end_of_last < end
            end_of_last = end
        assert end_of_last == geometry.aligned_bytes(group)


@given(geometries())
def test_padding_sits_once_at_the_end_of_the_row_after_the_last_worker(geometry: Geometry) -> None:
    for group in range(geometry.num_groups):
        last_byte = max(end for _, end in places(geometry, group)) + geometry.layout.groups[group].padding_bytes
        assert geometry.padding_bytes(group) == geometry.row_bytes - last_byte
        assert geometry.padding_bytes(group) >= 0


@given(geometries())
def test_the_slice_of_a_worker_is_where_its_pages_are(geometry: Geometry) -> None:
    for worker in range(geometry.world_size):
        for group, (first, end) in enumerate(geometry.slices(worker)):
            assert (first, end - first) == (geometry.offset(group, worker), geometry.worker_bytes(group))
    largest = max(geometry.kv_bytes_per_offloaded_block(group) for group in range(geometry.num_groups))
    assert geometry.row_bytes - largest < geometry.alignment


@given(geometries(), st.integers(2, 6))
def test_no_page_reaches_into_the_next_row(geometry: Geometry, rows: int) -> None:
    for group in range(geometry.num_groups):
        for row in range(rows):
            base = row * geometry.row_bytes
            for start, end in places(geometry, group):
                assert base <= base + start < base + end <= (row + 1) * geometry.row_bytes


@given(geometries())
def test_a_worker_holds_factor_pages_side_by_side(geometry: Geometry) -> None:
    for group in range(geometry.num_groups):
        assert geometry.worker_bytes(group) == geometry.page_bytes(group) * geometry.factor
        for worker in range(geometry.num_copies):
            assert geometry.offset(group, worker) == worker * geometry.worker_bytes(group)


@given(geometries())
def test_workers_that_hold_the_same_share_one_slice_and_the_others_have_one_each(geometry: Geometry) -> None:
    for group in range(geometry.num_groups):
        starts = [geometry.offset(group, worker) for worker in range(geometry.world_size)]
        assert len(set(starts)) == geometry.num_copies == (1 if geometry.layout.replicated else geometry.world_size)


@given(geometries())
def test_rows_and_lower_tier_blocks_are_whole_multiples_of_the_alignment(geometry: Geometry) -> None:
    assert geometry.row_bytes % geometry.alignment == 0
    for group in range(geometry.num_groups):
        payload = geometry.kv_bytes_per_offloaded_block(group)
        assert geometry.aligned_bytes(group) % geometry.alignment == 0
        assert payload <= geometry.aligned_bytes(group) < payload + geometry.alignment
        assert geometry.aligned_bytes(group) <= geometry.row_bytes


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up_is_the_smallest_multiple_not_below(value: int, alignment: int) -> None:
    rounded = round_up(value, alignment)
    assert rounded % alignment == 0
    assert 0 <= rounded - value < alignment


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=5))
def test_the_stack_alignment_is_the_least_number_every_tier_divides(alignments: list[int]) -> None:
    common = stack_alignment(alignments)
    assert all(common % value == 0 for value in alignments)
    for prime in (2, 3, 5, 7, 11):
        if common % prime == 0:
            assert any((common // prime) % value for value in alignments)
    assert common == math.lcm(*alignments)


@pytest.mark.parametrize("alignments", [[0], [4096, -1]])
def test_an_alignment_below_one_is_refused(alignments: list[int]) -> None:
    with pytest.raises(GeometryError, match="at least 1"):
        stack_alignment(alignments)


def test_the_worked_example_of_two_groups_two_workers_factor_four() -> None:
    full = GroupLayout((TensorRef(0, 3000), TensorRef(1, 1000)), 16)
    window = GroupLayout((TensorRef(2, 1000),), 16, GroupKind.SLIDING_WINDOW, 512)
    geometry = Geometry(KVLayout((full, window), world_size=2, block_size_factor=4), 4096)
    assert geometry.kv_bytes_per_block(0) == 8000
    assert geometry.kv_bytes_per_offloaded_block(0) == 32000
    assert geometry.row_bytes == 32768
    assert geometry.padding_bytes(0) == 768
    assert geometry.padding_bytes(1) == 24768
    assert geometry.aligned_bytes(1) == 8192
    assert geometry.offset(0, worker=1, sub_block=2, ref=1) == 16000 + 8000 + 3000
    assert geometry.tokens_per_offloaded_block(0) == 64
    assert geometry.num_blocks(10 * 32768 + 32767) == 10


@pytest.mark.parametrize(
    ("worker", "sub_block", "ref"), [(2, 0, 0), (-1, 0, 0), (0, 4, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)]
)
def test_a_page_that_does_not_exist_has_no_place(worker: int, sub_block: int, ref: int) -> None:
    geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, 10),)),), 2, 4))
    with pytest.raises(GeometryError, match="no page"):
        geometry.offset(0, worker, sub_block, ref)


def test_layouts_that_cannot_be_are_refused() -> None:
    group = GroupLayout((TensorRef(0, 1),))
    cases = [
        lambda: TensorRef(0, 0),
        lambda: TensorRef(-1, 1),
        lambda: GroupLayout(()),
        lambda: GroupLayout((TensorRef(0, 1),), block_size=0),
        lambda: GroupLayout((TensorRef(0, 1),), kind=GroupKind.SLIDING_WINDOW),
        lambda: GroupLayout((TensorRef(0, 1),), window_tokens=5),
        lambda: KVLayout(()),
        lambda: KVLayout((group,), world_size=0),
        lambda: KVLayout((group,), block_size_factor=0),
        lambda: Geometry(KVLayout((group,)), 0),
    ]
    for case in cases:
        with pytest.raises(GeometryError):
            case()
