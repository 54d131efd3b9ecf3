"""One group's blocks of a job on one root, made into batches when there is room for them: places, headers, refusals."""

from __future__ import annotations

import errno
from collections import Counter

from kvtier.jobs import MISSING, BlockOutcome, DropReason, GPURuns, IntArray, JobKind, dropped, failed
from kvtier.loadstore import Rows, SlotSpace
from kvtier_fs.batches import Batch, JobRun, error_outcome
from kvtier_fs.opening import Layout
from kvtier_fs.root import RegionState, Root
from kvtier_fs.slot import max_key_bytes, pack_own, pack_shared


class TierSide:
    """What all shares of a tier have in common: rows on one side, numbered slots on the other."""

    def __init__(self, rows: Rows, space: SlotSpace, layout: Layout, namespace: bytes, counters: Counter[str]) -> None:
        self.rows, self.space, self.layout = rows, space, layout
        self.namespace, self.counters = namespace, counters
        self.row_bytes = rows.row_bytes
        self.memory = rows.view.reshape(-1).data
        self.address = int(rows.view.ctypes.data)
        self.slots_per_region = space.slots_per_region
        self.max_key_bytes = max_key_bytes(layout.header_bytes)


class RootShare:
    """The blocks of a job's group `number` that lie on one root; `positions` in the order of their slots."""

    def __init__(self, side: TierSide, root: Root, run: JobRun, number: int, positions: IntArray) -> None:
        self.run = run
        self._side, self._root, self._number = side, root, number
        transfer = run.job.groups[number]
        assert not isinstance(transfer.staging, GPURuns)
        self._group = int(transfer.group)
        self._keys = transfer.keys
        self._positions: list[int] = positions.tolist()
        self._slots: list[int] = transfer.slots[positions].tolist()
        self._rows: list[int] = transfer.staging[positions].tolist()
        self._generations: list[int] = transfer.generations[positions].tolist()
        self._begun = 0
        self._storing = run.kind is JobKind.STORE
        self._payload_bytes = side.layout.payload_bytes[transfer.group]
        self._slot_bytes = side.layout.slot_bytes[transfer.group]
        self._shared = pack_shared(
            side.layout.header_bytes, side.namespace, run.job.epoch, root.superblock.root_uuid
        )  # fmt: skip

    def take(self, count: int) -> Batch | None:
        """The next blocks, `count` at most, without those that cannot move, which have ended; None after the last.

        How regions are cut and whether they can be written is looked at now, when the blocks begin.
        """
        first, last = self._begun, min(self._begun + count, len(self._positions))
        if first == last:
            return None
        self._begun = last
        side, root, slot_bytes, length = self._side, self._root, self._slot_bytes, self._payload_bytes
        batch = Batch(self.run, self._number)
        slots_fit = root.plan.region_bytes // slot_bytes
        ahead = self._storing and not root.takes_epoch(side.namespace, self.run.job.epoch)
        region, fd, start, cut, refused = -1, -1, 0, 0, None
        for i in range(first, last):
            numbered, index = divmod(self._slots[i], side.slots_per_region)
            if numbered - root.first_region != region:
                region = numbered - root.first_region
                state = root.regions[region]
                cut, start = state.generation, root.plan.slot_offset(region, 0, slot_bytes)
                fd = root.fds.get(root.plan.file_of(region), -1)
                refused = dropped(DropReason.RESET) if ahead else self._refuse_region(state, fd)
            position = self._positions[i]
            key, generation = self._keys[position], self._generations[i]
            if refused or index >= slots_fit or len(key) > side.max_key_bytes:
                self.run.end(self._number, position, refused or self._refusal(index >= slots_fit))
                continue
            batch.positions.append(position)
            batch.rows.append(self._rows[i])
            batch.keys.append(key)
            batch.regions.append(region)
            batch.indices.append(index)
            batch.cuts.append(cut)
            batch.generations.append(generation)
            batch.fds.append(fd)
            batch.offsets.append(start + index * slot_bytes)
            own = pack_own(region, index, cut, slot_bytes, length, generation, self._group, len(key))
            batch.fixed.append(self._shared + own)
        starts = [row * side.row_bytes for row in batch.rows]
        batch.payloads = [side.memory[begin : begin + length] for begin in starts]
        batch.addresses = [side.address + begin for begin in starts]
        if self._storing:
            batch.digests = [side.rows.checksum(row) for row in batch.rows]
        batch.left = len(batch)
        return batch

    def end(self, outcome: BlockOutcome) -> None:
        """End all that have not begun."""
        self.run.end_all(self._number, self._positions[self._begun :], outcome)
        self._begun = len(self._positions)

    def _refuse_region(self, state: RegionState, fd: int) -> BlockOutcome | None:
        """Why the share's blocks cannot move to or from a region, if so; its file's descriptor is -1 if it has none."""
        if state.slot_bytes != self._slot_bytes:
            self._side.counters["refused.slot_size"] += 1
            return failed(errno.EINVAL) if self._storing else MISSING
        if self._storing and not state.ready:
            return error_outcome(state.errno or errno.EIO)
        return MISSING if fd < 0 and not self._storing else None

    def _refusal(self, no_slot: bool) -> BlockOutcome:
        """Why a block cannot move whose slot does not exist, or whose key fits no header."""
        if no_slot:
            self._side.counters["refused.no_slot"] += 1
            return failed(errno.EINVAL)
        return dropped(DropReason.KEY_TOO_LONG)
