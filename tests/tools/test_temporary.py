"""Temporary folders of tools that were killed go with the next run, or by `kvtier gc --temporary`; no others do."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support_tools import refusal, tool, tool_json

from faults.machine import warm
from kvtier.cli import temporary_folders
from kvtier.cli.temporary_folders import LOCK_NAME, abandoned_folders, remove_abandoned, temporary_folder
from kvtier.tools.bench.run import folder_beside

PREFIX = "kvtier-replay-"
REPLAY = ("replay", "--requests", "10000", "--block-bytes", "4KiB")
STACK = """
tiers:
  - type: gpu
  - {{type: cpu, cpu_bytes_to_use: 1MiB}}
  - {{type: fs, roots: [{root}], capacity: 1GiB, min_free_bytes: 0}}
"""
BENCH = ("--layout", "full:page=16KiB", "--seconds", "0.02", "--bytes", "2MiB", "--device", "cpu", "--sizes", "16KiB")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@contextmanager
def running(place: Path, at_work: str, *arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real tool in a process of its own, from the moment that there is what it makes in its temporary folder."""
    script = "from kvtier.cli import main; main()"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with warm.Popen(command, env={**os.environ, "TMPDIR": str(place)}, stdout=subprocess.DEVNULL) as process:
        try:
            while not list(place.glob(at_work)):
                assert process.poll() is None
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def killed_replay(place: Path) -> Path:
    """What a replay leaves in `place` that got SIGKILL."""
    with running(place, f"{PREFIX}*/fs/slab*", *REPLAY) as process:
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    (folder,) = place.iterdir()
    return folder


def test_the_next_replay_removes_what_a_killed_one_left(place: Path) -> None:
    left = killed_replay(place)
    with running(place, f"{PREFIX}*/fs/slab*", *REPLAY, "--seed", "1") as process:
        while left.exists():
            assert process.poll() is None
            time.sleep(0.01)


def test_gc_removes_what_a_killed_replay_left_and_leaves_a_living_one(place: Path) -> None:
    left = killed_replay(place)
    assert tool("gc", "--temporary", "--dry-run").stdout == f"{left} would be removed\n"
    assert left.exists()
    document = tool_json("gc", "--temporary")
    assert document == {"command": "gc", "version": 1, "dry_run": False, "removed": [str(left)]}
    assert list(place.iterdir()) == []
    with running(place, f"{PREFIX}*/fs/slab*", *REPLAY) as process:
        assert tool("gc", "--temporary").stdout == "there is nothing to remove\n"
        assert process.poll() is None
        assert list(place.glob(f"{PREFIX}*/fs/slab*"))


def test_gc_removes_what_a_killed_measurement_left_beside_a_root(tmp_path: Path, place: Path) -> None:
    root, stack = tmp_path / "root", tmp_path / "stack.yaml"
    stack.write_text(STACK.format(root=root))
    kill = "import os, signal; from kvtier_fs import FSBackend; FSBackend.close = lambda _: os.kill(os.getpid(), 9)"
    script = f"{kill}; from kvtier.cli import main; main()"
    done = warm.run([sys.executable, "-c", script, "bench", stack, *BENCH], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.glob(".kvtier-bench-*")
    assert list(left.glob("root/slab*"))
    assert tool_json("gc", "--temporary")["removed"] == []
    assert tool_json("gc", root, "--temporary")["removed"] == [str(left)]
    assert not left.exists()


def test_what_is_asked_for_is_one_thing(tmp_path: Path) -> None:
    assert "give one of" in refusal("gc", tmp_path, "--old", "--temporary")
    assert "ROOT" in refusal("gc", "--old")


def test_a_process_that_was_forked_keeps_the_folder_of_a_killed_one(place: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from kvtier.cli.temporary_folders import temporary_folder\n"
        f"with temporary_folder('{PREFIX}', sys.argv[1]):\n"
        "    child = os.fork()\n"
        "    if not child: sys.stdin.read(); os._exit(0)\n"
        "    print('made', flush=True)\n"
        "    time.sleep(600)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with warm.Popen([sys.executable, "-c", script, str(place)], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.read(4) == b"made"
        process.kill()
        process.wait()
        assert abandoned_folders(str(place)) == []
        process.stdin.close()
        while not abandoned_folders(str(place)):  # until the child has seen that
            time.sleep(0.01)


def abandoned(place: Path, name: str = f"{PREFIX}aaaaaaaa") -> Path:
    """A folder as a killed process leaves it."""
    folder = place / name
    (folder / "fs").mkdir(parents=True)
    (folder / "fs" / "slab-00000").write_bytes(b"x")
    (folder / "link").symlink_to(place)
    (folder / LOCK_NAME).touch(0o600)
    return folder


def test_what_is_not_ours_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = place.parent / "elsewhere"
    elsewhere.mkdir()
    abandoned(elsewhere)
    (place / f"{PREFIX}linked00").symlink_to(elsewhere / f"{PREFIX}aaaaaaaa")
    (place / f"{PREFIX}notours0").mkdir()
    (place / f"{PREFIX}notours0" / "thesis.txt").touch()
    (place / f"{PREFIX}ofafile0").touch()
    (abandoned(place, f"{PREFIX}withpipe") / LOCK_NAME).unlink()
    os.mkfifo(place / f"{PREFIX}withpipe" / LOCK_NAME)
    abandoned(place, "kvtier-replay")
    abandoned(place, f"my-{PREFIX}aaaaaaaa")
    before = sorted(path.relative_to(place.parent) for path in place.parent.rglob("*"))
    for folder in place.iterdir():
        if folder.name.startswith(PREFIX):
            assert not remove_abandoned(str(folder))
    assert tool_json("gc", "--temporary")["removed"] == []
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert not remove_abandoned(str(abandoned(place)))
    shutil.rmtree(place / f"{PREFIX}aaaaaaaa")
    assert sorted(path.relative_to(place.parent) for path in place.parent.rglob("*")) == before


def test_what_could_not_be_removed_is_removed_later(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = abandoned(place)
    with monkeypatch.context() as failing:
        failing.setattr(temporary_folders.shutil, "rmtree", lambda *_, **__: None)
        assert not remove_abandoned(str(left))
    assert (left / "fs" / "slab-00000").exists()
    assert remove_abandoned(str(left))
    assert list(place.iterdir()) == []


def once(call: Callable[..., Any], before: Callable[..., object], after: Callable[..., object]) -> Callable[..., Any]:
    """A call with something done before it and with its result, the first time only."""
    todo = [True]

    def wrapped(*arguments: Any, **more: Any) -> Any:
        first = todo and todo.pop()
        if first:
            before(*arguments)
        result = call(*arguments, **more)
        if first:
            after(result)
        return result

    return wrapped


@pytest.mark.parametrize("moment", ["made", "opened", "opened and held"])
def test_a_creator_that_a_sweep_overtakes_makes_another_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    held: list[int] = []

    def sweep(*_: object) -> None:
        (folder,) = place.iterdir()
        if moment == "opened and held":
            held.append(os.open(folder / LOCK_NAME, os.O_RDWR))
            flock(held[0], fcntl.LOCK_EX)
        else:
            assert remove_abandoned(str(folder))

    flock, nothing = fcntl.flock, lambda *_: None
    if moment == "made":
        monkeypatch.setattr(tempfile, "mkdtemp", once(tempfile.mkdtemp, nothing, sweep))
    else:
        monkeypatch.setattr(fcntl, "flock", once(flock, sweep, nothing))
    with temporary_folder(PREFIX) as folder:
        assert abandoned_folders(str(place)) == []
        assert (Path(folder) / LOCK_NAME).exists()
    for fd in held:
        os.close(fd)
    tool("gc", "--temporary")
    assert list(place.iterdir()) == []


def test_creators_and_sweeps_at_once_lose_no_living_folder(place: Path) -> None:
    """An open file has a lock of its own, so threads stand for processes."""
    lost: list[str] = []
    ended = threading.Event()

    def create() -> None:
        for _ in range(100):
            with temporary_folder(PREFIX, str(place)) as folder:
                (Path(folder) / "data").touch()
                for _ in range(3):
                    if not (Path(folder) / "data").exists():
                        lost.append(folder)

    def sweep() -> None:
        while not ended.is_set():
            for folder in abandoned_folders(str(place)):
                remove_abandoned(folder)

    for number in range(100):
        abandoned(place, f"{PREFIX}{number:08d}")
    creators, sweeps = ([threading.Thread(target=work) for _ in range(3)] for work in (create, sweep))
    for thread in (*creators, *sweeps):
        thread.start()
    for thread in creators:
        thread.join()
    ended.set()
    for thread in sweeps:
        thread.join()
    assert lost == []
    for folder in abandoned_folders(str(place)):
        assert remove_abandoned(folder)
    assert list(place.iterdir()) == []


def test_a_measurement_removes_what_is_beside_its_root(tmp_path: Path) -> None:
    left = abandoned(tmp_path, ".kvtier-bench-aaaaaaaa")
    with folder_beside(str(tmp_path / "root")) as own:
        assert Path(own).parent.parent == tmp_path
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []
