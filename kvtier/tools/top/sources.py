"""Where `kvtier top` reads figures: a stats socket or a page of metrics. Each reading has a deadline and a bound."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
import urllib.error
import urllib.request
from typing import Protocol
from urllib.parse import urlsplit

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.cli.stores import printable
from kvtier.errors import ResourceError, UsageError
from kvtier.tools.top.readings import Sample, StackReading, from_document, from_samples

TIMEOUT_SECONDS = 5.0
BYTES_MAX = 16 << 20
LINES_MAX = 1 << 18
LINE_MAX = 1 << 14
REASON_MAX = 200
_AGAIN_SECONDS = 0.02
_PIECE = 1 << 16
_NO_SOCKET = "it says something else than a stats socket of kvtier"


class Source(Protocol):
    """Reads figures. `name` says where, for people."""

    name: str

    def read(self) -> StackReading:
        """The figures now. Raises ResourceError, in one line, where there are none."""


def source_of(address: str) -> Source:
    """The source at an address: a URL with http or https, or the path of a socket. Raises UsageError."""
    if "://" not in address:
        return SocketSource(address)
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{parts.scheme}://... is not the URL of a page of metrics: give http, https or a socket")
    if parts.username is not None or parts.password is not None:
        raise UsageError("a URL with a user or a password in it is refused, because others can read it here")
    return PageSource(address)


class SocketSource:
    """The stats socket of a stack."""

    def __init__(self, path: str) -> None:
        self.name = path

    def read(self) -> StackReading:
        """The figures now. Raises ResourceError where there are none."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            with socket.socket(socket.AF_UNIX) as client:
                _connect(client, self.name, deadline)
                document = json.loads(_read_all(client, deadline))
        except RecursionError:
            raise ResourceError(f"{self.name}: {_NO_SOCKET}") from None
        except (OSError, ValueError) as error:
            raise ResourceError(f"{self.name}: {_reason(error)}") from None
        try:
            return from_document(document)
        except ResourceError as error:
            raise ResourceError(f"{self.name}: {error}") from None


def _connect(client: socket.socket, path: str, deadline: float) -> None:
    """Connect by then; while too many others wait for the server, try again."""
    while True:
        client.settimeout(max(_AGAIN_SECONDS, deadline - time.monotonic()))
        try:
            client.connect(path)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError("it accepts no connection") from None
            time.sleep(_AGAIN_SECONDS)


def _read_all(client: socket.socket, deadline: float) -> bytes:
    pieces: list[bytes] = []
    length = 0
    while True:
        client.settimeout(max(_AGAIN_SECONDS, deadline - time.monotonic()))
        piece = client.recv(_PIECE)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        length += len(piece)
        if length > BYTES_MAX or time.monotonic() >= deadline:
            raise TimeoutError("it does not end")


class PageSource:
    """A page of metrics in the text format of Prometheus: of vLLM, or of kvtier's own exporter."""

    def __init__(self, url: str) -> None:
        self.name = url

    def read(self) -> StackReading:
        """The figures now. Raises ResourceError where there are none."""
        thread = DaemonPool("kvtier-page", 1)
        asked = thread.submit(self._page)
        thread.shutdown()  # it ends with its call
        try:
            page = asked.result(2 * TIMEOUT_SECONDS)  # each wait for bytes has a deadline of its own
        except TimeoutError:
            asked.cancel()
            raise ResourceError(f"{self.name}: it does not end") from None
        now = time.monotonic()
        try:
            found, samples = _parse(page)
            reading = from_samples(samples, now)
        except (ValueError, KeyError, IndexError):
            raise ResourceError(f"{self.name}: it is no page of metrics") from None
        except ResourceError as error:
            raise ResourceError(f"{self.name}: {error}") from None
        if not found:
            raise ResourceError(f"{self.name}: there are no metrics of kvtier on this page")
        return reading

    def _page(self) -> str:
        request = urllib.request.Request(self.name, headers={"Accept": "text/plain;version=0.0.4"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                text: bytes = answer.read(BYTES_MAX + 1)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise ResourceError(f"{self.name}: {_reason(error)}") from None
        if len(text) > BYTES_MAX:
            raise ResourceError(f"{self.name}: the page has more than {BYTES_MAX >> 20} MiB")
        return text.decode(errors="replace")


def _parse(page: str) -> tuple[bool, list[Sample]]:
    """(whether it has metrics of kvtier, perhaps without a value yet; its samples)."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise UsageError("a page of metrics needs `pip install 'kvtier[metrics]'`") from None
    if page.count("\n") > LINES_MAX or any(len(line) > LINE_MAX for line in page.split("\n")):
        raise ResourceError(f"the page has more than {LINES_MAX} lines, or one of more than {LINE_MAX} characters")
    found, samples = False, list[Sample]()
    for family in text_string_to_metric_families(page):
        if family.name.startswith("kvtier_"):
            found = True
            samples += [(each.name, each.labels, each.value) for each in family.samples]
    return found, samples


def _reason(error: Exception) -> str:
    """Why nothing could be read, in one line."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        return _reason(error.reason)
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return _NO_SOCKET
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
    return printable(" ".join(str(error).split())[:REASON_MAX] or type(error).__name__)
