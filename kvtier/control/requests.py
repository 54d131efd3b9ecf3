"""An engine's own jobs on the whole stack, block by block: what the loads and stores have in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

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
        self.group_of: list[int] = [g for g, group in enumerate(job.groups) for _ in group.keys]
        self.position_of: list[int] = [p for group in job.groups for p in range(len(group.keys))]
        self.runs = [RunIndex(_gpu_runs(group)) for group in job.groups]
        self.outcomes: list[BlockOutcome | None] = [None] * len(self.keys)
        self.open = len(self.keys)
        self.todo: deque[int] = deque(range(len(self.keys)))
        self.stopping: BlockOutcome | None = None
        self.bytes_moved = 0
        for group in job.groups:
            suffix = make_key(b"", group.group)
            for key in group.keys:
                if not key.endswith(suffix):
                    raise UsageError(f"a key of group {key_group(key)} is listed under group {group.group}")

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
            positions = np.array([self.position_of[indices[m]] for m in members], dtype=np.int64)
            result.append(
                GroupTransfer(
                    self.job.groups[g].group,
                    tuple(self.keys[indices[m]] for m in members),
                    self.runs[g].select(positions),
                    np.array([rows[m] for m in members], dtype=np.int64),
                    np.array([generations[m] for m in members], dtype=np.int64),
                )
            )
        return result

    def order_of(self, indices: list[int]) -> list[int]:
        """Positions in `indices` in the order `transfers` lists them."""
        return [m for members in self._by_group(indices).values() for m in members]

    def _by_group(self, indices: list[int]) -> dict[int, list[int]]:
        if len(self.job.groups) == 1:
            return {0: list(range(len(indices)))}
        groups: dict[int, list[int]] = {}
        for m, index in enumerate(indices):
            groups.setdefault(self.group_of[index], []).append(m)
        return groups

    def result(self, now: float) -> JobResult:
        """The finished request's result."""
        outcomes = []
        start = 0
        for group in self.job.groups:
            end = start + len(group.keys)
            outcomes.append(tuple(outcome for outcome in self.outcomes[start:end] if outcome is not None))
            start = end
        return JobResult(self.job.job_id, tuple(outcomes), self.bytes_moved, now - self.started)


def _gpu_runs(group: GroupTransfer) -> GPURuns:
    if not isinstance(group.staging, GPURuns):
        raise UsageError("a job for the whole stack names its GPU blocks by runs")
    if len(group.staging.blocks) and int(group.staging.blocks.max()) >= len(group.keys):
        raise UsageError("a run names an offloaded block beyond the group's keys")
    return group.staging
