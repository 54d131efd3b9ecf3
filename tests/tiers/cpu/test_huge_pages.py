"""Huge pages for rows in shared memory, made while the rows are used."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from support_region import geometry
from support_service import until

from kvtier.errors import SharedMemoryError
from kvtier.tier.contract import TierContext
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.namespace import Namespace
from kvtier_cpu import CPUBackend, CPUOptions
from kvtier_cpu.region import huge_pages
from kvtier_cpu.region.huge_pages import HUGE_BYTES, LOWEST_PRIORITY, HugePages, huge_bytes, map_aligned

COUNT = 8
SIZE = COUNT * HUGE_BYTES + 3 * 4096
NEWEST_WITHOUT = (6, 0)


def kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int(minor)


collapses = pytest.mark.skipif(kernel() <= NEWEST_WITHOUT, reason="this kernel has no MADV_COLLAPSE")


@pytest.fixture
def fd() -> Iterator[int]:
    found = os.memfd_create("kvtier-test")
    os.ftruncate(found, SIZE)
    yield found
    os.close(found)


def words(pages: Any) -> np.ndarray:
    return np.frombuffer(pages, np.uint8)[: SIZE // 8 * 8].view(np.uint64)


def filled(fd: int) -> Any:
    """A mapping whose words are their numbers."""
    pages = map_aligned(fd, SIZE)
    words(pages)[:] = np.arange(SIZE // 8)
    return pages


def mapped(pages: Any) -> bool:
    address = np.frombuffer(pages, np.uint8).ctypes.data
    return f"\n{address:x}-" in Path("/proc/self/maps").read_text()


def test_a_mapping_is_aligned_and_goes_with_its_last_view(fd: int) -> None:
    pages = filled(fd)
    address = np.frombuffer(pages, np.uint8).ctypes.data
    assert address % HUGE_BYTES == 0
    assert len(pages) == SIZE
    view = words(pages)[5:]
    del pages
    gc.collect()
    assert f"\n{address:x}-" in Path("/proc/self/maps").read_text()
    assert view[0] == 5
    before = Path("/proc/self/maps").read_text().count("memfd:kvtier-test")
    del view
    gc.collect()
    assert Path("/proc/self/maps").read_text().count("memfd:kvtier-test") == before - 1


def test_a_file_that_cannot_be_mapped_leaves_nothing_behind(fd: int) -> None:
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(20):
        with pytest.raises(OSError, match="Bad file descriptor"):
            map_aligned(-2, SIZE)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 2


@collapses
def test_all_pages_become_huge_with_the_same_bytes_for_every_mapping(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pages, other = filled(fd), map_aligned(fd, SIZE)
    made = HugePages(pages, "rows")
    made.open()
    assert made.wait(60)
    assert made.share == 1.0
    assert huge_bytes(pages) == COUNT * HUGE_BYTES
    assert (words(other) == np.arange(SIZE // 8)).all()
    assert huge_bytes(other) == COUNT * HUGE_BYTES
    assert "event=huge_pages tier=rows share=1.000" in caplog.text
    again = HugePages(pages, "rows")  # nothing is left to be done
    again.open()
    assert again.wait(60)
    assert again.share == 1.0
    made.close()
    again.close()


@collapses
def test_rows_are_read_and_written_meanwhile(fd: int, seed: int) -> None:
    pages, ended, wrong = filled(fd), threading.Event(), list[int]()
    random = np.random.default_rng(seed)

    def use() -> None:
        """Each word holds its number or a number that was written since, which this thread alone does."""
        expected = np.arange(SIZE // 8, dtype=np.uint64)
        while not ended.is_set():
            at = int(random.integers(0, SIZE // 8 - 512))
            if not (words(pages)[at : at + 512] == expected[at : at + 512]).all():
                wrong.append(at)
            expected[at : at + 512] = random.integers(0, 1 << 60, 512)
            words(pages)[at : at + 512] = expected[at : at + 512]

    thread = threading.Thread(target=use)
    thread.start()
    made = HugePages(pages, "rows")
    try:
        made.open()
        assert made.wait(60)
    finally:
        ended.set()
        thread.join()
    assert wrong == []
    assert made.share == 1.0
    made.close()


@collapses
def test_a_pinned_page_is_tried_again(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that lie in a pipe cannot be moved, as those of I/O in flight."""
    monkeypatch.setattr(huge_pages, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(huge_pages, "LAST_PAUSE_SECONDS", 0.05)
    pages = filled(fd)
    address = np.frombuffer(pages, np.uint8).ctypes.data
    readable, writable = os.pipe()

    class Part(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    part = Part(address + 3 * HUGE_BYTES, 4096)
    assert ctypes.CDLL(None).vmsplice(writable, ctypes.byref(part), ctypes.c_size_t(1), 0) == 4096
    made = HugePages(pages, "rows")
    made.open()
    until(lambda: made.share == (COUNT - 1) / COUNT, "all but the pinned one")
    assert not made.wait(0.2)
    os.close(readable)
    os.close(writable)
    assert made.wait(60)
    assert made.share == 1.0
    made.close()


def test_a_kernel_that_refuses_is_one_warning(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    """It refuses pages that are not there, as an older one refuses all."""
    made = HugePages(map_aligned(fd, SIZE), "rows")
    made.open()
    assert made.wait(60)
    assert made.share == 0.0
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("rows: rows have pages of 4 KiB (Invalid argument)")
    made.close()


@collapses
def test_it_ends_when_it_is_closed_and_has_the_lowest_priority(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "FIRST_PAUSE_SECONDS", 3600.0)
    made, priorities = HugePages(filled(fd), "rows"), list[int]()

    def refuse() -> int:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return 11

    monkeypatch.setattr(made, "_make_round", refuse)
    made.open()
    until(lambda: priorities == [LOWEST_PRIORITY])
    made.close()
    made.close()
    assert made.wait(0)


def test_a_system_without_a_thread_to_give_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    made = HugePages(bytearray(2 * HUGE_BYTES), "rows")
    monkeypatch.setattr(made._thread, "start", refuse)
    made.open()
    made.close()
    assert made.wait(0)
    assert [record.getMessage() for record in caplog.records] == [
        "rows: no huge pages are made: can't start new thread"
    ]


@collapses
@pytest.mark.parametrize(
    ("options", "huge"), [({}, True), ({"huge_pages": False}, False), ({"populate": False}, False)]
)
async def test_the_tier_makes_them_for_rows_in_a_memfd(options: dict[str, Any], huge: bool) -> None:
    backend = CPUBackend(CPUOptions(type="cpu", cpu_bytes_to_use=4 * HUGE_BYTES, shared="memfd", **options))
    plain = geometry()
    context = TierContext("cpu", plain, Namespace(plain.layout), lambda: 0.0)
    await backend.open(context)
    try:
        if huge:
            until(lambda: backend.huge_share == 1.0, "all are huge")
            worker = CPUBackend.attach(replace(context, worker=0), backend.rows.num_rows, *backend.rows.descriptors)
            worker.view[:] = 7
            assert (backend.rows.view == 7).all()
            worker.close()
        else:
            assert backend.huge_share == 0.0
    finally:
        await backend.close()


@pytest.fixture
def set_aside() -> Iterator[Callable[[int], None]]:
    """Has the host set so many huge pages of 2 MiB aside that nobody uses; afterwards as many as before. They are the
    host's, so one test at a time has them."""
    path, pool = Path("/proc/sys/vm/nr_hugepages"), Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    if not os.access(path, os.W_OK) or not pool.exists():
        pytest.skip("only root may have huge pages set aside")

    def change(count: int) -> None:
        used = int((pool / "nr_hugepages").read_text()) - int((pool / "free_hugepages").read_text())
        path.write_text(str(used + count))
        if int((pool / "free_hugepages").read_text()) != count:
            pytest.skip("this host has no memory left for huge pages")

    with path.open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        before = turn.read()
        yield change
        path.write_text(before)


def reserving(count: int, **options: Any) -> tuple[CPUBackend, TierContext]:
    """A tier of nearly so many huge pages, and its context: the rows end within the last page."""
    plain = Geometry(KVLayout((GroupLayout((TensorRef(0, 5 * 4096),)),)), 4096)
    backend = CPUBackend(CPUOptions(cpu_bytes_to_use=count * HUGE_BYTES, reserved_huge_pages=True, **options))
    return backend, TierContext("cpu", plain, Namespace(plain.layout), lambda: 0.0)


async def test_rows_may_be_in_huge_pages_that_the_host_has_set_aside(set_aside: Callable[[int], None]) -> None:
    set_aside(3)
    backend, context = reserving(3)
    await backend.open(context)
    rows_fd, control_fd = backend.rows.descriptors
    assert os.fstat(rows_fd).st_size == 3 * HUGE_BYTES > backend.rows.spec.size_bytes
    until(lambda: backend.huge_share == 1.0, "all are huge")
    worker = CPUBackend.attach(replace(context, worker=0), backend.rows.num_rows, rows_fd, control_fd)
    worker.view[:] = 7
    assert huge_bytes(worker.maps[0]) == 3 * HUGE_BYTES
    assert (backend.rows.view == 7).all()
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(rows_fd, 2 * HUGE_BYTES)
    worker.close()
    await backend.close()
    gc.collect()
    again, context = reserving(3)  # all was given back
    await again.open(context)
    await again.close()


async def test_too_few_huge_pages_set_aside_are_an_error_that_names_them(set_aside: Callable[[int], None]) -> None:
    set_aside(2)
    backend, context = reserving(3)
    with pytest.raises(SharedMemoryError, match=r"vm\.nr_hugepages") as raised:
        await backend.open(context)
    assert (raised.value.need_bytes, raised.value.have_bytes) == (3 * HUGE_BYTES, 2 * HUGE_BYTES)
    backend, context = reserving(2)  # nothing was left behind
    await backend.open(context)
    await backend.close()


def test_huge_pages_set_aside_are_whole_and_for_a_memfd_alone() -> None:
    with pytest.raises(ValidationError, match="a multiple of 2 MiB"):
        CPUOptions(cpu_bytes_to_use=HUGE_BYTES + 4096, reserved_huge_pages=True)
    with pytest.raises(ValidationError, match="leave shared out"):
        CPUOptions(cpu_bytes_to_use=HUGE_BYTES, reserved_huge_pages=True, shared="private")


def test_small_rows_have_no_place_for_one(fd: int) -> None:
    made = HugePages(map_aligned(fd, HUGE_BYTES - 4096), "rows")
    assert made.share == 1.0
    made.open()
    made.close()
