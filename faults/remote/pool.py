"""A Mooncake pool as a server to attack: its master or its only store is what is stopped."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from faults.machine.tcp_proxy import TcpProxy
from kvtier.cli.temporary_folders import temporary_folder
from kvtier_remote.backend import RemoteBackend

REQUEST_SECONDS = 0.5
JOB_SECONDS = 3.0
POOL_BYTES = 256 << 20
BLOCKS, MARKERS = "kvtier:b:", "kvtier:m:"


class Pool:
    """A master and a store. The master's HTTP port and a client of its own, in another process, look at the pool from
    outside.

    What a lost master had is forgotten, so that a store is started anew with it.
    """

    bound_bytes = POOL_BYTES

    def __init__(self, pool: Any, process: str) -> None:
        self.pool = pool
        self.process = process
        self.frozen = partial(pool.frozen, process)
        self.kill = partial(pool.kill, process)
        self.read = pool.read
        self.write = pool.write

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
        self.pool.remove(self.blocks())

    def remove(self, name: str) -> None:
        """It is gone."""
        self.pool.remove([name])

    def markers(self) -> list[str]:
        """The names of all markers and of their claims."""
        return self.pool.names(MARKERS)  # type: ignore[no-any-return]

    def blocks(self) -> list[str]:
        """The names of all blocks."""
        return self.pool.names(BLOCKS)  # type: ignore[no-any-return]

    def held_bytes(self) -> int:
        """What the master says that the store's memory holds."""
        return self.pool.held_bytes()  # type: ignore[no-any-return]


@contextmanager
def pool(bound_bytes: int = 0, process: str = "store") -> Iterator[Pool]:
    """A pool of this attack's own."""
    from support_mooncake import mooncake_pool  # to be found inside an attack only

    with temporary_folder("kvtier-pool-") as folder, mooncake_pool(Path(folder), POOL_BYTES) as one:
        one.client.open()  # what it keeps open is not the tiers'
        yield Pool(one, process)


def without_mooncake() -> str | None:
    """Why no pool can be started here, if so."""
    if importlib.util.find_spec("mooncake") is None:
        return "needs pip install 'kvtier[mooncake]', and apt-get install libibverbs1 libnuma1 libcurl4"
    return None
