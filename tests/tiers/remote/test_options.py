"""Options of the tier `valkey`: checked without its library, and nothing secret in a stack file."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pydantic import ValidationError
from support_libraries import planned_without
from support_stack import PLAIN, stack_file

from kvtier.config import build_tiers, parse_stack
from kvtier.config.plan import plan_stack
from kvtier.errors import ConfigError
from kvtier_remote import ValkeyBackend, ValkeyOptions
from kvtier_remote.options import read_public, read_secret
from kvtier_remote.valkey.server_facts import facts_of


def options(**given: object) -> ValkeyOptions:
    return ValkeyOptions.model_validate({"type": "valkey", "servers": ["cache:6379"]} | given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"password": "hunter2"}, "write password_file: or password_env:"),
        ({"secret": "hunter2"}, "a stack file holds no secret"),
        ({"servers": []}, "at least 1"),
        ({"servers": ["cache"]}, "write host:port"),
        ({"servers": ["cache:0"]}, "write host:port"),
        ({"servers": ["redis://cache:6379"]}, "write host:port"),
        ({"prefix": "team a"}, "pattern"),
        ({"prefix": "a{b}"}, "pattern"),
        ({"password_file": "secret"}, "is not an absolute path"),
        ({"password_file": "/s", "password_env": "S"}, "keep one"),
        ({"username": "kvtier"}, "needs a password"),
        ({"expire": "2 days"}, "write a number with s, m, h or d"),
        ({"expire": "0s"}, "write a number with s, m, h or d"),
        ({"expire": 3600}, "write a number with s, m, h or d"),
        ({"request_timeout_seconds": 5}, "must be less than job_timeout_seconds"),
        ({"request_timeout_seconds": 61, "job_timeout_seconds": 90}, "less than or equal to 60"),
        ({"connections": 0}, "greater than or equal to 1"),
        ({"tls": {"verify": False}}, "ca_file"),
    ],
)
def test_what_is_wrong_is_refused_with_what_to_do(given, reason):
    with pytest.raises(ValidationError, match=reason) as caught:
        options(**given)
    assert "hunter2" not in "".join(error["msg"] for error in caught.value.errors())


def test_an_error_of_a_stack_file_names_the_tier_and_not_the_secret():
    with pytest.raises(ConfigError) as caught:
        stack_file(PLAIN, 4, {"type": "valkey", "servers": "['cache:6379']", "password": "hunter2"})
    assert str(caught.value).startswith("tiers[2]: password: a stack file holds no secret")
    assert "hunter2" not in str(caught.value)


def test_servers_are_asked_in_tls_and_within_a_second_unless_the_file_says_otherwise():
    given = options(expire="2d")
    assert (given.tls, given.request_timeout_seconds, given.job_timeout_seconds) == (True, 1.0, 5.0)
    assert given.expire == 2 * 86400
    assert not given.allow_unbounded


def test_the_password_comes_from_a_file_of_ours_or_from_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "password"
    file.write_text("sesame\n")
    file.chmod(0o600)
    assert options(password_file=str(file)).password() == "sesame"
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "open")
    assert options(password_env="KVTIER_TEST_PASSWORD").password() == "open"
    assert options().password() is None
    monkeypatch.delenv("KVTIER_TEST_PASSWORD")
    with pytest.raises(ConfigError, match="password_env: the environment variable KVTIER_TEST_PASSWORD is not set"):
        options(password_env="KVTIER_TEST_PASSWORD").password()
    file.chmod(0o604)
    with pytest.raises(ConfigError, match=r"password_file: .*chmod o-rwx"):
        options(password_file=str(file)).password()
    file.write_text("\n")
    file.chmod(0o600)
    for path, reason in ((file, "is empty"), (tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"password_file: {path}: {reason}"):
            options(password_file=str(path)).password()
    with pytest.raises(ConfigError, match=r"tls.ca_file: .*No such file"):
        options(tls={"ca_file": str(tmp_path / "absent")}).authorities()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", [read_secret, read_public])
def test_a_file_that_has_no_end_is_refused(tmp_path, read):
    os.mkfifo(tmp_path / "pipe", 0o600)
    long = tmp_path / "long"
    with long.open("wb") as file:
        file.truncate(5 << 20)
    long.chmod(0o600)
    for path, reason in ((tmp_path / "pipe", "is no plain file"), (long, "is larger than")):
        with pytest.raises(ConfigError, match=f"the_key: {path}: {reason}"):
            read(str(path), "the_key")


@pytest.mark.parametrize(
    ("info", "given", "key"),
    [
        ({"maxmemory": "0", "maxmemory_policy": "noeviction"}, {}, "allow_unbounded"),
        ({"maxmemory": "1000", "maxmemory_policy": "volatile-lru"}, {}, "expire"),
        ({"maxmemory": "0", "maxmemory_policy": "volatile-ttl"}, {"allow_unbounded": True}, "expire"),
    ],
)
def test_a_server_whose_bounds_do_not_hold_is_refused(info, given, key):
    with pytest.raises(ConfigError) as caught:
        facts_of(info, options(**given))
    assert caught.value.path == key


@pytest.mark.parametrize(
    ("info", "given", "capacity", "note"),
    [
        ({"maxmemory": "1000", "maxmemory_policy": "allkeys-lru"}, {}, 1000, ""),
        ({"maxmemory": "1000", "maxmemory_policy": "volatile-lru"}, {"expire": "1h"}, 1000, ""),
        ({"maxmemory": "1000", "maxmemory_policy": "noeviction"}, {}, 1000, "nothing more is stored"),
        ({"maxmemory": "0", "total_system_memory": "9000"}, {"allow_unbounded": True}, 9000, "has no maxmemory"),
    ],
)
def test_the_bounds_of_a_server_are_told(info, given, capacity, note):
    facts = facts_of(info, options(**given))
    assert facts.capacity_bytes == capacity
    assert note in "".join(facts.notes)
    assert bool(facts.notes) == bool(note)


def test_without_the_library_a_stack_file_is_valid_and_opening_says_what_to_install():
    """In a process of its own, because others have imported it here. A check with a probe says so as well."""
    unprobed, probed = planned_without("glide_sync", "{type: valkey, servers: [cache:6379]}")
    install = "needs the package valkey-glide-sync; pip install 'kvtier[valkey]'"
    assert (unprobed.notes, unprobed.problems) == ((f"this tier {install}",), [])
    assert (probed.notes, probed.problems) == ((), [f"tiers[2].type: {install}"])


def test_the_library_is_imported_by_nothing_but_opening():
    code = "import sys, kvtier_remote; sys.exit(any(name.startswith('glide') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_a_plan_without_a_probe_needs_no_server():
    text = "tiers: [{type: gpu}, {type: cpu, cpu_bytes_to_use: 1GiB}, {type: valkey, servers: ['nowhere.invalid:1']}]"
    tiers = build_tiers(parse_stack(text))
    assert isinstance(tiers[2], ValkeyBackend)
    plan, problems = plan_stack(tiers, PLAIN)
    assert not problems
    assert (plan.tiers[2].medium, plan.tiers[2].capacity_bytes, plan.tiers[2].num_blocks) == ("REMOTE", None, None)
