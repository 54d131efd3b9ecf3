"""One life of a simulated engine: a scheduler with the client's core, and workers whose copies land piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from errno import EIO, ESTALE
from functools import partial
from itertools import chain, groupby
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.client.copies import RowCopy
from kvtier.client.core import EngineCore
from kvtier.client.request import ClientRequest
from kvtier.service import wire
from kvtier.service.wire import CHANGED, UNCHANGED, Hello
from kvtier.tier.contract import LookupResult
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import LOADED, GPUGroup, JobKind, TransferJob, failed
from kvtier.types.keys import JobId, OffloadKey, key_group
from kvtier.types.namespace import Namespace
from simulator.service.plan import ServicePlan
from simulator.service.rows import FillRecord, ServiceRows
from simulator.service.sockets import SimulatedEnd

if TYPE_CHECKING:
    from simulator.service.world import ServiceWorld


class SimulatedWorker:
    """A worker process: it maps the rows of a stack process, copies, and reports over a connection of its own.

    It connects again by itself, as `kvtier.client.worker.WorkerConnection`: `next` is a connection whose rows it does
    not use yet, because loads of the session before, `life`, may still come.
    """

    def __init__(self, engine: SimulatedEngineLife, number: int) -> None:
        self.engine = engine
        self.number = number
        self.end: SimulatedEnd | None = None
        self.rows: ServiceRows | None = None
        self.life = ""
        self.next: tuple[SimulatedEnd, ServiceRows, str] | None = None
        self.drained = False
        self.alive = True
        self.copying = 0
        self.foreign = False

    @property
    def stores(self) -> bool:
        """True if it has a slice of its own in a row."""
        return self.number < self.engine.plan.layout.num_copies

    def connect(self) -> bool:
        """Connect, for the first time or again. False if the stack process refuses."""
        engine, server = self.engine, self.engine.world.server
        resumes = bool(self.life)
        complete = not engine.plan.notes and not resumes
        hello = Hello([1], "", "worker", self.number, "", engine.token, engine.manifest, "n", complete, resumes=resumes)
        greeted = server.greet(engine, hello)
        if greeted is None:
            return False
        end, life = greeted
        end.on_items = lambda items: self._on_items(end, items)
        end.on_close = lambda: self._on_close(end)
        if resumes:
            self.next, self.drained = (end, server.mapped, life), False
        else:
            self.end, self.rows, self.life = end, server.mapped, life
        return True

    def advance(self) -> None:
        """Use the rows of the next connection once those of before are needed no more."""
        if self.next is not None and self.drained and not self.copying:
            self.end, self.rows, self.life = self.next
            self.next = None
            self.end.send([wire.Loaded(), wire.Ready()] if self.foreign else [wire.Ready()])

    def load_weights(self) -> None:
        """Load other weights."""
        self.foreign = True
        if self.end is not None:
            self.end.send([wire.Loaded()])

    def close(self) -> None:
        """Close what is connected."""
        for end in (self.end, None if self.next is None else self.next[0]):
            if end is not None:
                end.close()

    def _on_items(self, end: SimulatedEnd, items: list[Any]) -> None:
        if not self.alive:
            return
        for item in items:
            if isinstance(item, wire.Drained):
                self.drained = self.next is not None and self.next[0] is end
            else:
                end.send([wire.Answer(item.number, CHANGED if self.foreign else UNCHANGED)])

    def _on_close(self, end: SimulatedEnd) -> None:
        if self.end is end:
            self.end = None
        if self.next is not None and self.next[0] is end:
            self.next = None

    async def copy(self, job: TransferJob, fill: FillRecord | None, load: Load | None, life: str) -> None:
        """Carry out this worker's part of a job of a session, which came beside the connection."""
        engine = self.engine
        await engine.pause(0.002)
        if engine.rng.random() < 0.05:
            await asyncio.sleep(engine.rng.random() * 0.3)  # steps before are in flight
        if not self.alive:
            return
        if life != self.life:
            engine.world.oracle.covered["stores of a former session"] += 1
            if load is not None:
                engine.world.oracle.violation(f"engine {engine.number}: load {job.job_id} finds its rows gone")
            engine.on_worker_done(job, self.number, [ESTALE] * job.num_blocks)
            return
        engine.world.oracle.covered["copies after the end of their connection"] += self.end is None
        await self._copy(job, fill, load)

    async def _copy(self, job: TransferJob, fill: FillRecord | None, load: Load | None) -> None:
        engine, rows, end = self.engine, self.rows, self.end
        assert rows is not None
        self.copying += 1
        errors: list[int] = []
        for group in job.gpu_groups:
            for key, row, generation in zip(group.keys, group.rows.tolist(), group.generations.tolist(), strict=True):
                if not self.alive:
                    return
                failed = engine.rng.random() < engine.plan.errors
                if fill is not None:
                    if self.stores:
                        await self._copy_in(rows, key, (row, generation), fill)
                elif load is not None:
                    await self._copy_out(rows, key, (row, generation), load)
                errors.append(EIO if failed else 0)
        if not self.alive:
            return
        self.copying -= 1
        if end is not None:
            end.send([wire.Copied(job.job_id, [(len(list(run)), error) for error, run in groupby(errors)])])
        engine.on_worker_done(job, self.number, errors)

    async def _copy_in(self, rows: ServiceRows, key: OffloadKey, place: tuple[int, int], fill: FillRecord) -> None:
        geometry, oracle = rows.geometry, self.engine.world.oracle
        group, (row, generation) = key_group(key), place
        length = geometry.page_bytes(group)
        for sub_block in range(geometry.factor):
            await self.engine.pause(0.0005)
            if not self.alive:
                return
            rows.check(oracle, row, generation, filling=True)
            at = geometry.offset(group, self.number, sub_block)
            page = oracle.page(key, fill.number, self.number, sub_block, length)
            rows.rows.view[row][at : at + length] = np.frombuffer(page, np.uint8)

    async def _copy_out(self, rows: ServiceRows, key: OffloadKey, place: tuple[int, int], load: Load) -> None:
        geometry, oracle = rows.geometry, self.engine.world.oracle
        group, (row, generation) = key_group(key), place
        length = geometry.page_bytes(group)
        for sub_block in range(geometry.factor):
            await self.engine.pause(0.0005)
            if not self.alive:
                return
            rows.check(oracle, row, generation, filling=False)
            at = geometry.offset(group, self.number, sub_block)
            load.pages[key, self.number, sub_block] = rows.rows.view[row][at : at + length].tobytes()


class Load:
    """A load in flight: the pages that were copied, and what the engine had been told of resets when it began."""

    def __init__(self, void_seen: int) -> None:
        self.pages: dict[tuple[OffloadKey, int, int], bytes] = {}
        self.void_seen = void_seen


class SimulatedEngineLife:
    """An engine from its start to the exit of its last process. It may connect to stack processes one after another."""

    def __init__(self, world: ServiceWorld, number: int, model: str) -> None:
        self.world = world
        self.number = number
        self.model = model
        self.plan: ServicePlan = world.plan
        self.rng = Random(f"engine {number} of {world.seed}")
        self.adapters = Random(f"adapters of engine {number} of {world.seed}")
        self.rests = Random(f"rests of engine {number} of {world.seed}")
        self._unsure: dict[int, FillRecord] = {}
        self.token = f"engine {number}"
        self.manifest = Namespace(self.plan.layout, model=model).manifest().encode()
        self.workers = [SimulatedWorker(self, at) for at in range(self.plan.layout.world_size)]
        self.alive = True
        self.has_exited = False
        self.life = ""
        self.core = EngineCore()
        self.core.connected = False
        self.core.manifest = self.manifest
        self.end: SimulatedEnd | None = None
        self.void_seen = 0
        self.loads: dict[int, Load] = {}
        self.alone: dict[int, dict[int, list[int]]] = {}
        self._requests: list[tuple[ClientRequest, list[OffloadKey]]] = []
        self._last_request = 0
        self._foreign = self._held_back = self._resets = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked_weights: int | None = None

    async def pause(self, most: float) -> None:
        """Let others run, sometimes for long."""
        drawn = self.rng.random()
        if drawn < self.plan.slow / 10:
            await asyncio.sleep(self.rng.uniform(0.1, 3.0))
        elif drawn < 0.6:
            await asyncio.sleep(self.rng.random() * most)

    # -- connections ---------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect all processes for the first time, in any order."""
        processes: list[Callable[[], bool]] = [self._connect_scheduler, *(worker.connect for worker in self.workers)]
        self.rng.shuffle(processes)
        for connect in processes:
            if not connect():
                self.world.oracle.covered["engines refused"] += 1
                return

    def _connect_scheduler(self) -> bool:
        complete = not self.plan.notes and not self.life
        resumes = bool(self.life)
        hello = Hello([1], "", "scheduler", 0, "", self.token, self.manifest, "", complete, resumes=resumes)
        greeted = self.world.server.greet(self, hello)
        if greeted is None:
            return False
        self.end, self.life = greeted
        self.end.on_items = self._on_items
        self.end.on_close = partial(self._on_closed, self.end)
        self.core.on_connected()
        self.core.joins = complete
        self.world.oracle.covered["schedulers connected again"] += resumes
        return True

    def _connect_again(self) -> None:
        """Each process by itself, at some time."""
        if not self.world.server.alive:
            return
        for worker in self.workers:
            worker.advance()
            if worker.end is None and worker.next is None and self.rng.random() < 0.4:
                worker.connect()
        if self.end is None and self.core.is_drained and self.rng.random() < 0.4:
            self._connect_scheduler()

    def _on_closed(self, end: SimulatedEnd) -> None:
        if self.end is end:
            self.end = None
            self.core.lose()
            self._requests.clear()
            self._unsure.clear()
            self._asked_weights = None

    def _on_items(self, items: list[Any]) -> None:
        if not self.alive:
            return
        for item in items:
            if isinstance(item, wire.Void):
                self.void_seen = self.world.voids[self.life].pop(0)
            elif isinstance(item, wire.ResetDone):
                self.void_seen = max(self.void_seen, self.world.own_resets[self.token, item.number])
        self.core.take_in(items)
        if any(isinstance(item, wire.ResetDone) for item in items) and not self.core.resetting:
            self._resets = False
        if self.core.is_new:
            self.core.is_new = False
            if self._held_back:  # the stack process that there is now was not sent that
                self.core.say(wire.HoldBack("other weights"))

    # -- life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work for some steps, connecting again where a connection was lost; then close or be killed."""
        rng = self.rng
        self.connect()
        dies_at = rng.randint(1, self.plan.steps) if rng.random() < self.plan.kills else None
        for step in range(self.plan.steps):
            await self.pause(0.01)
            if dies_at is not None and ((step >= dies_at and self._copies_now) or step == self.plan.steps - 1):
                self.kill()
                return
            self._connect_again()
            if self.end is not None:
                self._step()
            elif rng.random() < self.plan.resets:
                self._reset()
        self._end_requests()
        self._send()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._end_unsure()
        self._send()
        await self._check_answers()
        self.exit()

    async def _check_answers(self) -> None:
        """All that was asked is answered, and all jobs end, while there is a connection."""
        for _ in range(2000):
            if self.end is None or not (self.core._asked or self.core._copies):
                return
            self.core.begin_turn()
            self._send()
            await asyncio.sleep(0.01)
        asked, jobs = len(self.core._asked), list(self.core._copies)
        self.world.oracle.violation(f"engine {self.number}: {asked} numbers were not answered, jobs {jobs} did not end")

    @property
    def _copies_now(self) -> bool:
        """True if a worker is in a copy, or seldom, so that engines are mostly killed there."""
        return any(worker.copying for worker in self.workers) or self.rng.random() < 0.1

    def kill(self) -> None:
        """The scheduler dies now, the workers with it or later; what they copy goes on until then."""
        self.world.oracle.covered["engines killed"] += 1
        self.world.oracle.covered["killed with a copy open"] += any(worker.copying for worker in self.workers)
        self.alive = False
        if self.end is not None:
            self.end.close()
        for worker in self.workers:
            seconds = self.rng.random() * self.rng.choice((0.0, 0.01, 0.5))
            self.world.loop.outside(seconds, lambda worker=worker: self._exit_worker(worker))  # type: ignore[misc]

    def _exit_worker(self, worker: SimulatedWorker) -> None:
        worker.alive = False
        worker.close()
        if not any(each.alive for each in self.workers):
            self.exit()

    def exit(self) -> None:
        """The last process has exited. The stack process sees that a little later."""
        self.alive, self.has_exited = False, True
        if self.end is not None:
            self.end.close()
        for worker in self.workers:
            worker.alive = False
            worker.close()
        self.world.loop.outside(self.rng.random() * 0.01, lambda: self.world.on_exit(self))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        rng, core = self.rng, self.core
        core.begin_turn()
        for _ in range(rng.randint(1, 4)):
            rng.choices((self._ask, self._store, self._look, self._say), (2, 2, 3, 1))[0]()
        if rng.random() < self.plan.resets:
            self._reset()
        if rng.random() < self.plan.weights and all(worker.life for worker in self.workers):
            self._replace_weights()  # not before the engine has started: they are those of its namespace then
        if core.loaded_weights and rng.random() < 0.3:  # seen late, as where a step takes long
            core.loaded_weights = False
            self._held_back = True
            core.reset()
            if core.joined:
                core.say(wire.HoldBack("other weights"))
            self.world.oracle.covered["engines held back"] += 1
        self._end_unsure()
        if core.serves and rng.random() < 0.5:
            core.want_rows()
        if self.rests.random() < 0.1:
            self.world.oracle.covered["rests"] += 1
            core.rest()
        self._send()
        for copy in core.ended:
            self._on_end(copy)
        core.ended.clear()

    def _send(self) -> None:
        if self.end is not None and self.core.out:
            self.end.send(self.core.out)
            self.core.out.clear()

    def _ask(self) -> None:
        chain = list(self.rng.choice(self.plan.chains))
        keys = chain[: self.rng.randint(1, len(chain))]
        self._last_request += 1
        request = self.core.request(f"r{self._last_request}", keys)
        if self.rng.random() < 0.5:
            request.extend(keys)
        self._requests.append((request, keys))
        if len(self._requests) > 6:
            self._requests.pop(0)[0].end()

    def _look(self) -> None:
        """Go on with a request: reserve what is below, load what is leased, or give it up."""
        if not self._requests:
            return
        request, keys = self.rng.choice(self._requests)
        found = self.core.lookup(request, keys)
        if LookupResult.RETRY in found and request.served:
            self.core.ask(request, keys)
        if self.rng.random() < 0.1:
            request.release()
        elif LookupResult.HIT_PENDING in found and request.served:
            wanted = [key for key, result in zip(keys, found, strict=True) if result is not LookupResult.MISS]
            self.core.reserve(request, wanted)
            self.world.oracle.covered["reservations"] += 1
        elif request.leased and request.served and self.rng.random() < 0.8:
            self._load(request)
        elif self.rng.random() < 0.3:
            self._requests = [each for each in self._requests if each[0] is not request]
            request.end(5, input_tokens=10, prompt=keys)

    def _end_requests(self) -> None:
        for request, _ in self._requests:
            if self.rng.random() < 0.8:
                request.end()
        self._requests.clear()

    def _say(self) -> None:
        keys = list(self.rng.choice(self.plan.chains))
        kinds = ("retain", "pin", "prefetch", "demote", "release")
        hint = wire.Hint(self.rng.choice(kinds), wire.Keys.of(keys), "s", self.rng.random() + 0.01)
        items = [wire.Announce(wire.Keys.of(keys)), wire.Computed(64, 0.2, 0.1)]
        if self.rng.random() < 0.05:
            items.append(wire.AskStats(rests=self.rests.random() < 0.5))
        self.core.say(self.rng.choice([*items, *([hint] if self.plan.hints else [])]))

    def _store(self) -> None:
        if not self.core.room:
            return
        chain = self.rng.choice(self.plan.chains)
        keys = list(chain[: self.rng.randint(1, len(chain))])
        fill = self.world.oracle.begin_fill(self.model, self.number, keys, self._foreign)
        waits = self.adapters.random() < 0.2
        part = self.core.begin_store(self._job(JobKind.STORE, keys), waits)
        if part is not None:
            self._begin(part, fill, None)
            if waits:
                self._unsure[part.job_id] = fill

    def _end_unsure(self) -> None:
        """Some stores are of an adapter that changed meanwhile, which is known only after the copies."""
        for job in list(self._unsure):
            if len(self.alone.get(job, {})) == len(self.workers):
                fill = self._unsure.pop(job)
                fill.refused = self.adapters.random() < 0.3
                self.world.oracle.covered["stores refused" if fill.refused else "stores confirmed"] += 1
                self.core.end_store(JobId(job), ESTALE if fill.refused else 0)

    def _load(self, request: ClientRequest) -> None:
        keys = [key for key in request.leased if self.rng.random() < 0.9]
        if not keys:
            return
        if self._resets:
            self.world.oracle.violation(f"engine {self.number}: loads before its reset is durable")
        load = Load(self.void_seen)
        part = self.core.begin_load(self._job(JobKind.LOAD, keys), request)
        assert part is not None
        self.loads[part.job_id] = load
        self._begin(part, None, load)

    def _job(self, kind: JobKind, keys: Sequence[OffloadKey]) -> TransferJob:
        factor = self.plan.layout.block_size_factor
        groups = []
        for group, members in groupby(sorted(keys, key=key_group), key_group):
            names = tuple(members)
            groups.append(GPUGroup(group, names, GPURuns.whole(range(len(names) * factor), factor)))
        return TransferJob(JobId(0), kind, tuple(groups))

    def _begin(self, part: TransferJob, fill: FillRecord | None, load: Load | None) -> None:
        """Hand a job to the workers, beside the connection: they may begin before the step is sent, or after."""
        for worker in self.workers:
            task = asyncio.ensure_future(worker.copy(part, fill, load, self.life))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def on_worker_done(self, job: TransferJob, worker: int, errors: list[int]) -> None:
        """A worker has ended its part. What all say of a load counts at once."""
        done = self.alone.setdefault(job.job_id, {})
        done[worker] = errors
        if len(done) == len(self.workers) and self.alive:
            load = self.loads.get(job.job_id)
            if load is not None and not any(map(any, done.values())):
                self._check(job.job_id, load, is_void=False)
            if load is not None:
                worst = [max(each) for each in zip(*done.values(), strict=True)]
                self.core.on_copied_alone(job.job_id, [failed(error) if error else LOADED for error in worst])

    def _on_end(self, copy: RowCopy) -> None:
        outcomes = list(chain.from_iterable(copy.outcomes()))
        for outcome in outcomes:
            self.world.oracle.covered[f"blocks {outcome.status.value}"] += 1
        load = self.loads.pop(copy.number, None)
        if load is not None and all(outcome.ok for outcome in outcomes):
            self._check(copy.number, load, is_void=True)

    def _check(self, job: int, load: Load, is_void: bool) -> None:
        """The pages of a load that succeeded are those of one fill of each key, of this namespace.

        With `is_void` it was reported as loaded: then no reset that the engine had been told of has overtaken it.
        """
        oracle = self.world.oracle
        by_key: dict[OffloadKey, set[int]] = {}
        for (key, worker, sub_block), page in load.pages.items():
            of = worker if worker < self.plan.layout.num_copies else 0
            fill = oracle.fill_of(page, key, of, sub_block)
            if fill is None or fill.model != self.model:
                oracle.violation(f"engine {self.number}, job {job}: a block was loaded with bytes of another one")
                return
            if fill.refused:
                oracle.violation(f"engine {self.number}, job {job}: loaded blocks that their engine has refused")
                return
            if fill.foreign and fill.owner != self.number:
                oracle.violation(f"engine {self.number}, job {job}: loaded blocks of other weights")
                return
            if is_void and fill.void.get(key, 1 << 60) <= load.void_seen:
                oracle.violation(f"engine {self.number}, job {job}: loaded what a reset has made void")
                return
            by_key.setdefault(key, set()).add(fill.number)
        if any(len(fills) > 1 for fills in by_key.values()):
            oracle.violation(f"engine {self.number}, job {job}: a block has pages of several stores")
        oracle.covered["loads compared"] += 1

    def _reset(self) -> None:
        self.world.oracle.covered["resets"] += 1
        self._resets = True
        self.core.reset()
        self._requests = [each for each in self._requests if not each[0].ended]
        if self.rng.random() < 0.4:
            self._asked_weights = self.core.ask_weights()

    def _replace_weights(self) -> None:
        """The workers load other weights: what is computed from here on is foreign to the namespace."""
        self._foreign = True
        for worker in self.workers:
            worker.load_weights()
