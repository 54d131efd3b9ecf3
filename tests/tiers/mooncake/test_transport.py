"""The conformance suites of transports and of tiers over a real Mooncake master and store."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest
from support_mooncake import Pool

from kvtier.testing.conformance import LoadStoreTests
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier_remote.conformance import TransportTests
from kvtier_remote.conformance.base import Client
from kvtier_remote.mooncake.client_process import ClientProcess
from kvtier_remote.mooncake.marker_object import MEMORY_BYTES
from kvtier_remote.mooncake.tier import MooncakeBackend
from kvtier_remote.mooncake.transport import MooncakeTransport
from kvtier_remote.valkey.embedded import free_ports

pytestmark = [pytest.mark.remote, pytest.mark.mooncake]


class TestMooncakeTransport(TransportTests):
    """A frozen server is a frozen master: nothing is found without it."""

    call_seconds: ClassVar[float] = 100.0

    @pytest.fixture(autouse=True)
    def _on(self, pool: Pool) -> None:
        self.pool = pool

    def make(self, place: Path) -> MooncakeTransport:
        return MooncakeTransport(self.pool.options())

    def make_unreachable(self, place: Path) -> MooncakeTransport:
        (port,) = free_ports(1)
        return MooncakeTransport(self.pool.options(master=f"127.0.0.1:{port}"))

    def make_hurried(self, place: Path) -> MooncakeTransport:
        return MooncakeTransport(self.pool.options(request_timeout_seconds=0.5))

    def frozen(self) -> AbstractContextManager[None]:
        return self.pool.frozen("master")

    def lose_markers(self, place: Path) -> bool:
        connection = ClientProcess(self.pool.options(), MEMORY_BYTES)
        try:
            connection.open()
            return connection.ask("remove", [Client(self.make(place), str(place)).names.marker]) == [0]
        finally:
            connection.close()


class TestMooncakeTier(LoadStoreTests):
    """Each place is a prefix of its own."""

    survives_reopen = True
    machine_examples = 3
    machine_steps = 20
    layout: ClassVar[KVLayout] = KVLayout(
        (GroupLayout((TensorRef(0, 300 << 10),)), GroupLayout((TensorRef(1, 33),)), GroupLayout((TensorRef(2, 5000),)))
    )

    @pytest.fixture(autouse=True)
    def _on(self, pool: Pool) -> None:
        self.pool = pool

    def make(self, place: Path) -> MooncakeBackend:
        prefix = hashlib.sha256(str(place).encode()).hexdigest()[:16]
        return MooncakeBackend(self.pool.options(prefix=prefix))
