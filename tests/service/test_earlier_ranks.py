"""What the ranks of earlier releases left beside the folders of a stack file: adopted, or named."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from support_counts import full_alone
from support_private import private_socket
from support_service import TestEngine, kill_listener, peer_pid, stack_text, until

from kvtier.config import parse_stack
from kvtier.options import folders_of
from kvtier.service.earlier_ranks import adopt_ranks

pytestmark = pytest.mark.usefixtures("warm_starts")


def stored(folder: str, root: Path) -> None:
    """Have a root of its own keep blocks, as that of a rank."""
    path = private_socket(stack_text(root=root), folder)
    with TestEngine(path) as engine:
        assert engine.store(range(8)) == ["stored"] * 8
        pid = peer_pid(path)
    os.kill(pid, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{pid}").exists(), "it has written back and ended")


def adopted(stack: str) -> tuple[list[str], list[str]]:
    """(the roots that are used, the lines)."""
    lines: list[str] = []
    config = adopt_ranks(parse_stack(stack), lines.append)
    return [folder for options in config.tiers for folder in folders_of(options)], lines


@pytest.mark.parametrize("empty", [True, pytest.param(False, marks=full_alone())])
@pytest.mark.parametrize("rank", [0, pytest.param(7, marks=full_alone())])
def test_the_one_rank_of_an_earlier_release_is_warm(folder: str, tmp_path: Path, rank: int, empty: bool) -> None:
    root = tmp_path / "root"
    stored(folder, tmp_path / f"root-{rank}")
    stack = stack_text(root=root)
    if not empty:
        root.rmdir()
    for _ in range(2):  # and stays so after a kill
        path = private_socket(stack, folder)
        with TestEngine(path) as engine:
            assert engine.load(range(8)) == ["hit"] * 8
            kill_listener(path)
    assert not root.exists() or not any(root.iterdir())


def test_what_is_not_used_is_named_with_its_size_and_the_command(folder: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for rank in (0, 1):
        stored(folder, tmp_path / f"root-{rank}")
    stack = stack_text(root=root)
    roots, lines = adopted(stack)
    assert roots == [str(root)]
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert line.startswith(f"{root}-{rank} (")
        assert f"`kvtier gc {root}-{rank} --older-than 1s`" in line
        assert "MiB" in line or "KiB" in line


def test_the_root_of_the_stack_file_is_used_where_it_holds_blocks(folder: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for one in (root, tmp_path / "root-0"):
        stored(folder, one)
    roots, lines = adopted(stack_text(root=root))
    assert roots == [str(root)]
    assert [line.split()[0] for line in lines] == [f"{root}-0"]


def test_a_folder_that_holds_no_blocks_or_is_in_use_is_neither_used_nor_named(folder: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (tmp_path / "root-3").mkdir()
    (tmp_path / "root-3" / "notes").write_text("mine")
    assert adopted(stack_text(root=root)) == ([str(root)], [])
    with TestEngine(private_socket(stack_text(root=tmp_path / "root-0"), folder)) as engine:
        assert engine.store(range(8)) == ["stored"] * 8
        assert adopted(stack_text(root=root)) == ([str(root)], [])


def test_files_of_ranks_are_named(tmp_path: Path) -> None:
    for name in ("state-0", "trace-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(4096))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "stats-0"))
    stack = stack_text(
        state_dir=tmp_path / "state", stats_socket=tmp_path / "stats", record=f"{{folder: {tmp_path / 'trace'}}}"
    )
    _, lines = adopted(stack)
    assert [line.split(" (")[0] for line in lines] == [
        f"state_dir: {tmp_path}/state-0",
        f"stats_socket: {tmp_path}/stats-0",
        f"record: {tmp_path}/trace-1",
    ]
    assert "(4 KiB)" in lines[0]
