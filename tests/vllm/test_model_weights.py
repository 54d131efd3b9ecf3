"""Weights that are replaced in a running engine: what the workers notice, and that no other KV reaches the disk."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, offloading_config, stack
from torch import nn
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

from kvtier.engines import digests
from kvtier.engines.digests import FileDigest, FileState
from kvtier.engines.vllm.primary import model_weights
from kvtier.engines.vllm.primary.model_weights import checksum, device_sums

pytestmark = pytest.mark.engine


def engine(root: Path, seed: int, **changes: Any) -> FakeEngine:
    row_bytes = 4096 * changes.get("world_size", 1)
    made = FakeEngine(offloading_config(stack(root, 100, row_bytes=row_bytes), **changes), seed, num_blocks=256)
    made.patient = True
    return made


def held_back(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that name the disk as held back because of the weights. A stack process holds it back at first."""
    lines = [line for line in caplog.messages if line.startswith("event=tier_held_back tier=fs ")]
    return [line for line in lines if "is not known yet" not in line]


def hits(vllm: FakeEngine, words: list[int]) -> int:
    """Chunks of a request that were not computed."""
    before = vllm.counts["hit chunks"]
    vllm.add(words)
    vllm.run()
    return vllm.counts["hit chunks"] - before


def rewrite(model: nn.Linear) -> None:
    """Another way than `load_weights`."""
    model.weight.data[3, 3] += 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_reset_without_a_change_goes_on_with_the_disk(stacks, root, seed, workers):
    with engine(root, seed, world_size=workers) as vllm:
        assert hits(vllm, [1, 2, 3]) == 0
        vllm.reset()
        assert hits(vllm, [1, 2, 3]) == 0
    with engine(root, seed, world_size=workers) as vllm:
        assert hits(vllm, [1, 2, 3]) == 3


@pytest.mark.parametrize("change", ["loaded", "rewritten", "unreadable"])
def test_after_a_change_and_a_reset_nothing_is_stored_for_a_later_life(stacks, root, seed, caplog, monkeypatch, change):
    with engine(root, seed) as vllm:
        assert hits(vllm, [1, 2, 3]) == 0
        match change:
            case "loaded":
                vllm.model.load_weights([2.0] * 8)
                stacks.eventually(vllm, lambda: held_back(caplog))  # with a reset, which comes before the other
            case "rewritten":
                rewrite(vllm.model)
            case "unreadable":
                monkeypatch.setattr(model_weights, "checksum", lambda _: None)
        vllm.reset()
        assert hits(vllm, [1, 2, 3]) == 0
        assert hits(vllm, [1, 2, 3]) == 3, "the cpu tier goes on"
        vllm.reset()
        assert hits(vllm, [1, 2, 3]) == 0
    monkeypatch.setattr(model_weights, "checksum", checksum)
    assert len(held_back(caplog)) == 1
    with engine(root, seed) as vllm:
        assert hits(vllm, [1, 2, 3]) == 0
        vllm.reset()
        assert hits(vllm, [4, 5, 6]) == 0
    with engine(root, seed) as vllm:
        assert hits(vllm, [4, 5, 6]) == 3, "a restart uses the disk again"


def test_weights_that_are_loaded_without_a_reset_are_noticed_in_the_next_step(stacks, root, seed):
    with engine(root, seed) as vllm:
        assert hits(vllm, [1, 2, 3]) == 0
        vllm.model.load_weights([2.0] * 8)
        assert hits(vllm, [1, 2, 3]) == 0
        assert hits(vllm, [4, 5, 6]) == 0
        vllm.model.load_weights([3.0] * 8)
        assert hits(vllm, [4, 5, 6]) == 0
        assert vllm.wrong == 0
    with engine(root, seed) as vllm:
        assert hits(vllm, [1, 2, 3]) + hits(vllm, [4, 5, 6]) == 0


def test_weights_loaded_while_copies_are_in_flight(stacks, root, seed):
    with engine(root, seed) as vllm:
        for round_number in range(12):
            for _ in range(3):
                vllm.add([vllm.random.randrange(3)] * 3 + [vllm.random.randrange(4)] * 2)
            for _ in range(vllm.random.randrange(1, 5)):
                vllm.step()
            if round_number % 3 == 2:
                vllm.model.load_weights([float(round_number)] * 8)
        vllm.run()
        assert vllm.wrong == 0


@pytest.mark.parametrize("change", ["weights", "a reset"])
def test_what_a_request_computes_upon_kv_of_before_is_not_stored(stacks, root, seed, change):
    """Nothing is, until it is preempted and begins anew."""
    with engine(root, seed) as vllm:
        running = vllm.add([1, 2, 3, 4])
        vllm.waiting.remove(running)  # the engine's steps leave it alone: it is in the midst of its prefill
        begin(vllm, running)
        vllm.model.load_weights([2.0] * 8) if change == "weights" else vllm.reset()
        for found in (0, 2):
            other = vllm.add([5, 6])
            stacks.eventually(vllm, lambda: not vllm.waiting)
            assert other.hit == found
        assert stored(vllm, running) == []
        begin(vllm, running)
        assert stored(vllm, running) == running.keys[0]


def begin(vllm: FakeEngine, request: Any) -> None:
    """Look a request's prompt up and schedule it."""
    until = time.monotonic() + 60
    while vllm.manager.lookup(request.keys[0][0], request.context) is not LookupResult.MISS:
        assert time.monotonic() < until
        vllm.step()
    vllm.manager.on_schedule_end(ScheduleEndContext([request.context.req_id], ()))


def stored(vllm: FakeEngine, request: Any) -> list[bytes]:
    """The blocks of a request that vLLM is to copy into rows."""
    until = time.monotonic() + 60
    while (answer := vllm.manager.prepare_store(request.keys[0], request.context)) is None:
        assert time.monotonic() < until
        vllm.step()
    return list(answer.keys_to_store)


def test_until_a_worker_answers_nothing_is_served_or_stored(stacks, root, seed, monkeypatch, caplog):
    go = threading.Event()
    original = model_weights.checksum
    with engine(root, seed) as vllm:
        assert hits(vllm, [1, 2, 3]) == 0
        monkeypatch.setattr(model_weights, "checksum", lambda models: original(models) if go.wait(60) else None)
        vllm.reset()
        found = vllm.add([1, 2, 3])
        for _ in range(200):
            vllm.step()
        assert (found.hit, found.state) == (0, "computed"), "its store waits"
        assert not vllm.manager._driver.serves
        go.set()
        vllm.run()
        assert hits(vllm, [1, 2, 3]) == 3
        assert not held_back(caplog)


def test_the_models_get_their_methods_back(stacks, root, seed):
    with engine(root, seed) as vllm:
        model = vllm.model
        assert "load_weights" in vars(model)
    assert "load_weights" not in vars(model)
    assert model.load_weights([1.0] * 8) == {"bias"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_every_byte_of_parameters_and_buffers_is_in_the_checksum(dtype, seed):
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(5, 7, dtype=dtype).t(), requires_grad=False)
    model.register_buffer("table", torch.zeros(3, dtype=dtype), persistent=False)
    first = checksum([model])
    assert first == checksum([model])
    for tensor in (model.weight.data, model.table):
        for index in range(tensor.numel()):
            memory = tensor.untyped_storage()
            place = index * tensor.element_size()
            memory[place] = 1
            assert checksum([model]) != first, (tensor.shape, index)
            memory[place] = 0
    assert checksum([model]) == first
    model.weight = nn.Parameter(model.weight.to("meta"), requires_grad=False)
    assert checksum([model]) is None


def test_the_sums_of_a_device_see_each_byte():
    for size in (0, 1, 8, 29):
        memory = torch.zeros(size, dtype=torch.uint8)
        zeros = [int(part) for part in device_sums(memory)]
        for place in range(size):
            memory[place] = 1
            assert [int(part) for part in device_sums(memory)] != zeros
            memory[place] = 0


def test_what_cannot_be_read_is_said_once_and_unknown(stacks, root, seed, monkeypatch, caplog):
    with engine(root, seed) as vllm:
        hits(vllm, [1, 2, 3])

        def fails(_: object) -> bytes:
            raise RuntimeError("no such memory")

        monkeypatch.setattr(model_weights, "checksum", fails)
        vllm.reset()
        stacks.eventually(vllm, lambda: held_back(caplog))
    assert any(record.levelno == logging.ERROR and "cannot be read" in record.message for record in caplog.records)
    assert any("may have been replaced" in line for line in caplog.messages)


@pytest.mark.parametrize("idle", [False, True])
def test_when_samples_of_the_files_were_wrong_all_is_reset_and_the_disk_held_back(
    stacks, root, seed, tmp_path, caplog, idle, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(digests, "YOUNG_SECONDS", -60.0)  # files count as old at once
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"other weights")
    with engine(root, seed) as vllm:
        assert hits(vllm, [1, 2, 3]) == 0
    with engine(root, seed) as vllm:
        assert hits(vllm, [1, 2, 3]) == 3, "by samples the weights are those of before"
        confirmation = vllm.manager._driver._naming._confirmation
        confirmation.begin([FileDigest(FileState.of(file), "0" * 64)])
        confirmation.wait()
        if not idle:
            assert hits(vllm, [1, 2, 3]) + hits(vllm, [4, 5, 6]) == 0
            assert hits(vllm, [4, 5, 6]) == 3, "the cpu tier goes on"
    assert any("samples" in line for line in held_back(caplog))
    cache = digests.default_cache()
    if idle:
        assert not cache.exists(), "that the reset is durable was not waited for"
    else:
        assert str(file) in cache.read_text(), "the next start takes the file for what it is"
    with engine(root, seed) as vllm:
        assert hits(vllm, [1, 2, 3]) + hits(vllm, [4, 5, 6]) == 0


def wake_ups() -> int:
    """How often the adapter's threads in this process gave up a processor to wait."""
    tasks = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("kvtier-w")]
    assert len(tasks) >= 4, "two workers, each with a thread for copies and one for questions"
    status = [Path(f"/proc/self/task/{task}/status").read_text() for task in tasks]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in status)


def test_the_threads_of_idle_workers_sleep_until_they_are_asked(stacks, root, seed, caplog):
    with engine(root, seed, world_size=2) as vllm:
        vllm.reset()  # once the checksums of the start are there
        vllm.run()
        before = wake_ups()
        time.sleep(1.0)  # the figure is of this time; polling 20 times a second would make 40 of it
        assert wake_ups() - before <= 4
        assert hits(vllm, [1, 2, 3]) == 0
        vllm.reset()
        assert hits(vllm, [1, 2, 3, 4]) == 0
        assert not held_back(caplog)
