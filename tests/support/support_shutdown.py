"""Whole lives of processes with open stacks, ended in every way there is, and what they left behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support_paths import PROJECT
from support_shutdown_lives import BLOCKS, LAYOUT, NAMES, parts, runtime_of
from support_stack import Engine, until, whole

from faults.machine import warm
from kvtier.errors import RootBusyError
from kvtier.stack import TierStack
from kvtier.types.jobs import JobKind
from kvtier_fs.io.uring import probe_uring

IO_ENGINES = [
    "threads",
    pytest.param("io_uring", marks=pytest.mark.skipif(bool(probe_uring()), reason="no io_uring here")),
]

FREE_SECONDS = 60.0
ENDS = {"end": 0, "exit": 3, "raise": 1}
"""How a life may end, and its exit status then."""


@dataclass(frozen=True)
class Ended:
    """How a life ended: exit status (None: it hung and was killed), what it said, what it printed to stderr."""

    status: int | None
    said: list[dict[str, Any]]
    stderr: str


class Lives:
    """Lives, each in a fresh process that opened nothing yet and ends as real ones do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def begin(self, life: str, root: Path, io_engine: str = "threads", how: str = "", seconds: float = 60.0) -> Path:
        """Start a life; returns the file that its words go to."""
        self._count += 1
        script = Path(__file__).with_name("support_shutdown_lives.py")
        command = [sys.executable, script, life, root, io_engine, how]
        out, err = (self._folder / f"{self._count}.{name}" for name in ("out", "err"))
        with out.open("w") as stdout, err.open("w") as stderr:
            self._process = warm.Popen(command, whole_end=True, cwd=PROJECT, stdout=stdout, stderr=stderr)
        self._seconds = seconds
        return out

    def end(self) -> Ended:
        """Wait for the life that was begun."""
        status: int | None = None
        try:
            status = self._process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        out, err = (self._folder / f"{self._count}.{name}" for name in ("out", "err"))
        return Ended(status, words(out), err.read_text())

    def live(self, life: str, root: Path, io_engine: str = "threads", how: str = "") -> Ended:
        """A whole life."""
        self.begin(life, root, io_engine, how)
        return self.end()


def quiet(stderr: str) -> bool:
    """True for no word but those that closing may log: how much it gave up."""
    return all(line.startswith(("event=closed ", "closed: ")) for line in stderr.splitlines())


def own_traceback(stderr: str) -> bool:
    """True for the traceback of an uncaught `ValueError("ours")` and nothing else at all."""
    stderr = "".join(line for line in stderr.splitlines(keepends=True) if not quiet(line))
    return (
        stderr.startswith("Traceback")
        and stderr.count("Traceback") == 1
        and stderr.endswith("ValueError: ours\n")
        and "Exception ignored" not in stderr
        and "destroyed" not in stderr
    )


async def right_bytes_or_misses(root: Path, io_engine: str) -> int:
    """Open the root anew, load every block and compare every byte. Returns how many blocks were there."""
    engine, one = Engine(LAYOUT, BLOCKS), whole(NAMES)
    stack = await _opened(engine, root, io_engine)
    try:
        result = await stack.run(stack.job(JobKind.LOAD, [one]))
    finally:
        await stack.close()
    assert not engine.wrong(one, result.outcomes[0])
    shutil.rmtree(runtime_of(str(root)), ignore_errors=True)
    return sum(outcome.ok for outcome in result.outcomes[0])


async def _opened(engine: Engine, root: Path, io_engine: str) -> TierStack:
    """An open stack over a root. A stack process over it writes back and ends first."""
    until = time.monotonic() + FREE_SECONDS
    while True:
        stack = TierStack(parts(engine, str(root), io_engine))
        try:
            await stack.open()
        except RootBusyError:
            assert time.monotonic() < until, "the root is not free"
            await asyncio.sleep(0.05)
        else:
            return stack


async def first_word(said: Path, name: str) -> Any:
    """What a life that goes on says of something, once it has said it."""
    await until(lambda: said.read_text().endswith("\n"), 60.0)
    return words(said)[0][name]


def words(said: Path) -> list[dict[str, Any]]:
    """What a life has said."""
    return [json.loads(line) for line in said.read_text().splitlines()]


def run_in_child(body: Callable[[], None]) -> int:
    """Fork, run `body` in the child, which leaves by `os._exit`. Returns its exit status: 0 if nothing was raised."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 70
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
