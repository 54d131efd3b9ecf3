"""The conformance suite of transports over ValkeyTransport and real servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from support_redis import Authority, redis_server
from support_valkey import Server, valkey_cluster, valkey_server

from kvtier_remote.conformance import TransportTests
from kvtier_remote.valkey import transport
from kvtier_remote.valkey.embedded import free_ports
from kvtier_remote.valkey.transport import ValkeyTransport


@pytest.fixture(scope="module")
def one_server() -> Iterator[list[Server]]:
    with valkey_server() as one:
        one.client.ping()  # its connection is not the transport's
        yield [one]


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Server]]:
    with valkey_cluster() as servers:
        for server in servers:
            server.client.ping()
        yield servers


class ValkeyTransportTests(TransportTests):
    """What a server of one node and a cluster have in common."""

    more: ClassVar[dict[str, object]] = {}
    servers: list[Server]

    def _transport(self, **changes: object) -> ValkeyTransport:
        return ValkeyTransport(self.servers[0].options(**self.more, **changes))

    def make(self, place: Path) -> ValkeyTransport:
        return self._transport()

    def make_unreachable(self, place: Path) -> ValkeyTransport:
        (port,) = free_ports(1)
        return self._transport(servers=[f"127.0.0.1:{port}"], request_timeout_seconds=1.0)

    def make_hurried(self, place: Path) -> ValkeyTransport:
        return self._transport(request_timeout_seconds=0.5)

    def lose_markers(self, place: Path) -> bool:
        for server in self.servers:
            for name in server.names("*:m:*"):
                server.client.delete(name)
        return True


class TestOneServer(ValkeyTransportTests):
    """A server of its own, which may be frozen."""

    @pytest.fixture(autouse=True)
    def _on(self, one_server: list[Server]) -> None:
        self.servers = one_server

    def frozen(self) -> AbstractContextManager[None]:
        return self.servers[0].frozen()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with redis_server(Authority(tmp_path_factory.mktemp("tls") / "authority")) as one:
        one.client.ping()
        yield [one]


@pytest.mark.remote
class TestRedisOverTLS(TestOneServer):
    """Redis with a certificate."""

    @pytest.fixture(autouse=True)
    def _on(self, redis: list[Server]) -> None:
        self.servers = redis


class TestCluster(ValkeyTransportTests):
    """Three nodes; the transport is given one of them."""

    more: ClassVar[dict[str, object]] = {"mode": "cluster"}

    @pytest.fixture(autouse=True)
    def _on(self, cluster: list[Server]) -> None:
        self.servers = cluster

    @contextmanager
    def one_silent(self) -> Iterator[str]:
        last = self.servers[-1]
        name = last.client.execute_command("CLUSTER", "MYID").decode()
        with last.frozen():
            yield name


class TestClusterOfFewShards(TestCluster):
    """Fewer clients than nodes: some nodes share them."""

    @pytest.fixture(autouse=True)
    def _few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transport, "_SHARDS", 1)

    make_hurried = TestCluster.make

    def one_silent(self) -> None:
        """Nodes that share clients are held up together for a while."""
        return
