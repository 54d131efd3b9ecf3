"""From a job to its roots: the place of each block, whether it can move, which regions are formatted before."""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from kvtier.errors import UsageError
from kvtier.tier.block_age import BlockAges
from kvtier.tier.job_run import JobRun
from kvtier.types.jobs import MISSING, BlockOutcome, DropReason, JobKind, TransferJob, dropped
from kvtier_fs.local.block_batches import RootShare, TierSide
from kvtier_fs.local.root import Root
from kvtier_fs.local.root_queue import RootQueue

_UNREADY = attrgetter("unready")


class SlotRouter:
    """Sends the blocks of jobs to the queues of the roots that their slots lie in.

    `ages`, of a tier with a `max_age`: blocks that are too old when their load begins are not read.
    """

    def __init__(self, queues: Sequence[RootQueue], side: TierSide, ages: BlockAges | None = None) -> None:
        self.queues, self._side, self._ages = queues, side, ages
        self._roots = roots = [queue.root for queue in queues]
        self._space, self._layout = side.space, side.layout
        self._num_rows, self._num_slots = side.rows.num_rows, side.space.num_slot_ids
        self._first_regions = [root.first_region for root in roots]
        self._slots_per_region = side.slots_per_region

    def check(self, job: TransferJob) -> None:
        """Raise UsageError for a job that makes no sense."""
        for group in job.row_groups:
            if not len(group.keys) == len(group.rows) == len(group.slots) == len(group.generations):
                raise UsageError("a job on this tier names a row, a slot and a generation for each key")
            if not 0 <= group.group < len(self._layout.payload_bytes):
                raise UsageError(f"there is no group {group.group}")
            rows, slots = group.rows, group.slots
            if rows and not (
                0 <= min(rows) <= max(rows) < self._num_rows and 0 <= min(slots) <= max(slots) < self._num_slots
            ):
                raise UsageError("a job names a row or a slot that does not exist")
        for wanted in job.formats:
            region, slot_bytes = wanted.region, wanted.slot_bytes
            if not 0 <= region < self._space.num_regions or not self._layout.plan.can_be_formatted(slot_bytes):
                raise UsageError(f"region {region} does not exist or cannot hold slots of {slot_bytes} bytes")

    def locate(self, region: int) -> tuple[Root, int]:
        """The root a region lies in, and the region's number within it."""
        root = self._roots[bisect_right(self._first_regions, region) - 1]
        return root, region - root.first_region

    def format_regions(self, job: TransferJob) -> list[asyncio.Task[None]]:
        """Begin the formats of a job, now, so that they are done in the order in which jobs come.

        Returns what to wait for: until the headers of all regions it writes into were written, or could not be.
        """
        for wanted in job.formats:
            root, region = self.locate(wanted.region)
            root.format_region(region, wanted.slot_bytes, wanted.generation)
        if not any(map(_UNREADY, self._roots)):
            return []
        pending = []
        for number in self._regions_of(job):
            root, region = self.locate(number)
            pending.append(root.format_pending(region))
        return [task for task in pending if task is not None]

    def _regions_of(self, job: TransferJob) -> list[int]:
        return sorted({slot // self._slots_per_region for group in job.row_groups for slot in group.slots})

    def shares(self, run: JobRun) -> list[tuple[RootQueue, RootShare]]:
        """A job's blocks, in the order of their places, and the queues of all their roots."""
        shares: list[tuple[RootQueue, RootShare]] = []
        for number, group in enumerate(run.groups):
            order = sorted(range(len(group.slots)), key=group.slots.__getitem__)
            if self._ages is not None or max(map(len, group.keys), default=0) > self._side.max_key_bytes:
                order = self._without_old(run, number, self._without_long_keys(run, number, order))
            if len(self._roots) == 1:
                shares.append((self.queues[0], RootShare(self._side, self._roots[0], run, number, order)))
                continue
            owners: dict[int, list[int]] = {}
            for i in order:
                region = group.slots[i] // self._slots_per_region
                owners.setdefault(bisect_right(self._first_regions, region) - 1, []).append(i)
            for owner, positions in owners.items():
                share = RootShare(self._side, self._roots[owner], run, number, positions)
                shares.append((self.queues[owner], share))
        return shares

    def _without_long_keys(self, run: JobRun, number: int, order: list[int]) -> list[int]:
        """Drop the blocks whose keys are too long for a header; returns the others."""
        keys = run.groups[number].keys
        too_long = [i for i in order if len(keys[i]) > self._side.max_key_bytes]
        run.end_all(number, too_long, dropped(DropReason.KEY_TOO_LONG))
        return [i for i in order if len(keys[i]) <= self._side.max_key_bytes]

    def _without_old(self, run: JobRun, number: int, order: list[int]) -> list[int]:
        """End the blocks of a load that are too old, whatever the control plane knew of them; returns the others."""
        if self._ages is None or run.kind is JobKind.STORE:
            return order
        allows, generations = self._ages.limit().allows, run.groups[number].generations
        old = [i for i in order if not allows(generations[i])]
        run.end_all(number, old, MISSING)
        self._side.counters["expired"] += len(old)
        return [i for i in order if allows(generations[i])]

    def withdraw(self, run: JobRun, outcome: BlockOutcome) -> None:
        """End the blocks of a job whose I/O has not begun."""
        for queue in self.queues:
            queue.withdraw(outcome, run)
