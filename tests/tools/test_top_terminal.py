"""`kvtier top` in a real terminal of 80 columns: the screen, the keys, a source that goes and comes back, the end."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support_driver import ServedStack
from support_stack import PLAIN, Engine, fs, parts_of, stack_file

from kvtier.metrics.exporter import metrics_server

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
COLUMNS, LINES = 80, 24
TOP = "from kvtier.cli import main; main()"


class Terminal:
    """A terminal with a program in it, in a tmux server of its own."""

    def __init__(self, folder: str) -> None:
        self._server = ["tmux", "-u", "-f", "/dev/null", "-S", f"{folder}/tmux"]

    def _tmux(self, *arguments: str) -> str:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        command = [*self._server, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    def start(self, command: str) -> None:
        """Run a command of the shell; the terminal stays when it has ended, with its exit status and its modes."""
        after = f"{command}; echo exit status $?; stty -a; cat"
        self._tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), after)

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def shows(self, condition: Callable[[str], bool]) -> str:
        """The screen, once it is as it should; a screen that never is fails by the test's time limit."""
        while not condition(shown := self.screen()):
            assert "Traceback" not in shown, shown
        return shown

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    def resize(self, columns: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(LINES))

    def end(self) -> None:
        subprocess.run([*self._server, "kill-server"], check=False, capture_output=True)


@pytest.fixture
def terminal(short_folder: str) -> Iterator[Terminal]:
    one = Terminal(short_folder)
    yield one
    one.end()


def open_stack(path: str, *below: str) -> ServedStack:
    return ServedStack(parts_of(stack_file(PLAIN, 16, *below, stats_socket=path), Engine(PLAIN, 8)))


@pytest.mark.parametrize("where", ["socket", "url"])
def test_a_disk_has_a_line_beside_the_cpu_tier(
    short_folder: str, terminal: Terminal, tmp_path: Path, where: str
) -> None:
    path = f"{short_folder}/s"
    with open_stack(path, fs(tmp_path / "root")) as stack, metrics_server(stack.served.stats, 0) as port:
        address = path if where == "socket" else f"http://127.0.0.1:{port}/metrics"
        terminal.start(f"{shlex.quote(sys.executable)} -c {shlex.quote(TOP)} top {address} --interval 0.05")
        shown = terminal.shows(lambda text: "q quit" in text)
        lines = [line.split() for line in shown.splitlines()]
        at = [number for number, line in enumerate(lines) if line[:1] in (["cpu"], ["fs"])]
        assert [lines[number][0] for number in at] == ["cpu", "fs"], shown
        assert [lines[number + 1][0] for number in at] == ["closed" if where == "socket" else "up", "closed"], shown
        assert "…" not in shown
        assert "written below the CPU tier" in shown
        stack.engine.hold_back("a test")
        stack.step()
        terminal.shows(lambda text: "held_back" in text)
        terminal.press("q")
        assert "exit status 0" in terminal.shows(lambda text: "exit status" in text)


def test_keys_a_lost_stack_another_width_and_the_end(short_folder: str, terminal: Terminal) -> None:
    path = f"{short_folder}/s"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(TOP)} top {path} --interval 0.05"
    with open_stack(path):
        terminal.start(command)
        shown = terminal.shows(lambda text: "q quit" in text)
        lines = shown.splitlines()
        for title in ("tier", "state", "used", "hits", "load", "store", "p50/p99", "dropped/s", "errors", "coldest"):
            assert any(title in line.split() for line in lines), (title, shown)
        for key, effect in (("s", "by hits"), ("f", "FROZEN"), ("r", "since reset")):
            assert effect not in terminal.screen()
            terminal.press(key)
            terminal.shows(lambda text, effect=effect: effect in text)
        terminal.press("f")
        terminal.shows(lambda text: "FROZEN" not in text)
        rule = max(line.count("─") for line in lines)
        terminal.resize(60)
        terminal.shows(lambda text: 0 < max(line.count("─") for line in text.splitlines()) < rule)
        terminal.resize(COLUMNS)
    terminal.shows(lambda text: "LOST, trying again" in text and "cpu" in text)
    with open_stack(path):
        terminal.shows(lambda text: "LOST" not in text and "cpu" in text)
        terminal.press("q")
        ended = terminal.shows(lambda text: "exit status" in text and " iexten" in text)
    assert "exit status 0" in ended
    assert {"icanon", "echo", "isig"} <= set(ended.split())


def test_the_terminal_is_as_before_after_ctrl_c(short_folder: str, terminal: Terminal) -> None:
    path = f"{short_folder}/s"
    with open_stack(path):
        terminal.start(f"{shlex.quote(sys.executable)} -c {shlex.quote(TOP)} top {path} --interval 0.05")
        terminal.shows(lambda text: "q quit" in text)
        terminal.press("C-c")
        ended = terminal.shows(lambda text: "exit status" in text and " iexten" in text)
    assert "exit status 130" in ended
    assert {"icanon", "echo", "isig"} <= set(ended.split())
    assert os.listdir(short_folder) == ["tmux"]
