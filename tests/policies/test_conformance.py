"""kvtier's own policies keep the contract that is open to others, and the suite finds policies that do not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import pytest
from support_following import FollowingLRU

from kvtier.policy import LRU, POLICIES, RequestPolicy, policy_class
from kvtier.policy.arc import ARC
from kvtier.policy.reuse.policy import Reuse
from kvtier.testing.conformance.policies import PolicyTests, PrefixPolicyTests, RequestPolicyTests, run


class TestLRU(PolicyTests):
    policy = LRU


class TestARC(PolicyTests):
    policy = ARC


class TestReuse(PrefixPolicyTests):
    policy = Reuse


class TestFollowingLRU(RequestPolicyTests):
    policy = FollowingLRU


def test_every_policy_of_kvtier_that_follows_requests_runs_the_suite() -> None:
    others = {name for name in POLICIES if issubclass(policy_class(name), RequestPolicy)}
    assert others <= {"reuse"}


class EvictsPinned(LRU):
    def evict(self, count: int, pins: Sequence[int]) -> list[int] | None:
        return super().evict(count, bytearray(len(pins)))


class EvictsTooFew(LRU):
    def evict(self, count: int, pins: Sequence[int]) -> list[int] | None:
        return super().evict(max(0, count - 1), pins)


class ForgetsSlots(LRU):
    def coldest(self) -> Iterator[int]:
        return (slot for slot in super().coldest() if slot % 7)


class BypassesTwice(FollowingLRU):
    def bypass(self, keys: Sequence[bytes], evictions: int, pins: Sequence[int]) -> Sequence[int]:
        return [0, 0]


@pytest.mark.parametrize("policy", [EvictsPinned, EvictsTooFew, ForgetsSlots, BypassesTwice])
def test_a_policy_that_breaks_the_contract_is_found(policy: type[LRU]) -> None:
    with pytest.raises(AssertionError):
        deque((run(policy, seed) for seed in range(20)), maxlen=0)
