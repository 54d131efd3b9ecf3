"""An engine's own jobs on the whole stack, block by block: what the loads and stores have in common."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvtier.control.state import ControlState
from kvtier.types.gpu_runs import RunIndex
from kvtier.types.jobs import BlockOutcome, GPUGroup, JobResult, TransferJob
from kvtier.types.keys import OffloadKey


class EngineJob:
    """A job of an engine: a flat list of blocks over its groups, an outcome for each, what is left to do.

    `todo` holds the flat indices not started yet, in prefix order, `in_copy` those whose copy is in flight. A request
    ends when every block has an outcome. `age` orders the requests.
    """

    def __init__(self, control: ControlState, job: TransferJob, now: float, age: int) -> None:
        self.control = control
        self.job = job
        self.age = age
        self.groups = job.gpu_groups
        self.started = self.ended = now
        self.keys: list[OffloadKey] = []
        self.starts: list[int] = []
        counts = control.group_blocks[job.kind]
        for group in self.groups:
            counts[group.group] += len(group.keys)
            self.starts.append(len(self.keys))
            self.keys += group.keys
        self.all = range(len(self.keys))
        self.runs: dict[int, RunIndex] = {}
        self.outcomes: list[BlockOutcome | None] = [None] * len(self.keys)
        self.open = len(self.keys)
        if not self.keys:
            control.ended_ages.append(age)
        self.todo = deque(self.all)
        self.in_copy: set[int] = set()
        self.stopping: BlockOutcome | None = None
        self.bytes_moved = 0

    def complete(self, index: int, outcome: BlockOutcome) -> None:
        """The block's outcome, once."""
        if self.outcomes[index] is None:
            self.outcomes[index] = outcome
            self.open -= 1
            if not self.open:
                self.control.ended_ages.append(self.age)

    def complete_all(self, indices: Sequence[int], outcome: BlockOutcome) -> None:
        """The same outcome for blocks that have none."""
        outcomes = self.outcomes
        if len(indices) == len(outcomes):
            self.outcomes = [outcome] * len(outcomes)
        else:
            for index in indices:
                outcomes[index] = outcome
        self.open -= len(indices)
        if indices and not self.open:
            self.control.ended_ages.append(self.age)

    def transfers(self, indices: Sequence[int], rows: list[int]) -> tuple[GPUGroup, ...]:
        """The chosen blocks as transfers between their GPU blocks and rows, grouped; `order_of` gives their order."""
        if indices == self.all and len(self.groups) == 1:
            return (self._with_rows(self.groups[0], rows),)
        result = []
        for g, members in self._by_group(indices).items():
            group, start = self.groups[g], self.starts[g]
            chosen = [indices[m] for m in members]
            if chosen != list(range(start, start + len(group.keys))):
                keys = tuple(self.keys[index] for index in chosen)
                group = GPUGroup(group.group, keys, self._runs(g).select(np.array(chosen, dtype=np.int64) - start))
            result.append(self._with_rows(group, [rows[m] for m in members]))
        return tuple(result)

    def _with_rows(self, group: GPUGroup, rows: list[int]) -> GPUGroup:
        """The group's blocks with the rows they are copied to or from."""
        places = np.array(rows, np.int64)
        generations = self.control.cpu.table.generations[places]
        return GPUGroup(group.group, group.keys, group.runs, places, generations)

    def _runs(self, g: int) -> RunIndex:
        """A group's runs by offloaded block, made when the first part of the group is wanted."""
        runs = self.runs.get(g)
        if runs is None:
            runs = self.runs[g] = RunIndex(self.groups[g].runs)
        return runs

    def order_of(self, indices: Sequence[int]) -> list[int]:
        """Positions in `indices` in the order `transfers` lists them."""
        return [m for members in self._by_group(indices).values() for m in members]

    def _by_group(self, indices: Sequence[int]) -> dict[int, list[int]]:
        if len(self.groups) == 1:
            return {0: list(range(len(indices)))}
        groups: dict[int, list[int]] = {}
        for m, index in enumerate(indices):
            groups.setdefault(bisect_right(self.starts, index) - 1, []).append(m)
        return groups

    def result(self) -> JobResult:
        """The finished request's result."""
        each = filter(None, self.outcomes)
        outcomes = tuple([tuple(islice(each, len(group.keys))) for group in self.groups])
        return JobResult(self.job.job_id, outcomes, self.bytes_moved, self.ended - self.started)
