"""vLLM's jobs on their way, and the parts they are moved in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.jobs import BlockOutcome, GroupTransfer, IntArray, JobKind, RegionCut, int_array
from kvtier.keys import GroupIndex, JobId, OffloadKey, key_group


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


class Part:
    """One job of the tier: `members` of a transfer as they age, and in `order` as the job names them, group by group.

    `slots` and `generations` stand in `order`; they are empty in a shared tier.
    """

    __slots__ = ("_by_group", "cuts", "generations", "members", "order", "slots", "transfer")

    def __init__(self, transfer: Transfer, members: Sequence[int]) -> None:
        self.transfer = transfer
        self.members = members
        self._by_group: dict[GroupIndex, list[int]] = {}
        for i in members:
            self._by_group.setdefault(key_group(transfer.keys[i]), []).append(i)
        self.order = [i for group in self._by_group.values() for i in group]
        self.slots: list[int] = []
        self.generations: list[int] = []
        self.cuts: tuple[RegionCut, ...] = ()

    def take_slots(self, generation_of: Sequence[int]) -> None:
        """Note where the blocks are, and under which generations."""
        self.slots = [self.transfer.slots[i] for i in self.order]
        self.generations = [generation_of[slot] for slot in self.slots]

    def groups(self) -> tuple[GroupTransfer, ...]:
        """The job's groups, with vLLM's rows as their staging."""
        found = []
        start = 0
        for group, members in self._by_group.items():
            end = start + len(members)
            keys = tuple(self.transfer.keys[i] for i in members)
            chunks = self.transfer.chunks[int_array(members)]
            slots, generations = int_array(self.slots[start:end]), int_array(self.generations[start:end])
            found.append(GroupTransfer(group, keys, chunks, slots, generations))
            start = end
        return tuple(found)
