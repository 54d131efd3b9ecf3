"""Vectors are pointed at buffers and let go of them: no request may keep a row mapped or cost memory for ever."""

from __future__ import annotations

import asyncio
import importlib
import mmap
import os
import sys
from array import array

import pytest
from support_fs import keys, open_tier, options
from support_fs_engine import FaultyEngine

from kvtier.errors import ResourceError
from kvtier.types.jobs import LOADED
from kvtier_fs.io.contract import IOKind, IORequest
from kvtier_fs.io.header_pages import HeaderPages
from kvtier_fs.io.iovec import Vector, _address
from kvtier_fs.io.uring import UringEngine, probe_uring

needs_uring = pytest.mark.skipif(bool(probe_uring()), reason=f"no io_uring: {probe_uring()}")


class _Strange:
    """An object that is not laid out like the package's vectors."""

    def __init__(self, buffers: list[memoryview]) -> None:
        self.buffers = buffers


def test_an_unknown_layout_is_refused_before_anything_is_written_to_it() -> None:
    with pytest.raises(ResourceError, match="unknown way"):
        Vector(_Strange)


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


@needs_uring
def test_known_places_point_a_vector_as_the_buffers_themselves_do() -> None:
    iovec = importlib.import_module("liburing").Iovec
    pages = HeaderPages(6, 4096)
    for chosen in ([0], [5, 1], [2, 0, 4, 1]):
        looked, told = Vector(iovec), Vector(iovec)
        buffers = [pages.pages[i][: 4096 - 512 * i] for i in chosen]
        places = [word for i, buffer in zip(chosen, buffers, strict=True) for word in (pages.addresses[i], len(buffer))]
        looked.point(buffers)
        told.point(buffers, array("Q", places))
        assert told._object.length == looked._object.length == len(chosen)
        assert told._words[: 2 * len(chosen)].tolist() == looked._words[: 2 * len(chosen)].tolist() == places


async def test_a_lane_tells_places_that_are_its_buffers(tmp_path) -> None:
    engine = FaultyEngine()
    async with open_tier(options(tmp_path / "root"), hooks=engine.hooks()) as tier:
        await tier.store_all(keys(8))
        assert set(await tier.load(keys(8))) == {LOADED}
    told = [io for io in engine.seen if io.places]
    assert {io.kind for io in told} == {IOKind.READ, IOKind.WRITE}
    for io in told:
        assert list(io.places) == [word for buffer in io.buffers for word in (_address(buffer), len(buffer))]
