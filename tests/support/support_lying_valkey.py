"""A Valkey server that lies: a real one behind a man in the middle, who answers some commands himself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

Command = Sequence[bytes]
Answer = bytes | Iterator[bytes]
Lie = Callable[[Command], Answer | None]
"""What a command is answered in place of what the server says, in pieces where that takes for ever; None: the truth."""
_NESTED = {b"*": 1, b"~": 1, b">": 1, b"%": 2, b"|": 2}
_STRINGS = b"$=!"


class LyingValkey:
    """Listens on loopback. `lie` may be replaced at any time; `asked` counts the commands that it was asked about."""

    def __init__(self, real: int, lie: Lie) -> None:
        self._real = ("127.0.0.1", real)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.lie = lie
        self.asked = 0
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End it with all of its connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._open.add(client)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError, EOFError), client, socket.create_connection(self._real) as server:
            asked, said = client.makefile("rb"), server.makefile("rb")
            while True:
                raw = _frame(asked)
                self._answer(client, server, said, raw)
        self._open.discard(client)

    def _answer(self, client: socket.socket, server: socket.socket, said: BinaryIO, raw: bytes) -> None:
        answer = self.lie(words_of(raw))
        if answer is None:
            server.sendall(raw)
            client.sendall(_frame(said))
            return
        self.asked += 1
        for piece in (answer,) if isinstance(answer, bytes) else answer:
            client.sendall(piece)


def _frame(stream: BinaryIO) -> bytes:
    """The next whole value of a stream, as it is on the wire."""
    head = stream.readline()
    if not head.endswith(b"\n"):
        raise EOFError
    kind = head[:1]
    if kind in _NESTED:
        return head + b"".join(_frame(stream) for _ in range(_NESTED[kind] * int(head[1:])))
    if kind in _STRINGS and int(head[1:]) >= 0:
        return head + stream.read(int(head[1:]) + 2)
    return head


def words_of(raw: bytes) -> Command:
    """The words of a command that has no line end in them, as all names of kvtier."""
    return raw.split(b"\r\n")[2::2]


def bulk(text: bytes) -> bytes:
    """A string on the wire."""
    return b"$%d\r\n%s\r\n" % (len(text), text)


def for_ever(front: bytes, piece: bytes = bytes(1 << 16)) -> Iterator[bytes]:
    """A value without an end."""
    yield front
    while True:
        yield piece


def only(*names: bytes) -> Callable[[Answer], Lie]:
    """A lie about commands that begin with these words."""

    def make(answer: Answer) -> Lie:
        return lambda words: answer if tuple(word.upper() for word in words[: len(names)]) == names else None

    return make


@contextmanager
def lying_valkey(real: int, lie: Lie) -> Iterator[LyingValkey]:
    """One in front of the real server at this port."""
    server = LyingValkey(real, lie)
    try:
        yield server
    finally:
        server.close()
