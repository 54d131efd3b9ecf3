"""Requests that are hard for `reuse`: where it hits as much as LRU, and what it was made to hit on a real trace."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from support_adverse_traces import TRACES, asked, prompt
from support_counts import full_alone
from support_paths import TRACES as RECORDED

from benchmarks.policies import OneTier, TimedRequest, timed_requests

LOSS_MAX = 0.001
"""Share of the blocks of all prompts that may hit less than with LRU."""
SWAP_LOSS_MAX = 0.002
"""The same where the model's order gains nothing and what it learned becomes wrong."""
SEED = 1
COUNT = 3000
CONVERSATION = RECORDED / "conversation.jsonl"


def hit_rate(policy: str, num_blocks: int, requests: list[TimedRequest]) -> float:
    tier = OneTier(policy, num_blocks)
    hits = sum(tier.serve(number, request) for number, request in enumerate(requests))
    return hits / sum(request.blocks for request in requests)


@pytest.mark.parametrize(
    ("name", "count", "sizes"),
    [
        ("chats", COUNT, (500, 4000, 8000)),
        ("clock_restarts", COUNT, (500, 4000, 8000)),
        pytest.param("clock_stands_still", COUNT, (1000,), marks=full_alone()),
        ("endless_session", 1000, (500, 1000)),
        ("random_keys", COUNT, (500, 4000, 8000)),
        pytest.param("skewed_keys", COUNT, (500, 4000, 8000), marks=full_alone()),
        ("classes_swap", COUNT, (500, 4000)),
        ("never_again", COUNT, (500,)),
        pytest.param("floods", COUNT, (500, 4000), marks=full_alone()),
        pytest.param("scans", COUNT, (500, 4000), marks=full_alone()),
        ("single_blocks", COUNT, (200, 500)),
        ("pauses", COUNT, (500, 4000)),
    ],
)
def test_reuse_hits_as_much_as_lru(
    name: str, count: int, sizes: tuple[int, ...], dial: Callable[[int, int], int], seed: int
) -> None:
    """docs/placement.md says at which sizes of these traces it does not. A quick run draws one of them."""
    requests = TRACES[name](SEED, count)
    for size in Random(seed).sample(sizes, dial(len(sizes), 1)):
        lru, reuse = hit_rate("lru", size, requests), hit_rate("reuse", size, requests)
        print(f"{name}, seed {SEED}, {size} blocks: lru {lru:.4f}, reuse {reuse - lru:+.4f}")
        assert reuse >= lru - LOSS_MAX


def test_prompts_that_swap_their_meaning_cost_little_where_nothing_can_be_gained() -> None:
    """A tier in which LRU keeps nearly all that comes back."""
    requests = TRACES["classes_swap"](SEED, COUNT)
    assert hit_rate("reuse", 8000, requests) >= hit_rate("lru", 8000, requests) - SWAP_LOSS_MAX


@pytest.mark.parametrize("chats", [0, 3000])
def test_what_comes_back_is_kept_after_much_that_never_did(chats: int) -> None:
    """One-block prompts: 2,000 that never come back, then of 2,000 every fifth is that of two before."""
    requests = TRACES["chats"](SEED, chats)
    begin = requests[-1].time if requests else 0.0
    requests += [asked(begin + 3.0 * number, prompt(f"once {number}", 1)) for number in range(2000)]
    for number in range(2000):
        name = number - 2 if number % 5 == 4 else number
        requests.append(asked(begin + 6000.0 + 3.0 * number, prompt(f"again {name}", 1)))
    tier = OneTier("reuse", 1000)
    hits = [tier.serve(number, request) for number, request in enumerate(requests)]
    assert sum(hits[-2000:]) == 400


@pytest.mark.trace
@pytest.mark.skipif(not CONVERSATION.is_file(), reason="no trace: put conversation.jsonl into ../shared/traces")
def test_conversation_hits_what_was_promised(dial: Callable[[int, int], int], seed: int) -> None:
    """A quick run draws one of the sizes."""
    requests = timed_requests(CONVERSATION)
    promises = ((4000, 0.150), (8000, 0.212), (16000, 0.280), (32000, 0.331))
    for size, promised in Random(seed).sample(promises, dial(len(promises), 1)):
        rate = hit_rate("reuse", size, requests)
        print(f"{size} blocks: {rate:.4f}")
        assert rate >= promised


def test_a_traces_requests_are_its_seeds() -> None:
    for name, maker in TRACES.items():
        requests = maker(SEED, 300)
        assert requests == maker(SEED, 300), name
        assert all(one.time <= after.time for one, after in pairwise(requests)), name
        assert all(len(set(request.keys)) == len(request.keys) for request in requests), name


def test_in_the_benchmarks_tier_no_block_is_older_than_the_one_after_it() -> None:
    tier, keys = OneTier("lru", 8), prompt("longer", 4)
    tier.serve(0, asked(0.0, keys[:2]))
    tier.serve(1, asked(1.0, prompt("other", 2)))
    tier.serve(2, asked(2.0, keys))
    assert [tier.keys[slot] for slot in tier.policy.coldest()][2:] == keys[::-1]
