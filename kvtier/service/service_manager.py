"""The service manager that started this process, such as systemd: notices for it, and descriptors that it keeps.

It is reached by the datagram socket that `NOTIFY_SOCKET` names (sd_notify(3)). Descriptors that it is given under a
name come back by `LISTEN_FDS` (sd_listen_fds(3)) when it starts the process again, also after a crash. Without one all
calls do nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

FIRST_FD = 3
NOTICE_SECONDS = 1.0
"""How long a manager that reads nothing holds up notices that must not be lost; `WATCHDOG=1` never waits."""
_ALIVE = "WATCHDOG=1"
_log = logging.getLogger(__name__)


class ServiceManager:
    """`stored` are the descriptors that it has kept, by name. `watchdog_seconds`: it ends a process that does not say
    `WATCHDOG=1` in that time; 0 if it does not."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Takes the variables out of the environment: they are not for processes that this one starts."""
        given = {name: environ.pop(name, "") for name in _VARIABLES}
        self._address = given["NOTIFY_SOCKET"]
        self.watchdog_seconds = _for_this(given, "WATCHDOG_PID") * int(given["WATCHDOG_USEC"] or 0) / 1e6
        self._socket: socket.socket | None = None
        self.stored: dict[str, int] = {}
        if _for_this(given, "LISTEN_PID"):
            for at, name in enumerate(given["LISTEN_FDNAMES"].split(":")[: int(given["LISTEN_FDS"] or 0)]):
                os.set_inheritable(FIRST_FD + at, False)
                if name in self.stored:
                    os.close(self.stored[name])
                self.stored[name] = FIRST_FD + at

    @property
    def is_there(self) -> bool:
        """True if there is one."""
        return bool(self._address)

    def notify(self, *lines: str) -> None:
        """Send it these assignments. Those that it does not take within `NOTICE_SECONDS` are a line in the log."""
        self._send(lines, time.monotonic() + NOTICE_SECONDS)

    def _send(self, lines: Sequence[str], deadline: float, descriptors: Sequence[int] = ()) -> bool:
        """True if it has taken them by a deadline; one that has passed is not waited for."""
        if not self._address:
            return True
        try:
            if self._socket is None:  # it is kept: later there may be no descriptor for one
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.connect("\0" + self._address[1:] if self._address.startswith("@") else self._address)
            self._socket.settimeout(max(0.0, deadline - time.monotonic()))
            socket.send_fds(self._socket, ["\n".join(lines).encode()], descriptors)
        except OSError as error:
            is_harmless = lines[0] == _ALIVE and isinstance(error, BlockingIOError)  # notices enough wait there
            _log.log(logging.DEBUG if is_harmless else logging.WARNING, _NOT_TAKEN, lines[0], error)
            return False
        return True

    async def watch(self) -> None:
        """Say for ever that the event loop runs, twice in the time of the watchdog."""
        if not self.watchdog_seconds:
            await asyncio.get_running_loop().create_future()
        while True:
            self._send([_ALIVE], 0.0)
            await asyncio.sleep(self.watchdog_seconds / 2)

    def drop(self, names: Iterable[str]) -> None:
        """Have it keep no descriptors by these names any more."""
        self._drop(names, time.monotonic() + NOTICE_SECONDS)

    def _drop(self, names: Iterable[str], deadline: float) -> bool:
        taken = [self._send(("FDSTOREREMOVE=1", f"FDNAME={name}"), deadline) for name in names]
        return all(taken)

    def keep(self, descriptors: Mapping[str, int]) -> None:
        """Have it keep these descriptors, in place of those that it has by these names.

        They belong together: after one that it does not take it gets no other one, beside which those of before would
        be taken for its own.
        """
        deadline = time.monotonic() + NOTICE_SECONDS
        if self._drop(descriptors, deadline):
            for name, fd in descriptors.items():
                if not self._send(("FDSTORE=1", "FDPOLL=0", f"FDNAME={name}"), deadline, (fd,)):
                    return

    def close(self) -> None:
        """Send nothing any more. Idempotent."""
        if self._socket is not None:
            self._socket.close()
        self._address = ""


_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_NOT_TAKEN = "the service manager does not take %s: %s"


def _for_this(given: Mapping[str, str], name: str) -> bool:
    """True if a variable names this process, or is left out for a watchdog."""
    return given[name] == str(os.getpid()) or (name == "WATCHDOG_PID" and not given[name])
