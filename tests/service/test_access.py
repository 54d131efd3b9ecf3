"""Users and groups that may reach a service: `allow` and `group` of its stack file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support_service import TestEngine, stack_process, stack_text

from faults.machine import warm
from kvtier.config.access import UNMAPPED, UserAccess
from kvtier.errors import ConfigError

USER, GROUP = 54321, 43210
ENGINE = """
import os, sys
sys.path.insert(0, {support!r})
from support_service import TestEngine
path, user, *groups = sys.argv[1:]
with TestEngine(path, "root") as engine:  # imports all, while the folder of these tests can be read
    engine.load(range(4))
os.setgroups([int(group) for group in groups])
os.setgid(int(user))
os.setuid(int(user))
with TestEngine(path, "other") as engine:
    print(engine.load(range(4)), engine.store(range(8, 12)))
"""


def engine_of(user: int, path: str, *groups: int) -> subprocess.CompletedProcess[str]:
    """An engine of another user, which loads what the first one stored, and stores."""
    code = ENGINE.format(support=str(Path(__file__).parents[1] / "support"))
    words = [sys.executable, "-c", code, path, *map(str, (user, *groups))]
    return warm.run(words, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_engines_of_users_that_are_allowed_share_rows(short_folder: str, tmp_path: Path) -> None:
    os.chmod(short_folder, 0o755)
    stack, path = tmp_path / "stack.yaml", f"{short_folder}/socket"
    stack.write_text(stack_text(allow=[USER], group=GROUP))
    with stack_process(stack, path), TestEngine(path, "one") as one:
        assert (os.stat(path).st_gid, os.stat(path).st_mode & 0o777) == (GROUP, 0o660)
        assert one.store(range(4)) == ["stored"] * 4
        found = engine_of(USER, path, GROUP)
        assert found.stdout == f"{['hit'] * 4} {['stored'] * 4}\n", found.stderr
        assert one.load(range(8, 12)) == ["hit"] * 4
        assert "Permission denied" in engine_of(USER, path).stderr
        assert f"user {USER + 1} is not allowed, see `allow`" in engine_of(USER + 1, path, GROUP).stderr
        assert "Permission" not in engine_of(USER + 1, path, GROUP).stderr


def test_users_are_numbers_or_names_of_this_host() -> None:
    access = UserAccess(["nobody", 7], "root")
    assert (access.group, access.users) == (0, {os.geteuid(), 7, UNMAPPED})
    assert access.fault(7) == access.fault(os.geteuid()) == ""
    assert access.fault(8)
    assert access.fault(UNMAPPED), "Linux shows all users of other namespaces as this one"
    with pytest.raises(ConfigError, match="allow: there is no user 'no-such-user' on this host"):
        UserAccess(["no-such-user"])
    with pytest.raises(ConfigError, match="group: there is no group 'no-such-group' on this host"):
        UserAccess(group="no-such-group")


@pytest.mark.parametrize("name", ["a\0b", -1, (1 << 32) - 1, 99999999999999])
def test_what_no_user_or_group_can_be_is_one_line(name: int | str) -> None:
    with pytest.raises(ConfigError, match="allow: there is no user"):
        UserAccess([name])
    with pytest.raises(ConfigError, match="group: there is no group"):
        UserAccess(group=name)


def test_a_socket_that_cannot_be_given_to_the_group_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="group: the socket cannot be given to group 0: No such file"):
        UserAccess(group=0).share(str(tmp_path / "socket"))
