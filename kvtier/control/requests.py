"""An engine's own jobs on the whole stack, block by block: what the loads and stores have in common."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from operator import methodcaller

import numpy as np

from kvtier.errors import UsageError
from kvtier.jobs import BlockOutcome, GPURuns, GroupTransfer, JobResult, RunIndex, TransferJob
from kvtier.keys import JobId, OffloadKey, key_group, make_key


class StackRequest:
    """One job of an engine: a flat list of blocks over its groups, an outcome for each, what is left to do.

    `todo` holds the flat indices not started yet, in prefix order. A request ends when every block has an outcome.
    """

    def __init__(self, job: TransferJob, now: float) -> None:
        self.job = job
        self.started = now
        self.keys: list[OffloadKey] = [key for group in job.groups for key in group.keys]
        self.starts: list[int] = []
        self.runs: list[RunIndex | None] = [None] * len(job.groups)
        self.outcomes: list[BlockOutcome | None] = [None] * len(self.keys)
        self.open = len(self.keys)
        self.todo: deque[int] = deque(range(len(self.keys)))
        self.stopping: BlockOutcome | None = None
        self.bytes_moved = 0
        start = 0
        for group in job.groups:
            self.starts.append(start)
            start += len(group.keys)
            _check_group(group)

    @property
    def job_id(self) -> JobId:
        return self.job.job_id

    def settle(self, index: int, outcome: BlockOutcome) -> None:
        """The block's outcome, once."""
        if self.outcomes[index] is None:
            self.outcomes[index] = outcome
            self.open -= 1

    def settle_all(self, indices: Sequence[int], outcome: BlockOutcome) -> None:
        """The same outcome for blocks that have none."""
        outcomes = self.outcomes
        for index in indices:
            outcomes[index] = outcome
        self.open -= len(indices)

    def transfers(self, indices: list[int], rows: list[int], generations: list[int]) -> list[GroupTransfer]:
        """The chosen blocks as transfers between their GPU blocks and rows, grouped; `order_of` gives their order."""
        result = []
        for g, members in self._by_group(indices).items():
            group, start = self.job.groups[g], self.starts[g]
            if len(members) < len(indices):
                chosen = [indices[m] for m in members]
                of_rows, of_generations = [rows[m] for m in members], [generations[m] for m in members]
            else:
                chosen, of_rows, of_generations = indices, rows, generations
            if len(chosen) == len(group.keys) and chosen == list(range(start, start + len(chosen))):
                keys, staging = group.keys, group.staging
            else:
                keys = tuple(self.keys[index] for index in chosen)
                staging = self._runs(g).select(np.array(chosen, dtype=np.int64) - start)
            result.append(
                GroupTransfer(
                    group.group,
                    keys,
                    staging,
                    np.array(of_rows, dtype=np.int64),
                    np.array(of_generations, dtype=np.int64),
                )
            )
        return result

    def _runs(self, g: int) -> RunIndex:
        """A group's runs by offloaded block, made when the first part of the group is wanted."""
        runs = self.runs[g]
        if runs is None:
            runs = self.runs[g] = RunIndex(gpu_runs(self.job.groups[g]))
        return runs

    def order_of(self, indices: list[int]) -> list[int]:
        """Positions in `indices` in the order `transfers` lists them."""
        if len(self.job.groups) == 1:
            return list(range(len(indices)))
        return [m for members in self._by_group(indices).values() for m in members]

    def _by_group(self, indices: list[int]) -> dict[int, list[int]]:
        if len(self.job.groups) == 1:
            return {0: list(range(len(indices)))}
        groups: dict[int, list[int]] = {}
        for m, index in enumerate(indices):
            groups.setdefault(bisect_right(self.starts, index) - 1, []).append(m)
        return groups

    def result(self, now: float) -> JobResult:
        """The finished request's result."""
        outcomes = []
        for start, group in zip(self.starts, self.job.groups, strict=True):
            part = self.outcomes[start : start + len(group.keys)]
            outcomes.append(tuple(outcome for outcome in part if outcome is not None))
        return JobResult(self.job.job_id, tuple(outcomes), self.bytes_moved, now - self.started)


def _check_group(group: GroupTransfer) -> None:
    """Raises UsageError for a group that names keys of another one, or runs that do not fit its keys."""
    gpu_runs(group)
    suffix = make_key(b"", group.group)
    if not all(map(methodcaller("endswith", suffix), group.keys)):
        wrong = next(key for key in group.keys if not key.endswith(suffix))
        raise UsageError(f"a key of group {key_group(wrong)} is listed under group {group.group}")


def gpu_runs(group: GroupTransfer) -> GPURuns:
    """The runs of a group's GPU blocks. Raises UsageError if the job names something else, or more than its keys."""
    if not isinstance(group.staging, GPURuns):
        raise UsageError("a job for the whole stack names its GPU blocks by runs")
    if len(group.staging.blocks) and int(group.staging.blocks.max()) >= len(group.keys):
        raise UsageError("a run names an offloaded block beyond the group's keys")
    return group.staging
