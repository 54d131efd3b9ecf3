"""What a process may write to a server: so many bytes in any 24 hours, over restarts, kills and clocks that jump."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support_counts import examples
from support_valkey import Blocks, Server

from faults.machine import warm
from kvtier.aio.boot_clock import BootClock, read_boot_clock
from kvtier.errors import ConfigError
from kvtier.testing.conformance import make_keys
from kvtier.types.jobs import STORED, DropReason, dropped
from kvtier_remote import ValkeyOptions, write_budget
from kvtier_remote.write_budget import BudgetFile, ServerBudget

HOUR_NS = 3600 * 10**9
DAY_NS = 24 * HOUR_NS
PER_DAY = 24_000
"""An hour's share is 1,000 bytes; 23,000 come in over a day."""
LARGEST = 600
SPENT = dropped(DropReason.WRITE_BUDGET)


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    """The disk of a busy machine is slow. What hangs is tested with less."""
    monkeypatch.setattr(write_budget, "PATIENCE_SECONDS", 60.0)


@dataclass(eq=False)
class Machine:
    """A machine whose clock stands still unless a test moves it, and the bytes that were allowed on it, with the true
    time of each."""

    now_ns: int = 10**15
    boot: int = 0
    error_ns: int = 0
    given: list[tuple[int, int]] = field(default_factory=list)

    def clock(self) -> BootClock:
        return BootClock(self.boot.to_bytes(16, "big"), lambda: self.now_ns + self.error_ns)

    async def budget(self, path: Path | None, per_day: int = PER_DAY) -> ServerBudget:
        one = ServerBudget(per_day, LARGEST, None if path is None else str(path), Counter(), self.clock())
        self.notes = await one.open()
        return one

    async def take(self, budget: ServerBudget, *sizes: int) -> int:
        within = await budget.take(sizes)
        self.given.append((self.now_ns, sum(sizes[:within])))
        return within

    def most_in_a_day(self) -> int:
        """The largest sum over any 24 hours."""
        return max(
            (
                sum(size for at, size in self.given if begin <= at <= begin + DAY_NS)
                for begin in {at for at, _ in self.given}
            ),
            default=0,
        )


async def test_it_starts_empty_and_fills_over_the_day_to_an_hour_s_share():
    machine = Machine()
    budget = await machine.budget(None)
    assert await machine.take(budget, 1) == 0
    machine.now_ns += HOUR_NS
    assert await machine.take(budget, 400, 400, 400) == 2, "958 bytes came in"
    machine.now_ns += 10 * DAY_NS
    assert await machine.take(budget, 500, 500) == 2
    assert await machine.take(budget, 1) == 0
    assert machine.most_in_a_day() <= PER_DAY
    await budget.close(10.0)


async def test_24_hours_that_begin_with_a_full_bucket_have_the_cap_and_no_more():
    machine = Machine()
    budget = await machine.budget(None)
    machine.now_ns += DAY_NS
    for _ in range(24 * 60 + 1):
        await machine.take(budget, *[1] * 1000)
        machine.now_ns += 60 * 10**9
    assert machine.most_in_a_day() == PER_DAY
    await budget.close(10.0)


async def test_blocks_are_allowed_in_order():
    """A prefix is worth more than what follows it."""
    machine = Machine()
    budget = await machine.budget(None)
    machine.now_ns += DAY_NS
    assert await machine.take(budget, 600, 500, 100) == 1
    await budget.close(10.0)


async def test_a_level_is_found_again_after_an_orderly_end_and_not_twice(tmp_path):
    machine, path = Machine(), tmp_path / "state" / "s3.budget"
    budget = await machine.budget(path)
    machine.now_ns += DAY_NS
    assert await machine.take(budget, 300) == 1
    await budget.close(10.0)
    for expected in (2, 0, 0):
        budget = await machine.budget(path)
        assert await machine.take(budget, 600, 100) == expected
        await budget.close(10.0)
    assert path.stat().st_mode & 0o777 == 0o600


async def test_the_level_that_an_earlier_release_wrote_counts(tmp_path):
    """A file of 31f3a23: 700 bytes, under the same start of the machine."""
    written = b"c-r$03-NRf3U`WT<mVOg-Lf%#(!n~-x0^DP&;WyiOZ2x@%nW;&7*GHJ%zP45"
    machine, path = Machine(now_ns=1_032_400_000_000_000, boot=int.from_bytes(b"b" * 16, "big")), tmp_path / "budget"
    path.write_bytes(zlib.decompress(base64.b85decode(written)))
    budget = await machine.budget(path)
    assert await machine.take(budget, 600, 101) == 1
    assert await machine.take(budget, 100) == 1
    assert await machine.take(budget, 1) == 0
    await budget.close(10.0)


async def test_without_a_file_a_restart_empties_it():
    machine = Machine()
    for _ in range(3):
        budget = await machine.budget(None)
        assert await machine.take(budget, 1) == 0
        await budget.close(10.0)


async def test_time_while_no_process_ran_counts_only_under_the_same_start_of_the_machine(tmp_path):
    machine, path = Machine(), tmp_path / "budget"
    await (await machine.budget(path)).close(10.0)
    machine.now_ns += DAY_NS
    budget = await machine.budget(path)
    assert await machine.take(budget, 500, 500) == 2
    await budget.close(10.0)
    machine.now_ns += DAY_NS
    machine.boot += 1
    budget = await machine.budget(path)
    assert await machine.take(budget, 1) == 0
    machine.now_ns += HOUR_NS
    assert await machine.take(budget, 300, 600) == 2
    await budget.close(10.0)


@pytest.mark.parametrize("damage", [b"", b"\0" * 64, b"KVTIERWB" + b"\xff" * 56, b"x" * 10_000])
async def test_a_damaged_file_is_an_empty_bucket(tmp_path, damage):
    machine, path = Machine(), tmp_path / "budget"
    path.write_bytes(damage)
    budget = await machine.budget(path)
    assert await machine.take(budget, 1) == 0
    machine.now_ns += HOUR_NS
    assert await machine.take(budget, 300, 600) == 2
    await budget.close(10.0)


async def test_a_second_process_starts_empty_and_leaves_the_file_alone(tmp_path):
    machine, path = Machine(), tmp_path / "budget"
    await (await machine.budget(path)).close(10.0)
    machine.now_ns += DAY_NS
    first, second = await machine.budget(path), await machine.budget(path)
    assert "another process keeps its write budget there" in machine.notes[0]
    assert await machine.take(second, 1) == 0
    assert await machine.take(first, 300) == 1
    await second.close(10.0)
    await first.close(10.0)
    again = await machine.budget(path)
    assert await machine.take(again, 600, 101) == 1, "700 are left"
    assert await machine.take(again, 100) == 1
    await again.close(10.0)


async def test_shares_are_few_writes_to_the_disk(tmp_path, monkeypatch):
    """Also while the bucket is near empty and blocks come all the time."""
    writes = []
    written = BudgetFile.write
    monkeypatch.setattr(BudgetFile, "write", lambda self, *what: (writes.append(what), written(self, *what))[1])
    machine = Machine()
    budget = await machine.budget(tmp_path / "budget", 64 * 24_000)
    for _ in range(6 * 3600 // 5):
        machine.now_ns += 5 * 10**9
        await machine.take(budget, 10, 10)
    await budget.close(10.0)
    assert sum(size for _, size in machine.given) > 10_000
    assert len(writes) <= 2 + 6 * 64


async def test_a_file_that_takes_no_writes_allows_nothing(tmp_path, monkeypatch):
    machine = Machine()
    budget = await machine.budget(tmp_path / "budget")
    machine.now_ns += DAY_NS

    def refuse(self: BudgetFile, *what: object) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(BudgetFile, "write", refuse)
    assert await machine.take(budget, 10) == 0
    assert budget._counters["budget.failed"] == 1
    await budget.close(10.0)


async def test_a_disk_that_hangs_delays_nothing_and_allows_no_more_than_was_charged(tmp_path, monkeypatch):
    machine, path = Machine(), tmp_path / "budget"
    budget = await machine.budget(path)
    machine.now_ns += DAY_NS
    assert await machine.take(budget, 100) == 1
    machine.now_ns += HOUR_NS * 3 // 4
    goes_on, written = threading.Event(), BudgetFile.write
    monkeypatch.setattr(BudgetFile, "write", lambda self, *what: (goes_on.wait(60), written(self, *what))[1])
    monkeypatch.setattr(write_budget, "PATIENCE_SECONDS", 0.0)
    begun = time.monotonic()
    assert await machine.take(budget, 200) == 1, "of 281 that were charged before"
    assert budget._charging is not None, "the next share is charged ahead"
    assert await machine.take(budget, 80) == 1
    assert await machine.take(budget, 100) == 0
    assert time.monotonic() - begun < 30
    goes_on.set()
    assert await budget._charging
    assert await machine.take(budget, 500) == 1
    await budget.close(10.0)
    assert machine.most_in_a_day() <= PER_DAY


@examples(80)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.lists(st.integers(1, 600), min_size=1, max_size=8)),
            st.tuples(st.just("pass"), st.integers(0, 30 * 3600)),
            st.tuples(st.just("close"), st.none()),
            st.tuples(st.just("kill"), st.none()),
            st.tuples(st.just("boot"), st.none()),
            st.tuples(st.just("remove"), st.none()),
            st.tuples(st.just("back"), st.integers(1, 100 * 3600)),
        ),
        max_size=40,
    )
)
def test_no_24_hours_have_more_than_the_cap(tmp_path_factory, steps):
    """Whatever ends, is killed, is removed or goes back in between."""
    path = tmp_path_factory.mktemp("budget") / "budget"
    machine = Machine()

    async def life() -> None:
        budget = await machine.budget(path)
        for what, how in steps:
            if what == "take":
                await machine.take(budget, *how)
                continue
            if what == "pass":
                machine.now_ns += how * 10**9
                continue
            if what == "back":
                machine.error_ns = -how * 10**9
                continue
            if what == "close":
                await budget.close(10.0)
            else:
                await killed(budget)
            if what == "boot":
                machine.boot += 1
            if what == "remove":
                path.unlink()
            budget = await machine.budget(path)
        await budget.close(10.0)

    asyncio.run(life())
    assert machine.most_in_a_day() <= PER_DAY


async def killed(budget: ServerBudget) -> None:
    """Leave the file as it is, unlocked. A write that has begun ends before the file is unlocked."""
    if budget._charging is not None:
        await budget._charging
    file, budget._file = budget._file, None
    assert file is not None
    file.close()
    await budget.close(10.0)


SPENDER = """
import asyncio, os, sys
from collections import Counter
from kvtier_remote import write_budget
from kvtier_remote.write_budget import ServerBudget
write_budget.PATIENCE_SECONDS = 60.0
async def main(path, per_day):
    budget = ServerBudget(per_day, 70_001, path, Counter())
    await budget.open()
    os.write(1, b"ready\\n")
    while True:
        within = await budget.take([70_001] * 3)
        os.write(1, b"%d\\n" % (within * 70_001))
        await asyncio.sleep(0 if within else 60)
asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_a_process_that_is_killed_again_and_again_never_gains(tmp_path):
    """It starts with a full bucket. What all its lives spend is at most that and what came in meanwhile."""
    path, per_day = tmp_path / "budget", 24 << 24
    clock = read_boot_clock()
    file = BudgetFile(str(path))
    assert file.open()
    file.write(clock, clock.now_ns(), per_day // 24)
    file.close()
    begun, spent = time.clock_gettime_ns(time.CLOCK_BOOTTIME), 0
    for number in range(8):
        command = [sys.executable, "-c", SPENDER, str(path), str(per_day)]
        with warm.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            for _ in range(10 * number + 1):
                spent += (allowed := int(process.stdout.readline()))
                if not allowed:
                    break
            os.kill(process.pid, signal.SIGKILL)
            spent += sum(map(int, process.stdout.read().split()))
    elapsed = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - begun
    assert (per_day // 24) * 0.8 < spent <= per_day // 24 + per_day * elapsed // DAY_NS + 1


# -- the tier ---------------------------------------------------------------------------------------------------------

LARGE, SMALL = 0, 1
KEYS = [*make_keys(8, LARGE), *make_keys(8, SMALL)]
BLOCK_BYTES = (300 << 10) + 192
CAP = 24 * (3 * BLOCK_BYTES)


@pytest.fixture
def machine(monkeypatch) -> Machine:
    one = Machine()
    monkeypatch.setattr(write_budget, "read_boot_clock", one.clock)
    return one


async def test_blocks_beyond_the_budget_are_dropped_with_that_reason(server: Server, tmp_path, machine):
    suite = Blocks(server, write_bytes_per_day=CAP, state_folder=str(tmp_path / "state"))
    async with suite.opened(tmp_path) as driver:
        assert set((await driver.store(KEYS)).values()) == {SPENT}, "it starts with an empty bucket"
        assert server.names("*:b:*") == []
        machine.now_ns += DAY_NS
        outcomes = await driver.store(KEYS[:8])
        assert list(outcomes.values()) == [STORED] * 3 + [SPENT] * 5
        assert len(server.names("*:b:*")) == 6, "two names for each of three blocks"
        loaded = await driver.load(KEYS[:8])
        assert [outcome.ok for outcome in loaded.values()] == [True] * 3 + [False] * 5, "loads are free"
    async with suite.opened(tmp_path) as driver:
        assert set((await driver.store(KEYS)).values()) == {SPENT}, "a restart gives nothing"


async def test_a_budget_that_is_smaller_than_a_block_is_refused(server: Server, tmp_path):
    with pytest.raises(ConfigError, match=r"write at least 8MiB") as caught:
        async with Blocks(server, write_bytes_per_day=20 * BLOCK_BYTES).opened(tmp_path):
            pass
    assert caught.value.path == "write_bytes_per_day"


async def test_a_state_folder_that_cannot_be_made_is_one_line_with_its_key(server: Server, tmp_path):
    folder = tmp_path / "absent" / "state"
    with pytest.raises(ConfigError, match="No such file or directory") as caught:
        async with Blocks(server, write_bytes_per_day=CAP, state_folder=str(folder)).opened(tmp_path):
            pass
    assert caught.value.path == "state_folder"


def test_engines_of_one_file_keep_their_budgets_apart():
    given = {"type": "valkey", "servers": ["cache:6379"], "write_bytes_per_day": "1TiB", "state_folder": "/var/kvtier"}
    options = ValkeyOptions.model_validate(given)
    assert options.budget_file == "/var/kvtier/valkey.budget"
    assert options.share(0, 1) == options
    assert options.share(1, 2).budget_file == "/var/kvtier-1/valkey.budget"
    with pytest.raises(ValidationError, match="give write_bytes_per_day"):
        ValkeyOptions.model_validate(given | {"write_bytes_per_day": None})
