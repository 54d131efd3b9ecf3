"""What a stack keeps over restarts, stated by records that nobody wrote: refused with a line, or used without harm."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from support_protections_fs import without_bounds_of_records

from kvtier.aio.boot_clock import BootClock
from kvtier.policy import RequestModels
from kvtier.policy.reuse.prediction.model import ReuseModel
from kvtier.policy.write_budget import MINUTES, WriteBudget
from kvtier.stack.learned.budget_records import BudgetRecord
from kvtier.stack.learned.model_files import MAGIC, ModelFiles, decode, encode, model_path
from kvtier.tier.checksum import BODY_AT, seal
from kvtier_remote.write_budget import BudgetFile, ServerBudget
from simulator.records import Field, Record, forge_record

PER_DAY = 1 << 40
HOUR_NS = 3600 * 10**9
NOW_NS = 100 * HOUR_NS
HEAD_BYTES = BODY_AT + struct.calcsize("<I32s")
MINUTE_FIELDS = [Field(f"minute{at}", HEAD_BYTES + 24 + 8 * at, 8, True) for at in range(4)]
WRITES = Record(
    "writes", "model-writes-1", 0, HEAD_BYTES + 24 + 8 * (MINUTES + 1), MAGIC,
    (Field("boot", HEAD_BYTES, 16, False), Field("at", HEAD_BYTES + 16, 8, True), *MINUTE_FIELDS), True,
)  # fmt: skip


def pace_of_a_start(boot: int = 1) -> tuple[BudgetRecord, WriteBudget]:
    budget = WriteBudget(PER_DAY, 1 << 20)
    return BudgetRecord(1, budget, BootClock(boot.to_bytes(16, "big"), lambda: NOW_NS)), budget


def honest_record() -> bytes:
    kept, _ = pace_of_a_start()
    return encode("writes-1", kept.save())


def use(data: bytes) -> str:
    """What a start does with a record: `refused`, or `used`. Whatever it is, the next record can be written."""
    kept, budget = pace_of_a_start()
    try:
        kept.restore(decode("writes-1", data))
        outcome = "used"
    except ValueError:
        kept.on_lost()
        outcome = "refused"
    kept.save()
    kept.on_durable()
    budget.advance(NOW_NS / 1e9)
    assert budget.room <= PER_DAY
    kept.save()
    kept.save(last=True)
    return outcome


def record_of(count: int) -> bytes:
    """A record that states so many bytes in its last minute."""
    data = bytearray(honest_record())
    data[HEAD_BYTES + 24 : HEAD_BYTES + 32] = count.to_bytes(8, "little")
    return seal(MAGIC, bytes(data[BODY_AT:]))


@pytest.mark.parametrize("count", [(1 << 64) - 1, 1 << 63, 1 << 62])
def test_a_number_of_bytes_that_nobody_wrote_is_refused(count: int) -> None:
    assert use(record_of(count)) == "refused"


def test_records_that_lie_are_refused_or_used(seed: int) -> None:
    rng, data = Random(seed), honest_record()
    outcomes = Counter(use(forge_record(rng, WRITES, data, [data]).data) for _ in range(400))
    assert outcomes["refused"] > 50
    assert outcomes["used"] > 50


def test_without_the_bounds_a_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    without_bounds_of_records(monkeypatch)
    with pytest.raises(struct.error):
        use(record_of((1 << 64) - 1))


async def test_a_stack_opens_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_path(tmp_path, "writes-1").write_bytes(record_of((1 << 64) - 1))
    for lines in (1, 0):
        caplog.clear()
        kept, _ = pace_of_a_start()
        files = ModelFiles(tmp_path, RequestModels(), budgets=[kept])
        with caplog.at_level(logging.WARNING):
            await files.restore_budgets(10.0)
            await files.close(10.0)
        assert len(caplog.records) == lines
        assert all("is sent nothing for a day" in record.getMessage() for record in caplog.records)


def test_life_tables_that_lie_are_refused_or_used(seed: int) -> None:
    rng, saved = Random(seed), ReuseModel().save()
    outcomes = Counter[str]()
    for _ in range(200):
        data = bytearray(saved)
        at = rng.randrange(len(data))
        data[at : at + rng.choice((1, 4, 16))] = rng.randbytes(rng.choice((0, 1, 4, 16)))
        model = ReuseModel()
        try:
            model.restore(bytes(data))
            outcomes["used"] += 1
        except ValueError:
            outcomes["refused"] += 1
        model.save()
        model.describe()
    assert outcomes["refused"] > 50


# ---- the write budget of a tier on a server

BOOT = b"b" * 16


@contextmanager
def budget_file(path: Path, body: bytes, length: int = 64) -> Iterator[BudgetFile]:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(seal(b"KVTIERWB", body, length))
    file = BudgetFile(str(path))
    assert file.open()
    try:
        yield file
    finally:
        file.close()


@pytest.mark.parametrize("length", [0, 24, 40, 55])
def test_a_short_record_of_a_budget_is_an_empty_bucket(tmp_path: Path, length: int) -> None:
    with budget_file(tmp_path / "state" / "budget", b"", length) as file:
        assert file.read(BootClock(BOOT, lambda: NOW_NS)) == (0, NOW_NS)


async def test_a_budget_from_the_future_fills_from_now_on(tmp_path: Path) -> None:
    """Else nothing would be written for 584 years."""
    path, now = tmp_path / "state" / "budget", [NOW_NS]
    with budget_file(path, struct.pack("<16sQQ", BOOT, (1 << 64) - 1, 0)):
        pass
    budget = ServerBudget(PER_DAY, 1 << 20, str(path), Counter(), BootClock(BOOT, lambda: now[0]))
    await budget.open()
    now[0] += 12 * HOUR_NS
    taken = 0
    async with asyncio.timeout(10):
        while not taken:
            taken = await budget.take([1 << 20])
    await budget.close(10.0)
