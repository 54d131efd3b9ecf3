"""The contract of policies, and what this one promises beyond it."""

from slru import SegmentedLRU

from kvtier.testing.conformance.policies import PolicyTests, key_of
from kvtier.types.keys import OffloadKey


class TestSegmentedLRU(PolicyTests):
    policy = SegmentedLRU

    def test_a_scan_does_not_evict_what_was_used_again(self) -> None:
        keys: list[OffloadKey | None] = [key_of(number) for number in range(8)]
        policy = SegmentedLRU(8, keys)
        policy.insert(range(8))
        policy.touch([0, 1])
        for number in range(100, 120):
            evicted = policy.evict(1, bytearray(8))
            assert evicted is not None
            assert not {0, 1} & set(evicted)
            keys[evicted[0]] = key_of(number)
            policy.insert(evicted)
