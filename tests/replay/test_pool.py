"""The GPU block pool: nothing referenced or fenced is reused, the oldest goes first, a key leads to its block."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import IntegrityError
from kvtier.tools.replay.engine import BlockPool
from kvtier.types.keys import OffloadKey, make_key

SIZE = 6


def key(number: int) -> OffloadKey:
    return make_key(bytes([number]) * 4, 0)


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a model: references as a list of holders, contents as a dict, idle order as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.fenced: set[int] = set()
        self.pool = BlockPool(SIZE, self.fenced.__contains__)
        self.held: list[int] = []
        self.keys: dict[int, OffloadKey] = {}
        self.order: list[int] = []

    @rule(count=st.integers(0, SIZE + 1))
    def allocate(self, count: int) -> None:
        empty = [block for block in range(SIZE) if block not in self.keys and block not in self.held]
        idle = [block for block in self.order if block not in self.fenced]
        before = self.pool.evictions
        taken = self.pool.allocate(count)
        if count > len(empty) + len(idle):
            assert taken is None
            return
        assert taken is not None
        evicted = idle[: max(0, count - len(empty))]
        assert sorted(set(taken) - set(empty)) == sorted(evicted)
        assert len(set(taken)) == count
        assert self.pool.evictions - before == len(evicted)
        for block in evicted:
            self.order.remove(block)
            del self.keys[block]
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=st.integers(0, 4))
    def publish(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        if block in self.keys:
            with pytest.raises(IntegrityError):
                self.pool.publish(block, key(number))
            return
        self.pool.publish(block, key(number))
        self.keys[block] = key(number)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release([block])
        if block not in self.held and block in self.keys:
            self.order.append(block)

    @rule(number=st.integers(0, 4))
    def hit(self, number: int) -> None:
        block = self.pool.find(key(number))
        if block is None:
            return
        assert self.keys[block] == key(number)
        self.pool.retain([block])
        self.held.append(block)
        if block in self.order:
            self.order.remove(block)

    @rule(block=st.integers(0, SIZE - 1), up=st.booleans())
    def fence(self, block: int, up: bool) -> None:
        (self.fenced.add if up else self.fenced.discard)(block)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert list(self.pool.coldest()) == self.order
        assert {block: self.pool.key_of(block) for block in range(SIZE) if self.pool.key_of(block)} == self.keys
        assert self.pool.num_used == len(self.keys.keys() | set(self.held))


TestPool = PoolMachine.TestCase


def test_releasing_too_often_is_a_defect() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.release([0])
    with pytest.raises(IntegrityError, match="released more often"):
        pool.release([0])
