"""The seccomp profile, in force: io_uring works under it, and what containers must not do does not."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest
from support_paths import PROJECT

from faults.machine import warm

PROFILE = PROJECT / "examples" / "deploy" / "seccomp.json"
IO_URING = {"io_uring_setup", "io_uring_enter", "io_uring_register"}
CHILD = PROJECT / "tests" / "support" / "support_seccomp.py"


def run_under(profile: Path, tmp_path: Path) -> dict[str, object]:
    """What a process under a profile has done and was refused."""
    command = [sys.executable, str(CHILD), str(profile), str(tmp_path / "root")]
    run = warm.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found: dict[str, object] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.fixture(autouse=True)
def _library() -> None:
    try:
        import pyseccomp  # noqa: F401
    except RuntimeError as error:
        pytest.skip(f"libseccomp is not installed: {error}")


def test_kvtier_moves_blocks_by_io_uring_and_a_container_gets_no_further(tmp_path: Path) -> None:
    found = run_under(PROFILE, tmp_path)
    assert found["io_engine"] == "io_uring"
    assert found["loaded"] == 8
    for refused in ("unshare", "mount", "bpf", "user_namespace", "vsock"):
        assert found[refused] == errno.EPERM, refused
    assert found["clone3"] == errno.ENOSYS, "libraries try clone then"
    assert found["unix"] == 0
    assert int(str(found["known"])) > 250


def test_without_the_three_calls_threads_do_the_work(tmp_path: Path) -> None:
    profile = json.loads(PROFILE.read_text())
    profile["syscalls"] = [rule for rule in profile["syscalls"] if not IO_URING & set(rule["names"])]
    usual = tmp_path / "usual.json"
    usual.write_text(json.dumps(profile))
    found = run_under(usual, tmp_path)
    assert (found["io_engine"], found["loaded"]) == ("threads", 8)


def test_no_call_has_two_rules_but_personality() -> None:
    names = [name for rule in json.loads(PROFILE.read_text())["syscalls"] for name in rule["names"]]
    assert {name for name in names if names.count(name) > 1} == {"personality"}
