"""A stack process that ends and starts again over the rows that its service manager kept."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex

import numpy as np
import pytest
import support_stack
import torch
from support_manager import Manager
from support_served import memory_for_rows, row_files, served
from support_service import BLOCKS, NAMESPACE, PAGE, SECONDS, TestEngine, block_keys, stack_text, until
from support_sessions import HandEngine, names, pool_world
from support_victims import freeze, freeze_while, several_victims, victims

from faults.machine import warm
from kvtier.client.connection import Identity, Participant, connect
from kvtier.client.inquiry import inquire
from kvtier.config import open_stack
from kvtier.control.tiers.slot_table import ABSENT, FILLING, FREE, LENT, QUARANTINED, READY, SlotTable
from kvtier.errors import ConfigError
from kvtier.service import kept_memory, wire
from kvtier.service.kept_memory import NAMES, FormerWorkers, KeptMemory
from kvtier.service.namespaces import with_first
from kvtier.service.row_table import VERSION, RowTable, Worker
from kvtier.service.service_manager import ServiceManager
from kvtier.service.wire import LEASED
from kvtier.testing.memory import MemoryStorage, MemoryTier
from kvtier.tier.contract import LookupResult, Opened, TierContext
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import DIGEST_BYTES, Namespace

HIT, MISS = LookupResult.HIT, LookupResult.MISS
ROWS = 1024
"""Fewer than the blocks of the victims, so that rows are used again."""
ENGINES = 4


@contextmanager
def managed(folder: str, tmp_path: Path, rows: int = 256, root: Path | None = None) -> Iterator[Manager]:
    stack = tmp_path / "stack.yaml"
    stack.write_text(stack_text(rows, root))
    with Manager(stack, f"{folder}/m.sock") as manager:
        yield manager


def kill_with_blocks(manager: Manager, path: str) -> None:
    """Kill the service after an engine has stored eight blocks and left."""
    with TestEngine(path) as engine:
        assert engine.store(range(8)) == ["stored"] * 8
    manager.end(signal.SIGKILL)


@contextmanager
def table_of(manager: Manager) -> Iterator[RowTable]:
    """The table that a service keeps, or has left."""
    table = RowTable.read(os.dup(manager.kept["kvtier-table"]))
    try:
        yield table
    finally:
        table.close()


def numbers_in_rows(manager: Manager) -> set[int]:
    """The blocks that the rows hold, by the table that a killed service has left."""
    with table_of(manager) as table:
        return {int.from_bytes(key[:16], "big") for key in table.find().keys}


def pinned_rows(manager: Manager) -> int:
    with table_of(manager) as table:
        return int(np.count_nonzero(table._pins))


def num_workers(manager: Manager) -> int:
    with table_of(manager) as table:
        return len(table.workers)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_blocks_in_rows_are_hits_after_the_service_has_ended(folder, tmp_path, number):
    with managed(folder, tmp_path) as manager:
        with TestEngine(f"{folder}/m.sock") as engine:
            assert engine.store(range(48)) == ["stored"] * 48
            manager.end(number)
            engine.step_until(lambda: not engine.client.core.connected, "the end is seen")
            manager.start()
            engine.step_until(lambda: engine.client.core.joined, "the engine has joined again")
            assert engine.load(range(48)) == ["hit"] * 48
            assert engine.store(range(48, 64)) == ["stored"] * 16
        with TestEngine(f"{folder}/m.sock") as engine:
            assert engine.load(range(64)) == ["hit"] * 64
        errors = manager.end(signal.SIGTERM)
    assert "48 blocks of the process before are found in the rows again, 0 were not intact" in errors
    assert "READY=1" in manager.said


def test_without_a_service_manager_that_keeps_them_rows_are_cold(folder, tmp_path):
    with managed(folder, tmp_path) as manager:
        kill_with_blocks(manager, f"{folder}/m.sock")
        manager.drop()
        manager.start()
        with TestEngine(f"{folder}/m.sock") as engine:
            engine.step_until(lambda: engine.client.core.joined)
            assert engine.look(range(8)) == [MISS] * 8


async def test_what_was_reset_is_not_found_in_the_rows_of_before(folder, tmp_path):
    """By its engine, and by another process that had the root meanwhile."""
    root = tmp_path / "root"
    with managed(folder, tmp_path, root=root) as manager:
        with TestEngine(f"{folder}/m.sock") as engine:
            assert engine.store(range(8)) == ["stored"] * 8
            engine.client.core.reset()
            engine.step_until(lambda: engine.client.core.serves, "the reset is durable")
            assert engine.store(range(8, 16)) == ["stored"] * 8
            manager.end(signal.SIGKILL)
            engine.step_until(lambda: not engine.client.core.connected, "the end is seen")
            manager.start()
            engine.step_until(lambda: engine.client.core.joined, "the engine has joined again")
            assert engine.load(range(8), "a") == ["missing"] * 8
            assert engine.load(range(8, 16), "b") == ["hit"] * 8
        manager.end(signal.SIGTERM)
        async with open_stack(tmp_path / "stack.yaml", NAMESPACE, [torch.zeros((4, PAGE), dtype=torch.uint8)]) as stack:
            await stack.reset()
        manager.start()
        with TestEngine(f"{folder}/m.sock") as engine:
            engine.step_until(lambda: engine.client.core.joined)
            assert engine.load(range(8, 16)) == ["missing"] * 8
        assert "the tiers below were reset since" in manager.end(signal.SIGTERM)


def test_a_block_that_is_not_whole_any_more_is_a_miss(folder, tmp_path):
    with managed(folder, tmp_path) as manager:
        with TestEngine(f"{folder}/m.sock") as engine:
            assert engine.store(range(8)) == ["stored"] * 8
            manager.end(signal.SIGKILL)
            with table_of(manager) as table:
                row = table.find().rows[3]
            os.pwrite(manager.kept["kvtier-rows"], b"?", row * PAGE + 5)
            engine.step_until(lambda: not engine.client.core.connected, "the end is seen")
            manager.start()
            engine.step_until(lambda: engine.client.core.joined, "the engine has joined again")
            found = [engine.load(range(number, number + 1), f"r{number}")[0] for number in range(8)]
        assert sorted(found) == ["hit"] * 7 + ["missing"]
        assert "7 blocks of the process before are found in the rows again, 1 were not" in manager.end(signal.SIGTERM)


@pytest.mark.parametrize("change", ["none", "older", "newer", "longer", "rows", "torn", "not complete"])
def test_memory_that_is_not_believed_is_one_line(change, caplog):
    manager, table = ServiceManager({}), RowTable.create(64)
    table.begin([b"d" * DIGEST_BYTES], 3)
    table.add_worker(Worker(7, os.getpid(), 1))
    if change in ("older", "newer"):
        table._header["version"] = VERSION + 1 if change == "newer" else VERSION - 1
    elif change == "longer":
        os.ftruncate(table.fd, os.fstat(table.fd).st_size + 4096)
    elif change == "rows":
        table._header["num_rows"] = 6500
    elif change == "torn":
        table.void()
    manager.stored = {name: os.dup(table.fd) for name in NAMES}
    if change == "not complete":
        os.close(manager.stored.pop(NAMES[0]))
    given = list(manager.stored.values())
    kept = KeptMemory(manager)
    if change == "none":
        assert kept.former == [Worker(7, os.getpid(), 1)]
        return
    assert (kept.table, kept.former, manager.stored) == (None, [], {})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "are not used" in caplog.text
    for fd in given:
        with pytest.raises(OSError):
            os.fstat(fd)


class Keeper(ServiceManager):
    """A service manager in this process, and `kept`, the descriptors that it has by name."""

    def __init__(self) -> None:
        super().__init__({})
        self.kept: dict[str, int] = {}

    def keep(self, descriptors: Mapping[str, int]) -> None:
        self.drop(descriptors)
        self.kept.update({name: os.dup(fd) for name, fd in descriptors.items()})

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.kept:
                os.close(self.kept.pop(name))

    def next_life(self) -> Keeper:
        """What the next process is given."""
        self.stored = {name: os.dup(fd) for name, fd in self.kept.items()}
        return self


@pytest.mark.parametrize("change", ["rows", "table"])
def test_rows_that_are_not_used_are_let_go_before_others_are_made(tmp_path, monkeypatch, change):
    """There may be no memory for both."""
    keeper = Keeper()
    with served(tmp_path, kept=KeptMemory(keeper)) as found, TestEngine(found.path) as engine:
        assert engine.store(range(8)) == ["stored"] * 8
    (nbytes,) = row_files().values()
    memory_for_rows(monkeypatch, nbytes * 3 // 2)
    if change == "table":
        RowTable.read(os.dup(keeper.kept[NAMES[2]])).void()
    text = stack_text(2048 - 64 * (change == "rows"))
    kept = KeptMemory(keeper.next_life())
    with served(tmp_path, text, kept) as found, TestEngine(found.path) as engine:
        assert engine.look(range(8)) == [MISS] * 8
        assert engine.store(range(8)) == ["stored"] * 8
        assert len(row_files()) == 1
    keeper.drop(NAMES)


@pytest.mark.parametrize("later", [0, 1])
def test_rows_under_a_table_of_another_release_are_cold_with_one_line(tmp_path, caplog, later):
    keeper = Keeper()
    with served(tmp_path, kept=KeptMemory(keeper)) as found, TestEngine(found.path) as engine:
        assert engine.store(range(8)) == ["stored"] * 8
    table, manager = RowTable.read(os.dup(keeper.kept[NAMES[2]])), keeper.next_life()
    table._header["version"] += later
    with served(tmp_path, kept=KeptMemory(manager)) as found, TestEngine(found.path) as engine:
        engine.step_until(lambda: found.server.pool._verifying is None, "rows are verified")
        assert engine.look(range(8)) == [MISS if later else HIT] * 8
        assert engine.store(range(8, 16)) == ["stored"] * 8
        assert engine.load(range(8, 16)) == ["hit"] * 8
    line = "rows of the process before are not used: the row table is of another format, or of other rows"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [line] * later


def test_an_opening_that_fails_leaves_the_rows_to_the_next_one():
    class ClosedTier:
        def keep(self, rows_fd: int, control_fd: int, let_go: Callable[[], None]) -> None:
            offered.append(tuple(os.fstat(fd).st_ino for fd in (rows_fd, control_fd)))

    offered = list[tuple[int, ...]]()
    manager, table = ServiceManager({}), RowTable.create(64)
    table.begin([b"d" * DIGEST_BYTES], 0)
    manager.stored = {name: os.dup(table.fd) for name in NAMES}
    kept = KeptMemory(manager)
    for _ in range(3):
        kept.give(ClosedTier())
    assert kept.table is not None
    assert offered == [(os.fstat(table.fd).st_ino,) * 2] * 3


def test_rows_of_another_count_are_cold(folder, tmp_path):
    with managed(folder, tmp_path) as manager:
        kill_with_blocks(manager, f"{folder}/m.sock")
        (tmp_path / "stack.yaml").write_text(stack_text(512))
        manager.start()
        with TestEngine(f"{folder}/m.sock") as engine:
            engine.step_until(lambda: engine.client.core.joined)
            assert engine.look(range(8)) == [MISS] * 8
            assert engine.store(range(8)) == ["stored"] * 8
            assert sorted(manager.kept) == sorted(NAMES)
        assert "are not used" in manager.end(signal.SIGTERM)


@pytest.mark.parametrize("joins", ["the same", "another"])
async def test_names_of_rows_are_written_again_only_where_they_change(joins, monkeypatch):
    """There are millions, and the first engine waits meanwhile."""
    recorded: list[int] = []
    record = RowTable.record

    def noted(table: RowTable, rows: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        recorded.extend(rows)
        record(table, rows, keys)

    of_before, digest = b"b" * DIGEST_BYTES, (b"b" if joins == "the same" else b"a") * DIGEST_BYTES
    async with pool_world(rows=8) as world:
        await world.engine()
        kept = KeptMemory(ServiceManager({}))
        table = kept.table = RowTable.create(8)
        table._states[:] = FREE
        table.record(range(8), names(*range(8)))
        table._states[:] = READY
        table.begin([of_before], world.pool.plane.control.epoch)
        assert table._entries["by_io"].all()
        kept._found, kept._lent = table.find(), world.pool.plane.control.cpu.lend(8)
        monkeypatch.setattr(RowTable, "record", noted)
        rows, keys = kept.join(world.pool.plane, digest, set())
        assert list(rows) == list(range(8))
        assert recorded == ([] if joins == "the same" else list(rows))
        assert not table._entries["by_io"].any(), "no I/O goes into them"
        world.pool._on_verified(rows, [True] * 8)
        assert table.find().keys == list(keys)
    table.close()


def test_a_row_that_a_disk_had_filled_is_not_lost_with_a_worker_that_copies_into_it():
    table, slots = RowTable.create(4), SlotTable(4)
    slots.move(range(4), ABSENT, FREE)
    table.take_over(slots)
    slots.begin_fill([0, 1], names(0, 1))
    slots.move([0], FILLING, READY)
    slots.unpin([0])
    slots.move([0], READY, FREE)
    slots.lend([0])
    slots.move([0], LENT, QUARANTINED)  # its key is elsewhere
    assert table.find().lost == {1}, "the disk may still write there"
    table.close()


def test_keys_of_two_namespaces_are_found_whichever_joins_first():
    first, second, third = (bytes([number]) * DIGEST_BYTES for number in range(7, 10))
    keys = [*block_keys(3), *(OffloadKey(second + key) for key in block_keys(3)), OffloadKey(third + b"k" * 20)]
    assert with_first(first, [first, second, third], keys) == ([first, second, third], keys)
    spaces, renamed = with_first(second, [first, second, third], keys)
    assert spaces == [second, first, third]
    assert renamed == [*(OffloadKey(first + key) for key in block_keys(3)), *block_keys(3), keys[-1]]
    assert with_first(first, spaces, renamed)[1] == keys


async def test_a_row_of_a_disk_that_is_leased_in_a_reset_is_not_lost_with_the_process():
    async with pool_world(rows=16, lower=32, storage=MemoryStorage()) as world:
        table = RowTable.create(16)
        table.take_over(world.table)
        one, two = await world.engine(rows=4), await world.engine()
        for first in range(0, 24, 2):
            await one.store(first, first + 1)
        await world.turn()
        (found,) = await one.reserve("r", 0, 1)  # brought up from the disk
        assert found.states == bytes([LEASED] * 2)
        two.send(wire.Reset(1))
        await world.turn()
        assert list(world.table.state).count(QUARANTINED) == 2, "leased ones"
        assert table.find().lost == set()
        one.send(wire.Drop("r"))
        await world.turn()
        table.close()


def test_a_reset_before_the_first_engine_has_joined_outlives_a_kill(folder, tmp_path):
    with managed(folder, tmp_path) as manager:
        path = f"{folder}/m.sock"
        kill_with_blocks(manager, path)
        manager.start()
        sock, _, descriptors = connect(Identity(path, NAMESPACE, "", token_hex(8)), Participant("worker"))
        assert inquire(path, "reset", SECONDS)["fault"] == ""
        manager.end(signal.SIGKILL)
        sock.close()
        for fd in descriptors:
            os.close(fd)
        manager.start()
        with TestEngine(path) as engine:
            assert engine.load(range(8)) == ["missing"] * 8


def test_engines_whose_blocks_fit_no_row_leave_no_descriptor(folder, tmp_path):
    with managed(folder, tmp_path) as manager:
        path = f"{folder}/m.sock"
        kill_with_blocks(manager, path)
        manager.start()
        assert manager.process is not None
        large = Identity(path, Namespace(KVLayout.of_pages(8 << 20), model="large"), "", token_hex(8))
        counts = []
        for _ in range(4):
            with pytest.raises(ConfigError, match="hold no block"):
                connect(large, Participant("worker"))
            found = Path(f"/proc/{manager.process.pid}/fd").iterdir()
            counts.append(sum("memfd:" in os.readlink(fd) for fd in found))
        assert counts == counts[:1] * 4
        with TestEngine(path) as engine:
            assert engine.load(range(8)) == ["hit"] * 8


async def test_the_first_engine_that_is_served_names_its_namespace_beside_that_of_a_lost_one(monkeypatch):
    opens, said, opening = asyncio.Event(), list[object](), MemoryTier.open

    async def slow(tier: MemoryTier, context: TierContext) -> Opened:
        await opens.wait()
        return await opening(tier, context)

    class Kept:
        has_joined = False

        def join(self, plane: object, first: bytes, prefixes: set[bytes]) -> tuple[tuple[()], tuple[()]]:
            self.has_joined = True
            said.append(first)
            return (), ()

        def add_space(self, prefix: bytes) -> None:
            said.append(prefix)

    monkeypatch.setattr(MemoryTier, "open", slow)
    async with pool_world(rows=16, lower=32) as world:
        monkeypatch.setattr(world.pool, "_kept", Kept())
        lost, served = HandEngine(world, "a", True, {}), HandEngine(world, "b", True, {})
        for engine in (lost, served):
            world.engines.append(engine)
            engine.connect()
        lost.lose()
        opens.set()
        await served.joined()
        monkeypatch.setattr(world.pool, "_kept", None)
        assert served.session.space is not None
        assert said[1:] == [served.session.space.prefix]
        assert said[0] not in (served.session.space.prefix, b"")


async def test_a_worker_of_before_that_has_exited_is_gone_whatever_proc_shows(monkeypatch):
    """Mounted with `hidepid` it shows no process of another user."""
    monkeypatch.setattr(kept_memory, "started", lambda pid: 0)
    with warm.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    gone, worker = list[Worker](), kept_memory.worker_of("token", 0, process.pid)
    former = FormerWorkers([worker], gone.append)
    await asyncio.sleep(0)
    assert gone == [worker]
    former.close()


async def test_a_worker_of_before_is_watched_once_there_is_a_descriptor_for_it(monkeypatch):
    monkeypatch.setattr(kept_memory, "AGAIN_SECONDS", 0.01)
    gone, worker = list[Worker](), kept_memory.worker_of("token", 0, os.getpid())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        former = FormerWorkers([worker], gone.append)
        await asyncio.sleep(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert gone == []
    await support_stack.until(lambda: former._pidfds[worker] >= 0)
    former.end(worker)
    assert gone == [worker]


# -- killed beside engines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [False, True])
def test_rows_that_a_frozen_worker_may_still_write_wait_for_it(folder, tmp_path, seed, ends):
    """It writes them once it goes on, or never: then its process has exited."""
    first, rows = 10_000, 160
    with managed(folder, tmp_path, rows) as manager, victims(f"{folder}/m.sock", tmp_path) as found:
        found.begin(seed, "engine", stays=True)
        until(lambda: found.pid and found.open()["fill"], "a fill is open")
        os.kill(found.pid, signal.SIGSTOP)
        assert found.open()["fill"]
        manager.end(signal.SIGKILL)
        held = pinned_rows(manager)
        manager.start()
        with TestEngine(f"{folder}/m.sock") as engine:
            for start in range(first, first + 4 * rows, 16):  # every row that can be had, and again
                assert engine.store(range(start, start + 16)) == ["stored"] * 16
            assert held <= pinned_rows(manager) < rows
            os.kill(found.pid, signal.SIGKILL if ends else signal.SIGCONT)
            until(lambda: num_workers(manager) == (1 if ends else 2), "it is gone, or ready")
            in_rows = [number for number in sorted(numbers_in_rows(manager)) if number >= first]
            assert in_rows
            for number in in_rows:
                assert engine.load(range(number, number + 1), f"r{number}")[0] in ("hit", "missing")
            if ends:
                engine.step_until(lambda: pinned_rows(manager) <= len(engine.client.core._lent), "rows are back")


def runs(numbers: set[int]) -> list[range]:
    """These numbers in ranges of `BLOCKS` at most."""
    found = list[range]()
    for number in sorted(numbers):
        if found and number == found[-1].stop and len(found[-1]) < BLOCKS:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def load_again(witness: TestEngine, numbers: range, counts: Counter[str]) -> list[int]:
    """Load blocks: those that are missing. What follows a missing one is not looked for with it, so it is again."""
    missing = list[int]()
    while numbers:
        found = witness.load(numbers, f"w{numbers.start}")
        hits = found.index("missing") if "missing" in found else len(found)
        counts.update(hit=hits)
        if hits < len(found):
            missing.append(numbers[hits])
            counts["missing"] += 1
        numbers = numbers[hits + 1 :]
    return missing


@pytest.mark.parametrize("kills", [None, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_a_service_killed_under_four_engines_serves_its_rows_again(
    kills: int | None, folder: str, tmp_path: Path, seed: int, dial: Callable[[int, int], int], capsys
) -> None:
    """Engines store, reserve, hold and load. They are frozen at the kill, so that nothing is evicted before it is
    looked for; what they had begun to copy goes on afterwards."""
    kills = kills or dial(50, 3)
    rng, counts, opens, took = random.Random(seed), Counter[str](), Counter[str](), list[float]()
    with managed(folder, tmp_path, ROWS) as manager, ExitStack() as stack:
        path = f"{folder}/m.sock"
        witness = stack.enter_context(TestEngine(path))
        found = stack.enter_context(several_victims(path, tmp_path, ENGINES))
        for each in found:
            each.begin(rng.randrange(1 << 30), "engine", stays=True)
        for each in found:
            until(lambda each=each: each.pid, "the victim serves")
        for _ in range(kills):
            until(lambda: num_workers(manager) == 1 + len(found), "all are ready, and none of before is waited for")
            time.sleep(rng.random() * 0.3)
            freeze_while(found, lambda: any(any(each.open().values()) for each in found), 2.0)
            manager.end(signal.SIGKILL)
            opens["something open"] += any(any(each.open().values()) for each in found)
            there = numbers_in_rows(manager)
            witness.step_until(lambda: not witness.client.core.connected, "the end is seen")
            manager.start()
            began = time.monotonic()
            witness.step_until(lambda: witness.client.core.joined, "the witness has joined again")
            took.append(time.monotonic() - began)
            missed = list[int]()
            for some in runs(there):
                missed += load_again(witness, some, counts)
            evicted = set(missed) - numbers_in_rows(manager)
            counts["evicted"] += len(evicted)
            counts["missing"] -= len(evicted)
            freeze(found, signal.SIGCONT)
        for each in found:
            each.end()
        witness.step_until(lambda: pinned_rows(manager) <= len(witness.client.core._lent), "rows are back")
        assert witness.store(range(2000, 2016)) == ["stored"] * 16
        assert witness.load(range(2000, 2016)) == ["hit"] * 16
    with capsys.disabled():
        print(
            f"\n{kills} kills, {opens['something open']} with something open; blocks that were in rows: {dict(counts)}"
        )
        print(f"joined {statistics.median(took):.2f} s after it listened, {max(took):.2f} s at most")
    assert opens["something open"] >= kills // 2
    assert set(counts) <= {"hit", "missing", "evicted"}
    assert counts["missing"] <= 0.01 * counts.total()
    assert counts["evicted"] <= 0.2 * counts.total(), "rows that are lent ahead, and those that wait for the frozen"
