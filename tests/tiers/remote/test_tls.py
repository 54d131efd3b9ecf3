"""The tier `valkey` over TLS, on a real Redis server: who is trusted, who is not, and what `kvtier check` says then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support_redis import ELSEWHERE, Authority, RedisServer, redis_server
from support_valkey import Blocks

from kvtier.cli import main
from kvtier.testing.conformance import make_keys

NO_TLS = "accepts connections, but none over TLS"
pytestmark = pytest.mark.remote


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[RedisServer]:
    with redis_server(authority, requirepass="sesame") as one:
        yield one


@pytest.fixture
def password(tmp_path: Path) -> str:
    return secret(tmp_path / "password", "sesame")


def secret(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def checked(folder: Path, server: RedisServer, **more: object) -> tuple[int, str]:
    """Exit status and output of `kvtier check` of a stack over this server."""
    tier = {"type": "valkey", "servers": f"['{server.address}']", "request_timeout_seconds": 4} | more
    entry = ", ".join(f"{key}: {value}" for key, value in tier.items())
    file = folder / "stack.yaml"
    file.write_text(f"tiers:\n- {{type: cpu, cpu_bytes_to_use: 64MiB}}\n- {{{entry}}}\n")
    result = CliRunner().invoke(main, ["check", str(file)])
    return result.exit_code, result.output


def trusting(authority: Authority, **more: str) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in {"ca_file": authority.file, **more}.items()) + "}"


def test_a_trusted_server_passes_the_check(server, authority, password, tmp_path):
    assert checked(tmp_path, server, tls=trusting(authority), password_file=password)[0] == 0


async def test_a_trusted_server_gives_back_what_was_stored(server, password, tmp_path):
    names = [*make_keys(2, group=0), *make_keys(2, group=1)]
    async with Blocks(server, password_file=password).opened(tmp_path) as driver:
        assert [one.status for one in (await driver.store(names)).values()] == ["stored"] * 4
        assert [one.status for one in (await driver.load(names)).values()] == ["loaded"] * 4


def refused(found: tuple[int, str], line: str) -> None:
    """One line with the key's path, and exit status 2."""
    status, output = found
    assert status == 2, output
    errors = [text for text in output.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1, output
    assert errors[0].startswith(f"error: tiers[1].{line}"), output


def test_a_server_whose_authority_is_not_trusted_is_refused(server, password, tmp_path):
    stranger = Authority(tmp_path / "stranger")
    refused(
        checked(tmp_path, server, tls=trusting(stranger), password_file=password), f"tls: {server.address}: {NO_TLS}"
    )
    refused(checked(tmp_path, server, password_file=password), f"tls: {server.address}: {NO_TLS}")


def test_a_certificate_of_another_host_is_refused(authority, tmp_path):
    with redis_server(authority, ELSEWHERE) as elsewhere:
        refused(checked(tmp_path, elsewhere, tls=trusting(authority)), f"tls: {elsewhere.address}: {NO_TLS}")


def test_a_server_that_speaks_in_clear_is_refused(server, authority, password, tmp_path):
    clear = f"['{server.process.address}']"
    found = checked(tmp_path, server, servers=clear, tls=trusting(authority), password_file=password)
    refused(found, f"tls: {server.process.address}: {NO_TLS}")


def test_a_wrong_password_and_none_are_refused(server, authority, tmp_path):
    wrong = secret(tmp_path / "wrong", "open")
    line = f"password_file: {server.address}: the server"
    refused(checked(tmp_path, server, tls=trusting(authority), password_file=wrong), f"{line} refuses the user or")
    refused(checked(tmp_path, server, tls=trusting(authority)), f"{line} wants a password")


def test_a_server_that_wants_a_certificate_of_the_client_gets_it_or_refuses(authority, tmp_path):
    certificate, key = authority.issue("client")
    other_certificate, other_key = Authority(tmp_path / "stranger").issue("client")
    with redis_server(authority, tls_auth_clients="yes") as server:
        assert checked(tmp_path, server, tls=trusting(authority, cert_file=certificate, key_file=key))[0] == 0
        without = checked(tmp_path, server, tls=trusting(authority))
        refused(without, f"tls: {server.address}: {NO_TLS}")
        other = checked(tmp_path, server, tls=trusting(authority, cert_file=other_certificate, key_file=other_key))
        refused(other, f"tls: {server.address}: {NO_TLS}")
        Path(key).chmod(0o604)
        readable = checked(tmp_path, server, tls=trusting(authority, cert_file=certificate, key_file=key))
        refused(readable, f"tls.key_file: {key}: other users may use it")
