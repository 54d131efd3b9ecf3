"""Engines of one layout in a stack process: a stack whose GPU blocks are in the processes of its sessions."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from kvtier.control.jobs import CPU_TIER, Arrival, PresenceAnswers
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.errors import ConfigError, GeometryError, RootBusyError, UsageError
from kvtier.service.copying import Copy
from kvtier.service.figures import document_of, parts_of
from kvtier.service.hint_quota import HintQuota
from kvtier.service.kept_memory import KeptMemory, intact_rows, parts_to_verify
from kvtier.service.loans import Loans
from kvtier.service.namespaces import KeySpace, Namespaces, read_namespace
from kvtier.service.quotas import PoolState, Quotas
from kvtier.service.requests import EngineRequests
from kvtier.service.row_audit import RowAudit, audit_rows
from kvtier.service.session import Session
from kvtier.service.wire import Breach, Hello, WireError
from kvtier.stack.assembly import StackParts
from kvtier.stack.guard import guard_step
from kvtier.stack.tier_stack import TierStack
from kvtier.stack.watching.stats import EngineStats
from kvtier.tier.contract import FitsGeometry, LoadStore, ProvidesRows, SealsRows
from kvtier.types.events import OffloadingEvent
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import CPU, GroupIndex, OffloadKey
from kvtier.types.namespace import Namespace

DOCUMENT_SECONDS = 0.02
"""Time in which figures are collected once; that takes a millisecond."""

_log = logging.getLogger(__name__)


class Pool(TierStack):
    """Engines of one layout and the stack that they share: one event loop, one control plane, two namespaces at most.

    The stack opens with the layout of the first engine; its lower tiers are opened in the namespace of the first one
    that joins. An exception that is no one's wrong number ends the process: `on_defect` is called with it first.
    """

    def __init__(
        self,
        parts: StackParts,
        send: Callable[[Sequence[Session]], None],
        named: Callable[[Namespace], Namespace] = lambda found: found,
        kept: KeptMemory | None = None,
    ) -> None:
        """`parts` without tensors, GPU tier and workers: those are the engines'. `send` is called in a step with the
        sessions that may have items: it must not call the pool. `named` adds what the stack file says of a namespace.
        `kept` has the rows that a former process has left, and keeps those of this one."""
        namespace = Namespace(parts.namespace.layout)
        super().__init__(replace(parts, namespace=namespace, kv_caches=None, lends_rows=True))
        self.sessions: dict[int, Session] = {}
        self.fault = ""
        self.on_unopened: Callable[[Exception], None] = lambda _: None
        self.on_defect: Callable[[BaseException], None] = lambda error: None
        self.quotas = Quotas(0)
        self._named = named
        self._kept = kept
        self._verifying: asyncio.Task[None] | None = None
        self._audit: RowAudit | None = None
        self._auditing: asyncio.Task[None] | None = None
        self._namespaces = Namespaces()
        self._naming: asyncio.Future[Namespace] | None = None
        self._joins: set[asyncio.Task[None]] = set()
        self._send = send
        self._handling = False
        self._last = 0
        self._loans = Loans()
        self._document, self._document_until = b"", -math.inf
        self._wakes: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Open the rows; the lower tiers wait for the first namespace. Raises as `TierStack.open`."""
        self._naming = asyncio.get_running_loop().create_future()
        self._parts = replace(self._parts, joins=self._naming)
        if self._kept is not None:
            self._kept.give(self._cpu)
        if not isinstance(self._cpu, SealsRows):
            raise ConfigError("other processes cannot fill the rows of this cpu tier", "tiers")
        self._seals = self._cpu
        await super().open()
        plane = self._opened().plane
        plane.reservations.has_leases_outside = self._has_leases
        if self._kept is not None:
            await self._kept.take(plane, self.descriptors)
        self.quotas = Quotas(self.num_rows)
        self.shared = PoolState(self._opened(), self.quotas, self._settings)
        self._set_events()

    def begin_audit(self) -> None:
        """Compare rows with their checksums from now on."""
        self._audit = RowAudit(self.plane, lambda: self.geometry)
        auditing = audit_rows(self._audit, self._rows, self._leased_rows, self._audit_step)
        self._auditing = self._loop.create_task(auditing, name="kvtier audit rows")
        self._auditing.add_done_callback(self._on_background_end)

    def _leased_rows(self) -> Iterator[int]:
        return (row for each in self.sessions.values() for row in each.leasing.leased_rows())

    @guard_step
    def _audit_step(self, step: Callable[[], None]) -> None:
        assert self._audit is not None
        step()
        for number in self._audit.blamed:
            if (session := self.sessions.get(number)) is not None and not session.shut:
                session.shut_out("rows that it filled were changed afterwards")
                _log.error("engine %d is served no more: rows that it filled were changed afterwards", number)
        self._carry_out()

    def _has_leases(self) -> bool:
        """True if rows will come back that nothing here may take."""
        compared = self._verifying is not None or (self._audit is not None and bool(self._audit.taken))
        return compared or any(each.will_return_rows for each in self.sessions.values())

    async def close(self) -> None:
        """Close, as a stack. Nothing joins any more, and nothing is stored of which no report has come."""
        for session in self.sessions.values():
            session.on_closing()
        for background in filter(None, (self._verifying, self._auditing)):
            background.cancel()
        for task in tuple(self._joins):
            task.cancel()
        if self._wakes is not None:
            self._wakes.cancel()
        await super().close()

    # -- as the server sees it -----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True from opening until closing begins."""
        return self._assembled is not None and not self._closing

    @property
    def is_spent(self) -> bool:
        """True once no engine is left in a pool that serves no other: another one may be opened in its place."""
        return bool(self.fault) and not self.sessions

    @property
    def num_rows(self) -> int:
        """Rows of the CPU tier."""
        return len(self._opened().plane.control.cpu.table)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, in which a block may be shorter."""
        return int(self._rows.row_bytes)

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors of the rows and of the control area beside them."""
        return self._rows.descriptors  # type: ignore[no-any-return]

    @property
    def _cpu(self) -> LoadStore:
        return next(tier for tier in self._parts.tiers if tier.medium == CPU)

    @property
    def _rows(self) -> Any:
        rows: Any = self._cpu
        assert isinstance(rows, ProvidesRows)
        return rows.rows

    def begin_session(self, counts: EngineStats | None = None) -> Session:
        """A session for an engine that connects, which adds to these counts."""
        self._opened()
        self._last += 1
        requests = EngineRequests(self, self._last, HintQuota(self.shared))
        session = Session(self._last, self, requests, counts)
        self.sessions[session.number] = session
        return session

    @guard_step
    def on_scheduler(self, session: Session, hello: Hello) -> None:
        """An engine's scheduler has connected. With a complete namespace it joins once its workers are there."""
        session.on_scheduler(hello.events, hello.manifest if hello.complete else b"")
        self._carry_out()

    @guard_step
    def on_worker(self, session: Session, hello: Hello) -> None:
        """A worker of an engine has connected. Raises Breach if it has already."""
        session.on_worker(hello.participant, hello.note, hello.resumes, hello.reads_only)
        self._carry_out()

    @guard_step
    def handle(self, session: Session, items: Sequence[Any]) -> None:
        """Take in what an engine sent. Raises Breach, WireError, UsageError: end its connection then."""
        self._take_in(session, items, session.handle)

    @guard_step
    def on_worker_items(self, session: Session, worker: int, items: Sequence[Any]) -> None:
        """Take in what a worker of an engine sent. Raises Breach."""
        self._take_in(session, items, partial(session.on_worker_item, worker))

    def _take_in(self, session: Session, items: Sequence[Any], take: Callable[[Any, float], None]) -> None:
        """Take in items in one step: what they set free or ask for is carried out once, at its end."""
        if session.number not in self.sessions:
            return
        self._handling, now = True, self._clock()
        try:
            for item in items:
                take(item, now)
        except (UsageError, Breach, WireError):
            self._handling = False
            self._carry_out()  # what came before the wrong one counts, also while the pool closes
            raise
        finally:
            self._handling = False
        self._carry_out()

    @contextmanager
    def _one_step(self) -> Iterator[None]:
        """Calls of the stack within it carry nothing out."""
        self._handling = True
        try:
            yield
        finally:
            self._handling = False

    @guard_step
    def end_session(self, session: Session, exited: bool) -> None:
        """The connections of an engine have ended; with `exited` its processes too, or they use no row any more."""
        if session.number not in self.sessions:
            return
        was_lost = session.lost
        with self._one_step():
            if exited:
                session.on_exit(self._clock())
                del self.sessions[session.number]
            else:
                session.lose(self._clock())
        if not was_lost and session.space is not None:
            self._namespaces.leave(session.space)
            self._count_engines()
        self._carry_out()

    # -- joining -------------------------------------------------------------------------------------------------

    def join(self, session: Session, manifest: bytes) -> None:
        """The engine's namespace is known. It is served once the lower tiers are open, or is sent the reason why not.

        Raises WireError for a manifest that is none.
        """
        session.joins = True
        namespace = read_namespace(manifest)
        assembled = self._opened()
        assert self._naming is not None
        assert assembled.joining is not None
        try:
            own, namespace = namespace.tag, self._named(namespace)
            if own not in ("", namespace.tag):
                raise ConfigError(f"its tag {own[:64]!r} is not that of the service's stack file", "namespace")
            self._check_layout(namespace)
            if self.fault:
                raise ConfigError(self.fault)
            space = self._namespaces.join(namespace)
        except (ConfigError, GeometryError) as error:
            session.on_joined(None, str(error), follows=False)
            return
        if not self._naming.done():
            self._naming.set_result(namespace)
        if assembled.joining.opening.done():
            self._finish_join(session, space)
            return
        task = self._loop.create_task(self._join(session, space), name="kvtier join an engine")
        self._joins.add(task)
        task.add_done_callback(self._joins.discard)

    def _check_layout(self, namespace: Namespace) -> None:
        """Raise unless a namespace has the layout of the pool, or fixes it."""
        assert self._assembled is not None
        layout, geometry = namespace.layout, self._assembled.geometry
        if layout == geometry.layout:
            return
        if self._naming is None or self._naming.done() or not _same_but_pages(layout, geometry.layout):
            raise ConfigError("its blocks have another layout than those of the engines here")
        cpu = self._cpu
        if not isinstance(cpu, FitsGeometry):
            raise ConfigError("the rows of the cpu tier have one layout", "tiers")
        geometry = replace(geometry, layout=layout)
        cpu.use_geometry(geometry)
        self._assembled.geometry = geometry

    async def _join(self, session: Session, space: KeySpace) -> None:
        assembled = self._opened()
        assert assembled.joining is not None
        await asyncio.wait((assembled.joining.opening,))
        if self.is_open:
            self._end_join(session, space)

    @guard_step
    def _end_join(self, session: Session, space: KeySpace) -> None:
        self._finish_join(session, space)
        self._carry_out()

    def _finish_join(self, session: Session, space: KeySpace) -> None:
        assert self._assembled is not None
        assert self._assembled.joining is not None
        error = self._assembled.joining.fault
        if error is not None and not self.fault:
            self.fault = opening_fault(error)
            self.on_unopened(error)
        if session.lost or self.fault:
            self._namespaces.leave(space)
            session.on_joined(None, self.fault, follows=False)
            return
        plane = self._assembled.plane
        if self._kept is not None:
            self._use_kept(self._kept, space)
        self._deliver_events(plane.take_events())
        session.on_joined(space, "", follows=plane.uses is not None)
        self._count_engines()
        self._add_contents(session)

    def _use_kept(self, kept: KeptMemory, space: KeySpace) -> None:
        """With the first engine that joins, begin to serve what rows of a former process hold."""
        rows: Sequence[int] = ()
        if not kept.has_joined:
            rows, keys = kept.join(self.plane, self._namespaces.first, self._namespaces.prefixes)
        kept.add_space(space.prefix)
        if rows:
            parts = parts_to_verify(rows, keys)
            self._verifying = self._loop.create_task(self._verify(parts), name="kvtier verify rows")
            self._verifying.add_done_callback(self._on_background_end)

    async def _verify(self, parts: Iterable[tuple[GroupIndex, list[int]]]) -> None:
        found = lost = 0
        for group, rows in parts:
            nbytes = self.geometry.aligned_bytes(group)
            intact = await asyncio.to_thread(intact_rows, self._rows, rows, nbytes)
            self._on_verified(rows, intact)
            found, lost = found + intact.count(True), lost + intact.count(False)
        _log.info("%d blocks of the process before are found in the rows again, %d were not intact", found, lost)

    @guard_step
    def _on_verified(self, rows: Sequence[int], intact: Sequence[bool]) -> None:
        self.plane.control.cpu_counters.corrupt += intact.count(False)
        self.plane.demotions.end_fills(rows, intact, CPU_TIER, self._clock())
        self._carry_out()

    def _on_background_end(self, task: asyncio.Task[None]) -> None:
        if task is self._verifying:
            self._verifying = None
        if self.is_open and not task.cancelled() and (error := task.exception()) is not None:
            self.on_defect(error)

    @guard_step
    def on_former_quiet(self) -> None:
        """No worker of the former process has a copy in flight any more."""
        if self._kept is not None and self.is_open:
            self._kept.release(self.plane)
            self._carry_out()

    def _count_engines(self) -> None:
        self.quotas.share(sum(each.is_engine for each in self.sessions.values()))
        self._set_events()

    def _set_events(self) -> None:
        """Events are recorded while an engine takes them."""
        taken = any(each.events is not None and not each.lost for each in self.sessions.values())
        self._opened().plane.events.events_max = self._settings.events_max if taken else 0

    # -- as sessions see it --------------------------------------------------------------------------------------

    @property
    def plane(self) -> ControlPlane:
        """The control plane."""
        assert self._assembled is not None
        return self._assembled.plane

    def end_fill(self, session: Session, copy: Copy, now: float) -> None:
        """All workers have reported a fill. Its rows are sealed before any has its block."""
        if self._audit is not None:
            self._audit.on_filled(copy.rows, copy.generations, session.number)
        assert copy.fill is not None
        filled = copy.fill.rows_to_seal(copy.errors)
        sealing = self._seals.seal(filled) if filled else None
        geometry, moved = self.shared.geometry, 0
        for group, rows in filled:
            moved += len(rows) * geometry.kv_bytes_per_offloaded_block(group)
        if sealing is None:
            copy.fill.end(copy.errors, moved, now)
        else:
            sealing.add_done_callback(partial(self._on_sealed, copy, moved))

    @guard_step
    def _on_sealed(self, copy: Copy, moved: int, ended: asyncio.Future[None]) -> None:
        """Rows that took longer are sealed, unless the pool closed before."""
        if ended.cancelled() or (self._closing and ended.exception() is not None) or self.close_report is not None:
            return
        ended.result()
        assert copy.fill is not None
        copy.fill.end(copy.errors, moved, self._clock())
        self._carry_out()

    @guard_step
    def distrust(self, session: Session, reason: str) -> asyncio.Future[None]:
        """Reset, and hold the lower tiers back, for an engine that leaves. Returns what ends once that is durable.

        Raises UsageError for a reason that is not one short line.
        """
        with self._one_step():
            durable = self.begin_reset(session)
            self.hold_back(session, reason)
        self._carry_out()
        return durable

    async def reset_all(self) -> str:
        """Reset for an operator. Returns once it is durable, or the reason why it holds in memory alone."""
        durable = self._reset_all()
        await asyncio.wait((durable,))
        return _fault_of(durable)

    @guard_step
    def _reset_all(self) -> asyncio.Future[None]:
        durable = self.begin_reset(None)
        self._carry_out()
        return durable

    def begin_reset(self, session: Session | None) -> asyncio.Future[None]:
        """Reset as `TierStack.reset` does. The sessions know at once; `ResetDone` follows when it is durable."""
        super()._carry_out()  # before: what was decided in the epoch that ends
        durable = self._begin_reset()
        if self._kept is not None:
            self._kept.on_reset(self.plane.control.epoch)
        for each in self.sessions.values():
            each.on_reset(each is session, self._clock())
        if session is not None:
            durable.add_done_callback(partial(self._on_reset_done, session))
        return durable

    @guard_step
    def _on_reset_done(self, session: Session, ended: asyncio.Future[None]) -> None:
        fault = _fault_of(ended)
        if self.is_open:
            session.on_reset_done(fault)
            self._carry_out()

    def hold_back(self, session: Session, reason: str) -> None:
        """Without another engine the lower tiers are held back, and none may join. Else this one is served no more."""
        if any(each.is_engine and each is not session for each in self.sessions.values()):
            session.shut_out(reason)
        elif not self.fault:
            self.engine.hold_back(reason)
            if self._kept is not None:
                self._kept.void()
            self.fault = f"an engine here has other weights than its namespace: {reason}"

    @property
    def rows_of_before(self) -> tuple[int, int]:
        """Rows that wait for workers of a former process, and those that are out of use."""
        return (0, 0) if self._kept is None else (len(self._kept.held), len(self._kept.lost))

    def announce(self, session: Session, keys: Sequence[OffloadKey]) -> None:
        """Events for one engine about these keys, behind those that there are."""
        self._deliver_events(self.plane.take_events())
        assert session.events is not None
        found = _stored(self.plane.contents(self._clock(), keys))
        session.events.add([event for each in found for event in (replace(each, removed=True), each)])

    def send_figures(self, session: Session) -> None:
        """The figures, as far as they have changed for this engine."""
        stats = self.stats()
        lost = 0 if session.events is None else session.events.lost
        session.add_items(session.figures.changes(replace(stats, events_lost=stats.events_lost + lost)))

    def send_all_figures(self, session: Session, number: int) -> None:
        """All figures as they are, collected once in a short time for all engines."""
        now = self._clock()
        if now >= self._document_until:
            self._document_until, self._document = now + DOCUMENT_SECONDS, document_of(self.stats())
        session.add_items(parts_of(self._document, number))

    def begin_events(self, session: Session) -> None:
        """An engine takes events from here on; the first are what the tiers have."""
        self._deliver_events(self.plane.take_events())
        session.on_scheduler(events=True)
        self._set_events()
        self._add_contents(session)

    def _add_contents(self, session: Session) -> None:
        if session.events is not None:
            session.events.add(_stored(self.plane.contents(self._clock())))

    # -- carrying out --------------------------------------------------------------------------------------------

    def _carry_out(self, pumps: bool = True) -> None:
        if self._handling:
            return
        super()._carry_out(pumps)
        now, working = self._clock(), self._working()
        while working and sum([session.advance(now) for session in working]):  # of each: `any` would stop at the first
            super()._carry_out()
            working = self._working()
        assert self._assembled is not None
        plane, lends, short = self._assembled.plane, False, False
        if working or plane.control.shortage:
            lends = self._loans.lend(plane, working, now)
            if lends:
                super()._carry_out(pumps=False)
            short = self._loans.take_back(plane, self.sessions.values(), working, lends)
        if plane.lend_at < math.inf and not (lends or plane.control.shortage):
            plane.end_lending()
        if has_events := bool(plane.events.waiting):
            self._deliver_events(plane.take_events())
        if lends or short or has_events:  # others may have something to be sent
            working = self._working()
        if working:
            self._set_wakes(working, now)
            self._send(working)

    def _working(self) -> list[Session]:
        """The sessions that a step is for: most engines of many wait for nothing at a time."""
        return [session for session in self.sessions.values() if session.has_work]

    def _deliver_events(self, events: Sequence[OffloadingEvent]) -> None:
        for session in self.sessions.values():
            if session.events is not None and session.is_engine:
                session.events.add(events)

    def _set_wakes(self, working: Sequence[Session], now: float) -> None:
        """The next time at which a session has work by time alone."""
        at = math.inf
        for session in working:
            at = min(at, session.leasing.wakes_at)
            if session.events and session.is_engine:
                session.events.refill(now)
                at = min(at, session.events.due_at)
        if self._wakes is not None:
            self._wakes.cancel()
            self._wakes = None
        if at < math.inf:
            self._wakes = self._loop.call_at(at, self._on_wake)

    @guard_step
    def _on_wake(self) -> None:
        self._wakes = None
        if self.is_open:
            self._carry_out()

    def _deliver(self, batch: Sequence[Arrival]) -> None:
        if PresenceAnswers in map(type, batch):
            for session in self.sessions.values():
                session.leasing.lookups.look_now(self._clock())
        super()._deliver(batch)

    def _fail(self, error: BaseException) -> None:
        """Wrong numbers are their engine's. All else is a defect: half a step may be wrong state."""
        if not isinstance(error, UsageError | Breach | WireError):
            self._failed = True
            self.on_defect(error)
        raise error


def _fault_of(ended: asyncio.Future[None]) -> str:
    """The exception that a future has ended with, in a line; empty if it has a result."""
    error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
    return "" if error is None else f"{type(error).__name__}: {error}"


def opening_fault(error: Exception) -> str:
    """The reason why a stack could not be opened, in a line."""
    if isinstance(error, RootBusyError):
        return f"{error}; engines of several launches share a root through one `kvtier serve STACK.yaml`"
    if isinstance(error, OSError):  # such as a process without a descriptor to give
        return f"the stack could not be opened: {error}"
    return str(error)


def _stored(contents: Sequence[tuple[TierSpec, Sequence[OffloadKey]]]) -> list[OffloadingEvent]:
    """Events that say what tiers have."""
    return [OffloadingEvent(tuple(keys), spec.medium, False, spec.name) for spec, keys in contents if keys]


def _same_but_pages(one: KVLayout, other: KVLayout) -> bool:
    """True if two layouts differ in nothing but the bytes of pages."""
    shape = [(layout.world_size, layout.block_size_factor, layout.replicated) for layout in (one, other)]
    groups = [[(each.block_size, each.kind, each.window_tokens) for each in layout.groups] for layout in (one, other)]
    return shape[0] == shape[1] and groups[0] == groups[1]
