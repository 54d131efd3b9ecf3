"""FaultyBackend: each fault comes out as planned and harms no other block, and a stack lives with all of them."""

from __future__ import annotations

import asyncio
import dataclasses
import errno

import pytest
from support_stack import PLAIN, Engine, fs, keys, load, opened, parts_of, stack_file, store, whole

from kvtier.errors import UsageError
from kvtier.testing import (
    Fault,
    FaultKind,
    FaultyBackend,
    MemoryOptions,
    MemoryStorage,
    MemoryTier,
    NthJob,
    SeededFaults,
    SharedMemoryTier,
)
from kvtier.testing.conformance import LoadStoreTests, make_keys
from kvtier.testing.faults import ABILITIES, WHILE_OPEN
from kvtier.testing.trace import turns
from kvtier.tier import contract
from kvtier.tier.contract import AnswersLookups, ProbesAlignment, ProvidesRows, Resettable
from kvtier.types.jobs import BlockStatus, DropReason, JobKind, dropped, failed
from kvtier_fs import FSBackend, FSOptions
from kvtier_fs.testing import FaultyIO, IOFault, IOFaultKind, seeded


class TestWithoutFaults(LoadStoreTests):
    """Behind a plan of nothing a tier is what it was."""

    survives_reopen = True
    machine_examples = 5

    def make(self, place):
        disks = vars(self).setdefault("disks", {})
        return FaultyBackend(MemoryTier(MemoryOptions(), disks.setdefault(place, MemoryStorage())))


def of_one_block(fault: Fault, key) -> object:
    """A plan that strikes one key in every job it can befall."""

    class Plan:
        def of_job(self, number, kind):
            return None

        def of_block(self, number, kind, other):
            return fault if other == key and fault.befalls(kind) else None

    return Plan()


@pytest.mark.parametrize(
    ("fault", "kind", "expected"),
    [
        (Fault(FaultKind.FAIL, errno=errno.ENOSPC), JobKind.STORE, failed(errno.ENOSPC)),
        (Fault(FaultKind.FAIL), JobKind.LOAD, failed(errno.EIO)),
        (Fault(FaultKind.DROP, reason=DropReason.DISK_FULL), JobKind.STORE, dropped(DropReason.DISK_FULL)),
        (Fault(FaultKind.CORRUPT), JobKind.LOAD, BlockStatus.CORRUPT),
        (Fault(FaultKind.MISSING), JobKind.LOAD, BlockStatus.MISSING),
        (Fault(FaultKind.LOSE), JobKind.STORE, BlockStatus.STORED),
    ],
    ids=lambda value: str(getattr(value, "kind", value)),
)
async def test_a_fault_of_one_block_harms_no_other(tmp_path, fault, kind, expected):
    suite = TestWithoutFaults()
    async with suite.opened(tmp_path) as driver:
        names = make_keys(4)
        struck = names[2]
        if kind is JobKind.LOAD:
            await driver.store(names)
        driver.tier.plan = of_one_block(fault, struck)
        outcomes = await (driver.store(names) if kind is JobKind.STORE else driver.load(names))
        assert expected in (outcomes[struck], outcomes[struck].status)
        assert all(outcome.ok for key, outcome in outcomes.items() if key != struck)
        assert driver.tier.injected == {fault.kind: 1}
        driver.tier.plan = SeededFaults(0, ())
        kept = [key for key in names if key in driver.directory]
        for key, outcome in (await driver.load(kept)).items():
            assert outcome.ok or (key == struck and fault.kind is FaultKind.LOSE)


async def test_a_held_job_ends_when_it_is_released_and_not_when_it_is_cancelled(tmp_path):
    async with TestWithoutFaults().opened(tmp_path) as driver:
        names = make_keys(4)
        await driver.store(names)
        driver.tier.plan = NthJob(1, Fault(FaultKind.HOLD), every=True)
        job = driver.load_job(names)
        task = asyncio.create_task(driver.tier.load(job))
        await driver.tier.holding.wait()
        task.cancel()
        await turns(20)
        assert not task.done()
        driver.tier.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        second = asyncio.create_task(driver.tier.load(job))
        await driver.tier.holding.wait()
        await driver.tier.close()
        assert {one.status for one in (await second).outcomes[0]} == {BlockStatus.LATE}


async def test_a_raising_job_raises_and_the_next_does_not(tmp_path):
    async with TestWithoutFaults().opened(tmp_path) as driver:
        names = make_keys(4)
        await driver.store(names)
        driver.tier.plan = NthJob(2, Fault(FaultKind.RAISE, errno=errno.EIO))
        with pytest.raises(OSError, match="planned"):
            await driver.tier.load(driver.load_job(names))
        assert all(outcome.ok for outcome in (await driver.load(names)).values())


def test_a_faulty_backend_is_what_its_inner_tier_is(tmp_path):
    shared = FaultyBackend(SharedMemoryTier(MemoryOptions()))
    disk = FaultyBackend(FSBackend(FSOptions(roots=[str(tmp_path)], capacity=1 << 20)))
    assert isinstance(shared, AnswersLookups)
    assert not isinstance(disk, AnswersLookups)
    assert disk.BLOCK_SIZE_ALIGNMENT == FSBackend.BLOCK_SIZE_ALIGNMENT
    assert isinstance(disk, ProbesAlignment)
    assert not isinstance(shared, ProbesAlignment)
    assert isinstance(shared, Resettable)
    assert not isinstance(shared, ProvidesRows)
    with pytest.raises(UsageError):
        Fault(FaultKind.CORRUPT, JobKind.STORE)


def test_a_faulty_backend_has_every_ability_that_a_tier_may_have():
    found = {
        each: {name for name in vars(each) if not name.startswith("_")}
        for each in vars(contract).values()
        if getattr(each, "_is_runtime_protocol", False) and each.__module__ == contract.__name__
    }
    assert {each: set(names) for each, names in (ABILITIES | WHILE_OPEN).items()} == found


def test_the_same_seed_gives_the_same_faults(seed):
    names = make_keys(200)
    chances = [(0.1, Fault(FaultKind.FAIL)), (0.2, Fault(FaultKind.MISSING))]
    draws = [
        [SeededFaults(number, chances).of_block(3, JobKind.LOAD, key) for key in names]
        for number in (seed, seed, seed + 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert {None, *(fault for _, fault in chances)} == set(draws[0])


STORM = [
    (0.08, Fault(FaultKind.FAIL)),
    (0.05, Fault(FaultKind.CORRUPT)),
    (0.05, Fault(FaultKind.MISSING)),
    (0.05, Fault(FaultKind.DROP)),
    (0.05, Fault(FaultKind.LOSE)),
    (0.03, Fault(FaultKind.RAISE)),
    (0.04, Fault(FaultKind.LATE)),
]
IO_STORM = [(0.04, IOFault(kind)) for kind in IOFaultKind if kind is not IOFaultKind.HOLD]


@pytest.mark.parametrize("lower", ["slab", "memory", "shared"])
async def test_a_stack_lives_with_every_fault_at_once(tmp_path, seed, lower, caplog):
    """Every load is right or a miss, every job ends, the sums hold, and something is found all the same."""
    engine, names = Engine(PLAIN, 32), keys(24)
    entry = fs(tmp_path / "r", capacity="512KiB", job_timeout_seconds=0.05, region_bytes="64KiB")
    parts = parts_of(stack_file(PLAIN, 8, entry), engine, load_timeout_seconds=5.0)
    io, storage = FaultyIO(seeded(seed, IO_STORM)), MemoryStorage()
    memory = MemoryOptions(job_timeout_seconds=0.05)
    inner = {
        "slab": lambda: FSBackend(parts.tiers[-1].options, io.slab()),
        "memory": lambda: MemoryTier(memory, storage),
        "shared": lambda: SharedMemoryTier(memory, storage),
    }[lower]
    found = injected = 0
    for life in range(3):
        tier = FaultyBackend(inner(), SeededFaults(seed + life, STORM))
        async with opened(dataclasses.replace(parts, tiers=[*parts.tiers[:-1], tier])) as stack:
            for start in range(0, 24, 8):
                await store(stack, engine, whole(names[start : start + 8], start))
                assert await stack.drain(20), "a store never ended"
            for start in (16, 0, 8):
                engine.wipe()
                result = await load(stack, engine, whole(names[start : start + 8], start))
                found += sum(outcome.ok for group in result.outcomes for outcome in group)
            stack.check_integrity()
        injected += tier.injected.total()
    assert injected > 0
    assert found > 8
    assert lower != "slab" or io.injected.total() > 0
