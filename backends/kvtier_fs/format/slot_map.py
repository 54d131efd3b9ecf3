"""The content of each slot of a root, kept while the root is open, so that a clean close can write it down.

It says what a scan of the headers on the disk would say; a slot that is being written holds nothing. Both ways of
opening a root, by scan and from a snapshot, fill a slot_map, and the directory is made from it.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tier.block_age import AgeLimit
from kvtier.tier.block_envelope import SlotHeader
from kvtier.types.arrays import IntArray

NO_OWNER = 0xFF
"""The owner of a slot that holds no block that counts."""


class RegionSlots:
    """The slots of one region as it is formatted now: key, generation and owner by slot number."""

    __slots__ = ("generations", "keys", "owners", "region_generation")

    def __init__(self, region_generation: int, count: int) -> None:
        self.region_generation = region_generation
        self.keys: list[bytes | None] = [None] * count
        self.generations = array("Q", bytes(8 * count))
        self.owners = bytearray([NO_OWNER]) * count

    @property
    def owner_array(self) -> npt.NDArray[np.uint8]:
        """The owners as a view; it must not outlive the call it is used in."""
        return np.frombuffer(self.owners, dtype=np.uint8)

    def numbers_of(self, owner: int) -> IntArray:
        """Numbers of the slots that belong to one namespace."""
        return np.flatnonzero(self.owner_array == owner)

    def numbers_held(self) -> list[int]:
        """Numbers of the slots that hold a block that counts, of any namespace."""
        return np.flatnonzero(self.owner_array != NO_OWNER).tolist()

    def numbers_within(self, owner: int, limit: AgeLimit) -> IntArray:
        """The numbers of `numbers_of`, without slots whose blocks a limit of ages does not allow."""
        numbers = self.numbers_of(owner)
        generations = np.frombuffer(self.generations, dtype=np.int64)[numbers]
        return numbers[(generations >= limit.oldest) & (generations <= limit.newest)]


@dataclass(slots=True)
class Owner:
    """A namespace, and the epoch its blocks must carry to count."""

    namespace: bytes
    epoch: int


class SlotMap:
    """The blocks of one root, of every namespace that its superblock knows. `own` is the number of ours."""

    def __init__(self, owners: Sequence[Owner], namespace: bytes) -> None:
        assert len(owners) < NO_OWNER
        self.owners = list(owners)
        self._numbers = {owner.namespace: number for number, owner in enumerate(owners)}
        self.own = self._numbers[namespace]
        self._regions: dict[int, RegionSlots] = {}

    def number_of(self, namespace: bytes, epoch: int) -> int:
        """The number of a namespace whose blocks of this epoch count; NO_OWNER if they do not."""
        number = self._numbers.get(namespace, NO_OWNER)
        return number if number != NO_OWNER and self.owners[number].epoch == epoch else NO_OWNER

    def format(self, region: int, generation: int, count: int) -> RegionSlots:
        """A region has `count` empty slots from now on."""
        slots = self._regions[region] = RegionSlots(generation, count)
        return slots

    def clear(self) -> None:
        """No region is formatted."""
        self._regions.clear()

    def forget_from(self, region: int) -> None:
        """The regions from this one on are no more."""
        self._regions = {number: slots for number, slots in self._regions.items() if number < region}

    def regions(self) -> Iterator[tuple[int, RegionSlots]]:
        """The regions that are formatted, in order."""
        return iter(sorted(self._regions.items()))

    def begin_all(self, region: int, indices: Iterable[int]) -> None:
        """Slots of a region are about to be written: what they held is gone."""
        slots = self._regions.get(region)
        if slots is not None:
            for index in indices:
                slots.owners[index] = NO_OWNER
                slots.keys[index] = None

    def record(self, header: SlotHeader) -> None:
        """A slot holds what its header says, unless the region was formatted or the namespace reset meanwhile."""
        number = self.number_of(header.namespace, header.epoch)
        format_of = header.region, header.region_generation
        self.hold_all(number, format_of, [header.slot_index], [header.key], [header.generation])

    def hold_all(
        self,
        number: int,
        format_of: tuple[int, int],
        indices: Iterable[int],
        keys: Iterable[bytes],
        generations: Iterable[int],
    ) -> None:
        """Slots of a region and a generation of its format hold blocks of an owner.

        Nothing changes if the owner is NO_OWNER or the region was formatted meanwhile.
        """
        region, region_generation = format_of
        slots = self._regions.get(region)
        if number == NO_OWNER or slots is None or slots.region_generation != region_generation:
            return
        for index, key, generation in zip(indices, keys, generations, strict=True):
            slots.owners[index] = number
            slots.keys[index] = key
            slots.generations[index] = generation

    def refuse(self, region: int, index: int, generation: int) -> None:
        """A slot was read and does not hold what was expected: nothing that counts, unless it moved on meanwhile."""
        slots = self._regions.get(region)
        if slots is not None and slots.generations[index] == generation:
            self.begin_all(region, (index,))

    def reset(self, epoch: int) -> None:
        """Our namespace goes on with another epoch; nothing it stored before counts any more."""
        self.owners[self.own].epoch = epoch
        for slots in self._regions.values():
            for number in slots.numbers_of(self.own).tolist():
                slots.owners[number] = NO_OWNER
                slots.keys[number] = None
