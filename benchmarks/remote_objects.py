"""Blocks to an S3 service and back: the whole tier, the bare client library, and LMCache's client of S3 (awscrt).

    python -m benchmarks.remote_objects [--lmcache FOLDER] [--sizes 1MiB,4MiB] [--json FILE] [--quick]

The service is the gateway of a Ceph cluster in memory on the same machine, as the tests start it; it is slow, so that
only CPU seconds say something. Those are of all threads of this process, where all do the same in turns. The bare
client is the tier's library with as many requests at once, puts from the rows and copies what it gets into them, and
takes and compares checksums as the tier does. LMCache's has none; `--lmcache` names a folder with its package, and it
is absent unless that, awscrt and what they import are installed. What arrives is compared each time.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import select
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import click
import numpy as np
import xxhash

from benchmarks.options import JSON_FILE, QUICK
from benchmarks.remote_clients import PATIENT, Client, Setup, Tier
from benchmarks.remote_passes import finish, measure
from benchmarks.report import ABSENT, Report, versions
from kvtier.options import parse_size
from kvtier_remote.backend import RemoteBackend

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
SIZES = "256KiB,1MiB,4MiB"
REQUESTS = 16
"""At once, of all clients: a gateway on two cores is busy with far fewer."""


class ObjectTier(Tier):
    """The tier `s3`."""

    def make(self) -> RemoteBackend:
        tier: RemoteBackend = self.setup.server.tier(requests=self.setup.connections, **PATIENT)
        return tier


class BareObjects(Client):
    """The tier's client library, on one event loop as there."""

    name = "bare"

    def __init__(self, setup: Setup) -> None:
        import obstore

        super().__init__(setup)
        self._library = obstore
        self._store = setup.server.faster_store
        self._runner = asyncio.Runner()
        self._digests = [b""] * setup.blocks

    def _all(self, call: Callable[[int], Awaitable[None]]) -> None:
        async def work() -> None:
            limit = asyncio.Semaphore(self.setup.connections)

            async def one(number: int) -> None:
                async with limit:
                    await call(number)

            await asyncio.gather(*map(one, range(self.setup.blocks)))

        self._runner.run(work())

    def put(self) -> None:
        self._all(self._put)

    async def _put(self, number: int) -> None:
        row = self.rows[number].data
        self._digests[number] = xxhash.xxh3_128_digest(row)
        await self._library.put_async(self._store, f"bare/{number}", row, use_multipart=False)

    def get(self) -> None:
        self._all(self._get)

    async def _get(self, number: int) -> None:
        size = self.setup.block_bytes
        read = await self._library.get_range_async(self._store, f"bare/{number}", start=0, end=size + 1)
        self.rows[number] = np.frombuffer(read, np.uint8)
        if xxhash.xxh3_128_digest(self.rows[number].data) != self._digests[number]:
            raise AssertionError("a block is wrong")

    def close(self) -> None:
        self._runner.close()


class Memory:
    """A row as LMCache's memory objects are."""

    def __init__(self, row: Any) -> None:
        self.byte_array = row.data
        self.data_ptr = ctypes.addressof(ctypes.c_char.from_buffer(row.data))

    def get_size(self) -> int:
        return len(self.byte_array)

    get_physical_size = get_size


class LMCacheObjects(Client):
    """LMCache's adapter for S3, which needs names of buckets in front of its hosts: here the bucket begins its keys."""

    name = "lmcache"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        adapter = importlib.import_module("lmcache.v1.distributed.l2_adapters.s3_l2_adapter")
        keys = importlib.import_module("lmcache.v1.distributed.api")
        ceph = setup.server.ceph
        login = {name: (ceph.folder / file).read_text() for name, file in (("key", "key-id"), ("secret", "secret"))}
        config = adapter.S3L2AdapterConfig(
            ceph.endpoint.partition("//")[2],
            "us-east-1",
            s3_num_io_threads=4,
            s3_prefer_http2=False,
            disable_tls=True,
            aws_access_key_id=login["key"],
            aws_secret_access_key=login["secret"],
        )
        self._adapter = adapter.S3L2Adapter(config)
        model = f"{setup.server.name}/lmcache"
        self._keys = [keys.ObjectKey(number.to_bytes(32, "big"), model, 0) for number in range(setup.blocks)]
        self._memory = [Memory(row) for row in self.rows]

    def _moved(self, submit: Any, event: int, result: Callable[[int], Any]) -> None:
        ready = select.poll()
        ready.register(event, select.POLLIN)
        for numbers in self.setup.jobs:
            task = submit([self._keys[i] for i in numbers], [self._memory[i] for i in numbers])
            while (done := result(task)) is None:
                ready.poll(100)
            if not done:
                raise AssertionError("blocks were not moved")

    def put(self) -> None:
        done: dict[int, Any] = {}

        def result(task: int) -> bool | None:
            done.update(self._adapter.pop_completed_store_tasks())
            return None if task not in done else bool(done[task].is_successful())

        self._moved(self._adapter.submit_store_task, self._adapter.get_store_event_fd(), result)

    def get(self) -> None:
        def result(task: int) -> bool | None:
            found = self._adapter.query_load_result(task)
            return None if found is None else found.popcount() > 0

        self._moved(self._adapter.submit_load_task, self._adapter.get_load_event_fd(), result)

    def close(self) -> None:
        self._adapter.close()


def lmcache_with(folder: Path) -> str:
    """Why LMCache cannot take part, with its package in this folder; empty if it can."""
    sys.path.insert(0, str(folder))
    try:
        importlib.import_module("torch")
        importlib.import_module("lmcache.v1.distributed.l2_adapters.s3_l2_adapter")
    except ImportError as error:
        return f"{ABSENT} ({error})"
    return ""


@click.command()
@click.option("--sizes", default=SIZES, show_default=True, help="Block sizes.")
@click.option("--bytes", "total", default="128MiB", show_default=True, help="Payload of a pass.")
@click.option("--repetitions", default=7, show_default=True)
@click.option("--lmcache", type=click.Path(exists=True, path_type=Path), help="Folder with LMCache's package.")
@QUICK
@JSON_FILE
def main(sizes: str, total: str, repetitions: int, lmcache: Path | None, quick: bool, json_file: Path | None) -> None:
    """Measure the tier s3."""
    wanted, nbytes = [parse_size(size) for size in sizes.split(",")], parse_size(total)
    if quick:
        wanted, nbytes, repetitions = [256 << 10], 4 << 20, 2
    kinds: list[type[Client]] = [ObjectTier, BareObjects]
    settings = {"bytes": nbytes, "requests": REQUESTS, "repetitions": repetitions}
    report = Report("remote_objects", settings, versions=versions(("kvtier", "obstore", "awscrt", "xxhash")))
    without = ABSENT if lmcache is None else lmcache_with(lmcache)
    if without:
        report.notes.append(f"lmcache: {without}")
    else:
        kinds.append(LMCacheObjects)
    report.head()
    sys.path.insert(0, str(SUPPORT))
    from support_ceph import Bucket, ceph_cluster  # the service as the tests start it

    class MeasuredBucket(Bucket):
        """A bucket, and a store in it that signs no payload, as the tier's."""

        faster_store: ClassVar[Any] = property(lambda self: self._store(unsigned_payload=True))

    with ceph_cluster() as ceph:
        for size in wanted:
            setup = Setup(MeasuredBucket(ceph), size, max(1, nbytes // size), REQUESTS)
            report.results += measure(setup, kinds, repetitions)
            report.write(json_file)
    finish(report, json_file)


if __name__ == "__main__":
    main()
