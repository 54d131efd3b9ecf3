"""From a job to its roots: which place each block has, whether it can move there, and what has to be cut before."""

from __future__ import annotations

import asyncio
import errno
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.errors import UsageError
from kvtier.jobs import (
    MISSING,
    BlockOutcome,
    DropReason,
    GPURuns,
    IntArray,
    JobKind,
    TransferJob,
    distinct,
    dropped,
    failed,
)
from kvtier.keys import OffloadKey
from kvtier.loadstore import Rows, SlotSpace
from kvtier_fs.opening import Layout
from kvtier_fs.root import RegionState, Root
from kvtier_fs.slot import SlotHeader, max_key_bytes
from kvtier_fs.transfer import BlockMove, BlockPlace, JobRun, error_outcome


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What jobs are routed by: the open roots in order, how their slots are numbered, the rows on the other side."""

    roots: Sequence[Root]
    space: SlotSpace
    layout: Layout
    rows: Rows
    namespace: bytes
    counters: Counter[str]


class SlotRouter:
    """Sends the blocks of jobs to the lanes of the roots that their slots lie in."""

    def __init__(self, parts: RouterParts) -> None:
        self._roots, self._space, self._layout = parts.roots, parts.space, parts.layout
        self._rows, self._namespace, self._counters = parts.rows, parts.namespace, parts.counters
        self._first_regions = [root.first_region for root in parts.roots]
        self._slots_per_region = parts.space.slots_per_region
        self._memory = parts.rows.view.reshape(-1).data
        self._max_key_bytes = max_key_bytes(parts.layout.header_bytes)

    def check(self, job: TransferJob) -> None:
        """Raise UsageError for a job that makes no sense."""
        for group in job.groups:
            lengths = {len(group.keys), len(group.slots), len(group.generations)}
            if isinstance(group.staging, GPURuns) or lengths != {len(group.staging)}:
                raise UsageError("a job on this tier names a row, a slot and a generation for each key")
            if not 0 <= group.group < len(self._layout.payload_bytes):
                raise UsageError(f"there is no group {group.group}")
            if not (_within(group.staging, self._rows.num_rows) and _within(group.slots, self._space.num_slot_ids)):
                raise UsageError("a job names a row or a slot that does not exist")
        for cut in job.cuts:
            if not 0 <= cut.region < self._space.num_regions or not self._layout.plan.can_be_cut(cut.slot_bytes):
                raise UsageError(f"region {cut.region} does not exist or cannot be cut into {cut.slot_bytes} bytes")

    def locate(self, region: int) -> tuple[Root, int]:
        """The root a region lies in, and the region's number within it."""
        root = self._roots[bisect_right(self._first_regions, region) - 1]
        return root, region - root.first_region

    async def cut(self, job: TransferJob) -> None:
        """Cut what a job wants cut; wait until the headers of all regions it writes into were written, or could not be.

        Every cut is made before the first wait, so jobs are cut for in the order in which they come.
        """
        for cut in job.cuts:
            root, region = self.locate(cut.region)
            root.cut(region, cut.slot_bytes, cut.generation)
        slots = [group.slots // self._slots_per_region for group in job.groups]
        regions = distinct(np.concatenate(slots)).tolist() if slots else []
        pending = [root.cut_pending(local) for root, local in map(self.locate, regions)]
        cuts = [cut for cut in pending if cut is not None]
        if cuts:
            await asyncio.wait(cuts)

    def send(self, run: JobRun) -> None:
        """Hand a job's blocks, in the order of their places, to the lanes of all their roots."""
        for number, group in enumerate(run.job.groups):
            order = np.argsort(group.slots, kind="stable")
            owners = np.searchsorted(self._first_regions, group.slots[order] // self._slots_per_region, "right") - 1
            for owner in distinct(owners).tolist():
                root = self._roots[owner]
                root.lane.enqueue(run, self._moves(root, run, number, order[owners == owner]))

    def withdraw(self, run: JobRun, outcome: BlockOutcome) -> None:
        """End the blocks of a job whose I/O has not begun."""
        for root in self._roots:
            root.lane.withdraw(outcome, run)

    def _moves(self, root: Root, run: JobRun, number: int, positions: IntArray) -> Iterator[BlockMove]:
        """The blocks of one group of a job on one root, by place, made when their turn comes; ends what cannot move."""
        group = run.job.groups[number]
        assert not isinstance(group.staging, GPURuns)
        storing, row_bytes, memory = run.kind is JobKind.STORE, self._rows.row_bytes, self._memory
        payload_bytes, slot_bytes = self._layout.payload_bytes[group.group], self._layout.slot_bytes[group.group]
        places = group.slots[positions].tolist(), group.staging[positions].tolist()
        generations = group.generations[positions].tolist()
        region, refused, state = -1, None, RegionState()
        ahead = storing and not root.takes_epoch(self._namespace, run.job.epoch)
        for position, slot, row, generation in zip(positions.tolist(), *places, generations, strict=True):
            key = group.keys[position]
            numbered, index = divmod(slot, self._slots_per_region)
            if numbered - root.first_region != region:
                region = numbered - root.first_region
                state = root.regions[region]
                refused = self._refuse_region(root, region, run.kind, slot_bytes)
                refused = dropped(DropReason.RESET) if ahead else refused
            outcome = refused or self._refuse_block(root, index, slot_bytes, key)
            if outcome is not None:
                run.end(number, position, outcome)
                continue
            header = SlotHeader(
                self._namespace,
                run.job.epoch,
                root.superblock.root_uuid,
                region,
                index,
                state.generation,
                slot_bytes,
                payload_bytes,
                generation,
                group.group,
                key,
                self._rows.checksum(row) if storing else b"",
            )
            at = root.fds[root.plan.file_of(region)], root.plan.slot_offset(region, index, slot_bytes)
            payload = memory[row * row_bytes : row * row_bytes + payload_bytes]
            yield BlockMove(BlockPlace(run, number, position), row, payload, header, at)

    def _refuse_region(self, root: Root, region: int, kind: JobKind, slot_bytes: int) -> BlockOutcome | None:
        """Why blocks of a size cannot move to or from a region, if so."""
        state = root.regions[region]
        if state.slot_bytes != slot_bytes:
            self._counters["refused.slot_size"] += 1
            return MISSING if kind is JobKind.LOAD else failed(errno.EINVAL)
        if kind is JobKind.LOAD:
            return None if root.plan.file_of(region) in root.fds else MISSING
        return None if state.ready else error_outcome(state.errno or errno.EIO)

    def _refuse_block(self, root: Root, index: int, slot_bytes: int, key: OffloadKey) -> BlockOutcome | None:
        """Why a block cannot move, if so: its slot does not exist, or its key fits no header."""
        if (index + 1) * slot_bytes > root.plan.region_bytes:
            self._counters["refused.no_slot"] += 1
            return failed(errno.EINVAL)
        return dropped(DropReason.KEY_TOO_LONG) if len(key) > self._max_key_bytes else None


def _within(values: IntArray, limit: int) -> bool:
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < limit)
