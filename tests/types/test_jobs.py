"""Runs say which GPU block holds which sub-block: checked against references that walk one page at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import UsageError
from kvtier.types.arrays import NO_IDS, int_array
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import (
    CANCELLED,
    CORRUPT,
    LATE,
    LOADED,
    MISSING,
    PRESENT,
    STORED,
    DropReason,
    GPUGroup,
    JobKind,
    JobResult,
    TransferJob,
    dropped,
    failed,
)
from kvtier.types.keys import GroupIndex, JobId, make_key

Page = tuple[int, int, int]
"""(offloaded block, sub-block, GPU block)"""


@st.composite
def runs_of(draw: st.DrawFn, num_blocks: int = 6, factor: int = 4) -> GPURuns:
    """Any runs inside num_blocks x factor sub-blocks, in any order, also overlapping, also several for one block."""
    spans = draw(
        st.lists(
            st.tuples(st.integers(0, num_blocks - 1), st.integers(0, factor - 1), st.integers(1, factor)), max_size=12
        )
    )
    spans = [(block, first, min(count, factor - first)) for block, first, count in spans]
    total = sum(count for _, _, count in spans)
    ids = draw(st.lists(st.integers(0, 99), min_size=total, max_size=total))
    return GPURuns(*(int_array([span[i] for span in spans]) for i in range(3)), int_array(ids))


def naive_pages(runs: GPURuns) -> list[Page]:
    ids = iter(runs.gpu_blocks.tolist())
    return [
        (block, first + k, next(ids))
        for block, first, count in zip(runs.blocks.tolist(), runs.firsts.tolist(), runs.counts.tolist(), strict=True)
        for k in range(count)
    ]


def pages(runs: GPURuns) -> list[Page]:
    return list(zip(*(column.tolist() for column in runs.pages()), strict=True))


@given(runs_of())
def test_pages_lists_every_gpu_block_of_every_run_in_order(runs: GPURuns) -> None:
    assert pages(runs) == naive_pages(runs)


@given(runs_of())
def test_a_block_is_whole_only_if_each_sub_block_is_written_exactly_once(runs: GPURuns) -> None:
    written = [(block, sub) for block, sub, _ in naive_pages(runs)]
    expected = [all(written.count((block, sub)) == 1 for sub in range(4)) for block in range(6)]
    assert runs.covers_whole(6, 4).tolist() == expected


@given(st.lists(st.integers(0, 99), max_size=20), st.integers(1, 5))
def test_whole_runs_cover_every_block(ids: list[int], factor: int) -> None:
    ids = ids[: len(ids) - len(ids) % factor]
    runs = GPURuns.whole(ids, factor)
    assert runs.covers_whole(len(ids) // factor, factor).all()
    assert pages(runs) == [(i // factor, i % factor, block) for i, block in enumerate(ids)]


@given(runs_of(), st.permutations(range(6)), st.integers(0, 6))
def test_select_keeps_the_runs_of_the_chosen_blocks_in_the_chosen_order(
    runs: GPURuns, order: list[int], count: int
) -> None:
    positions = order[:count]
    expected = [(rank, sub, gpu) for rank, at in enumerate(positions) for b, sub, gpu in naive_pages(runs) if b == at]
    assert pages(runs.select(int_array(positions))) == expected


def test_select_of_nothing_is_empty() -> None:
    assert pages(GPURuns.whole([1, 2, 3, 4], 2).select(NO_IDS)) == []


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 9)), min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_consecutive_runs_place_each_gpu_block_by_its_logical_index(
    shapes: list[tuple[int, int]], factor: int, data: st.DataObject
) -> None:
    for size, first in shapes:
        ids = data.draw(st.lists(st.integers(0, 999), min_size=size, max_size=size))
        runs = GPURuns.consecutive(first, int_array(ids), factor)
        expected = [
            ((first + i) // factor - first // factor, (first + i) % factor, block) for i, block in enumerate(ids)
        ]
        assert pages(runs) == expected
        # One run for each offloaded block touched, so a head and a tail are partial and all between is whole.
        assert len(runs.blocks) == len({block for block, _, _ in expected})


def test_an_unaligned_head_and_tail_are_partial_and_the_middle_is_whole() -> None:
    runs = GPURuns.consecutive(3, int_array([7, 8, 9, 10, 11, 12, 13]), 4)
    assert runs.blocks.tolist() == [0, 1, 2]
    assert runs.firsts.tolist() == [3, 0, 0]
    assert runs.counts.tolist() == [1, 4, 2]
    assert runs.covers_whole(3, 4).tolist() == [False, True, False]


def test_contradictory_runs_are_refused() -> None:
    one, two = int_array([0]), int_array([0, 1])
    with pytest.raises(UsageError, match="one length"):
        GPURuns(one, two, one, one)
    with pytest.raises(UsageError, match="cover 1 sub-blocks but name 2"):
        GPURuns(one, one, int_array([1]), two)
    with pytest.raises(UsageError, match="no whole number"):
        GPURuns.whole([1, 2, 3], 2)
    with pytest.raises(UsageError, match="outside"):
        GPURuns.whole([1, 2], 2).covers_whole(0, 2)
    with pytest.raises(UsageError, match="outside"):
        GPURuns.whole([1, 2], 2).covers_whole(1, 1)


def test_runs_are_known_to_be_whole_only_where_they_were_made_so() -> None:
    whole = GPURuns.whole([1, 2, 3, 4], 2)
    assert whole.all_whole(2, 2)
    assert whole.select(int_array([1])).all_whole(1, 2)
    assert not replace(whole, blocks=int_array([0, 0])).all_whole(2, 2)
    assert replace(whole, blocks=int_array([0, 0])).covers_whole(2, 2).tolist() == [False, False]
    with pytest.raises(TypeError, match="whole_factor"):
        GPURuns(whole.blocks, whole.firsts, whole.counts, whole.gpu_blocks, whole_factor=2)


def test_only_stored_loaded_and_present_are_success() -> None:
    assert [outcome.ok for outcome in (STORED, LOADED, PRESENT)] == [True] * 3
    bad = [CORRUPT, MISSING, CANCELLED, LATE, failed(5), *map(dropped, DropReason)]
    assert not any(outcome.ok for outcome in bad)
    assert failed(28).errno == 28
    assert dropped(DropReason.NO_ROW).reason is DropReason.NO_ROW


def test_a_result_has_one_outcome_for_each_key_of_each_group() -> None:
    keys = tuple(make_key(bytes([i]), 0) for i in range(3))
    groups = (GPUGroup(GroupIndex(0), keys, int_array(np.arange(3))), GPUGroup(GroupIndex(1), keys[:1], int_array([9])))
    job = TransferJob(JobId(4), JobKind.LOAD, groups)
    assert job.num_blocks == 4
    result = JobResult.uniform(job, MISSING)
    assert result.outcomes == ((MISSING,) * 3, (MISSING,))
    assert not result.ok
    assert JobResult.uniform(job, LOADED).ok
    assert not JobResult(JobId(4), ((LOADED, LOADED, CORRUPT), (LOADED,))).ok
