"""Bad disks: short, failing and stuck I/O become outcomes; buffers stay whole until their I/O has ended."""

from __future__ import annotations

import asyncio
import errno
import itertools
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from support_fs import counted, flat, keys, layout, open_tier, open_when_free, options
from support_fs_engine import FaultyEngine

from kvtier.errors import RootBusyError, UsageError
from kvtier.types.jobs import CORRUPT, LATE, LOADED, STORED, BlockStatus, DropReason, dropped, failed
from kvtier_fs.io.contract import MAX_BUFFERS, IOKind
from kvtier_fs.io.full_transfer import REQUEST_BYTES, split
from kvtier_fs.local.root_queue import JOINED_BYTES

HEADER = 4096


def of_slots(kind: IOKind):
    """Picks requests of a kind that move slots: those of more than one page."""
    return lambda request: request.kind is kind and request.length > HEADER


async def turns(count: int = 20) -> None:
    """Let the loop run what is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [IOKind.READ, IOKind.WRITE])
@pytest.mark.parametrize("page_bytes", [16384, 3 << 20])
async def test_short_transfers_are_continued_to_the_last_byte(tmp_path, kind, page_bytes, request):
    seed = request.config.getoption("--seed") or random.randrange(1 << 32)
    rng = random.Random(seed)
    engine = FaultyEngine()
    async with open_tier(
        options(tmp_path / "root", capacity="64MiB"), layout(page_bytes), hooks=engine.hooks()
    ) as tier:
        engine.fault = lambda io: rng.randrange(1, io.length) if of_slots(kind)(io) else None
        names = keys(4)
        await tier.store_all(names)
        assert await tier.load(names) == [LOADED] * 4, f"replay with --seed {seed}"
        assert tier.backend.counters["io.short"] >= 1, f"replay with --seed {seed}"


async def test_a_transfer_without_progress_fails_and_the_others_of_its_job_do_not(tmp_path):
    engine = FaultyEngine()
    async with open_tier(options(tmp_path / "root"), hooks=engine.hooks()) as tier:
        names = keys(6)
        await tier.store_all(names)
        (written,) = [io for io in engine.seen if of_slots(IOKind.WRITE)(io)]  # neighbours go in one request
        bad = written.offset + 2 * (written.length // 6)
        engine.fault = lambda io: 0 if io.kind is IOKind.READ and io.offset <= bad < io.offset + io.length else None
        outcomes = await tier.load(names)
        assert outcomes == [LOADED, LOADED, failed(errno.EIO), LOADED, LOADED, LOADED]
        assert counted(tier) == {"errno.EIO": 1}


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EBADF, errno.ENOSPC, errno.EDQUOT])
async def test_a_failed_write_is_told_by_its_errno_and_a_full_disk_is_a_drop(tmp_path, number):
    engine = FaultyEngine()
    async with open_tier(options(tmp_path / "root"), hooks=engine.hooks()) as tier:
        await tier.store_all(keys(4))
        engine.fault = lambda io: -number if io.kind is IOKind.WRITE else None
        expected = dropped(DropReason.DISK_FULL) if number in (errno.ENOSPC, errno.EDQUOT) else failed(number)
        assert await tier.store(keys(3, start=10)) == [expected] * 3
        assert tier.backend.counters[f"errno.{errno.errorcode[number]}"] == 3
        assert await tier.load(keys(4)) == [LOADED] * 4, "loads go on"
        engine.fault = lambda io: None
        assert await tier.store(keys(3, start=10)) == [STORED] * 3, "stores recover"


async def test_interrupted_requests_are_asked_again_but_not_for_ever(tmp_path):
    engine = FaultyEngine()
    async with open_tier(options(tmp_path / "root"), hooks=engine.hooks()) as tier:
        await tier.store_all(keys(2))
        times = iter([-errno.EINTR, -errno.EAGAIN, None, -errno.EINTR, None])
        engine.fault = lambda io: next(times)
        assert await tier.load(keys(2)) == [LOADED] * 2
        engine.fault = lambda io: -errno.EAGAIN
        before = len(engine.seen)
        assert await tier.load(keys(1)) == [failed(errno.EAGAIN)]
        assert len(engine.seen) - before == 9


async def test_one_failed_piece_fails_its_block_once_all_pieces_have_ended(tmp_path):
    engine = FaultyEngine()
    shape = layout(3 << 20)
    async with open_tier(options(tmp_path / "root", capacity="64MiB"), shape, rows=2, hooks=engine.hooks()) as tier:
        names = keys(2)
        await tier.store_all(names)
        engine.hold = lambda io: io.kind is IOKind.READ and not engine.held
        engine.fault = lambda io: -errno.EIO if io.offset % (1 << 20) else None
        load = asyncio.create_task(tier.backend.load(tier.load_job(names)))
        await turns()
        assert not load.done(), "one piece of the first block is still under way"
        engine.let_go()
        assert [outcome.status for outcome in flat(await load)] == [BlockStatus.FAILED] * 2


@pytest.mark.parametrize("kind", [IOKind.READ, IOKind.WRITE])
async def test_a_cancelled_job_returns_only_when_its_io_has_ended(tmp_path, kind):
    engine = FaultyEngine()
    async with open_tier(options(tmp_path / "root", io_depth=1), rows=64, hooks=engine.hooks()) as tier:
        names = keys(64)
        await tier.store_all(names)
        engine.hold = of_slots(kind)
        storing = kind is IOKind.WRITE
        before = sum(map(of_slots(kind), engine.seen))
        formats = [tier.format_region(len(tier.region_sizes), 0) for _ in range(3)]
        job = tier.store_job(names, formats) if storing else tier.load_job(names)
        task = asyncio.create_task((tier.backend.store if storing else tier.backend.load)(job))
        await engine.holding.wait()
        await turns()
        under_way = len(engine.held)
        assert 0 < under_way < 64
        for _ in range(3):
            task.cancel()
            await turns()
            assert not task.done(), "its rows are still in the kernel's hands"
        engine.let_go()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.in_flight == 0
        moved = [request for request in engine.seen if of_slots(kind)(request)]
        assert len(moved) == before + under_way, "what had not begun never begins"


async def test_the_rows_of_a_cancelled_load_are_not_written_after_it_returned(tmp_path):
    async with open_tier(options(tmp_path / "root"), layout(1 << 20), rows=6) as tier:
        names = keys(6)
        await tier.store_all(names)
        for _ in range(30):
            task = asyncio.create_task(tier.backend.load(tier.load_job(names)))
            await turns(random.randrange(12))
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                tier.rows.view[:] = 0x55
                await turns(50)
                assert np.all(tier.rows.view == 0x55)


@pytest.mark.parametrize("kind", [IOKind.READ, IOKind.WRITE])
async def test_stuck_io_does_not_hold_close_up_and_keeps_its_lock_and_memory(tmp_path, kind):
    """So a slot that is written late is nobody else's: its root cannot be opened before the write has ended."""
    engine, names = FaultyEngine(), keys(4)
    settings = options(tmp_path / "root", close_timeout_seconds=0.05)
    async with open_tier(settings, hooks=engine.hooks()) as tier:
        await tier.store_all(names)
        engine.hold = of_slots(kind)
        if kind is IOKind.READ:
            stuck = asyncio.create_task(tier.backend.load(tier.load_job(names)))
        else:
            stuck = asyncio.create_task(tier.backend.store(tier.store_job(keys(4, start=10))))
        await turns()
        await tier.backend.close()
        assert flat(await stuck) == [LATE] * 4
        assert tier.backend.counters["close.stuck"] == 1, "one request for four neighbours"
        for _ in range(2):
            with pytest.raises(RootBusyError):
                async with open_tier(options(tmp_path / "root")):
                    pass
        engine.let_go()
    async with open_when_free(options(tmp_path / "root")) as tier:
        assert set(tier.opened.recovered.keys) >= set(names)
        assert await tier.load(names) == [LOADED] * 4


async def test_a_job_past_its_deadline_does_no_io(tmp_path):
    engine = FaultyEngine()
    async with open_tier(options(tmp_path / "root"), hooks=engine.hooks()) as tier:
        await tier.store_all(keys(3))
        before = len(engine.seen)
        assert flat(await tier.backend.load(replace(tier.load_job(keys(3)), deadline=0.0))) == [LATE] * 3
        assert len(engine.seen) == before


async def test_a_region_that_could_not_be_formatted_is_formatted_by_the_next_store(tmp_path):
    engine = FaultyEngine()
    async with open_tier(options(tmp_path / "root"), hooks=engine.hooks()) as tier:
        engine.fault = lambda io: -errno.ENOSPC
        assert await tier.store(keys(3), [tier.format_region(0, 0)]) == [dropped(DropReason.DISK_FULL)] * 3
        engine.fault = lambda io: -errno.EIO
        assert await tier.store(keys(3)) == [failed(errno.EIO)] * 3
        assert not any(of_slots(IOKind.WRITE)(request) for request in engine.seen), "no slot without its region"
        engine.fault = lambda io: None
        assert await tier.store(keys(3)) == [STORED] * 3
    async with open_tier(options(tmp_path / "root")) as tier:
        assert list(tier.opened.recovered.keys) == keys(3)


@pytest.mark.parametrize("spoiled", [-errno.EINTR, -errno.EAGAIN, 512])
async def test_header_pages_are_moved_to_the_last_byte_like_blocks(tmp_path, spoiled):
    """Those of regions when they are formatted, and those of regions and slots when the root is opened by scan."""
    engine, names = FaultyEngine(), keys(6)
    turns = itertools.cycle([spoiled, None])
    engine.fault = lambda io: next(turns) if io.length <= HEADER else None
    settings, shape = options(tmp_path / "root", capacity="2MiB", region_bytes="256KiB"), layout(65536)
    async with open_tier(settings, shape, hooks=engine.hooks()) as tier:
        await tier.store_all(names)
        assert len({slot // tier.space.slots_per_region for slot, _ in tier.directory.values()}) > 1
    (tmp_path / "root" / "snapshot").unlink()
    async with open_tier(settings, shape, hooks=engine.hooks()) as tier:
        assert tier.backend.counters["open.scan"] == 1
        assert sorted(tier.opened.recovered.keys) == sorted(names)
        assert await tier.load(names) == [LOADED] * 6


async def test_a_store_waits_for_the_cut_that_another_job_carries(tmp_path):
    engine = FaultyEngine()
    async with open_tier(options(tmp_path / "root"), hooks=engine.hooks()) as tier:
        engine.hold = lambda io: io.length == HEADER
        first = asyncio.create_task(tier.store(keys(2), [tier.format_region(0, 0)]))
        await asyncio.sleep(0)
        second = asyncio.create_task(tier.store(keys(2, start=10)))
        await engine.holding.wait()
        await turns()
        assert not any(of_slots(IOKind.WRITE)(request) for request in engine.seen)
        engine.let_go()
        assert await first + await second == [STORED] * 4


async def test_late_bytes_of_an_older_generation_do_not_pass(tmp_path):
    engine = FaultyEngine()
    async with open_tier(options(tmp_path / "root"), hooks=engine.hooks()) as tier:
        (key,) = keys(1)
        await tier.store_all([key])
        slot, generation = tier.directory[key]
        engine.hold = of_slots(IOKind.WRITE)
        late = asyncio.create_task(tier.backend.store(tier.store_job([key])))
        await turns()
        tier.directory[key] = (slot, generation + 1)
        assert await tier.load([key]) == [CORRUPT], "the slot does not hold that generation yet"
        engine.let_go()
        await late


async def test_jobs_that_make_no_sense_are_refused(tmp_path):
    async with open_tier(options(tmp_path / "root")) as tier:
        await tier.store_all(keys(2))
        job = tier.load_job(keys(2))
        group = job.groups[0]
        for wrong in (
            replace(group, slots=group.slots[:1]),
            replace(group, slots=[slot + tier.space.num_slot_ids for slot in group.slots]),
            replace(group, rows=[row + tier.rows.num_rows for row in group.rows]),
            replace(group, slots=[slot - 10**6 for slot in group.slots]),
        ):
            with pytest.raises(UsageError):
                await tier.backend.load(replace(job, groups=(wrong,)))
        unformatted = replace(group, slots=[slot + tier.space.slots_per_region for slot in group.slots])
        assert flat(await tier.backend.store(replace(job, groups=(unformatted,)))) == [failed(errno.EINVAL)] * 2
    with pytest.raises(UsageError):
        await tier.backend.open(None)  # type: ignore[arg-type]
    assert flat(await tier.backend.load(job)) == [dropped(DropReason.CLOSING)] * 2


async def test_a_key_that_fits_no_header_is_dropped(tmp_path):
    async with open_tier(options(tmp_path / "root")) as tier:
        fits, too_long = b"k" * 3956 + bytes(4), b"k" * 3957 + bytes(4)
        outcomes = await tier.store([fits, too_long], [tier.format_region(0, 0)])
        assert outcomes == [STORED, dropped(DropReason.KEY_TOO_LONG)]
        assert await tier.load([fits]) == [LOADED]
    async with open_tier(options(tmp_path / "root")) as tier:
        assert list(tier.opened.recovered.keys) == [fits]


def test_pieces_are_aligned_bounded_and_cover_everything():
    for total in (8192, REQUEST_BYTES, REQUEST_BYTES + 4096, 5 * REQUEST_BYTES + 4096, 128 * REQUEST_BYTES + 4096):
        pieces = split(total, 4096)
        assert pieces[0][0] == 0
        assert pieces[-1][1] == total
        assert all(end - start <= REQUEST_BYTES and start % 4096 == 0 for start, end in pieces)
        assert all(end == start for (_, end), (start, _) in pairwise(pieces))
        assert len(pieces) == -(-total // REQUEST_BYTES)


async def test_neighbouring_slots_go_in_one_request_of_bounded_size(tmp_path):
    engine = FaultyEngine()
    async with open_tier(options(tmp_path / "root"), rows=64, hooks=engine.hooks()) as tier:
        names = keys(64)
        await tier.store_all(names)
        written = [io for io in engine.seen if of_slots(IOKind.WRITE)(io)]
        assert len(written) < 64
        assert max(io.length for io in written) <= JOINED_BYTES
        assert max(len(io.buffers) for io in written) <= MAX_BUFFERS
        scattered = sorted(names, key=lambda key: tier.directory[key][0])[::2]
        assert await tier.load(scattered) == [LOADED] * 32
        read = [io for io in engine.seen if of_slots(IOKind.READ)(io)]
        assert len(read) == 32, "what lies between them is not read"
