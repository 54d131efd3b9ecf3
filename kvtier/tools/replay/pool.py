"""The serving loop's own GPU blocks: a pool of block ids with reference counts, and the prefix cache over them.

A block is *referenced* (a request or a store uses it) or *idle*. Idle blocks wait in the order they are reused in:
those that hold no key first, then the one that was released longest ago. Only idle blocks are ever reused, and of those
none that a store still reads.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvtier.errors import IntegrityError
from kvtier.types.keys import OffloadKey


class BlockPool:
    """GPU block ids 0 .. num_blocks-1 of one group. Every method is all or nothing.

    `fenced(block)` is true while a store still reads the block.
    """

    def __init__(self, num_blocks: int, fenced: Callable[[int], bool] = lambda block: False) -> None:
        self._fenced = fenced
        self._references = [0] * num_blocks
        self._key_of: list[OffloadKey | None] = [None] * num_blocks
        self._block_of: dict[OffloadKey, int] = {}
        self._empty = OrderedDict.fromkeys(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0
        self.peak_blocks = 0

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_empty(self) -> int:
        """Blocks that are idle and hold no key."""
        return len(self._empty)

    @property
    def num_used(self) -> int:
        """Blocks that are referenced or hold a key."""
        return self.num_blocks - len(self._empty)

    def find(self, key: OffloadKey) -> int | None:
        """The block that holds a key, or None. Valid until the next `allocate` unless retained."""
        return self._block_of.get(key)

    def key_of(self, block: int) -> OffloadKey | None:
        """The key a block holds, or None."""
        return self._key_of[block]

    def retain(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            if not self._references[block]:
                self._idle.pop(block, None)
                self._empty.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take a reference from each block. What becomes idle is reused in the order given: pass the leaf first."""
        for block in blocks:
            if self._references[block] < 1:
                raise IntegrityError(f"GPU block {block} was released more often than retained")
            self._references[block] -= 1
            if not self._references[block]:
                (self._empty if self._key_of[block] is None else self._idle)[block] = None

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, each with one reference and no key, forgetting what the oldest idle ones held.

        Returns None and changes nothing if fewer are free now.
        """
        empty = list(islice(self._empty, count))
        idle = list(islice((block for block in self._idle if not self._fenced(block)), count - len(empty)))
        taken = empty + idle
        if len(taken) < count:
            return None
        for block in idle:
            self._forget(block)
        self.evictions += len(idle)
        self.retain(taken)
        self.peak_blocks = max(self.peak_blocks, self.num_used)
        return taken

    def publish(self, block: int, key: OffloadKey) -> None:
        """A referenced block now holds a key. Another block that already does stays the one that is found."""
        if not self._references[block] or self._key_of[block] is not None:
            raise IntegrityError(f"GPU block {block} must be referenced and hold no key to be published")
        self._key_of[block] = key
        self._block_of.setdefault(key, block)

    def coldest(self) -> Iterator[int]:
        """Idle blocks that hold a key, in the order they will be reused. The pool must not change meanwhile."""
        return iter(self._idle)

    def check_integrity(self) -> None:
        """Raise IntegrityError if a block is in no state or in two, or a key leads to a block that does not hold it."""
        for block, references in enumerate(self._references):
            states = (references > 0) + (block in self._idle) + (block in self._empty)
            holds = self._key_of[block] is not None
            if states != 1 or (block in self._idle and not holds) or (block in self._empty and holds):
                raise IntegrityError(f"GPU block {block}: {references} references, holds a key: {holds}")
        for key, block in self._block_of.items():
            if self._key_of[block] != key:
                raise IntegrityError(f"GPU block {block} does not hold the key that leads to it")

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        self._key_of[block] = None
        if key is not None and self._block_of.get(key) == block:
            del self._block_of[key]
