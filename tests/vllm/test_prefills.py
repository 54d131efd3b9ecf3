"""How fast vLLM computes prompts is taken from what its scheduler says of requests."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from kvtier.engines.vllm.primary.served_requests import Prefills, ServedRequest

pytestmark = pytest.mark.engine


@pytest.fixture
def told() -> list[tuple[int, float, float]]:
    return []


@pytest.fixture
def prefills(told) -> Prefills:
    return Prefills(lambda tokens, begun, ended: told.append((tokens, begun, ended)))


def arrive(prefills: Prefills, name: str) -> SimpleNamespace:
    """A request of 1,000 tokens, of which 200 are cached."""
    request = SimpleNamespace(num_prompt_tokens=1000, num_computed_tokens=200, num_output_tokens=0)
    prefills.arrived(name, ServedRequest(request, 0.0))
    return request


def test_a_prompt_counts_from_its_first_step_to_its_first_token_without_what_was_cached(prefills, told):
    request = arrive(prefills, "a")
    prefills.step([], [])
    begun = time.monotonic()
    prefills.step(["a"], [])
    request.num_computed_tokens = 700
    prefills.step([], [])
    assert not told
    request.num_output_tokens = 1
    prefills.step([], [])
    prefills.step([], [])
    prefills.ended("a")
    assert [tokens for tokens, _, _ in told] == [800]
    assert begun <= told[0][1] <= told[0][2] <= time.monotonic()


def test_a_prompt_whose_only_token_ends_it_counts_when_it_has_ended(prefills, told):
    request = arrive(prefills, "a")
    prefills.step(["a"], [])
    request.num_output_tokens = 1
    prefills.ended("a")
    assert [tokens for tokens, _, _ in told] == [800]


@pytest.mark.parametrize("end", ["aborted", "preempted", "never scheduled", "unknown"])
def test_other_requests_say_nothing_of_the_speed(prefills, told, end):
    request = arrive(prefills, "a")
    prefills.arrived("b", None)
    if end != "never scheduled":
        prefills.step(["a", "b"], [])
    if end == "preempted":
        prefills.step([], ["a"])
    request.num_output_tokens = 0 if end == "aborted" else 1
    prefills.ended("b" if end == "unknown" else "a")
    assert not told
