"""Who moves blocks to a server and back in the benchmarks of remote tiers: a whole tier, and clients of Valkey without.

Each has rows of its own in memory that is not moved, and names of its own on the server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import select
import shutil
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.tier.contract import LookupResult, TierContext
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import JobKind, RowGroup, TransferJob
from kvtier.types.keys import GroupIndex, JobId, make_key
from kvtier.types.namespace import Namespace
from kvtier_cpu import CPUBackend, CPUOptions
from kvtier_cpu.backend import RowHashing
from kvtier_cpu.region.shared_region import seal_rows
from kvtier_remote import ValkeyBackend, ValkeyOptions
from kvtier_remote.backend import RemoteBackend
from kvtier_remote.reachable import address_of
from kvtier_remote.valkey.calls import FRONT_BYTES, SPLIT_BYTES
from kvtier_remote.valkey.transport import ValkeyTransport

JOB_BLOCKS = 128
PATIENT = {"request_timeout_seconds": 20.0, "job_timeout_seconds": 60.0}
IN_FLIGHT_BYTES = 64 << 20
"""A stack sends jobs of this many blocks, and so many bytes at once unless its file says otherwise."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Where the server is, and what is moved: `blocks` of `block_bytes` over so many connections."""

    server: Any
    """host:port, or what tests have for a server."""
    block_bytes: int
    blocks: int
    connections: int

    @property
    def jobs(self) -> list[range]:
        """The blocks of each job."""
        size = max(1, min(JOB_BLOCKS, IN_FLIGHT_BYTES // self.block_bytes))
        return [range(start, min(start + size, self.blocks)) for start in range(0, self.blocks, size)]

    @property
    def batches(self) -> list[range]:
        """The blocks that go together in one call, as those of the tier do."""
        size = max(1, min(ValkeyTransport.batch_blocks, ValkeyTransport.batch_bytes // self.block_bytes))
        return [range(start, min(start + size, self.blocks)) for start in range(0, self.blocks, size)]

    @property
    def jobs_at_once(self) -> int:
        """Jobs in flight."""
        return max(1, IN_FLIGHT_BYTES // (JOB_BLOCKS * self.block_bytes))


class Client(ABC):
    """One that takes part. `rows` is what it puts from and gets into, shape (blocks, block bytes)."""

    name: ClassVar[str]
    compared: ClassVar[bool] = True
    """False for one that does not move `rows`, but data of its own."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rows: npt.NDArray[np.uint8] = np.zeros((setup.blocks, setup.block_bytes), np.uint8)

    @abstractmethod
    def put(self) -> None:
        """Write all rows to the server, with their checksums where there are any."""

    @abstractmethod
    def get(self) -> None:
        """Read all rows from the server, and verify them where there are checksums."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""

    def processes(self) -> list[int]:
        """Processes that work for this client and have not ended."""
        return []


class Tier(Client):
    """A whole remote tier, below a CPU tier that takes the checksums."""

    name = "kvtier"
    in_flight_bytes: ClassVar[int] = IN_FLIGHT_BYTES

    @abstractmethod
    def make(self) -> RemoteBackend:
        """The tier; not open."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._runner = asyncio.Runner()
        self._runner.run(self._open())
        self._jobs = 0

    async def _open(self) -> None:
        setup = self.setup
        layout = KVLayout((GroupLayout((TensorRef(0, setup.block_bytes),)),))
        geometry, namespace = Geometry(layout, 4096), Namespace(layout)
        self._cpu = CPUBackend(CPUOptions(cpu_bytes_to_use=setup.blocks * geometry.row_bytes, shared="private"))
        await self._cpu.open(TierContext("cpu", geometry, namespace, time.monotonic))
        self._tier = self.make()
        await self._tier.open(TierContext("remote", geometry, namespace, time.monotonic, rows=self._cpu.rows))
        self._seals = DaemonPool("seals", 2)
        self._hashing = RowHashing(self._seals)
        self.rows = self._cpu.rows.view[: setup.blocks, : setup.block_bytes]
        self._keys = [make_key(number.to_bytes(32, "big"), 0) for number in range(setup.blocks)]

    def put(self) -> None:
        self._runner.run(self._moved(JobKind.STORE))

    def get(self) -> None:
        self._runner.run(self._moved(JobKind.LOAD))

    async def _moved(self, kind: JobKind) -> None:
        turn = iter(self.setup.jobs)
        await asyncio.gather(*(self._one_by_one(kind, turn) for _ in range(self.setup.jobs_at_once)))

    async def _one_by_one(self, kind: JobKind, turn: Iterator[range]) -> None:
        for numbers in turn:
            if kind is JobKind.STORE:
                await self._hashing.each(seal_rows, self._cpu.rows, 0, np.array(numbers, np.int64))
            self._jobs += 1
            group = RowGroup(GroupIndex(0), tuple(self._keys[number] for number in numbers), list(numbers))
            move = self._tier.store if kind is JobKind.STORE else self._tier.load
            result = await move(TransferJob(JobId(self._jobs), kind, (group,)))
            if not result.ok:
                raise AssertionError(f"blocks were not moved: {result.outcomes[0][0]}")

    def lookups(self, keys: int, count: int, loading: bool) -> list[float]:
        """Seconds of each lookup of so many keys, alone or while blocks are loaded all the time."""
        return self._runner.run(self._lookups(keys, count, loading))

    async def _lookups(self, keys: int, count: int, loading: bool) -> list[float]:
        load = asyncio.create_task(self._loading()) if loading else None
        seconds = []
        wanted = (self._keys * (keys // len(self._keys) + 1))[:keys]
        for _ in range(count):
            await asyncio.sleep(0.01)
            begun = time.perf_counter()
            found = await self._tier.lookup(wanted)
            seconds.append(time.perf_counter() - begun)
            if set(found) != {LookupResult.HIT}:
                raise AssertionError("a block is not found")
        if load is not None:
            load.cancel()
            await asyncio.wait((load,))
        return seconds

    async def _loading(self) -> None:
        while True:
            await self._moved(JobKind.LOAD)

    def close(self) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        await self._tier.close()
        await self._cpu.close()
        await self._seals.close(10.0)


class ValkeyTier(Tier):
    """The tier `valkey`."""

    def make(self) -> RemoteBackend:
        options = {"servers": [self.setup.server], "tls": False, "connections": self.setup.connections}
        return ValkeyBackend(ValkeyOptions.model_validate({"type": "valkey", **options, **PATIENT}))


class Bare(Client):
    """The tier's client library in as many threads, with the same values in the same batches, and the checksums."""

    name = "bare"

    def __init__(self, setup: Setup) -> None:
        import glide_sync

        super().__init__(setup)
        self._glide = glide_sync
        self._own = threading.local()
        self._clients: list[Any] = []
        self._pool = ThreadPoolExecutor(setup.connections, initializer=self._connect)
        self._digests = [b""] * setup.blocks

    def _connect(self) -> None:
        glide = self._glide
        config = glide.GlideClientConfiguration(
            [glide.NodeAddress(*address_of(self.setup.server))], request_timeout=20_000
        )
        self._own.client = glide.GlideClient.create(config)
        self._clients.append(self._own.client)

    def _parts(self, number: int) -> list[tuple[str, memoryview]]:
        row = self.rows[number].data
        if len(row) < SPLIT_BYTES:
            return [(f"bare:{number}", row)]
        return [(f"{{bare:{number}}}h", row[:FRONT_BYTES]), (f"{{bare:{number}}}b", row[FRONT_BYTES:])]

    def put(self) -> None:
        list(self._pool.map(self._put, self.setup.batches))

    def _put(self, numbers: Sequence[int]) -> None:
        batch = self._glide.Batch(is_atomic=False)
        for number in numbers:
            self._digests[number] = xxhash.xxh3_128_digest(self.rows[number].data)
            for name, part in self._parts(number):
                batch.set(name, part)
        self._own.client.exec(batch, raise_on_error=True)

    def get(self) -> None:
        list(self._pool.map(self._get, self.setup.batches))

    def _get(self, numbers: Sequence[int]) -> None:
        parts = [part for number in numbers for part in self._parts(number)]
        self._own.client.mget([name for name, _ in parts], buffers=[part for _, part in parts])
        for number in numbers:
            if xxhash.xxh3_128_digest(self.rows[number].data) != self._digests[number]:
                raise AssertionError("a block is wrong")

    def close(self) -> None:
        self._pool.shutdown()
        for client in self._clients:
            client.close()


class LMCache(Client):
    """LMCache's C++ client: its threads, as many blocks a call, no checksums. `library` is its extension module."""

    name = "lmcache"
    library: ClassVar[Path]

    def __init__(self, setup: Setup) -> None:
        import torch  # noqa: F401  # the extension needs its libraries

        super().__init__(setup)
        spec = importlib.util.spec_from_file_location("lmcache_redis", self.library)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._client = module.LMCacheRedisClient(*address_of(setup.server), setup.connections)
        self._ready = select.poll()
        self._ready.register(self._client.event_fd(), select.POLLIN)

    def put(self) -> None:
        self._moved(self._client.submit_batch_set)

    def get(self) -> None:
        self._moved(self._client.submit_batch_get)

    def _moved(self, submit: Any) -> None:
        batches = iter(self.setup.batches)
        under_way: dict[int, object] = {}
        while True:
            while len(under_way) < 2 * self.setup.connections and (numbers := next(batches, None)) is not None:
                rows = [self.rows[number].data for number in numbers]
                under_way[submit([f"lmcache:{number}" for number in numbers], rows)] = rows
            if not under_way:
                return
            self._ready.poll()
            for future, ok, error, _ in self._client.drain_completions():
                if not ok:
                    raise AssertionError(f"blocks were not moved: {error}")
                del under_way[future]

    def close(self) -> None:
        self._client.close()


class RedisBenchmark(Client):
    """`redis-benchmark`, a process of its own in C: one value that it has made, one request a call."""

    name = "redis-benchmark"
    compared = False

    @staticmethod
    def program() -> str | None:
        """Where it is, if it is installed."""
        return shutil.which("redis-benchmark")

    def _run(self, what: str) -> None:
        host, port = address_of(self.setup.server)
        program, setup = self.program(), self.setup
        assert program is not None
        where = ["-h", host, "-p", str(port), "-c", str(2 * setup.connections)]
        command = [program, *where, "-t", what, "-d", str(setup.block_bytes), "-n", str(setup.blocks), "-q"]
        subprocess.run(command, check=True, capture_output=True, timeout=600)

    def put(self) -> None:
        self._run("set")

    def get(self) -> None:
        self._run("get")

    def close(self) -> None:
        """Nothing is open."""
