"""One group's blocks of a job on one root, made into batches when there is room for them: places, headers, refusals."""

from __future__ import annotations

import errno
from bisect import bisect_left
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
        self._long_keys = max(map(len, transfer.keys)) > side.max_key_bytes
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
        side, length = self._side, self._payload_bytes
        batch = Batch(self.run, self._number)
        ahead = self._storing and not self._root.takes_epoch(side.namespace, self.run.job.epoch)
        while first < last:
            region = self._slots[first] // side.slots_per_region
            end = bisect_left(self._slots, (region + 1) * side.slots_per_region, first, last)
            if self._long_keys:
                end = next((i for i in range(first, end) if self._key_too_long(i)), end)
            if first < end:
                self._take_region(batch, region, first, end, ahead)
                first = end
            else:
                self.run.end(self._number, self._positions[first], dropped(DropReason.KEY_TOO_LONG))
                first += 1
        starts = [row * side.row_bytes for row in batch.rows]
        memory = side.memory
        batch.payloads = [memory[begin : begin + length] for begin in starts]
        batch.addresses = [side.address + begin for begin in starts]
        if self._storing:
            batch.digests = list(map(side.rows.checksum, batch.rows))
        batch.left = len(batch)
        return batch

    def _take_region(self, batch: Batch, numbered: int, first: int, end: int, ahead: bool) -> None:
        """Add the blocks `first` to `end - 1`, which lie in one region, to a batch, those that can move."""
        side, root, slot_bytes = self._side, self._root, self._slot_bytes
        region, before = numbered - root.first_region, numbered * side.slots_per_region
        state, fd = root.regions[region], root.fds.get(root.plan.file_of(region), -1)
        refused = dropped(DropReason.RESET) if ahead else self._refuse_region(state, fd)
        if refused:
            self.run.end_all(self._number, self._positions[first:end], refused)
            return
        fit = bisect_left(self._slots, before + root.plan.region_bytes // slot_bytes, first, end)
        if fit < end:
            side.counters["refused.no_slot"] += end - fit
            self.run.end_all(self._number, self._positions[fit:end], failed(errno.EINVAL))
        taken, count = slice(first, fit), fit - first
        positions = self._positions[taken]
        keys = [self._keys[position] for position in positions]
        indices = [slot - before for slot in self._slots[taken]]
        generations = self._generations[taken]
        start, cut = root.plan.slot_offset(region, 0, slot_bytes), state.generation
        pack, shared, length, group = pack_own, self._shared, self._payload_bytes, self._group
        batch.positions += positions
        batch.rows += self._rows[taken]
        batch.keys += keys
        batch.regions += [region] * count
        batch.indices += indices
        batch.cuts += [cut] * count
        batch.generations += generations
        batch.fds += [fd] * count
        batch.offsets += [start + index * slot_bytes for index in indices]
        batch.fixed += [
            shared + pack(region, index, cut, slot_bytes, length, generation, group, len(key))
            for index, generation, key in zip(indices, generations, keys, strict=True)
        ]

    def _key_too_long(self, i: int) -> bool:
        return len(self._keys[self._positions[i]]) > self._side.max_key_bytes

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
