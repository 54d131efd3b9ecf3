"""Placement of new blocks: regions formatted with slots of one size, free slots by size, roots taken in turn.

A size without a free slot takes a region that was never formatted; then what other namespaces left, the oldest first;
else it evicts within its own regions, unless a region of another size is colder as a whole than all of its own: then
that region is evicted and formatted again. Each size keeps at least one region. While a root's disk is full, only its
regions and slots that have their room are used.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from kvtier.control.tiers.slot_table import ABSENT, FILLING, FREE, QUARANTINED, READY, RETIRED, SlotTable
from kvtier.errors import IntegrityError
from kvtier.tier.contract import ForeignBlocks, SlotSpace
from kvtier.types.jobs import RegionFormat

UNFORMATTED = -1
PAUSE_SECONDS = 5.0


class FullDisks:
    """Free slots without room, by size and root, and the regions they lie in, with their roots.

    `until[root]`: when a full disk is tried again, -inf if it is not full.
    """

    def __init__(self, num_sizes: int, num_roots: int) -> None:
        self.slots = [[array("q") for _ in range(num_roots)] for _ in range(num_sizes)]
        self.regions: dict[int, int] = {}
        self.until = [-math.inf] * num_roots

    @property
    def any(self) -> bool:
        """True while some root's disk is full."""
        return max(self.until) > -math.inf

    def is_full(self, root: int) -> bool:
        return self.until[root] > -math.inf

    def on_full(self, region: int, root: int, now: float) -> None:
        """The disk of a root had no room just now for slots of a region."""
        self.regions[region] = root
        self.until[root] = now + PAUSE_SECONDS

    def count(self, size: int) -> int:
        """Slots of a size that are kept apart."""
        return sum(map(len, self.slots[size]))

    def take_due(self, now: float) -> Iterator[tuple[int, int, array[int]]]:
        """(size, root, slots) of the roots whose pause is over: they count as not full from here on."""
        for root, until in enumerate(self.until):
            if -math.inf < until <= now:
                self.until[root] = -math.inf
                self.regions = {region: other for region, other in self.regions.items() if other != root}
                for size, of_size in enumerate(self.slots):
                    stack, of_size[root] = of_size[root], array("q")
                    if stack:
                        yield size, root, stack


class ForeignLayer:
    """Free slots by size, and unformatted regions, with blocks of one other namespace: they are used last."""

    __slots__ = ("regions", "slots")

    def __init__(self, slots: Sequence[Sequence[int]], regions: Sequence[int]) -> None:
        self.slots = [array("q", reversed(of_size)) for of_size in slots]
        self.regions = list(reversed(regions))


class ForeignSlots:
    """The layers of other namespaces, the oldest first, as they are overwritten. `counts`: all their slots by size."""

    def __init__(self, num_sizes: int) -> None:
        self.counts = [0] * num_sizes
        self.layers: list[ForeignLayer] = []

    @property
    def has_regions(self) -> bool:
        """True while a region of a size that this layout does not use is left."""
        return any(layer.regions for layer in self.layers)

    def add(self, layer: ForeignLayer) -> None:
        """Add a namespace, younger than those before."""
        self.layers.append(layer)
        for size, slots in enumerate(layer.slots):
            self.counts[size] += len(slots)

    def next(self, size: int, count: int) -> tuple[list[int], int | None]:
        """Up to `count` slots to overwrite next for a size, or a region to format; empty when none is left."""
        for layer in self.layers:
            stack = layer.slots[size]
            if stack:
                taken = stack[-count:]
                del stack[-count:]
                self.counts[size] -= len(taken)
                return taken.tolist()[::-1], None
            if layer.regions:
                return [], layer.regions.pop()
        return [], None

    def drop(self, size: int, slots: Collection[int]) -> int:
        """Forget slots whose region is formatted for another size. Returns how many there were."""
        dropped = sum(take_out(layer.slots[size], slots) for layer in self.layers)
        self.counts[size] -= dropped
        return dropped


def take_out(stack: array[int], slots: Collection[int]) -> int:
    """Remove those of the slots that are on the stack; returns how many these were."""
    kept = array("q", [slot for slot in stack if slot not in slots])
    removed = len(stack) - len(kept)
    stack[:] = kept
    return removed


class Placement:
    """Free slots and regions of one owned tier."""

    def __init__(self, space: SlotSpace, table: SlotTable) -> None:
        self.table = table
        self.per_region = space.slots_per_region
        self.sizes = sorted(set(space.slot_bytes))
        self.size_of_group = [self.sizes.index(size) for size in space.slot_bytes]
        self.slots_in_region = [space.region_bytes // size for size in self.sizes]
        self.one_size = len(self.sizes) == 1
        self.region_size = array("b", [UNFORMATTED] * space.num_regions)
        self.region_count = [0] * len(self.sizes)
        self.region_generation = array("Q", bytes(8 * space.num_regions))
        self.region_used = array("Q", bytes(8 * space.num_regions))
        self.tick = 0
        self.root_of_region = [root for root, count in enumerate(space.regions_by_root) for _ in range(count)]
        roots = range(len(space.regions_by_root))
        self._free = [[array("q") for _ in roots] for _ in self.sizes]
        self.free_count = [0] * len(self.sizes)
        self.foreign = ForeignSlots(len(self.sizes))
        self.full = FullDisks(len(self.sizes), len(space.regions_by_root))
        self._turn = 0
        self._unformatted: list[list[int]] = [[] for _ in roots]
        for region in reversed(range(space.num_regions)):
            self._unformatted[self.root_of_region[region]].append(region)
        self._pending_formats: dict[int, RegionFormat] = {}

    @property
    def has_unformatted(self) -> bool:
        """True while a region is left that no size has taken, on a disk that has room for it."""
        return any(map(self._left, range(len(self._unformatted)))) or self.foreign.has_regions

    @property
    def exhausted(self) -> bool:
        """True when no region is left to take, not even one of another namespace: only eviction makes room."""
        return not any(self._unformatted) and not self.foreign.layers

    @property
    def fewest_slots(self) -> int:
        """The slots that the size with the fewest has or can yet get, without those whose disk is full."""
        left = sum(len(self._left(root)) for root in range(len(self._unformatted)))
        each = enumerate(zip(self.region_count, self.slots_in_region, strict=True))
        return min(((n + left) * slots - self.full.count(size) for size, (n, slots) in each if n + left), default=0)

    @property
    def formatted_bytes(self) -> int:
        """The bytes of all slots, used or free, headers and padding included."""
        each = zip(self.region_count, self.slots_in_region, self.sizes, strict=True)
        return sum(regions * slots * size for regions, slots, size in each)

    @property
    def taken_bytes(self) -> int:
        """Bytes of all slots but the free ones."""
        free = enumerate(self.free_count)
        return self.formatted_bytes - sum((n + self.full.count(size)) * self.sizes[size] for size, n in free)

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold or receive a block."""
        counts = self.table.counts
        if self.one_size:
            return (counts[FILLING] + counts[READY] + counts[QUARANTINED]) * self.sizes[0]
        if not counts[RETIRED]:
            return self.taken_bytes
        total = 0
        for region, size in enumerate(self.region_size):
            if size >= 0:
                slots = self.slots_of(region)
                inside = self.table.state[slots.start : slots.stop]
                total += sum(map(inside.count, (FILLING, READY, QUARANTINED))) * self.sizes[size]
        return total

    def region_of(self, slot: int) -> int:
        return slot // self.per_region

    def slot_bytes(self, slots: Sequence[int]) -> int:
        """The bytes of these slots, headers and padding included."""
        if self.one_size:
            return len(slots) * self.sizes[0]
        return sum(self.sizes[self.region_size[self.region_of(slot)]] for slot in slots)

    def restore(self, formats: Sequence[RegionFormat]) -> None:
        """Take over the regions found when the tier was opened; sizes this layout does not use stay unformatted."""
        for made in formats:
            self.region_generation[made.region] = made.generation
            if made.slot_bytes in self.sizes:
                self._unformatted[self.root_of_region[made.region]].remove(made.region)
                self._lay_out(made.region, self.sizes.index(made.slot_bytes))

    def set_aside(self, foreign: Sequence[ForeignBlocks]) -> None:
        """These free slots and unformatted regions hold blocks of other namespaces: take them last, in this order."""
        for blocks in foreign:
            by_size: list[list[int]] = [[] for _ in self.sizes]
            for slot in blocks.slots.tolist():
                by_size[self.region_size[self.region_of(slot)]].append(slot)
            for size, slots in enumerate(by_size):
                before = self.free_count[size]
                self.occupy(size, slots)
                if before - self.free_count[size] != len(slots):
                    raise IntegrityError("slots of other namespaces must be free, each named once")
                self.free_count[size] = before
            for region in blocks.regions:
                self._unformatted[self.root_of_region[region]].remove(region)
            self.foreign.add(ForeignLayer(by_size, blocks.regions))

    def _lay_out(self, region: int, size: int) -> None:
        self.region_size[region] = size
        self.region_count[size] += 1
        first = region * self.per_region
        slots = range(first, first + self.slots_in_region[size])
        self.table.move(slots, ABSENT, FREE)
        self._free[size][self.root_of_region[region]].extend(reversed(slots))
        self.free_count[size] += len(slots)

    def occupy(self, size: int, slots: Sequence[int]) -> None:
        """Take these slots off the free lists (recovery only)."""
        if slots:
            taken = set(slots)
            self.free_count[size] -= sum(take_out(stack, taken) for stack in self._free[size])

    def take(self, size: int, count: int) -> list[int]:
        """Up to `count` free slots of one size, roots in turn; they leave the free lists. Formats regions as needed."""
        if count and len(self._unformatted) > 1:
            self._open_roots(size)
        while self.free_count[size] - self.foreign.counts[size] < count and self._format_unused(size):
            pass
        taken = self._take_unused(size, count)
        while len(taken) < count and (more := self._overwrite(size, count - len(taken))):
            taken += more
        return taken

    def take_within(self, size: int, count: int, limits: list[int]) -> list[int]:
        """Slots as from `take`, at most `limits[r]` of root r, which are used up; none that hold blocks of other
        namespaces."""
        stacks: list[array[int]] = self._free[size]
        taken: list[int] = []
        for _ in range(count):
            roots = [root for root, limit in enumerate(limits) if limit > 0 and (stacks[root] or self._left(root))]
            if not roots:
                break
            self._turn = next((root for root in roots if root > self._turn), roots[0])
            if not stacks[self._turn]:
                self._format(self._unformatted[self._turn].pop(), size)
            taken.append(stacks[self._turn].pop())
            limits[self._turn] -= 1
        self.free_count[size] -= len(taken)
        return taken

    def _left(self, root: int) -> list[int]:
        """The regions of a root that a size can take: the unformatted ones, and none while its disk is full."""
        return [] if self.full.is_full(root) else self._unformatted[root]

    def _overwrite(self, size: int, count: int) -> list[int]:
        """Some slots that hold blocks of other namespaces; none when none are left."""
        slots, region = self.foreign.next(size, count)
        self.free_count[size] -= len(slots)
        if region is None:
            return slots
        self._format(region, size)
        return self._take_unused(size, count)

    def _take_unused(self, size: int, count: int) -> list[int]:
        count = min(count, self.free_count[size] - self.foreign.counts[size])
        self.free_count[size] -= count
        stacks = self._free[size]
        if len(stacks) == 1:
            stack = stacks[0]
            taken = stack[len(stack) - count :]
            del stack[len(stack) - count :]
            return taken.tolist()[::-1]
        result: list[int] = []
        while len(result) < count:
            self._turn = (self._turn + 1) % len(stacks)
            if stacks[self._turn]:
                result.append(stacks[self._turn].pop())
        return result

    def give_back(self, slots: Sequence[int]) -> None:
        """Slots that became FREE return to their free list."""
        if self.one_size and len(self._free[0]) == 1:
            self._free[0][0].extend(slots)
            self.free_count[0] += len(slots)
            return
        for slot in slots:
            region = slot // self.per_region
            size = self.region_size[region]
            self._free[size][self.root_of_region[region]].append(slot)
            self.free_count[size] += 1

    def on_use(self, slots: Sequence[int]) -> None:
        """These slots were filled or touched; keeps the recency of regions, which only tiers of several sizes need."""
        self.tick += 1
        for slot in slots:
            self.region_used[slot // self.per_region] = self.tick

    def _open_roots(self, size: int) -> None:
        """Every root with unformatted regions offers slots of this size, so blocks spread over all roots at once."""
        for root, free in enumerate(self._free[size]):
            if not free and (regions := self._left(root)):
                self._format(regions.pop(), size)

    def _format_unused(self, size: int) -> bool:
        most = max(map(self._left, range(len(self._unformatted))), key=len, default=[])
        if not most:
            return False
        self._format(most.pop(), size)
        return True

    def disk_full(self, slots: Sequence[int], now: float) -> None:
        """These slots' disks had no room for them: keep their regions' free slots apart, for a while."""
        for region in dict.fromkeys(slot // self.per_region for slot in slots):
            root, size = self.root_of_region[region], self.region_size[region]
            self.full.on_full(region, root, now)
            stack = self._free[size][root]
            apart = array("q", [slot for slot in stack if slot // self.per_region == region])
            self.full.slots[size][root].extend(apart)
            self.free_count[size] -= take_out(stack, self.slots_of(region))

    def try_full_disks(self, now: float) -> None:
        """Disks that were full a while ago may have room again: what was kept apart is free as before."""
        for size, root, slots in self.full.take_due(now):
            self._free[size][root].extend(slots)
            self.free_count[size] += len(slots)

    def format_all(self) -> None:
        """Format every region for the only size there is; the backend of memory needs no format jobs."""
        while self._format_unused(0):
            pass
        self._pending_formats.clear()

    def _format(self, region: int, size: int) -> None:
        self.region_generation[region] += 1
        self._pending_formats[region] = RegionFormat(region, self.sizes[size], self.region_generation[region])
        self._lay_out(region, size)

    def formats_for(self, slots: Sequence[int]) -> tuple[RegionFormat, ...]:
        """The formats of these slots' regions that no job has completed yet: each job names them until one has."""
        if not self._pending_formats:
            return ()
        regions = dict.fromkeys(slot // self.per_region for slot in slots)
        return tuple(self._pending_formats[region] for region in regions if region in self._pending_formats)

    def complete_formats(self, formats: Sequence[RegionFormat]) -> None:
        """The backend made these formats: it has stored blocks in those regions."""
        for made in formats:
            if self._pending_formats.get(made.region) == made:
                del self._pending_formats[made.region]

    def colder_region(self, size: int) -> int | None:
        """An idle region of another size that may be formatted for this one, or None."""
        if self.one_size:
            return None
        sizes = np.frombuffer(self.region_size, np.int8).copy()
        sizes[list(self.full.regions)] = UNFORMATTED
        used = np.frombuffer(self.region_used, np.uint64)
        formatted = sizes != UNFORMATTED
        spare = np.bincount(sizes[formatted], minlength=len(self.sizes)) > 1
        candidates = formatted & (sizes != size) & spare[sizes]
        own = used[sizes == size]
        if own.size:
            candidates &= used < own.min()
        regions = np.flatnonzero(candidates)
        coldest_first: list[int] = regions[np.argsort(used[regions], kind="stable")].tolist()
        return next(filter(self._idle, coldest_first), None)

    def slots_of(self, region: int) -> range:
        first = region * self.per_region
        return range(first, first + self.slots_in_region[self.region_size[region]])

    def _idle(self, region: int) -> bool:
        """True if no slot of the region is in use. A retired slot counts as used: its region keeps its format."""
        state, pins = self.table.state, self.table.pins
        return all(not pins[slot] and state[slot] in (FREE, READY) for slot in self.slots_of(region))

    def reformat(self, region: int, size: int) -> None:
        """Format an idle region, whose blocks were evicted, with slots of another size."""
        old = self.region_size[region]
        slots = self.slots_of(region)
        state = self.table.state
        if any(state[slot] == READY for slot in slots):
            raise IntegrityError(f"region {region} is formatted while it holds ready blocks")
        stack = self._free[old][self.root_of_region[region]]
        self.free_count[old] -= take_out(stack, slots) + self.foreign.drop(old, slots)
        self.table.move(slots, FREE, ABSENT)
        self.region_count[old] -= 1
        self._format(region, size)

    def check(self) -> None:
        """Every FREE slot is on exactly one free list, that of its region's slot size."""
        seen: dict[int, int] = {}
        for size, free in enumerate(self._free):
            stacks = [*free, *(layer.slots[size] for layer in self.foreign.layers)]
            if sum(map(len, stacks)) != self.free_count[size]:
                raise IntegrityError(f"size {size} has {sum(map(len, stacks))} free slots, counted {self.free_count}")
            for stack in (*stacks, *self.full.slots[size]):
                for slot in stack:
                    if slot in seen or self.table.state[slot] != FREE:
                        raise IntegrityError(f"slot {slot} is on a free list twice or is not free")
                    if self.region_size[slot // self.per_region] != size:
                        raise IntegrityError(f"slot {slot} is on the free list of another size")
                    seen[slot] = size
        if len(seen) != self.table.counts[FREE]:
            raise IntegrityError(f"{self.table.counts[FREE]} slots are free but {len(seen)} are on free lists")
