"""A seed of engines at a stack process: the server's part without sockets, lives of engines, and the end of all."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Sequence
from random import Random
from typing import Any
from unittest import mock

from kvtier.errors import IntegrityError, KVTierError, UsageError
from kvtier.service.kept_memory import KeptMemory
from kvtier.service.pool import Pool
from kvtier.service.session import Session
from kvtier.service.wire import FROM_ENGINE, FROM_WORKER, TO_ENGINE, TO_WORKER, Breach, Hello, Ready, WireError
from kvtier.stack.assembly import StackParts
from kvtier.testing.memory import MemoryOptions, MemoryStorage
from kvtier.types.namespace import Namespace
from simulator.loop import VirtualLoop
from simulator.patching import without_threads_on_disk
from simulator.seed_run import SeedOutcome
from simulator.service.engine import SimulatedEngineLife
from simulator.service.kept import SimulatedManager, worker_of
from simulator.service.plan import ServicePlan, draw_service_plan
from simulator.service.rows import ServiceCPU, ServiceCPUOptions, ServiceOracle, ServiceRows, SlowMemory
from simulator.service.sockets import SimulatedEnd, make_connection

SECONDS_MAX = 500.0


class SimulatedConnection:
    """The server's end of a process's connection."""

    def __init__(self, end: SimulatedEnd, session: Session, worker: int | None) -> None:
        self.end = end
        self.session = session
        self.worker = worker


class ServedEngine:
    """The server's state of one life of an engine, as `kvtier.service.server.Engine` has it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.earlier: dict[Session, set[int]] = {}
        self.connections: list[SimulatedConnection] = []


class SimulatedServer:
    """One life of the stack process: a pool, and connections to engines. `alive` until it is killed."""

    def __init__(self, world: ServiceWorld, storage: MemoryStorage) -> None:
        self.world = world
        self.storage = storage
        self.number = len(world.servers)
        self.alive = False
        self.engines: dict[str, ServedEngine] = {}
        self.held: dict[Session, int] = {}
        self._pinned_most = 0
        plan, rng = world.plan, Random(f"service of {world.seed}")
        options = ServiceCPUOptions(rows=plan.rows, policy=plan.policy, free_watermark=plan.watermark)
        self.cpu = ServiceCPU(options, rng)
        self.below: list[SlowMemory] = []
        if plan.lower_slots:
            below = MemoryOptions(
                capacity=1 << 20,
                slots_per_region=plan.lower_slots,
                write_policy=plan.write_policy,  # type: ignore[arg-type]
            )
            self.below = [SlowMemory(_sized(below, plan), storage, rng)]
        parts = StackParts([self.cpu, *self.below], Namespace(plan.layout), settings=plan.settings)
        self.kept = KeptMemory(world.manager) if world.keeps else None  # type: ignore[arg-type]
        self.cpu.find_rows(world.manager.rows)
        self.pool = Pool(parts, self.send, kept=self.kept)
        self.pool.on_defect = self._on_defect

    async def open(self) -> None:
        """Open the pool."""
        before = self.world.manager.rows
        await self.pool.open()
        self.alive = True
        self.mapped.plane, self.mapped.kept = self.pool.plane, self.kept
        if self.kept is None:
            return
        self.world.manager.rows = self.cpu.rows
        if self.cpu.rows is before:
            self.world.servers[-2].mapped.next = self.mapped
            self.world.oracle.covered["rows kept"] += 1
        for life in [life for life in self.world.lives if life.has_exited]:
            self._end_former(life)

    @property
    def waits_for_former(self) -> bool:
        """True while a worker of a process before may still copy."""
        return self.kept is not None and bool(self.kept.former)

    def _end_former(self, life: SimulatedEngineLife, workers: Sequence[int] | None = None) -> None:
        """Workers of an engine have no copy of the process before left."""
        assert self.kept is not None
        for number in range(self.world.plan.layout.world_size) if workers is None else workers:
            if self.kept.end_former(worker_of(life, number)):
                self.world.oracle.covered["former workers gone"] += 1
                self.pool.on_former_quiet()

    @property
    def mapped(self) -> ServiceRows:
        """The rows, as workers map them."""
        return self.cpu.mapped

    def _on_defect(self, error: BaseException) -> None:
        if self.alive:
            self.world.oracle.violation(f"a defect: {type(error).__name__}: {error}")

    def kill(self) -> None:
        """The process is gone: nothing of it acts any more, and its rows are nobody's."""
        self.alive = False
        self.mapped.plane, self.cpu.is_killed = None, True
        for below in self.below:
            below.is_killed = True
        self.world.manager.on_kill()
        for engine in self.engines.values():
            for each in engine.connections:
                each.end.cut()

    # -- connections ---------------------------------------------------------------------------------------------

    def greet(self, life: SimulatedEngineLife, hello: Hello) -> tuple[SimulatedEnd, str] | None:
        """A process connects: its end of the connection and the name of the session, or None if it is refused."""
        if not self.alive or self.pool.fault or self._has(hello):
            return None
        session = self._session_of(hello)
        schedules = hello.role == "scheduler"
        codecs = (TO_ENGINE, FROM_ENGINE) if schedules else (TO_WORKER, FROM_WORKER)
        theirs, ours = make_connection(self.world.loop, life.rng, self.world.plan.slow, codecs)
        connection = SimulatedConnection(ours, session, None if schedules else hello.participant)
        if self.kept is not None and not schedules:
            self.kept.begin_worker(worker_of(life, hello.participant))
        self.engines[hello.token].connections.append(connection)
        ours.on_items = lambda items: self._take(life.token, connection, items)
        ours.on_close = lambda: self._lose(life.token, connection)
        self._guarded(life.token, connection, lambda: self._begin(session, hello))
        return theirs, self.life_of(session)

    def life_of(self, session: Session) -> str:
        """The name of a session, as `Welcome.life`."""
        return f"{self.number}.{session.number}"

    def _has(self, hello: Hello) -> bool:
        """True if the end of an earlier connection of this process has yet to be seen."""
        engine = self.engines.get(hello.token)
        worker = None if hello.role == "scheduler" else hello.participant
        return engine is not None and any(
            each.worker == worker and each.session is engine.session and not each.session.lost
            for each in engine.connections
        )

    def _begin(self, session: Session, hello: Hello) -> None:
        if hello.role == "scheduler":
            self.pool.on_scheduler(session, hello)
        else:
            self.pool.on_worker(session, hello)

    def _session_of(self, hello: Hello) -> Session:
        engine = self.engines.get(hello.token)
        if engine is None:
            engine = self.engines[hello.token] = ServedEngine(self.pool.begin_session())
        elif engine.session.lost:
            engine.earlier[engine.session] = set()
            engine.session = self.pool.begin_session()
        return engine.session

    def _end_earlier(self, token: str, worker: int) -> None:
        engine = self.engines[token]
        for session, ready in list(engine.earlier.items()):
            ready.add(worker)
            if len(ready) == self.world.plan.layout.world_size:
                del engine.earlier[session]
                self.pool.end_session(session, exited=True)

    def _take(self, token: str, connection: SimulatedConnection, items: list[Any]) -> None:
        if not self.alive:
            return
        if connection.worker is None:
            self._guarded(token, connection, lambda: self.pool.handle(connection.session, items))
        else:
            worker = connection.worker
            self._guarded(token, connection, lambda: self.pool.on_worker_items(connection.session, worker, items))
            if token in self.engines and any(isinstance(item, Ready) for item in items):
                self._end_earlier(token, worker)
                if self.kept is not None:
                    self._end_former(next(life for life in self.world.lives if life.token == token), [worker])

    def _guarded(self, token: str, connection: SimulatedConnection, call: Any) -> None:
        try:
            call()
        except (Breach, WireError, UsageError) as error:
            self.world.oracle.violation(f"{token}: an honest engine broke the protocol: {error}")
            self._lose(token, connection)
        self.check_bounds()

    def _lose(self, token: str, connection: SimulatedConnection) -> None:
        """A connection has ended: the session is lost, and its other connections are closed."""
        connection.end.close()
        engine = self.engines.get(token)
        if engine is None or not self.alive or connection not in engine.connections:
            return
        engine.connections.remove(connection)
        if not connection.session.lost:
            self.pool.end_session(connection.session, exited=False)
            for other in [each for each in engine.connections if each.session is connection.session]:
                self._lose(token, other)

    def on_exit(self, token: str) -> None:
        """All processes of an engine have exited."""
        engine = self.engines.pop(token, None)
        if self.kept is not None and self.alive:
            life = next(life for life in self.world.lives if life.token == token)
            self._end_former(life)
            for number in range(self.world.plan.layout.world_size):
                self.kept.end_worker(worker_of(life, number))
        if engine is None or not self.alive:
            return
        for session in (*engine.earlier, engine.session):
            self.pool.end_session(session, exited=True)
        self.check_bounds()

    def send(self, sessions: Sequence[Session]) -> None:
        """Send what these sessions have, as the server does. The others have nothing."""
        if not self.alive:
            return
        self.check_bounds()
        for session in self.pool.sessions.values():
            if session not in sessions and (session.rows_wanted or session.take_items() or session.take_questions()):
                self.world.oracle.violation(f"engine {session.number} has work and is left out")
        for engine in [each for each in self.engines.values() if each.session in sessions]:
            for each in engine.connections:
                if each.worker is None and each.session is engine.session:
                    each.end.send(engine.session.take_items())
            if questions := engine.session.take_questions():
                for each in engine.connections:
                    if each.worker is not None and each.session is engine.session:
                        each.end.send(questions)

    # -- checks --------------------------------------------------------------------------------------------------

    def check_bounds(self) -> None:
        """No engine gets more than its bound, nor all of them together."""
        oracle, quotas = self.world.oracle, self.pool.quotas
        if not self.alive:
            return
        found = sum(each.leasing.found for each in self.pool.sessions.values())
        lent = sum(len(each.copying.lent) for each in self.pool.sessions.values())
        if (found, lent) != (quotas.found, quotas.lent):
            oracle.violation(f"{found} rows are found and {lent} lent, counted {quotas.found} and {quotas.lent}")
        if found > max(1, quotas.rows // 8) or lent > quotas.lent_most_of_all:
            oracle.violation(f"{found} rows are found and {lent} lent, of {quotas.rows}")
        most = max(quotas.pinned_most, self._pinned_most)
        self._pinned_most = quotas.pinned_most
        for session in self.pool.sessions.values():
            before = self.held.get(session, 0)
            self.held[session] = session.held
            if session.held > max(before, most):
                oracle.violation(f"engine {session.number} holds {session.held} rows of {quotas.rows}, before {before}")

    def count_void(self, session: Session | None) -> None:
        """A reset is handled: what was reachable is void for all that have been told."""
        oracle, control = self.world.oracle, self.pool.plane.control
        geometry, found = self.mapped.geometry, []
        for key, row in control.cpu.directory.items():
            at = geometry.offset(int.from_bytes(key[-4:], "big"), 0)
            found.append((key, self.mapped.rows.view[row][at : at + 8].tobytes()))
        found += [(block.key, bytes(block.payload[:8])) for block in self.storage.blocks.values()]
        named = []
        for key, page in found:
            number = int.from_bytes(page, "little")
            if number < len(oracle.fills):
                named += [(each, page) for each in oracle.fills[number].keys if key.endswith(each)]
        reset = oracle.on_reset(named)
        for engine in self.engines.values():
            if engine.session is not session and not engine.session.lost and engine.session.space is not None:
                self.world.voids.setdefault(self.life_of(engine.session), []).append(reset)


def _sized(options: MemoryOptions, plan: ServicePlan) -> MemoryOptions:
    """A capacity of two regions for each size of a slot."""
    from kvtier.types.geometry import Geometry

    geometry = Geometry(plan.layout, ServiceCPU.BLOCK_SIZE_ALIGNMENT)
    sizes = {geometry.aligned_bytes(group) for group in range(geometry.num_groups)}
    return options.model_copy(update={"capacity": 2 * len(sizes) * max(sizes) * options.slots_per_region})


class CountedPool:
    """Counts the resets of a pool, for the oracle."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._begin = server.pool.begin_reset
        server.pool.begin_reset = self.begin_reset  # type: ignore[method-assign]

    def begin_reset(self, session: Session | None) -> asyncio.Future[None]:
        """Count what is reachable, then reset."""
        server = self._server
        assert session is not None  # no operator
        token = next(token for token, engine in server.engines.items() if engine.session is session)
        server.count_void(session)
        for number in session._resets:
            server.world.own_resets[token, number] = server.world.oracle.resets
        return self._begin(session)


class ServiceWorld:
    """The loop, the oracle, the stack process that there is, and lives of engines."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(f"service world {seed}")
        self.plan = draw_service_plan(self.rng)
        self.keeps = Random(f"kept rows of {seed}").random() < 0.5
        self.manager = SimulatedManager()
        self.loop = VirtualLoop(Random(f"service loop {seed}"), seconds_max=SECONDS_MAX)
        self.oracle = ServiceOracle(self.loop)
        self.storage = MemoryStorage()
        self.voids: dict[str, list[int]] = {}  # of all stack processes: what one sent may come after its end
        self.own_resets: dict[tuple[str, int], int] = {}
        self.lives: list[SimulatedEngineLife] = []
        self.server: SimulatedServer

    def run(self) -> SeedOutcome:
        """Run the seed."""
        oracle = self.oracle
        oracle.note(f"seed {self.seed}: {self.plan}")
        with without_threads_on_disk(), mock.patch.object(asyncio, "to_thread", self._to_thread):
            try:
                ended = self.loop.run(self._main())
            except KVTierError as error:
                ended = False
                oracle.violation(f"{type(error).__name__}: {error}")
            if self.loop.hang:
                oracle.violation(f"hang: {self.loop.hang}")
            for uncaught in self.loop.errors:
                oracle.violation(f"uncaught exception: {uncaught}")
            if not ended and not oracle.violations:
                oracle.violation("the seed did not end")
            self._forget()
            self.loop.close()
        return SeedOutcome(
            self.seed, tuple(oracle.violations), tuple(oracle.trace), self.loop.steps, self.loop.time(), oracle.covered
        )

    async def _to_thread(self, call: Callable[..., Any], *given: Any) -> Any:
        """A thread's call runs whole, at a time of its own."""
        await asyncio.sleep(self.rng.random() * 0.002)
        return call(*given)

    def _forget(self) -> None:
        """The stacks of processes that were killed must not complain that nothing closed them."""
        for server in self.servers:
            server.pool._assembled = None
            if server.kept is not None and server.kept.table is not None:
                server.kept.table.close()
        self.manager.close()

    async def _main(self) -> None:
        self.servers: list[SimulatedServer] = []
        await self._start_service()
        self.loop.check_sometimes = self._check
        running: set[asyncio.Task[None]] = set()
        for number in range(self.plan.lives):
            if len(running) >= self.plan.engines:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            life = SimulatedEngineLife(self, number, self.rng.choice(self.plan.models))
            self.lives.append(life)
            running.add(asyncio.ensure_future(self._live(life)))
        kills = asyncio.ensure_future(self._kill_services())
        cuts = asyncio.ensure_future(self._cut())
        if running:
            await asyncio.wait(running)
        cuts.cancel()
        await kills
        while self.server.pool.sessions or self.server.waits_for_former:  # noqa: ASYNC110 - virtual time costs nothing
            await asyncio.sleep(0.01)
        await self._check_end()
        await self.server.pool.close()
        self.server.alive = False

    async def _live(self, life: SimulatedEngineLife) -> None:
        await asyncio.sleep(self.rng.random() * 0.02)
        await life.run()
        self.oracle.covered["lives"] += 1

    async def _start_service(self) -> None:
        server = SimulatedServer(self, self.storage)
        self.servers.append(server)
        CountedPool(server)
        await server.open()
        self.server = server

    async def _kill_services(self) -> None:
        for _ in range(self.plan.service_kills):
            await asyncio.sleep(self.rng.random() * 0.3)
            self.storage = copy.deepcopy(self.storage)
            self.server.kill()
            self.oracle.note("the stack process is killed")
            self.oracle.covered["stack processes killed"] += 1
            await asyncio.sleep(self.rng.random() * 0.05)
            await self._start_service()

    async def _cut(self) -> None:
        """Connections break now and then while both processes live."""
        while self.plan.cuts:
            await asyncio.sleep(0.02)
            lives = [life for life in self.lives if life.alive and life.end is not None]
            if lives and self.rng.random() < self.plan.cuts * 10:
                life = self.rng.choice(lives)
                end = self.rng.choice([life.end, *(worker.end for worker in life.workers)])
                if end is not None:
                    end.cut()
                    self.oracle.covered["connections cut"] += 1

    def on_exit(self, life: SimulatedEngineLife) -> None:
        """All processes of an engine have exited, seen by its pidfds."""
        self.server.on_exit(life.token)

    def _check(self) -> None:
        if self.server.alive:
            try:
                self.server.pool.check_integrity()
            except IntegrityError as error:
                self.oracle.violation(f"integrity: {error}")

    async def _check_end(self) -> None:
        """Without an engine all rows come back, once what was on its way has ended."""
        pool, plane = self.server.pool, self.server.pool.plane
        for _ in range(2000):
            if plane.idle:
                break
            await asyncio.sleep(0.01)
        self.server.mapped.check_all_free(self.oracle)
        self._check()
        if pool.quotas.found or pool.quotas.lent or pool.quotas.engines:
            self.oracle.violation("without an engine rows count as held")
        if pool._namespaces._spaces:
            self.oracle.violation("without an engine a namespace has a place")
        foreign = [each for each in self.oracle.fills if each.foreign]
        stored = {int.from_bytes(block.payload[:8], "little") for block in self.storage.blocks.values()}
        if any(each.number in stored for each in foreign):
            self.oracle.violation("blocks of other weights are in a lower tier")


class ServiceSimulator:
    """Runs seeds of engines at a stack process."""

    def run(self, seed: int) -> SeedOutcome:
        """Run one seed. The log is silent meanwhile: the trace holds what happens."""
        log = logging.getLogger("kvtier")
        level = log.level
        log.setLevel(logging.CRITICAL + 1)
        try:
            return ServiceWorld(seed).run()
        finally:
            log.setLevel(level)


def run_service_seed(seed: int) -> SeedOutcome:
    """Run one seed, as `ServiceSimulator` does."""
    return ServiceSimulator().run(seed)
