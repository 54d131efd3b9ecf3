"""The contract of LMCache's L2 adapters, held by kvtier's on a real disk."""

from __future__ import annotations

import pytest
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from support_lmcache import LONG, MODEL, Controllers, Memory, controllers, object_key, params

from kvtier.engines import engine_release
from kvtier.engines.lmcache import KVTierL2Adapter
from kvtier.errors import ConfigError

pytestmark = [pytest.mark.lmcache, pytest.mark.filterwarnings("ignore")]  # what LMCache warns of is not ours
MIB = 1 << 20
SIZES = [MIB, 256 << 10, 300_000, 4096, 1, MIB + 7]


@pytest.fixture
def memory() -> Memory:
    return Memory(32 * MIB)


def store(used: Controllers, memory: Memory, numbers: range, size: int = MIB) -> bool:
    """Store objects of one size, each at a place of its own; the number decides the bytes."""
    at = {number: (number % 16) * MIB for number in numbers}
    objects = [memory.object(at[number], size, number) for number in numbers]
    return used.store([object_key(number) for number in numbers], objects)


def test_objects_of_any_size_come_back_bit_by_bit_also_after_a_restart(memory, tmp_path):
    keys = [object_key(number, object_group_id=number) for number in range(len(SIZES))]
    with controllers(memory, params(tmp_path)) as used:
        objects = [memory.object(number * 2 * MIB, size, number) for number, size in enumerate(SIZES)]
        assert used.look_up(keys) == [False] * len(keys)
        assert used.store(keys, objects)
        assert sorted(used.listener.stored, key=str) == sorted(zip(keys, SIZES, strict=True), key=str)
    for _ in range(2):
        memory.tensor.zero_()
        with controllers(memory, params(tmp_path)) as used:
            assert used.look_up([*keys, object_key(99)]) == [True] * len(keys) + [False]
            places = [(len(SIZES) - number) * 2 * MIB + 1 for number in range(len(SIZES))]
            targets = [memory.object(at, size) for at, size in zip(places, SIZES, strict=True)]
            assert used.load([*keys, object_key(99)], [*targets, memory.object(0, 8)]) == [True] * len(keys) + [False]
            for number, (at, size) in enumerate(zip(places, SIZES, strict=True)):
                assert memory.holds(at, size, number)
            used.adapter.submit_unlock(keys)
            used.adapter._tier.plane.check_integrity()


def test_an_object_is_not_loaded_into_memory_of_another_size(memory, tmp_path):
    with controllers(memory, params(tmp_path)) as used:
        assert store(used, memory, range(1), size=4096)
        assert used.load([object_key(0)], [memory.object(MIB, 4095)]) == [False]
        assert used.load([object_key(0)], [memory.object(MIB, 8192)]) == [True], "a serializer's room may be larger"
        assert memory.holds(MIB, 4096, 0)


def test_another_namespace_shares_nothing(memory, tmp_path):
    with controllers(memory, params(tmp_path)) as used:
        assert store(used, memory, range(2))
    with controllers(memory, params(tmp_path, namespace="other weights")) as used:
        assert used.look_up([object_key(0), object_key(1)]) == [False, False]


def test_what_was_evicted_is_reported_once_and_usage_follows(memory, tmp_path):
    with controllers(memory, params(tmp_path, capacity="16MiB")) as used:
        for start in range(0, 48, 8):
            assert store(used, memory, range(start, start + 8))
        there = used.look_up([object_key(number) for number in range(48)])
        used.until(lambda: len(used.listener.deleted) >= there.count(False))
        deleted = [int.from_bytes(key.chunk_hash, "big") for key in used.listener.deleted]
        assert len(deleted) == len(set(deleted))
        assert sorted(deleted) == [number for number in range(48) if not there[number]]
        assert 0 < sum(there) < 16
        usage = used.adapter.get_usage()
        assert usage.total_bytes_used <= usage.total_capacity_bytes == 16 * MIB
        assert dict(usage.bytes_by_cache_salt) == {"": sum(there) * MIB}


@pytest.mark.parametrize("touched", [True, False])
def test_touched_objects_outlive_others(touched, memory, tmp_path):
    with controllers(memory, params(tmp_path, capacity="16MiB")) as used:
        assert store(used, memory, range(4))
        for number in range(100, 130):
            if touched:
                used.adapter.submit_touch([object_key(0)])
            assert store(used, memory, range(number, number + 1))
        assert used.look_up([object_key(0)]) == [touched]


def test_locked_objects_are_kept_until_they_are_unlocked(memory, tmp_path):
    with controllers(memory, params(tmp_path, capacity="16MiB", lease_seconds=LONG)) as used:
        assert store(used, memory, range(4))
        assert used.look_up([object_key(0)]) == [True]
        for number in range(100, 130):
            store(used, memory, range(number, number + 1))
        used.adapter.delete([object_key(0)])
        assert used.load([object_key(0)], [memory.object(MIB, MIB)]) == [True]
        assert memory.holds(MIB, MIB, 0)
        used.adapter.submit_unlock([object_key(0)])
        for number in range(200, 230):
            store(used, memory, range(number, number + 1))
        assert used.look_up([object_key(0)]) == [False]


def test_deleted_objects_are_gone_and_listed_ones_are_those_that_are_left(memory, tmp_path):
    with controllers(memory, params(tmp_path)) as used:
        assert store(used, memory, range(8))
        used.adapter.delete([object_key(number) for number in range(0, 8, 2)])
        used.until(lambda: [key.chunk_hash[-1] for key in used.listener.deleted] == [0, 2, 4, 6])
        listed: list[int] = []
        token = None
        while True:
            page = used.adapter.list_l2_keys(MODEL, 3, token)
            listed += [entry.size_bytes for entry in page.entries]
            token = page.next_page_token
            if token is None:
                break
            assert len(page.entries) == 3
        assert listed == [MIB] * 4
        assert used.adapter.list_l2_keys("other").entries == ()
        with pytest.raises(ValueError, match="page_size"):
            used.adapter.list_l2_keys(page_size=0)


def test_events_are_distinct_and_a_task_without_objects_ends(memory, tmp_path):
    with controllers(memory, params(tmp_path)) as used:
        adapter = used.adapter
        events = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
        assert len(events) == 3
        assert used.store([], [])
        assert used.look_up([]) == []
        assert used.load([], []) == []


def test_memory_outside_l1_is_refused_and_the_task_ends(memory, tmp_path):
    with controllers(memory, params(tmp_path)) as used:
        foreign = Memory(MIB).object(0, MIB, 1)
        assert not used.store([object_key(1)], [foreign])
        assert store(used, memory, range(1, 2))
        assert used.load([object_key(1)], [foreign]) == [False]


def test_status_names_what_an_operator_needs(memory, tmp_path):
    with controllers(memory, params(tmp_path)) as used:
        assert store(used, memory, range(2))
        status = used.adapter.report_status()
        assert status["is_healthy"] is True
        assert status["objects"] == 2
        assert 2 * MIB <= status["used_bytes"] <= status["capacity_bytes"] == 64 * MIB
        if hasattr(L2AdapterInterface, "get_memory_tags"):
            assert "STORAGE" in repr(used.adapter.get_memory_tags()).upper()
        used.adapter.close()
        assert used.adapter.report_status()["is_healthy"] is False


def test_a_listener_that_raises_is_counted_and_stops_nothing(memory, tmp_path, monkeypatch):
    with controllers(memory, params(tmp_path)) as used:
        monkeypatch.setattr(used.listener, "on_l2_keys_stored", lambda keys, sizes: 1 / 0)
        assert store(used, memory, range(2))
        assert used.adapter.report_status()["listener_errors"] == 1


def test_configuration_is_strict_and_the_weights_have_a_name(memory, tmp_path, monkeypatch):
    unnamed = {key: value for key, value in params(tmp_path).items() if key != "namespace"}
    for keys, error in (
        (unnamed, r"adapter_params\.namespace: is required, because LMCache shows"),
        (params(tmp_path, capacty="1GiB"), "capacity"),
        (params(tmp_path, piece_bytes="100KiB"), "multiple of 32 KiB"),
        (params(tmp_path, write_policy="on_evict"), "write_policy"),
    ):
        with pytest.raises(ConfigError, match=error):
            KVTierL2Adapter(keys, memory.description)
    with pytest.raises(ConfigError, match="names no L1 memory"):
        KVTierL2Adapter(params(tmp_path), None)
    monkeypatch.setattr(engine_release.importlib.metadata, "version", lambda name: "0.6.0")
    with pytest.raises(ConfigError, match=r"allow_untested_engine: LMCache 0\.6\.0 is installed"):
        KVTierL2Adapter(params(tmp_path), memory.description)
