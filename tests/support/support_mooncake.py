"""A real Mooncake master and store for tests, from the wheel of the client library, over TCP on this machine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from support_remote_blocks import TWO_SIZES
from support_servers import frozen, needs_server

from kvtier.testing.conformance.base import ConformanceBase
from kvtier_remote.mooncake.client_process import ClientProcess
from kvtier_remote.mooncake.marker_object import MEMORY_BYTES
from kvtier_remote.mooncake.master_http import MasterHTTP
from kvtier_remote.mooncake.options import MooncakeOptions
from kvtier_remote.mooncake.tier import MooncakeBackend
from kvtier_remote.valkey.embedded import free_ports

START_SECONDS = 60.0
LOOKING_BYTES = 4 << 20
STORE = """
import signal, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
config = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "global_segment_size": sys.argv[2],
          "local_buffer_size": "1048576", "protocol": "tcp", "rdma_devices": "", "master_server_addr": sys.argv[1]}
print(store.setup(config), flush=True)
signal.sigwait({signal.SIGTERM})
"""


class Pool:
    """A master and a store of the tests' own."""

    def __init__(self, folder: Path, store_bytes: int) -> None:
        self.folder = folder
        self.store_bytes = store_bytes
        self.master: subprocess.Popen[bytes]
        self.store: subprocess.Popen[bytes]
        self.address = ""
        self.admin = ""
        """The master's HTTP port."""
        self._looking: ClientProcess | None = None

    def start_master(self) -> None:
        """A new master, at the same address if there was one before."""
        port = int(self.address.rpartition(":")[2]) if self.address else free_ports(1)[0]
        self.address = f"127.0.0.1:{port}"
        metrics = int(self.admin.rpartition(":")[2]) if self.admin else free_ports(1)[0]
        self.admin = f"127.0.0.1:{metrics}"
        program = Path(_wheel()) / "mooncake_master"
        flags = {"rpc_address": "127.0.0.1", "rpc_port": port, "metrics_host": "127.0.0.1", "metrics_port": metrics}
        flags |= {"client_ttl": 2, "default_kv_lease_ttl": 2000}
        self.master = self._start("master", [str(program), *(f"-{name}={value}" for name, value in flags.items())])
        self._until_reachable()

    def start_store(self) -> None:
        """A new store, empty."""
        self.store = self._start("store", [sys.executable, "-c", STORE, self.address, str(self.store_bytes)])
        deadline = time.monotonic() + START_SECONDS
        while (self.folder / "store.out").read_bytes() != b"0\n":
            assert time.monotonic() < deadline, (self.folder / "store.err").read_text()
            time.sleep(0.02)

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.out", "wb") as out, open(self.folder / f"{name}.err", "wb") as err:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=self.folder)

    def _until_reachable(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        connection = ClientProcess(self.options(), MEMORY_BYTES)
        try:
            while True:
                try:
                    return connection.open()
                except Exception:
                    assert time.monotonic() < deadline, (self.folder / "master.err").read_text()
                    time.sleep(0.05)
        finally:
            connection.close()

    # -- from outside, without a tier --------------------------------------------------------------------------

    @property
    def client(self) -> ClientProcess:
        """A client of the library with memory of its own."""
        if self._looking is None:
            self._looking = ClientProcess(self.options(), LOOKING_BYTES)
            self._looking.open()
        return self._looking

    def names(self, begin: str = "") -> list[str]:
        """All names that begin so, sorted."""
        return sorted(name for name in MasterHTTP(self.admin, START_SECONDS).names() if name.startswith(begin))

    def held_bytes(self) -> int:
        """What the master says that the store's memory holds."""
        segments = MasterHTTP(self.admin, START_SECONDS).segments()
        return sum(int(segment["allocator_used_bytes"]) for segment in segments)

    def read(self, name: str) -> bytes:
        """What is stored under a name; nothing if nothing is."""
        (length,) = self.client.ask("present", [name])
        if length < 0:
            return b""
        (code,) = self.client.ask("get", [name], [0], [length])
        return self.client.memory[:length].tobytes() if code == length else b""

    def write(self, name: str, value: bytes) -> None:
        """Put this under a name."""
        self.client.memory[: len(value)] = bytearray(value)
        assert self.client.ask("put", [name], [0], [len(value)]) == [0]

    def remove(self, names: Sequence[str]) -> None:
        """They are gone."""
        if names:
            self.client.ask("remove", names)

    def close(self) -> None:
        """End everything."""
        if self._looking is not None:
            self._looking.close()
        for name in ("store", "master"):
            if hasattr(self, name):
                self.kill(name)

    def options(self, **changes: Any) -> MooncakeOptions:
        """Options of a tier on this pool. A slow machine gets time; what is frozen is tested with less."""
        times = {"request_timeout_seconds": 20.0, "job_timeout_seconds": 40.0}
        fixed = {"type": "mooncake", "master": self.address, "staging": "16MiB"}
        return MooncakeOptions.model_validate(fixed | times | changes)

    def frozen(self, name: str) -> AbstractContextManager[None]:
        """The master or the store does not run for a while."""
        return frozen(getattr(self, name).pid)

    def kill(self, name: str) -> None:
        """It ends at once."""
        process = getattr(self, name)
        process.kill()
        process.wait()


def _wheel() -> str:
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        needs_server("Mooncake", "pip install 'kvtier[mooncake]', and apt-get install libibverbs1 libnuma1 libcurl4")
    return spec.submodule_search_locations[0]


@contextmanager
def mooncake_pool(folder: Path, store_bytes: int = 512 << 20) -> Iterator[Pool]:
    """A master and one store."""
    _wheel()
    pool = Pool(folder, store_bytes)
    try:
        pool.start_master()
        pool.start_store()
        yield pool
    finally:
        pool.close()


class PoolBlocks(ConformanceBase):
    """Opens tiers on a pool with the stand-in for the control plane above them."""

    layout = TWO_SIZES

    def __init__(self, pool: Pool, **changes: Any) -> None:
        self.pool = pool
        self.changes = changes

    def make(self, place: Path) -> MooncakeBackend:
        return MooncakeBackend(self.pool.options(**self.changes))
