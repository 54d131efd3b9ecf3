"""From a job to its roots: which place each block has, whether it can move there, and what has to be cut before."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from kvtier.errors import UsageError
from kvtier.jobs import FEW, NO_IDS, BlockOutcome, GPURuns, IntArray, TransferJob, distinct
from kvtier_fs.batches import JobRun
from kvtier_fs.root import Root
from kvtier_fs.shares import RootShare, TierSide


class SlotRouter:
    """Sends the blocks of jobs to the lanes of the roots that their slots lie in."""

    def __init__(self, roots: Sequence[Root], side: TierSide) -> None:
        self._roots, self._side = roots, side
        self._space, self._layout = side.space, side.layout
        self._num_rows = side.rows.num_rows
        self._first_regions = [root.first_region for root in roots]
        self._slots_per_region = side.slots_per_region

    def check(self, job: TransferJob) -> None:
        """Raise UsageError for a job that makes no sense."""
        for group in job.groups:
            lengths = {len(group.keys), len(group.slots), len(group.generations)}
            if isinstance(group.staging, GPURuns) or lengths != {len(group.staging)}:
                raise UsageError("a job on this tier names a row, a slot and a generation for each key")
            if not 0 <= group.group < len(self._layout.payload_bytes):
                raise UsageError(f"there is no group {group.group}")
            if not (_within(group.staging, self._num_rows) and _within(group.slots, self._space.num_slot_ids)):
                raise UsageError("a job names a row or a slot that does not exist")
        for cut in job.cuts:
            if not 0 <= cut.region < self._space.num_regions or not self._layout.plan.can_be_cut(cut.slot_bytes):
                raise UsageError(f"region {cut.region} does not exist or cannot be cut into {cut.slot_bytes} bytes")

    def locate(self, region: int) -> tuple[Root, int]:
        """The root a region lies in, and the region's number within it."""
        root = self._roots[bisect_right(self._first_regions, region) - 1]
        return root, region - root.first_region

    def cut(self, job: TransferJob) -> list[asyncio.Task[None]]:
        """Cut what a job wants cut, now, so that jobs are cut for in the order in which they come.

        Returns what to wait for: until the headers of all regions it writes into were written, or could not be.
        """
        for cut in job.cuts:
            root, region = self.locate(cut.region)
            root.cut(region, cut.slot_bytes, cut.generation)
        pending = []
        for number in self._regions_of(job):
            root, region = self.locate(number)
            pending.append(root.cut_pending(region))
        return [cut for cut in pending if cut is not None]

    def _regions_of(self, job: TransferJob) -> list[int]:
        slots = [group.slots for group in job.groups]
        together = np.concatenate(slots) if len(slots) > 1 else slots[0] if slots else NO_IDS
        if len(together) <= FEW:
            return sorted({slot // self._slots_per_region for slot in together.tolist()})
        regions: list[int] = distinct(together // self._slots_per_region).tolist()
        return regions

    def send(self, run: JobRun) -> None:
        """Hand a job's blocks, in the order of their places, to the lanes of all their roots."""
        for number, group in enumerate(run.job.groups):
            if not len(group.slots):
                continue
            order = np.argsort(group.slots, kind="stable")
            if len(self._roots) == 1:
                self._enqueue(self._roots[0], run, number, order)
                continue
            owners = np.searchsorted(self._first_regions, group.slots[order] // self._slots_per_region, "right") - 1
            for owner in distinct(owners).tolist():
                self._enqueue(self._roots[owner], run, number, order[owners == owner])

    def _enqueue(self, root: Root, run: JobRun, number: int, positions: IntArray) -> None:
        root.lane.enqueue(RootShare(self._side, root, run, number, positions))

    def withdraw(self, run: JobRun, outcome: BlockOutcome) -> None:
        """End the blocks of a job whose I/O has not begun."""
        for root in self._roots:
            root.lane.withdraw(outcome, run)


def _within(values: IntArray, limit: int) -> bool:
    """True if all values are in range(limit); one comparison does for negative ones, which are large without a sign."""
    return not len(values) or int(values.view(np.uint64).max()) < limit
