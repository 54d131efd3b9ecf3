"""Which blocks a tier may be sent within a write budget: none without room for those before it in its prompt.

Blocks are sent soon after they were admitted, also to an `on_evict` tier, which chooses among them as they are about to
be evicted. So their bytes are promised to them then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import takewhile

from kvtier.policy.write_pace import WritePace
from kvtier.types.keys import OffloadKey


class RecentKeys:
    """Keys that are forgotten in the second turn after they were added."""

    def __init__(self) -> None:
        self._young: dict[OffloadKey, None] = {}
        self._old: dict[OffloadKey, None] = {}

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._young or key in self._old

    def add(self, key: OffloadKey) -> None:
        """Add a key that is not in it."""
        self._young[key] = None

    def discard(self, key: OffloadKey) -> bool:
        """True if the key was in it."""
        found = key in self
        self._young.pop(key, None)
        self._old.pop(key, None)
        return found

    def turn(self) -> int:
        """Forget what was added before the last turn. Returns how many keys that were."""
        forgotten = len(self._old)
        self._young, self._old = {}, self._young
        return forgotten


class WriteAllowance:
    """The write budget of one tier in blocks of `block_bytes`.

    With a block those before it in its prompt are admitted that the tier lacks. That, and a promise, is forgotten in
    the second minute after it: the block was given up meanwhile, or waits for the tier.
    """

    def __init__(self, pace: WritePace, block_bytes: int) -> None:
        self.pace = pace
        self.block_bytes = block_bytes
        self._admitted = RecentKeys()
        self._promised = RecentKeys()
        self._num_promised = 0
        self._time = 0.0
        self._next: OffloadKey | None = None
        self._next_needs = 0

    def advance(self, time: float) -> None:
        """Time has passed up to here."""
        if time != self._time:
            self._time, self._next = time, None
        if self.pace.advance(time):
            self._admitted.turn()
            self._count_promises(-self._promised.turn())

    def chooses(
        self,
        key: OffloadKey,
        hits: float,
        parents: Callable[[OffloadKey], Iterable[OffloadKey]],
        holds: Callable[[OffloadKey], bool],
    ) -> bool:
        """True if this block is admitted for the hits that it is expected to bring, with those before it that the tier
        lacks. `parents` are all before it, the nearest first."""
        if key in self._admitted:
            return True
        if not self.pace.admits(hits, self.block_bytes, self._needed(key, parents(key), holds) * self.block_bytes):
            return False
        self._admit(key)
        for parent in self._lacking(parents(key), holds):
            self._admit(parent)
        return True

    def front(
        self,
        key: OffloadKey,
        hits: float,
        parents: Callable[[OffloadKey], Iterable[OffloadKey]],
        holds: Callable[[OffloadKey], bool],
        stuck: Callable[[OffloadKey], bool],
    ) -> list[OffloadKey]:
        """As `chooses`, but those of the block and of those before it are admitted that there is room for, the nearest
        to the root. Returns them, leaf first. None is admitted after one that is `stuck`: it cannot be sent now."""
        if key not in self._admitted and not self.pace.wants(hits, self.block_bytes):
            return []
        blocks = [key, *takewhile(lambda parent: not holds(parent), parents(key))]
        if any(map(stuck, blocks)):
            return []
        fresh = sum(block not in self._admitted for block in blocks)
        blocks = blocks[max(0, fresh - self.pace.free // self.block_bytes) :]
        for block in blocks:
            if block not in self._admitted:
                self._admit(block)
        return blocks

    def admits(self, key: OffloadKey) -> bool:
        """True if this block can be sent, because one after it is."""
        if key in self._admitted:
            return True
        if self.pace.free < self.block_bytes:
            return False
        self._admit(key)
        return True

    def affordable(
        self,
        keys: Sequence[OffloadKey],
        parents: Callable[[OffloadKey], Iterable[OffloadKey]],
        holds: Callable[[OffloadKey], bool],
        waits: Callable[[OffloadKey], bool],
    ) -> Collection[OffloadKey]:
        """Those of the blocks, given leaf first, that may be sent now with those before them; these are promised room.

        Without enough of it the blocks nearest to the root are taken. `waits` says which blocks may still be sent:
        none is without those before it.
        """
        room = self.pace.room // self.block_bytes
        taken = dict.fromkeys([key for key in reversed(keys) if key in self._promised][: max(0, room)])
        room -= self._num_promised
        for key in [key for key in reversed(keys) if key not in self._promised]:
            if key in self._promised:  # as one before another
                taken[key] = None
                continue
            before: list[OffloadKey] = []
            for parent in parents(key):
                if parent in taken or parent in self._promised or holds(parent):
                    break
                before.append(parent)
            if len(before) < room and all(map(waits, before)):
                taken[key] = None
                room -= 1 + len(before)
                for parent in before:
                    self._promise(parent)
        return taken

    def sent(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks are being written."""
        for key in keys:
            self._admitted.discard(key)
            if self._promised.discard(key):
                self._count_promises(-1)
        self.pace.wrote(len(keys) * self.block_bytes)

    def given_up(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks are not written after all, whether they were admitted or not."""
        for key in keys:
            if self._admitted.discard(key):
                self.pace.give_back(self.block_bytes)
            if self._promised.discard(key):
                self._count_promises(-1)

    def _admit(self, key: OffloadKey) -> None:
        self.pace.admitted(self.block_bytes)
        self._admitted.add(key)
        if key not in self._promised:
            self._promise(key)

    def _promise(self, key: OffloadKey) -> None:
        self._promised.add(key)
        self._count_promises(1)

    def _count_promises(self, count: int) -> None:
        self._num_promised += count
        self.pace.promise(count * self.block_bytes)

    def _lacking(self, parents: Iterable[OffloadKey], holds: Callable[[OffloadKey], bool]) -> Iterator[OffloadKey]:
        """Those of the blocks before another one, the nearest first, that neither are in the tier nor were admitted."""
        return takewhile(lambda parent: parent not in self._admitted and not holds(parent), parents)

    def _needed(self, key: OffloadKey, parents: Iterable[OffloadKey], holds: Callable[[OffloadKey], bool]) -> int:
        """How many blocks `_lacking` are. Blocks are asked for leaf first, so they are counted once for a prompt."""
        if key == self._next:
            needed, parent = self._next_needs, next(iter(parents), None)
        else:
            lacking = list(self._lacking(parents, holds))
            needed, parent = len(lacking), next(iter(lacking), None)
        self._next, self._next_needs = parent if needed else None, needed - 1
        return needed
