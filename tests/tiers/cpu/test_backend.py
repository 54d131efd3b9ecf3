"""The CPU tier: what is reported stored is whole and sealed; loads return exactly that."""

from __future__ import annotations

import asyncio
import errno
import itertools
import mmap
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from pydantic import ValidationError
from support_region import geometry
from support_region_workers import ArrayWorker, disk_error, job, transfer

from faults.machine.belongings import belongings, left_behind
from kvtier.errors import GeometryError, IntegrityError, SharedMemoryError, UsageError
from kvtier.tier.contract import AnswersLookups, ProvidesRows, TierContext
from kvtier.tier.memory_limits import Reading
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import (
    CORRUPT,
    LATE,
    LOADED,
    STORED,
    BlockStatus,
    DropReason,
    JobKind,
    JobResult,
    RowGroup,
    dropped,
    failed,
)
from kvtier.types.keys import CPU, GroupIndex
from kvtier.types.namespace import Namespace
from kvtier_cpu import CPUBackend, CPUOptions, SharedRegion
from kvtier_cpu.region import opening
from kvtier_cpu.region.opening import RegionHost
from kvtier_cpu.region.shared_region import seal_rows
from kvtier_gpu import GPUBackend, GPUOptions

FACTOR = 2
ROWS = 16


class Tier:
    """A CPU tier of 16 rows whose two workers live in this process."""

    def __init__(self, *, replicated: bool = False, **options: object) -> None:
        self.geometry = geometry(world_size=2, factor=FACTOR, replicated=replicated)
        self.workers = [ArrayWorker(self.geometry, worker) for worker in range(2)]
        self.ticks = itertools.count()
        given = {"cpu_bytes_to_use": ROWS * self.geometry.row_bytes, "shared": "memfd", **options}
        self.backend = CPUBackend(CPUOptions(**given))
        self.context = TierContext(
            name="cpu",
            geometry=self.geometry,
            namespace=Namespace(self.geometry.layout),
            clock=lambda: float(next(self.ticks)),
            workers=self.workers,
        )

    async def open(self) -> Tier:
        self.opened = await self.backend.open(self.context)
        for worker in self.workers:
            worker.rows = self.backend.rows
        return self

    @property
    def region(self) -> SharedRegion:
        return self.backend.rows

    def expected_row(self, group: int, gpu_blocks: list[int]) -> bytes:
        """What a row must hold after these GPU blocks were stored: every worker's pages, then zeros."""
        data = b"".join(worker.pages[group][block].tobytes() for worker in self.workers for block in gpu_blocks)
        return data.ljust(self.geometry.aligned_bytes(group), b"\0")


@pytest.fixture
async def tier() -> AsyncIterator[Tier]:
    tier = await Tier().open()
    yield tier
    await tier.backend.close()


# ---- opening


async def test_what_an_open_tier_says_of_itself(tier: Tier) -> None:
    layout, space = tier.geometry, tier.opened.space
    assert isinstance(tier.backend, ProvidesRows)
    assert CPUBackend.medium == CPU
    assert CPUBackend.BLOCK_SIZE_ALIGNMENT == mmap.PAGESIZE
    assert tier.opened.capacity_bytes == ROWS * layout.row_bytes
    assert space is not None
    assert space.regions_by_root == (1,)
    assert space.region_bytes == ROWS * layout.row_bytes
    assert space.num_slot_ids == tier.backend.rows.num_rows == ROWS
    assert tier.opened.mode == "memfd, populate_write"


async def test_the_budget_is_never_exceeded_and_never_rounded_up() -> None:
    layout = geometry()
    tier = await Tier(cpu_bytes_to_use=3 * layout.row_bytes - 1).open()
    assert tier.backend.rows.view.nbytes == 2 * layout.row_bytes
    await tier.backend.close()
    with pytest.raises(GeometryError, match="one block needs"):
        await Tier(cpu_bytes_to_use=layout.row_bytes - 1).open()


async def test_too_little_memory_reaches_the_caller_and_leaves_the_tier_closed() -> None:
    class Nothing:
        def readings(self) -> list[Reading]:
            return [Reading("an empty machine", 0)]

    tier = Tier()
    tier.backend = CPUBackend(tier.backend.options, RegionHost(limits=Nothing()))
    with pytest.raises(SharedMemoryError, match="an empty machine"):
        await tier.open()
    with pytest.raises(UsageError, match="not open"):
        _ = tier.backend.rows
    await tier.backend.close()


async def test_a_cancelled_open_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on, before = threading.Event(), threading.Event(), belongings()
    make = opening.make_resident

    def hold(*given: Any) -> Any:
        reached.set()
        go_on.wait()
        return make(*given)

    monkeypatch.setattr(opening, "make_resident", hold)
    tier = Tier()
    task = asyncio.ensure_future(tier.backend.open(tier.context))
    await asyncio.to_thread(reached.wait)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task  # its exception holds the mapping
    await asyncio.sleep(0)
    assert not [left for left in left_behind(before) if "asyncio" not in left]
    with pytest.raises(UsageError):
        _ = tier.backend.rows


async def test_close_is_idempotent_and_a_closed_tier_says_so(tier: Tier) -> None:
    await tier.backend.close()
    await tier.backend.close()
    for call in (tier.backend.store, tier.backend.load):
        with pytest.raises(UsageError, match="not open"):
            await call(job(JobKind.STORE))


async def test_lookups_are_the_control_planes(tier: Tier) -> None:
    assert not isinstance(tier.backend, AnswersLookups)


@pytest.mark.parametrize(
    "bad",
    [{"cpu_bytes_to_use": 0}, {"cpu_bytes_to_use": "1 banana"}, {"free_watermark": 1.0}, {"shared": "posix"}, {"x": 1}],
)
def test_bad_options_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CPUOptions(**{"cpu_bytes_to_use": "1GiB", **bad})


# ---- storing


async def test_a_stored_block_is_every_workers_pages_then_zeros_under_the_right_checksum(tier: Tier) -> None:
    tier.region.view[:] = 0xEE  # an earlier tenant
    groups = (
        transfer(0, GPURuns.whole([4, 9, 30, 2], FACTOR), [5, 1]),
        transfer(1, GPURuns.whole([7, 8], FACTOR), [12]),
    )
    result = await tier.backend.store(job(JobKind.STORE, *groups))
    assert result.outcomes == ((STORED, STORED), (STORED,))
    layout = tier.geometry
    assert result.bytes_moved == 2 * layout.kv_bytes_per_offloaded_block(0) + layout.kv_bytes_per_offloaded_block(1)
    assert result.seconds > 0
    for group, row, blocks in ((0, 5, [4, 9]), (0, 1, [30, 2]), (1, 12, [7, 8])):
        expected = tier.expected_row(group, blocks)
        assert tier.region.row(row)[: len(expected)] == expected
        assert tier.region.checksum(row) == xxhash.xxh3_128_digest(expected)
    untouched = [row for row in range(ROWS) if row not in (5, 1, 12)]
    assert (tier.region.view[untouched] == 0xEE).all()


@pytest.mark.parametrize("piece_bytes", [1 << 20, 1])
async def test_rows_that_others_filled_are_sealed_with_zeros_behind_their_blocks(
    tier: Tier, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_cpu.backend.PIECE_BYTES", piece_bytes)
    tier.region.view[:] = 0xEE
    sealing = tier.backend.seal([(GroupIndex(0), [5, 1]), (GroupIndex(1), [12])])
    if piece_bytes == 1:
        assert sealing is not None, "it is too much for one turn"
        await sealing
    else:
        assert sealing is None
    for group, row in ((0, 5), (0, 1), (1, 12)):
        block = b"\xee" * tier.geometry.kv_bytes_per_offloaded_block(group)
        expected = block.ljust(tier.geometry.aligned_bytes(group), b"\0")
        assert tier.region.row(row)[: len(expected)] == expected
        assert tier.region.checksum(row) == xxhash.xxh3_128_digest(expected)
    assert (tier.region.view[[0, 2]] == 0xEE).all()


async def test_close_waits_until_rows_are_sealed(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    region, sealed, go_on = tier.region, [], threading.Event()
    monkeypatch.setattr("kvtier_cpu.backend.PIECE_BYTES", 1)
    monkeypatch.setattr("kvtier_cpu.backend.SHORT_BYTES", 1)

    def seal(of: SharedRegion, group: int, rows: Any) -> None:
        assert go_on.wait(10)
        seal_rows(of, group, rows)
        sealed.append(region.checksum(int(rows[0])))

    monkeypatch.setattr("kvtier_cpu.backend.seal_rows", seal)
    assert tier.backend.seal([(GroupIndex(0), [5])]) is not None
    closing = asyncio.ensure_future(tier.backend.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    go_on.set()
    await closing
    assert len(sealed) == 1
    with pytest.raises(UsageError, match="not open"):
        tier.backend.seal([(GroupIndex(0), [5])])


async def test_blocks_not_named_in_full_are_dropped_and_never_copied(tier: Tier) -> None:
    runs = GPURuns(int_array([0, 1, 2]), int_array([1, 0, 0]), int_array([1, 2, 1]), int_array([10, 11, 12, 13]))
    result = await tier.backend.store(job(JobKind.STORE, transfer(0, runs, [3, 4, 6])))
    partial = dropped(DropReason.PARTIAL)
    assert result.outcomes == ((partial, STORED, partial),)
    for worker in tier.workers:
        assert [group.rows.tolist() for group in worker.seen[0].groups] == [[4]]
    assert not tier.region.view[[3, 6]].any()
    assert tier.region.row(4)[: tier.geometry.aligned_bytes(0)] == tier.expected_row(0, [11, 12])
    assert tier.backend.counters["partial_blocks"] == 2


async def test_a_job_of_partial_blocks_only_asks_no_worker(tier: Tier) -> None:
    runs = GPURuns(int_array([0]), int_array([1]), int_array([1]), int_array([10]))
    result = await tier.backend.store(job(JobKind.STORE, transfer(1, runs, [3])))
    assert result.outcomes == ((dropped(DropReason.PARTIAL),),)
    assert result.bytes_moved == 0
    assert [worker.seen for worker in tier.workers] == [[], []]


async def test_what_all_workers_hold_in_common_is_stored_once_by_worker_0_and_loaded_by_each() -> None:
    tier = await Tier(replicated=True).open()
    first, second = tier.workers
    kept = [pages.copy() for pages in first.pages]
    runs = GPURuns.whole([4, 5, 6, 7], FACTOR)
    assert tier.geometry.row_bytes < geometry(world_size=2, factor=FACTOR).row_bytes
    stored = await tier.backend.store(job(JobKind.STORE, transfer(0, runs, [3, 9])))
    assert stored.outcomes == ((STORED, STORED),)
    assert stored.bytes_moved == 4 * tier.geometry.page_bytes(0)
    assert (len(first.seen), len(second.seen)) == (1, 0)
    whole = b"".join(kept[0][block].tobytes() for block in (4, 5)).ljust(tier.geometry.aligned_bytes(0), b"\0")
    assert bytes(tier.region.row(3)) == whole.ljust(tier.geometry.row_bytes, b"\0")
    loaded = await tier.backend.load(job(JobKind.LOAD, transfer(0, GPURuns.whole([20, 21, 22, 23], FACTOR), [3, 9])))
    assert loaded.outcomes == ((LOADED, LOADED),)
    for worker in tier.workers:
        assert (worker.pages[0][20:24] == kept[0][4:8]).all()
    await tier.backend.close()


async def test_the_worst_word_of_any_worker_counts(tier: Tier) -> None:
    tier.workers[0].refuses = {2: LATE}
    tier.workers[1].refuses = {2: failed(errno.ENODEV)}
    result = await tier.backend.store(job(JobKind.STORE, transfer(1, GPURuns.whole([1, 2, 3, 4], FACTOR), [2, 8])))
    assert result.outcomes == ((failed(errno.ENODEV), STORED),)


async def test_a_worker_that_ends_in_an_error_fails_its_blocks_with_that_errno(tier: Tier) -> None:
    tier.workers[1].raises = disk_error()
    result = await tier.backend.store(job(JobKind.STORE, transfer(1, GPURuns.whole([1, 2], FACTOR), [2])))
    assert result.outcomes == ((failed(errno.ENODEV),),)
    assert tier.backend.counters["worker_errors"] == 1
    tier.workers[1].raises = asyncio.CancelledError()
    result = await tier.backend.store(job(JobKind.STORE, transfer(1, GPURuns.whole([1, 2], FACTOR), [2])))
    assert result.outcomes[0][0].status is BlockStatus.CANCELLED


async def test_a_defect_in_a_worker_is_not_mistaken_for_bad_luck(tier: Tier) -> None:
    tier.workers[0].raises = UsageError("no such block")
    with pytest.raises(UsageError, match="no such block"):
        await tier.backend.store(job(JobKind.STORE, transfer(1, GPURuns.whole([1, 2], FACTOR), [2])))
    assert tier.workers[1].calls_ended == 1, "the other worker was waited for"

    async def answer_for_nothing(part: object) -> JobResult:
        return JobResult(job(JobKind.STORE).job_id, ())

    tier.workers[0].load = answer_for_nothing
    with pytest.raises(IntegrityError):
        await tier.backend.store(job(JobKind.STORE, transfer(1, GPURuns.whole([1, 2], FACTOR), [2])))


async def test_jobs_that_are_not_the_cpu_tiers_are_refused_before_anything_moves(tier: Tier) -> None:
    runs = GPURuns.whole([1, 2], FACTOR)
    good = transfer(1, runs, [2])
    for bad in (
        RowGroup(good.group, good.keys, [1], [2], [1]),
        replace(good, rows=int_array([])),
        replace(good, group=2),
        replace(good, runs=GPURuns.whole([1, 2, 3, 4], FACTOR)),
    ):
        for call in (tier.backend.store, tier.backend.load):
            with pytest.raises(UsageError):
                await call(job(JobKind.STORE, bad))
    assert [worker.seen for worker in tier.workers] == [[], []]


async def test_a_cancelled_store_ends_only_when_its_copies_have(tier: Tier) -> None:
    tier.workers[1].gate = asyncio.Event()
    task = asyncio.ensure_future(
        tier.backend.store(job(JobKind.STORE, transfer(1, GPURuns.whole([1, 2], FACTOR), [2])))
    )
    await tier.workers[1].entered.wait()
    for _ in range(20):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done(), "the row is still being written"
    tier.workers[1].gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tier.workers[1].calls_ended == 1


async def test_close_waits_for_a_store_under_way(tier: Tier) -> None:
    tier.workers[0].gate = asyncio.Event()
    store = asyncio.ensure_future(
        tier.backend.store(job(JobKind.STORE, transfer(1, GPURuns.whole([1, 2], FACTOR), [2])))
    )
    await tier.workers[0].entered.wait()
    close = asyncio.ensure_future(tier.backend.close())
    await asyncio.sleep(0)
    assert not close.done()
    tier.workers[0].gate.set()
    assert (await store).ok
    await close


# ---- loading


async def test_what_was_stored_is_loaded_into_the_blocks_named_and_no_others(tier: Tier) -> None:
    rows = [5, 1, 9]
    source = GPURuns.whole([0, 1, 2, 3, 4, 5], FACTOR)
    assert (await tier.backend.store(job(JobKind.STORE, transfer(0, source, rows)))).ok
    before = [worker.pages[0].copy() for worker in tier.workers]
    # an unaligned head, a whole block, a tail
    runs = GPURuns(int_array([0, 1, 2]), int_array([1, 0, 0]), int_array([1, 2, 1]), int_array([40, 41, 42, 43]))
    result = await tier.backend.load(job(JobKind.LOAD, transfer(0, runs, rows)))
    assert result.outcomes == ((LOADED,) * 3,)
    assert result.bytes_moved == 4 * tier.geometry.kv_bytes_per_block(0)
    for worker, old in zip(tier.workers, before, strict=True):
        old[[40, 41, 42, 43]] = old[[1, 2, 3, 4]]
        assert (worker.pages[0] == old).all()


async def test_a_load_reports_the_worst_of_its_workers_for_each_block(tier: Tier) -> None:
    tier.workers[0].refuses = {2: failed(errno.EIO)}
    tier.workers[1].refuses = {8: LATE}
    result = await tier.backend.load(job(JobKind.LOAD, transfer(1, GPURuns.whole(range(6), FACTOR), [2, 8, 4])))
    assert result.outcomes == ((failed(errno.EIO), LATE, LOADED),)
    assert result.bytes_moved == tier.geometry.kv_bytes_per_offloaded_block(1)


async def test_a_row_that_changed_since_it_was_sealed_is_corrupt_and_not_copied() -> None:
    tier = await Tier(verify_loads=True).open()
    rows = [5, 1, 9]
    assert (await tier.backend.store(job(JobKind.STORE, transfer(1, GPURuns.whole(range(6), FACTOR), rows)))).ok
    tier.region.view[1, 17] ^= 1
    before = [worker.pages[1].copy() for worker in tier.workers]
    result = await tier.backend.load(job(JobKind.LOAD, transfer(1, GPURuns.whole(range(40, 46), FACTOR), rows)))
    assert result.outcomes == ((LOADED, CORRUPT, LOADED),)
    assert tier.backend.counters["corrupt_rows"] == 1
    for worker, old in zip(tier.workers, before, strict=True):
        old[[40, 41, 44, 45]] = old[[0, 1, 4, 5]]
        assert (worker.pages[1] == old).all()
    await tier.backend.close()


async def test_blocks_are_as_long_as_the_workers_own_layout_says_in_rows_that_stay_as_they_are() -> None:
    """The rows were laid out by longer pages: nothing of what other blocks left in them is part of a block."""
    tier = await Tier().open()
    shorter = [replace(group, refs=(TensorRef(0, group.page_bytes),)) for group in tier.geometry.layout.groups]
    wide = [replace(group, refs=(TensorRef(0, 3 * group.page_bytes),)) for group in shorter]
    rows = CPUBackend(CPUOptions(cpu_bytes_to_use=ROWS * 9 * tier.geometry.row_bytes, shared="memfd"))
    layout = replace(tier.geometry.layout, groups=wide)
    await rows.open(replace(tier.context, geometry=Geometry(layout, tier.geometry.alignment)))
    with pytest.raises(GeometryError, match="and a row has"):
        rows.use_geometry(Geometry(replace(layout, groups=[replace(wide[0], padding_bytes=1 << 20)])))
    rows.use_geometry(tier.geometry)
    region = rows.rows
    region.view[:] = 0xEE
    for worker in tier.workers:
        worker.rows = region
    result = await rows.store(job(JobKind.STORE, transfer(1, GPURuns.whole([2, 3], FACTOR), [7])))
    expected = tier.expected_row(1, [2, 3])
    assert result.outcomes == ((STORED,),)
    assert result.bytes_moved == tier.geometry.kv_bytes_per_offloaded_block(1)
    assert region.row(7)[: len(expected)] == expected
    assert set(region.row(7)[len(expected) :]) == {0xEE}
    assert region.checksum(7) == xxhash.xxh3_128_digest(expected)
    await rows.close()
    await tier.backend.close()


async def test_what_a_page_leaves_unused_is_zero_in_a_sealed_row() -> None:
    groups = [GroupLayout((TensorRef(0, 1000),), padding_bytes=24)]
    layout = Geometry(KVLayout(groups, block_size_factor=2), mmap.PAGESIZE)
    backend = CPUBackend(CPUOptions(cpu_bytes_to_use=2 * layout.row_bytes, shared="memfd"))
    await backend.open(TierContext("cpu", layout, Namespace(layout.layout), float))
    backend.rows.view[:] = 7
    seal_rows(backend.rows, 0, np.array([1]))
    assert backend.rows.view[1].tolist() == 2 * (1000 * [7] + 24 * [0]) + (mmap.PAGESIZE - 2048) * [0]
    await backend.close()


async def test_many_jobs_at_once_keep_their_rows_apart(tier: Tier) -> None:
    jobs = [
        job(JobKind.STORE, transfer(row % 2, GPURuns.whole([2 * row, 2 * row + 1], FACTOR), [row]))
        for row in range(ROWS)
    ]
    results = await asyncio.gather(*map(tier.backend.store, jobs))
    assert all(result.ok for result in results)
    for row in range(ROWS):
        expected = tier.expected_row(row % 2, [2 * row, 2 * row + 1])
        assert tier.region.row(row)[: len(expected)] == expected
        assert tier.region.checksum(row) == xxhash.xxh3_128_digest(expected)


async def test_a_tier_without_workers_moves_nothing_and_says_so(tier: Tier) -> None:
    tier.context = replace(tier.context, workers=())
    alone = CPUBackend(tier.backend.options)
    await alone.open(tier.context)
    with pytest.raises(UsageError, match="no workers"):
        await alone.store(job(JobKind.STORE))
    await alone.close()


async def test_the_gpu_tier_of_this_process_stores_and_loads_through_the_region() -> None:
    tier = Tier()
    rng = np.random.default_rng(5)
    sizes = {ref.tensor: ref.page_size_bytes for group in tier.geometry.layout.groups for ref in group.refs}
    tensors = [
        [torch.from_numpy(rng.integers(0, 256, (64, sizes[i]), dtype=np.uint8)) for i in range(len(sizes))]
        for _ in range(2)
    ]
    gpus = [GPUBackend(GPUOptions()) for _ in range(2)]
    tier.context = replace(tier.context, workers=gpus)
    await tier.backend.open(tier.context)
    for worker, gpu in enumerate(gpus):
        own = {"worker": worker, "kv_caches": tensors[worker]}
        await gpu.open(replace(tier.context, **own, rows=tier.backend.rows, workers=()))
    blocks = [3, 60, 17, 4]
    stored = transfer(0, GPURuns.whole(blocks, FACTOR), [9, 2]), transfer(1, GPURuns.whole(blocks, FACTOR), [0, 15])
    assert (await tier.backend.store(job(JobKind.STORE, *stored))).ok
    expected = [[tensor.clone() for tensor in own] for own in tensors]
    for own in expected:
        for tensor in own:
            tensor[[30, 31, 32, 33]] = tensor[blocks]
    target = GPURuns.whole([30, 31, 32, 33], FACTOR)
    loaded = transfer(0, target, [9, 2]), transfer(1, target, [0, 15])
    assert (await tier.backend.load(job(JobKind.LOAD, *loaded))).ok
    for own, wanted in zip(tensors, expected, strict=True):
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(own, wanted, strict=True))
    for gpu in gpus:
        await gpu.close()
    await tier.backend.close()
