"""Batches of one group's blocks of a job on one root, made when there is room for them: places, headers, refusals."""

import errno
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.tier.block_envelope import PACK_OWN, max_key_bytes, pack_shared
from kvtier.tier.contract import Rows, SlotSpace
from kvtier.tier.job_run import JobRun, error_outcome
from kvtier.types.jobs import MISSING, BlockOutcome, DropReason, JobKind, dropped, failed
from kvtier_fs.format.region_header import REGIONS_PER_FILE
from kvtier_fs.local.layout import RootSession
from kvtier_fs.local.root import RegionState, Root


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks of one region and one job that began together, in the order of their slots; entry i of a list is block i.

    `start` is where slot 0 of the region lies in the file `fd`. `payloads` are the rows' own memory. `fixed` is what
    the headers say or should. `left` counts the blocks that have not ended.
    """

    run: JobRun
    group: int
    region: int
    region_generation: int
    fd: int
    start: int
    slot_bytes: int
    positions: Sequence[int]
    rows: Sequence[int]
    keys: Sequence[bytes]
    indices: Sequence[int]
    generations: Sequence[int]
    payloads: list[memoryview]
    fixed: Sequence[bytes]
    left: int
    pages: list[int] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    """Requests that have not ended, of blocks that take more than one each."""
    errors: list[int] = field(default_factory=list)


class TierSide:
    """The common part of all shares and queues of a tier: rows on one side, numbered slots on the other."""

    def __init__(
        self, rows: Rows, space: SlotSpace, session: RootSession, clock: Callable[[], float], counters: Counter[str]
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
    """The blocks of a job's group `number` that lie on one root; `positions` in the order of their slots.

    `left` counts the blocks that have not begun.
    """

    def __init__(self, side: TierSide, root: Root, run: JobRun, number: int, positions: Sequence[int]) -> None:
        self.run, self.number, self.positions = run, number, positions
        self._side, self._root = side, root
        self._transfer = transfer = run.groups[number]
        self._slots = list(map(transfer.slots.__getitem__, positions))
        self.left = len(self._slots)
        self._storing = run.kind is JobKind.STORE
        self._payload_bytes = side.layout.payload_bytes[transfer.group]
        self._slot_bytes = side.layout.slot_bytes[transfer.group]
        self._shared = pack_shared(side.header_bytes, side.namespace, run.job.epoch, root.superblock.root_uuid)

    def take(self, count: int) -> Batch | None:
        """The next blocks that lie in one region, `count` at most. None if none of them can move; they have ended.

        The format of a region, and whether it can be written, is read now, when the blocks begin.
        """
        side, root, slots = self._side, self._root, self._slots
        first = len(slots) - self.left
        numbered = slots[first] // side.slots_per_region
        before, region = numbered * side.slots_per_region, numbered - root.first_region
        last = bisect_left(slots, before + side.slots_per_region, first, min(first + count, len(slots)))
        self.left = len(slots) - last
        state, fd = root.regions[region], root.fds.get(region // REGIONS_PER_FILE, -1)
        refused = self._refusal(state, fd)
        if refused is not None:
            self.run.end_all(self.number, self.positions[first:last], refused)
            return None
        fit = bisect_left(slots, before + side.region_bytes // self._slot_bytes, first, last)
        if fit < last:
            side.counters["refused.no_slot"] += last - fit
            self.run.end_all(self.number, self.positions[fit:last], failed(errno.EINVAL))
        if first == fit:
            return None
        return self._batch(region, state.generation, fd, [slot - before for slot in slots[first:fit]], first)

    def _batch(self, region: int, region_generation: int, fd: int, indices: list[int], first: int) -> Batch:
        """The blocks in these slots of a region, the first of which is number `first` of the share."""
        side, transfer, slot_bytes, length = self._side, self._transfer, self._slot_bytes, self._payload_bytes
        positions = self.positions[first : first + len(indices)]
        rows = list(map(transfer.rows.__getitem__, positions))
        keys = list(map(transfer.keys.__getitem__, positions))
        generations = list(map(transfer.generations.__getitem__, positions))
        memory, row_bytes, shared, group = side.memory, side.row_bytes, self._shared, int(transfer.group)
        payloads, fixed = [], []
        for row, index, generation, key in zip(rows, indices, generations, keys, strict=True):
            own = PACK_OWN(region, index, region_generation, slot_bytes, length, generation, group, len(key), 0)
            fixed.append(shared + own)
            payloads.append(memory[row * row_bytes : row * row_bytes + length])
        start = self._root.plan.slot_offset(region, 0, slot_bytes)
        return Batch(
            self.run, self.number, region, region_generation, fd, start, slot_bytes,
            positions, rows, keys, indices, generations, payloads, fixed, len(indices),
        )  # fmt: skip

    def _refusal(self, state: RegionState, fd: int) -> BlockOutcome | None:
        """Why blocks cannot move to or from a region, if so; its file's descriptor is -1 if it has none."""
        if self._storing and not self._root.is_epoch_durable(self._side.namespace, self.run.job.epoch):
            return dropped(DropReason.RESET)
        if state.slot_bytes != self._slot_bytes:
            self._side.counters["refused.slot_size"] += 1
            return failed(errno.EINVAL) if self._storing else MISSING
        if self._storing:
            return None if state.ready else error_outcome(state.errno or errno.EIO)
        return MISSING if fd < 0 else None

    def end(self, outcome: BlockOutcome) -> None:
        """End all that have not begun."""
        self.run.end_all(self.number, self.positions[len(self._slots) - self.left :], outcome)
        self.left = 0
