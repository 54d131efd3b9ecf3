"""What routers are told: through vLLM's own tracker of events, by routers that count what is published."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_engine import offloading_config, stack
from support_router import PublishingEngine, Router, on_wire
from test_contract import words

from kvtier.engines.vllm.primary import router_events
from kvtier.stack.request import StackRequest

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


def control(engine: PublishingEngine) -> Any:
    """The tiers' directories."""
    return engine.real._driver.stack._assembled.plane.control


def serve(engine: PublishingEngine, prompt: list[int]) -> Any:
    request = engine.add(prompt)
    engine.run()
    engine.step()  # what ended at last is published at the end of a step
    return request


@pytest.mark.parametrize("factor", [1, 3])
def test_a_router_that_counts_knows_at_rest_what_is_where_and_no_more(root, seed, factor):
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
                engine.step()
                engine.reset_gpu()
            if number % 13 == 6:
                engine.run()
                engine.step()
                engine.reset()
        engine.run()
        engine.step()
        for number in range(900, 910):
            serve(engine, [number, *range(10)])
        tiers = control(engine)
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
def test_after_a_restart_one_request_has_the_disk_published_with_tokens(root, seed, factor):
    with PublishingEngine(config(root, 50, factor=factor), seed, router=Router()) as engine:
        serve(engine, PROMPT)
    router = Router()
    with PublishingEngine(config(root, 50, factor=factor), seed, router=router) as engine:
        engine.step()
        assert not any(router.described.values())
        request = serve(engine, [*PROMPT, 9])
        assert request.hit == 4
        for medium in (CPU, STORAGE):
            assert described(router, medium, request.keys[0], factor)
        local = {(None, "LOCAL")}
        assert router.owners == {CPU: local, STORAGE: local}, "Dynamo drops what has an ownership"
        names = [name for key in request.keys[0] for name in on_wire(key, factor)]
        tokens = [token for name in names for token in router.described[STORAGE][name]]
        assert tokens == [1000 * word + i for word in [*PROMPT, 9] for i in range(16 * factor)]


def test_after_a_reset_of_the_gpu_alone_the_next_use_publishes_every_tier_again(root, seed):
    router = Router()
    with PublishingEngine(config(root, 50), seed, router=router) as engine:
        serve(engine, PROMPT)
        engine.reset_gpu()
        engine.step()
        assert not any(router.counts.values())
        request = serve(engine, PROMPT)
        for medium in (CPU, STORAGE):
            assert described(router, medium, request.keys[0], 1)


def test_a_block_that_is_computed_again_has_its_copy_on_disk_published(root, seed, monkeypatch):
    with PublishingEngine(config(root, 50), seed, router=Router()) as engine:
        serve(engine, PROMPT)
    router = Router()
    with PublishingEngine(config(root, 50), seed, router=router) as engine:
        monkeypatch.setattr(StackRequest, "worth_loading", lambda request, keys: 0)
        engine.real._chooses = True
        request = serve(engine, PROMPT)
        assert request.hit == 0
        for medium in (CPU, STORAGE):
            assert described(router, medium, request.keys[0], 1)


@pytest.mark.parametrize("first", [CPU, STORAGE])
@pytest.mark.parametrize("factor", [1, 3])
def test_whichever_tier_loses_a_block_first_no_hash_of_it_is_left_in_any(root, seed, factor, first):
    with PublishingEngine(config(root, 50, factor=factor), seed, router=Router()) as engine:
        serve(engine, PROMPT)
    router = Router()
    with PublishingEngine(config(root, 50, factor=factor), seed, router=router) as engine:
        serve(engine, PROMPT)
        serve(engine, PROMPT)  # from a row, and published once more
        tiers = {CPU: control(engine).cpu, STORAGE: control(engine).lowers[0].owned}
        for medium in sorted(tiers, key=lambda one: one != first):
            assert router.counts[medium]
            assert tiers[medium].evict(len(PROMPT)) == len(PROMPT)
            engine.step()
            assert not router.counts[medium]
        assert not engine.tracker._pending_event_metadata


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("factor", [1, 3])
def test_a_block_on_two_disks_is_published_until_the_second_has_lost_it(root, tmp_path, seed, factor, first):
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    described_stack = config(root, 50, factor=factor)
    described_stack.extra_config["stack"]["tiers"].append(
        {"type": "fs", "name": "second", "roots": [str(other)], "capacity": "32MiB", "region_bytes": "1MiB"}
    )
    router = Router()
    with PublishingEngine(described_stack, seed, router=router) as engine:
        request = serve(engine, PROMPT)
        tiers = control(engine)
        disks = [lower.owned for lower in tiers.lowers]
        assert tiers.cpu.evict(len(PROMPT)) == len(PROMPT)
        engine.step()
        assert router.counts[CPU] == {}
        assert disks[first].evict(len(PROMPT)) == len(PROMPT)
        engine.step()
        names = [name for key in request.keys[0] for name in on_wire(key, factor)]
        assert all(router.counts[STORAGE][name] == 1 for name in names[factor - 1 :: factor])
        assert router.plain[STORAGE] >= set(names[factor - 1 :: factor])
        assert disks[1 - first].evict(len(PROMPT)) == len(PROMPT)
        engine.step()
        assert not any(router.counts[STORAGE][name] for name in names)
        assert not engine.tracker._pending_event_metadata


@pytest.mark.parametrize("factor", [1, 3])
def test_a_reset_of_the_tiers_is_published_for_each_of_them(root, seed, factor):
    router = Router()
    with PublishingEngine(config(root, 50, factor=factor), seed, router=router) as engine:
        request = serve(engine, PROMPT)
        engine.reset_gpu = lambda: None  # vLLM's own event would hide what ours say
        engine.reset()
        engine.step()
        last = [on_wire(key, factor)[-1] for key in request.keys[0]]
        assert not any(router.counts[medium][name] for name in last for medium in (CPU, STORAGE))


def test_much_that_was_recovered_is_published_in_parts_and_the_engine_steps_until_all_is(root, seed, monkeypatch):
    monkeypatch.setattr(router_events, "KEYS_PER_STEP", 5)
    with PublishingEngine(config(root, 50), seed, num_blocks=256, router=Router()) as engine:
        request = serve(engine, list(range(23)))
    router = Router()
    with PublishingEngine(config(root, 50), seed, num_blocks=256, router=router) as engine:
        for _ in range(5):
            engine.step()
        assert not router.counts[STORAGE], "nothing is published before a router may listen"
        engine.add([99])
        while not router.counts[STORAGE]:
            engine.step()
        assert sum(router.counts[STORAGE].values()) <= 5
        disk = control(engine).lowers[0].owned
        assert disk.evict(1) == 1
        engine.run()
        engine.step()
        known = [key for key in request.keys[0] if router.counts[STORAGE][on_wire(key, 1)[0]]]
        assert known == [key for key in request.keys[0] if key in disk.directory]
        assert len(known) == 22
        assert not engine.real._events.waiting


def test_vllm_gives_up_the_tokens_of_a_store_that_failed_and_of_a_block_that_was_not_loaded(root, seed, monkeypatch):
    with PublishingEngine(config(root, 50), seed, router=Router()) as engine:
        serve(engine, PROMPT)
    with PublishingEngine(config(root, 50), seed, router=Router()) as engine:
        # pending at first, then neither loaded nor stored
        monkeypatch.setattr(StackRequest, "worth_loading", lambda request, keys: 0)
        engine.real._chooses = True
        monkeypatch.setattr(engine.real._adapters, "storable", lambda request_id: False)
        serve(engine, PROMPT)
        assert not engine.tracker._pending_event_metadata
    with PublishingEngine(config(root, 50), seed, router=Router()) as engine:
        copies = engine.real._driver.copies
        end = copies.end
        monkeypatch.setattr(copies, "end", lambda names, reason=0: end(names, 5))
        serve(engine, [1, 2, 3])
        assert not engine.tracker._pending_event_metadata


def test_without_vllms_events_nothing_is_kept(root, seed):
    quiet = config(root, 50)
    object.__setattr__(quiet, "enable_kv_cache_events", False)
    with PublishingEngine(quiet, seed, router=Router()) as engine:
        serve(engine, PROMPT)
        serve(engine, PROMPT)
        assert not engine.router.counts
        assert engine.real._driver.stack.stats().events_lost == 0
