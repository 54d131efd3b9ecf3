"""The two I/O engines and their threads: every request ends, nothing leaks, and a forked child stays away from them."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import mmap
import os
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from support_fs import keys, open_tier, options
from support_shutdown import IO_ENGINES, run_in_child
from support_stack import until

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.errors import ResourceError, RootError, UsageError
from kvtier.testing.trace import leaving_no_trace
from kvtier.types.jobs import LOADED
from kvtier_fs.io import uring
from kvtier_fs.io.contract import IOEngine, IOKind, IORequest
from kvtier_fs.io.threads import ThreadsEngine
from kvtier_fs.io.uring import UringEngine, probe_uring

needs_uring = pytest.mark.skipif(bool(probe_uring()), reason="no io_uring here")


@contextmanager
def engine_of(name: str) -> Iterator[tuple[IOEngine, DaemonPool]]:
    """An engine on the running loop, and the threads it may use."""
    loop, threads = asyncio.get_running_loop(), DaemonPool("test", 2)
    engine = UringEngine(loop, 8) if name == "io_uring" else ThreadsEngine(loop, threads, 2)
    engine.open()
    yield engine, threads


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe: a read of it is under way for as long as nobody writes."""
    read, write = os.pipe()
    try:
        yield read, write
    finally:
        os.close(read)
        os.close(write)


def page() -> memoryview:
    return memoryview(mmap.mmap(-1, 4096))


@pytest.mark.parametrize("name", IO_ENGINES)
async def test_a_receiver_that_raises_costs_the_others_nothing(tmp_path, name):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    told: list[int] = []
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(str(context["exception"])))

    def receiver(number: int) -> Callable[[IORequest, int], None]:
        def done(request: IORequest, result: int) -> None:
            told.append(number)
            if number % 3 == 0:
                raise ValueError(f"receiver {number}")

        return done

    with engine_of(name) as (engine, threads):
        engine.submit([IORequest(IOKind.WRITE, fd, 4096 * i, [page()], receiver(i)) for i in range(20)])
        await until(lambda: len(told) == 20)
        assert await engine.close(5.0) == 0
        assert await threads.close(5.0) == 0
    assert sorted(told) == list(range(20))
    assert sorted(complaints) == sorted(f"receiver {i}" for i in range(0, 20, 3))
    os.close(fd)


@pytest.mark.parametrize("name", IO_ENGINES)
async def test_a_request_that_cannot_be_made_ends_with_an_errno(tmp_path, name):
    results: list[int] = []
    with engine_of(name) as (engine, threads):
        gone = os.open(tmp_path, os.O_RDONLY)
        os.close(gone)
        engine.submit([IORequest(IOKind.READ, gone, 0, [page()], lambda request, result: results.append(result))])
        await until(lambda: bool(results))
        if name == "threads":
            engine.submit([IORequest(IOKind.READ, 0, 1 << 70, [page()], lambda _, result: results.append(result))])
            await until(lambda: len(results) == 2)
        assert await engine.close(5.0) == 0
        assert await threads.close(5.0) == 0
    assert results == [-errno.EBADF, -errno.EIO][: len(results)]


@needs_uring
async def test_a_forked_child_neither_submits_nor_reaps_on_its_parents_ring():
    with engine_of("io_uring") as (engine, _), pipe() as (read, write):
        assert isinstance(engine, UringEngine)
        buffer, results = page(), []
        engine.submit([IORequest(IOKind.READ, read, 0, [buffer], lambda request, result: results.append(result))])
        await until(lambda: len(engine._kernel) == 1)
        os.write(write, b"for the parent")

        def child() -> None:
            with pytest.raises(UsageError, match=f"belongs to process {os.getppid()}"):
                engine.submit([IORequest(IOKind.READ, read, 0, [page()], lambda request, result: None)])
            for callback in (engine._on_event, engine._pump, engine._call_reap):
                with pytest.raises(UsageError, match="forked"):
                    callback()
            with pytest.raises(UsageError, match="forked"):
                engine.close(1.0).send(None)

        assert run_in_child(child) == 0
        await until(lambda: bool(results))
        assert bytes(buffer[: results[0]]) == b"for the parent"
        assert await engine.close(5.0) == 0


async def test_a_forked_child_has_none_of_the_threads():
    threads = DaemonPool("test", 2)
    assert await asyncio.wrap_future(threads.submit(os.getpid)) == os.getpid()

    def child() -> None:
        with pytest.raises(UsageError, match="forked"):
            threads.submit(os.getpid)

    assert run_in_child(child) == 0
    assert await threads.close(5.0) == 0


async def test_a_call_that_is_cancelled_while_it_waits_for_a_thread_keeps_nothing_it_names():
    threads, go_on = DaemonPool("test", 1), threading.Event()
    working = threads.submit(go_on.wait)
    names = {1, 2, 3}
    waiting, kept = threads.submit(len, names), weakref.ref(names)
    try:
        del names
        assert kept() is not None
        waiting.cancel()
        assert kept() is None
    finally:
        go_on.set()
    assert await asyncio.wrap_future(working)
    assert await threads.close(20.0) == 0


@needs_uring
def test_what_the_kernel_yet_writes_goes_to_memory_that_is_nobody_elses():
    """The loop is closed and everything forgotten while a read is under way; its buffer must not be anything else."""
    loop = asyncio.new_event_loop()
    engine = UringEngine(loop, 4)
    engine.open()
    memory = mmap.mmap(-1, 4096)
    with pipe() as (read, write):
        engine.submit([IORequest(IOKind.READ, read, 0, [memoryview(memory)], lambda request, result: None)])
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
        memory_now, engine_now, ring = weakref.ref(memory), weakref.ref(engine), engine._ring
        del memory, engine
        gc.collect()
        kept = memory_now()
        assert kept is not None, "the kernel would write into memory that was given away"
        os.write(write, b"late")
        while kept[:4] != b"late":
            pass
        engine_now()._take(1)
        ring.close()
        del kept, ring
        gc.collect()
    assert memory_now() is None, "and it goes once the read has ended"
    assert engine_now() is None


@needs_uring
def test_a_process_with_thousands_of_files_has_io_uring_too(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    made = os.eventfd

    def high(*args: int) -> int:
        low = made(*args)
        try:
            return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 2000)
        finally:
            os.close(low)

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        monkeypatch.setattr("kvtier_fs.io.uring.os.eventfd", high)
        with leaving_no_trace():
            assert probe_uring() == ""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@needs_uring
@pytest.mark.parametrize("call", ["eventfd", "memfd_create"])
async def test_without_a_descriptor_left_io_uring_is_not_there_and_nothing_stays_open(monkeypatch, call):
    def none_left(*args: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(f"kvtier_fs.io.uring.os.{call}", none_left)
    with leaving_no_trace():
        assert "Too many open files" in probe_uring()
        if call == "eventfd":
            with pytest.raises(ResourceError, match="eventfd"):
                UringEngine(asyncio.get_running_loop(), 4).open()


class NoThreads:
    """The system grants a process so many threads more, and not one beyond them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
        self.left = more
        self.refused = 0
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if self.left <= 0:
                self.refused += 1
                raise RuntimeError("can't start new thread")
            self.left -= 1
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.mark.parametrize("threads", [0, 1])
async def test_a_root_that_gets_too_few_threads_does_not_open_and_says_so(tmp_path, monkeypatch, threads):
    with leaving_no_trace():
        NoThreads(monkeypatch, threads)
        with pytest.raises(RootError, match="no thread"):
            async with open_tier(options(tmp_path / "root")):
                pass


async def test_fewer_threads_than_wished_do_the_same_work(tmp_path, monkeypatch):
    names = keys(20)
    with leaving_no_trace():
        limit = NoThreads(monkeypatch, 5)  # two for files, two for checks, one of eight for I/O
        async with open_tier(options(tmp_path / "root", io_engine="threads", io_threads=8)) as tier:
            await tier.store_all(names)
            async with asyncio.timeout(60):
                loaded = await tier.load(names)
                while not limit.refused:  # one more is asked for where a request comes before another has ended
                    loaded += await tier.load(names[::2])  # no two of them neighbours, which go in one request
            assert set(loaded) == {LOADED}


async def test_requests_end_when_an_engine_gets_no_thread_and_go_on_when_it_does(tmp_path, monkeypatch):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    results: list[int] = []

    def requests() -> list[IORequest]:
        return [IORequest(IOKind.WRITE, fd, 0, [page()], lambda _, result: results.append(result)) for _ in range(3)]

    with engine_of("threads") as (engine, threads):
        limit = NoThreads(monkeypatch, 0)
        engine.submit(requests())
        await until(lambda: len(results) == 3)
        limit.left = 1
        engine.submit(requests())
        await until(lambda: len(results) == 6)
        assert await engine.close(5.0) == 0
        assert await threads.close(5.0) == 0
    assert results == [-errno.EAGAIN] * 3 + [4096] * 3
    os.close(fd)


@pytest.mark.parametrize("dies", [True, False])
def test_a_package_that_would_kill_this_process_is_found_in_a_child(monkeypatch, dies):
    """The liburing wheels hold AVX-512 instructions; without them in the processor the first ring is a SIGILL."""
    monkeypatch.setattr(uring, "_TRIAL", f"import os; {'os.kill(os.getpid(), 4)' if dies else ''}")
    monkeypatch.setattr(uring, "_has_avx512", lambda: False)
    uring._unsafe_package.cache_clear()
    try:
        assert bool(uring._unsafe_package()) == dies
        if dies:
            assert probe_uring() == "the liburing package does not run on this processor"
    finally:
        uring._unsafe_package.cache_clear()
