"""The arithmetic of the GPU tier: tensors as bytes, jobs as pages, pages as extents, parts and batches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_gpu import job, make_worker, runs_of, transfer

from kvtier.errors import GeometryError, UsageError
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, RowGroup, TransferJob
from kvtier_gpu.copy_plan import (
    CopyPlan,
    Extents,
    GroupPages,
    RegionShape,
    batches,
    extents,
    group_tables,
    merge,
    plan_job,
    split,
)
from kvtier_gpu.kv_tensors import describe_tensors

GEOMETRY = Geometry(KVLayout((GroupLayout((TensorRef(0, 10), TensorRef(1, 6))), GroupLayout((TensorRef(2, 7),))), 2, 3))
SHAPE = RegionShape(8, GEOMETRY.row_bytes, 3)
NUM_BLOCKS = 12


def layout(*page_bytes: int) -> Geometry:
    return Geometry(KVLayout((GroupLayout(tuple(TensorRef(i, size) for i, size in enumerate(page_bytes))),)))


def tables(worker: int = 0) -> tuple:
    made = make_worker(GEOMETRY, NUM_BLOCKS, "strided", np.random.default_rng(0))
    return group_tables(GEOMETRY, worker, describe_tensors(made.tensors, GEOMETRY))


@pytest.mark.parametrize(
    ("tensor", "address_offset", "stride_bytes", "page_bytes"),
    [
        (torch.zeros(5, 12, dtype=torch.int8), 0, 12, 12),
        (torch.zeros(5, 20, dtype=torch.uint8)[:, 3:15], 3, 20, 12),
        (torch.zeros(5, 6, dtype=torch.bfloat16), 0, 12, 12),
        (torch.zeros(5, 2, 3, 2, dtype=torch.uint8), 0, 12, 12),
        (torch.zeros(9, 12, dtype=torch.uint8)[::2], 0, 24, 12),
        (torch.zeros(5, 4, 12, dtype=torch.uint8)[:, 2], 24, 48, 12),
        (torch.zeros(4, 5, 12, dtype=torch.uint8).transpose(0, 1)[:, 1:2], 60, 12, 12),
        (torch.zeros(5, 12, requires_grad=True), 0, 48, 48),
    ],
)
def test_tensors_of_any_shape_and_type_are_pages_of_bytes(
    tensor: torch.Tensor, address_offset: int, stride_bytes: int, page_bytes: int
) -> None:
    (found,) = describe_tensors([tensor], layout(12))
    assert found.address == tensor.untyped_storage().data_ptr() + address_offset
    assert (found.stride_bytes, found.page_bytes, found.num_blocks) == (stride_bytes, page_bytes, 5)


def test_a_view_of_a_kv_tensor_shows_the_engines_own_bytes() -> None:
    storage = torch.arange(96, dtype=torch.uint8).view(4, 24)
    (found,) = describe_tensors([storage[:, 8:24]], layout(16))
    assert found.pages(16, 8).view(torch.uint8).tolist() == storage[:, 8:24].tolist()
    found.pages(16)[2, 1] = 0
    assert storage[2, 9] == 0


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([torch.zeros(4, 10), torch.zeros(4, 10).t()], "KV tensor 1"),
        ([torch.zeros(4, 40, dtype=torch.uint8), torch.zeros(4, 9, dtype=torch.uint8)], "KV tensor 1"),
        ([torch.zeros(4, 10, dtype=torch.uint8)], "KV tensor 1 of 1"),
        ([torch.zeros(4, 10)] * 3, "KV tensor 2 belongs to no group"),
        ([torch.zeros(4, 10), torch.zeros(40)], "KV tensor 1"),
        ([torch.zeros(4, 10), torch.zeros(0, 10)], "KV tensor 1"),
        ([torch.zeros(4, 10), torch.zeros(1, 10, dtype=torch.uint8).expand(4, 10)], "KV tensor 1 overlap"),
        ([torch.zeros(4, 10), torch.zeros(4, 10, device="meta")], "KV tensor 1"),
        ([torch.zeros(4, 10), torch.zeros(4, 10).to_sparse()], "KV tensor 1"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tensors: list[torch.Tensor], says: str) -> None:
    with pytest.raises(GeometryError, match=says):
        describe_tensors(tensors, layout(10, 10))


def test_pages_follow_each_other_in_a_row_as_the_geometry_says() -> None:
    for worker in range(2):
        plan = plan_job(job(transfer(0, runs_of([(1, 1, [4, 2])]), [5, 3])), tables(worker), SHAPE, to_gpu=False)
        places = [3 * SHAPE.row_bytes + GEOMETRY.offset(0, worker, sub) for sub in (1, 2)]
        assert plan.groups[0].row_offsets.tolist() == places
        assert plan.nbytes == 2 * 16
        assert plan.rows.tolist() == [5, 3]


WRONG = {
    "unknown group": job(transfer(2, GPURuns.whole([0, 1, 2], 3), [0])),
    "row too high": job(transfer(0, GPURuns.whole([0, 1, 2], 3), [8])),
    "row negative": job(transfer(0, GPURuns.whole([0, 1, 2], 3), [-1])),
    "row twice": job(transfer(0, GPURuns.whole([0, 1, 2], 3), [4]), transfer(1, GPURuns.whole([0, 1, 2], 3), [4])),
    "block too high": job(transfer(0, GPURuns.whole([0, 1, 12], 3), [0])),
    "block negative": job(transfer(0, GPURuns.whole([0, -1, 2], 3), [0])),
    "position past the keys": job(transfer(0, runs_of([(1, 0, [1])]), [0])),
    "position negative": job(transfer(0, runs_of([(-1, 0, [1])]), [0])),
    "sub-block past the factor": job(transfer(0, runs_of([(0, 2, [1, 2])]), [0])),
    "sub-block negative": job(transfer(0, runs_of([(0, -1, [1, 2])]), [0])),
    "count negative": job(
        transfer(0, GPURuns(int_array([0, 0]), int_array([0, 0]), int_array([3, -1]), int_array([1, 2])), [0])
    ),
    "rows missing": job(GPUGroup(0, (b"k",), GPURuns.whole([0, 1, 2], 3))),
    "rows instead of runs": job(RowGroup(0, (b"k",), [0], [0], [1])),
}


@pytest.mark.parametrize("work", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("to_gpu", [True, False])
def test_a_job_that_names_what_is_not_there_is_refused(work: TransferJob, to_gpu: bool) -> None:
    with pytest.raises(UsageError):
        plan_job(work, tables(), SHAPE, to_gpu=to_gpu)


def test_a_gpu_block_may_be_read_twice_but_not_written_twice() -> None:
    work = job(transfer(0, runs_of([(0, 0, [5]), (1, 1, [5])]), [0, 1]))
    assert plan_job(work, tables(), SHAPE, to_gpu=False).nbytes == 32
    with pytest.raises(UsageError, match="twice"):
        plan_job(work, tables(), SHAPE, to_gpu=True)


pages = st.lists(st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, 23)), max_size=20)


def group_pages(group: int, found: list[tuple[int, int]], worker: int = 0) -> GroupPages:
    table = tables(worker)[group]
    places = [at // 3 * SHAPE.row_bytes + table.worker_offset + at % 3 * table.page_bytes for _, at in found]
    return GroupPages(table, int_array([block for block, _ in found]), int_array(places))


def bytes_of(found: Extents) -> Counter:
    """Every (GPU byte, region byte) pair."""
    triples = zip(found.gpu.tolist(), found.region.tolist(), found.lengths.tolist(), strict=True)
    return Counter((gpu + i, region + i) for gpu, region, length in triples for i in range(length))


def pages_of(pages: GroupPages) -> list[tuple[int, int, int]]:
    places = zip(pages.gpu_blocks.tolist(), pages.row_offsets.tolist(), strict=True)
    return [(pages.table.group, *place) for place in places]


@given(pages, pages, st.integers(1, 200))
def test_parts_hold_every_page_once_and_stay_within_their_size(
    first: list[tuple[int, int]], second: list[tuple[int, int]], max_bytes: int
) -> None:
    groups = (group_pages(0, first), group_pages(1, second))
    seen: Counter = Counter()
    plan = CopyPlan(groups, int_array([]), 0, SHAPE.row_bytes).of(groups)
    for part in split(plan, max_bytes):
        counts = [len(pages.gpu_blocks) for pages in part]
        sizes = [count * pages.table.page_bytes for count, pages in zip(counts, part, strict=True)]
        assert all(sizes)
        assert sum(sizes) <= max_bytes or sum(counts) == 1
        seen.update(page for pages in part for page in pages_of(pages))
    assert seen == Counter(page for pages in groups for page in pages_of(pages))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 3)), max_size=12))
def test_merging_neighbours_changes_no_byte_and_leaves_none_to_merge(triples: list[tuple[int, int, int]]) -> None:
    gpu, region, lengths = (int_array(column) for column in (zip(*triples, strict=True) if triples else ([], [], [])))
    before = Extents(gpu, region, lengths)
    after = merge(before)
    assert bytes_of(after) == bytes_of(before)
    ends = zip(after.gpu + after.lengths, after.region + after.lengths, strict=True)
    starts = zip(after.gpu[1:], after.region[1:], strict=True)
    assert all(end != start for end, start in zip(ends, starts, strict=False))


@given(st.lists(st.integers(1, 9000), max_size=6), st.integers(1, 5000), st.integers(1, 600))
def test_batches_cover_the_extents_byte_for_byte_and_nothing_else(
    lengths: list[int], piece_bytes: int, min_pieces: int
) -> None:
    region = np.cumsum([0, *lengths])[:-1]
    found = Extents(int_array(region * 3 + 11), int_array(region), int_array(lengths))
    covered = np.zeros(sum(lengths), dtype=bool)
    gpu_of = np.full(sum(lengths), -1)
    for extent, length in enumerate(lengths):
        gpu_of[region[extent] : region[extent] + length] = found.gpu[extent] + np.arange(length)
    for batch in batches(found, piece_bytes, min_pieces):
        assert batch.length <= max(1024, piece_bytes)
        for gpu, place in zip(batch.gpu.tolist(), batch.region.tolist(), strict=True):
            assert (gpu_of[place : place + batch.length] == gpu + np.arange(batch.length)).all()
            covered[place : place + batch.length] = True
    assert covered.all()


def test_packed_tensors_and_whole_blocks_become_one_extent() -> None:
    geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, 10), TensorRef(1, 6))),), 1, 3))
    whole = torch.zeros(NUM_BLOCKS, 16, dtype=torch.uint8)
    found = describe_tensors([whole[:, :10], whole[:, 10:]], geometry)
    shape = RegionShape(4, geometry.row_bytes, 3)
    work = job(transfer(0, GPURuns.whole([3, 4, 5, 6, 7, 8], 3), [1, 2]))
    plan = plan_job(work, group_tables(geometry, 0, found), shape, to_gpu=False)
    ((found_pages,),) = split(plan, 1 << 20)
    merged = extents(found_pages)
    assert merged.lengths.tolist() == [6 * 16]
    assert merged.region.tolist() == [geometry.row_bytes]
    assert merged.gpu.tolist() == [whole.data_ptr() + 3 * 16]
