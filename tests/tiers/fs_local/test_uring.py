"""The ring of io_uring: no request keeps a row mapped or costs memory for ever, and each moves what it names."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import struct
import sys
from array import array

import pytest
from support_fs import keys, open_tier, options
from support_fs_engine import FaultyEngine
from support_stack import until

from kvtier.aio.eventfd import EventFD
from kvtier.types.jobs import LOADED
from kvtier_fs.io import uring
from kvtier_fs.io.contract import HeaderPages, IOKind, IORequest, places_of
from kvtier_fs.io.uring import UringEngine, probe_uring

needs_uring = pytest.mark.skipif(bool(probe_uring()), reason=f"no io_uring: {probe_uring()}")


@needs_uring
async def test_buffers_are_let_go_when_their_request_has_ended(tmp_path) -> None:
    memory = mmap.mmap(-1, 4 * 4096)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    engine = UringEngine(asyncio.get_running_loop(), depth=2)
    engine.open()
    view = memoryview(memory)
    before = sys.getrefcount(view)
    results = []
    try:
        for turn in range(50):
            for kind in (IOKind.WRITE, IOKind.READ):
                ended = asyncio.get_running_loop().create_future()
                parts = [view[4096 * i : 4096 * (i + 1)] for i in range(1 + turn % 4)]
                engine.submit([IORequest(kind, fd, 0, parts, lambda _, result, f=ended: f.set_result(result))])
                results.append((await ended, 4096 * len(parts)))
                del parts
    finally:
        await engine.close(5.0)
        os.close(fd)
    assert all(moved == wanted for moved, wanted in results)
    assert sys.getrefcount(view) == before
    view.release()
    memory.close()


def test_places_of_buffers_are_the_known_ones() -> None:
    pages = HeaderPages(6, 4096)
    for chosen in ([0], [5, 1], [2, 0, 4, 1]):
        buffers = [pages.pages[i][: 4096 - 512 * i] for i in chosen]
        known = [word for i, buffer in zip(chosen, buffers, strict=True) for word in (pages.addresses[i], len(buffer))]
        assert places_of(buffers).tolist() == known


@needs_uring
def test_a_ring_with_its_requests_in_the_order_of_their_ends_goes_round(tmp_path) -> None:
    """More requests than a ring has places, in batches of each size: numbers and results are those of the requests."""
    event = EventFD()
    ring, fd = uring._Ring(3, event), os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    buffer, number = memoryview(bytearray(64)), 0
    for count in (1, 3, 2, 3, 3, 1) * 4:
        given = {}
        for _ in range(count):
            request = IORequest(IOKind.WRITE, fd, number, [buffer[: 1 + number % 64]], lambda *_: None)
            assert ring.prepare(request, number)
            given[number] = request
            number += 1
        assert ring.submit()
        ended: dict[int, int] = {}
        while len(ended) < count:
            seen = ring.ended(2)
            assert seen == ring.ended(2)[: len(seen)], "they are still there"
            ring.advance(len(seen))
            ended |= seen
        assert ended == {at: request.length for at, request in given.items()}
    ring.close()
    os.close(fd)
    event.close()


@needs_uring
def test_a_full_ring_takes_nothing_and_what_raised_is_not_in_it(tmp_path) -> None:
    event = EventFD()
    ring, fd = uring._Ring(2, event), os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    requests = [IORequest(IOKind.WRITE, fd, 0, [memoryview(bytearray(8))], lambda *_: None) for _ in range(3)]
    with pytest.raises(struct.error):
        ring.prepare(IORequest(IOKind.WRITE, fd, -1, [memoryview(bytearray(8))], lambda *_: None), 7)
    assert [ring.prepare(request, number) for number, request in enumerate(requests)] == [True, False, False]
    assert ring.submit()
    while len(seen := ring.ended(9)) < 2:
        pass
    assert sorted(seen) == [(0, 8), (uring._NO_NUMBER, 0)]
    ring.close()
    os.close(fd)
    event.close()


@needs_uring
async def test_requests_behind_one_that_the_kernel_cannot_begin_end_as_well(tmp_path) -> None:
    """It leaves them in the ring, and nothing else is submitted that would take them along."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, 1 << 16)
    engine = UringEngine(asyncio.get_running_loop(), depth=8)
    engine.open()
    ended: dict[int, int] = {}

    def request(number: int, places: array[int] | None = None) -> IORequest:
        buffers = [memoryview(bytearray(4096))]
        return IORequest(
            IOKind.READ, fd, 4096 * number, buffers, lambda _, result: ended.update({number: result}), places
        )

    nowhere = array("Q", ((1 << 63) + 4096, 4096))
    try:
        engine.submit([request(0, nowhere), request(1), request(2)])
        await until(lambda: len(ended) == 3)
        assert ended == {0: -errno.EFAULT, 1: 4096, 2: 4096}
    finally:
        await engine.close(5.0)
        os.close(fd)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@needs_uring
@pytest.mark.parametrize("requests", [100_000, pytest.param(1_000_000, marks=pytest.mark.long)])
async def test_requests_cost_no_memory(requests, tmp_path) -> None:
    """The package's own vectors cost 190 bytes a request: 19 MB for 100,000."""
    memory = memoryview(mmap.mmap(-1, 1 << 16))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, 1 << 16)
    loop = asyncio.get_running_loop()
    engine, batch = UringEngine(loop, depth=32), 32
    engine.open()

    async def move(count: int) -> None:
        for turn in range(count // batch):
            ended, left = loop.create_future(), [batch]

            def done(request: IORequest, result: int, ended=ended, left=left) -> None:
                assert result == request.length
                left[0] -= 1
                if not left[0]:
                    ended.set_result(None)

            kind = IOKind.WRITE if turn % 2 else IOKind.READ
            engine.submit([IORequest(kind, fd, 512 * i, [memory[512 * i : 512 * (i + 2)]], done) for i in range(batch)])
            await ended

    await move(20_000)
    before = resident_bytes()
    await move(requests)
    grown = resident_bytes() - before
    await engine.close(5.0)
    os.close(fd)
    assert grown < 1 << 20


async def test_a_lane_tells_places_that_are_its_buffers(tmp_path) -> None:
    engine = FaultyEngine()
    async with open_tier(options(tmp_path / "root"), hooks=engine.hooks()) as tier:
        await tier.store_all(keys(8))
        assert set(await tier.load(keys(8))) == {LOADED}
    told = [io for io in engine.seen if io.places]
    assert {io.kind for io in told} == {IOKind.READ, IOKind.WRITE}
    for io in told:
        assert io.places == places_of(io.buffers)
