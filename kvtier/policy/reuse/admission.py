"""Admission by prediction: a block is written if it is likely to be used while the tier would keep it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from kvtier.options import AdmissionName
from kvtier.policy import RequestModels
from kvtier.policy.admission import Admission, LateAdmission, SecondUse
from kvtier.policy.reuse.prediction.classes import NUM_BUCKETS, bucket_of
from kvtier.policy.reuse.prediction.life_tables import SHRINK, FloatArray
from kvtier.policy.reuse.prediction.model import ReuseModel
from kvtier.policy.reuse.prediction.prompts import Prompt
from kvtier.policy.reuse.prediction.segments import NONE
from kvtier.policy.write_allowance import WriteAllowance
from kvtier.types.keys import OffloadKey

HITS_MIN = 0.15
FOLLOWED_HITS_MIN = 0.2
"""Expected hits of a block that is worth a write, where nothing steers it: in any tier, and in one whose policy follows
requests. That one evicts what is worth little, so more hits are expected of whatever it is sent."""
REACH_MIN = 22
"""Buckets of age that count although nothing lived through them yet: 1,092 s."""
EVICTED_WEIGHT = 1 / 64
COMPUTE_EVICTIONS = 256
REFUSED_KEYS = 1 << 16
"""Blocks that were not admitted that are remembered, twice at most."""


class Predicted(LateAdmission):
    """Admits a block whose expected hits are at least `HITS_MIN`, or what `pace` asks for where writes are limited.

    `followed`: the tier's policy follows requests; then they are at least `FOLLOWED_HITS_MIN`.

    That are the hits until its worth falls below what the tier evicts (a moving mean), from the life tables of the
    stack. A block counts for as much as the best of those after it in its latest prompt, and is admitted if the next
    one is in the tier or was admitted just before: no block is written without those before it. What no request
    announced is admitted, or counts as `HITS_MIN`. Where writes are limited, `allowance` has the last word.
    """

    def __init__(
        self, models: RequestModels, allowance: WriteAllowance | None = None, rows: int = 0, followed: bool = False
    ) -> None:
        model = models.of(ReuseModel)
        self._followed = followed
        self._allowance = allowance
        self._journal = models.journal
        self._tables = model.tables
        self._model = model
        self._prompts = model.keep_prompts()
        self._prompts.keep(rows)
        self._evicted_worth = 0.0
        self._evictions = 0
        self._rates: FloatArray | None = None
        self._expected: list[float] = []
        self._admitted: OffloadKey | None = None
        self._refused: dict[OffloadKey, None] = {}
        self._refused_before: dict[OffloadKey, None] = {}
        self._again = 0

    def admits(self, key: OffloadKey, used_again: bool, holds: Callable[[OffloadKey], bool]) -> bool:
        if not used_again:
            self._count_again(key)
        if self._decided(key, holds):
            self._admitted = key
            return True
        self._remember(key)
        return False

    def offered(self, keys: Sequence[OffloadKey]) -> None:
        self._journal.take_in()
        for key in keys:
            self._count_again(key)
        if self._allowance is not None:
            self._allowance.advance(self._model.now)

    def evicting(
        self, key: OffloadKey, holds: Callable[[OffloadKey], bool], stuck: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        found, allowance = self._find(key), self._allowance
        assert allowance is not None
        allowance.advance(self._model.now)
        hits = HITS_MIN if found is None else self.expected_hits(*found)
        if found is not None and self._child_below(*found, holds):
            hits = math.inf
        sent = allowance.front(key, hits, self.parents, holds, stuck)
        if key not in sent:
            self._remember(key)
        return sent

    def _decided(self, key: OffloadKey, holds: Callable[[OffloadKey], bool]) -> bool:
        found = self._find(key)
        if self._allowance is not None:
            self._allowance.advance(self._model.now)
        if found is None:
            return self._allowance is None or self._allowance.chooses(key, HITS_MIN, self.parents, holds)
        if not self._child_below(*found, holds):
            return self._chosen(self.expected_hits(*found), key, holds)
        return self._allowance is None or self._allowance.admits(key)

    def admit_parent(self, key: OffloadKey) -> None:
        if self._allowance is not None:
            self._allowance.admits(key)

    def parents(self, key: OffloadKey) -> Iterable[OffloadKey]:
        found = self._find(key)
        return (found[0].keys[at] for at in range(found[1] - 1, -1, -1)) if found else ()

    def _find(self, key: OffloadKey) -> tuple[Prompt, int] | None:
        """The latest prompt that has this block, and where."""
        self._journal.take_in()
        return self._prompts.find(key)

    def evicted(self, keys: Sequence[OffloadKey]) -> None:
        self._journal.take_in()
        segments, tables = self._prompts.segments, self._tables
        for seg in map(segments.find, keys):  # each segment counts once, when its first block goes
            if seg != NONE:
                bucket = bucket_of(self._model.now - segments.touched[seg])
                worth = tables.index[segments.kind[seg] * NUM_BUCKETS + bucket]
                self._evicted_worth += EVICTED_WEIGHT * (worth - self._evicted_worth)
        self._evictions += len(keys)

    def affordable(
        self, keys: Sequence[OffloadKey], holds: Callable[[OffloadKey], bool], waits: Callable[[OffloadKey], bool]
    ) -> Collection[OffloadKey]:
        if self._allowance is None:
            return keys
        self._journal.take_in()
        self._allowance.advance(self._model.now)
        return self._allowance.affordable(keys, self.parents, holds, waits)

    def sent(self, keys: Sequence[OffloadKey]) -> None:
        if self._allowance is not None:
            self._allowance.sent(keys)

    def given_up(self, keys: Sequence[OffloadKey]) -> None:
        if self._allowance is not None:
            self._allowance.given_up(keys)

    @property
    def computed_again(self) -> int:
        return self._again

    def expected_hits(self, prompt: Prompt, position: int) -> float:
        """The hits to expect of a block of a prompt while the tier keeps it: the share of its kind that is used."""
        if self._rates is not self._tables.rates or self._evictions >= COMPUTE_EVICTIONS:
            self._compute()
        return max(map(self._expected.__getitem__, self._prompts.kinds(prompt, position)))

    def _chosen(self, hits: float, key: OffloadKey, holds: Callable[[OffloadKey], bool]) -> bool:
        if self._allowance is None:
            return hits >= (FOLLOWED_HITS_MIN if self._followed else HITS_MIN)
        return self._allowance.chooses(key, hits, self.parents, holds)

    def _child_below(self, prompt: Prompt, position: int, holds: Callable[[OffloadKey], bool]) -> bool:
        if position + 1 == len(prompt.keys):
            return False
        child = prompt.keys[position + 1]
        return child == self._admitted or holds(child)

    def _compute(self) -> None:
        """The expected hits of each class, just used: those up to the first age at which it is worth too little."""
        tables = self._tables
        self._rates, self._evictions = tables.rates, 0
        used = 1.0 - np.cumprod(1.0 - tables.rates, axis=1)
        used = np.concatenate([np.zeros((len(used), 1)), used], axis=1)
        low = np.concatenate([tables.values < self._evicted_worth, np.ones((len(used), 1), bool)], axis=1)
        until = np.minimum(low.argmax(axis=1), self._reach())
        self._expected = used[np.arange(len(used)), until].tolist()

    def _reach(self) -> int:
        """How many buckets of age count: those that enough lives came to."""
        lived = np.array(self._tables.ended) + np.array(self._tables.cut)
        lived = lived.reshape(-1, NUM_BUCKETS).sum(axis=0)[::-1].cumsum()[::-1]
        return max(REACH_MIN, int((lived >= SHRINK).sum()))

    def _count_again(self, key: OffloadKey) -> None:
        if key in self._refused or key in self._refused_before:
            self._refused.pop(key, None)
            self._refused_before.pop(key, None)
            self._again += 1

    def _remember(self, key: OffloadKey) -> None:
        if len(self._refused) >= REFUSED_KEYS:
            self._refused, self._refused_before = {}, self._refused
        self._refused[key] = None


def make_admission(
    name: AdmissionName,
    models: RequestModels,
    allowance: WriteAllowance | None = None,
    rows: int = 0,
    followed: bool = False,
) -> Admission | None:
    """The admission of a tier by the name in its options; None for a tier that takes every block.

    `models` are those of the stack; `predicted` asks for the one of `reuse`, whatever the policies of its tiers, and
    keeps to the `allowance`. It may be asked late about blocks that lie in so many `rows`. `followed`: the
    tier's policy follows requests.
    """
    if name == "predicted":
        return Predicted(models, allowance, rows, followed)
    return SecondUse() if name == "second_use" else None
