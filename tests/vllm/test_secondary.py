"""`KVTierFs` below vLLM's real tiering manager and its real shared region, on the CPU."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ConfigError, RootBusyError
from kvtier.testing.faults import Fault, FaultKind, FaultyBackend, NthJob, SeededFaults
from kvtier.types.jobs import JobKind

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="session")
def tiering() -> Any:
    """vLLM behind its own spec, imported when it is needed: it takes seconds, and warns while it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import support_vllm_tiering
    return support_vllm_tiering


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No named memory, no thread and no descriptor outlives an engine."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"vllm_offload_test-{os.getpid()}-")]
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier-engine-memory"):
            thread.join(5.0)  # told to end, perhaps still on its last lines
            assert not thread.is_alive(), thread.name
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # torch and vLLM open one of their own at first use


def release(vllm: Any, backend: FaultyBackend) -> None:
    """Let held jobs go, and wait until their I/O is over."""
    vllm.tier._tier.thread.call_soon(backend.release)
    vllm.until(lambda: not vllm.tier._tier.plane.lower.rows_in_flight)


def damage(root: Path, payloads: list[bytes]) -> None:
    """Flip a bit in the middle of each payload, wherever in the root it is."""
    files = {path: path.read_bytes() for path in root.iterdir() if path.is_file()}
    for wanted in payloads:
        path, at = next((path, data.find(wanted)) for path, data in files.items() if wanted in data)
        at += len(wanted) // 2
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([files[path][at] ^ 1]))


def totals(vllm: Any) -> Any:
    """The tier's figures."""
    return vllm.tier.stats().tiers["KVTierFs"]


# -- what is stored is served ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["KVTierFs", "KVTierSharedFs"])
def test_what_was_cascaded_is_served_with_an_empty_cpu_tier_and_after_a_restart(tiering, tmp_path, kind):
    names = tiering.keys(24)
    config = tiering.tier_config(tmp_path / "root", type=kind)
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        vllm.store(names)
        vllm.forget()
        assert vllm.hits(names) == names
        assert vllm.tier.stats().tiers[kind].loaded == 24
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        assert vllm.hits(names) == names
        assert vllm.hits(tiering.keys(4, start=100)) == []
        vllm.tier._tier.plane.check_integrity()


def test_what_an_adapter_may_not_have_computed_is_not_kept_and_its_jobs_end(tiering, tmp_path, monkeypatch):
    names = tiering.keys(24)
    config = tiering.tier_config(tmp_path / "root")
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        with monkeypatch.context() as changed:
            changed.setattr(vllm.tier._adapters, "storable", lambda _: False)
            vllm.store(names[:12])
        vllm.store(names[12:])
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        assert vllm.hits(names[:12]) == []
        assert vllm.hits(names[12:]) == names[12:]


def test_the_padding_of_a_row_belongs_to_vllm_and_comes_back_as_it_was(tiering, tmp_path):
    names = tiering.keys(4)
    config = tiering.tier_config(tmp_path / "root")
    with tiering.Vllm(tiering.offloading_config(config, row=5000)) as vllm:
        assert vllm.row == 8192
        vllm.store(names)
        vllm.forget()
        for chunk in range(vllm.spec.num_chunks):
            vllm.write(chunk, np.zeros(vllm.row, dtype=np.int8))
        assert vllm.hits(names) == names, "hits() compares whole rows, padding included"


@pytest.mark.parametrize("ids", [(0, 1), (3, 0, 7)])
def test_groups_keep_vllms_own_ids(tiering, tmp_path, ids):
    groups = tuple(tiering.OffloadingGroupConfig(16, (f"layer.{group}",), group) for group in ids)
    names = [name for group in ids for name in tiering.keys(4, group=group)]
    config = tiering.tier_config(tmp_path / "root", enable_kv_events=True)
    with tiering.Vllm(tiering.offloading_config(config, groups=groups)) as vllm:
        vllm.store(names)
        vllm.forget()
        assert vllm.hits(names) == names
        told: set[bytes] = set()
        for event in vllm.tier.take_events():
            (told.difference_update if event.removed else told.update)(event.keys)
        assert told == set(names)


def test_two_workers_and_chunks_of_several_blocks_are_one_row(tiering, tmp_path):
    names = tiering.keys(8)
    changes = {"parallel": {"world_size": 2, "tp_size": 2}, "cache": tiering.OffloadingCacheConfig(16, 4)}
    config = tiering.offloading_config(tiering.tier_config(tmp_path / "root"), chunks=40, **changes)
    with tiering.Vllm(config) as vllm:
        assert vllm.row == 4 * tiering.ROW
        vllm.store(names)
        vllm.forget()
        assert vllm.hits(names) == names


@pytest.fixture
def odd(tiering: Any, tmp_path: Path) -> Iterator[Any]:
    """A tier over rows of an odd size at an odd address, the first six of which hold what their keys say."""
    from kvtier.engines.vllm import KVTierFs

    memory = np.zeros(12 * 5000 + 7, dtype=np.int8)
    rows = memory[7:].reshape(12, 5000)
    for row, name in enumerate(tiering.keys(6)):
        rows[row] = tiering.content(name, 5000)
    view = memoryview(rows)
    spec = tiering.TieringOffloadingSpec(tiering.offloading_config({}))
    tier = KVTierFs(spec, view, "KVTierFs", **tiering.tier_config(tmp_path / "root", inflight_bytes="64KiB"))

    def move(job_id: int, chunks: list[int], loads: bool) -> Any:
        job = tiering.TransferJob(job_id, tiering.keys(6), np.array(chunks), loads, tiering.ReqContext("request"))
        (tier.submit_load if loads else tier.submit_store)(job)
        tier.drain_jobs()
        (result,) = tier.get_finished_jobs()
        assert result.job_id == job_id
        return result

    tier.rows, tier.move = rows, move
    yield tier
    tier.shutdown()
    view.release()  # raises while anybody refers to the rows


def test_rows_of_any_size_at_any_address_are_stored_as_they_are(odd):
    assert odd.move(0, [0, 1, 2, 3, 4, 5], loads=False).success
    assert odd.move(1, [11, 10, 9, 8, 7, 6], loads=True).success
    assert np.array_equal(odd.rows[:6], odd.rows[:5:-1])


def test_nothing_of_an_earlier_block_lies_behind_a_row_on_the_disk(odd, tiering, tmp_path):
    odd._tier._staged._staging.view[:] = 0x55
    assert odd.move(0, [0, 1, 2, 3, 4, 5], loads=False).success
    data = b"".join(path.read_bytes() for path in (tmp_path / "root").iterdir())
    for name in tiering.keys(6):
        assert tiering.content(name, 5000).tobytes() + bytes(8192 - 5000) in data


def test_bytes_that_were_refused_never_reach_vllms_rows(odd, tiering, tmp_path):
    assert odd.move(0, [0, 1, 2, 3, 4, 5], loads=False).success
    damage(tmp_path / "root", [tiering.content(name, 5000).tobytes() for name in tiering.keys(6)[2:4]])
    odd.rows[6:] = 77
    result = odd.move(1, [6, 7, 8, 9, 10, 11], loads=True)
    assert not result.success
    assert list(result.successful_keys) == [*tiering.keys(2), *tiering.keys(2, start=4)]
    assert (odd.rows[8:10] == 77).all()
    assert np.array_equal(odd.rows[[6, 7, 10, 11]], odd.rows[[0, 1, 4, 5]])


# -- what is wrong is a miss -------------------------------------------------------------------------------------------


def test_damaged_blocks_are_recomputed_and_the_others_served(tiering, tmp_path):
    names = tiering.keys(24)
    config = tiering.tier_config(tmp_path / "root")
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        vllm.store(names)
    damage(tmp_path / "root", [tiering.content(name).tobytes() for name in names[::3]])
    whole = [name for i, name in enumerate(names) if i % 3]
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        assert vllm.hits(names) == whole
        assert totals(vllm).corrupt == 8
        vllm.store(names)
        vllm.forget()
        assert vllm.hits(names) == names, "what was damaged is stored anew"


def test_a_failed_part_of_a_load_is_reported_and_the_rest_is_kept(tiering, tmp_path, faulty):
    names = tiering.keys(12)
    config = tiering.offloading_config(tiering.tier_config(tmp_path / "root"))
    with tiering.Vllm(config) as vllm:
        vllm.store(names)
        vllm.forget()
        faulty[-1].plan = SeededFaults(3, [(0.4, Fault(FaultKind.FAIL, JobKind.LOAD))])
        served = vllm.hits(names)
        assert 0 < len(served) < 12
        assert totals(vllm).failed == 12 - len(served)
        faulty[-1].plan = SeededFaults(3, [])
        assert vllm.hits(names) == served, "an entry that cannot be read is gone"


def test_a_full_tier_evicts_and_never_grows_beyond_its_capacity(tiering, tmp_path):
    root = tmp_path / "root"
    config = tiering.offloading_config(tiering.tier_config(root, capacity="2MiB"))
    names = tiering.keys(320)
    with tiering.Vllm(config) as vllm:
        for start in range(0, 320, 16):
            vllm.store(names[start : start + 16])
            assert sum(file.stat().st_blocks * 512 for file in root.iterdir()) <= 2 << 20
        assert totals(vllm).evictions > 150
        vllm.forget()
        assert vllm.hits(names[-16:]) == names[-16:], "the newest are there"
        assert vllm.hits(names[:16]) == []


def test_a_full_disk_costs_hits_and_nothing_else(tiering, tmp_path):
    config = tiering.tier_config(tmp_path / "root", min_free_bytes=1 << 60)
    names = tiering.keys(8)
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        vllm.store(names)
        assert totals(vllm).dropped == {"disk_full": 8}
        assert vllm.hits(names) == names, "from vLLM's own CPU tier"
        vllm.forget()
        assert vllm.hits(names) == []


# -- a disk that does not answer ---------------------------------------------------------------------------------------


def test_a_load_that_is_late_ends_as_a_miss_and_never_touches_the_row_again(tiering, tmp_path, faulty):
    names, others = tiering.keys(4), tiering.keys(32, start=100)
    config = tiering.tier_config(tmp_path / "root", job_timeout_seconds=2.0)
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        vllm.store(names)
        vllm.forget()
        faulty[-1].plan = NthJob(1, Fault(FaultKind.HOLD, JobKind.LOAD), every=True)
        assert vllm.hits(names) == []
        assert totals(vllm).late == 4
        faulty[-1].plan = SeededFaults(0, [])
        vllm.store(others)  # into every row, those of the late load included
        release(vllm, faulty[-1])
        assert vllm.hits(others) == others
        vllm.forget()
        assert vllm.hits(names) == names, "once the disk answers again they are there"


def test_a_reset_ends_in_time_though_the_disk_holds_everything_back(tiering, tmp_path, faulty):
    names, more = tiering.keys(8), tiering.keys(8, start=8)
    config = tiering.tier_config(tmp_path / "root", drain_timeout_seconds=0.2)
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        vllm.store(names)
        vllm.forget()
        faulty[-1].plan = NthJob(1, Fault(FaultKind.HOLD), every=True)
        vllm.store(more, settle=False)
        context = vllm.request(names)
        assert [vllm.manager.lookup(name, context).name for name in names] == ["HIT_PENDING"] * 8
        vllm.step()
        vllm.forget()  # vLLM asserts that no job is left
        faulty[-1].plan = SeededFaults(0, [])
        vllm.store(tiering.keys(32, start=100))
        release(vllm, faulty[-1])
        assert vllm.hits(tiering.keys(32, start=100)) == tiering.keys(32, start=100)
        vllm.tier._tier.plane.check_integrity()


def test_a_shutdown_gives_vllms_memory_back_though_the_disk_is_stuck(tiering, tmp_path, faulty, caplog):
    names = tiering.keys(8)
    config = tiering.tier_config(tmp_path / "root", drain_timeout_seconds=0.2, close_timeout_seconds=0.2)
    vllm = tiering.Vllm(tiering.offloading_config(config))
    faulty[-1].plan = NthJob(1, Fault(FaultKind.HOLD), every=True)
    vllm.store(names, settle=False)
    vllm.close()
    vllm.tier.shutdown()
    assert "8 blocks in flight were given up" in caplog.text
    assert "Failed to close mmap_obj" not in caplog.text
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        assert set(vllm.hits(names)) <= set(names)


def test_stores_still_queued_at_shutdown_are_drained(tiering, tmp_path):
    names = tiering.keys(32)
    config = tiering.tier_config(tmp_path / "root", drain_timeout_seconds=60)
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        vllm.store(names, settle=False)
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        assert vllm.hits(names) == names


def test_no_call_waits_for_the_thread_that_moves_blocks(tiering, tmp_path):
    names, more = tiering.keys(8), tiering.keys(8, start=8)
    with tiering.Vllm(tiering.offloading_config(tiering.tier_config(tmp_path / "root"))) as vllm:
        vllm.store(names)
        vllm.forget()
        stuck = threading.Event()
        vllm.tier._tier.thread.call_soon(stuck.wait)
        vllm.store(more, settle=False)
        context = vllm.request(names)
        for _ in range(20):
            assert {vllm.manager.lookup(name, context).name for name in names} == {"HIT_PENDING"}
            vllm.step()
            vllm.stats()
            list(vllm.manager.take_events())
        assert vllm.manager.has_pending_work()
        stuck.set()
        vllm.settle()
        assert vllm.hits(names) == names


def test_jobs_end_though_the_thread_that_moves_blocks_is_gone(tiering, tmp_path):
    names, more = tiering.keys(8), tiering.keys(8, start=8)
    with tiering.Vllm(tiering.offloading_config(tiering.tier_config(tmp_path / "root"))) as vllm:
        vllm.store(names)
        vllm.forget()
        thread = vllm.tier._tier.thread
        thread.call_soon(thread.loop.stop)
        thread.thread.join()
        vllm.store(more)
        assert vllm.hits(names) == []
        # What the thread would have done at the end: a root nobody lets go of would stay locked for this process.
        asyncio.run(vllm.tier._tier._staged.close())


def test_whatever_goes_wrong_no_wrong_byte_is_served_and_every_job_ends_once(tiering, tmp_path, faulty, seed):
    rng = random.Random(seed)
    config = tiering.tier_config(
        tmp_path / "root", capacity="3MiB", job_timeout_seconds=0.5, drain_timeout_seconds=0.5, inflight_bytes="256KiB"
    )
    chances = [
        (0.05, Fault(FaultKind.RAISE)),
        (0.01, Fault(FaultKind.LATE)),
        (0.05, Fault(FaultKind.FAIL)),
        (0.05, Fault(FaultKind.CORRUPT)),
        (0.05, Fault(FaultKind.LOSE)),
        (0.03, Fault(FaultKind.MISSING)),
        (0.05, Fault(FaultKind.DROP)),
    ]
    prompts = [tiering.keys(rng.randrange(1, 24), start=start) for start in range(0, 600, 24)]
    served = 0
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        faulty[-1].plan = SeededFaults(seed, chances)
        lower = vllm.tier._tier.plane.lower
        lower.load_breaker.pause_seconds = lower.store_breaker.pause_seconds = 0.01
        rounds = 0
        injected = faulty[-1].injected
        while rounds < 80 or (rounds < 800 and min(served // 2, totals(vllm).loaded, sum(injected.values())) <= 50):
            rounds += 1  # where the machine is so slow that most jobs are late, more rounds are needed
            names = rng.choice(prompts)
            served += len(vllm.hits(names))
            vllm.store(names, settle=rng.random() < 0.7)
            if rng.random() < 0.3:
                vllm.forget()
            vllm.tier._tier.plane.check_integrity()
        vllm.until(lambda: not vllm.tier._tier.plane.lower.rows_in_flight)
        vllm.tier._tier.plane.check_integrity()
        assert not any(lower.owned.table.pins)
        print(totals(vllm), injected)
        assert totals(vllm).loaded > 50
        assert len(injected) > 4
        assert sum(injected.values()) > 50
    assert served > 100


# -- a promise is kept -------------------------------------------------------------------------------------------------


def test_a_hit_of_this_step_is_loadable_though_stores_evict_in_between(tiering, tmp_path):
    old, new = tiering.keys(8), tiering.keys(120, start=100)
    config = tiering.tier_config(tmp_path / "root", capacity="2MiB")
    with tiering.Vllm(tiering.offloading_config(config, chunks=160)) as vllm:
        vllm.store(old)
        vllm.store(tiering.keys(60, start=1000))
        vllm.forget()
        context = vllm.request(old)
        assert {vllm.manager.lookup(name, context).name for name in old} == {"HIT_PENDING"}
        vllm.store(new, settle=False)  # more than the tier has room for, before the step ends
        assert vllm.hits(old) == old


def test_the_root_of_a_prefix_outlives_its_leaf(tiering, tmp_path):
    first, second = tiering.keys(70), tiering.keys(40, start=100)
    config = tiering.tier_config(tmp_path / "root", capacity="2MiB")
    with tiering.Vllm(tiering.offloading_config(config, chunks=160)) as vllm:
        vllm.store(first)
        vllm.store(second)
        vllm.forget()
        left = vllm.hits(first)
        assert totals(vllm).evictions > 0
        assert left == first[: len(left)]
        assert 0 < len(left) < 70


def test_blocks_age_in_the_order_of_the_prefix_in_whatever_order_they_are_handed_over(tiering, tmp_path):
    names = tiering.keys(12)
    with tiering.Vllm(tiering.offloading_config(tiering.tier_config(tmp_path / "root"))) as vllm:
        context = vllm.request(names)
        vllm.manager.prepare_store(names[5:] + names[:5], context)
        vllm.manager.complete_store(names[5:] + names[:5], context)
        vllm.settle()
        owned = vllm.tier._tier.plane.lower.owned
        assert [owned.table.keys[slot] for slot in owned.policy.coldest()] == names[::-1]


def test_a_slow_disk_does_not_keep_vllms_rows(tiering, tmp_path, faulty, monkeypatch):
    monkeypatch.setattr("kvtier.engines.engine_memory.plane.PATIENCE_SECONDS", 0.1)
    names = tiering.keys(32)
    with tiering.Vllm(tiering.offloading_config(tiering.tier_config(tmp_path / "root"))) as vllm:
        faulty[-1].plan = NthJob(1, Fault(FaultKind.HOLD), every=True)
        vllm.store(names[:12], settle=False)
        vllm.store(names[12:], settle=False)
        vllm.until(lambda: vllm.tier._tier.plane.backlog <= 16)
        assert vllm.tier._tier.plane.backlog == 12, "the youngest go without"
        assert totals(vllm).dropped == {"backlog": 20}
        faulty[-1].plan = SeededFaults(0, [])
        release(vllm, faulty[-1])
        vllm.settle()
        vllm.forget()
        assert set(names[:12]) <= set(vllm.hits(names))


# -- starting ----------------------------------------------------------------------------------------------------------


CHANGES = {
    "model": lambda t: {"model": t.OffloadingModelConfig("another/model", "bfloat16")},
    "dtype": lambda t: {"model": t.OffloadingModelConfig("a/model", "float16")},
    "layers": lambda t: {"groups": (t.OffloadingGroupConfig(16, ("layer.0",), 0),)},
    "block size": lambda t: {"groups": (t.OffloadingGroupConfig(32, ("layer.0", "layer.1"), 0),)},
    "hash block": lambda t: {"cache": t.OffloadingCacheConfig(32, 1)},
    "layout": lambda t: {"kv_cache_layout": "HND"},
    "tensor parallel": lambda t: {"parallel": {"tp_size": 2, "world_size": 2}},
    "decode context parallel": lambda t: {"parallel": {"dcp_size": 2}},
    "replicated": lambda t: {"replicated_layout": True},
}


def test_a_changed_field_of_vllms_is_a_clean_miss(tiering, tmp_path):
    names = tiering.keys(4)
    config = tiering.tier_config(tmp_path / "root", capacity="32MiB")
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        vllm.store(names)
    for name, change in CHANGES.items():
        with tiering.Vllm(tiering.offloading_config(config, **change(tiering))) as vllm:
            assert vllm.hits(names) == [], name
    with tiering.Vllm(tiering.offloading_config(config | {"namespace": "other"})) as vllm:
        assert vllm.hits(names) == []
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        assert vllm.hits(names) == names, "nothing else was touched"


def test_the_configuration_that_is_shown_is_one_that_works(tiering, tmp_path):
    top = Path(__file__).parents[2]
    shown = (top / "configs" / "vllm-secondary.json").read_text()
    assert f"```json\n{shown}```" in (top / "docs" / "vllm-secondary.md").read_text()
    extra = json.loads(shown)["kv_connector_extra_config"]
    extra["cpu_bytes_to_use"] = 1 << 20
    (tier,) = extra["secondary_tiers"]
    assert tier["roots"] == ["/mnt/nvme0/kvtier"]
    tier |= {"roots": [str(tmp_path / "root")], "capacity": "16MiB"}
    assert tiering.OffloadingSpecFactory.get_spec_cls(extra) is tiering.TieringOffloadingSpec
    with tiering.Vllm(tiering.offloading_config({}, extra_config=extra)) as vllm:
        vllm.store(tiering.keys(4))
        vllm.forget()
        assert vllm.hits(tiering.keys(4)) == tiering.keys(4)


WRONG = {
    "polcy": ({"polcy": "arc"}, "secondary_tiers.KVTierFs.polcy: unknown key; did you mean 'policy'?"),
    "capacity": ({"capacity": "10 bananas"}, "secondary_tiers.KVTierFs.capacity: '10 bananas' is not a size"),
    "text": ({"io_depth": "5"}, "secondary_tiers.KVTierFs.io_depth: '5' is not accepted"),
    "no tag": ({"namespace": ""}, "namespace: is required, because vLLM shows a secondary tier no model"),
    "on_evict": ({"write_policy": "on_evict"}, "write_policy: the engine hands blocks down"),
    "second use": ({"admit": "second_use"}, "admit: the engine does not say which of its blocks were used again"),
    "staging": ({"inflight_bytes": "16KiB"}, "inflight_bytes: is 16384 bytes, but a block needs 16384"),
    "locality": ({"locality": "NEAR"}, "secondary_tiers.KVTierFs.locality"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_by_name_and_nothing_is_left_behind(tiering, tmp_path, case):
    change, said = WRONG[case]
    with pytest.raises(ConfigError) as raised:
        tiering.Vllm(tiering.offloading_config(tiering.tier_config(tmp_path / "root", **change)))
    assert said in str(raised.value)


def test_a_root_in_use_is_waited_for_until_the_deadline(tiering, tmp_path):
    config = tiering.tier_config(tmp_path / "root", owner_timeout_seconds=60)
    first = tiering.Vllm(tiering.offloading_config(config))
    with pytest.raises(RootBusyError):
        tiering.Vllm(tiering.offloading_config(config | {"owner_timeout_seconds": 0}))
    started: list[Any] = []
    second = threading.Thread(target=lambda: started.append(tiering.Vllm(tiering.offloading_config(config))))
    second.start()
    first.store(tiering.keys(4))
    first.close()
    second.join(60)
    with started[0] as vllm:
        assert vllm.hits(tiering.keys(4)) == tiering.keys(4)


def test_each_data_parallel_engine_has_a_folder_and_a_share_of_its_own(tiering, tmp_path):
    config = tiering.tier_config(tmp_path / "root", capacity="16MiB")

    def of(index: int) -> Any:
        parallel = {"data_parallel_index": index, "data_parallel_size": 2}
        return tiering.Vllm(tiering.offloading_config(config, parallel=parallel))

    with of(0) as one, of(1) as other:
        one.store(tiering.keys(4))
        other.store(tiering.keys(4, start=4))
        assert totals(one).capacity_bytes == 8 << 20
        assert one.hits(tiering.keys(8)) == tiering.keys(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root-0", "root-1"]


def test_engines_share_a_root_of_files(tiering, tmp_path):
    config = tiering.tier_config(tmp_path / "root", type="KVTierSharedFs")
    names = tiering.keys(8)
    with tiering.Vllm(tiering.offloading_config(config)) as one, tiering.Vllm(tiering.offloading_config(config)) as two:
        one.store(names)
        assert two.hits(names) == names


# -- what is told ------------------------------------------------------------------------------------------------------


def test_events_tell_what_became_reachable_and_ceased_to_be(tiering, tmp_path):
    config = tiering.tier_config(tmp_path / "root", capacity="2MiB", enable_kv_events=True, locality="LOCAL")
    names = tiering.keys(160)
    reachable: set[bytes] = set()
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        for start in range(0, 160, 16):
            vllm.store(names[start : start + 16])
            for event in vllm.manager.take_events():
                if event.medium is tiering.Medium.STORAGE:
                    assert event.locality is tiering.Locality.LOCAL
                    (reachable.difference_update if event.removed else reachable.update)(event.keys)
        vllm.forget()
        assert 16 < len(reachable) < 160
        found = [name for start in range(0, 160, 16) for name in vllm.hits(names[start : start + 16])]
        assert set(found) == reachable


@pytest.mark.parametrize("factor", [1, 3])
def test_a_router_knows_the_disk_after_a_restart_and_a_load_and_no_hash_is_left_of_what_was_evicted(
    tiering, tmp_path, factor
):
    import support_router  # here, because it imports vLLM

    config = tiering.tier_config(tmp_path / "root", enable_kv_events=True)
    chunks = {"cache": tiering.OffloadingCacheConfig(16, factor)}
    names = tiering.keys(6)
    with tiering.Vllm(tiering.offloading_config(config, **chunks)) as vllm:
        vllm.store(names)
    router = support_router.Router()
    with tiering.Vllm(tiering.offloading_config(config, **chunks)) as vllm:
        tracker = support_router.tracker()

        def publish() -> None:
            router.hear(tracker.take_events(list(vllm.manager.take_events())))

        publish()
        assert not router.described["STORAGE"], "nobody has its tokens yet"
        context = vllm.request(names)
        for position, name in enumerate(names, start=1):
            context.set_offload_key_position(name, position * 16 * factor)
        request = support_router.tracked_request(names, range(len(names)), factor)

        def step() -> bool:
            """One step: the request's lookups, its end, and what is published. True if all were hits."""
            answers = [vllm.manager.lookup(name, context) for name in names]
            for name, answer in zip(names, answers, strict=True):
                if support_router.recorded(answer):
                    tracker.record_lookup(*support_router.as_tracked(request, name, context, factor))
            vllm.step()
            publish()
            return set(answers) == {tiering.LookupResult.HIT}

        vllm.until(step)
        wire = [hash for name in names for hash in support_router.on_wire(name, factor)]
        assert all(router.counts["STORAGE"][hash] == 1 for hash in wire)
        assert router.described["STORAGE"].keys() == set(wire)
        assert router.owners["STORAGE"] == {(None, None)}, "locality only if the operator says so; Dynamo drops owners"
        vllm.manager.on_request_finished(context)
        vllm.store(tiering.keys(vllm.spec.num_chunks, start=100))
        publish()
        assert not router.counts["CPU"].keys() & set(wire), "the CPU tier has evicted them"
        lower = vllm.tier._tier.plane.lower
        vllm.until(lambda: not lower.rows_in_flight)
        assert lower.owned.evict(len(lower.owned.directory))
        publish()
        assert not router.counts["STORAGE"]


def test_no_events_unless_asked_for(tiering, tmp_path):
    with tiering.Vllm(tiering.offloading_config(tiering.tier_config(tmp_path / "root"))) as vllm:
        vllm.store(tiering.keys(8))
        assert {event.medium for event in vllm.manager.take_events()} == {tiering.Medium.CPU}


def test_figures_reach_vllms_metrics_under_names_it_knows(tiering, tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.engines.vllm.metrics.INTERVAL_SECONDS", 0.0)
    config = tiering.offloading_config(tiering.tier_config(tmp_path / "root", name="disk"))
    known = tiering.TieringOffloadingSpec.build_metric_definitions(config.extra_config)
    with tiering.Vllm(config) as vllm:
        vllm.store(tiering.keys(8))
        vllm.forget()
        vllm.hits(tiering.keys(8))
        told = vllm.stats()
        for name, values in told.items():
            assert all(len(labels) == len(known[name].labelnames) for labels in values), name
        assert told["kvtier_stored_blocks_total"][("disk",)] == told["kvtier_loaded_blocks_total"][("disk",)] == 8
        assert told["kvtier_used_bytes"][("disk",)] > 8 * tiering.ROW
        assert told["kvtier_used_tokens"][("disk",)] == 8 * 16
        assert told["kvtier_capacity_tokens"][("disk",)] > 8 * 16
        transfers = vllm.tier.stats().tiers["disk"].transfers
        for direction in ("load", "store"):
            took = told["kvtier_transfer_seconds"]["disk", direction]
            assert len(took) == transfers[direction].took_seconds.count > 0
            assert sum(took) == pytest.approx(transfers[direction].took_seconds.sum)
        assert "kvtier_stored_blocks_total" not in vllm.stats(), "counters are told once"


def test_vllms_back_pressure_hears_of_stores_that_moved_bytes_only(tiering, tmp_path):
    config = tiering.tier_config(tmp_path / "root", backpressure={"backpressure_cls": "EMABackpressureDetector"})
    with tiering.Vllm(tiering.offloading_config(config)) as vllm:
        detector = vllm.tier.bp_detector
        vllm.store(tiering.keys(8))
        assert detector._completions == 1
        vllm.forget()
        vllm.store(tiering.keys(8))
        assert detector._completions == 0, "a reset forgets, and all of them were there: nothing was written"
        assert totals(vllm).stored == 8
