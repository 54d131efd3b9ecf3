"""Reaching a stack process: the socket, and who connects."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvtier.aio.readable import wait_readable
from kvtier.client.inquiry import inquire_text
from kvtier.client.private import PrivateStack
from kvtier.errors import ConfigError, ResourceError
from kvtier.service.channel import connect_within, receive_greeting, send_greeting
from kvtier.service.wire import GREETING, PROTOCOLS, Hello, Refused, Welcome, WireError
from kvtier.types.namespace import Namespace

CONNECT_SECONDS = 10.0
"""How long a stack process may take to answer, or to show that its loop goes on."""
OPEN_SECONDS = 600.0
"""How long opening may take. A greeting is answered once the rows are in memory: those of a terabyte take minutes."""
ENDING_SECONDS = 5.0
"""How long a private process may take to close its socket once it was killed."""
PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Identity:
    """An engine as its processes name it in their greetings: `token` is random, and the same in all of them.

    `private` is the stack process at `path` if that is one of the engine's own, which it starts again. With
    `reads_only` the engine stores nothing.
    """

    path: str
    namespace: Namespace
    engine_id: str
    token: str
    private: PrivateStack | None = None
    reads_only: bool = False


@dataclass(frozen=True, slots=True)
class Participant:
    """A process of an engine, as its greetings describe it: the fields of `Hello` of these names."""

    role: str
    number: int = 0
    note: str = ""
    complete: bool = True
    events: bool = True
    reads_only: bool = False


class MemoryWantedError(ConfigError):
    """A stack process has no memory for rows while the engine's workers map those of the process before."""


Connected = tuple[socket.socket, Welcome, Sequence[int]]
"""A connected socket, the answer, the descriptors of the rows. Who has it owns socket and descriptors."""


def unconnected() -> Connected:
    """A connection that has ended."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    return ours, Welcome(PROTOCOLS[-1], "", 0, 0, 0, 0), ()


def connect(identity: Identity, process: Participant, *, resumes: bool = False) -> Connected:
    """Connect to the stack process; with `resumes` not for the first time. A private one that ends just then, such as
    one that was killed and has not closed its socket yet, is started again for the first connection.

    Raises ResourceError if no stack process answers, ConfigError if it refuses this engine or cannot be started, and
    MemoryWantedError if it waits for the rows of before.
    """
    until = time.monotonic() + ENDING_SECONDS
    while True:
        try:
            return _connect(identity, process, resumes)
        except ResourceError as error:
            has_ended = isinstance(error.__cause__, ConnectionError)
            if identity.private is None or resumes or not has_ended or time.monotonic() > until:
                raise
        time.sleep(PAUSE_SECONDS)
        identity.private.start()


def _connect(identity: Identity, process: Participant, resumes: bool) -> Connected:
    manifest = identity.namespace.manifest().encode()
    hello = Hello(
        list(PROTOCOLS),
        "",
        process.role,
        process.number,
        identity.engine_id,
        identity.token,
        manifest,
        process.note,
        process.complete and not resumes,
        process.events,
        resumes,
        process.reads_only,
    )
    opened = ExitStack()
    try:
        sock = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC))
        connect_within(sock, identity.path, CONNECT_SECONDS)
        pidfd = os.pidfd_open(os.getpid())
        try:
            send_greeting(sock, hello, [pidfd])
        finally:
            os.close(pidfd)
        if not resumes:
            _wait_for_answer(sock, identity.path)
        answer, descriptors = receive_greeting(sock, GREETING)
    except (OSError, WireError) as error:
        opened.close()
        raise ResourceError(f"no stack process answers at {identity.path}: {error}") from error
    if isinstance(answer, Welcome) and answer.protocol in PROTOCOLS:
        return sock, answer, descriptors
    sock.close()
    for fd in descriptors:
        os.close(fd)
    reason = answer.reason if isinstance(answer, Refused) else "it answered with something else"
    if isinstance(answer, Welcome):
        reason = f"it answered in protocol {answer.protocol}, this release speaks {list(PROTOCOLS)}"
    kind = MemoryWantedError if isinstance(answer, Refused) and answer.let_go else ConfigError
    raise kind(f"the stack process at {identity.path} does not serve this engine: {reason}")


def _wait_for_answer(sock: socket.socket, path: str) -> None:
    """Wait as long as a stack process takes to open its rows, while its loop goes on. Raises OSError."""
    until = time.monotonic() + OPEN_SECONDS
    while not wait_readable(sock.fileno(), CONNECT_SECONDS):
        try:
            inquire_text(path, "ping", CONNECT_SECONDS)
        except ResourceError as error:
            raise TimeoutError(str(error)) from error
        if time.monotonic() > until:
            raise TimeoutError(f"it has not opened within {OPEN_SECONDS:g} s")
