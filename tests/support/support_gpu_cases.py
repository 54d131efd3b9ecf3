"""Random layouts, tensors and jobs for the GPU tier, and what they must leave behind."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from support_gpu import job, naive_whole_rows, runs_of, transfer

from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import LOADED, PARTIAL, JobResult, TransferJob

NUM_BLOCKS = 17
NUM_ROWS = 9


@dataclass
class Case:
    geometry: Geometry
    style: str
    seed: int
    jobs: tuple[TransferJob, TransferJob]


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    page = st.one_of(st.integers(1, 40), st.sampled_from([64, 1000, 4096]))
    groups, tensor = [], 0
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(page, min_size=1, max_size=3))
        groups.append(GroupLayout(tuple(TensorRef(tensor + i, size) for i, size in enumerate(sizes))))
        tensor += len(sizes)
    layout = KVLayout(tuple(groups), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    return Geometry(layout, draw(st.sampled_from([1, 64, 4096])))


@st.composite
def jobs(draw: st.DrawFn, geometry: Geometry) -> TransferJob:
    """Runs with heads, tails, holes and blocks without any run, over distinct rows and distinct GPU blocks."""
    rows = draw(st.permutations(range(NUM_ROWS)))
    groups = []
    for group in draw(st.permutations(range(geometry.num_groups))):
        count = draw(st.integers(0, min(3, len(rows))))
        mine, rows = rows[:count], rows[count:]
        free = list(draw(st.one_of(st.permutations(range(NUM_BLOCKS)), st.just(range(NUM_BLOCKS)))))
        pieces = []
        for block in draw(st.permutations(range(count))):
            subs = draw(st.sets(st.integers(0, geometry.factor - 1)))
            if draw(st.booleans()):
                subs = set(range(geometry.factor))
            for first in sorted(subs):
                if pieces and pieces[-1][0] == block and pieces[-1][1] + len(pieces[-1][2]) == first:
                    pieces[-1][2].append(free.pop(0))
                else:
                    pieces.append((block, first, [free.pop(0)]))
        groups.append(transfer(group, runs_of(pieces), mine, generation=draw(st.integers(1, 2**40))))
    return job(*groups)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    geometry = draw(geometries())
    style = draw(st.sampled_from(["plain", "strided", "packed"]))
    return Case(geometry, style, draw(st.integers(0, 2**32)), (draw(jobs(geometry)), draw(jobs(geometry))))


def total(geometry: Geometry, work: TransferJob) -> int:
    return sum(len(one.runs.gpu_blocks) * geometry.page_bytes(one.group) for one in work.groups)


def check_outcomes(case: Case, into_rows: JobResult, to_gpu: JobResult) -> None:
    """Of the first job only blocks that it filled whole are loaded, the others are partial; the second one succeeds."""
    whole = naive_whole_rows(case.geometry, case.jobs[0])
    for group, outcomes in zip(case.jobs[0].groups, into_rows.outcomes, strict=True):
        assert outcomes == tuple(LOADED if row in whole else PARTIAL for row in group.rows.tolist())
    assert to_gpu.ok
