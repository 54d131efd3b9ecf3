"""A service manager for one `kvtier serve`, as systemd is: it keeps descriptors, and hands them to the next start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from support_service import SECONDS, until

from faults.machine import warm
from kvtier.service.channel import is_listening

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
        self.kept: dict[str, int] = {}
        self.said: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self._stack, self._path = stack, path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._address = f"{path}.notify"
        self._socket.bind(self._address)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            data, found, _, _ = socket.recv_fds(self._socket, 4096, 4)
            if not data:
                return
            fields = dict(line.split("=", 1) for line in data.decode().splitlines())
            if fields.pop("FDSTOREREMOVE", "") == "1" and (fd := self.kept.pop(fields["FDNAME"], -1)) >= 0:
                os.close(fd)
            elif "FDSTORE" in fields:
                (self.kept[fields["FDNAME"]],) = found
            else:
                self.said += [f"{name}={value}" for name, value in fields.items()]

    def start(self, **environment: str) -> None:
        """Start the service with what is kept, and wait until it listens."""
        kept = dict(self.kept)
        variables = {"LISTEN_FDS": str(len(kept)), "LISTEN_FDNAMES": ":".join(kept)} if kept else {}
        descriptors = ",".join(map(str, kept.values()))
        command = [sys.executable, "-c", START, descriptors, "serve", str(self._stack), "--socket", self._path]
        env = {**os.environ, "NOTIFY_SOCKET": self._address, **variables, **environment}
        fds = tuple(kept.values())
        self.process = warm.Popen(command, env=env, pass_fds=fds, stderr=subprocess.PIPE, text=True)
        process = self.process
        until(lambda: is_listening(self._path) or process.poll() is not None, f"{self._path} listens")
        assert process.poll() is None, process.communicate()

    def end(self, number: int) -> str:
        """End the service by a signal; what it wrote to stderr."""
        assert self.process is not None
        os.kill(self.process.pid, number)
        _, errors = self.process.communicate(timeout=SECONDS)
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
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"", self._address)
        self._thread.join(SECONDS)
        self._socket.close()
        self.drop()
