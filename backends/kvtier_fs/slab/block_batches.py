"""One group's blocks of a job on one root, made into batches when there is room for them: places, headers, refusals."""

import errno
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.tier_api.block_envelope import PACK_OWN, max_key_bytes, pack_shared
from kvtier.tier_api.contract import Rows, SlotSpace
from kvtier.types.jobs import MISSING, BlockOutcome, DropReason, JobKind, dropped, failed
from kvtier_fs.format.region_header import REGIONS_PER_FILE
from kvtier_fs.roots.job_run import JobRun, error_outcome
from kvtier_fs.slab.layout import Session
from kvtier_fs.slab.root import RegionState, Root


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks of one group of a job that began together, in the order of their places; entry i of each list is block i.

    `payloads` are the rows' own memory, at `addresses`; `fds` and `offsets` say where the slots begin. `regions`,
    `indices` and `region_generations` name the slots; `fixed` is what their headers say or should, `digests` the
    checksums of payloads to store. `left` counts the blocks that have not ended.
    """

    run: JobRun
    group: int
    positions: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    payloads: list[memoryview] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    regions: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    region_generations: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    fixed: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    left: int = 0
    pieces: list[int] = field(default_factory=list)
    """Requests that have not ended, of blocks that take more than one each."""
    errors: list[int] = field(default_factory=list)


class TierSide:
    """What all shares and queues of a tier have in common: rows on one side, numbered slots on the other."""

    def __init__(
        self, rows: Rows, space: SlotSpace, session: Session, clock: Callable[[], float], counters: Counter[str]
    ) -> None:
        layout = session.layout
        self.rows, self.space, self.layout = rows, space, layout
        self.namespace, self.clock, self.counters = session.namespace, clock, counters
        self.row_bytes = rows.row_bytes
        self.memory = rows.view.reshape(-1).data
        self.address = int(rows.view.ctypes.data)
        self.slots_per_region = space.slots_per_region
        self.header_bytes, self.region_bytes = layout.header_bytes, layout.plan.region_bytes
        self.max_key_bytes = max_key_bytes(layout.header_bytes)


class RootShare:
    """The blocks of a job's group `number` that lie on one root; `positions` in the order of their slots."""

    def __init__(self, side: TierSide, root: Root, run: JobRun, number: int, positions: list[int]) -> None:
        self.run = run
        self._side, self._root, self._number = side, root, number
        transfer = run.groups[number]
        self._group = int(transfer.group)
        self._keys = transfer.keys
        self._positions = positions
        self._slots = list(map(transfer.slots.__getitem__, positions))
        self._rows = list(map(transfer.rows.__getitem__, positions))
        self._generations = list(map(transfer.generations.__getitem__, positions))
        self._begun = 0
        self._long_keys = max(map(len, transfer.keys), default=0) > side.max_key_bytes
        self._storing = run.kind is JobKind.STORE
        self._payload_bytes = side.layout.payload_bytes[transfer.group]
        self._slot_bytes = side.layout.slot_bytes[transfer.group]
        self._shared = pack_shared(side.header_bytes, side.namespace, run.job.epoch, root.superblock.root_uuid)

    def take(self, count: int) -> Batch | None:
        """The next blocks, `count` at most, without those that cannot move, which have ended; None after the last.

        The format of a region, and whether it can be written, is read now, when the blocks begin.
        """
        first, last = self._begun, min(self._begun + count, len(self._positions))
        if first == last:
            return None
        self._begun = last
        side = self._side
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
        if self._storing:
            batch.digests = list(map(side.rows.checksum, batch.rows))
        batch.left = len(batch.rows)
        return batch

    def _take_region(self, batch: Batch, numbered: int, first: int, end: int, ahead: bool) -> None:
        """Add the blocks `first` to `end - 1`, which lie in one region, to a batch, those that can move."""
        side, root, slot_bytes = self._side, self._root, self._slot_bytes
        region, before = numbered - root.first_region, numbered * side.slots_per_region
        state, fd = root.regions[region], root.fds.get(region // REGIONS_PER_FILE, -1)
        if ahead or fd < 0 or state.slot_bytes != slot_bytes or not state.ready:
            refused = dropped(DropReason.RESET) if ahead else self._refuse_region(state, fd)
            if refused:
                self.run.end_all(self._number, self._positions[first:end], refused)
                return
        fit = bisect_left(self._slots, before + side.region_bytes // slot_bytes, first, end)
        if fit < end:
            side.counters["refused.no_slot"] += end - fit
            self.run.end_all(self._number, self._positions[fit:end], failed(errno.EINVAL))
        count, start, generation = fit - first, root.plan.slot_offset(region, 0, slot_bytes), state.generation
        positions, rows, generations = (part[first:fit] for part in (self._positions, self._rows, self._generations))
        indices = [slot - before for slot in self._slots[first:fit]]
        keys = list(map(self._keys.__getitem__, positions))
        begins = [row * side.row_bytes for row in rows]
        memory, address, length, group, shared = (
            side.memory,
            side.address,
            self._payload_bytes,
            self._group,
            self._shared,
        )
        batch.positions += positions
        batch.rows += rows
        batch.generations += generations
        batch.regions += [region] * count
        batch.region_generations += [generation] * count
        batch.fds += [fd] * count
        batch.indices += indices
        batch.offsets += [start + index * slot_bytes for index in indices]
        batch.payloads += [memory[begin : begin + length] for begin in begins]
        batch.addresses += [address + begin for begin in begins]
        batch.keys += keys
        batch.fixed += [
            shared + PACK_OWN(region, index, generation, slot_bytes, length, own, group, len(key), 0)
            for index, own, key in zip(indices, generations, keys, strict=True)
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
