"""One server for the tests of the tier; those that break a server start one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support_valkey import Server, valkey_server, warm_up


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    with valkey_server() as one:
        warm_up(one)
        yield one


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The shared server, empty."""
    shared_server.client.flushall()
    return shared_server
