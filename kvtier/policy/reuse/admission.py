"""Admission by prediction: a block is written if it is likely to be used while the tier would keep it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import takewhile

import numpy as np

from kvtier.policy import RequestModels
from kvtier.policy.admission import Admission
from kvtier.policy.reuse.prediction.classes import NUM_BUCKETS, bucket_of
from kvtier.policy.reuse.prediction.life_tables import SHRINK, FloatArray
from kvtier.policy.reuse.prediction.model import ReuseModel
from kvtier.policy.reuse.prediction.prompts import Prompt
from kvtier.policy.reuse.prediction.segments import NONE
from kvtier.policy.write_budget import WriteBudget
from kvtier.types.keys import OffloadKey

HITS_MIN = 0.15
FOLLOWED_HITS_MIN = 0.2
"""Expected hits of a block that is worth a write, where no budget sets them: in any tier, and in one whose policy
follows requests. That one evicts what is worth little, so more hits are expected of every block that it is sent."""
REACH_MIN = 22
"""Buckets of age that count although nothing lived through them yet: 1,092 s."""
EVICTED_WEIGHT = 1 / 64
COMPUTE_EVICTIONS = 256
REFUSED_KEYS = 1 << 16
"""Blocks that were not admitted that are remembered, twice at most."""


class RecentKeys:
    """Keys that are forgotten in the second turn after they were added."""

    def __init__(self) -> None:
        self._young: dict[OffloadKey, None] = {}
        self._old: dict[OffloadKey, None] = {}

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._young or key in self._old

    @property
    def num_young(self) -> int:
        """Number of keys that were added since the last turn."""
        return len(self._young)

    def add(self, key: OffloadKey) -> None:
        """Add a key."""
        self._young[key] = None

    def discard(self, key: OffloadKey) -> bool:
        """True if the key was in it."""
        found = key in self
        self._young.pop(key, None)
        self._old.pop(key, None)
        return found

    def turn(self) -> int:
        """Forget what was added before the last turn. Returns the number of keys."""
        forgotten = len(self._old)
        self._young, self._old = {}, self._young
        return forgotten


class Predicted(Admission):
    """Admission of a block whose expected hits are at least `HITS_MIN`.

    With `followed`, where the tier's policy follows requests, they are at least `FOLLOWED_HITS_MIN`.

    Expected are the hits until its worth falls below what the tier evicts (a moving mean), from the life tables of the
    stack. A block counts for as much as the best of those after it in its latest prompt. It is admitted, too, if the
    next one is in the tier or was admitted just before: no block is written without those before it. A block that no
    request announced is admitted. Prompts are kept for the blocks of `rows`.
    """

    def __init__(self, models: RequestModels, followed: bool = False, rows: int = 0) -> None:
        model = models.of(ReuseModel)
        self._followed = followed
        self._tables = model.tables
        self._model = model
        self._prompts = model.keep_prompts()
        self._prompts.keep(rows)
        self._evicted_worth = 0.0
        self._evictions = 0
        self._rates: FloatArray | None = None
        self._expected: list[float] = []
        self._admitted: OffloadKey | None = None
        self._refused = RecentKeys()
        self._again = 0

    def admits(self, key: OffloadKey, used_again: bool, holds: Callable[[OffloadKey], bool]) -> bool:
        if not used_again:
            self._count_again(key)
        if self._decides(key, holds):
            self._admitted = key
            return True
        self._remember(key)
        return False

    def parents(self, key: OffloadKey) -> Iterable[OffloadKey]:
        found = self._prompts.find(key)
        return (found[0].keys[at] for at in range(found[1] - 1, -1, -1)) if found else ()

    def on_evict(self, keys: Sequence[OffloadKey]) -> None:
        segments, tables = self._prompts.segments, self._tables
        for seg in map(segments.find, keys):  # each segment counts once, when its first block goes
            if seg != NONE:
                bucket = bucket_of(self._model.now - segments.touched[seg])
                worth = tables.index[segments.kind[seg] * NUM_BUCKETS + bucket]
                self._evicted_worth += EVICTED_WEIGHT * (worth - self._evicted_worth)
        self._evictions += len(keys)

    @property
    def computed_again(self) -> int:
        return self._again

    def expected_hits(self, prompt: Prompt, position: int) -> float:
        """Expected hits of a block of a prompt while the tier keeps it: the share of its kind that is used."""
        if self._rates is not self._tables.rates or self._evictions >= COMPUTE_EVICTIONS:
            self._compute()
        return max(map(self._expected.__getitem__, self._prompts.kinds(prompt, position)))

    def _decides(self, key: OffloadKey, holds: Callable[[OffloadKey], bool]) -> bool:
        found = self._prompts.find(key)
        if found is None or self._child_below(*found, holds):
            return True
        return self.expected_hits(*found) >= (FOLLOWED_HITS_MIN if self._followed else HITS_MIN)

    def _child_below(self, prompt: Prompt, position: int, holds: Callable[[OffloadKey], bool]) -> bool:
        if position + 1 == len(prompt.keys):
            return False
        child = prompt.keys[position + 1]
        return child == self._admitted or holds(child)

    def _compute(self) -> None:
        """Update the expected hits of each class, just used: up to the first age at which it is worth too little."""
        tables = self._tables
        self._rates, self._evictions = tables.rates, 0
        used = 1.0 - np.cumprod(1.0 - tables.rates, axis=1)
        used = np.concatenate([np.zeros((len(used), 1)), used], axis=1)
        low = np.concatenate([tables.values < self._evicted_worth, np.ones((len(used), 1), bool)], axis=1)
        until = np.minimum(low.argmax(axis=1), self._reach())
        self._expected = used[np.arange(len(used)), until].tolist()

    def _reach(self) -> int:
        """Number of buckets of age that count: those that enough lives came to."""
        lived = np.array(self._tables.ended) + np.array(self._tables.cut)
        lived = lived.reshape(-1, NUM_BUCKETS).sum(axis=0)[::-1].cumsum()[::-1]
        return max(REACH_MIN, int((lived >= SHRINK).sum()))

    def _count_again(self, key: OffloadKey) -> None:
        self._again += self._refused.discard(key)

    def _remember(self, key: OffloadKey) -> None:
        if self._refused.num_young >= REFUSED_KEYS:
            self._refused.turn()
        self._refused.add(key)


class BudgetedAdmission(Predicted):
    """Admission by expected hits within a write budget.

    With a block those before it in its prompt are admitted that the tier lacks. Blocks are sent soon after they were
    admitted, so their bytes are promised to them. Both are forgotten in the second minute after it: the block was given
    up meanwhile, or waits for the tier. A block that no request announced counts as `HITS_MIN`.

    An `on_evict` tier decides as the CPU tier is about to evict a block (`select_evicted`), not when it was stored.
    """

    def __init__(self, models: RequestModels, budget: WriteBudget, rows: int = 0) -> None:
        super().__init__(models, rows=rows)
        self.budget = budget
        self._block_bytes = budget.block_bytes
        self._recent = RecentKeys()
        self._promised = RecentKeys()
        self._time = 0.0
        self._next: OffloadKey | None = None
        self._next_needs = 0

    def on_offer(self, keys: Sequence[OffloadKey]) -> None:
        """Count blocks that were stored. `select_evicted` decides later if they are written."""
        for key in keys:
            self._count_again(key)
        self._advance()

    def select_evicted(
        self, key: OffloadKey, holds: Callable[[OffloadKey], bool], stuck: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        """The blocks to send now because this one is about to be evicted, leaf first.

        It and those of `parents` that the tier lacks, or those of them that there is room for, from the root on. None
        follows one that is `stuck`: it cannot be sent now.
        """
        found = self._prompts.find(key)
        self._advance()
        hits = HITS_MIN if found is None else self.expected_hits(*found)
        if found is not None and self._child_below(*found, holds):
            hits = math.inf
        sent = self._select_front(key, hits, holds, stuck)
        if key not in sent:
            self._remember(key)
        return sent

    def admit_parent(self, key: OffloadKey) -> bool:
        """Admit a block because one after it is sent, if there is room. True if it is admitted."""
        self._advance()
        if key in self._recent:
            return True
        if self.budget.free < self._block_bytes:
            return False
        self._admit(key)
        return True

    def affordable(
        self, keys: Sequence[OffloadKey], holds: Callable[[OffloadKey], bool], waits: Callable[[OffloadKey], bool]
    ) -> Collection[OffloadKey]:
        """Blocks, of these given leaf first, that may be sent now with those before them; these are promised room.

        Without enough of it the blocks nearest to the root are taken. `holds` is true of blocks that the tier has or is
        being sent, `waits` of those that may still be sent: none is without those before it.
        """
        self._advance()
        room = self.budget.room // self._block_bytes
        taken = dict.fromkeys([key for key in reversed(keys) if key in self._promised][: max(0, room)])
        room -= self.budget.promised_bytes // self._block_bytes
        for key in [key for key in reversed(keys) if key not in self._promised]:
            if key in self._promised:  # as one before another
                taken[key] = None
                continue
            before: list[OffloadKey] = []
            for parent in self.parents(key):
                if parent in taken or parent in self._promised or holds(parent):
                    break
                before.append(parent)
            if len(before) < room and all(map(waits, before)):
                taken[key] = None
                room -= 1 + len(before)
                for parent in before:
                    self._promise(parent)
        return taken

    def on_send(self, keys: Sequence[OffloadKey]) -> None:
        """Count blocks that are being written."""
        for key in keys:
            self._recent.discard(key)
            self._unpromise(key)
        self.budget.record_sent(len(keys) * self._block_bytes)

    def on_give_up(self, keys: Sequence[OffloadKey]) -> None:
        """Give back the room of blocks that are not written after all, whether they were admitted or not."""
        for key in keys:
            if self._recent.discard(key):
                self.budget.give_back(self._block_bytes)
            self._unpromise(key)

    def _decides(self, key: OffloadKey, holds: Callable[[OffloadKey], bool]) -> bool:
        found = self._prompts.find(key)
        self._advance()
        if found is not None and self._child_below(*found, holds):
            return self.admit_parent(key)
        if key in self._recent:
            return True
        hits = HITS_MIN if found is None else self.expected_hits(*found)
        if not self.budget.can_admit(hits, self._block_bytes, self._count_lacking(key, holds) * self._block_bytes):
            return False
        self._admit(key)
        for parent in self._lacking(key, holds):
            self._admit(parent)
        return True

    def _select_front(
        self, key: OffloadKey, hits: float, holds: Callable[[OffloadKey], bool], stuck: Callable[[OffloadKey], bool]
    ) -> list[OffloadKey]:
        if key not in self._recent and not self.budget.meets_threshold(hits, self._block_bytes):
            return []
        blocks = [key, *takewhile(lambda parent: not holds(parent), self.parents(key))]
        if any(map(stuck, blocks)):
            return []
        fresh = sum(block not in self._recent for block in blocks)
        blocks = blocks[max(0, fresh - self.budget.free // self._block_bytes) :]
        for block in blocks:
            if block not in self._recent:
                self._admit(block)
        return blocks

    def _advance(self) -> None:
        time = self._model.now
        if time != self._time:
            self._time, self._next = time, None
        if self.budget.advance(time):
            self._recent.turn()
            self.budget.promise(-self._promised.turn() * self._block_bytes)

    def _admit(self, key: OffloadKey) -> None:
        self.budget.record_admitted(self._block_bytes)
        self._recent.add(key)
        if key not in self._promised:
            self._promise(key)

    def _promise(self, key: OffloadKey) -> None:
        self._promised.add(key)
        self.budget.promise(self._block_bytes)

    def _unpromise(self, key: OffloadKey) -> None:
        if self._promised.discard(key):
            self.budget.promise(-self._block_bytes)

    def _lacking(self, key: OffloadKey, holds: Callable[[OffloadKey], bool]) -> Iterator[OffloadKey]:
        """The blocks before this one, the nearest first, that neither are in the tier nor were admitted."""
        return takewhile(lambda parent: parent not in self._recent and not holds(parent), self.parents(key))

    def _count_lacking(self, key: OffloadKey, holds: Callable[[OffloadKey], bool]) -> int:
        """Number of blocks that are `_lacking`. Blocks come leaf first, so those of a prompt are counted once."""
        if key == self._next:
            needed, parent = self._next_needs, next(iter(self.parents(key)), None)
        else:
            lacking = list(self._lacking(key, holds))
            needed, parent = len(lacking), next(iter(lacking), None)
        self._next, self._next_needs = parent if needed else None, needed - 1
        return needed
