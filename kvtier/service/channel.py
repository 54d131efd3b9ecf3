"""An end of a connection between an engine and a stack process: a SOCK_SEQPACKET Unix socket.

`send` and `receive` never wait, and keep the GIL: a call takes some microseconds, and beside a thread that is busy in
Python getting the GIL back takes a switch interval (5 ms). What does not fit the socket waits in a bounded outbox.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

from kvtier.service.wire import MESSAGE_BYTES_MAX, Codec, Item, WireError

DESCRIPTORS_MAX = 64
INBOX_MESSAGES = 8
SLOT_BYTES = MESSAGE_BYTES_MAX + 64
CONNECT_PAUSE_SECONDS = 0.02
_SEND_FLAGS = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_AGAIN = (errno.EAGAIN, errno.EINTR, errno.ENOBUFS)


@cache
def _libc() -> ctypes.PyDLL:
    """Calls that keep the GIL."""
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
    libc.send.restype = ctypes.c_ssize_t
    libc.recvmmsg.restype = ctypes.c_int
    return libc


class _IOVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Message(ctypes.Structure):
    """`struct mmsghdr` of recvmmsg(2): a message without address and control data, and its bytes."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vector", ctypes.POINTER(_IOVec)),
        ("vector_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("length", ctypes.c_uint),
    )


class _Inbox:
    """Buffers of the messages that one call receives. Memory that no message has reached is not resident."""

    def __init__(self, fd: int) -> None:
        buffer = bytearray(INBOX_MESSAGES * SLOT_BYTES)
        base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self._vectors = (_IOVec * INBOX_MESSAGES)()
        self._headers = (_Message * INBOX_MESSAGES)()
        for at, (vector, header) in enumerate(zip(self._vectors, self._headers, strict=True)):
            vector.base, vector.length = base + at * SLOT_BYTES, MESSAGE_BYTES_MAX + 1
            header.vector, header.vector_length = ctypes.pointer(vector), 1
        self._views = [memoryview(buffer)[at * SLOT_BYTES :] for at in range(INBOX_MESSAGES)]
        self._call = partial(_libc().recvmmsg, ctypes.c_int(fd), self._headers)
        self._flags = ctypes.c_int(socket.MSG_DONTWAIT), ctypes.c_void_p()

    def receive(self, most: int) -> list[memoryview]:
        """Up to so many messages, until the next call. The end of the connection is an empty one. Raises OSError."""
        count = self._call(ctypes.c_uint(most), *self._flags)
        if count < 0:
            raise OSError(ctypes.get_errno(), "")
        return [self._views[at][: self._headers[at].length] for at in range(count)]


class Channel:
    """Items out by `send`, items in by `receive`. From one thread.

    `closed` is True once the peer is gone or broke the protocol, with `fault` in words: nothing is sent or received any
    more. Messages of both directions are numbered from 0, so that a lost one is seen. `waiting_bytes` are those of
    messages that the socket had no room for.
    """

    def __init__(
        self, sock: socket.socket, theirs: Codec, outbox_bytes_max: int, send_bytes_max: float = math.inf
    ) -> None:
        """`sock` is connected, and the channel's from here on. `theirs` decodes what the peer sends.

        `outbox_bytes_max` are bytes that may wait, and `send_bytes_max` those of one `send` while nothing waits.
        """
        sock.setblocking(False)
        self._sock = sock
        self._theirs = theirs
        self._most, self._send_most = outbox_bytes_max, send_bytes_max
        self._outbox: deque[bytes] = deque()
        self.waiting_bytes = self._sent = self._received = 0
        self._inbox = _Inbox(sock.fileno())
        self.closed = False
        self.fault = ""

    def fileno(self) -> int:
        """The socket's descriptor: readable when `receive` has something to return."""
        return self._sock.fileno()

    def send(self, items: Sequence[Item]) -> bool:
        """Send these items, or keep them until `flush` can. False if the outbox has no room: nothing of them was kept.

        Raises WireError for an item that no message holds.
        """
        if self.closed:
            return False
        messages = Codec.encode(items, self._sent)
        size = sum(map(len, messages))
        if self.waiting_bytes + size > (self._most if self.waiting_bytes else self._send_most):
            return False
        self._sent += len(messages)
        self._outbox.extend(messages)
        self.waiting_bytes += size
        self.flush()
        return not self.closed

    def flush(self) -> bool:
        """Send what waits, as far as the socket has room. True if nothing waits any more."""
        outbox, send, fd = self._outbox, _libc().send, self._sock.fileno()
        while outbox and not self.closed:
            message = outbox[0]
            if send(fd, message, len(message), _SEND_FLAGS) < 0:
                number = ctypes.get_errno()
                if number in _AGAIN:
                    return False
                self._end(os.strerror(number))
                return True
            outbox.popleft()
            self.waiting_bytes -= len(message)
        return not outbox

    def receive(self, messages_max: int = 1 << 30) -> list[Any]:
        """The items of up to so many messages that have come. Empty if there are none, and once `closed`."""
        items: list[Any] = []
        while messages_max > 0 and not self.closed:
            most = min(messages_max, INBOX_MESSAGES)
            try:
                messages = self._inbox.receive(most)
            except OSError as error:
                if error.errno not in _AGAIN:
                    self._end(os.strerror(error.errno or 0))
                break
            for message in messages:
                self._take_in(message, items)
                if self.closed:
                    return items
            if len(messages) < most:
                break
            messages_max -= most
        return items

    def _take_in(self, message: memoryview, items: list[Any]) -> None:
        """Decode a message, and add its items."""
        if not message:
            self._end("the peer has closed the connection")
            return
        try:
            sequence, found = self._theirs.decode(message)
            if sequence != self._received:
                raise WireError(f"message {sequence} came in the place of {self._received}")
        except WireError as error:
            self._end(str(error))
            return
        self._received += 1
        items += found

    def _end(self, fault: str) -> None:
        self.closed, self.fault = True, fault
        self._outbox.clear()
        self.waiting_bytes = 0

    def give_up(self, fault: str) -> None:
        """Count as closed, for this reason."""
        if not self.closed:
            self._end(fault)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if not self.closed:
            self._end("closed")
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # a forked child may hold the socket too
        self._sock.close()


def connect_within(sock: socket.socket, path: str, seconds: float) -> None:
    """Connect, also where many others do at the same time. So long each later call of the socket may take, too.

    Raises OSError.
    """
    sock.settimeout(seconds)
    until = time.monotonic() + seconds
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:  # a process listens, and has not accepted those before yet
            if time.monotonic() > until:
                raise
        time.sleep(CONNECT_PAUSE_SECONDS)


def send_greeting(sock: socket.socket, item: Item, descriptors: Sequence[int] = ()) -> None:
    """Send the first message of a connection, with descriptors. Raises OSError."""
    (message,) = Codec.encode([item], 0)
    socket.send_fds(sock, [message], descriptors)


def receive_greeting(sock: socket.socket, codec: Codec) -> tuple[Any, list[int]]:
    """(the first item, its descriptors) of a connection. The caller owns the descriptors.

    Raises OSError, WireError; no descriptor is left open then.
    """
    message, descriptors, flags, _ = socket.recv_fds(sock, MESSAGE_BYTES_MAX + 1, DESCRIPTORS_MAX)
    try:
        if not message:
            raise ConnectionResetError(errno.ECONNRESET, "the peer has closed the connection")
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise WireError("a greeting with more descriptors or bytes than a connection begins with")
        sequence, items = codec.decode(message)
        if sequence or len(items) != 1:
            raise WireError("a connection begins with one item")
    except BaseException:
        for fd in descriptors:
            os.close(fd)
        raise
    for fd in descriptors:
        os.set_inheritable(fd, False)
    return items[0], list(descriptors)


def start_lock(path: str) -> str:
    """The file that is locked while a private process at a socket is looked for, is started, or decides to end."""
    return f"{path}.start"


def is_listening(path: str) -> bool:
    """True if a process listens on a socket, also one that does not answer. Raises OSError for lack of a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(path)
        except (TimeoutError, BlockingIOError):  # it is slow to accept; many wait for that
            return True
        except OSError:
            return False
    return True
