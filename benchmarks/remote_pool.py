"""Blocks to a Mooncake pool and back over TCP: the whole tier beside Mooncake's own client.

    python -m benchmarks.remote_pool [--sizes 256KiB,1MiB] [--json FILE] [--quick]

The master and one store process run on the same machine, as the tests start them. The tier's clients are processes of
their own, whose CPU seconds count; Mooncake's client is in this process, on one thread with registered rows and as many
blocks a call as the tier makes, and takes and compares no checksums. What arrives is compared each time.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.options import JSON_FILE, QUICK
from benchmarks.remote_clients import PATIENT, Client, Setup, Tier
from benchmarks.remote_objects import SUPPORT
from benchmarks.remote_passes import finish, measure
from benchmarks.report import Report, versions
from kvtier.options import parse_size
from kvtier_remote.backend import RemoteBackend
from kvtier_remote.mooncake.options import BATCH_BLOCKS
from kvtier_remote.mooncake.tier import MooncakeBackend

SIZES = "64KiB,256KiB,1MiB,4MiB"
CALL_BYTES = 32 << 20


class PoolTier(Tier):
    """The tier `mooncake`."""

    def make(self) -> RemoteBackend:
        return MooncakeBackend(self.setup.server.options(staging="64MiB", **PATIENT))

    def processes(self) -> list[int]:
        """The clients: children that run its script."""
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        threads = (Path(f"/proc/self/task/{thread}/children") for thread in os.listdir("/proc/self/task"))
        found = {*children, *(pid for file in threads for pid in file.read_text().split())}
        return [int(pid) for pid in found if b"client_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class BarePool(Client):
    """Mooncake's client library."""

    name = "bare"

    def __init__(self, setup: Setup) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        super().__init__(setup)
        self._store: Any = MooncakeDistributedStore()
        where = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp"}
        sizes = {"global_segment_size": "0", "local_buffer_size": "0", "rdma_devices": ""}
        if self._store.setup(where | sizes | {"master_server_addr": setup.server.address}):
            raise AssertionError("the library does not connect")
        self._store.register_buffer(self.rows.ctypes.data, self.rows.nbytes)
        self._config = ReplicateConfig()

    def _calls(self) -> list[tuple[list[str], list[int], list[int]]]:
        size = self.setup.block_bytes
        at_once = max(1, min(BATCH_BLOCKS, CALL_BYTES // size))
        numbers = range(self.setup.blocks)
        return [
            (
                [f"bare:{number}" for number in some],
                [self.rows.ctypes.data + number * size for number in some],
                [size] * len(some),
            )
            for some in (numbers[at : at + at_once] for at in range(0, len(numbers), at_once))
        ]

    def put(self) -> None:
        for names, pointers, sizes in self._calls():
            if any(self._store.batch_upsert_from(names, pointers, sizes, self._config)):
                raise AssertionError("blocks were not stored")

    def get(self) -> None:
        for names, pointers, sizes in self._calls():
            if self._store.batch_get_into(names, pointers, sizes) != sizes:
                raise AssertionError("blocks were not loaded")

    def close(self) -> None:
        self._store.unregister_buffer(self.rows.ctypes.data)
        self._store.close()


@click.command()
@click.option("--sizes", default=SIZES, show_default=True, help="Block sizes.")
@click.option("--bytes", "total", default="128MiB", show_default=True, help="Payload of a pass.")
@click.option("--repetitions", default=7, show_default=True)
@QUICK
@JSON_FILE
def main(sizes: str, total: str, repetitions: int, quick: bool, json_file: Path | None) -> None:
    """Measure the tier mooncake."""
    wanted, nbytes = [parse_size(size) for size in sizes.split(",")], parse_size(total)
    if quick:
        wanted, nbytes, repetitions = [256 << 10], 4 << 20, 2
    kinds: list[type[Client]] = [PoolTier, BarePool]
    distributions = ("kvtier", "mooncake-transfer-engine-non-cuda", "xxhash")
    report = Report("remote_pool", {"bytes": nbytes, "repetitions": repetitions}, versions=versions(distributions))
    report.head()
    sys.path.insert(0, str(SUPPORT))
    from support_mooncake import mooncake_pool  # the pool as the tests start it

    for size in wanted:
        with tempfile.TemporaryDirectory() as folder, mooncake_pool(Path(folder), 4 * nbytes + (256 << 20)) as pool:
            setup = Setup(pool, size, max(1, nbytes // size), 2)
            report.results += measure(setup, kinds, repetitions)
        report.write(json_file)
    finish(report, json_file)


if __name__ == "__main__":
    main()
