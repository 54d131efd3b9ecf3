"""A recorded conversation of an engine with a stack process: how it is kept, and either end played from it.

A recording is lines of JSON. The first ones are the messages, in the order in which a proxy between the two saw them:
number and role of the connection, the end that sent it, its items and its bytes, and what the stack process has written
into the rows' control area when it hands that over: positions and bytes. The first message of each end greets. One
without items is the end of a connection, which the engine has closed or the proxy has `cut`. Then come the outcomes of
the engine's life, and an example of each item: its name, fields and bytes.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from support_service import SECONDS

from kvtier.service import wire
from kvtier.service.wire import Codec, Hello, Item

RECORDING = Path(__file__).parents[1] / "service" / "recorded" / "protocol-1.jsonl"
PROTOCOL, INCARNATION = 1, "recorded"
ENGINE, SERVICE, CUT = "engine", "service", "cut"
SENT_BY_ENGINE = {"scheduler": wire.FROM_ENGINE, "worker": wire.FROM_WORKER}
SENT_BY_SERVICE = {"scheduler": wire.TO_ENGINE, "worker": wire.TO_WORKER}


@dataclass(frozen=True, slots=True)
class Entry:
    """A message on a connection, which is of an engine's scheduler or worker; without bytes its end."""

    connection: int
    role: str
    by: str
    message: bytes = b""
    greets: bool = False
    written: Sequence[tuple[int, bytes]] = ()

    def decode(self) -> tuple[int, list[Any]]:
        """(the sequence number, the items)."""
        return codec_of(self.role, self.by, self.greets).decode(self.message)

    def line(self) -> list[Any]:
        """This entry in the file."""
        items = [type(item).__name__ for item in self.decode()[1]] if self.message else []
        written = [[at, some.hex()] for at, some in self.written]
        return [self.connection, self.role, self.by, items, self.message.hex(), written]


@dataclass(frozen=True, slots=True)
class Recording:
    """A conversation, the outcomes of the engine's life, and an example of each item: its name, fields and bytes."""

    entries: Sequence[Entry]
    outcomes: Sequence[Any]
    examples: Sequence[tuple[str, Sequence[str], bytes]]

    def write(self, path: Path) -> None:
        """Write the file."""
        lines: list[Any] = [each.line() for each in self.entries]
        lines.append({"outcomes": self.outcomes})
        lines += [[name, fields, item.hex()] for name, fields, item in self.examples]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    @classmethod
    def read(cls, path: Path = RECORDING) -> Recording:
        """The recording of a file."""
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        at = next(at for at, line in enumerate(lines) if isinstance(line, dict))
        seen: set[tuple[int, str]] = set()
        entries = []
        for connection, role, by, _, message, pieces in lines[:at]:
            greets = (connection, by) not in seen
            seen.add((connection, by))
            written = [(place, bytes.fromhex(some)) for place, some in pieces]
            entries.append(Entry(connection, role, by, bytes.fromhex(message), greets, written))
        examples = [(name, fields, bytes.fromhex(item)) for name, fields, item in lines[at + 1 :]]
        return cls(entries, lines[at]["outcomes"], examples)


def codec_of(role: str, by: str, greets: bool) -> Codec:
    """The codec of what one end sends on a connection."""
    if greets:
        return wire.GREETING
    return (SENT_BY_SERVICE if by == SERVICE else SENT_BY_ENGINE)[role]


def determined(items: Iterable[Any]) -> Iterator[Item]:
    """Items with nothing in them that another release, or another run, says otherwise: figures, the release's name and
    its other protocols. How many parts figures have differs too."""
    for item in items:
        match item:
            case wire.Stats() | wire.FiguresPart() if not item.last:
                continue
            case wire.Stats():
                yield wire.Stats([], last=True)
            case wire.FiguresPart():
                yield wire.FiguresPart(item.number, b"", last=True)
            case Hello():
                assert PROTOCOL in item.protocols
                yield msgspec.structs.replace(item, protocols=[PROTOCOL], release="")
            case _:
                yield item


class Area:
    """The control area beside rows, by a descriptor that stays its owner's."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)

    def write(self, written: Iterable[tuple[int, bytes]]) -> None:
        """Write these bytes."""
        for at, some in written:
            self.memory[at : at + len(some)] = some

    def compare(self, written: Iterable[tuple[int, bytes]]) -> None:
        """Raise AssertionError unless it has these bytes."""
        for at, some in written:
            assert self.memory[at : at + len(some)] == some, f"the control area is another one at byte {at}"


def differences(before: bytes, after: bytes) -> list[tuple[int, bytes]]:
    """The words of `after` that differ, in runs."""
    words = [at for at in range(0, len(after), 8) if before[at : at + 8] != after[at : at + 8]]
    runs: list[tuple[int, bytes]] = []
    for at in words:
        if runs and runs[-1][0] + len(runs[-1][1]) == at:
            runs[-1] = runs[-1][0], runs[-1][1] + after[at : at + 8]
        else:
            runs.append((at, after[at : at + 8]))
    return runs


def rows_of(entries: Sequence[Entry]) -> tuple[int, int]:
    """Descriptors of rows and of their control area, as the recorded stack process made them."""
    welcome = next(entry for entry in entries if entry.role == "worker" and entry.by == SERVICE)
    (item,) = welcome.decode()[1]
    last, byte = welcome.written[-1]
    made = []
    for size in (item.num_rows * item.row_bytes, last + len(byte)):
        made.append(os.memfd_create("rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(made[-1], size)
        fcntl.fcntl(made[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    Area(made[1]).write(welcome.written)
    return made[0], made[1]


@dataclass(slots=True)
class Connection:
    """A connection of a player, and the items that came and were not compared. `received` counts messages."""

    sock: socket.socket
    role: str
    sent_by: str
    items: deque[Item] = field(default_factory=deque)
    received: int = 0

    def receive(self) -> bool:
        """Take a message in. False at the end of the connection."""
        try:
            message = self.sock.recv(wire.MESSAGE_BYTES_MAX + 1)
        except ConnectionResetError:
            return False
        if message:
            sequence, items = codec_of(self.role, self.sent_by, greets=False).decode(message)
            assert sequence == self.received
            self.received += 1
            self.items += determined(items)
        return bool(message)


class Player:
    """Plays one end of a recording: sends its messages as they were, and compares what comes with the other end's.

    A message is sent once all is there that came before it; `wait` returns when it was handled. The control area is
    compared too. Where the proxy has cut the connections they end after `cut` was
    called.
    """

    def __init__(
        self, entries: Sequence[Entry], path: str, end: str, wait: Callable[[], object] = lambda: None
    ) -> None:
        """`path` is the socket: of the stack process, or where the engine looks for one."""
        self._entries = entries
        self._path = path
        self._end = end
        self._wait = wait
        self._connections: dict[int, Connection] = {}
        self._greeted: list[tuple[socket.socket, Hello]] = []
        self._cut = threading.Event()
        self._sockets = ExitStack()
        self._rows = rows_of(entries) if end == SERVICE else ()
        for fd in self._rows:
            self._sockets.callback(os.close, fd)
        self._listening = self._socket(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        if end == SERVICE:
            self._listening.bind(path)
            self._listening.listen()

    def _socket(self, sock: socket.socket) -> socket.socket:
        sock.settimeout(SECONDS)
        self._sockets.callback(sock.close)
        return sock

    def cut(self) -> None:
        """Let the connections end that the proxy has cut."""
        self._cut.set()

    def stop(self) -> None:
        """End also if a further process is waited for: the engine has failed."""
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(self._path)

    def play(self) -> None:
        """Play it to its end. Raises AssertionError at the first difference."""
        with self._sockets:
            for at, entry in enumerate(self._entries):
                try:
                    self._play(entry)
                except (AssertionError, OSError, wire.WireError) as error:
                    raise AssertionError(f"line {at + 1} of the recording: {error}") from error

    def _play(self, entry: Entry) -> None:
        if entry.by == CUT:
            assert self._cut.wait(SECONDS)
            self._close(entry)
        elif entry.by == self._end:
            self._send(entry)
            self._wait()
        else:
            self._compare(entry)

    def _close(self, entry: Entry) -> None:
        connection = self._connections.pop(entry.connection)
        assert not connection.items
        connection.sock.close()

    def _send(self, entry: Entry) -> None:
        connection = self._connections.get(entry.connection)
        if not entry.message:
            self._close(entry)
        elif connection is not None:
            given = self._rows if entry.greets and entry.role == "worker" else ()
            socket.send_fds(connection.sock, [entry.message], given)
        else:
            sock = self._socket(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._connections[entry.connection] = Connection(sock, entry.role, SERVICE)
            sock.connect(self._path)
            pidfd = os.pidfd_open(os.getpid())
            try:
                socket.send_fds(sock, [entry.message], [pidfd])
            finally:
                os.close(pidfd)

    def _compare(self, entry: Entry) -> None:
        if entry.greets:
            self._compare_greeting(entry)
            return
        connection = self._connections[entry.connection]
        if not entry.message:
            assert not connection.receive(), connection.items
            self._close(entry)
            return
        for expected in determined(entry.decode()[1]):
            while not connection.items:
                assert connection.receive(), f"the connection has ended, {expected} was to come"
            found = connection.items.popleft()
            assert found == expected, f"{found} came, not {expected}"

    def _compare_greeting(self, entry: Entry) -> None:
        (expected,) = determined(entry.decode()[1])
        if self._end == SERVICE:
            assert isinstance(expected, Hello)
            sock, found = self._accept(expected)
            self._connections[entry.connection] = Connection(sock, entry.role, ENGINE)
        else:
            found, area = _greeting(self._connections[entry.connection].sock)
            if entry.written and area is not None:
                area.compare(entry.written)
        assert found == expected, f"{found} came, not {expected}"

    def _accept(self, expected: Hello) -> tuple[socket.socket, Item]:
        """The connection of a process; others, which may come before it, wait."""
        while True:
            for at, (sock, hello) in enumerate(self._greeted):
                if hello.role == expected.role:
                    del self._greeted[at]
                    return sock, hello
            sock = self._socket(self._listening.accept()[0])
            hello, _ = _greeting(sock)
            assert isinstance(hello, Hello)
            self._greeted.append((sock, hello))


def _greeting(sock: socket.socket) -> tuple[Any, Area | None]:
    """The greeting that comes, and the control area that comes with it."""
    message, descriptors, _, _ = socket.recv_fds(sock, wire.MESSAGE_BYTES_MAX + 1, 8)
    area = Area(descriptors[1]) if len(descriptors) > 1 else None
    for fd in descriptors:
        os.close(fd)
    (found,) = determined(wire.GREETING.decode(message)[1])
    return found, area


KINDS = {
    each.__struct_config__.tag: each
    for each in vars(wire).values()
    if isinstance(each, type) and issubclass(each, Item)
}
"""By their tags."""


def with_more(entries: Sequence[Entry], end: str, *more: object) -> list[Entry]:
    """The entries, with these at the end of each item that this end sends, as a later release may add fields."""
    return [replace(entry, message=_with_more(entry.message, more)) if entry.by == end else entry for entry in entries]


def _with_more(message: bytes, more: Sequence[object]) -> bytes:
    if not message:
        return message
    sequence, items = msgspec.msgpack.decode(message)
    return msgspec.msgpack.encode([sequence, [[*item, *_added_since(item), *more] for item in items]])


def _added_since(item: Sequence[object]) -> tuple[object, ...]:
    """The defaults of the fields that were added to an item since it was recorded."""
    kind = KINDS[item[0]]
    lacking = len(kind.__struct_fields__) + 1 - len(item)
    return kind.__struct_defaults__[-lacking:] if lacking else ()
