"""Plans of stores for an engine's own loop: what to store when, never twice, and never from a block that was reused.

A serving loop calls the planner at these points::

    planner.computed(request_id, group, keys, gpu_blocks)    # these offloaded blocks became full
    planner.about_to_evict(pool.coldest(64))                 # the pool will soon reuse these
    plan = planner.take(max_blocks=256)                      # None, or a plan to hand to the stack ...
    planner.finish(plan, result.outcomes)                    # ... and always this once its store has ended
    planner.fenced(block)                                    # the pool skips such a block
    planner.reused(blocks)                                   # the pool hands these out for new content
    planner.end_request(request_id)                          # or abort_request

The loop is the same in both modes; the mode decides whether `computed` or `about_to_evict` queues a store.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from itertools import count, islice
from operator import eq
from typing import Generic, TypeVar

from kvtier.errors import IntegrityError, UsageError
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import BlockOutcome, GPUGroup
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId

P = TypeVar("P", bound=Hashable)
T = TypeVar("T", bound=Hashable)


class PlaceIndex(Generic[P, T]):
    """The things at each place, in the order they were added. A place counts while there is at least one thing.

    As a fence, the places are the ids of GPU blocks that must not be reused, and the things are the stores that need
    them. Two GPU blocks with one hash are two places, and the end of one store leaves the fence of the other.
    """

    __slots__ = ("_things",)

    def __init__(self) -> None:
        self._things: dict[P, dict[T, None]] = {}

    def add(self, places: Iterable[P], thing: T) -> None:
        """Add a thing at each of its places. IntegrityError if it is at one of them already."""
        for place in places:
            things = self._things.setdefault(place, {})
            if thing in things:
                raise IntegrityError(f"the same thing was added twice at {place}")
            things[thing] = None

    def remove(self, places: Iterable[P], thing: T) -> None:
        """Remove a thing from each of its places. IntegrityError if it is not at one of them."""
        for place in places:
            things = self._things.get(place, {})
            if thing not in things:
                raise IntegrityError(f"what was removed is not at {place}")
            del things[thing]
            if not things:
                del self._things[place]

    def at(self, place: P) -> Collection[T]:
        """The things at a place, in the order they were added; empty if there are none."""
        return self._things.get(place, ())

    def pop(self, place: P) -> Collection[T]:
        """Remove and return the things at one place; they stay at their others."""
        return self._things.pop(place, ())

    def __iter__(self) -> Iterator[P]:
        return iter(self._things)

    def __contains__(self, place: P) -> bool:
        return place in self._things

    def __len__(self) -> int:
        """Places with at least one thing, each counted once."""
        return len(self._things)


class StoreMode(StrEnum):
    """EAGER: full blocks are stored as they are computed. LAZY: what the GPU pool is about to evict is stored."""

    EAGER = "eager"
    LAZY = "lazy"


@dataclass(frozen=True, slots=True, eq=False)
class StorePlan:
    """Blocks to store together; `groups` go into a TransferJob as they are. Its GPU blocks are fenced until
    `StorePlanner.finish` is called."""

    plan_id: int
    groups: tuple[GPUGroup, ...]

    @property
    def num_blocks(self) -> int:
        """Offloaded blocks in this plan."""
        return sum(len(group.keys) for group in self.groups)


class _State(Enum):
    RESIDENT = auto()
    QUEUED = auto()
    IN_FLIGHT = auto()
    STORED = auto()


@dataclass(slots=True, eq=False)
class _Block:
    """An offloaded block in the GPU: its key and the GPU blocks that hold it, first sub-block first."""

    request_id: RequestId
    group: int
    key: OffloadKey
    gpu_blocks: tuple[int, ...]
    state: _State = _State.RESIDENT

    def agrees_with(self, other: _Block) -> bool:
        """True if another offloaded block can be in the GPU together with this one, seeing the GPU blocks they share.

        Requests that part inside an offloaded block share its first sub-blocks, so a shared GPU block is the same
        sub-block of both, and the last one belongs to one key only. What comes before a shared GPU block need not be
        shared: a prefix cache that holds two copies of it may give one request the one and the next the other.
        """
        mine, others = self.gpu_blocks, other.gpu_blocks
        if self.group != other.group or (self.key != other.key and mine[-1] == others[-1]):
            return False
        return len(set(mine).intersection(others)) == [*map(eq, mine, others)].count(True)


class StorePlanner:
    """Decides which full blocks to store and fences their GPU blocks until the store has ended, however it ended.

    Pure, synchronous and deterministic. GPU block ids are those of one pool; an engine with a pool for each group has
    a planner for each pool. At most `max_fenced_blocks` GPU blocks are fenced at once (None: as many as there are);
    what would go beyond is left out and counted in `left_out`.

    With a factor above 1 a GPU block may belong to several offloaded blocks: requests that the engine's prefix cache
    gave the same first GPU blocks and that went on differently. Each is a block of its own, and the GPU block is
    fenced until the stores of all of them have ended.

    A key is planned once at a time: while its store is queued or in flight no other GPU block with that key is
    planned. A block that was stored is not planned again while it stays in the GPU; one whose store was dropped or
    failed may be, when the loop names it again. `_holding` are the known blocks by GPU block, `_busy` those queued or
    in flight by key.
    """

    def __init__(self, mode: StoreMode, factor: int = 1, max_fenced_blocks: int | None = None) -> None:
        """`factor` is the layout's block_size_factor: GPU blocks per offloaded block."""
        if factor < 1:
            raise UsageError(f"the block size factor must be at least 1, got {factor}")
        if max_fenced_blocks is not None and max_fenced_blocks < factor:
            raise UsageError(
                f"one offloaded block fences {factor} GPU blocks, max_fenced_blocks is {max_fenced_blocks}"
            )
        self.mode = mode
        self.left_out = 0
        self._factor = factor
        self._max_fenced = max_fenced_blocks
        self._fence: PlaceIndex[int, _Block] = PlaceIndex()
        self._holding: PlaceIndex[int, _Block] = PlaceIndex()
        self._requests: PlaceIndex[RequestId, _Block] = PlaceIndex()
        self._queue: dict[_Block, None] = {}
        self._busy: dict[OffloadKey, _Block] = {}
        self._plans: dict[int, list[list[_Block]]] = {}
        self._plan_ids = count()

    @property
    def num_queued(self) -> int:
        """Offloaded blocks waiting for `take`."""
        return len(self._queue)

    @property
    def num_in_flight(self) -> int:
        """Offloaded blocks taken and not finished."""
        return len(self._busy) - len(self._queue)

    @property
    def num_fenced(self) -> int:
        """GPU blocks that must not be reused now."""
        return len(self._fence)

    def fenced(self, block: int) -> bool:
        """True while a queued store or one in flight needs this GPU block as it is: the pool must not reuse it."""
        return block in self._fence

    def computed(self, request_id: RequestId, group: int, keys: Sequence[OffloadKey], gpu_blocks: Sequence[int]) -> int:
        """Offloaded blocks of a request became full: `keys[i]` is in `gpu_blocks[i * factor : (i + 1) * factor]`.

        Name each block once, in the step in which the last of its GPU blocks became full. A block with a negative
        GPU block id has a hole (null block) and is left alone. Eager mode queues the blocks, lazy mode only remembers
        where they are. Returns how many were queued.

        A GPU block may be named again for another offloaded block that begins with the same content: as the same
        sub-block, and not as the last one. Any other use of a GPU block shows that its content is new; what it held is
        forgotten. Raises UsageError, and changes nothing, if such a GPU block is fenced: it was reused too early.
        """
        factor = self._factor
        if len(gpu_blocks) != factor * len(keys):
            raise UsageError(
                f"{len(keys)} offloaded blocks need {factor * len(keys)} GPU blocks, got {len(gpu_blocks)}"
            )
        places = [tuple(gpu_blocks[i * factor : (i + 1) * factor]) for i in range(len(keys))]
        named = zip(keys, places, strict=True)
        whole = [_Block(request_id, group, key, place) for key, place in named if min(place) >= 0]
        self._check_computed(whole)
        known = [self._find(block) or self._remember(block) for block in whole]
        return sum(map(self._enqueue, known)) if self.mode is StoreMode.EAGER else 0

    def about_to_evict(self, gpu_blocks: Iterable[int]) -> int:
        """The pool will soon reuse these GPU blocks, coldest first. Returns how many offloaded blocks were queued.

        Lazy mode queues the offloaded blocks they belong to and fences all their GPU blocks, so call it early and let
        the pool go on with blocks that are not fenced. Blocks that were not named, stored ones and those
        in flight are passed over. Eager mode does nothing here.
        """
        if self.mode is StoreMode.EAGER:
            return 0
        return sum(self._enqueue(block) for gpu_block in gpu_blocks for block in self._holding.at(gpu_block))

    def take(self, max_blocks: int) -> StorePlan | None:
        """The next up to `max_blocks` offloaded blocks to store, in the order they were queued; None if there are none.

        They count as in flight from here on; `finish` must follow, however the store ends.
        """
        taken = list(islice(self._queue, max(0, max_blocks)))
        if not taken:
            return None
        groups: dict[int, list[_Block]] = {}
        for block in taken:
            del self._queue[block]
            block.state = _State.IN_FLIGHT
            groups.setdefault(block.group, []).append(block)
        plan_id = next(self._plan_ids)
        blocks = [groups[group] for group in sorted(groups)]
        self._plans[plan_id] = blocks
        return StorePlan(plan_id, tuple(self._transfer(part) for part in blocks))

    def finish(self, plan: StorePlan, outcomes: Sequence[Sequence[BlockOutcome]] | None) -> None:
        """A plan's store has ended and nothing reads its GPU blocks any more: their fence comes down.

        `outcomes[i][j]` belongs to key j of the plan's i-th group, as in JobResult; None means that nothing is known
        to be stored (the store never began, or ended in an exception). Raises UsageError, and changes nothing, for a
        plan that was finished before or outcomes of another shape.
        """
        blocks = self._plans.get(plan.plan_id)
        if blocks is None:
            raise UsageError(f"store plan {plan.plan_id} is not in flight")
        if outcomes is not None and [len(part) for part in outcomes] != [len(part) for part in blocks]:
            raise UsageError(f"the outcomes of store plan {plan.plan_id} do not match its groups")
        del self._plans[plan.plan_id]
        for i, part in enumerate(blocks):
            for j, block in enumerate(part):
                self._release(block)
                stored = outcomes is not None and outcomes[i][j].ok
                block.state = _State.STORED if stored else _State.RESIDENT

    def reused(self, gpu_blocks: Sequence[int]) -> None:
        """The pool hands these GPU blocks out for new content; what they held is forgotten.

        Must be called before the content changes, in lazy mode without exception: a block that counts as
        resident is stored under its old key. Raises UsageError, and changes nothing, if one of them is fenced.
        """
        for gpu_block in gpu_blocks:
            if gpu_block in self._fence:
                raise UsageError(f"GPU block {gpu_block} was reused while a store still needs it")
        for gpu_block in gpu_blocks:
            for known in list(self._holding.at(gpu_block)):
                self._drop(known)

    def end_request(self, request_id: RequestId) -> None:
        """A request ended well. Its blocks stay where they are and its stores go on."""
        self._requests.pop(request_id)

    def abort_request(self, request_id: RequestId) -> None:
        """A request was aborted, and what it computed is not to be stored: queued stores are dropped.

        Stores in flight stay fenced until they are finished, because aborting does not stop a copy.
        """
        for block in self._requests.pop(request_id):
            self._drop(block)

    def reset(self) -> None:
        """Forgets what the GPU holds (new weights). Stores in flight stay fenced until finished."""
        for gpu_block in list(self._holding):
            for block in list(self._holding.at(gpu_block)):
                self._drop(block)
        self._requests = PlaceIndex()

    def _check_computed(self, whole: Sequence[_Block]) -> None:
        named: set[int] = set()
        for block in whole:
            for gpu_block in block.gpu_blocks:
                if gpu_block in named:
                    raise UsageError(f"GPU block {gpu_block} was named twice")
                named.add(gpu_block)
                if not all(stored.agrees_with(block) for stored in self._fence.at(gpu_block)):
                    raise UsageError(f"GPU block {gpu_block} was reused while a store still needs it")

    def _find(self, block: _Block) -> _Block | None:
        """The same key in the same GPU blocks, if that is known."""
        known = self._holding.at(block.gpu_blocks[-1])
        return next((old for old in known if old.key == block.key and old.gpu_blocks == block.gpu_blocks), None)

    def _remember(self, block: _Block) -> _Block:
        """Note a new offloaded block; unfenced ones that cannot be in the GPU together with it are gone."""
        for gpu_block in block.gpu_blocks:
            for known in list(self._holding.at(gpu_block)):
                if not known.agrees_with(block):
                    self._drop(known)
        self._holding.add(block.gpu_blocks, block)
        self._requests.add((block.request_id,), block)
        return block

    def _enqueue(self, block: _Block) -> bool:
        if block.state is not _State.RESIDENT or block.key in self._busy:
            return False
        if self._max_fenced is not None:
            more = sum(gpu_block not in self._fence for gpu_block in block.gpu_blocks)
            if len(self._fence) + more > self._max_fenced:
                self.left_out += 1
                return False
        block.state = _State.QUEUED
        self._busy[block.key] = block
        self._fence.add(block.gpu_blocks, block)
        self._queue[block] = None
        return True

    def _release(self, block: _Block) -> None:
        self._fence.remove(block.gpu_blocks, block)
        del self._busy[block.key]

    def _drop(self, block: _Block) -> None:
        """Forget an offloaded block; a queued store of it is dropped, one in flight keeps its fence."""
        if block.state is _State.QUEUED:
            del self._queue[block]
            self._release(block)
        self._holding.remove(block.gpu_blocks, block)
        if block in self._requests.at(block.request_id):
            self._requests.remove((block.request_id,), block)

    def _transfer(self, blocks: list[_Block]) -> GPUGroup:
        gpu_blocks = [gpu_block for block in blocks for gpu_block in block.gpu_blocks]
        return GPUGroup(
            GroupIndex(blocks[0].group), tuple(block.key for block in blocks), GPURuns.whole(gpu_blocks, self._factor)
        )
