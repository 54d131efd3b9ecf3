"""A real SGLang server over kvtier: the same tokens from every place, whatever becomes of the disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support_sglang import ADMIN_KEY, FROZEN, PAGE_TOKENS, Server, make_model, server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600)]

PROMPT = list(range(10, 400))
WHOLE = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS
CLASS = "KVTierHiCache"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama")


def keys(folder: Path, **more: Any) -> dict[str, Any]:
    named = {"backend_name": "kvtier", "module_path": "kvtier.engines.sglang", "class_name": CLASS}
    tier = {"roots": [str(folder / "kv")], "capacity": "256MiB", "namespace": "random weights"}
    return {**named, "interface_v1": 1, "prefetch_threshold": PAGE_TOKENS, **tier, **more}


def backed_up(running: Server, tokens: int) -> None:
    """Wait until so many tokens were stored in all."""
    name = "sglang:backuped_tokens_total"
    running.until(lambda: running.metric(name) >= tokens, f"{tokens} tokens were not stored")


def prompt(number: int) -> Sequence[int]:
    """A prompt that shares nothing with the others."""
    return [number + 400, *PROMPT[1:]]


def test_computed_cached_stored_and_after_a_restart_the_tokens_are_the_same(model, tmp_path):
    with server(model, tmp_path, keys(tmp_path), **{"admin-api-key": ADMIN_KEY}) as running:
        computed = running.ask(PROMPT)
        assert (computed.cached, len(computed.tokens)) == (0, 8)
        backed_up(running, WHOLE)
        above = running.ask(PROMPT)
        assert (above.cached, above.from_storage, above.tokens) == (WHOLE, 0, computed.tokens)
        running.flush()
        stored = running.ask(PROMPT)
        assert (stored.cached, stored.from_storage, stored.tokens) == (WHOLE, WHOLE, computed.tokens)
        assert stored.details["storage_backend"] == CLASS

        # What SGLang's operators do at run time.
        running.flush()
        running.call("DELETE", "/hicache/storage-backend")
        without = running.ask(PROMPT)
        assert (without.cached, without.tokens) == (0, computed.tokens)
        running.flush()
        attached = {"hicache_storage_backend": "dynamic"}
        attached["hicache_storage_backend_extra_config_json"] = json.dumps(keys(tmp_path))
        running.call("PUT", "/hicache/storage-backend", attached)
        assert running.ask(PROMPT).from_storage == WHOLE
        running.flush()
        running.call("POST", "/hicache/storage-backend/clear")
        cleared = running.ask(PROMPT)
        assert (cleared.cached, cleared.tokens) == (0, computed.tokens)
        backed_up(running, 2 * WHOLE)
        running.process.kill()  # no clean end
    with server(model, tmp_path, keys(tmp_path)) as running:
        found = running.ask(PROMPT)
        assert (found.cached, found.from_storage, found.tokens) == (WHOLE, WHOLE, computed.tokens)


def test_a_server_that_computes_otherwise_from_the_same_weights_loads_none_of_these_pages(model, tmp_path):
    """The folder of the weights is the same, and nothing else is named."""
    named = keys(tmp_path, namespace="", model_folder=str(model))
    with server(model, tmp_path, named) as running:
        computed = running.ask(PROMPT)
        backed_up(running, WHOLE)
    with server(model, tmp_path, named, **{"json-model-override-args": '{"rms_norm_eps": 1.0}'}) as running:
        other = running.ask(PROMPT)
        assert other.cached == 0
        assert other.tokens != computed.tokens, "the control: the argument decides what is computed"
    with server(model, tmp_path, named) as running:
        assert running.ask(PROMPT).from_storage == WHOLE


def test_a_disk_that_freezes_never_stops_the_server(model, tmp_path):
    # After half a second SGLang gives a prefetch up; the backend's own deadlines are longer than that.
    deadlines = {"prefetch_timeout_base": 0.5, "load_timeout_seconds": 4.0, "store_timeout_seconds": 4.0}
    with server(model, tmp_path, keys(tmp_path, **deadlines)) as running:
        first = [running.ask(prompt(number)) for number in range(3)]
        backed_up(running, 3 * WHOLE)
        running.flush()
        (tmp_path / FROZEN).touch()
        frozen = [running.ask(prompt(number)) for number in range(3)]
        assert [answer.tokens for answer in frozen] == [answer.tokens for answer in first]
        assert not any(answer.from_storage for answer in frozen)
        running.flush()  # a thread that waits in a call for too long would fail this, and end the server
        (tmp_path / FROZEN).unlink()

        def stored_again() -> bool:
            running.flush()
            return running.ask(prompt(0)).from_storage == WHOLE

        running.until(stored_again, "the disk was not used again")
        assert running.ask(prompt(0)).tokens == first[0].tokens


def test_two_ranks_of_tensor_parallelism_find_their_own_pages(model, tmp_path):
    with server(model, tmp_path, keys(tmp_path), **{"tp-size": 2}) as running:
        computed = running.ask(PROMPT)
        backed_up(running, WHOLE)
        running.flush()
        stored = running.ask(PROMPT)
        assert (stored.cached, stored.from_storage, stored.tokens) == (WHOLE, WHOLE, computed.tokens)
    assert sorted(path.name for path in tmp_path.glob("kv*")) == ["kv-0", "kv-1"]
