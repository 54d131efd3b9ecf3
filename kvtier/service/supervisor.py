"""A parent of a stack process that keeps its rows and starts it again, as systemd does, where there is none.

    python -m kvtier.service.supervisor ARGUMENTS OF KVTIER...

It loads little, does nothing with the descriptors that it keeps, and speaks the protocol of sd_notify(3), so the stack
process sees no difference. It ends with a stack process that ends by itself or was not ready once; a kill of both, such
as that of a container, takes the rows too.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import fcntl
import logging
import os
import secrets
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from kvtier.errors import ConfigError
from kvtier.service.service_manager import FIRST_FD

PROGRAM = (sys.executable, "-c", "from kvtier.cli import main; main()")
KEPT_MAX = 8
"""Descriptors that are kept at most."""
WATCHDOG_SECONDS = 10.0
"""A stack process whose event loop does not run for so long is ended."""
SILENCE_PART_SECONDS = 1.0
"""That time is waited for in parts: one in which this process was frozen, such as with its container, counts once."""
ABORT_SECONDS = 2.0
"""How long it has to write down where it is then."""
PAUSES_SECONDS = (0.1, 0.1, 1.0, 5.0)
"""Pauses before the starts after one that did not become ready; there is no other one after the last."""
_MESSAGE_BYTES_MAX = 4096
_DESCRIPTORS_MAX = 16
_CREDENTIALS = struct.Struct("3i")
_ABOVE = 64
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


class Notices:
    """The socket that a stack process sends its notices to, and `kept`, the descriptors that came with them by name."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.address = f"@kvtier-{secrets.token_hex(16)}"
        self._socket.bind(f"\0{self.address[1:]}")

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def receive(self, process: int) -> dict[str, str]:
        """The assignments of the next notice of a process, but those about descriptors; empty if it is another's.

        Raises BlockingIOError if none waits.
        """
        size = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * _DESCRIPTORS_MAX)
        data, ancillary, _, _ = self._socket.recvmsg(_MESSAGE_BYTES_MAX, size, socket.MSG_CMSG_CLOEXEC)
        found, sender = list[int](), 0
        for _, kind, content in ancillary:
            if kind == socket.SCM_RIGHTS:
                found += array.array("i", content[: len(content) // 4 * 4])
            elif kind == socket.SCM_CREDENTIALS:
                sender, _, _ = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])
        lines = data.decode(errors="replace").splitlines() if sender == process > 0 else []
        fields = {name: value for name, _, value in (line.partition("=") for line in lines)}
        name, stores, removes = (fields.pop(each, "") for each in ("FDNAME", "FDSTORE", "FDSTOREREMOVE"))
        fields.pop("FDPOLL", "")
        if stores or removes:
            self._drop(name)
        if stores and found and len(self.kept) < KEPT_MAX:
            self.kept[name] = found.pop(0)
        for fd in found:
            os.close(fd)
        return fields

    def _drop(self, name: str) -> None:
        if name in self.kept:
            os.close(self.kept.pop(name))

    def close(self) -> None:
        """Keep nothing any more. Idempotent."""
        for name in list(self.kept):
            self._drop(name)
        self._socket.close()


class Supervisor:
    """The parent of one stack process after another, each with these arguments of the command `kvtier`."""

    def __init__(self, arguments: Sequence[str], watchdog_seconds: float = WATCHDOG_SECONDS) -> None:
        self._command = [*PROGRAM, *arguments]
        self._watchdog_seconds = watchdog_seconds
        self._notices = Notices()
        self._process = 0
        self._ended: asyncio.Future[int]
        self._silent_seconds = 0.0
        self._ready = self._has_been_ready = self._stops = False

    async def run(self) -> int:
        """Have the stack served until it is to stop. Returns the exit status; `kvtier` has said why it is not 0."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGHUP, self._send, signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_reader(self._notices, self._on_notice)
        try:
            return await self._serve()
        finally:
            loop.remove_reader(self._notices)
            self._notices.close()

    async def _serve(self) -> int:
        failures = 0
        while True:
            status = await self._life()
            failures = 0 if self._ready else failures + 1
            if self._stops and status in _CLEAN:
                return 0
            if self._stops or not self._has_been_ready or failures == len(PAUSES_SECONDS):
                return status if status >= 0 else 128 - status
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            _log.warning("the stack process %s, and is started again with the rows that it has left", how)
            await asyncio.sleep(PAUSES_SECONDS[failures])

    async def _life(self) -> int:
        """Start the stack process, and wait until it ends: its exit status, or the number of a signal below 0."""
        self._ended, self._ready = asyncio.get_running_loop().create_future(), False
        self._silent_seconds = 0.0
        self._process = 0
        try:
            self._process = self._start()
        except OSError as error:
            _log.error("no process can be had: %s", error)
            return os.EX_OSERR
        if self._stops:  # since the process before has ended
            os.kill(self._process, signal.SIGTERM)
        while not self._ended.done():
            left = self._watchdog_seconds - self._silent_seconds
            if left > 0:
                part = min(left, SILENCE_PART_SECONDS)
                self._silent_seconds += part if self._ready else 0.0
                await asyncio.wait((self._ended,), timeout=part)
                continue
            _log.error("the event loop of the stack process did not run for %g s", self._watchdog_seconds)
            for number in (signal.SIGABRT, signal.SIGKILL):
                self._send(number)
                await asyncio.wait((self._ended,), timeout=ABORT_SECONDS)
        return self._ended.result()

    def _start(self) -> int:
        kept = self._notices.kept
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": self._notices.address,
            "WATCHDOG_USEC": str(int(self._watchdog_seconds * 1e6)),
            "LISTEN_FDS": str(len(kept)),
            "LISTEN_FDNAMES": ":".join(kept),
        }
        libc, parent = ctypes.CDLL(None), os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # the handlers here are not for the child
        try:
            if process := os.fork():
                return process
            try:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
                for number in _HANDLED:
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                if os.getppid() == parent:
                    _become(self._command, environment, list(kept.values()))
            finally:
                os._exit(1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    # -- what happens --------------------------------------------------------------------------------------------

    def _on_notice(self) -> None:
        with suppress(BlockingIOError):
            fields = self._notices.receive(self._process)
            if fields:
                self._silent_seconds = 0.0
            if fields.get("READY") == "1":
                self._ready = self._has_been_ready = True

    def _reap(self) -> None:
        """Take the statuses of children; the first process of a container has those of others too."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._process:
                    self._ended.set_result(os.waitstatus_to_exitcode(found[1]))

    def _stop(self, number: int) -> None:
        self._stops = True
        self._send(number)

    def _send(self, number: int) -> None:
        if self._process and not self._ended.done():
            os.kill(self._process, number)


_HANDLED = (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
_CLEAN = (0, -signal.SIGTERM)


def _become(command: Sequence[str], environment: Mapping[str, str], kept: Sequence[int]) -> None:
    """Execute a command with these descriptors from `FIRST_FD` on."""
    for at, fd in enumerate([fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for each in kept]):
        os.dup2(fd, FIRST_FD + at)
    own = str(os.getpid())
    os.execve(command[0], list(command), {**environment, "LISTEN_PID": own, "WATCHDOG_PID": own})


def supervise(arguments: Sequence[str]) -> None:
    """Become a supervisor of `kvtier` with these arguments. Raises ConfigError under a service manager."""
    if os.environ.get("NOTIFY_SOCKET"):
        raise ConfigError("the service manager that started this process keeps the rows", "--keep-rows")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", __name__, *arguments])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sys.exit(asyncio.run(Supervisor(sys.argv[1:]).run()))
