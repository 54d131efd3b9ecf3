"""Reaching a stack process: the socket, and who connects."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError, ResourceError
from kvtier.service.channel import receive_greeting, send_greeting
from kvtier.service.wire import GREETING, PROTOCOL, Hello, Refused, Welcome, WireError
from kvtier.types.namespace import Namespace

CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Identity:
    """An engine as its processes name it in their greetings: `token` is random, and the same in all of them."""

    path: str
    namespace: Namespace
    engine_id: str
    token: str


def connect(
    identity: Identity, role: str, participant: int = 0, note: str = "", *, complete: bool = True, events: bool = True
) -> tuple[socket.socket, Welcome, Sequence[int]]:
    """(a connected socket, the answer, the descriptors of the rows). The caller owns socket and descriptors.

    Raises ResourceError if no stack process answers, ConfigError if it refuses this engine.
    """
    manifest = identity.namespace.manifest().encode()
    hello = Hello(
        [PROTOCOL], "", role, participant, identity.engine_id, identity.token, manifest, note, complete, events
    )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(CONNECT_SECONDS)
        sock.connect(identity.path)
        pidfd = os.pidfd_open(os.getpid())
        try:
            send_greeting(sock, hello, [pidfd])
        finally:
            os.close(pidfd)
        answer, descriptors = receive_greeting(sock, GREETING)
    except (OSError, WireError) as error:
        sock.close()
        raise ResourceError(f"no stack process answers at {identity.path}: {error}") from error
    if isinstance(answer, Welcome):
        return sock, answer, descriptors
    sock.close()
    for fd in descriptors:
        os.close(fd)
    reason = answer.reason if isinstance(answer, Refused) else "it answered with something else"
    raise ConfigError(f"the stack process at {identity.path} does not serve this engine: {reason}")
