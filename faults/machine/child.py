"""A process of its own for what may hang: it receives what happens to the disk, and reports how far it is."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


class Line:
    """One end of a pipe between two processes: named messages, one by one, awaited until a deadline."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._buffer = b""

    def say(self, word: str, **more: Any) -> None:
        """Send a message with figures. Raises BrokenPipeError if the other process is gone."""
        os.write(self._writes, json.dumps({"word": word} | more).encode() + b"\n")

    def hear(self, word: str, seconds: float = 60.0) -> dict[str, Any]:
        """Wait for a message. Raises TimeoutError, or RuntimeError if another message comes or the other process is
        gone."""
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"did not hear {word!r} within {seconds:g} s")
            piece = os.read(self._reads, 65536)
            if not piece:
                raise RuntimeError(f"was gone before it said {word!r}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if said["word"] != word:
            raise RuntimeError(f"said {said} instead of {word!r}")
        return said

    def close(self) -> None:
        os.close(self._reads)
        os.close(self._writes)


class Child:
    """A forked process that runs `body(line)` and ends. Fork before this process has threads or open stacks."""

    def __init__(self, body: Callable[[Line], None]) -> None:
        down, up = os.pipe(), os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(down[1])
            os.close(up[0])
            self._live(body, Line(down[0], up[1]))
        os.close(down[0])
        os.close(up[1])
        self.line = Line(up[0], down[1])

    @staticmethod
    def _live(body: Callable[[Line], None], line: Line) -> None:
        status = 70
        try:
            body(line)
            status = 0
        except BaseException:
            line.say("raised", error=traceback.format_exc()[-1500:])
        finally:
            sys.stdout.flush()
            os._exit(status)

    def ended(self, seconds: float) -> int | None:
        """The exit status, None if it did not end in time; then it is killed, and dies once it can."""
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                if found:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.01)
            os.kill(self.pid, signal.SIGKILL)
            return None
        finally:
            self.line.close()
