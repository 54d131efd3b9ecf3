"""The figures of a running stack for tools on its host: connect to a Unix socket and read one JSON document.

The stack's loop answers, and nothing is done in the engine's thread. A connection is answered and closed in one step:
the document fits into the kernel's buffer, so a client that does not read holds up nothing and keeps no state here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.shielded_wait import wait_done
from kvtier.errors import KVTierError, ResourceError
from kvtier.stack.watching.socket_file import LockTouches, SocketFile
from kvtier.stack.watching.stats import StackStats

_log = logging.getLogger(__name__)

VERSION = 1
DOCUMENT_BYTES_MAX = 128 << 10
"""A longer document would not fit into the buffer of a socket."""
FRESH_SECONDS = 0.1
"""Figures are collected at most so often; who connects sooner gets the last document."""
FILES_SECONDS = 5.0
"""How long the file system may take."""
REST_SECONDS = 1.0
"""How long no connection is accepted after the process had no descriptor for one."""
_ACCEPTED_AT_ONCE = 8
_DAY_SECONDS = 86400

Stats = Callable[[], StackStats | None]


class StatsSocket:
    """Serves what `stats` returns, at a path. Lives in the loop of the stack.

    That it cannot be opened is one line in the log, and the stack goes on without it. `stats` returns None once the
    stack is gone: then connections are closed unanswered. `time_of_day` is seconds since 1970.
    """

    def __init__(self, path: str, stats: Stats, time_of_day: Callable[[], float] = time.time) -> None:
        self._path = path
        self._stats = stats
        self._time_of_day = time_of_day
        self._file: SocketFile | None = None
        self._pool = DaemonPool("kvtier-stats-socket", 1)
        self._touches: LockTouches | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._document = b""
        self._collected_at = float("-inf")
        self._opened_at = time_of_day()
        self._before_today: dict[str, int] = {}

    async def open(self) -> None:
        """Listen. Returns with the socket there, or with a line in the log."""
        claiming = asyncio.ensure_future(self._pool.run(SocketFile.claim, self._path))
        cancelled = await wait_done(claiming, FILES_SECONDS)
        try:
            if not claiming.done():
                claiming.add_done_callback(_release_late)
                raise ResourceError(f"{self._path}: the file system did not answer in {FILES_SECONDS:g} s")
            self._file = claiming.result()
        except (KVTierError, OSError) as error:
            _log.warning("no stats socket: %s", error)
        else:
            self._touches = LockTouches(self._file, self._pool)
            self._begin_serving()
            self._set_timer("day", _DAY_SECONDS - self._opened_at % _DAY_SECONDS, self._begin_day)
        if cancelled is not None:
            raise cancelled

    async def close(self) -> asyncio.CancelledError | None:
        """Accept nothing any more and remove the socket. Idempotent. Returns the cancellation that came meanwhile."""
        cancelled = None
        for timer in self._timers.values():
            timer.cancel()
        if self._touches is not None:
            self._touches.end()
        released, self._file = self._file, None
        if released is not None:
            asyncio.get_running_loop().remove_reader(released.fd)
            cancelled = await wait_done(asyncio.ensure_future(self._pool.run(released.release)), FILES_SECONDS)
        self._pool.shutdown()
        return cancelled

    # -- in the loop ---------------------------------------------------------------------------------------------

    def _begin_serving(self) -> None:
        if self._file is not None:
            asyncio.get_running_loop().add_reader(self._file.fd, self._serve)

    def _serve(self) -> None:
        """Answer those that wait, some in one step of the loop."""
        assert self._file is not None
        try:
            for _ in range(_ACCEPTED_AT_ONCE):
                with self._file.accept() as peer:
                    self._answer(peer)
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # such as no descriptor: what waits would call this at once again
            _log.warning("the stats socket %s rests for %g s: %s", self._path, REST_SECONDS, error)
            asyncio.get_running_loop().remove_reader(self._file.fd)
            self._set_timer("rest", REST_SECONDS, self._begin_serving)

    def _answer(self, peer: socket.socket) -> None:
        document = self._fresh_document()
        peer.setblocking(False)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * DOCUMENT_BYTES_MAX)
        if peer.send(document) < len(document):
            _log.warning("a client of the stats socket %s was given half a document", self._path)

    def _fresh_document(self) -> bytes:
        """The document as it is sent; empty once the stack is gone."""
        now = asyncio.get_running_loop().time()
        if now - self._collected_at >= FRESH_SECONDS and (stats := self._stats()) is not None:
            self._document = json.dumps(self._to_json(stats, now)).encode() + b"\n"
            self._collected_at = now
        return self._document

    def _to_json(self, stats: StackStats, now: float) -> dict[str, Any]:
        today = {name: tier.written_bytes - self._before_today.get(name, 0) for name, tier in stats.tiers.items()}
        return {
            "kvtier_stats": VERSION,
            "process": os.getpid(),
            "opened_at": self._opened_at,
            "seconds": now,
            "written_today_bytes": today,
            "stats": asdict(stats),
        }

    def _begin_day(self) -> None:
        """A day of UTC has begun."""
        stats = self._stats()
        if stats is not None:
            self._before_today = {name: tier.written_bytes for name, tier in stats.tiers.items()}
        self._set_timer("day", _DAY_SECONDS - self._time_of_day() % _DAY_SECONDS, self._begin_day)

    def _set_timer(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, call)


def _release_late(claiming: asyncio.Future[SocketFile]) -> None:
    if not claiming.cancelled() and claiming.exception() is None:
        claiming.result().release()


def stats_from_document(document: bytes, events_lost: int = 0) -> StackStats:
    """The figures that a stack process sent as JSON; `events_lost` are those beside its own."""
    stats: StackStats = _adapter().validate_json(document)
    return replace(stats, events_lost=stats.events_lost + events_lost)


@cache
def _adapter() -> TypeAdapter[StackStats]:
    return TypeAdapter(StackStats)


def stats_from_json(document: Mapping[str, Any]) -> StackStats:
    """The figures of a document. What this version does not know is left out, what it lacks is zero.

    Raises KeyError, TypeError or ValueError for what is no document of a stats socket.
    """
    return _adapter().validate_python(document["stats"])
