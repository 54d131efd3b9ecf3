"""An end of a connection between an engine and a stack process: a SOCK_SEQPACKET Unix socket.

`send` and `receive` never wait, and keep the GIL: a call takes some microseconds, and beside a thread that is busy in
Python getting the GIL back takes a switch interval (5 ms). What does not fit the socket waits in a bounded outbox.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from kvtier.service.wire import MESSAGE_BYTES_MAX, Codec, Item, WireError

DESCRIPTORS_MAX = 64
_AGAIN = (errno.EAGAIN, errno.EINTR, errno.ENOBUFS)


@cache
def _libc() -> ctypes.PyDLL:
    """Calls that keep the GIL."""
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
    libc.recv.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
    libc.send.restype = libc.recv.restype = ctypes.c_ssize_t
    return libc


class Channel:
    """Items out by `send`, items in by `receive`. From one thread.

    `closed` is True once the peer is gone or broke the protocol, with `fault` in words: nothing is sent or received any
    more. Messages of both directions are numbered from 0, so that a lost one is seen.
    """

    def __init__(self, sock: socket.socket, theirs: Codec, outbox_bytes_max: int) -> None:
        """`sock` is connected, and the channel's from here on. `theirs` decodes what the peer sends."""
        sock.setblocking(False)
        self._sock = sock
        self._theirs = theirs
        self._most = outbox_bytes_max
        self._outbox: deque[bytes] = deque()
        self._waiting = self._sent = self._received = 0
        self._buffer = ctypes.create_string_buffer(MESSAGE_BYTES_MAX + 1)
        self._view = memoryview(self._buffer)
        self.closed = False
        self.fault = ""

    def fileno(self) -> int:
        """The socket's descriptor: readable when `receive` has something to return."""
        return self._sock.fileno()

    @property
    def waiting_bytes(self) -> int:
        """Bytes of messages that the socket had no room for."""
        return self._waiting

    def send(self, items: Sequence[Item]) -> bool:
        """Send these items, or keep them until `flush` can. False if the outbox has no room: nothing of them was kept.

        Raises WireError for an item that no message holds.
        """
        if self.closed:
            return False
        messages = Codec.encode(items, self._sent)
        size = sum(map(len, messages))
        if self._waiting + size > self._most and self._waiting:
            return False
        self._sent += len(messages)
        self._outbox.extend(messages)
        self._waiting += size
        self.flush()
        return not self.closed

    def flush(self) -> bool:
        """Send what waits, as far as the socket has room. True if nothing waits any more."""
        outbox, send, fd = self._outbox, _libc().send, self._sock.fileno()
        while outbox and not self.closed:
            message = outbox[0]
            if send(fd, message, len(message), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) < 0:
                number = ctypes.get_errno()
                if number in _AGAIN:
                    return False
                self._end(os.strerror(number))
                return True
            outbox.popleft()
            self._waiting -= len(message)
        return not outbox

    def receive(self, messages_max: int = 1 << 30) -> list[Any]:
        """The items of up to so many messages that have come. Empty if there are none, and once `closed`."""
        items: list[Any] = []
        recv, fd = _libc().recv, self._sock.fileno()
        while messages_max > 0 and not self.closed:
            messages_max -= 1
            length = recv(fd, self._buffer, MESSAGE_BYTES_MAX + 1, socket.MSG_DONTWAIT)
            if length <= 0:
                number = ctypes.get_errno() if length else 0
                if length and number in _AGAIN:
                    break
                self._end(os.strerror(number) if number else "the peer has closed the connection")
                break
            try:
                sequence, found = self._theirs.decode(self._view[:length])
                if sequence != self._received:
                    raise WireError(f"message {sequence} came in the place of {self._received}")
            except WireError as error:
                self._end(str(error))
                break
            self._received += 1
            items += found
        return items

    def _end(self, fault: str) -> None:
        self.closed, self.fault = True, fault
        self._outbox.clear()
        self._waiting = 0

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if not self.closed:
            self._end("closed")
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # a forked child may hold the socket too
        self._sock.close()


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
        except TimeoutError:
            return True
        except OSError:
            return False
    return True
