"""The connections of a stack process: greetings, and items between channels and the pool."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from kvtier.aio.shielded_wait import shielded_wait
from kvtier.config.access import UserAccess
from kvtier.errors import ConfigError, GeometryError, KVTierError, ResourceError, SharedMemoryError, UsageError
from kvtier.service import wire
from kvtier.service.channel import Channel, receive_greeting, send_greeting
from kvtier.service.connected import Engine, EngineTotals, Peer
from kvtier.service.crash_file import CrashFile
from kvtier.service.inquiries import ANSWER_BYTES_MAX, Asked, answers_to
from kvtier.service.kept_memory import FormerWorkers, KeptMemory, worker_of
from kvtier.service.listener import Listener, peer_of, pidfd_fault, readable
from kvtier.service.namespaces import read_namespace
from kvtier.service.pool import Pool, opening_fault
from kvtier.service.refusal_log import RefusalLog
from kvtier.service.row_table import Worker
from kvtier.service.session import Session
from kvtier.service.wire import (
    FROM_ENGINE,
    FROM_WORKER,
    GREETING,
    PROTOCOLS,
    Breach,
    Hello,
    Inquiry,
    Refused,
    Welcome,
    WireError,
)
from kvtier.stack.assembly import StackParts
from kvtier.stack.shutdown import CloseReport
from kvtier.stack.watching.stats import StackStats
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import CPU
from kvtier.types.namespace import Namespace

OUTBOX_BYTES_MAX = 1 << 20
"""Bytes that wait for an engine which does not read; its connection is closed then."""
SEND_BYTES_MAX = 16 << 20
"""Bytes of one step for an engine that has read all before: rows lent, and outcomes of large jobs."""
MESSAGES_AT_ONCE = 8
"""Messages of a connection that are read in one turn of the loop."""
GREETING_SECONDS = 5.0
ENGINES_MAX = 64
REOPEN_SECONDS = 30.0
"""How long after lower tiers did not open they are opened again."""
GOODBYE_SECONDS = 10.0
"""How long a scheduler is connected after a worker of its engine has left."""

_log = logging.getLogger(__name__)


class StackServer:
    """Serves engines over a socket in one event loop: `async with` opens the socket, and closes it and the stack.

    The first engine brings the layout, so the stack opens with it. `parts` makes the parts of a stack for a namespace.
    Engines of another namespace are refused. Another process at the path may take `patience_seconds` to end.
    With `ends_with_engines` the process ends once its last engine leaves, see `wait_idle`. `kept` has the rows of the
    process before. `access` are the users that may connect.
    """

    def __init__(
        self,
        parts: Callable[[Namespace], StackParts],
        path: str,
        patience_seconds: float = 0.0,
        kept: KeptMemory | None = None,
        access: UserAccess | None = None,
    ) -> None:
        self.incarnation = secrets.token_hex(8)
        self.crash: CrashFile | None = None
        self.ends_with_engines = False
        self.audits_rows = False
        self._parts = parts
        self._kept = kept
        self._former: FormerWorkers | None = None
        self._workers: dict[int, Worker] = {}
        self._patience_seconds = patience_seconds
        self._changed = asyncio.Event()
        self._listener = Listener(path, access or UserAccess(), self._greet, self._num_watched, self._changed.set)
        self._pool: Pool | None = None
        self._layout: KVLayout | None = None
        self._opening = asyncio.Lock()
        self._engines: dict[str, Engine] = {}
        self._waiting = set[str]()  # tokens of engines whose scheduler came again while there was no memory for rows
        self._totals = EngineTotals()
        self._closing: asyncio.Task[None] | None = None

    def stats(self) -> StackStats:
        """Figures of the stack, from any thread; none before the first engine."""
        pool, engines = self._pool, self._totals.figures(list(self._engines.values()))
        stats = pool.stats() if pool is not None and pool.is_open else StackStats({}, 0)
        return replace(stats, engines=engines)

    async def wait_idle(self, seconds: float) -> None:
        """Return when there was no connection for so long, or at once when the last engine leaves."""
        while True:
            self._changed.clear()
            if self._has_connections:
                self._let_go(wire.Left)
                await self._changed.wait()
                continue
            if any(engine.leaves for engine in self._engines.values()):
                return
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                return

    @property
    def _has_connections(self) -> bool:
        """True while an engine is connected that does not leave, or may be soon."""
        return self._listener.is_greeting or any(each.peers and not each.leaves for each in self._engines.values())

    def _let_go(self, make_left: Callable[[int], wire.Left]) -> None:
        """Answer the engines that leave."""
        for engine in self._engines.values():
            if engine.leaves and engine.scheduler is not None:
                self._send_to(engine.scheduler, [make_left(engine.leaves)])
            engine.leaves = None

    def withdraw_if_idle(self) -> bool:
        """Let no process connect any more, unless one is connected or about to be."""
        self._listener.accept()
        if self._has_connections:
            return False
        self._listener.withdraw()
        return True

    async def __aenter__(self) -> StackServer:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pool(self) -> Pool:
        """The pool. Raises UsageError before the first engine came."""
        if self._pool is None:
            raise UsageError("no engine has come yet")
        return self._pool

    def open(self) -> None:
        """Listen. Raises ResourceError if the path is not free, ConfigError if its group cannot be set."""
        self._loop = asyncio.get_running_loop()
        self._refusals = RefusalLog(_log, self._loop.time)
        self._listener.open(self._patience_seconds)
        if self._kept is not None:
            self._former = FormerWorkers(self._kept.former, self._on_former_gone)

    def _on_former_gone(self, worker: Worker) -> None:
        """A worker of the process before has no copy in flight any more."""
        assert self._kept is not None
        if self._kept.end_former(worker) and self._pool is not None:
            self._pool.on_former_quiet()

    async def close(self) -> None:
        """Let no process connect, say so to the engines, write back within the stack's closing time. Idempotent.

        The path is free for another process when that has ended, and so are the folders of the stack.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await shielded_wait(self._closing)

    async def _close(self) -> None:
        if not self._listener.is_open:
            return
        self._listener.withdraw()
        if self._former is not None:
            self._former.close()
        try:
            self._listener.end_greetings()
            for engine in self._engines.values():
                if engine.scheduler is not None:
                    engine.scheduler.channel.send([wire.Closing("the stack process ends")])
            if self._pool is not None:
                await self._pool.close()
                report = self._pool.close_report or CloseReport(0, 0)
                self._let_go(lambda number: wire.Left(number, True, report.dropped_blocks, report.unfinished_jobs))
            for engine in list(self._engines.values()):
                self._forget(engine, "the stack process ends")
        finally:
            if self.crash is not None:
                self.crash.close()
            self._listener.release()

    def _forget(self, engine: Engine, reason: str) -> None:
        """Close what an engine's processes are connected by."""
        for peer in list(engine.peers):
            self._disconnect(peer, reason)
        self._workers.clear()  # they may copy for as long as they are there
        for pidfd in list(engine.pidfds):
            self._stop_watching(engine, pidfd)

    # -- greetings -----------------------------------------------------------------------------------------------

    def _num_watched(self) -> int:
        """Processes that are connected, or may still copy."""
        return sum(len(engine.pidfds) for engine in self._engines.values())

    async def _greet(self, sock: socket.socket) -> None:
        """Take in a process, or refuse it with one line."""
        with ExitStack() as undo:
            undo.callback(sock.close)
            try:
                async with asyncio.timeout(GREETING_SECONDS):
                    await readable(sock)
                hello, descriptors = receive_greeting(sock, GREETING)
            except (OSError, KVTierError) as error:
                if not isinstance(error, ConnectionResetError):  # one that only looked whether a process listens
                    self._refusals.tell(f"a connection did not begin with a greeting: {error}")
                return
            for fd in descriptors:
                undo.callback(os.close, fd)
            if isinstance(hello, Inquiry):
                await self._answer(sock, hello)
                return
            fault = self._fault(sock, hello, descriptors) or await self._open_pool(hello)
            if fault:
                fault = fault[: wire.TEXT_CHARACTERS_MAX]
                self._listener.on_refused(sock)
                self._refusals.tell(f"a process is not served: {fault}", getattr(hello, "token", ""))
                with suppress(OSError):
                    send_greeting(sock, Refused(fault, getattr(hello, "token", "") in self._waiting))
                return
            undo.pop_all()
        self._welcome(sock, hello, descriptors[0])

    async def _answer(self, sock: socket.socket, inquiry: Inquiry) -> None:
        """Answer an operator."""
        asked = Asked(self._pool, list(self._engines.values()), self.stats, self.crash)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ANSWER_BYTES_MAX)
        with suppress(OSError):
            for item in await answers_to(inquiry, asked, peer_of(sock)[1]):
                send_greeting(sock, item)

    def _fault(self, sock: socket.socket, hello: object, descriptors: list[int]) -> str:
        """Why a process is not served; empty if it is."""
        pid, uid = peer_of(sock)
        if fault := self._listener.access.fault(uid):
            return fault
        if not isinstance(hello, Hello) or len(descriptors) != 1:
            return "a greeting is a Hello and a pidfd"
        if fault := pidfd_fault(descriptors[0], pid):
            return fault
        if hello.role not in ("scheduler", "worker"):
            return "a process of an engine is its scheduler or a worker"
        if self.crash is not None and (fault := self.crash.refusal(hello.engine_id)):
            return fault
        if not set(PROTOCOLS).intersection(hello.protocols):
            return f"this release speaks protocols {list(PROTOCOLS)}, the engine {hello.protocols[:8]}"
        if len(self._engines) >= ENGINES_MAX and hello.token not in self._engines:
            return f"{ENGINES_MAX} engines are served already"
        return ""

    async def _open_pool(self, hello: Hello) -> str:
        """Open the stack with the first engine's namespace. Why this engine is not served; empty if it is."""
        async with self._opening:
            try:
                namespace = read_namespace(hello.manifest)
                if self._pool is not None and self._pool.is_spent:
                    spent, self._pool = self._pool, None
                    await spent.close()
                    if self._kept is not None:
                        self._kept.drop()
                if self._pool is None:
                    parts = with_shared_rows(self._parts(namespace))
                    pool = Pool(parts, self._send, lambda found: self._parts(found).namespace, self._kept)
                    pool.on_unopened = self._on_unopened
                    if self.crash is not None:
                        pool.on_defect = self.crash.exit
                    await _open(pool)
                    if self.audits_rows:
                        pool.begin_audit()
                    self._pool, self._layout = pool, namespace.layout
                    self._waiting.clear()
            except (ConfigError, ResourceError, GeometryError, WireError, OSError) as error:
                wants_memory = isinstance(error, SharedMemoryError) and len(self._waiting) < ENGINES_MAX
                if wants_memory and hello.resumes and hello.role == "scheduler":
                    self._waiting.add(hello.token)
                return opening_fault(error)
        if self.pool.fault:
            return self.pool.fault
        if namespace.layout != self._layout:
            return "its blocks have another layout than those of the engines here"
        if hello.participant not in range(self.pool.geometry.world_size):
            return f"there is no worker {hello.participant} among {self.pool.geometry.world_size}"
        engine = self._engines.get(hello.token)
        if engine is not None and not engine.session.lost and engine.has(hello):
            return f"{hello.role} {hello.participant} of this engine is connected already"
        return ""

    def _on_unopened(self, error: Exception) -> None:
        """The lower tiers did not open, so no engine has joined. Where the reason may go, they are opened again."""
        if not isinstance(error, ConfigError):
            self._loop.call_later(REOPEN_SECONDS, self._begin_anew, self.pool)

    def _begin_anew(self, pool: Pool) -> None:
        """Have the engines of a pool come again, for another one in its place."""
        if pool is self._pool and self._closing is None:
            for engine in list(self._engines.values()):
                self._forget(engine, "the lower tiers are opened again")
                self._end_if_gone(engine)

    def _welcome(self, sock: socket.socket, hello: Hello, pidfd: int) -> None:
        engine = self._engine_of(hello)
        schedules = hello.role == "scheduler"
        geometry = self.pool.geometry
        welcome = Welcome(
            max(set(PROTOCOLS).intersection(hello.protocols)),
            self.incarnation,
            engine.session.number,
            self.pool.num_rows,
            self.pool.row_bytes,
            geometry.alignment,
        )
        try:
            with ExitStack() as opened:
                rows = () if schedules else self.pool.descriptors
                send_greeting(sock, welcome, [_unwritable(fd, opened) for fd in rows] if hello.reads_only else rows)
        except OSError as error:
            _log.warning("a process left before it was welcome: %s", error)
            sock.close()
            os.close(pidfd)
            self._end_if_gone(engine)
            return
        channel = Channel(sock, FROM_ENGINE if schedules else FROM_WORKER, OUTBOX_BYTES_MAX, SEND_BYTES_MAX)
        peer = Peer(channel, engine, None if schedules else hello.participant, pidfd)
        if self._kept is not None and not schedules:
            self._workers[pidfd] = worker_of(hello.token, hello.participant, peer_of(sock)[0])
            self._kept.begin_worker(self._workers[pidfd])
        engine.peers.add(peer)
        engine.pidfds.add(pidfd)
        self._loop.add_reader(pidfd, self._on_exit, engine, pidfd)
        self._loop.add_reader(channel, self._on_readable, peer)
        if schedules:
            engine.scheduler = peer
        self._take_in(peer, [hello])

    def _engine_of(self, hello: Hello) -> Engine:
        """The engine of a greeting, with a session that is not lost."""
        engine = self._engines.get(hello.token)
        if engine is None:
            engine = self._engines[hello.token] = Engine(self.pool.begin_session(), hello)
        elif engine.session.lost:
            engine.earlier[engine.session] = set()
            engine.session = self.pool.begin_session(engine.counts)
        return engine

    # -- items ---------------------------------------------------------------------------------------------------

    def _on_readable(self, peer: Peer) -> None:
        items = peer.channel.receive(MESSAGES_AT_ONCE)
        if items:
            self._take_in(peer, items)
        if peer.channel.closed:
            self._disconnect(peer, peer.channel.fault)

    def _take_in(self, peer: Peer, items: Sequence[Any]) -> None:
        """Take in what a process sent. Wrong numbers end its connection, and a defect this process."""
        if self.crash is not None:
            self.crash.begin(peer.engine.engine_id, items)
        try:
            self._handle_items(peer, items)
        except (Breach, WireError, UsageError) as error:
            self._disconnect(peer, str(error))
        finally:
            if self.crash is not None:
                self.crash.end()

    def _handle_items(self, peer: Peer, items: Sequence[Any]) -> None:
        """A step of the pool. The file for defects names this function."""
        pool, session, first = self._pool, peer.session, items[0]
        assert pool is not None
        if type(first) is Hello:
            (pool.on_scheduler if peer.worker is None else pool.on_worker)(session, first)
        elif peer.worker is None:
            leave = items[-1] if type(items[-1]) is wire.Leave else None
            if not session.lost:
                pool.handle(session, items if leave is None else items[:-1])
            if leave is not None:
                self._on_leave(peer.engine, leave)
        else:
            if type(items[-1]) is wire.Quiet:
                peer.quiet, items = True, items[:-1]
            pool.on_worker_items(session, peer.worker, items)
            kinds = set(map(type, items))
            if wire.Loaded in kinds:
                self._send_to(peer, [wire.LoadNoted()])
            if wire.Ready in kinds:
                self._end_earlier(peer.engine, peer.worker)
                if self._former is not None and peer.pidfd in self._workers:
                    self._former.end(self._workers[peer.pidfd])

    def _end_earlier(self, engine: Engine, worker: int) -> None:
        """A worker has no copy of an earlier session: each ends once that holds for all workers."""
        for session, ready in list(engine.earlier.items()):
            ready.add(worker)
            if len(ready) == self.pool.geometry.world_size:
                del engine.earlier[session]
                self.pool.end_session(session, exited=True)
        for pidfd in engine.left.pop(worker, ()):
            self._stop_watching(engine, pidfd)

    def _on_leave(self, engine: Engine, item: wire.Leave) -> None:
        if engine.leaves is not None or engine.distrusted:
            raise Breach("an engine leaves twice")
        if item.distrust:
            engine.distrusted = True
            durable = self.pool.distrust(engine.session, item.distrust)
            durable.add_done_callback(lambda _: self._let_leave(engine, item))
        else:
            self._let_leave(engine, item)

    def _let_leave(self, engine: Engine, item: wire.Leave) -> None:
        engine.leaves = item.number
        self._changed.set()
        if not self.ends_with_engines:
            self._let_go(wire.Left)

    def _send(self, sessions: Sequence[Session]) -> None:
        for engine in tuple(self._engines.values()):
            if engine.session not in sessions:
                continue
            peer = engine.scheduler
            if peer is not None and not peer.session.lost:
                self._send_to(peer, engine.session.take_items(events=not peer.channel.waiting_bytes))
            if questions := engine.session.take_questions():
                for worker in [each for each in engine.peers if each.worker is not None]:
                    self._send_to(worker, questions)

    def _send_to(self, peer: Peer, items: Sequence[wire.Item]) -> None:
        if not items:
            return
        if not peer.channel.send(items):
            self._loop.call_soon(self._disconnect, peer, "it does not read what it is sent")
        elif peer.channel.waiting_bytes and not peer.writes:
            peer.writes = True
            self._loop.add_writer(peer.channel, self._on_writable, peer)

    def _on_writable(self, peer: Peer) -> None:
        if peer.channel.flush():
            peer.writes = False
            self._loop.remove_writer(peer.channel)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _disconnect(self, peer: Peer, fault: str) -> None:
        engine = peer.engine
        if peer not in engine.peers:
            return
        engine.peers.discard(peer)
        self._loop.remove_reader(peer.channel)
        self._loop.remove_writer(peer.channel)
        peer.channel.close()
        self._changed.set()
        if peer is engine.scheduler:
            engine.scheduler = None
        if peer.quiet:
            self._stop_watching(engine, peer.pidfd)
        elif peer.worker is not None and peer.pidfd in engine.pidfds:
            engine.left.setdefault(peer.worker, set()).add(peer.pidfd)
        if not peer.session.lost:
            _log.info("engine %d: a connection has ended: %s", peer.session.number, fault)
            if self.pool.is_open:
                self.pool.end_session(peer.session, exited=False)
            others = {each for each in engine.peers if each.session is peer.session}
            if peer.quiet and engine.scheduler in others:  # an engine that ends: its scheduler may leave after it
                others.remove(engine.scheduler)
                self._send_to(engine.scheduler, [wire.Closing("a worker has left")])
                self._loop.call_later(GOODBYE_SECONDS, self._disconnect, engine.scheduler, "it did not leave in time")
            for other in others:
                last = other.channel.receive(MESSAGES_AT_ONCE)  # of a worker that left before, and was not read yet
                other.quiet = other.quiet or (bool(last) and type(last[-1]) is wire.Quiet)
                self._disconnect(other, fault)
        self._end_if_gone(engine)

    def _stop_watching(self, engine: Engine, pidfd: int) -> None:
        if pidfd in engine.pidfds:
            engine.pidfds.discard(pidfd)
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            if self._kept is not None and pidfd in self._workers:
                self._kept.end_worker(self._workers.pop(pidfd))
            for left in engine.left.values():
                left.discard(pidfd)

    def _on_exit(self, engine: Engine, pidfd: int) -> None:
        """A process of an engine has exited. A forked child may hold its connection."""
        self._stop_watching(engine, pidfd)
        for peer in [each for each in engine.peers if each.pidfd == pidfd]:
            peer.pidfd = -1
            self._disconnect(peer, "its process has exited")
        self._end_if_gone(engine)

    def _end_if_gone(self, engine: Engine) -> None:
        """Free the rows of an engine once no process of it is left that may copy. Idempotent."""
        if engine.pidfds or self._engines.get(engine.token) is not engine:
            return
        del self._engines[engine.token]
        self._totals.on_gone(engine)
        self._changed.set()
        if self.pool.is_open:
            for session in (*engine.earlier, engine.session):
                self.pool.end_session(session, exited=True)


async def _open(pool: Pool) -> None:
    """Open a pool, with nothing left behind if that fails, as for lack of a descriptor."""
    try:
        await pool.open()
    except BaseException:
        await pool.close()
        raise


def _unwritable(fd: int, opened: ExitStack) -> int:
    """A descriptor of the same memory that is open for reading alone, which `opened` closes. Raises OSError."""
    found = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, found)
    return found


def with_shared_rows(parts: StackParts) -> StackParts:
    """The parts of a pool: with a CPU tier whose rows other processes can map. A GPU tier is the engines'."""
    cpu = next(tier for tier in parts.tiers if tier.medium == CPU)
    shared = type(cpu)(cpu.options.model_copy(update={"shared": "memfd"}))
    return replace(parts, tiers=[shared if tier is cpu else tier for tier in parts.tiers])
