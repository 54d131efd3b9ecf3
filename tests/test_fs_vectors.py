"""Vectors are pointed at buffers and let go of them: no request may keep a row mapped or cost memory for ever."""

from __future__ import annotations

import asyncio
import mmap
import os
import sys

import pytest

from kvtier.errors import ResourceError
from kvtier_fs.io.contract import IOKind, IORequest
from kvtier_fs.io.uring import UringEngine, probe_uring
from kvtier_fs.io.vectors import Vector

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
