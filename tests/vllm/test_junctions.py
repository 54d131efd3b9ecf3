"""The ends of shared prefixes: what they add to the bytes stored over a real trace, and what is remembered of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support_paths import PROJECT

from benchmarks.junction_replay import LAYOUTS, replay
from kvtier.engines.vllm.primary import connector
from kvtier.engines.vllm.primary.connector import SeenPrefixes

pytestmark = pytest.mark.engine
TRACE = PROJECT.parent / "shared" / "traces" / "conversation.jsonl"


@pytest.mark.trace
@pytest.mark.skipif(not TRACE.is_file(), reason="no trace: put conversation.jsonl into ../shared/traces")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ends_of_shared_prefixes_add_less_than_a_fifth_to_the_bytes_stored(layout: str) -> None:
    before, after = (replay(layout, TRACE, rule) for rule in (False, True))
    assert before.blocks < after.blocks <= 1.2 * before.blocks
    assert after.restored_tokens > before.restored_tokens


def prompts_seen(scheduler: Any, *prompts: bytes) -> SeenPrefixes:
    seen = SeenPrefixes(scheduler, tokens=16)
    for prompt in prompts:
        seen.on_finished(asked(scheduler, prompt))
    return seen


def asked(scheduler: Any, prompt: bytes, output: bytes = b"") -> Any:
    """A request whose blocks have names of one letter."""
    keys = [prompt[:end] for end in range(1, len(prompt) + 1)] + [output[:end] for end in range(1, len(output) + 1)]
    scheduler._req_status["request"] = SimpleNamespace(group_states=[SimpleNamespace(offload_keys=keys)])
    return SimpleNamespace(request_id="request", num_prompt_tokens=16 * len(prompt) + 5)


def test_a_prefix_is_shared_as_far_as_an_ended_request_had_it_in_its_prompt() -> None:
    scheduler = SimpleNamespace(_req_status={})
    seen = prompts_seen(scheduler, b"abcd")
    assert seen.end(asked(scheduler, b"abxy"), 0) == 32
    assert seen.end(asked(scheduler, b"xbcd"), 0) == 0
    seen.on_finished(asked(scheduler, b"pq", output=b"rs"))
    assert seen.end(asked(scheduler, b"r"), 0) == 0, "the output is no part of a prompt"


def test_a_prompt_that_was_seen_as_a_whole_is_shared_as_a_whole() -> None:
    scheduler = SimpleNamespace(_req_status={})
    seen = prompts_seen(scheduler, b"abcd")
    assert seen.end(asked(scheduler, b"abcd"), 0) == 64


def test_the_ends_of_the_oldest_prompts_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "SEEN_MAX", 5)
    scheduler = SimpleNamespace(_req_status={})
    seen = prompts_seen(scheduler, b"abcd", b"xyz")
    assert seen.end(asked(scheduler, b"abcd"), 0) == 32
    assert seen.end(asked(scheduler, b"xyz"), 0) == 48
