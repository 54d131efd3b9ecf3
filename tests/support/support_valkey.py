"""A real Valkey server for tests, embedded as `kvtier replay` does it, and its tier's options."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import valkey
from support_remote_blocks import TWO_SIZES
from support_servers import frozen

from kvtier.cli.temporary_folders import temporary_folder
from kvtier.testing.conformance.base import ConformanceBase
from kvtier_remote import ValkeyBackend, ValkeyOptions
from kvtier_remote.valkey.embedded import START_SECONDS, EmbeddedServer, embedded_server


class Server:
    """A server of this process's own, with a plain client of another library to look at it from outside."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.process = server
        self.address = server.address
        self.client: Any = valkey.Valkey(port=server.port)

    def options(self, **changes: Any) -> ValkeyOptions:
        """Options of a tier on this server. A slow machine gets time; what is frozen is tested with less."""
        fixed = {"type": "valkey", "servers": [self.address], "tls": False, "connections": 2}
        times = {"request_timeout_seconds": 20.0, "job_timeout_seconds": 40.0}
        return ValkeyOptions.model_validate(fixed | times | changes)

    def tier(self, **changes: Any) -> ValkeyBackend:
        """A new tier on this server, not open."""
        return ValkeyBackend(self.options(**changes))

    def names(self, pattern: str) -> list[bytes]:
        """All names on the server that match."""
        return sorted(self.client.scan_iter(match=pattern, count=1000))

    def frozen(self) -> AbstractContextManager[None]:
        """The server does not run for a while; its connections stay."""
        return frozen(self.process.pid, self.wait)

    def kill(self) -> None:
        """It ends at once."""
        self.process.kill()

    def start(self) -> None:
        """Start it again, empty, at the same address."""
        self.process.start()

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.client.ping()
                return
            except OSError:
                assert time.monotonic() < deadline, "the server does not answer any more"


def stack_tier(server: Server, **more: object) -> dict[str, object]:
    """A tier on this server, as a stack file names it. A slow machine gets time."""
    fixed = {"type": "valkey", "servers": f"['{server.address}']", "tls": "false", "connections": 2}
    return fixed | {"request_timeout_seconds": 20, "job_timeout_seconds": 40} | more


@contextmanager
def valkey_server(**config: Any) -> Iterator[Server]:
    """A server with 256 MiB of memory that evicts the least recently used, unless `config` says otherwise.

    Keys of `config` are those of valkey.conf with underscores.
    """
    given = {"maxmemory": "256mb", "maxmemory_policy": "allkeys-lru"} | config
    settings = {name.replace("_", "-"): value for name, value in given.items()}
    with temporary_folder("kvtier-valkey-") as folder, embedded_server(Path(folder), settings) as process:
        server = Server(process)
        try:
            yield server
        finally:
            server.client.close()


@contextmanager
def valkey_cluster() -> Iterator[list[Server]]:
    """Three primaries that share the slots. One that is gone does not stop the others."""
    config = {"cluster_enabled": "yes", "cluster_config_file": "nodes.conf", "cluster_node_timeout": "5000"}
    config |= {"cluster_require_full_coverage": "no"}
    with ExitStack() as stack:
        servers = [stack.enter_context(valkey_server(**config)) for _ in range(3)]
        for i, server in enumerate(servers):
            server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 16384 * i // 3, 16384 * (i + 1) // 3 - 1)
            server.client.execute_command("CLUSTER", "MEET", *servers[0].address.split(":"), bus_port(servers[0]))
        deadline = time.monotonic() + START_SECONDS
        while any("cluster_state:ok" not in state_of(server) for server in servers):
            assert time.monotonic() < deadline, "the nodes do not form a cluster"
            time.sleep(0.05)
        yield servers


def bus_port(server: Server) -> str:
    """The port on which a node of a cluster talks to the others."""
    return server.client.config_get("cluster-port")["cluster-port"]


def state_of(server: Server) -> str:
    """What a node says of its cluster, as it is on the wire."""
    found = server.client.execute_command("CLUSTER INFO")
    return "\n".join(f"{name}:{value}" for name, value in found.items())


def warm_up(server: Server) -> None:
    """Start the native runtime of the client library, which keeps two descriptors as long as the process lives."""
    from kvtier_remote.valkey.glide import connect

    connect(server.options()).close()


class Blocks(ConformanceBase):
    """Opens tiers on a server with the stand-in for the control plane above them; one split group, one that is not."""

    layout = TWO_SIZES

    def __init__(self, server: Server, **changes: Any) -> None:
        self.server = server
        self.changes = changes

    def make(self, place: Path) -> ValkeyBackend:
        return self.server.tier(**self.changes)
