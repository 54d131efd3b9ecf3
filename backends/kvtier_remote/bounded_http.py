"""Answers of HTTP servers: one deadline for all of a request, a limit of bytes, and from no other host."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import urllib.request
from functools import partial
from typing import Any

from kvtier_remote.answers import Deadline, bad_answer, bytes_of

_LEAST_SECONDS = 0.001


class _Received(io.RawIOBase):
    """The bytes that arrive on a socket until the deadline, after which TimeoutError is raised."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._socket = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        self._deadline.check()
        self._socket.settimeout(max(_LEAST_SECONDS, self._deadline.left_seconds))
        return self._socket.recv_into(into)

    def close(self) -> None:
        self._socket.close()
        super().close()


class _TimedSocket:
    """A connected socket as `http.client` uses one. A library's own limit is one of each `recv`, which a server that
    sends a byte now and then never reaches."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._socket = sock
        self._received: io.BufferedReader[Any] = io.BufferedReader(_Received(sock, deadline))
        self._deadline = deadline
        self._read_by_other = False

    def makefile(self, mode: str) -> io.BufferedReader[Any]:
        self._read_by_other = True
        return self._received

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(max(_LEAST_SECONDS, self._deadline.left_seconds))
        self._socket.sendall(data)

    def close(self) -> None:
        if not self._read_by_other:
            self._received.close()


class TimedHTTP(http.client.HTTPConnection):
    """A connection that ends at a deadline."""

    def __init__(self, host: str, port: int | None = None, *, deadline: Deadline, **more: Any) -> None:
        super().__init__(host, port, **more)
        self._deadline = deadline

    def connect(self) -> None:
        self.timeout = max(_LEAST_SECONDS, self._deadline.left_seconds)
        super().connect()
        self.sock: Any = _TimedSocket(self.sock, self._deadline)


class _TimedHTTPS(TimedHTTP, http.client.HTTPSConnection):
    """The same over TLS."""


class _TimedOpener(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    def __init__(self, deadline: Deadline, trust: ssl.SSLContext) -> None:
        super().__init__()
        self._deadline, self._trust = deadline, trust

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(TimedHTTP, deadline=self._deadline), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_TimedHTTPS, deadline=self._deadline), req, context=self._trust)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A signed request is for one host."""

    def redirect_request(self, *given: Any) -> None:
        """None: the answer is an error with its status."""


def get(address: str, seconds: float, most_bytes: int, trust: ssl.SSLContext) -> bytes:
    """The body at an address, through the proxy of the environment where there is one. Raises OSError, HTTPError for
    another status than 200."""
    deadline = Deadline(seconds)
    opener = urllib.request.build_opener(_TimedOpener(deadline, trust), _NoRedirects())
    try:
        with opener.open(address, timeout=seconds) as answer:
            return bytes_of(answer.read(most_bytes + 1), most_bytes)
    except http.client.HTTPException:
        raise bad_answer() from None
