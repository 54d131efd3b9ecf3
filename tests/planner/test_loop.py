"""A serving loop in miniature beside a naive planner: the same plans and fences, never wrong bytes under a store."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support_counts import machine

from kvtier.errors import UsageError
from kvtier.planner import StoreMode, StorePlanner
from kvtier.types.jobs import LATE, STORED, BlockOutcome, BlockStatus, DropReason, dropped, failed
from kvtier.types.keys import RequestId, make_key

PRESENT = BlockOutcome(BlockStatus.PRESENT)
OUTCOMES = st.sampled_from([STORED, PRESENT, dropped(DropReason.NO_ROW), LATE, failed(5)])
REQUESTS = st.sampled_from(["r1", "r2", "r3"])


@dataclass(eq=False)
class Held:
    """An offloaded block in the GPU. `request` is None once it ended; `known` ends with reuse, abort and reset."""

    request: str | None
    group: int
    key: bytes
    place: tuple[int, ...]
    known: bool = True
    state: str = "resident"


class NaivePlanner:
    """What the planner promises, by looking at all there is every time."""

    def __init__(self, mode, most_fenced):
        self.eager, self.most_fenced = mode is StoreMode.EAGER, most_fenced
        self.held: list[Held] = []
        self.queue: list[Held] = []
        self.left_out = 0

    def known(self):
        return [held for held in self.held if held.known]

    def busy(self):
        return [held for held in self.held if held.state in ("queued", "in flight")]

    def fenced(self):
        return {block for held in self.busy() for block in held.place}

    def computed(self, request, group, keys, places):
        queued = 0
        for key, place in zip(keys, places, strict=True):
            same = [held for held in self.known() if (held.key, held.place) == (key, place)]
            if not same:
                same = [Held(request, group, key, place)]
                self.held += same
            queued += self.eager and self.enqueue(same[0])
        return queued

    def about_to_evict(self, blocks):
        if self.eager:
            return 0
        return sum(self.enqueue(held) for block in blocks for held in self.known() if block in held.place)

    def enqueue(self, held):
        if held.state != "resident" or held.key in [busy.key for busy in self.busy()]:
            return False
        if self.most_fenced is not None and len(self.fenced() | set(held.place)) > self.most_fenced:
            self.left_out += 1
            return False
        held.state = "queued"
        self.queue.append(held)
        return True

    def take(self, max_blocks):
        taken, self.queue = self.queue[:max_blocks], self.queue[max_blocks:]
        for held in taken:
            held.state = "in flight"
        return [[held for held in taken if held.group == group] for group in sorted({held.group for held in taken})]

    def finish(self, parts, outcomes):
        for i, part in enumerate(parts):
            for j, held in enumerate(part):
                held.state = "stored" if outcomes is not None and outcomes[i][j].ok else "resident"

    def forget(self, which):
        for held in which:
            held.known = False
            if held in self.queue:
                self.queue.remove(held)
                held.state = "dropped"

    def reused(self, blocks):
        self.forget([held for held in self.known() if set(blocks) & set(held.place)])

    def end_request(self, request, aborted):
        if aborted:
            self.forget([held for held in self.known() if held.request == request])
        for held in self.held:
            held.request = None if held.request == request else held.request


class ServingLoop(RuleBasedStateMachine):
    """A GPU pool that obeys the fence and a prefix cache over it, which also holds copies.

    The content of a sub-block is the chain of tokens up to it, so offloaded blocks that begin alike share GPU blocks
    and part at any sub-block. Whenever a store begins or ends, the bytes it reads are those of its keys.
    """

    POOL = 12

    @initialize(mode=st.sampled_from(list(StoreMode)), factor=st.integers(1, 3), bounded=st.booleans())
    def start(self, mode, factor, bounded):
        self.factor = factor
        self.most_fenced = 2 * factor if bounded else None
        self.planner = StorePlanner(mode, factor, self.most_fenced)
        self.naive = NaivePlanner(mode, self.most_fenced)
        # What is really in the memory: (epoch, group, tokens up to here), or None once a block was handed out again.
        self.memory: list = [None] * self.POOL
        # What the bytes of a key are, one entry for each sub-block.
        self.contents: dict = {}
        self.plans: list = []
        self.epoch = 0

    @rule(
        data=st.data(),
        blocks=st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=3), min_size=1, max_size=3),
        head=st.integers(0, 2),
        group=st.integers(0, 1),
        request=REQUESTS,
    )
    def compute(self, data, blocks, head, group, request):
        """Every offloaded block hits what it can in the prefix cache, and the pool hands out blocks for the rest."""
        used: set = set()
        keys, places = [], []
        for tokens in blocks:
            chain = [head, *tokens[: self.factor - 1]]
            contents = [(self.epoch, group, tuple(chain[: sub + 1])) for sub in range(self.factor)]
            place = self.hit(data, contents, used)
            free = [b for b in range(self.POOL) if not self.planner.fenced(b) and b not in used | set(place)]
            missing = self.factor - len(place)
            if len(free) < missing:
                break
            fresh = data.draw(st.permutations(free))[:missing]
            self.planner.reused(fresh)
            self.naive.reused(fresh)
            for block, content in zip(fresh, contents[len(place) :], strict=True):
                self.memory[block] = content
            used.update(place := (*place, *fresh))
            keys.append(make_key(bytes([self.epoch, *chain]), group))
            self.contents[keys[-1]] = contents
            places.append(place)
        queued = self.planner.computed(RequestId(request), group, keys, [b for place in places for b in place])
        assert queued == self.naive.computed(request, group, keys, places)

    def hit(self, data, contents, used):
        """GPU blocks that hold the first of these contents, any copy of each; the cache may also have missed them."""
        place: list = []
        for content in contents[: data.draw(st.integers(0, self.factor))]:
            copies = [b for b in range(self.POOL) if self.memory[b] == content and b not in used]
            if not copies:
                break
            place.append(data.draw(st.sampled_from(copies)))
        return tuple(place)

    @rule(data=st.data())
    def allocate_without_filling(self, data):
        """A block handed out to a request that has not filled it yet: no longer what it was."""
        block = data.draw(st.integers(0, self.POOL - 1))
        if block in self.naive.fenced():
            with pytest.raises(UsageError, match=f"GPU block {block} was reused"):
                self.planner.reused([block])
        else:
            self.planner.reused([block])
            self.naive.reused([block])
            self.memory[block] = None

    @rule(blocks=st.lists(st.integers(0, POOL - 1), max_size=6))
    def about_to_evict(self, blocks):
        assert self.planner.about_to_evict(blocks) == self.naive.about_to_evict(blocks)

    @rule(max_blocks=st.integers(1, 5))
    def take(self, max_blocks):
        plan, parts = self.planner.take(max_blocks), self.naive.take(max_blocks)
        assert (plan is None) == (not parts)
        if plan is None:
            return
        assert [(group.group, list(group.keys)) for group in plan.groups] == [
            (part[0].group, [held.key for held in part]) for part in parts
        ]
        for group, part in zip(plan.groups, parts, strict=True):
            assert group.runs.gpu_blocks.tolist() == [block for held in part for block in held.place]
        self.plans.append((plan, parts))
        self.check_bytes(plan)
        under_way = [key for plan, _ in self.plans for group in plan.groups for key in group.keys]
        assert len(under_way) == len(set(under_way))

    @precondition(lambda self: self.plans)
    @rule(data=st.data())
    def end_store(self, data):
        plan, parts = self.plans.pop(data.draw(st.integers(0, len(self.plans) - 1)))
        self.check_bytes(plan)
        outcomes = [[data.draw(OUTCOMES) for _ in group.keys] for group in plan.groups]
        outcomes = data.draw(st.sampled_from([outcomes, outcomes, None]))
        self.planner.finish(plan, outcomes)
        self.naive.finish(parts, outcomes)

    @rule(request=REQUESTS, aborted=st.booleans())
    def end_request(self, request, aborted):
        (self.planner.abort_request if aborted else self.planner.end_request)(RequestId(request))
        self.naive.end_request(request, aborted)

    @rule()
    def reset(self):
        self.planner.reset()
        self.naive.forget(self.naive.known())
        self.epoch += 1

    def check_bytes(self, plan):
        for group in plan.groups:
            positions, subs, ids = group.runs.pages()
            assert group.runs.covers_whole(len(group.keys), self.factor).all()
            for position, sub, block in zip(positions.tolist(), subs.tolist(), ids.tolist(), strict=True):
                assert self.memory[block] == self.contents[group.keys[position]][sub]

    @invariant()
    def fenced_while_needed_and_no_longer(self):
        if not hasattr(self, "planner"):
            return
        fenced = {block for block in range(self.POOL) if self.planner.fenced(block)}
        assert fenced == self.naive.fenced()
        assert self.planner.num_fenced == len(fenced)
        assert self.most_fenced is None or len(fenced) <= self.most_fenced
        assert self.planner.num_queued == len(self.naive.queue)
        assert self.planner.num_in_flight == len(self.naive.busy()) - len(self.naive.queue)
        assert self.planner.left_out == self.naive.left_out

    def teardown(self):
        """When everything has ended nothing is fenced, and nothing is remembered of blocks that are gone."""
        if not hasattr(self, "planner"):
            return
        for plan in [*(plan for plan, _ in self.plans), *iter(lambda: self.planner.take(100), None)]:
            self.check_bytes(plan)
            self.planner.finish(plan, None)
        self.planner.reused(range(self.POOL))
        assert self.planner.num_fenced == self.planner.num_queued == self.planner.num_in_flight == 0
        assert not self.planner._holding
        assert not self.planner._busy
        assert not self.planner._requests


TestServingLoop = machine(ServingLoop.TestCase, 200, 50)
