"""vLLM's jobs on their way, and the parts they are moved in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.jobs import BlockOutcome, IntArray, JobKind, RegionCut
from kvtier.keys import JobId, OffloadKey


@dataclass(slots=True, eq=False)
class Transfer:
    """One job of vLLM: block i is `keys[i]` in vLLM's row `chunks[i]`, in the order of the prefix, root first.

    `parts` are the tier's jobs that have not ended; `slots[i]` is the place of a block in an owned tier.
    """

    job_id: int
    kind: JobKind
    keys: Sequence[OffloadKey]
    chunks: IntArray
    request_id: str
    started: float
    parts: set[JobId] = field(default_factory=set)
    num_parts: int = 0
    slots: dict[int, int] = field(default_factory=dict)
    bytes_moved: int = 0
    seconds: float = 0.0
    _outcomes: dict[int, BlockOutcome] = field(default_factory=dict)

    def settle(self, blocks: Iterable[int], outcome: BlockOutcome) -> None:
        """What became of these blocks. The first word counts."""
        for block in blocks:
            self._outcomes.setdefault(block, outcome)

    def settle_rest(self, outcome: BlockOutcome) -> int:
        """What became of all blocks of which nothing is known yet; returns how many those are."""
        before = len(self._outcomes)
        self.settle(range(len(self.keys)), outcome)
        return len(self.keys) - before

    def succeeded(self, block: int) -> bool:
        """True if the block's bytes are where the job wanted them."""
        outcome = self._outcomes.get(block)
        return outcome is not None and outcome.ok

    @property
    def ok(self) -> bool:
        """True when every block succeeded."""
        return all(self.succeeded(block) for block in range(len(self.keys)))

    @property
    def good_keys(self) -> list[OffloadKey]:
        """The keys whose blocks succeeded."""
        return [key for block, key in enumerate(self.keys) if self.succeeded(block)]

    @property
    def failed_keys(self) -> list[OffloadKey]:
        """The keys whose blocks did not."""
        return [key for block, key in enumerate(self.keys) if not self.succeeded(block)]


@dataclass(slots=True, eq=False)
class Part:
    """One job of the tier: `members` of a transfer, in the order of eviction, and in the `order` of the job's groups.

    `slots` and `generations` stand in `order`.
    """

    transfer: Transfer
    order: list[int]
    members: list[int]
    slots: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    cuts: tuple[RegionCut, ...] = ()

    def take_slots(self, generation_of: Sequence[int]) -> None:
        """Note where the blocks are, and under which generations."""
        self.slots = [self.transfer.slots[i] for i in self.order]
        self.generations = [generation_of[slot] for slot in self.slots]
