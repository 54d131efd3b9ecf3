"""Memory that blocks pass through: a job has room of its own for each of its blocks, and no more than it needs."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest

from kvtier.engines.engine_memory.staging import Frames, StagingRows
from kvtier.errors import IntegrityError
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout
from kvtier.types.jobs import JobKind, RowGroup, TransferJob
from kvtier.types.keys import GroupIndex, JobId, make_key

SIZES = (64 << 10, 12 << 10, 5000, 64 << 10)
"""Bytes of a block of each group: in a frame of 64 KiB is room for 1, 5, 8 and 1."""


def frames(alignment: int = 4096) -> Frames:
    return Frames(Geometry(KVLayout([GroupLayout.of_pages(size) for size in SIZES]), alignment))


def staging(count: int, alignment: int = 4096) -> StagingRows:
    return StagingRows(count, frames(alignment))


def job(counts: dict[int, int]) -> TransferJob:
    groups = [
        RowGroup(GroupIndex(group), tuple(make_key(b"%d" % each, group) for each in range(count)), rows=[0] * count)
        for group, count in counts.items()
    ]
    return TransferJob(JobId(1), JobKind.LOAD, tuple(groups))


def spans(rows: list[int], counts: dict[int, int], row_bytes: int) -> list[tuple[int, int]]:
    """First byte and end of each block of a job."""
    groups = list(chain.from_iterable([group] * count for group, count in counts.items()))
    return [(row * row_bytes, row * row_bytes + SIZES[group]) for row, group in zip(rows, groups, strict=True)]


@pytest.mark.parametrize("alignment", [1, 4096, 16384])
def test_blocks_of_jobs_side_by_side_never_overlap(alignment):
    memory = staging(9, alignment)
    first, second = {0: 2, 1: 5}, {2: 9, 1: 1, 3: 1}
    with memory.taken(job(first)) as some, memory.taken(job(second)) as others:
        found = sorted(spans(some, first, memory.row_bytes) + spans(others, second, memory.row_bytes))
    assert len(found) == 18
    assert all(end <= begin for (_, end), (begin, _) in pairwise(found))
    assert found[0][0] >= 0
    assert found[-1][1] <= memory.view.size
    assert all(begin % max(alignment, 4096) == 0 for begin, _ in found)


def test_small_blocks_share_a_frame():
    some = frames()
    assert some.blocks == [1, 5, 8, 1]
    assert some.num_bytes == SIZES[0]
    assert some.job_bytes(job({0: 3})) == 3 * SIZES[0]
    assert some.job_bytes(job({1: 5, 2: 8})) == 2 * SIZES[0]
    assert some.job_bytes(job({1: 6, 2: 9})) == 4 * SIZES[0]
    with StagingRows(4, some).taken(job({1: 20})) as rows:
        assert len(set(rows)) == 20


def test_frames_come_back_and_more_than_there_are_is_an_error():
    memory = staging(2)
    for _ in range(3):
        with memory.taken(job({1: 6})), pytest.raises(IntegrityError), memory.taken(job({2: 1})):
            pass
    with memory.taken(job({0: 2})) as rows:
        assert len(rows) == 2


def test_a_block_is_memory_of_its_own_length_from_its_row_on():
    memory = staging(2)
    with memory.taken(job({2: 2})) as (one, other):
        memory.block(one, SIZES[2])[:] = 1
        memory.block(other, SIZES[2])[:] = 2
        assert memory.block(one, SIZES[2]).tobytes() == b"\1" * SIZES[2]
        assert int((memory.view == 1).sum()) == SIZES[2]
