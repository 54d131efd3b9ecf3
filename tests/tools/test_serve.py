"""`kvtier serve`: a process that engines connect to, its path, its end."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from urllib.request import urlopen

import pytest
from click.testing import CliRunner
from support_service import TestEngine, end, stack_process, stack_text
from support_tools import refusal

from kvtier.cli import main
from kvtier.service.channel import is_listening
from kvtier.tier.contract import LookupResult


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A stack file with a disk."""
    path = tmp_path / "stack.yaml"
    path.write_text(stack_text(root=tmp_path / "root"))
    return path


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "socket")


def test_two_engines_share_it_and_a_second_life_has_what_was_written_back(stack: Path, path: str) -> None:
    with stack_process(stack, path) as process:
        with TestEngine(path) as one, TestEngine(path) as two:
            assert one.store(range(16)) == ["stored"] * 16
            assert two.load(range(18)) == ["hit"] * 16 + ["missing"] * 2
            status, log = end(process)
            two.step_until(lambda: two.look(range(2)) == [LookupResult.MISS] * 2, "the end is seen")
        assert status == -signal.SIGTERM
        assert path in log
        assert "Traceback" not in log
    assert not Path(path).exists()
    assert not Path(f"{path}.lock").exists()
    with stack_process(stack, path), TestEngine(path) as three:
        assert three.load(range(16)) == ["hit"] * 16


def test_its_metrics_are_a_page_of_prometheus(stack: Path, path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "--metrics: [Errno 98]" in refusal("serve", stack, "--socket", path, "--metrics", str(port))
    assert "--metrics: is [HOST:]PORT" in refusal("serve", stack, "--metrics", "here")
    url = f"http://127.0.0.1:{port}/metrics"
    with stack_process(stack, path, options=("--metrics", f"127.0.0.1:{port}")):
        assert "kvtier_stored_blocks_total" in urlopen(url, timeout=10).read().decode()
        with TestEngine(path) as engine:
            assert engine.store(range(16)) == ["stored"] * 16
            page = urlopen(url, timeout=10).read().decode()
        assert 'kvtier_stored_blocks_total{tier="cpu"} 16.0' in page
        shown = CliRunner().invoke(main, ["top", url, "--once"])
        assert shown.exit_code == 0, shown.output
        assert "cpu" in shown.output


def test_a_second_process_at_a_path_is_refused_and_a_killed_one_is_replaced(stack: Path, path: str) -> None:
    with stack_process(stack, path) as process:
        assert "is the socket of another stack that runs" in refusal("serve", stack, "--socket", path)
        assert is_listening(path)
        end(process, signal.SIGKILL)
        assert Path(path).exists()
    with stack_process(stack, path), TestEngine(path) as engine:
        assert engine.store(range(4)) == ["stored"] * 4


def test_ctrl_c_ends_it_in_order(stack: Path, path: str) -> None:
    with stack_process(stack, path) as process:
        with TestEngine(path) as engine:
            engine.store(range(4))
        status, log = end(process, signal.SIGINT)
    assert status == 130
    assert log.splitlines()[-1] == "interrupted"


def test_the_socket_has_the_name_of_the_file_in_the_runtime_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = tmp_path / "mine.yaml"
    stack.write_text("tiers: []\n")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert "tiers" in refusal("serve", stack)
    folder = tmp_path / "private"
    folder.mkdir()
    stack.write_text(stack_text(runtime_dir=folder))
    (socket_folder,) = [folder / f"kvtier-{folder.stat().st_uid}"]
    socket_folder.mkdir(mode=0o755)
    assert "is no folder of this user of mode 0700" in refusal("serve", stack)
    socket_folder.chmod(0o700)
    (socket_folder / "mine.sock").mkdir()
    assert f"{socket_folder}/mine.sock exists, and is no socket" in refusal("serve", stack)


def test_a_path_that_is_too_long_or_nowhere_is_one_line(stack: Path, tmp_path: Path) -> None:
    assert "path too long" in refusal("serve", stack, "--socket", tmp_path / ("n" * 110))
    assert "No such file" in refusal("serve", stack, "--socket", tmp_path / "absent" / "socket")
