"""An S3 service and an HTTP server that lie: a bucket in memory, some of whose requests get other answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

from kvtier_remote import S3Options

BUCKET = "kv-blocks"


class Asked(NamedTuple):
    """A request: the name of the object, empty for one about the bucket, and what follows the question mark."""

    method: str
    name: str
    query: dict[str, list[str]]
    range: str = ""

    @property
    def lists(self) -> bool:
        """True for a listing."""
        return self.method == "GET" and "list-type" in self.query


Answer = bytes | Iterator[bytes]
Lie = Callable[[Asked], Answer | None]
"""All bytes of an answer, status line included, after which the connection ends; None: the truth."""


def reply(body: bytes, status: str = "200 OK", **headers: object) -> bytes:
    """An answer; headers are named with underscores."""
    given = {"Content-Length": len(body), "Connection": "close"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value is not None)
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode("latin-1") + body


def chunked(pieces: Iterator[bytes], status: str = "200 OK", **headers: object) -> Iterator[bytes]:
    """An answer in chunks, as many as there are pieces."""
    yield reply(b"", status, Content_Length=None, Transfer_Encoding="chunked", **headers)
    for piece in pieces:
        yield b"%x\r\n%s\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def listing(names: list[str], token: str = "", written: str = "2026-01-01T00:00:00.000Z", size: int = 0) -> bytes:
    """One page of a listing; `token` leads to the next."""
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    objects = "".join(
        f'<Contents><Key>{name}</Key><LastModified>{written}</LastModified><ETag>"0"</ETag>'
        f"<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        for name in names
    )
    cut = "true" if token else "false"
    return (
        f'<?xml version="1.0"?><ListBucketResult><Name>{BUCKET}</Name><KeyCount>{len(names)}</KeyCount>'
        f"<IsTruncated>{cut}</IsTruncated>{more}{objects}</ListBucketResult>"
    ).encode()


class LyingS3:
    """Listens on loopback. `lie` may be replaced at any time; `asked` are all requests so far."""

    def __init__(self, lie: Lie, host: str) -> None:
        self.lie = lie
        self.asked: list[Asked] = []
        self.objects: dict[str, bytes] = {}
        self.rules = b"<LifecycleConfiguration/>"
        service = self

        class Handler(_Handler):
            s3 = service

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def options(self, **changes: Any) -> S3Options:
        """Options of a tier there; its key comes from the environment, as `KEYS` says."""
        fixed = {"bucket": BUCKET, "endpoint": self.endpoint, "allow_http": True, "region": "us-east-1"}
        times = {"request_timeout_seconds": 20.0, "job_timeout_seconds": 40.0, "allow_unbounded": True}
        return S3Options.model_validate(fixed | times | changes)

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()

    # -- the truth -----------------------------------------------------------------------------------------------

    def answer(self, asked: Asked, body: bytes) -> bytes:
        """What an honest service says."""
        if asked.lists:
            prefix = asked.query.get("prefix", [""])[0]
            return reply(listing([name for name in sorted(self.objects) if name.startswith(prefix)]))
        if "lifecycle" in asked.query:
            return reply(self.rules)
        if asked.method == "PUT":
            self.objects[asked.name] = body
            return reply(b"", ETag='"0"')
        if asked.method == "POST":  # delete many
            names = [key.text or "" for key in ElementTree.fromstring(body).iter() if key.tag.endswith("Key")]
            for name in names:
                self.objects.pop(name, None)
            return reply("".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names).join(_DELETED).encode())
        found = self.objects.get(asked.name)
        if found is None:
            return reply(b"", "404 Not Found")
        return _object(found, asked.method == "HEAD", asked.range)


_DELETED = ("<DeleteResult>", "</DeleteResult>")
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}


def _object(data: bytes, head: bool, range_of: str) -> bytes:
    headers: dict[str, object] = {"ETag": f'"{md5(data).hexdigest()}"', "Last_Modified": formatdate(usegmt=True)}
    if head:
        return reply(b"", Content_Length=len(data), **headers)
    if not range_of:
        return reply(data, **headers)
    first, _, last = range_of.removeprefix("bytes=").partition("-")
    some = data[int(first) : int(last) + 1]
    stated = f"bytes {first}-{int(first) + len(some) - 1}/{len(data)}"
    return reply(some, "206 Partial Content", Content_Range=stated, **headers)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    s3: LyingS3

    def handle_one_request(self) -> None:
        with suppress(OSError):
            super().handle_one_request()
            return
        self.close_connection = True

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path)
        name = unquote(path.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        asked = Asked(self.command, name, parse_qs(path.query, keep_blank_values=True), self.headers.get("Range", ""))
        self.s3.asked.append(asked)
        lie = self.s3.lie(asked) or self.s3.answer(asked, body)
        self.close_connection = True
        for piece in (lie,) if isinstance(lie, bytes) else lie:
            self.wfile.write(piece)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _do

    def log_message(self, *given: object) -> None:
        """Says nothing."""


@contextmanager
def lying_s3(lie: Lie = lambda asked: None, host: str = "127.0.0.1") -> Iterator[LyingS3]:
    """A service of this process's own."""
    service = LyingS3(lie, host)
    try:
        yield service
    finally:
        service.close()


@contextmanager
def raw_server(answer: Callable[[], Answer]) -> Iterator[str]:
    """The address, host:port, of a server that answers whatever is sent on a connection so, and then ends it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with suppress(OSError), client:
            if client.recv(1 << 16):
                given = answer()
                for piece in (given,) if isinstance(given, bytes) else given:
                    client.sendall(piece)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
