"""What the control plane gets when it opens a tier, from the slots of all roots: our blocks and other namespaces'."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.tier.block_age import NO_AGE_LIMIT, AgeLimit
from kvtier.tier.contract import ForeignBlocks, Recovered, SlotSpace
from kvtier.types.arrays import IntArray, int_array
from kvtier.types.jobs import RegionFormat
from kvtier.types.keys import GROUP_BYTES, OffloadKey
from kvtier_fs.format.slot_map import NO_OWNER, RegionSlots
from kvtier_fs.local.root import Root


def recovered(roots: Sequence[Root], space: SlotSpace, limit: AgeLimit = NO_AGE_LIMIT) -> Recovered:
    """What all roots hold together, as far as the limit of ages allows it: each key once, its newest copy, from the
    oldest generation to the newest."""
    groups: dict[int, set[bytes]] = {}
    for group, size in enumerate(space.slot_bytes):
        groups.setdefault(size, set()).add(group.to_bytes(GROUP_BYTES, "big"))
    ours = _Blocks()
    for root in roots:
        for region, slots in root.slot_map.regions():
            if (size := root.regions[region].slot_bytes) in groups:
                numbers = slots.numbers_within(root.slot_map.own, limit)
                keys = [key for number in numbers.tolist() if (key := slots.keys[number]) is not None]
                fitting = [at for at, key in enumerate(keys) if key[-GROUP_BYTES:] in groups[size]]
                if len(fitting) < len(keys):
                    numbers, keys = numbers[fitting], [keys[at] for at in fitting]
                ours.add(slots, numbers, (root.first_region + region) * space.slots_per_region)
                ours.keys += keys
    order = ours.by_age()
    keys = [ours.keys[at] for at in order.tolist()]
    newest = dict(zip(keys, range(len(keys)), strict=True))
    if len(newest) < len(keys):
        kept = np.sort(int_array(list(newest.values())))
        order, keys = order[kept], [keys[at] for at in kept.tolist()]
    return Recovered(
        keys=[OffloadKey(key) for key in keys],
        slots=ours.slots[order],
        generations=ours.generations[order].astype(np.int64),
        formats=tuple(
            RegionFormat(root.first_region + region, state.slot_bytes if state.ready else 0, state.generation)
            for root in roots
            for region, state in enumerate(root.regions)
            if state.generation
        ),
        foreign=foreign(roots, space),
    )


@dataclass(slots=True)
class _Blocks:
    """Slots with their generations, collected region by region."""

    keys: list[bytes] = field(default_factory=list)
    regions: list[int] = field(default_factory=list)
    _slots: list[IntArray] = field(default_factory=list)
    _generations: list[npt.NDArray[np.uint64]] = field(default_factory=list)

    def add(self, slots: RegionSlots, numbers: IntArray, first: int) -> None:
        self._slots.append(numbers + first)
        self._generations.append(np.frombuffer(slots.generations, dtype=np.uint64)[numbers])

    @property
    def slots(self) -> IntArray:
        return int_array(np.concatenate([int_array(()), *self._slots]))

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        return np.concatenate([np.zeros(0, dtype=np.uint64), *self._generations])

    def by_age(self) -> IntArray:
        """Positions from the oldest generation to the newest."""
        return np.lexsort((self.slots, self.generations))


def foreign(roots: Sequence[Root], space: SlotSpace) -> tuple[ForeignBlocks, ...]:
    """What other namespaces left, the one unused for longest first.

    A region of a size that is none of ours counts as the youngest namespace's that has a block in it.
    """
    unused = _sessions_unused(roots)
    found: dict[bytes, _Blocks] = {}
    for root in roots:
        names = [owner.namespace for owner in root.slot_map.owners]
        for region, slots in root.slot_map.regions():
            numbered = root.first_region + region
            others = [at for at in sorted(set(slots.owners)) if at not in (NO_OWNER, root.slot_map.own)]
            if others and root.regions[region].slot_bytes not in space.slot_bytes:
                youngest = min((names[at] for at in others), key=lambda name: (unused[name], name))
                found.setdefault(youngest, _Blocks()).regions.append(numbered)
                continue
            for at in others:
                first = numbered * space.slots_per_region
                found.setdefault(names[at], _Blocks()).add(slots, slots.numbers_of(at), first)
    oldest_first = sorted(found, key=lambda name: (unused[name], name), reverse=True)
    blocks = (found[name] for name in oldest_first)
    return tuple(ForeignBlocks(each.slots[each.by_age()], tuple(each.regions)) for each in blocks)


def _sessions_unused(roots: Sequence[Root]) -> dict[bytes, int]:
    """For each namespace, the sessions since it was last opened, in the root that remembers it best."""
    unused: dict[bytes, int] = {}
    for root in roots:
        for namespace, entry in root.superblock.namespaces:
            sessions = root.superblock.session - entry.session
            unused[namespace] = min(sessions, unused.get(namespace, sessions))
    return unused
