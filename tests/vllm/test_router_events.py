"""What routers are told: through vLLM's own tracker of events, by routers that count what is published."""

from __future__ import annotations

import random
from collections.abc import Sequence
from errno import EIO
from typing import Any

import pytest
from fake_engine import offloading_config, stack
from support_router import PublishingEngine, Router, on_wire
from support_served_stacks import ServedStacks
from test_contract import words

from kvtier.control.flow.load_or_compute import LoadOrCompute
from kvtier.engines.vllm.primary import client_driver, router_events
from kvtier.engines.vllm.primary.client_driver import ReachableBlocks
from kvtier.types import events
from kvtier.types.jobs import JobResult, TransferJob, failed
from kvtier.types.keys import CPU as ROWS
from kvtier.types.keys import OffloadKey, make_key

pytestmark = pytest.mark.engine

CPU, STORAGE = "CPU", "STORAGE"
PROMPT = [5, 6, 7, 8]


def config(root: Any, rows: int, *, factor: int = 1, **fs: Any) -> Any:
    described = stack(root, rows, row_bytes=4096 * factor, **fs)
    return offloading_config(described, factor=factor, extra={"self_describing_kv_events": True})


def described(router: Router, medium: str, keys: list[bytes], factor: int) -> bool:
    """True if the router has the tokens of every block of these chunks, and counts each once."""
    names = [name for key in keys for name in on_wire(key, factor)]
    return all(router.counts[medium][name] == 1 and name in router.described[medium] for name in names)


def serve(stacks: ServedStacks, engine: PublishingEngine, prompt: list[int]) -> Any:
    request = engine.add(prompt)
    engine.patient = True
    engine.run()
    engine.settle(stacks)  # what ended at last is published at the end of a step
    return request


def evict(stacks: ServedStacks, engine: PublishingEngine, tier: Any, count: int) -> None:
    assert stacks.call(engine, tier.evict, count) == count
    engine.settle(stacks)


def without_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in no row is computed sooner, where the stack file says how fast the engine computes."""
    monkeypatch.setattr(LoadOrCompute, "worth_loading", lambda choice, keys, now: 0)


async def failing(job: TransferJob) -> JobResult:
    return JobResult.uniform(job, failed(EIO))


def that_computes(described_stack: Any) -> Any:
    described_stack.extra_config["stack"]["prefill_tokens_per_second"] = 1.0
    return described_stack


@pytest.mark.parametrize("factor", [1, 3])
def test_a_router_that_counts_knows_at_rest_what_is_where_and_no_more(stacks, root, seed, factor):
    """Also over resets of the GPU's cache alone, of everything, and with a disk that evicts."""
    rng = random.Random(seed)
    router = Router()
    small = {"capacity": f"{512 if factor == 1 else 1024}KiB", "region_bytes": f"{128 if factor == 1 else 256}KiB"}
    with PublishingEngine(config(root, 24, factor=factor, **small), seed, num_blocks=256, router=router) as engine:
        for number in range(40):
            for _ in range(rng.randrange(1, 4)):
                engine.add([number // 8, *words(rng)])
            for _ in range(rng.randrange(6)):
                engine.step()
            if number % 7 == 3:
                engine.run()
                engine.settle(stacks)
                engine.reset_gpu()
            if number % 13 == 6:
                engine.run()
                engine.settle(stacks)
                engine.reset()
        engine.run()
        engine.settle(stacks)
        for number in range(900, 910):
            serve(stacks, engine, [number, *range(10)])
        tiers = stacks.control(engine)
        for medium, tier in ((CPU, tiers.cpu), (STORAGE, tiers.lowers[0].owned)):
            known = {name for name, count in router.counts[medium].items() if count}
            there = {name for key in tier.directory for name in on_wire(key, factor)}
            assert known <= there, "published and not there"
            assert known == router.plain[medium]
            assert max(router.counts[medium].values()) == 1, "counted twice: it would outlive its removal"
            assert tier.evictions > 20
        kept = set(engine.tracker._pending_event_metadata)
        on_disk = tiers.lowers[0].owned.directory if factor > 1 else {}
        assert kept <= {*tiers.cpu.directory, *on_disk}, "vLLM keeps tokens of what is nowhere"


@pytest.mark.parametrize("factor", [1, 2])
def test_after_a_restart_one_request_has_the_disk_published_with_tokens(stacks, root, seed, factor):
    with PublishingEngine(config(root, 50, factor=factor), seed, router=Router()) as engine:
        serve(stacks, engine, PROMPT)
    router = Router()
    with PublishingEngine(config(root, 50, factor=factor), seed, router=router) as engine:
        engine.step()
        assert not any(router.described.values())
        request = serve(stacks, engine, [*PROMPT, 9])
        assert request.hit == 4
        for medium in (CPU, STORAGE):
            assert described(router, medium, request.keys[0], factor)
        local = {(None, "LOCAL")}
        assert router.owners == {CPU: local, STORAGE: local}, "Dynamo drops what has an ownership"
        names = [name for key in request.keys[0] for name in on_wire(key, factor)]
        tokens = [token for name in names for token in router.described[STORAGE][name]]
        assert tokens == [1000 * word + i for word in [*PROMPT, 9] for i in range(16 * factor)]


def test_after_a_reset_of_the_gpu_alone_the_next_use_publishes_every_tier_again(stacks, root, seed):
    router = Router()
    with PublishingEngine(config(root, 50), seed, router=router) as engine:
        serve(stacks, engine, PROMPT)
        engine.reset_gpu()
        engine.step()
        assert not any(router.counts.values())
        request = serve(stacks, engine, PROMPT)
        for medium in (CPU, STORAGE):
            assert described(router, medium, request.keys[0], 1)


def test_a_block_that_is_computed_again_has_its_copy_on_disk_published(stacks, root, seed, monkeypatch):
    with PublishingEngine(config(root, 50), seed, router=Router()) as engine:
        serve(stacks, engine, PROMPT)
    router = Router()
    with PublishingEngine(that_computes(config(root, 50)), seed, router=router) as engine:
        without_loads(monkeypatch)
        request = serve(stacks, engine, PROMPT)
        assert request.hit == 0
        for medium in (CPU, STORAGE):
            assert described(router, medium, request.keys[0], 1)


@pytest.mark.parametrize("first", [CPU, STORAGE])
@pytest.mark.parametrize("factor", [1, 3])
def test_whichever_tier_loses_a_block_first_no_hash_of_it_is_left_in_any(stacks, root, seed, factor, first):
    with PublishingEngine(config(root, 50, factor=factor), seed, router=Router()) as engine:
        serve(stacks, engine, PROMPT)
    router = Router()
    with PublishingEngine(config(root, 50, factor=factor), seed, router=router) as engine:
        serve(stacks, engine, PROMPT)
        serve(stacks, engine, PROMPT)  # from a row, and published once more
        tiers = {CPU: stacks.control(engine).cpu, STORAGE: stacks.control(engine).lowers[0].owned}
        for medium in sorted(tiers, key=lambda one: one != first):
            assert router.counts[medium]
            evict(stacks, engine, tiers[medium], len(PROMPT))
            assert not router.counts[medium]
        assert not engine.tracker._pending_event_metadata


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("factor", [1, 3])
def test_a_block_on_two_disks_is_published_until_the_second_has_lost_it(stacks, root, tmp_path, seed, factor, first):
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    described_stack = config(root, 50, factor=factor)
    described_stack.extra_config["stack"]["tiers"].append(
        {"type": "fs", "name": "second", "roots": [str(other)], "capacity": "32MiB", "region_bytes": "1MiB"}
    )
    router = Router()
    with PublishingEngine(described_stack, seed, router=router) as engine:
        request = serve(stacks, engine, PROMPT)
        tiers = stacks.control(engine)
        disks = [lower.owned for lower in tiers.lowers]
        evict(stacks, engine, tiers.cpu, len(PROMPT))
        assert router.counts[CPU] == {}
        evict(stacks, engine, disks[first], len(PROMPT))
        names = [name for key in request.keys[0] for name in on_wire(key, factor)]
        assert all(router.counts[STORAGE][name] == 1 for name in names[factor - 1 :: factor])
        assert router.plain[STORAGE] >= set(names[factor - 1 :: factor])
        evict(stacks, engine, disks[1 - first], len(PROMPT))
        assert not any(router.counts[STORAGE][name] for name in names)
        assert not engine.tracker._pending_event_metadata


@pytest.mark.parametrize("factor", [1, 3])
def test_a_reset_of_the_tiers_is_published_for_each_of_them(stacks, root, seed, factor):
    router = Router()
    with PublishingEngine(config(root, 50, factor=factor), seed, router=router) as engine:
        request = serve(stacks, engine, PROMPT)
        engine.reset_gpu = lambda: None  # vLLM's own event would hide what ours say
        engine.reset()
        engine.settle(stacks)
        last = [on_wire(key, factor)[-1] for key in request.keys[0]]
        assert not any(router.counts[medium][name] for name in last for medium in (CPU, STORAGE))


def test_much_that_was_recovered_is_published_in_parts_and_the_engine_steps_until_all_is(
    stacks, root, seed, monkeypatch
):
    monkeypatch.setattr(router_events, "KEYS_PER_STEP", 5)
    monkeypatch.setattr(client_driver, "KEYS_AT_ONCE", 10)  # each is published as removed and as stored
    with PublishingEngine(config(root, 50), seed, num_blocks=256, router=Router()) as engine:
        request = serve(stacks, engine, list(range(23)))
    router = Router()
    with PublishingEngine(config(root, 50), seed, num_blocks=256, router=router) as engine:
        engine.settle(stacks)
        assert not router.counts[STORAGE], "nothing is published before a router may listen"
        engine.add([99])
        while not router.counts[STORAGE]:
            engine.step()
        assert sum(router.counts[STORAGE].values()) <= 5
        disk = stacks.control(engine).lowers[0].owned
        assert stacks.call(engine, disk.evict, 1) == 1
        engine.run()
        engine.settle(stacks)
        known = [key for key in request.keys[0] if router.counts[STORAGE][on_wire(key, 1)[0]]]
        assert known == [key for key in request.keys[0] if key in disk.directory]
        assert len(known) == 22
        assert not engine.real._events.waiting


def test_vllm_gives_up_the_tokens_of_a_store_that_failed_and_of_a_block_that_was_not_loaded(
    stacks, root, seed, monkeypatch
):
    with PublishingEngine(config(root, 50), seed, router=Router()) as engine:
        serve(stacks, engine, PROMPT)
    with PublishingEngine(that_computes(config(root, 50)), seed, router=Router()) as engine:
        # pending at first, then neither loaded nor stored
        without_loads(monkeypatch)
        monkeypatch.setattr(engine.real._adapters, "storable", lambda request_id: False)
        serve(stacks, engine, PROMPT)
        assert not engine.tracker._pending_event_metadata
    with PublishingEngine(config(root, 50), seed, router=Router()) as engine:
        engine.workers[0]._gpu.load = failing
        serve(stacks, engine, [1, 2, 3])
        assert not engine.tracker._pending_event_metadata


def test_without_vllms_events_nothing_is_kept(stacks, root, seed):
    quiet = config(root, 50)
    object.__setattr__(quiet, "enable_kv_cache_events", False)
    with PublishingEngine(quiet, seed, router=Router()) as engine:
        serve(stacks, engine, PROMPT)
        serve(stacks, engine, PROMPT)
        assert not engine.router.counts
        assert stacks.stats(engine).events_lost == 0


@pytest.mark.parametrize("factor", [1, 3])
def test_what_a_process_had_is_taken_back_when_it_ends_and_the_next_ones_disk_is_published_once(
    stacks, root, seed, factor
):
    router = Router()
    with PublishingEngine(config(root, 50, factor=factor), seed, router=router) as engine:
        request = serve(stacks, engine, PROMPT)
        names = [name for key in request.keys[0] for name in on_wire(key, factor)]
        for medium in (CPU, STORAGE):
            assert described(router, medium, request.keys[0], factor)
        stacks.end_process(engine)
        stacks.eventually(engine, lambda: not engine.real._driver._core.connected)
        assert not any(router.counts.values())
        assert not any(router.plain.values())
        assert not engine.tracker._pending_event_metadata
        assert not engine.real._driver.has_pending_work
        stacks.start_process(engine)
        stacks.eventually(engine, lambda: engine.real._driver.serves)
        engine.settle(stacks)
        assert not router.counts[CPU]
        assert {name: router.counts[STORAGE][name] for name in names[factor - 1 :: factor]} == dict.fromkeys(
            names[factor - 1 :: factor], 1
        )
        assert serve(stacks, engine, PROMPT).hit == len(PROMPT)
        for medium in (CPU, STORAGE):
            assert described(router, medium, request.keys[0], factor)


def test_many_blocks_of_a_process_that_has_ended_are_taken_back_in_parts(stacks, root, seed, monkeypatch):
    router = Router()
    with PublishingEngine(config(root, 50), seed, num_blocks=256, router=router) as engine:
        serve(stacks, engine, list(range(23)))
        assert sum(router.counts[CPU].values()) == sum(router.counts[STORAGE].values()) == 23
        monkeypatch.setattr(client_driver, "KEYS_AT_ONCE", 10)
        stacks.end_process(engine)
        left = []
        while engine.real._driver._core.connected or engine.real._driver.has_pending_work:
            engine.step()
            left.append(sum(count for counts in router.counts.values() for count in counts.values()))
        assert [count for count in left if count < 46] == [36, 26, 16, 6, 0]


def test_events_that_come_all_the_time_do_not_wait_ever_longer():
    """Of 2,000 keys in each step, for 200 steps."""
    blocks = ReachableBlocks()
    for step in range(200):
        published(blocks, [events.OffloadingEvent(keys(2000, step), ROWS, False, "cpu")])
    steps = 1
    while blocks.has_more:
        published(blocks)
        steps += 1
    assert steps < 5


def test_many_events_at_once_are_published_in_parts():
    blocks = ReachableBlocks()
    many = [events.OffloadingEvent(keys(10_000), ROWS, False, "cpu")]
    assert published(blocks, many) == client_driver.KEYS_AT_ONCE
    while blocks.has_more:
        assert published(blocks) <= client_driver.KEYS_AT_ONCE


def keys(count: int, part: int = 0) -> tuple[OffloadKey, ...]:
    return tuple(make_key((part * count + number).to_bytes(32, "big"), 0) for number in range(count))


def published(blocks: ReachableBlocks, came: Sequence[events.OffloadingEvent] = ()) -> int:
    """The keys that a step publishes, before which these events came."""
    for given in (came, ()):  # a step has two turns
        blocks.begin_turn()
        blocks.record(given)
    return sum(len(event.keys) for event in blocks.take())
