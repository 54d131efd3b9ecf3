"""A Mooncake pool as a server to attack: its master or its only store is what is stopped."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.testing import TcpProxy
from kvtier_remote.backend import RemoteBackend

REQUEST_SECONDS = 0.5
JOB_SECONDS = 3.0
POOL_BYTES = 256 << 20
BLOCKS, MARKERS = "kvtier:b:.*", "kvtier:m:.*"
SECONDS = 60
_TOOL = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
config = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "global_segment_size": "0",
          "local_buffer_size": "16777216", "protocol": "tcp", "rdma_devices": "", "master_server_addr": sys.argv[1]}
sys.exit(store.setup(config) or min(0, store.remove_by_regex(sys.argv[2], True)))
"""


class Pool:
    """A master and a store. A client of its own, in another process, looks at the pool from outside.

    Mooncake lists no names and tells nobody how much a name holds, so nothing here does; what a lost master had is
    forgotten, so that a store is started anew with it.
    """

    bound_bytes = POOL_BYTES

    def __init__(self, pool: Any, process: str) -> None:
        self.pool = pool
        self.process = process
        self.frozen = partial(pool.frozen, process)
        self.kill = partial(pool.kill, process)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.pool.address.rpartition(":")
        return host, int(port)

    def tier(self, through: TcpProxy | None = None, connections: int = 0, **changes: Any) -> RemoteBackend:
        """Only what is said to the master goes through a proxy: blocks move between client and store."""
        from kvtier_remote.mooncake.tier import MooncakeBackend

        times = {"request_timeout_seconds": REQUEST_SECONDS, "job_timeout_seconds": JOB_SECONDS}
        hints = {"miss_hint_seconds": 0.2, "hit_hint_seconds": 2.0}
        where = {"master": through.address} if through is not None else {}
        return MooncakeBackend(self.pool.options(**(times | hints | where | changes)))

    def start(self) -> None:
        """Again, and empty."""
        if self.process == "master":
            self.pool.start_master()
            self.pool.kill("store")
        self.pool.start_store()

    def empty(self) -> None:
        """All blocks are gone."""
        self._remove(BLOCKS)

    def remove(self, name: str) -> None:
        """It is gone."""
        self._remove(name)

    def _remove(self, pattern: str) -> None:
        command = [sys.executable, "-c", _TOOL, self.pool.address, pattern]
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)

    def markers(self) -> list[str]:
        """What removes all markers."""
        return [MARKERS]

    def blocks(self) -> list[str]:
        raise NotImplementedError

    def read(self, name: str) -> bytes:
        raise NotImplementedError

    def write(self, name: str, value: bytes) -> None:
        raise NotImplementedError

    def held_bytes(self) -> int:
        """What the store's process may lend; it holds no more."""
        return POOL_BYTES


@contextmanager
def pool(bound_bytes: int = 0, process: str = "store") -> Iterator[Pool]:
    """A pool of this attack's own."""
    from support_mooncake import mooncake_pool  # to be found inside an attack only

    with tempfile.TemporaryDirectory(prefix="kvtier-pool-") as folder, mooncake_pool(Path(folder), POOL_BYTES) as one:
        yield Pool(one, process)


def without_mooncake() -> str | None:
    """Why no pool can be started here, if so."""
    if importlib.util.find_spec("mooncake") is None:
        return "needs pip install 'kvtier[mooncake]', and apt-get install libibverbs1 libnuma1 libcurl4"
    return None
