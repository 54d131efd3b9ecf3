"""The conformance suite of eviction policies: subclass `PolicyTests` and name the class of the policy in it.

A policy that follows requests takes `RequestPolicyTests`, one that keeps prefixes whole `PrefixPolicyTests`.

Needs pytest and hypothesis (`pip install "kvtier[test]"`), no plugins.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.policy import EvictionPolicy, RequestModels, RequestPolicy, make_policy
from kvtier.policy.base import MODEL_BYTES_MAX
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId, make_key
from kvtier.types.requests import RequestUse

SLOTS = 24
Ids = Sequence[int]
seeds = st.integers(0, 2**32 - 1)


def key_of(number: int) -> OffloadKey:
    """A key of group 0 that is the same for the same number."""
    return make_key(number.to_bytes(16, "big"), 0)


class PolicyTier:
    """A tier of one policy, without bytes: a directory, slots and pins, kept as the control plane keeps them.

    It raises AssertionError as soon as the policy breaks its contract. `log` has every choice of the policy.
    """

    def __init__(self, policy: type[EvictionPolicy], num_slots: int, models: RequestModels | None = None) -> None:
        self.models = models or RequestModels([policy])
        self.keys: list[OffloadKey | None] = [None] * num_slots
        self.policy = make_policy(policy, num_slots, self.keys, self.models)
        self.request_policy = self.policy if isinstance(self.policy, RequestPolicy) else None
        self.slots: dict[OffloadKey, int] = {}
        self.free = list(range(num_slots))
        self.pins = bytearray(num_slots)
        self.time = 0.0
        self.log: list[tuple[int, ...]] = []
        self._requests = 0

    def serve(
        self, numbers: Ids, time: float | None = None, output_tokens: int | None = None, output_blocks: int = 0
    ) -> int:
        """Serves a request, given by its blocks in prefix order: returns how long a prefix it hits, then stores the
        rest.

        The last `output_blocks` of them are not announced as it begins, but when all else is stored.
        """
        chain = [key_of(number) for number in dict.fromkeys(numbers)]
        self.time = max(self.time, self.time + 1.0 if time is None else time)
        hits = next((i for i, key in enumerate(chain) if key not in self.slots), len(chain))
        prompt, output = chain[: len(chain) - output_blocks], chain[len(chain) - output_blocks :]
        request = self._begin(prompt)
        for key in chain[:hits]:
            self.pins[self.slots[key]] += 1
        self.place([key for key in prompt if key not in self.slots])
        for key in chain[:hits]:
            self.pins[self.slots[key]] -= 1
        self._extend(request, output)
        if self.request_policy is None:
            self.policy.touch([self.slots[key] for key in reversed(chain) if key in self.slots])
        else:
            self._end(request, output_tokens)
        self.check()
        return hits

    def _begin(self, chain: Sequence[OffloadKey]) -> RequestId:
        self._requests += 1
        request = RequestId(str(self._requests))
        if self.request_policy is not None and chain:
            new = sum(key not in self.slots for key in chain)
            use = RequestUse(request, self.time, tuple(chain), GroupIndex(0), new)
            for model in self.models:
                model.advance(self.time)
            self.request_policy.advance(self.time)
            for model in self.models:
                model.begin_request(use)
            self.request_policy.begin_request(use, [self.slots.get(key, -1) for key in chain])
        return request

    def _extend(self, request: RequestId, chain: Sequence[OffloadKey]) -> None:
        """The request goes on, block by block."""
        for key in chain:
            if self.request_policy is not None:
                for model in self.models:
                    model.extend_request(request, GroupIndex(0), (key,))
                self.request_policy.extend_request(request, GroupIndex(0), (key,), (self.slots.get(key, -1),))
            if key not in self.slots:
                self.place([key])

    def _end(self, request: RequestId, output_tokens: int | None) -> None:
        assert self.request_policy is not None
        for model in self.models:
            model.end_request(request, output_tokens)
        self.request_policy.end_request(request, output_tokens)

    def place(self, fresh: Sequence[OffloadKey]) -> None:
        """Store keys that are not here, in prefix order: bypass, admit, evict, insert, as far as there is room."""
        unpinned = sum(not self.pins[slot] for slot in self.slots.values())
        evictions = len(fresh) - len(self.free)
        if self.request_policy is not None and evictions > 0:
            left_out = list(self.request_policy.bypass(fresh, evictions, self.pins))
            assert len(set(left_out)) == len(left_out)
            assert all(0 <= index < len(fresh) for index in left_out)
            assert not (left_out and self.request_policy.admits_everything)
            self.log.append(tuple(left_out))
            fresh = [key for index, key in enumerate(fresh) if index not in set(left_out)]
        fresh = fresh[: len(self.free) + unpinned]
        if fresh:
            self.policy.admit(fresh[::-1])
            if len(fresh) > len(self.free):
                self.evict(len(fresh) - len(self.free))
            slots = [self.free.pop() for _ in fresh]
            for slot, key in zip(slots, fresh, strict=True):
                self.keys[slot], self.slots[key] = key, slot
            self.policy.insert(slots[::-1])

    def evict(self, count: int) -> None:
        """Evict `count` slots, which there are."""
        victims = self.policy.evict(count, self.pins)
        assert victims is not None, f"{count} slots could be evicted, and none was"
        assert len(victims) == len(set(victims)) == count
        assert not any(self.pins[slot] for slot in victims), "a pinned slot was evicted"
        self.log.append(tuple(victims))
        self._vacate(victims)

    def remove(self, numbers: Ids) -> None:
        """The content of these blocks is gone for good, where they are here."""
        slots = [self.slots[key] for key in map(key_of, dict.fromkeys(numbers)) if key in self.slots]
        self.policy.remove(slots)
        self._vacate(slots)

    def forget_coldest(self, count: int) -> None:
        """The tier evicts along `coldest` by its own choice."""
        slots = list(self.policy.coldest())[:count]
        self.policy.forget(slots)
        self._vacate(slots)

    def _vacate(self, slots: Ids) -> None:
        for slot in slots:
            key = self.keys[slot]
            assert key is not None, f"slot {slot} is not ready"
            del self.slots[key]
            self.keys[slot] = None
            self.free.append(slot)

    def check(self) -> None:
        """`coldest` names every ready slot once, and looking changes nothing."""
        order = list(self.policy.coldest())
        assert sorted(order) == sorted(self.slots.values())
        assert order == list(self.policy.coldest())


def act(tier: PolicyTier, rng: random.Random) -> None:
    """A random step: mostly requests that grow, branch or come again, sometimes what else happens to a tier."""
    session = rng.randrange(6) * 1000
    match rng.randrange(12):
        case 0:
            tier.remove([session + rng.randrange(20) for _ in range(3)])
        case 1:
            tier.forget_coldest(rng.randrange(4))
        case 2:
            tier.policy.renew(rng.sample(sorted(tier.slots.values()), min(len(tier.slots), 3)))
        case 3:
            tier.serve([rng.randrange(10**6, 10**9) for _ in range(rng.randrange(1, 2 * SLOTS))])
        case 4:
            tier.place([key for key in (key_of(10**10 + rng.randrange(50)),) if key not in tier.slots])
        case _:
            length, branch = rng.randrange(1, 20), rng.randrange(3)
            chain = [session + i if i < 10 else session + 100 * branch + i for i in range(length)]
            output = rng.randrange(1 + length // 4)
            tier.serve(chain, tier.time + rng.expovariate(1 / 60), rng.choice([None, 5, 5000]), output)
    tier.check()


def run(policy: type[EvictionPolicy], seed: int, steps: int = 60) -> PolicyTier:
    """A tier after `steps` random steps."""
    rng, tier = random.Random(seed), PolicyTier(policy, SLOTS)
    for _ in range(steps):
        act(tier, rng)
    return tier


few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


class PolicyTests:
    """Tests of the contract in `kvtier.policy.base` for a policy, whatever its order is."""

    policy: ClassVar[type[EvictionPolicy]]

    def tier(self, num_slots: int = SLOTS) -> PolicyTier:
        """A new tier of the policy."""
        return PolicyTier(self.policy, num_slots)

    @few
    @given(seed=seeds)
    def test_every_ready_slot_is_ordered_and_evicted_once_whatever_happens(self, seed: int) -> None:
        tier = run(self.policy, seed)
        tier.evict(len(tier.slots))
        assert list(tier.policy.coldest()) == []

    @few
    @given(seed=seeds)
    def test_the_same_calls_make_the_same_choices(self, seed: int) -> None:
        one, other = run(self.policy, seed), run(self.policy, seed)
        assert one.log == other.log
        assert list(one.policy.coldest()) == list(other.policy.coldest())

    @few
    @given(seed=seeds)
    def test_pinned_slots_are_not_evicted_and_eviction_is_all_or_nothing(self, seed: int) -> None:
        tier, rng = run(self.policy, seed), random.Random(seed)
        for slot in tier.slots.values():
            tier.pins[slot] = rng.randrange(2)
        free = [slot for slot in tier.slots.values() if not tier.pins[slot]]
        before = list(tier.policy.coldest())
        assert tier.policy.evict(len(free) + 1, tier.pins) is None
        assert list(tier.policy.coldest()) == before
        assert tier.policy.evict(0, tier.pins) == []
        tier.evict(len(free))
        tier.check()

    def test_a_policy_over_no_slots_is_allowed(self) -> None:
        tier = self.tier(0)
        assert tier.serve([1, 2, 3]) == 0
        assert tier.policy.evict(1, b"") is None

    def test_a_tier_of_one_slot_is_allowed(self) -> None:
        tier = self.tier(1)
        for number in range(50):
            tier.serve([number % 3, 7])

    def test_a_session_without_an_end(self) -> None:
        tier = self.tier()
        for turn in range(1, 120):
            tier.serve(range(turn))

    def test_keys_that_never_come_again(self) -> None:
        tier, rng = self.tier(), random.Random(1)
        for _ in range(200):
            assert tier.serve([rng.getrandbits(64) for _ in range(rng.randrange(1, 40))]) == 0

    def test_what_is_used_all_the_time_is_a_hit(self) -> None:
        tier = self.tier()
        assert tier.serve([1, 2, 3]) == 0
        assert [tier.serve([1, 2, 3]) for _ in range(50)] == [3] * 50


class RequestPolicyTests(PolicyTests):
    """Tests of the contract for a request-aware policy."""

    policy: ClassVar[type[RequestPolicy]]

    @pytest.mark.parametrize("step", [0.0, 1e-9, 3600.0, 1e9])
    def test_time_may_stand_still_or_leap(self, step: float) -> None:
        tier = self.tier()
        for turn in range(100):
            tier.serve([turn % 5 * 100 + i for i in range(turn % 7 + 1)], tier.time + step)

    @few
    @given(seed=seeds)
    def test_what_was_learned_is_saved_and_taken_up_again(self, seed: int) -> None:
        models = run(self.policy, seed).models
        for model in models:
            saved = model.save()
            assert len(saved) <= MODEL_BYTES_MAX
            assert saved == model.save(), "saving changes what is saved"
            again = type(model)()
            again.restore(saved)
            assert again.save() == saved
            assert all("\n" not in line for line in again.describe())

    @pytest.mark.parametrize("bad", [b"", b"x", b"x" * 5000, bytes(5000)])
    def test_bytes_that_are_not_its_own_are_refused_and_change_nothing(self, bad: bytes) -> None:
        (model,) = RequestModels([self.policy])
        before = model.save()
        with pytest.raises(ValueError):
            model.restore(bad)
        assert model.save() == before

    def test_two_tiers_share_what_is_learned(self) -> None:
        first = self.tier()
        second = PolicyTier(self.policy, 2 * SLOTS, first.models)
        rng = random.Random(2)
        for _ in range(80):
            act(first, rng)
            act(second, rng)
        assert len(list(first.models)) == 1


class PrefixPolicyTests(RequestPolicyTests):
    """Tests of a policy that keeps prefixes whole: every block that it keeps can be hit."""

    @few
    @given(seed=seeds)
    def test_no_parent_is_bypassed_or_evicted_before_its_child(self, seed: int) -> None:
        tier, rng = self.tier(), random.Random(seed)
        for _ in range(60):
            session = rng.randrange(8) * 1000
            tier.serve([session + i for i in range(rng.randrange(1, 16))], tier.time + rng.expovariate(1 / 60))
        held = {number for number in range(8000) if key_of(number) in tier.slots}
        assert all(number % 1000 == 0 or number - 1 in held for number in held)
