"""Keys of requests and generated workloads: shared exactly as far as the ids agree, the same in every process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.tools.replay.workload import PROFILES, make_workload
from kvtier.traces.requests import KeyChain, Request, group_keys, offload_keys
from kvtier.types.arrays import int_array
from kvtier.types.keys import key_group


def request(ids: Sequence[int], root: str = "r", session: str = "s") -> Request:
    return Request(root, session, int_array(ids), len(ids), 16 * len(ids), 1)


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=8), st.data())
def test_two_requests_share_blocks_exactly_as_far_as_their_ids_agree(
    lists: list[list[int]], data: st.DataObject
) -> None:
    chain = KeyChain()
    hashed = [(ids, chain.digests(request(ids, session=data.draw(st.sampled_from("ab"))))) for ids in lists]
    for ids, digests in hashed:
        assert len(digests) == len(ids)
        for other, others in hashed:
            for end in range(1, min(len(ids), len(other)) + 1):
                assert (digests[end - 1] == others[end - 1]) == (ids[:end] == other[:end])


def test_a_root_shares_nothing_with_another() -> None:
    chain = KeyChain()
    assert not set(chain.digests(request([1, 2], "x"))) & set(chain.digests(request([1, 2], "y")))


def test_keys_are_the_same_in_every_process() -> None:
    digests = KeyChain().digests(request([1, 2, 1 << 40], "trace:name:"))
    assert [digest.hex() for digest in digests] == [
        "7d98ba741be5b883ab8248fd737c59ff",
        "eb7b4b15046030637069808eba3534dd",
        "896103b91381cec71e1aa1db9ce18b3c",
    ]


def test_an_offloaded_block_has_the_key_of_its_last_gpu_block() -> None:
    keys = group_keys([bytes([i]) * 16 for i in range(10)], group=1)
    assert offload_keys(keys, 4) == (keys[3], keys[7])
    assert offload_keys(keys, 1) == keys
    assert key_group(keys[0]) == 1


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_seed_decides_a_workload(name: str) -> None:
    def told(seed: int) -> list[tuple[object, ...]]:
        source = make_workload(name, seed, 40)
        return [(r.root, r.session, r.ids.tolist(), r.prompt_blocks, r.output_tokens) for r in source.requests()]

    assert told(3) == told(3)
    assert told(3) != told(4)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_workload_is_many_turns_over_shared_prompts(name: str) -> None:
    source = make_workload(name, 0, 60)
    tokens = PROFILES[name].block_tokens
    chain = KeyChain()
    seen: set[bytes] = set()
    references = hits = longest = 0
    for told in source.requests():
        digests = chain.digests(told)
        assert told.prompt_blocks == told.prompt_tokens // tokens
        assert len(digests) == (told.prompt_tokens + told.output_tokens) // tokens
        references += told.prompt_blocks
        hits += sum(digest in seen for digest in digests[: told.prompt_blocks])
        longest = max(longest, len(digests))
        seen.update(digests)
    assert source.longest_blocks == longest
    assert 0.5 < hits / references < 1


def test_a_workload_needs_a_request() -> None:
    with pytest.raises(ConfigError, match="--requests"):
        make_workload("chat", 0, 0)
