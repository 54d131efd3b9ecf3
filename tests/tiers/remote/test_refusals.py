"""What keeps the tier `valkey` from opening: each mistake is one line with its key, from `kvtier check` as well."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support_checks import Kinds, check_refuses, checked, open_refuses, private_file
from support_valkey import Blocks, Server, valkey_cluster, valkey_server

from faults.machine.tcp_proxy import ProxyFaults, StreamFaults, TcpProxy
from kvtier.errors import ConfigError
from kvtier.testing.conformance import make_keys
from kvtier_remote.valkey import glide

RIGHTS = ("~kvtier:*", "~{kvtier:*", "+@read", "+@write", "+@scripting", "+@connection", "+info")
"""As docs/remote.md gives them to a user."""
LACKING = {
    "may not run scripts": ("-@scripting",),
    "may not write": ("-@write",),
    "may not read": ("-mget",),
    "may not ask for bounds": ("-info",),
    "has other names": ("resetkeys", "~other:*"),
    "has no split names": ("resetkeys", "~kvtier:*"),
}
SHORT = {"request_timeout_seconds": 2.0}


class Servers:
    """One that wants a password, and one each whose bounds or whose role do not go with a tier."""

    def __init__(self, stack: ExitStack) -> None:
        self.locked = stack.enter_context(valkey_server())
        self.locked.client.config_set("requirepass", "sesame")
        self.locked.client.execute_command("AUTH", "sesame")
        for number, lacking in enumerate(LACKING.values()):
            self.locked.client.execute_command("ACL", "SETUSER", f"user{number}", "on", ">sesame", *RIGHTS, *lacking)
        self.unbounded = stack.enter_context(valkey_server(maxmemory="0"))
        self.volatile = stack.enter_context(valkey_server(maxmemory_policy="volatile-lru"))
        self.replica = stack.enter_context(valkey_server())
        self.replica.client.execute_command("REPLICAOF", "127.0.0.1", "1")

    def refusals(self, folder: Path) -> Kinds:
        wrong, right = (private_file(folder / name, name) for name in ("hunter2", "sesame"))
        found: Kinds = {
            "no password": ({}, "password_file"),
            "wrong password": ({"password_file": wrong}, "password_file"),
            "unknown user": ({"username": "nobody", "password_file": wrong}, "password_file"),
            "no such file": ({"password_file": str(folder / "absent")}, "password_file"),
            "no such variable": ({"password_env": "KVTIER_TEST_ABSENT"}, "password_env"),
            "closed port": ({"servers": ["127.0.0.1:1"]}, "servers"),
            "unknown host": ({"servers": ["kvtier.invalid:6379"]}, "servers"),
            "no TLS": ({"tls": True, "password_file": right}, "tls"),
            "no authority": ({"tls": {"ca_file": str(folder / "absent")}}, "tls.ca_file"),
            "unbounded": ({"servers": [self.unbounded.address]}, "allow_unbounded"),
            "evicts nothing of ours": ({"servers": [self.volatile.address]}, "expire"),
            "replica": ({"servers": [self.replica.address]}, "servers"),
        }
        users = {kind: f"user{number}" for number, kind in enumerate(LACKING)}
        return found | {kind: ({"username": user, "password_file": right}, "username") for kind, user in users.items()}


KINDS = [
    *("no password", "wrong password", "unknown user", "no such file", "no such variable"),
    *("closed port", "unknown host", "no TLS", "no authority", "unbounded", "evicts nothing of ours", "replica"),
    *LACKING,
]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


def test_every_kind_is_tried(servers, tmp_path):
    assert [*servers.refusals(tmp_path)] == KINDS


@pytest.mark.parametrize("kind", KINDS)
async def test_what_keeps_a_tier_from_opening_is_one_line_with_its_key(servers, tmp_path, kind):
    changes, key = servers.refusals(tmp_path)[kind]
    await open_refuses(Blocks(servers.locked, **(SHORT | changes)), tmp_path, key)


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_ends_with_2_and_that_line(servers, tmp_path, kind):
    changes, key = servers.refusals(tmp_path)[kind]
    check_refuses(tmp_path, servers.locked.options(**(SHORT | changes)), key)


def user(server: Server, *rights: str) -> None:
    server.client.execute_command("ACL", "SETUSER", "kvtier", "reset", "on", ">sesame", *rights)


def test_a_user_with_the_documented_rights_opens_and_a_check_stores_nothing(server, tmp_path):
    user(server, *RIGHTS)
    login = {"username": "kvtier", "password_file": private_file(tmp_path / "password", "sesame")}
    result = checked(tmp_path, server.options(**login))
    assert result.exit_code == 0, result.output
    assert server.client.dbsize() == 0
    asyncio.run(works(Blocks(server, **login), tmp_path))


async def works(suite: Blocks, folder: Path) -> None:
    names = [*make_keys(3, 0), *make_keys(3, 1)]
    async with suite.opened(folder) as driver:
        assert all(outcome.ok for outcome in (await driver.store(names)).values())
        assert all(outcome.ok for outcome in (await driver.load(names)).values())


def fill(server: Server) -> None:
    for number in range(400):
        server.client.set(f"other:{number}", b"x" * 20_000)


def test_a_full_server_is_no_mistake(tmp_path):
    with valkey_server(maxmemory="2mb", maxmemory_policy="noeviction") as server:
        with pytest.raises(Exception, match="maxmemory"):
            fill(server)
        assert checked(tmp_path, server.options()).exit_code == 0


def test_each_node_of_a_cluster_has_users_of_its_own(tmp_path):
    login = {"username": "kvtier", "password_file": private_file(tmp_path / "password", "sesame"), "mode": "cluster"}
    with valkey_cluster() as nodes:
        for node in nodes:
            user(node, *RIGHTS)
        line = check_refuses(tmp_path, nodes[0].options(**login), "username")
        assert "allow +cluster|slots" in line
        for node in nodes:
            user(node, *RIGHTS, "+cluster|slots")
        assert checked(tmp_path, nodes[0].options(**login)).exit_code == 0
        user(nodes[1], *RIGHTS, "+cluster|slots", "-set")
        assert "allow +set" in check_refuses(tmp_path, nodes[0].options(**login), "username")
        assert sum(node.client.dbsize() for node in nodes) == 0


@pytest.mark.parametrize(("text", "key"), [("hunter2", "password_file"), ("sesame", "request_timeout_seconds")])
def test_what_is_wrong_is_found_out_when_there_was_no_time_to_be_told(servers, tmp_path, text, key):
    """Each answer takes longer than a request may, so that the library says nothing but that."""
    file = private_file(tmp_path / "password", text)
    with TcpProxy(("127.0.0.1", servers.locked.process.port)) as proxy:
        proxy.set(ProxyFaults(to_client=StreamFaults(delay_seconds=0.2)))
        given = {"servers": [proxy.address], "password_file": file, "request_timeout_seconds": 0.1}
        with pytest.raises(ConfigError) as caught:
            glide.connect(servers.locked.options(**given))
    assert caught.value.path == key


async def test_the_right_password_opens(servers, tmp_path):
    file = private_file(tmp_path / "password", "sesame\n")
    await works(Blocks(servers.locked, password_file=file), tmp_path)
