"""Secrets that are written where they do not belong: no error shows them, and no log shows what a server says."""

from __future__ import annotations

import errno
import logging
from typing import Any

import pytest
from pydantic import ValidationError
from support_checks import private_file
from support_valkey import Blocks, Server, valkey_server

from kvtier.config import parse_stack
from kvtier.errors import ConfigError
from kvtier.testing.conformance import make_keys
from kvtier.tier.registry import discover
from kvtier.types.jobs import BlockStatus

SECRET = "hunter2"
VALKEY: dict[str, Any] = {"type": "valkey", "servers": ["cache:6379"]}
S3: dict[str, Any] = {"type": "s3", "bucket": "kv-cache"}
AZURE: dict[str, Any] = {"type": "azure", "account": "kvcache", "container": "kv-cache"}
NO_SECRET = "a stack file holds no secret"
GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "user in an endpoint": (S3 | {"endpoint": f"https://AKID:{SECRET}@rgw:1"}, "is no endpoint"),
    "user in a server": (VALKEY | {"servers": [f"user:{SECRET}@cache:6379"]}, "write host:port"),
    "user in a master": ({"type": "mooncake", "master": f"u:{SECRET}@master:50051"}, "write host:port"),
    "password in a metadata server": (
        {"type": "mooncake", "master": "master:50051", "metadata_server": f"redis://:{SECRET}@meta:6379"},
        "should match",
    ),
    "servers as a text": (VALKEY | {"servers": f"{SECRET}@cache:6379"}, "a valid list"),
    "credentials as a text": (S3 | {"credentials": SECRET}, "write 'default'"),
    "secret for a bucket": (S3 | {"bucket": f"AKID:{SECRET}@kv"}, "should match"),
    "password for a variable": (VALKEY | {"password_env": f"{SECRET}!"}, "should match"),
    "password for a file": (VALKEY | {"password_file": SECRET}, "not an absolute path"),
    "password for an authority": (VALKEY | {"tls": {"ca_file": SECRET}}, "not an absolute path"),
    "password for a switch": (VALKEY | {"tls": SECRET}, "a valid boolean"),
    "password for a time": (VALKEY | {"expire": SECRET}, "is not a time"),
    "password for a size": (VALKEY | {"write_bytes_per_day": SECRET}, "is not a size"),
    "password": (VALKEY | {"password": SECRET}, NO_SECRET),
    "passwd": (VALKEY | {"passwd": SECRET}, NO_SECRET),
    "auth": (VALKEY | {"auth": SECRET}, NO_SECRET),
    "secret_access_key": (S3 | {"secret_access_key": SECRET}, NO_SECRET),
    "access_key_id": (S3 | {"access_key_id": SECRET}, NO_SECRET),
    "session_token": (S3 | {"session_token": SECRET}, NO_SECRET),
    "account_key": (AZURE | {"account_key": SECRET}, NO_SECRET),
    "sas_token": (AZURE | {"sas_token": SECRET}, NO_SECRET),
    "token of a pool": ({"type": "mooncake", "master": "master:50051", "token": SECRET}, NO_SECRET),
    "keys in place of files": (S3 | {"credentials": {"secret_access_key": SECRET}}, "did you mean 'secret_key_file'"),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_an_error_of_a_stack_file_says_what_to_do_and_not_what_was_written(kind):
    entry, words = GIVEN[kind]
    text = f"tiers: [{{type: gpu}}, {{type: cpu, cpu_bytes_to_use: 1GiB}}, {entry}]"
    with pytest.raises(ConfigError) as caught:
        parse_stack(text)
    assert words in str(caught.value)
    assert all(line.startswith("tiers[2]") for line in str(caught.value).splitlines())
    assert SECRET not in str(caught.value)


OF_ALL_TIERS = {"password for a time", "password for a size"}
"""Options of every tier, whose validators say what they were given; a stack file's errors leave it out."""


@pytest.mark.parametrize("kind", sorted(GIVEN.keys() - OF_ALL_TIERS))
def test_so_does_an_error_of_options_that_are_made_by_a_program(kind):
    entry, _ = GIVEN[kind]
    with pytest.raises(ValidationError) as caught:
        discover().get(entry["type"]).Options.model_validate(entry)
    assert SECRET not in str(caught.value)


NAMES = [*make_keys(2, 0), *make_keys(2, 1)]


@pytest.fixture
def own_server():
    with valkey_server() as one:
        yield one


def lock(server: Server, password: str) -> None:
    """The password from now on; connections that are there are cut."""
    server.client.config_set("requirepass", password)
    server.client.execute_command("AUTH", password)
    server.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def test_nothing_of_a_failed_request_is_in_a_log_or_an_error(own_server, tmp_path, caplog, capfd):
    """Rights that are taken away, values of another type, and a password that is refused while it runs: the server's
    answers name the block, and the library's say more."""
    lock(own_server, SECRET)
    login = {"password_file": private_file(tmp_path / "password", SECRET), "request_timeout_seconds": 2.0}
    with caplog.at_level(logging.DEBUG):
        async with Blocks(own_server, **login).opened(tmp_path) as driver:
            assert {one.status for one in (await driver.store(NAMES)).values()} == {BlockStatus.STORED}
            for name in own_server.names("*kvtier:b:*"):
                own_server.client.delete(name)
                own_server.client.lpush(name, b"of another type")
            assert not any(one.ok for one in (await driver.load(NAMES)).values())
            own_server.client.execute_command("ACL", "SETUSER", "default", "-mget", "-set", "-eval", "-strlen")
            for call in (driver.load, driver.store):
                assert {one.errno for one in (await call(NAMES)).values()} == {errno.EACCES}
            assert set(await driver.tier.lookup(NAMES)) == {"retry"}
            with pytest.raises(Exception, match="the epoch cannot be raised") as caught:
                await driver.tier.reset(1)
            lock(own_server, "sesame")
            assert not any(one.ok for one in (await driver.load(NAMES)).values())
    out, err = capfd.readouterr()
    said = f"{caught.value} {caught.value.__cause__} {caplog.text} {out} {err}"
    assert SECRET not in said
    assert "kvtier:b:" not in said
    assert "kvtier:m:" not in said
