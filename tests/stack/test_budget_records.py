"""A write budget holds over restarts, kills and damage of its record."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import zlib
from bisect import bisect_left
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from support_counts import seeds
from support_joining import Driver, Identity
from support_stack import PLAIN, Engine, fs, parts_of, stack_file
from support_stack import keys as key_names
from support_stack_tiers import backends

from kvtier.aio.boot_clock import BootClock, read_boot_clock
from kvtier.config import open_stack, parse_stack
from kvtier.policy import RequestModels
from kvtier.policy.write_budget import DAY_SECONDS, MINUTES, WriteBudget
from kvtier.stack.learned import model_files
from kvtier.stack.learned.budget_records import BudgetRecord
from kvtier.stack.learned.model_files import RETRY_SECONDS, ModelFiles, encode, model_path
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import GroupIndex, RequestId, make_key

BLOCK = 1000
PER_DAY = 4000 * BLOCK
HOUR = 3600.0


class Machine:
    """Lives of processes that write what they may, each with its own record of what was written."""

    def __init__(self) -> None:
        self.now = 5e5
        self.boot = 1
        self.written: list[tuple[float, int]] = []
        self.record: bytes | None = None

    def start(self) -> None:
        self.budget = WriteBudget(PER_DAY, BLOCK)
        clock = BootClock(self.boot.to_bytes(16, "big"), lambda: int(self.now * 1e9))
        self.kept = BudgetRecord(1, self.budget, clock)
        if self.record is not None:
            self.kept.restore(self.record)
        self.save()

    def save(self, last: bool = False) -> None:
        self.record = self.kept.save(last)
        self.kept.on_durable()

    def write(self, count: int) -> None:
        self.budget.advance(self.now)
        for _ in range(count):
            if self.budget.can_admit(1.0, BLOCK):
                self.budget.record_admitted(BLOCK)
                self.budget.record_sent(BLOCK)
                self.written.append((self.now, BLOCK))
            if self.kept.is_due:
                self.save()

    def most_in_a_day(self) -> int:
        times = [time for time, _ in self.written]
        sums = [0, *accumulate(size for _, size in self.written)]
        return max(sums[at + 1] - sums[bisect_left(times, time - DAY_SECONDS)] for at, time in enumerate(times))


@pytest.mark.parametrize("seed", seeds(4, 2))
def test_no_24_hours_have_more_than_the_budget_whatever_ends_in_between(seed: int) -> None:
    draw, machine = random.Random(seed), Machine()
    machine.start()
    for _ in range(400):
        machine.now += draw.choice([1.0, 60.0, 600.0, 3 * HOUR])
        machine.write(draw.randrange(600))
        how = draw.randrange(12)
        if how == 0:
            machine.save(last=True)
        if how == 1:
            machine.boot += 1
        if how <= 2:  # else it is killed
            machine.now += draw.choice([0.5, 100.0, 5 * HOUR])
            machine.start()
    assert 0 < machine.most_in_a_day() <= PER_DAY


def test_restarts_that_are_orderly_lose_nothing_of_the_budget() -> None:
    machine = Machine()
    machine.start()
    for quarter in range(4 * 24 * 4):
        machine.now += HOUR / 4
        machine.write(100)
        if quarter % 24 == 0:
            machine.save(last=True)
            machine.start()
    last_day = sum(size for time, size in machine.written if time > machine.now - DAY_SECONDS)
    assert 0.98 * PER_DAY <= last_day <= PER_DAY
    assert machine.most_in_a_day() <= PER_DAY


def test_a_kill_loses_a_share_at_most() -> None:
    machine = Machine()
    machine.start()
    machine.write(0)
    machine.now += 3 * DAY_SECONDS
    machine.write(1000)
    before = machine.budget.left_of_day
    machine.start()
    machine.budget.advance(machine.now)
    assert before - PER_DAY // 16 <= machine.budget.left_of_day <= before


def kept() -> tuple[WriteBudget, BudgetRecord]:
    budget = WriteBudget(PER_DAY, BLOCK)
    return budget, BudgetRecord(1, budget, BootClock(bytes(16), lambda: 0))


def opened(folder: Path, record: BudgetRecord) -> ModelFiles:
    """The files of a stack that has been opened, what was begun is written."""
    files = ModelFiles(folder, RequestModels(), budgets=[record])

    async def story() -> None:
        await files.restore_budgets(10.0)
        if files._writing is not None:
            await asyncio.wrap_future(files._writing)

    asyncio.run(story())
    files.save_if_due(0.0)
    return files


def end(files: ModelFiles) -> None:
    asyncio.run(files.close(10.0))


def test_nothing_is_sent_before_a_record_is_durable(tmp_path: Path) -> None:
    budget, record = kept()
    budget.advance(0.0)
    budget.advance(HOUR)
    assert budget.room == 0
    files = opened(tmp_path, record)
    assert 0 < budget.room <= PER_DAY // 16
    assert model_path(tmp_path, "writes-1").stat().st_size < 12 << 10
    end(files)


@pytest.mark.parametrize("content", [b"", b"x" * 100, encode("writes-1", b"short"), encode("writes-2", bytes(11_552))])
def test_after_damage_nothing_is_sent_for_a_day(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    model_path(tmp_path, "writes-1").write_bytes(content)
    budget, record = kept()
    files = opened(tmp_path, record)
    assert "is sent nothing for a day" in caplog.text
    budget.advance(1000.0)
    budget.advance(1000.0 + DAY_SECONDS - HOUR)
    assert budget.room <= 0
    budget.advance(1000.0 + DAY_SECONDS + 120.0)
    assert budget.room > 0
    end(files)


def test_while_records_cannot_be_written_no_more_is_sent_than_the_last_one_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, record = kept()
    files = opened(tmp_path, record)
    budget.advance(0.0)
    budget.advance(2 * DAY_SECONDS)

    def refuse(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(model_files, "write", refuse)
    allowed = budget.room
    assert allowed == PER_DAY // 16
    budget.record_sent(allowed)
    for now in (1.0, 2.0, 2.0 + RETRY_SECONDS):
        files.save_if_due(now)
        if files._writing is not None:
            files._writing.result()
    assert budget.room == 0
    monkeypatch.undo()
    files.save_if_due(3.0 + 2 * RETRY_SECONDS)
    files.save_if_due(4.0 + 3 * RETRY_SECONDS)
    assert files._writing is not None
    files._writing.result()
    files.save_if_due(5.0 + 3 * RETRY_SECONDS)
    assert budget.room == PER_DAY // 16
    end(files)


def test_what_was_sent_is_found_again(tmp_path: Path) -> None:
    budget, record = kept()
    files = opened(tmp_path, record)
    budget.advance(0.0)
    budget.advance(2 * DAY_SECONDS)
    budget.record_sent(7 * BLOCK)
    files.save(last=True)
    end(files)
    again, record = kept()
    files = opened(tmp_path, record)
    assert again.minutes() == [7 * BLOCK] + [0] * MINUTES
    end(files)


EARLIER_RELEASE = (
    b"c-rmJ!41Ix6adgK9m9bIda!^v5Rq1h(2(9F4!zREPA(D?aO(;Nu!6ID6ALu&t?;s9yO?d3`R@Ka4AS*{HF<wt<L1$ei0iqkPnUEQe;iw4I4!@o"
    b"B=-HF!~FWiFMjchU;N_NF8}}l0002cML*T@8Zr"
)
"""A `model-writes-1` that 31f3a23 wrote: 7,000 bytes in every 60th minute, ten times, the last one at its end."""


def test_what_an_earlier_release_wrote_counts(tmp_path: Path) -> None:
    model_path(tmp_path, "writes-1").write_bytes(zlib.decompress(base64.b85decode(EARLIER_RELEASE)))
    budget, written = WriteBudget(PER_DAY, BLOCK), 10**15 + 540 * 60 * 10**9
    now = [written]
    files = opened(tmp_path, BudgetRecord(1, budget, BootClock(b"b" * 16, lambda: now[0])))
    now[0] += 30 * 60 * 10**9
    budget.advance(0.0)
    assert PER_DAY - budget.left_of_day == 70_000
    assert [minute for minute, sent in enumerate(budget.minutes()) if sent] == list(range(29, 600, 60))
    end(files)


STACK = """
tiers:
  - {{type: gpu}}
  - {{type: cpu, cpu_bytes_to_use: 256KiB}}
  - {{type: fs, roots: [{root}], capacity: 8MiB, min_free_bytes: 0, admit: predicted, write_bytes_per_day: 1GiB}}
"""


def test_a_stack_finds_again_what_it_wrote(tmp_path: Path) -> None:
    """The second life of a root knows what the first one wrote; `fsck` and the tier do not mind the file."""
    boot = read_boot_clock()
    nothing = boot.boot + boot.now_ns().to_bytes(8, "little") + bytes(8 * (MINUTES + 1))
    (tmp_path / "root").mkdir(0o700)
    model_files.write(tmp_path / "root", "writes-1", nothing)
    layout = KVLayout.of_pages(4096, block_size=16)
    keys = [make_key(bytes([number]) * 16, GroupIndex(0)) for number in range(8)]

    async def life(store: bool) -> int:
        config = parse_stack(STACK.format(root=tmp_path / "root"))
        async with open_stack(config, layout, [torch.zeros((8, 4096), dtype=torch.uint8)], model="m") as stack:
            assert stack._assembled is not None
            assert stack._assembled.models is not None
            writing = stack._assembled.models._writing
            assert writing is not None
            await asyncio.wrap_future(writing)
            stack.request(RequestId("a"), keys).end()
            if store:
                assert (await stack.store(keys, gpu_blocks=list(range(8)))).ok
                assert await stack.drain(60.0)
            budgeted = stack._assembled.plane.control.lowers[0].budgeted
            assert budgeted is not None
            return sum(budgeted.budget.minutes())

    written = asyncio.run(life(store=True))
    assert written >= 8 * 4096
    assert asyncio.run(life(store=False)) == written


def test_a_stack_whose_tiers_join_finds_it_again_too(tmp_path: Path) -> None:
    """As every stack process. The record is read once the tier is open: another process may have had it until then."""
    boot = read_boot_clock()
    nothing = boot.boot + boot.now_ns().to_bytes(8, "little") + bytes(8 * (MINUTES + 1))
    (tmp_path / "root").mkdir(0o700)

    def life(before: bytes | None) -> int:
        engine, identity = Engine(PLAIN, 8), Identity()
        tier = fs(tmp_path / "root") | {"admit": "predicted", "write_bytes_per_day": "1GiB"}
        config = stack_file(PLAIN, 16, tier, backends=backends())
        with Driver(parts_of(config, engine, backends(), tier_close_seconds=20.0), engine, identity) as driver:
            if before is not None:
                model_files.write(tmp_path / "root", "writes-1", before)
            identity.answer()
            driver.until(driver.joined)
            assembled = driver.stack._assembled
            assert assembled is not None
            assert assembled.models is not None
            (budgeted,) = [lower.budgeted for lower in assembled.plane.control.lowers]
            assert budgeted is not None
            if before is not None:
                assert budgeted.budget.room == 0, "nothing is sent before a record is durable"
                writing = assembled.models._writing
                assert writing is not None
                driver.until(writing.done)
                driver.stack.request(RequestId("a"), key_names(8)).end()
                assert driver.store(key_names(8)) == ["stored"] * 8
                driver.drain()
            return sum(budgeted.budget.minutes())

    written = life(before=nothing)
    assert written >= 8 * 4096
    assert life(before=None) == written
