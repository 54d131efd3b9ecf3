"""A test that a server can be reached, within a time: name servers that do not answer included.

The system waits for those as long as its own settings say, often 10 s and more, and cannot be asked to wait for less.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress

from kvtier.aio.daemon_pool import DaemonPool

SILENT_NAMES = "the name server does not answer in time"


def address_of(server: str) -> tuple[str, int]:
    """Host and port of `host:port`; the brackets of an IPv6 address are left out."""
    host, _, port = server.rpartition(":")
    return host.strip("[]"), int(port)


def look_up(servers: Sequence[str], seconds: float) -> None:
    """Look up the names of all servers. Raises TimeoutError if that takes longer; a name that is not known is found out
    by who connects."""
    named = [address for address in map(address_of, servers) if not _is_number(address[0])]

    def ask() -> None:
        for address in named:
            with suppress(OSError):
                socket.getaddrinfo(*address, type=socket.SOCK_STREAM)

    if named:
        _within(seconds, ask, SILENT_NAMES)


def try_connection(server: str, seconds: float) -> None:
    """Connect to a server and disconnect. Raises OSError that says what is wrong."""
    look_up([server], seconds)
    _within(seconds, lambda: socket.create_connection(address_of(server), seconds).close(), "does not answer in time")


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _within(seconds: float, call: Callable[[], None], late: str) -> None:
    """Make a call on a thread of its own, which stays for as long as the call does."""
    thread = DaemonPool("kvtier-reach", 1)
    made = thread.submit(call)
    thread.shutdown()
    if not wait([made], seconds).done:
        raise TimeoutError(errno.ETIMEDOUT, late)
    made.result()
