"""The conformance suite over the tier `valkey` and real servers: Valkey alone and as a cluster, Redis with TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from support_redis import Authority, RedisServer, redis_server
from support_valkey import Server, valkey_cluster, valkey_server, warm_up

from kvtier.testing.conformance import LoadStoreTests
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier_remote import ValkeyBackend


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with valkey_server() as one:
        warm_up(one)
        yield one


class ValkeyTests(LoadStoreTests):
    """Each place is a prefix of its own."""

    survives_reopen = True
    machine_examples = 5
    more: ClassVar[dict[str, object]] = {}

    @pytest.fixture(autouse=True)
    def _on(self, server: Server) -> Iterator[None]:
        self.start([server])
        yield
        del self.servers

    def start(self, servers: list[Server]) -> None:
        self.servers = servers
        self.prefixes: dict[Path, str] = {}
        for server in servers:
            server.client.flushall()

    def prefix(self, place: Path) -> str:
        return self.prefixes.setdefault(place, f"test-{len(self.prefixes)}")

    def make(self, place: Path) -> ValkeyBackend:
        return self.servers[0].tier(prefix=self.prefix(place), **self.more)

    def damage(self, place: Path) -> bool:
        """One bit in the last byte under every name: a payload's, or that of the front of a split one."""
        damaged = 0
        for server in self.servers:
            for pattern in (f"{self.prefix(place)}:b:*", f"{{{self.prefix(place)}:b:*"):
                for name in server.names(pattern):
                    value = bytearray(server.client.get(name))
                    value[-1] ^= 0x10
                    server.client.set(name, bytes(value))
                    damaged += 1
        return damaged > 0


class TestWholeValues(ValkeyTests):
    """Small payloads, each under one name."""


class TestSplitValues(ValkeyTests):
    """Payloads of 256 KiB and more, each under two names; some small ones beside them. They expire."""

    more: ClassVar[dict[str, object]] = {"expire": "1h"}
    layout: ClassVar[KVLayout] = KVLayout(
        (
            GroupLayout((TensorRef(0, 300 << 10),)),
            GroupLayout((TensorRef(1, 256 << 10),)),
            GroupLayout((TensorRef(2, 5000),)),
        )
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Server]]:
    with valkey_cluster() as servers:
        warm_up(servers[0])
        yield servers


class TestCluster(TestSplitValues):
    """The same on three nodes, of which the tier is told one."""

    more: ClassVar[dict[str, object]] = {"mode": "cluster"}

    @pytest.fixture(autouse=True)
    def _on(self, cluster: list[Server]) -> Iterator[None]:
        self.start(cluster)
        yield
        del self.servers


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    authority = Authority(tmp_path_factory.mktemp("redis") / "authority")
    with redis_server(authority) as server:
        warm_up(server)
        yield server


@pytest.mark.remote
class TestRedisOverTLS(TestSplitValues):
    """The same on a Redis server that speaks TLS."""

    @pytest.fixture(autouse=True)
    def _on(self, redis: RedisServer) -> Iterator[None]:
        self.start([redis])
        yield
        del self.servers
