"""LoRA adapters in keys by content: the rules, on vLLM's own function, without an engine."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, offloading_config, stack
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore

from kvtier.engines.digests import ContentDigests
from kvtier.engines.vllm import adapters
from kvtier.engines.vllm.adapters import AdapterKeys, content_in_keys

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("stacks")]


class Request(SimpleNamespace):
    """As much of vLLM's request as the function reads."""


@pytest.fixture
def old_files(monkeypatch) -> None:
    """No file counts as young."""
    monkeypatch.setattr(adapters, "YOUNG_SECONDS", -60.0)


@pytest.fixture
def keys(tmp_path) -> Iterator[AdapterKeys]:
    """The keys of one process."""
    with process(tmp_path) as one:
        yield one


class process:
    """A life of the engine's process, as far as keys go."""

    def __init__(self, folder: Path) -> None:
        self.keys = AdapterKeys(kv_cache_utils._gen_lora_extra_hash_keys, ContentDigests(folder / "digests.json"))

    def __enter__(self) -> AdapterKeys:
        return self.keys

    def __exit__(self, *_: object) -> None:
        self.keys.release(None)


def write(folder: Path, content: bytes = b"weights", alpha: int = 16) -> Path:
    """An adapter's files, replaced as a training run does."""
    folder.mkdir(exist_ok=True)
    for name, data in (("adapter_config.json", b"%d" % alpha), ("adapter_model.safetensors", content)):
        (folder / "new").write_bytes(data)
        os.replace(folder / "new", folder / name)
    return folder


def request(path: Path | str, number: int = 1, **more: Any) -> Request:
    lora = LoRARequest("adapter", number, str(path), **more)
    return Request(request_id=os.urandom(8).hex(), lora_request=lora)


def load(keys: AdapterKeys, path: Path, number: int = 1, **more: Any) -> None:
    assert keys.load(LoRARequest("adapter", number, str(path), **more), lambda: True)


@pytest.mark.usefixtures("old_files")
class TestOldFiles:
    def test_the_content_decides_and_neither_path_nor_process(self, tmp_path):
        with process(tmp_path) as keys:
            one = keys(request(write(tmp_path / "one")))
            assert [key[:2] for key in one] == [("lora", "adapter")], "events show the name"
            assert keys(request(write(tmp_path / "two"), 2)) == one
            assert keys(request(write(tmp_path / "three", b"others"), 3)) != one
            assert keys(request(write(tmp_path / "four", alpha=8), 4)) != one
        with process(tmp_path) as keys:
            assert keys(request(tmp_path / "one")) == one

    def test_a_request_without_an_adapter_has_vllms_keys_and_is_stored(self, keys):
        plain = Request(request_id="plain", lora_request=None)
        assert keys(plain) == []
        assert keys.storable("plain")

    @pytest.mark.parametrize("spreads", [True, False])
    def test_where_adapters_spread_a_request_without_one_is_stored_until_the_first_is_used(
        self, tmp_path, monkeypatch, caplog, spreads
    ):
        monkeypatch.setattr(adapters, "engine_version", lambda: "0.32.0+cpu" if spreads else "0.33.0+cpu")
        with process(tmp_path) as keys:
            plain, other = Request(request_id="plain", lora_request=None), request(write(tmp_path / "one"))
            keys(plain)
            load(keys, tmp_path / "one")
            assert keys.storable("plain"), "a loaded adapter is not yet in a batch"
            keys(other)
            assert keys.storable("plain") is not spreads
            assert keys.storable(other.request_id)
            keys(request(tmp_path / "one"))
        assert sum("without an adapter" in line for line in caplog.messages) == spreads

    def test_replaced_while_the_engine_runs_each_request_is_alone(self, keys, tmp_path):
        path = write(tmp_path / "one")
        before = request(path)
        key = keys(before)
        assert keys.storable(before.request_id)
        write(path, b"trained again")
        assert not keys.storable(before.request_id), "a worker may have read either"
        after = [request(path) for _ in range(3)]
        named = [keys(each)[0] for each in after]
        assert len({key[0], *named}) == 4
        assert not any(keys.storable(each.request_id) for each in after)
        assert [keys(before), keys(after[0])] == [key, [named[0]]], "a request keeps its keys"

    def test_loaded_in_place_it_is_known_by_its_new_content(self, keys, tmp_path):
        path = write(tmp_path / "one")
        first = request(path)
        old = keys(first)
        write(path, b"trained again")
        load(keys, path, load_inplace=True)
        new = request(path)
        assert keys(new) != old
        assert keys.storable(new.request_id)
        assert not keys.storable(first.request_id), "it may have gone on with the new adapter"
        with process(tmp_path) as restarted:
            assert restarted(request(path)) == keys(new)

    def test_content_that_came_back_is_not_mixed_with_what_was_computed_in_between(self, keys, tmp_path):
        path = write(tmp_path / "one")
        first = request(path)
        old = keys(first)
        for content in (b"trained again", b"weights"):
            write(path, content)
            load(keys, path, load_inplace=True)
        back = request(path)
        assert keys(back) != old
        assert keys(request(path)) == keys(back)
        assert not keys.storable(first.request_id)
        assert keys.storable(back.request_id)

    def test_loaded_before_its_first_request_it_is_what_was_loaded(self, keys, tmp_path):
        path = write(tmp_path / "one")
        load(keys, path)
        write(path, b"trained again")
        one = request(path)
        keys(one)
        assert not keys.storable(one.request_id)
        load(keys, path)  # vLLM has it already, and loads nothing
        assert keys(request(path)) != keys(one)

    def test_another_path_under_the_same_id_is_alone(self, keys, tmp_path):
        keys(request(write(tmp_path / "one")))
        other = request(write(tmp_path / "two", b"others"))
        keys(other)
        assert not keys.storable(other.request_id), "workers keep what they have of this id"

    def test_an_adapter_that_failed_to_load_is_alone(self, keys, tmp_path):
        path = write(tmp_path / "one")

        def fails() -> bool:
            raise ValueError("rank too large")

        with pytest.raises(ValueError, match="rank"):
            keys.load(LoRARequest("adapter", 1, str(path)), fails)
        one = request(path)
        keys(one)
        assert not keys.storable(one.request_id)

    def test_a_file_that_vllm_prefers_appears(self, keys, tmp_path):
        path = write(tmp_path / "one")
        os.replace(path / "adapter_model.safetensors", path / "adapter_model.bin")
        one = request(path)
        keys(one)
        write(path, b"others")
        assert not keys.storable(one.request_id)

    @pytest.mark.parametrize("path", ["nobody/adapter", "s3://bucket/adapter", "/nowhere/adapter", "a/b/c/d"])
    def test_what_cannot_be_seen_is_known_in_this_process_only(self, tmp_path, caplog, path):
        with process(tmp_path) as keys:
            one, two = request(path), request(path)
            assert keys(one) == keys(two)
            assert keys.storable(one.request_id)
            assert sum(path in line for line in caplog.messages) == 1
            load(keys, path)  # of what the workers have now nothing is known either
            assert keys(request(path)) != keys(one)
        with process(tmp_path) as restarted:
            assert restarted(request(path)) != keys(one)

    def test_a_digest_that_takes_too_long_is_not_waited_for(self, tmp_path, monkeypatch):
        go = threading.Event()
        monkeypatch.setattr(adapters, "DIGEST_SECONDS", 0.01)
        digest = ContentDigests.digest
        monkeypatch.setattr(ContentDigests, "digest", lambda *given: go.wait() and digest(*given))
        with process(tmp_path) as keys:
            path = write(tmp_path / "one")
            early = request(path)
            keys(early)
            assert not keys.storable(early.request_id)
            go.set()
            keys._adapters[1].content.result()
            late = request(path)
            assert keys(late)[0][2].startswith("sha256:")
            assert keys.storable(late.request_id)


def test_files_that_are_young_are_stored_once_they_were_read_again(keys, tmp_path, monkeypatch):
    path = write(tmp_path / "one")
    one = request(path)
    keys(one)
    assert not keys.storable(one.request_id), "they may change once more in the same tick of the clock"
    keys._adapters[1].stable_at = 0.0
    keys(request(path))
    assert keys._adapters[1].again is not None
    keys._adapters[1].again.result()
    assert keys.storable(one.request_id)


def test_vllms_functions_are_put_back(caplog):
    ours, add = kv_cache_utils._gen_lora_extra_hash_keys, EngineCore.add_lora
    one, two = content_in_keys("one"), content_in_keys("two")
    assert one is two is kv_cache_utils._gen_lora_extra_hash_keys
    assert EngineCore.add_lora is not add
    one.release("one")
    one.release("one")
    assert kv_cache_utils._gen_lora_extra_hash_keys is two
    two.release("two")
    assert kv_cache_utils._gen_lora_extra_hash_keys is ours
    assert EngineCore.add_lora is add


def test_a_vllm_that_makes_keys_otherwise_stores_nothing_while_adapters_are_served(monkeypatch, caplog):
    monkeypatch.delattr(kv_cache_utils, "_gen_lora_extra_hash_keys")
    assert content_in_keys("one").storable("any")
    config = adapters.LoRAConfig(max_lora_rank=8)
    assert not content_in_keys("one").storable("any")
    assert caplog.record_tuples[-1][1] == logging.ERROR
    del config


@pytest.mark.parametrize("when", ["offered", "copied"])
def test_what_is_not_storable_is_in_no_tier_and_nothing_waits(tmp_path, seed, monkeypatch, when):
    """Also where the files change while the workers copy."""
    (tmp_path / "root").mkdir(mode=0o700)
    with FakeEngine(offloading_config(stack(tmp_path / "root", 100)), seed, num_blocks=256) as engine:
        while_offered = lambda _: when == "copied" and sys._getframe(1).f_code.co_name != "complete_store"  # noqa: E731
        monkeypatch.setattr(engine.manager._adapters, "storable", while_offered)
        monkeypatch.setattr(engine.manager._adapters, "_used", True)
        engine.patient = when == "copied"
        for _ in range(2):
            engine.add([1, 2, 3])
            engine.run()
        assert engine.counts["hit chunks"] == 0
        assert engine.counts["stored chunks"] == {"offered": 0, "copied": 6}[when]
        monkeypatch.setattr(engine.manager._adapters, "storable", lambda _: True)
        engine.patient = True
        for _ in range(2):
            engine.add([1, 2, 3])
            engine.run()
        assert engine.counts["hit chunks"] == 3


def test_a_name_that_a_client_gave_an_adapter_is_one_line_of_the_log(caplog):
    """vLLM lets clients load adapters under names of their own."""
    lora = SimpleNamespace(lora_name="one\nCRITICAL: forged\x1b[2J", lora_path="/two\r\n" + "x" * 10_000)
    adapters._log_once(SimpleNamespace(logged=False), lora, "cannot be read")
    (line,) = caplog.messages
    assert line.isprintable()
    assert len(line) < 1000
