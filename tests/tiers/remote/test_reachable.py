"""Name servers that do not answer: no opening waits for them longer than for a request."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator

import pytest

from kvtier.errors import ConfigError
from kvtier_remote import MooncakeOptions, ValkeyOptions
from kvtier_remote.mooncake import client_process
from kvtier_remote.reachable import address_of, look_up, try_connection
from kvtier_remote.valkey import glide

SILENT = "kvtier.invalid"


@pytest.fixture
def silent_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The name server does not answer for one host. Others are looked up as always."""
    over, find = threading.Event(), socket.getaddrinfo

    def resolve(host: str, *given, **more):
        if host != SILENT:
            return find(host, *given, **more)
        over.wait(30)
        raise OSError(errno.EIO, "late")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    yield
    over.set()


def test_hosts_and_ports() -> None:
    assert address_of("cache-0.kv:6379") == ("cache-0.kv", 6379)
    assert address_of("[::1]:6379") == ("::1", 6379)


@pytest.mark.parametrize("servers", [[f"{SILENT}:6379"], ["127.0.0.1:1", f"{SILENT}:6379"]], ids=["first", "second"])
def test_valkey_does_not_wait_for_any_of_its_servers(silent_names, servers):
    options = ValkeyOptions.model_validate({"servers": servers, "tls": False, "request_timeout_seconds": 0.5})
    with pytest.raises(ConfigError, match=r"servers: .*the name server does not answer") as caught:
        glide.connect(options)
    assert caught.value.path == "servers"


def test_mooncake_does_not_wait_for_its_master(silent_names, monkeypatch):
    monkeypatch.setattr(client_process, "installed", lambda: True)
    options = MooncakeOptions.model_validate({"master": f"{SILENT}:50051", "request_timeout_seconds": 0.5})
    client = client_process.ClientProcess(options, 128)
    try:
        with pytest.raises(ConfigError, match=r"master: .*the name server does not answer"):
            client.open()
    finally:
        client.close()


def test_a_name_that_is_not_known_is_no_silence():
    look_up(["kvtier.invalid:1"], 20)
    with pytest.raises(OSError, match=r"[Nn]ame"):
        try_connection("kvtier.invalid:1", 20)


def test_addresses_are_looked_up_nowhere(silent_names, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", None)
    look_up(["127.0.0.1:1", "[::1]:1"], 0.5)
