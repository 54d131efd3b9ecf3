"""What every eviction policy promises, and each policy against a plain model of its definition."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support_counts import machine

from kvtier.errors import ConfigError, IntegrityError
from kvtier.policy import LRU, POLICIES, make_policy
from kvtier.policy.arc import ARC
from kvtier.policy.ghosts import GhostLists
from kvtier.types.keys import OffloadKey, make_key


def key_of(number: int) -> OffloadKey:
    return make_key(number.to_bytes(8, "big"), number % 3)


def filled(name: str, count: int):
    """A policy with slots 0 .. count - 1 inserted in that order, and the list of their keys."""
    keys = [key_of(slot) for slot in range(count)]
    policy = make_policy(name, count, keys)
    policy.admit(keys)
    policy.insert(range(count))
    return policy, keys


def fingerprints(ghosts: GhostLists, which: int) -> list[int]:
    """Those of a list's ghosts, the oldest first."""
    return [ghosts._fingerprints[ghost] for ghost in ghosts._order.from_coldest(which)]


class PolicyContract:
    """The promises of `EvictionPolicy`; each policy's test class inherits them."""

    name: ClassVar[str]
    bytes_per_slot: ClassVar[int]

    def test_evicts_exactly_what_was_asked_for(self):
        policy, _ = filled(self.name, 8)
        evicted = policy.evict(5, bytearray(8))
        assert len(evicted) == len(set(evicted)) == 5
        assert sorted(evicted + list(policy.coldest())) == list(range(8))

    def test_asking_for_nothing_evicts_nothing(self):
        policy, _ = filled(self.name, 3)
        assert policy.evict(0, bytearray(3)) == []
        assert sorted(policy.coldest()) == [0, 1, 2]

    def test_an_empty_policy_has_nothing_to_give(self):
        policy = make_policy(self.name, 4, [None] * 4)
        assert policy.evict(1, bytearray(4)) is None
        assert list(policy.coldest()) == []

    def test_a_policy_over_no_slots_is_allowed(self):
        policy = make_policy(self.name, 0, [])
        policy.admit([key_of(1)])
        policy.insert([])
        assert policy.evict(1, []) is None
        assert list(policy.coldest()) == []

    def test_eviction_is_all_or_nothing(self):
        policy, _ = filled(self.name, 6)
        before = list(policy.coldest())
        assert policy.evict(6, bytearray([0, 0, 1, 0, 0, 0])) is None
        assert policy.evict(7, bytearray(6)) is None
        assert list(policy.coldest()) == before
        assert sorted(policy.evict(6, bytearray(6))) == list(range(6))

    @pytest.mark.parametrize("seed", range(5))
    def test_held_slots_are_never_chosen_and_keep_their_place(self, seed):
        print(f"seed {seed}")
        rng = random.Random(seed)
        policy, _ = filled(self.name, 50)
        policy.touch([rng.randrange(50) for _ in range(40)])
        holds = [rng.randrange(3) for _ in range(50)]
        order = list(policy.coldest())
        evicted = policy.evict(holds.count(0), holds)
        assert sorted(evicted) == [slot for slot in range(50) if not holds[slot]]
        assert sorted(policy.coldest()) == [slot for slot in range(50) if holds[slot]]
        assert set(order) == set(range(50))

    def test_coldest_is_the_order_of_eviction(self):
        policy, _ = filled(self.name, 20)
        policy.touch([3, 9, 4, 3, 17])
        policy.touch([9, 1])
        order = list(policy.coldest())
        assert policy.evict(20, bytearray(20)) == order

    def test_looking_at_the_coldest_changes_nothing(self):
        policy, _ = filled(self.name, 10)
        policy.touch([2, 5])
        assert next(policy.coldest()) == next(policy.coldest())
        assert list(policy.coldest()) == list(policy.coldest())

    def test_a_removed_slot_is_forgotten_and_may_come_back(self):
        policy, keys = filled(self.name, 5)
        policy.remove([2, 4])
        assert sorted(policy.coldest()) == [0, 1, 3]
        keys[2] = key_of(99)
        policy.admit([keys[2]])
        policy.insert([2])
        assert sorted(policy.coldest()) == [0, 1, 2, 3]
        assert sorted(policy.evict(4, bytearray(5))) == [0, 1, 2, 3]

    def test_an_evicted_slot_may_come_back_with_another_key(self):
        policy, keys = filled(self.name, 3)
        (slot,) = policy.evict(1, bytearray(3))
        keys[slot] = key_of(7)
        policy.admit([keys[slot]])
        policy.insert([slot])
        assert sorted(policy.coldest()) == [0, 1, 2]

    def test_a_parent_never_goes_before_its_children(self):
        policy, _ = filled(self.name, 8)
        policy.touch([7, 6, 5, 4])
        policy.touch([3, 2, 5, 4])
        place = {slot: i for i, slot in enumerate(policy.evict(8, bytearray(8)))}
        assert place[7] < place[6] < place[5] < place[4]
        assert place[3] < place[2] < place[5]

    @pytest.mark.parametrize("call", ["insert", "touch", "renew", "remove"])
    def test_a_slot_in_the_wrong_state_is_our_bug_and_says_so(self, call):
        policy, _ = filled(self.name, 4)
        policy.evict(1, bytearray(4))
        known = next(policy.coldest())
        unknown = ({0, 1, 2, 3} - set(policy.coldest())).pop()
        wrong = known if call == "insert" else unknown
        with pytest.raises(IntegrityError, match=f"slot {wrong} "):
            getattr(policy, call)([wrong])

    def test_aborted_fills_leave_the_policy_whole(self):
        policy, keys = filled(self.name, 10)
        free: list[int] = []
        for number in range(200):
            policy.admit([key_of(1000 + number % 25)])
            if not free:
                free = policy.evict(3, bytearray(10))
            if number % 4:
                slot = free.pop()
                keys[slot] = key_of(1000 + number)
                policy.insert([slot])
            assert sorted(list(policy.coldest()) + free) == list(range(10))

    def test_the_same_calls_end_in_the_same_order(self):
        def run():
            rng = random.Random(11)
            policy, keys = filled(self.name, 64)
            log = []
            for _ in range(400):
                policy.touch(rng.sample(list(policy.coldest()), 3))
                fresh = [key_of(rng.randrange(200)) for _ in range(4)]
                policy.admit(fresh)
                slots = policy.evict(4, bytearray(64))
                log.append(tuple(slots))
                for slot, key in zip(slots, fresh, strict=True):
                    keys[slot] = key
                policy.insert(slots)
            return log, list(policy.coldest())

        assert run() == run()

    def test_memory_is_what_the_module_says(self):
        slots = 20_000
        policy, keys = filled(self.name, slots)
        holds = bytearray(slots)
        for number in range(3 * slots // 100):
            fresh = [key_of(slots + number * 100 + i) for i in range(100)]
            policy.admit(fresh)
            for slot, key in zip(policy.evict(100, holds), fresh, strict=True):
                keys[slot] = key
                policy.insert([slot])
        assert memory_bytes(policy, keys) <= self.bytes_per_slot * slots + 2000


def memory_bytes(thing: object, besides: object) -> int:
    """Bytes of an object and what it holds in its slots and containers, `besides` left out."""
    if thing is besides or thing is None:
        return 0
    total = sys.getsizeof(thing)
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            total += memory_bytes(getattr(thing, name), besides)
    if isinstance(thing, dict):
        total += sum(memory_bytes(key, besides) + memory_bytes(value, besides) for key, value in thing.items())
    elif isinstance(thing, (list, tuple)):
        total += sum(memory_bytes(item, besides) for item in thing)
    return total


class TestLRU(PolicyContract):
    name = "lru"
    bytes_per_slot = 8

    def test_the_longest_unused_goes_first(self):
        policy, _ = filled("lru", 4)
        policy.touch([0, 2])
        assert policy.evict(2, bytearray(4)) == [1, 3]
        assert policy.evict(2, bytearray(4)) == [0, 2]


class TestARC(PolicyContract):
    name = "arc"
    bytes_per_slot = 34

    def test_what_was_used_again_outlives_a_scan(self):
        policy, keys = filled("arc", 4)
        policy.touch([0, 1])
        for number in range(100, 120):
            policy.admit([key_of(number)])
            (slot,) = policy.evict(1, bytearray(4))
            assert slot in (2, 3)
            keys[slot] = key_of(number)
            policy.insert([slot])

    def test_a_ghost_that_comes_back_moves_the_target_and_enters_t2(self):
        policy, keys = filled("arc", 4)
        policy.touch([0, 1])
        assert policy.evict(1, bytearray(4)) == [2]
        policy.admit([key_of(2)])
        assert policy.target == 1.0
        keys[2] = key_of(2)
        policy.insert([2])
        policy.touch([0, 1])
        assert policy.evict(3, [0, 0, 0, 1]) == [2, 0, 1]

    def test_promises_to_aborted_fills_are_bounded(self):
        policy, keys = filled("arc", 8)
        for number in range(1, 20):
            slots = policy.evict(8, bytearray(8))
            policy.admit([keys[slot] for slot in slots])
            assert len(policy._promised) == 8
            keys[:] = [key_of(8 * number + slot) for slot in range(8)]
            policy.insert(range(8))

    def test_only_the_named_policies_exist(self):
        with pytest.raises(ConfigError, match=r"unknown policy 'fifo'; use one of .*arc.*lru"):
            make_policy("fifo", 4, [None] * 4)
        assert set(POLICIES) >= {"lru", "arc"}


class LRUModel:
    """Least recently used, said with an OrderedDict."""

    def __init__(self, num_slots: int, keys: list) -> None:
        self.order: OrderedDict[int, None] = OrderedDict()

    def admit(self, keys) -> None:
        pass

    def insert(self, slots) -> None:
        for slot in slots:
            self.order[slot] = None

    def touch(self, slots) -> None:
        for slot in slots:
            self.order.move_to_end(slot)

    def renew(self, slots) -> None:
        self.touch(slots)

    def remove(self, slots) -> None:
        for slot in slots:
            del self.order[slot]

    def evict(self, count, holds):
        free = [slot for slot in self.order if not holds[slot]]
        if len(free) < count:
            return None
        self.remove(free[:count])
        return free[:count]

    def coldest(self):
        return list(self.order)

    def check(self, policy: LRU) -> None:
        assert list(policy.coldest()) == self.coldest()


class ARCModel:
    """ARC by its definition, one key at a time, on dicts of whole keys."""

    def __init__(self, num_slots: int, keys: list) -> None:
        self.c, self.keys, self.p, self.tie = num_slots, keys, 0.0, False
        self.t1: OrderedDict[int, None] = OrderedDict()
        self.t2: OrderedDict[int, None] = OrderedDict()
        self.b1: OrderedDict[OffloadKey, None] = OrderedDict()
        self.b2: OrderedDict[OffloadKey, None] = OrderedDict()
        self.promised: list[OffloadKey] = []

    def admit(self, keys) -> None:
        for key in keys:
            self.tie = key in self.b2
            if key in self.b1:
                self.p = min(float(self.c), self.p + max(1.0, len(self.b2) / len(self.b1)))
                del self.b1[key]
            elif key in self.b2:
                self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
                del self.b2[key]
            else:
                continue
            if key not in self.promised:
                self.promised = [*self.promised, key][-self.c :]

    def insert(self, slots) -> None:
        for slot in slots:
            if self.keys[slot] in self.promised:
                self.promised.remove(self.keys[slot])
                self.t2[slot] = None
            else:
                self.t1[slot] = None
                if self.b1 and len(self.t1) + len(self.b1) > self.c:
                    self.b1.popitem(last=False)

    def touch(self, slots) -> None:
        for slot in slots:
            self.t1.pop(slot, None)
            self.t2.pop(slot, None)
            self.t2[slot] = None

    def renew(self, slots) -> None:
        for slot in slots:
            (self.t1 if slot in self.t1 else self.t2).move_to_end(slot)

    def remove(self, slots) -> None:
        for slot in slots:
            del (self.t1 if slot in self.t1 else self.t2)[slot]

    def plan(self, holds):
        cold1 = [slot for slot in self.t1 if not holds[slot]]
        cold2 = [slot for slot in self.t2 if not holds[slot]]
        once, order = len(self.t1), []
        while cold1 or cold2:
            first = once > self.p or (self.tie and once == self.p)
            source = cold1 if (first and cold1) or not cold2 else cold2
            once -= source is cold1
            order.append(source.pop(0))
        return order

    def evict(self, count, holds):
        chosen = self.plan(holds)[:count]
        if len(chosen) < count:
            return None
        for slot in chosen:
            source, ghosts = (self.t1, self.b1) if slot in self.t1 else (self.t2, self.b2)
            remember = True
            if len(self.b1) + len(self.b2) == self.c:
                if len(self.t1) + len(self.b1) < self.c:
                    self.b2.popitem(last=False)
                elif self.b1:
                    self.b1.popitem(last=False)
                else:
                    remember = False
            del source[slot]
            if remember:
                ghosts[self.keys[slot]] = None
        return chosen

    def coldest(self):
        return self.plan(bytearray(self.c))

    def check(self, policy: ARC) -> None:
        """The same lists in the same order, the same target, and the paper's bounds."""
        assert policy.target == self.p
        assert list(policy._lists.from_coldest(0)) == list(self.t1)
        assert list(policy._lists.from_coldest(1)) == list(self.t2)
        for which, ghosts in ((0, self.b1), (1, self.b2)):
            alone = GhostLists(self.c, 1)
            for key in ghosts:
                alone.push(0, key)
            assert fingerprints(policy._ghosts, which) == fingerprints(alone, 0)
            assert policy._ghosts.sizes[which] == len(ghosts)
        assert list(policy._promised) == self.promised
        assert len(self.t1) + len(self.b1) <= self.c
        assert len(self.b1) + len(self.b2) <= self.c


class PolicyMachine(RuleBasedStateMachine):
    """A tier in miniature: fills that end later or never, holds, removals; policy and model are told the same."""

    name = "lru"
    model: type = LRUModel

    @initialize(num_slots=st.integers(1, 12))
    def start(self, num_slots):
        self.num_slots = num_slots
        self.keys: list = [None] * num_slots
        self.policy = make_policy(self.name, num_slots, self.keys)
        self.twin = self.model(num_slots, self.keys)
        self.free = list(range(num_slots))
        self.filling: list[tuple[int, OffloadKey]] = []
        self.ready: dict[OffloadKey, int] = {}
        self.holds = bytearray(num_slots)

    def both(self, call, *arguments):
        mine, theirs = getattr(self.policy, call)(*arguments), getattr(self.twin, call)(*arguments)
        assert mine == theirs
        return mine

    @rule(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True))
    def fill(self, numbers):
        under_way = {key for _, key in self.filling}
        wanted = [key for key in map(key_of, numbers) if key not in self.ready and key not in under_way]
        self.both("admit", wanted)
        lacking = len(wanted) - len(self.free)
        if lacking > 0:
            evicted = self.both("evict", lacking, self.holds)
            if evicted is None:
                return
            for slot in evicted:
                del self.ready[self.keys[slot]]
                self.keys[slot] = None
            self.free += evicted
        for key in wanted:
            self.filling.append((self.free.pop(0), key))

    @precondition(lambda self: self.filling)
    @rule(count=st.integers(1, 6))
    def finish(self, count):
        done, self.filling = self.filling[:count], self.filling[count:]
        for slot, key in done:
            self.keys[slot] = key
            self.ready[key] = slot
        self.both("insert", [slot for slot, _ in done])

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abort(self, data):
        slot, _ = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        self.free.append(slot)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def touch(self, data):
        self.both("touch", data.draw(st.lists(st.sampled_from(sorted(self.ready.values())), max_size=8)))

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def renew(self, data):
        self.both("renew", data.draw(st.lists(st.sampled_from(sorted(self.ready.values())), max_size=8)))

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def drop(self, data):
        key = data.draw(st.sampled_from(sorted(self.ready)))
        slot = self.ready.pop(key)
        self.both("remove", [slot])
        self.keys[slot] = None
        self.holds[slot] = 0
        self.free.append(slot)

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), holds=st.integers(0, 2))
    def hold(self, data, holds):
        self.holds[data.draw(st.sampled_from(sorted(self.ready.values())))] = holds

    @rule(count=st.integers(0, 13))
    def demote(self, count):
        evicted = self.both("evict", count, self.holds)
        for slot in evicted or ():
            assert not self.holds[slot]
            del self.ready[self.keys[slot]]
            self.keys[slot] = None
            self.free.append(slot)

    @invariant()
    def same_state(self):
        if not hasattr(self, "twin"):
            return
        assert list(self.policy.coldest()) == self.twin.coldest()
        assert sorted(self.policy.coldest()) == sorted(self.ready.values())
        self.twin.check(self.policy)


class ARCMachine(PolicyMachine):
    name = "arc"
    model = ARCModel


TestLRUAgainstItsModel = machine(PolicyMachine.TestCase, 150, 60)
TestARCAgainstItsModel = machine(ARCMachine.TestCase, 150, 60)


def paper_arc(requests: list[int], c: int):
    """Figure 4 of the ARC paper, line by line; yields (hit, p, T1, T2, B1, B2) after each request."""
    p = 0.0
    t1, t2, b1, b2 = (OrderedDict() for _ in range(4))

    def replace(in_b2: bool) -> None:
        if t1 and ((in_b2 and len(t1) == p) or len(t1) > p):
            b1[t1.popitem(last=False)[0]] = None
        else:
            b2[t2.popitem(last=False)[0]] = None

    for x in requests:
        hit = x in t1 or x in t2
        if hit:
            t1.pop(x, None)
            t2.pop(x, None)
            t2[x] = None
        elif x in b1:
            p = min(c, p + max(1.0, len(b2) / len(b1)))
            del b1[x]
            replace(False)
            t2[x] = None
        elif x in b2:
            p = max(0.0, p - max(1.0, len(b1) / len(b2)))
            del b2[x]
            replace(True)
            t2[x] = None
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.popitem(last=False)
                    replace(False)
                else:
                    t1.popitem(last=False)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.popitem(last=False)
                replace(False)
            t1[x] = None
        yield hit, p, list(t1), list(t2), len(b1), len(b2)


@pytest.mark.parametrize(("seed", "c", "universe"), [(1, 1, 4), (2, 2, 6), (3, 7, 20), (4, 16, 40), (5, 50, 120)])
def test_arc_walks_through_the_states_of_the_paper(seed, c, universe):
    print(f"seed {seed}")
    rng = random.Random(seed)
    hot = [rng.randrange(universe) for _ in range(universe // 3 + 1)]
    requests = [rng.choice(hot) if rng.random() < 0.5 else rng.randrange(universe) for _ in range(4000)]
    keys: list = [None] * c
    policy, where, free, holds = ARC(c, keys), {}, list(range(c)), bytearray(c)
    for step, (x, expected) in enumerate(zip(requests, paper_arc(requests, c), strict=True)):
        slot = where.get(x)
        if slot is not None:
            policy.touch([slot])
        else:
            policy.admit([key_of(x)])
            if not free:
                free = policy.evict(1, holds)
                del where[keys[free[0]].number]
            where[x] = free.pop()
            keys[where[x]] = Numbered(x)
            policy.insert([where[x]])
        t1 = [keys[s].number for s in policy._lists.from_coldest(0)]
        t2 = [keys[s].number for s in policy._lists.from_coldest(1)]
        state = (slot is not None, policy.target, t1, t2, *policy._ghosts.sizes)
        assert state == expected, f"step {step}"


class Numbered(bytes):
    """An offload key that remembers the number it was made of."""

    number: int

    def __new__(cls, number: int):
        self = super().__new__(cls, key_of(number))
        self.number = number
        return self
