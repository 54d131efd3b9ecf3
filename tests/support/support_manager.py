"""A service manager for one `kvtier serve`, as systemd is: it keeps descriptors, and hands them to the next start."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from support_service import SECONDS, until

from faults.machine import warm
from kvtier.service.channel import is_listening
from kvtier.service.supervisor import Notices

START = """
import os, sys
kept = [os.dup2(int(fd), 100 + at) for at, fd in enumerate(filter(None, sys.argv[1].split(",")))]
os.closerange(3, 100)
for at, fd in enumerate(kept):
    os.dup2(fd, 3 + at)
    os.close(fd)
os.environ["LISTEN_PID"] = str(os.getpid())
del sys.argv[1]
from kvtier.cli import main
main()
"""


class Manager:
    """Starts `kvtier serve STACK --socket PATH` again and again. `kept` are the descriptors by name, as FDSTORE says.

    `said` are the other assignments, in order. The service is killed at the end.
    """

    def __init__(self, stack: Path, path: str) -> None:
        self._notices = Notices()
        self.said: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self._stack, self._path = stack, path
        self._started = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def kept(self) -> dict[str, int]:
        """What is kept, as `Supervisor` does."""
        return self._notices.kept

    def _listen(self) -> None:
        while not self._ends.is_set():
            if not self._started:
                time.sleep(0.001)
            elif select.select([self._notices], [], [], 0.01)[0]:
                self.said += [f"{name}={value}" for name, value in self._notices.receive(self._started).items()]

    def start(self, **environment: str) -> None:
        """Start the service with what is kept, and wait until it listens."""
        kept = dict(self.kept)
        variables = {"LISTEN_FDS": str(len(kept)), "LISTEN_FDNAMES": ":".join(kept)} if kept else {}
        descriptors = ",".join(map(str, kept.values()))
        command = [sys.executable, "-c", START, descriptors, "serve", str(self._stack), "--socket", self._path]
        env = {**os.environ, "NOTIFY_SOCKET": self._notices.address, **variables, **environment}
        fds = tuple(kept.values())
        self._started = 0  # the next one's notices wait until it is known which process it is
        self.process = process = warm.Popen(command, env=env, pass_fds=fds, stderr=subprocess.PIPE, text=True)
        self._started = process.pid
        until(lambda: is_listening(self._path) or process.poll() is not None, f"{self._path} listens")
        assert process.poll() is None, process.communicate()

    def end(self, number: int) -> str:
        """End the service by a signal; what it wrote to stderr."""
        assert self.process is not None
        os.kill(self.process.pid, number)
        _, errors = self.process.communicate(timeout=SECONDS)
        until(lambda: not select.select([self._notices], [], [], 0)[0], "its last notices are read")
        self.process = None
        return errors

    def drop(self) -> None:
        """Forget what is kept, as at a stop."""
        for fd in self.kept.values():
            os.close(fd)
        self.kept.clear()

    def __enter__(self) -> Manager:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self._ends.set()
        self._thread.join(SECONDS)
        self._notices.close()
