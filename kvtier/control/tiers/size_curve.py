"""Hits that a running tier would have if it were half, twice or four times as large: LRU, over the same requests.

The blocks that were used are kept as one list in the order of their last use, cut where the blocks before the cut fill
one of the sizes. A block that is used again in front of a cut would have been hit at that size, and one behind it would
not. Only these cuts matter, so no distance is computed, and nothing is kept behind the last one.

One block in `interval` is kept, chosen by a hash of its key, and counts for `interval` blocks (spatial sampling, as in
SHARDS). Counted are all uses, and the misses of the chosen blocks: a block that nearly all requests begin with is hit
nearly always, so it makes no difference whether it was chosen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from kvtier.tier.contract import SlotSpace
from kvtier.types.keys import OffloadKey, key_group

SIZES = (0.5, 1.0, 2.0, 4.0)
"""Sizes whose misses a curve counts, in sizes of the tier, ascending."""
BLOCKS_MAX = 16384
"""Blocks that a curve keeps, at most, of the smallest slot size."""
INTERVAL_LEAST = 6
"""Least interval, so that the other blocks cost a hash; it is less for a tier of less than 384 blocks."""
BLOCKS_LEAST = 64
"""Blocks that a curve keeps at least for one size of the tier, as far as it has them."""


class SizeCurve:
    """Misses of one owned tier by size. `used` counts the blocks of the requests since the tier opened.

    One block in `interval` is kept. A tier with slots of several sizes counts in bytes.
    """

    def __init__(self, space: SlotSpace, interval: int | None = None) -> None:
        smallest = min(space.slot_bytes)
        self.interval = interval or interval_of(space.num_slot_ids)
        self.used = 0
        self._bytes = space.slot_bytes
        kept = [-(-int(size * space.num_slot_ids) // self.interval) for size in SIZES]
        self._room = [(size - before) * smallest for size, before in zip(kept, [0, *kept], strict=False)]
        self._held = [0] * len(SIZES)
        self._parts: list[OrderedDict[OffloadKey, int]] = [OrderedDict() for _ in SIZES]
        self._found = [0] * (len(SIZES) + 1)

    @property
    def missed(self) -> dict[float, int]:
        """Blocks that were used and would not have been there, by size."""
        return {size: self.interval * sum(self._found[index + 1 :]) for index, size in enumerate(SIZES)}

    def use(self, keys: Sequence[OffloadKey]) -> None:
        """Count a request that uses these keys, each once and in prefix order: leaf to root, after all lookups."""
        self.used += len(keys)
        if self.interval > 1:
            keys = [key for key in keys if not xxh3_64_intdigest(key) % self.interval]
        parts = [self._part_of(key) for key in keys]
        for part in parts:
            self._found[part] += 1
        for key in reversed(keys):
            self._renew(key)

    def _part_of(self, key: OffloadKey) -> int:
        """Index of the part that the key is in; one more than the last if it is not kept."""
        for index, part in enumerate(self._parts):
            if key in part:
                return index
        return len(self._parts)

    def _renew(self, key: OffloadKey) -> None:
        """The key becomes the most recent, and others cross the cuts before its old place."""
        part = self._part_of(key)
        if part < len(self._parts):
            self._held[part] -= self._parts[part].pop(key)
        moved = [(key, self._bytes[key_group(key)])]
        for index, blocks in enumerate(self._parts):
            held = self._held[index]
            for other, size in moved:
                blocks[other] = size
                held += size
            moved = []
            while held > self._room[index]:
                oldest = blocks.popitem(last=False)
                moved.append(oldest)
                held -= oldest[1]
            self._held[index] = held
            if not moved:
                return

    def reset(self) -> None:
        """Forget all blocks: none of them is used again."""
        for part in self._parts:
            part.clear()
        self._held = [0] * len(self._parts)


def interval_of(num_blocks: int) -> int:
    """Interval of the blocks that are kept for a tier of this size."""
    fewest = min(INTERVAL_LEAST, max(1, num_blocks // BLOCKS_LEAST))
    return max(fewest, -int(-SIZES[-1] * num_blocks // BLOCKS_MAX))
