"""The adapter's classes under a scheduler that behaves as vLLM's does, two batches in flight, without a model."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import PAGE, FakeEngine, Request, content, offloading_config, stack
from support_following import FollowingLRU
from support_served_stacks import ServedStacks
from support_valkey import valkey_server
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, ScheduleEndContext, make_offload_key

from kvtier.engines.vllm import KVTierSpec
from kvtier.engines.vllm.primary import manager, worker
from kvtier.engines.vllm.primary.served_requests import ServedRequest
from kvtier.engines.vllm.settings import engine_plan
from kvtier.errors import ConfigError
from kvtier.policy import POLICIES
from kvtier.service.pool import Pool
from kvtier.stack import StackStats
from kvtier.tier.contract import Opened, TierContext
from kvtier_remote import ValkeyBackend
from kvtier_remote.valkey.transport import ValkeyTransport

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("stacks")]


def words(rng: random.Random, prefixes: int = 3) -> list[int]:
    """A prompt of 3 to 8 chunks that begins as one of a few others do."""
    return [rng.randrange(prefixes)] * 3 + [rng.randrange(1000) for _ in range(rng.randrange(6))]


SHAPES = {
    "one group": {},
    "two groups with ids of vLLM's own": {"group_ids": (1, 4)},
    "two workers": {"world_size": 2},
    "one copy for two workers": {"world_size": 2, "replicated_layout": True},
    "chunks of three blocks": {"factor": 3},
    "everything": {"group_ids": (0, 2), "world_size": 2, "factor": 2},
}


@pytest.mark.parametrize("rows", [400, 12])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_loaded_byte_is_its_keys_and_every_request_ends(root, seed, shape, rows):
    changes = SHAPES[shape]
    copies = 1 if "replicated_layout" in changes else changes.get("world_size", 1)
    row = PAGE * copies * changes.get("factor", 1)
    rng = random.Random(seed)
    config = offloading_config(stack(root, rows, row_bytes=row), **changes)
    with FakeEngine(config, seed, num_blocks=256) as engine:
        for _ in range(25):
            for _ in range(rng.randrange(1, 3)):
                engine.add(words(rng))
            for _ in range(rng.randrange(4)):
                engine.step()
        engine.run()
        print(dict(engine.counts))
        assert_stored_and_served(engine, [-1, -2, -3])


@pytest.mark.parametrize("delay_seconds", [0.0, 0.01])
def test_a_reset_with_two_batches_in_flight_lets_no_old_copy_into_a_new_row(root, seed, monkeypatch, delay_seconds):
    """How many of the random prompts are hits depends on the stack's speed. What is stored at rest always is one."""
    deliver = Pool._deliver
    monkeypatch.setattr(Pool, "_deliver", lambda *given: (time.sleep(delay_seconds), deliver(*given)))
    rng = random.Random(seed)
    with FakeEngine(offloading_config(stack(root, 10)), seed, num_blocks=256) as engine:
        for round_number in range(40):
            for _ in range(2):
                engine.add(words(rng))
            for _ in range(rng.randrange(1, 5)):
                engine.step()
            if round_number % 4 == 1:
                engine.run()
                assert_stored_and_served(engine, [-round_number, -2, -3, -4])
            if round_number % 4 == 3:
                engine.reset()
        engine.run()
        assert engine.wrong == 0
        assert engine.counts["resets"] == 10


def test_nothing_from_before_a_reset_is_a_hit_also_after_a_restart(root, seed):
    prompt = [1, 2, 3, 4]
    with FakeEngine(offloading_config(stack(root, 50)), seed) as engine:
        engine.add(prompt)
        engine.run()
        engine.reset()
        assert_hits(engine, prompt, 0)
    with FakeEngine(offloading_config(stack(root, 50)), seed) as engine:
        assert_hits(engine, [9, *prompt], 0)
        assert_hits(engine, prompt, 4)  # stored again after the reset


def at_rest(stacks: ServedStacks, engine: FakeEngine) -> StackStats:
    """The figures once nothing is on its way to the disk."""
    until = time.monotonic() + 60.0
    while (stats := stacks.stats(engine)).backlog or stats.tiers["cpu"].slots["filling"]:
        assert time.monotonic() < until
        time.sleep(0.005)
    return stats


def assert_stored_and_served(engine: FakeEngine, prompt: list[int]) -> None:
    """At rest every row can be had: a new prompt is stored whole, and its bytes are loaded again."""
    checked = engine.counts["pages checked"]
    assert_hits(engine, prompt, 0)
    assert_hits(engine, [*prompt, 0], len(prompt))
    assert engine.counts["pages checked"] > checked


def assert_hits(engine: FakeEngine, prompt: list[int], expected: int) -> None:
    engine.patient = True
    request = engine.add(prompt)
    engine.run()
    engine.patient = False
    assert request.hit == expected
    assert engine.wrong == 0


def test_a_restart_hits_from_disk(root, seed):
    with FakeEngine(offloading_config(stack(root, 50)), seed) as engine:
        assert_hits(engine, [5, 6, 7, 8, 9], 0)
        assert_hits(engine, [5, 6, 7, 8, 9, 10], 5)
    with FakeEngine(offloading_config(stack(root, 50)), seed) as engine:
        assert_hits(engine, [5, 6, 7, 8, 9, 10, 11], 6)


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_each_group_stores_what_it_fills_of_a_block_and_nothing_else(stacks, root, seed, workers, factor):
    """On the disk: its own bytes, in whole pages, behind a header. In memory every row is as long as the longest."""
    fills, block_bytes = [8 * PAGE, 2 * PAGE, 3 * PAGE - 64], 8 * PAGE
    shape = {"group_ids": (0, 1, 2), "page_bytes": block_bytes, "world_size": workers, "factor": factor}
    described = stack(root, 200, row_bytes=block_bytes * workers * factor, region_bytes="2MiB")
    prompts = [[number, number + 1, number + 2, number + 3] for number in range(0, 24, 4)]
    for hit in (0, 4):
        config = offloading_config(described, **shape)
        with FakeEngine(config, seed, num_blocks=512, fills=fills) as engine:
            for prompt in prompts:
                assert_hits(engine, [*prompt, *([99] if hit else [])], hit)
            if hit:
                continue
            tier = at_rest(stacks, engine).tiers["fs"]
            assert tier.stored == len(prompts) * 4 * len(fills)
            payload = sum(fills) * workers * factor * len(prompts) * 4
            aligned = sum(-(-filled * workers * factor // PAGE) * PAGE for filled in fills) * len(prompts) * 4
            assert payload <= tier.store_bytes <= aligned
            assert tier.written_bytes == aligned + tier.stored * PAGE


@pytest.mark.parametrize(("blocks", "first"), [([1, 2, 3, 4, 5], 1), ([1, 0, 3, 4, 5, 6], 0), ([1, 2, 4, 5, 6], 0)])
def test_a_block_that_is_stored_in_part_is_no_hit(stacks, root, seed, blocks, first):
    """vLLM leaves null blocks out: the first chunk lacks its head, the first lacks a block, or it is not said which."""
    with FakeEngine(offloading_config(stack(root, 30, row_bytes=3 * PAGE), factor=3), seed) as engine:
        request, (gpu,) = engine.add([1, 2]), engine.workers
        engine.waiting.clear()
        keys, context = request.keys[0], request.context
        until = time.monotonic() + 60.0
        while engine._hits(request) is None or (stored := engine.manager.prepare_store(keys, context)) is None:
            assert time.monotonic() < until
            engine.manager.on_schedule_end(ScheduleEndContext([], ()))
        for sub, block in enumerate(blocks[-3:]):
            engine.tensors[0][block] = content(keys[1], 0, sub)
        assert gpu.submit_store(1, GPULoadStoreSpec(blocks, [len(blocks)], [first]), stored.store_spec)
        gpu.wait({1})
        assert [result.success for result in gpu.get_finished()] == [True], "or vLLM would end the engine"
        engine.manager.complete_store(keys, context)
        engine.manager.on_request_finished(context)
        engine.run()
        assert_hits(engine, [1, 2, 3], 0)
        assert_hits(engine, [1, 2, 3], 3)


@pytest.mark.parametrize("change", [{"model": "other"}, {"page_bytes": 2 * PAGE}])
def test_another_model_or_layout_is_a_clean_miss(root, seed, change):
    with FakeEngine(offloading_config(stack(root, 50)), seed) as engine:
        assert_hits(engine, [5, 6, 7], 0)
    if "page_bytes" in change:
        return
    with FakeEngine(offloading_config(stack(root, 50), **change), seed) as engine:
        assert_hits(engine, [5, 6, 7], 0)


def test_a_prefix_longer_than_the_cpu_tier_is_truncated_to_what_fits(root, seed):
    long = list(range(30))
    with FakeEngine(offloading_config(stack(root, 64)), seed, num_blocks=256) as engine:
        assert_hits(engine, long, 0)
    with FakeEngine(offloading_config(stack(root, 8)), seed, num_blocks=512) as engine:
        alone = engine.add([*long, 99])
        engine.run()
        assert alone.hit == 8
        together = [engine.add([*long, number]) for number in range(10)]
        engine.run()
        assert all(request.hit >= 1 for request in together), [request.hit for request in together]
        assert engine.wrong == 0


def test_events_say_what_became_reachable_and_what_ceased_to_be(root, seed):
    with FakeEngine(offloading_config(stack(root, 6)), seed, num_blocks=128) as engine:
        engine.patient = True
        for number in range(6):
            engine.add([number, number + 1, number + 2])
            engine.run()
        events, until = list(engine.manager.take_events()), time.monotonic() + 20.0
        while sum(len(event.keys) for event in events if event.medium.value == "STORAGE") < 18:
            assert time.monotonic() < until, "all 18 blocks are stored and reach the disk"
            engine.step()
            events += engine.manager.take_events()
    told = {(event.medium.value, event.removed) for event in events}
    assert {("CPU", False), ("CPU", True), ("STORAGE", False)} <= told
    assert sum(len(event.keys) for event in events if event.medium.value == "STORAGE") == 18


def test_a_worker_that_cannot_open_leaves_no_thread(root, seed, monkeypatch):
    def missing(*_: object) -> None:
        raise ConfigError("no models")

    monkeypatch.setattr(worker, "worker_layout", lambda layout, refs: layout)
    monkeypatch.setattr(worker, "loaded_models", missing)
    with pytest.raises(ConfigError, match="no models"):
        KVTierSpec(offloading_config(stack(root, 8))).get_worker(CanonicalKVCaches([], []))
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtier-worker" and thread.is_alive()]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"extra": {"cpu_bytes": 1}}, "cpu_bytes"),
        ({"extra": {"stack": 7}}, "stack"),
        ({"extra": {"stack": "/nonexistent.yaml"}}, "nonexistent"),
        ({"parallel": {"pp_size": 2}}, "pipeline_parallel_size"),
        ({"canonical_layout": True}, "canonical_layout"),
        ({"page_bytes": 0}, "worker_kv_bytes_per_block"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(root, config, named):
    with pytest.raises(ConfigError, match=named):
        KVTierSpec(offloading_config(stack(root, 8), **config))


def test_data_parallel_engines_have_the_files_of_their_stack_in_common(root):
    record = {"folder": str(root / "traces"), "max_bytes": "64MiB"}
    paths = {"state_dir": str(root / "state"), "stats_socket": str(root / "stats")}
    config = stack(root, 8) | paths | {"record": record}
    for engines in (1, 2):
        for index in range(engines):
            parallel = {"data_parallel_index": index, "data_parallel_size": engines}
            planned = engine_plan(offloading_config(config, parallel=parallel)).stack
            assert planned.record is not None
            found = (planned.state_dir, planned.stats_socket, planned.record.folder, planned.tiers[1].roots[0])
            assert found == tuple(map(str, (root / "state", root / "stats", root / "traces", root)))


@pytest.mark.parametrize(("probes", "keys_most"), [(False, 64), (True, 12)])
def test_unknown_keys_of_a_request_are_looked_up_together(root, seed, monkeypatch, probes, keys_most):
    """Once for each answer that is waited for; with prefix probing, as object stores have it, only a few of them."""
    opening = ValkeyBackend.open

    async def opened(tier: ValkeyBackend, context: TierContext) -> Opened:
        return replace(await opening(tier, context), probe_prefix=probes)

    monkeypatch.setattr(ValkeyBackend, "open", opened)
    asked: list[int] = []
    present = ValkeyTransport.present
    monkeypatch.setattr(
        ValkeyTransport, "present", lambda self, places: (asked.append(len(places)), present(self, places))[1]
    )
    prompt, longer = list(range(64)), [*range(48), *range(100, 116)]
    with valkey_server() as server:
        options = server.options().model_dump(mode="json", exclude_unset=True)
        below = stack(root, 200) | {"lookup_timeout_seconds": 40.0}
        below["tiers"][1:] = [options]
        with FakeEngine(offloading_config(below), seed, num_blocks=256) as engine:
            assert_hits(engine, prompt, 0)
        for one, expected in ((prompt, 64), (longer, 48)):
            with FakeEngine(offloading_config(below), seed, num_blocks=256) as engine:
                asked.clear()
                request = engine.add(one)
                while request.state == "waiting":
                    engine.step()
                    engine.manager.has_pending_work()
                assert request.hit == expected
                assert sum(asked) <= keys_most
                assert len(asked) == 1 or probes
                print(probes, expected, asked)
                engine.run()
                assert engine.wrong == 0


def test_policies_that_follow_requests_are_given_prompts_and_output_lengths(stacks, root, seed, monkeypatch):
    monkeypatch.setitem(POLICIES, "following", lambda: FollowingLRU)
    described = stack(root, 50)
    described["tiers"][0]["policy"] = "following"
    rng = random.Random(seed)
    with FakeEngine(offloading_config(described), seed) as engine:
        requests = [engine.add(words(rng)) for _ in range(3)]
        for number, request in enumerate(requests):
            request.context.set_state(ServedRequest(vllms_request(100 + number), 0.0))
        engine.run()
        model = stacks.calls(engine, "end", len(requests))
    begun = {stacks.of_engine(use.request_id): len(use.keys) for use in model.uses if use.group == 0}
    assert begun == {request.context.req_id: len(request.keys[0]) for request in requests}
    ended = [(stacks.of_engine(name), tokens) for name, tokens in model.told("end")]
    assert sorted(ended) == sorted((request.context.req_id, 100 + number) for number, request in enumerate(requests))


@pytest.mark.parametrize("group_ids", [(0,), (1, 4)])
def test_policies_that_follow_requests_are_given_the_blocks_of_the_output_once(
    stacks, root, seed, monkeypatch, group_ids
):
    monkeypatch.setitem(POLICIES, "following", lambda: FollowingLRU)
    described = stack(root, 50)
    described["tiers"][0]["policy"] = "following"
    with FakeEngine(offloading_config(described, group_ids=group_ids), seed) as engine:
        request = engine.add([1, 2, 3])
        context = request.context
        engine.manager.lookup(request.keys[0][0], context)
        grown = [[make_offload_key(bytes([block]) * 32, group) for group in group_ids] for block in range(3)]
        for number, keys in enumerate(grown[:1] + grown):
            for key in keys:
                context.set_offload_key_position(key, (4 + number) * 16)
            engine.manager.prepare_store([], context)
        names = [[engine.manager._ids.to_kvtier(key) for key in keys] for keys in grown]
        engine.run()
        model = stacks.calls(engine, "extend", len(names) * len(group_ids))
    by_group = [(context.req_id, group, [keys[group]]) for keys in names for group in range(len(group_ids))]
    assert [(stacks.of_engine(name), *more) for name, *more in model.told("extend")] == by_group


def vllms_request(output_tokens: int = 0, *, finished: bool = False, **more: Any) -> SimpleNamespace:
    about = {"priority": 0, "cache_salt": None, "session_id": None, "num_output_tokens": output_tokens}
    return SimpleNamespace(is_finished=lambda: finished, **about, **more)


def offered(engine: FakeEngine, request: Request, first: int = 0, rows: int | None = None) -> int | None:
    """How many of four blocks vLLM is to copy into rows, of which so many can be had; None: it offers them again."""
    storable = engine.manager._driver.storable
    with pytest.MonkeyPatch.context() as patched:
        if rows is not None:
            patched.setattr(engine.manager._driver, "storable", lambda *given: (storable(*given)[0], rows))
        answer = engine.manager.prepare_store(request.keys[0][first : first + 4], request.context)
    return None if answer is None else len(answer.keys_to_store)


def begun(stacks: ServedStacks, engine: FakeEngine, words: list[int]) -> Request:
    """A request that the engine's steps leave alone, with rows lent to the engine."""
    request = engine.add(words)
    engine.waiting.remove(request)
    engine.manager.lookup(request.keys[0][0], request.context)
    stacks.eventually(engine, lambda: engine.manager._driver._core.room >= len(words))
    return request


def test_each_store_of_a_request_may_wait_for_its_rows(stacks, root, seed, monkeypatch):
    monkeypatch.setattr(manager, "PATIENCE_SECONDS", 0.5)
    with FakeEngine(offloading_config(stack(root, 100)), seed) as engine:
        request = begun(stacks, engine, list(range(8)))
        refused = time.monotonic()
        assert offered(engine, request, rows=2) is None
        assert offered(engine, request) == 4
        stacks.eventually(engine, lambda: time.monotonic() > refused + 0.5)
        assert offered(engine, request, first=4, rows=2) is None, "it waits anew"
        stacks.eventually(engine, lambda: offered(engine, request, first=4, rows=2) == 2)


def test_the_last_offer_of_a_request_that_has_finished_takes_the_rows_there_are(stacks, root, seed):
    with FakeEngine(offloading_config(stack(root, 100)), seed) as engine:
        request = begun(stacks, engine, [1, 2, 3, 4])
        request.context.set_state(ServedRequest(vllms_request(finished=True), 0.0))
        assert offered(engine, request, rows=3) == 3


def test_a_request_that_the_gpus_own_cache_serves_keeps_no_rows(stacks, root, seed):
    """Its blocks are asked for when it comes. It may decode for long."""
    with FakeEngine(offloading_config(stack(root, 100)), seed) as engine:
        engine.add([1, 2, 3, 4])
        engine.run()
        request = engine.add([1, 2, 3, 4])
        engine.waiting.remove(request)
        served = vllms_request(block_hashes=[key[:-4] for key in request.keys[0]], num_prompt_tokens=64)
        request.context.set_state(ServedRequest(served, 0.0))
        engine.manager.on_new_request(request.context)
        found = engine.manager._requests[request.context.req_id].request
        stacks.eventually(engine, lambda: len(found.leased) == 4)
        assert pinned(stacks, engine) == 4
        engine.manager.on_schedule_end(ScheduleEndContext([request.context.req_id], ()))
        stacks.eventually(engine, lambda: not pinned(stacks, engine))
        assert found.present >= set(request.keys[0]), "none is stored again"


def pinned(stacks: ServedStacks, engine: FakeEngine) -> int:
    """Rows with a block that may not be evicted."""
    tier = stacks.control(engine).cpu
    return int(stacks.call(engine, lambda: sum(bool(tier.table.pins[row]) for row in tier.directory.values())))
