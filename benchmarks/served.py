"""A `kvtier serve` in a process of its own, for benchmarks: `with served(text, folder) as service`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.service.channel import is_listening

PATIENCE_SECONDS = 120.0
PAUSE_SECONDS = 0.02


class Served:
    """A stack process that listens at `path`. Its log is in the file `log`."""

    def __init__(self, path: str, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.path = path
        self.log = log
        self._process = process

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far."""
        return time.clock_gettime(~self._process.pid << 3 | 2)  # clock_getcpuclockid(3)

    def wait_for_line(self, text: str, timeout_seconds: float) -> str:
        """The first line of the log with this text. Raises RuntimeError where none comes in time, or it has ended."""
        until = time.monotonic() + timeout_seconds
        while True:
            for line in self.log.read_text().splitlines():
                if text in line:
                    return line
            if time.monotonic() > until or self._process.poll() is not None:
                raise RuntimeError(f"the service has not said {text!r}: {self.log.read_text()[-2000:]}")
            time.sleep(PAUSE_SECONDS)


@contextmanager
def served(text: str, folder: Path) -> Iterator[Served]:
    """The stack of a YAML text, once it listens, with its socket and its log in a folder. Ends with SIGTERM.

    Raises RuntimeError with the log where it does not listen.
    """
    stack, path, log = folder / "stack.yaml", str(folder / "socket"), folder / "log"
    stack.write_text(text)
    command = [sys.executable, "-c", "from kvtier.cli import main; main()", "serve", str(stack), "--socket", path]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            until = time.monotonic() + PATIENCE_SECONDS
            while not is_listening(path):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the service does not listen: {log.read_text()[-2000:]}")
                time.sleep(PAUSE_SECONDS)
            yield Served(path, log, process)
        finally:
            process.terminate()
