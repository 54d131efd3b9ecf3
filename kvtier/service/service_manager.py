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
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

FIRST_FD = 3
_log = logging.getLogger(__name__)


class ServiceManager:
    """`stored` are the descriptors that it has kept, by name. `watchdog_seconds`: it ends a process that does not say
    `WATCHDOG=1` in that time; 0 if it does not."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Takes the variables out of the environment: they are not for processes that this one starts."""
        given = {name: environ.pop(name, "") for name in _VARIABLES}
        self._address = given["NOTIFY_SOCKET"]
        self.watchdog_seconds = _for_this(given, "WATCHDOG_PID") * int(given["WATCHDOG_USEC"] or 0) / 1e6
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

    def notify(self, *lines: str, descriptors: Sequence[int] = ()) -> None:
        """Send it these assignments. One that does not listen is a line in the log."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.connect(address)
                socket.send_fds(sock, ["\n".join(lines).encode()], descriptors)
            except OSError as error:
                _log.warning("the service manager does not take %s: %s", lines[0], error)

    async def watch(self) -> None:
        """Say for ever that the event loop runs, twice in the time of the watchdog."""
        if not self.watchdog_seconds:
            await asyncio.get_running_loop().create_future()
        while True:
            self.notify("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / 2)

    def drop(self, names: Iterable[str]) -> None:
        """Have it keep no descriptors by these names any more."""
        for name in names:
            self.notify("FDSTOREREMOVE=1", f"FDNAME={name}")

    def keep(self, descriptors: Mapping[str, int]) -> None:
        """Have it keep these descriptors, in place of those that it has by these names."""
        for name, fd in descriptors.items():
            self.drop([name])
            self.notify("FDSTORE=1", "FDPOLL=0", f"FDNAME={name}", descriptors=(fd,))


_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def _for_this(given: Mapping[str, str], name: str) -> bool:
    """True if a variable names this process, or is left out for a watchdog."""
    return given[name] == str(os.getpid()) or (name == "WATCHDOG_PID" and not given[name])
