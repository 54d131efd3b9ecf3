"""The half of a benchmark that needs another Python: a child process, one JSON object a line each way.

`rate` is what both halves measure with, so that they measure the same thing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Work = Callable[..., dict[str, Any]]

HERE = Path(__file__).resolve().parent.parent


class PeerFailed(RuntimeError):
    """The other half ended or could not be started; the message says what it said last."""


class Peer:
    """A child that answers questions. `with Peer(...) as peer` ends it."""

    def __init__(self, python: str, module: str, checkout: Path = HERE) -> None:
        command = [python, "-m", module]
        where = {**os.environ, "PYTHONPATH": os.fspath(checkout)}
        try:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=checkout, env=where
            )
        except OSError as error:
            raise PeerFailed(f"{python}: {error.strerror}") from error

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait(60)
        self._child.stdout.close()

    def ask(self, work: str, **details: Any) -> dict[str, Any]:
        """Have one piece of work done and return its figures. Raises PeerFailed."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps({"work": work, **details}) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except OSError as error:
            raise PeerFailed(f"the other half ended: {error}") from error
        if not line:
            raise PeerFailed("the other half ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise PeerFailed(str(answer["failed"]))
        return answer


def serve(works: Mapping[str, Work]) -> None:
    """The child's side: do what each line asks for until there are no more."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = works[question.pop("work")](**question)
        except Exception as error:  # the other side decides what that means
            answer = {"failed": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


def rate(prepare: Callable[[], T], work: Callable[[T], int], seconds: float) -> float:
    """How many a second `work` does, over at least `seconds` spent in it; `prepare` is not counted."""
    spent, done = 0.0, 0
    while spent < seconds:
        thing = prepare()
        start = time.perf_counter()
        done += work(thing)
        spent += time.perf_counter() - start
    return done / spent


def prefix_of(keys: Sequence[bytes], batch: int, turn: int) -> list[bytes]:
    """Some neighbouring keys as an engine would bring them: equal to those stored, other objects."""
    first = turn * batch % (len(keys) - batch + 1)
    return [key[:1] + key[1:] for key in keys[first : first + batch]]
