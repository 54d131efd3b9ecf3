"""What a release of vLLM changes under the adapter: which are served, and what 0.33 calls otherwise than 0.32 does.

The order of calls of 0.33 is driven here whatever is installed; only its new classes need it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait

import pytest
import torch
import vllm
from fake_engine import AS_0_33, FakeEngine, Request, content, offloading_config, stack
from support_vllm_tiering import Vllm, tier_config
from support_vllm_tiering import offloading_config as tiering_config
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvtier.engines.vllm import KVTierFs, KVTierSpec
from kvtier.engines.vllm.compat import require_supported
from kvtier.engines.vllm.primary import worker
from kvtier.engines.vllm.primary.manager import KVTierManager
from kvtier.engines.vllm.settings import engine_plan
from kvtier.errors import ConfigError, ResourceError
from kvtier_gpu.engines import host_memory
from kvtier_gpu.engines.host_memory import HostMemoryEngine

pytestmark = pytest.mark.engine

UNTESTED = ["0.31.0", "0.34.0", "0.330.0", "1.33.0", "0.33.0rc1", "0.33.1.dev5+g1a2b3c4", "dev", ""]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33.0+cpu", "0.33.1.post1+cu130"])
def test_a_tested_release_is_served_in_every_build(root, monkeypatch, caplog, version):
    monkeypatch.setattr(vllm, "__version__", version)
    KVTierSpec(offloading_config(stack(root, 8)))
    assert not caplog.records


@pytest.mark.parametrize("version", UNTESTED)
def test_an_untested_release_is_refused_with_one_line_unless_it_is_allowed(root, monkeypatch, caplog, version):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(ConfigError) as refused:
        KVTierSpec(offloading_config(stack(root, 8)))
    line = str(refused.value)
    assert line.startswith(f"allow_untested_engine: vLLM {version} is installed")
    assert "\n" not in line
    assert "0.32 or 0.33" in line
    KVTierSpec(offloading_config(stack(root, 8), extra={"allow_untested_engine": True}))
    assert [f"vLLM {version} is installed" in record.message for record in caplog.records] == [True]


def test_a_secondary_tier_refuses_an_untested_release_unless_the_connector_allows_it(root, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    config = tiering_config(tier_config(root))
    with pytest.raises(ConfigError, match=r"allow_untested_engine: vLLM 0\.34\.0 is installed"):
        Vllm(config)
    config.extra_config["allow_untested_engine"] = True
    with Vllm(config) as engine:
        engine.store([])


def test_consent_is_true_or_false(root):
    with pytest.raises(ConfigError, match="allow_untested_engine: must be true or false"):
        KVTierSpec(offloading_config(stack(root, 8), extra={"allow_untested_engine": "no"}))


def test_what_a_release_lacks_is_named_whatever_its_version(monkeypatch):
    monkeypatch.delattr(base.OffloadingManager, "has_pending_work")
    with pytest.raises(ConfigError, match=r"lacks OffloadingManager\.has_pending_work"):
        require_supported()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (KVTierManager, base.OffloadingManager),
        (worker.KVTierWorker, base.OffloadingWorker),
        (KVTierSpec, base.OffloadingSpec),
        (KVTierFs, SecondaryTierManager),
    ],
)
def test_every_method_takes_what_the_installed_release_passes(ours, theirs):
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        if name in vars(ours) and not name.startswith("_"):
            passed = list(inspect.signature(method).parameters)
            assert list(inspect.signature(vars(ours)[name]).parameters)[: len(passed)] == passed, name


@pytest.mark.parametrize("budget", [-1, True, "1MiB", 0.5, None])
def test_a_budget_of_loads_within_a_step_is_a_number_of_bytes(root, budget):
    with pytest.raises(ConfigError, match="sync_load_budget_bytes: must be a number of bytes"):
        KVTierSpec(offloading_config(stack(root, 8), extra={"sync_load_budget_bytes": budget}))


def test_loads_within_a_step_have_a_lane_and_are_refused_where_vllm_has_none(stacks, root):
    KVTierSpec(offloading_config(stack(root, 8), extra={"sync_load_budget_bytes": 0}))
    within = offloading_config(stack(root, 8), extra={"sync_load_budget_bytes": 1 << 20})
    if not AS_0_33:
        with pytest.raises(ConfigError, match=r"sync_load_budget_bytes: needs vLLM 0\.33; 0\.32"):
            KVTierSpec(within)
        return
    with FakeEngine(within, 1) as engine:
        lanes = [thread.name for thread in threading.enumerate()]
        assert lanes.count("kvtier-copy-urgent") == len(engine.workers) == 1


@pytest.mark.skipif(not AS_0_33, reason="vLLM 0.32 waits for no load within a step")
def test_a_load_within_the_step_waits_for_no_other_copy(stacks, root, seed, monkeypatch):
    copy, go_on = HostMemoryEngine._copy, threading.Event()

    def gated(engine, *given):
        if threading.current_thread().name != "kvtier-copy-urgent":
            assert go_on.wait(60)
        copy(engine, *given)

    config = offloading_config(stack(root, 16), extra={"sync_load_budget_bytes": 1 << 20})
    with FakeEngine(config, seed) as engine:
        engine.add([1, 2, 3])
        engine.run()
        monkeypatch.setattr(HostMemoryEngine, "_copy", gated)
        monkeypatch.setattr(host_memory, "OWN_BYTES_MAX", -1)  # copies have threads
        manager, (gpu,) = engine.manager, engine.workers
        found, others = engine.add([1, 2, 3, 4]), [engine.add([number]) for number in (5, 6, 7)]
        while (hits := engine._hits(found)) is None:
            end_step(engine)
        assert hits == 3
        end_step(engine)
        for number, other in enumerate(others):
            stored = offered_until_taken(engine, other)
            assert gpu.submit_store(number, base.GPULoadStoreSpec([40 + number], [1], [0]), stored.store_spec)
        rows = manager.prepare_load(found.keys[0][:3], found.context)
        engine.tensors[0][10:13] = 0
        assert gpu.submit_load(9, rows, base.GPULoadStoreSpec([10, 11, 12], [3], [0]), expedited=True)
        gpu.wait({9})  # while no store moves
        assert [torch.equal(engine.tensors[0][10 + i], content(found.keys[0][i], 0, 0)) for i in range(3)] == [True] * 3
        assert [result.job_id for result in gpu.get_finished()] == [9]
        go_on.set()
        gpu.wait({0, 1, 2})
        manager.complete_load(found.keys[0][:3], found.context)
        for other in others:
            manager.complete_store(other.keys[0], other.context)


@pytest.mark.skipif(not AS_0_33, reason="vLLM 0.32 asks for no such figures")
def test_the_size_of_the_cpu_tier_is_told(stacks, root, seed):
    config = offloading_config(stack(root, 8))
    with FakeEngine(config, seed) as engine:
        (told,) = engine.manager.config_info()
    assert tuple(told) == KVTierSpec.config_info_keys(config.extra_config)
    assert (told["cpu_num_chunks"], told["cpu_kv_cache_size_bytes"]) == (8, 8 * 4096)


# -- the calls of 0.33 -------------------------------------------------------------------------------------------


def end_step(engine: FakeEngine, new: Sequence[Request] = ()) -> None:
    engine.manager.on_schedule_end(ScheduleEndContext([request.context.req_id for request in new], ()))


def offered_until_taken(engine: FakeEngine, request: Request) -> base.PrepareStoreOutput:
    """Offer the blocks of a request in step after step."""
    engine._hits(request)
    until = time.monotonic() + 60.0
    while (taken := engine.manager.prepare_store(request.keys[0], request.context)) is None or not taken.keys_to_store:
        assert time.monotonic() < until
        end_step(engine)
    return taken


@pytest.mark.parametrize("as_0_33", [True, False])
def test_whether_a_step_ends_before_its_stores_or_after_them_the_same_is_served(stacks, root, seed, as_0_33):
    expected = {(1, 2, 3, 4): 0, (1, 2, 3, 4, 5): 4, (6, 7): 0, (1, 2, 3, 4, 5, 8): 5, (6, 7, 9): 2}
    for prompt, hit in expected.items():  # expedited loads among them, which 0.33 waits for within the step
        with FakeEngine(offloading_config(stack(root, 6)), seed, as_0_33=as_0_33) as engine:
            engine.patient = True
            for last in (10, 11):
                request = engine.add([*prompt, last])
                engine.run()
                assert (request.hit, engine.wrong) == (len(prompt) if last == 11 else hit, 0)


def test_a_store_without_room_beside_leases_of_its_step_is_taken_later(stacks, root, seed):
    with FakeEngine(offloading_config(stack(root, 50)), seed) as engine:
        engine.add([5, 6, 7, 8])
        engine.run()
    with FakeEngine(offloading_config(stack(root, 4)), seed) as engine:
        found, other = engine.add([5, 6, 7, 8]), engine.add([1, 2])
        while engine._hits(found) is None:
            end_step(engine)
            engine.manager.has_pending_work()
        assert engine._hits(found) == 4  # every row is leased to it, and it is scheduled without a load
        assert engine.manager.prepare_store(other.keys[0], other.context) is None
        end_step(engine, [found])
        stored = offered_until_taken(engine, other)
        assert stored.keys_to_store == other.keys[0]
        engine.manager.complete_store(stored.keys_to_store, other.context)


def test_a_store_gets_rows_that_became_clean(stacks, root, seed):
    """Without lookups: 0.33 ends a step after its stores."""
    with FakeEngine(offloading_config(stack(root, 1)), seed) as engine:
        manager, (gpu,) = engine.manager, engine.workers
        first, second = engine.add([1]), engine.add([2])
        stored = offered_until_taken(engine, first)
        gpu.submit_store(1, base.GPULoadStoreSpec([1], [1], [0]), stored.store_spec)
        gpu.wait({1})
        manager.complete_store(stored.keys_to_store, first.context)
        assert offered_until_taken(engine, second).keys_to_store == second.keys[0], "once the disk has the first"
        manager.complete_store(second.keys[0], second.context)


def test_rows_are_free_when_vllm_says_that_the_copies_from_before_a_reset_have_ended(stacks, root, seed, monkeypatch):
    with FakeEngine(offloading_config(stack(root, 6)), seed, as_0_33=True) as engine:
        engine.patient = True
        engine.add([1, 2, 3])
        engine.step()
        engine.reset()
        engine.run(60.0)
        engine.add([1, 2, 3, 4, 5, 6])  # every row is there again
        engine.run(60.0)
        again = engine.add([1, 2, 3, 4, 5, 6, 7])
        engine.run(60.0)
        assert (again.hit, engine.wrong) == (6, 0)


def test_waiting_for_a_copy_that_does_not_end_ends_with_an_error(stacks, root, seed, monkeypatch):
    async def stuck(job: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(worker, "COPY_SECONDS", 0.05)
    with FakeEngine(offloading_config(stack(root, 6)), seed) as engine:
        (gpu,) = engine.workers
        gpu._gpu.load = stuck
        engine.patient = True  # a store that is given up has no copy
        engine.add([1, 2, 3])
        while not engine.running:
            engine.step()
        with pytest.raises(ResourceError, match="1 copies between GPU blocks and rows have not ended"):
            gpu.wait(set(engine.running))


def test_a_freeze_of_the_worker_is_one_part_of_the_time_for_a_copy(monkeypatch):
    """Which goes on after it, as the wait does."""
    waited, copy = [], Future()

    def oversleep(copies, seconds):
        waited.append(seconds)
        if len(waited) == 3:
            copy.set_result(None)
        return wait(copies, 0)

    monkeypatch.setattr(worker, "wait_for", oversleep)
    frozen = object.__new__(worker.KVTierWorker)
    frozen._running = {1: copy}
    frozen.wait({1, 2})
    assert waited == [worker.WAIT_PART_SECONDS] * 3
    frozen._running = {2: Future()}
    with pytest.raises(ResourceError, match="have not ended within 120 s"):
        frozen.wait({2})
    assert sum(waited[3:]) == worker.COPY_SECONDS


def test_keys_of_the_stack_process_are_checked(root):
    for extra, fault in (
        ({"required": 0}, "required: must be true or false"),
        ({"driver": "embedded"}, "driver: is gone"),
        ({"service": "kvtier.sock"}, "service: must be the absolute path"),
        ({"service": ""}, "service: must be the absolute path"),
        ({"service": "/" + "a" * 107}, "service: must be a path of at most 107 bytes"),
    ):
        with pytest.raises(ConfigError, match=fault):
            KVTierSpec(offloading_config(stack(root, 8), extra=extra))
    for extra in ({}, {"driver": "process"}, {"required": True}, {"required": False}):
        KVTierSpec(offloading_config(stack(root, 8), extra=extra))


def test_an_unknown_key_beside_a_service_alone_is_refused_by_name():
    config = offloading_config({})
    alone = {"spec_name": "KVTierSpec", "service": "/run/kvtier/a.sock"}
    assert engine_plan(dataclasses.replace(config, extra_config=alone)).service
    with pytest.raises(ConfigError, match="read_only: is no key of kv_connector_extra_config"):
        engine_plan(dataclasses.replace(config, extra_config=alone | {"read_only": True}))
