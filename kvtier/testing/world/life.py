"""One life of a simulated process: a production stack, several tasks that use it at once, and an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from kvtier.control.plane import ControlPlane
from kvtier.control.slots import SlotState
from kvtier.errors import ResourceError, UsageError
from kvtier.jobs import GPURuns, GroupTransfer, JobKind, JobResult, int_array
from kvtier.keys import OffloadKey, RequestId, key_group
from kvtier.loadstore import LoadStore, LookupResult
from kvtier.stack.tierstack import TierStack
from kvtier.testing.world.plan import GPU_BLOCKS, Plan
from kvtier.testing.world.tiers import GPUPages
from kvtier.testing.world.watch import Bytes, Watch
from kvtier.testing.world.weather import Weather

ENDS_LATE_SECONDS = 40.0
"""How long after its deadline a call may go on: a copy that is under way is never cut short."""


LEASES_EXPIRE_SECONDS = 200.0
"""Time enough for a process to see that a lease is not renewed, and to sweep."""


@dataclass(slots=True)
class Surroundings:
    """What a life is given: its plan, its dice, its oracle, the GPU's memory, and what makes the weather."""

    plan: Plan
    dice: Random
    watch: Watch
    gpu: GPUPages
    fs: LoadStore
    set_weather: Callable[[Weather], None]
    files_open: Callable[[], int]
    temporaries: Callable[[], list[str]]
    counters: Callable[[], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Part:
    """One group of a transfer, the GPU blocks lent to it, and ((sub-block, GPU block), key) for each page."""

    group: GroupTransfer
    gpu: list[int]
    pages: list[tuple[tuple[int, int], OffloadKey]]


class Life:
    """Uses one stack from open to close. `calm` lives have no faults and must find everything in order."""

    def __init__(self, stack: TierStack, around: Surroundings, weather: Weather, calm: bool) -> None:
        self.stack = stack
        self.calm = calm
        self.on_open: Callable[[], None] = lambda: None
        self.on_reset: Callable[[], None] = lambda: None
        self._weather = weather
        self._around = around
        self._plan, self._dice, self._watch = around.plan, around.dice, around.watch
        self._free = list(range(GPU_BLOCKS))
        self._requests = 0
        self._partial = self._dice.choice((0.0, 0.2))
        self.is_open = False
        self._opened: ControlPlane | None = None
        self._cuts: list[list[int]] = []

    @property
    def plane(self) -> ControlPlane:
        """The control plane of the open stack."""
        assembled = self.stack._assembled
        assert assembled is not None
        return assembled.plane

    def bury(self) -> None:
        """The process died: nobody misses that its stack was not closed."""
        self.stack._assembled = None

    def sum_up(self) -> None:
        """Count what the stack has done."""
        if self._opened is not None:
            covered, board = self._watch.record.covered, self._opened.board
            covered["rows evicted"] += board.cpu.evictions
            for lower, cuts in zip(board.lowers, self._cuts, strict=True):
                covered["blocks late"] += lower.counters.late
                if lower.owned is not None:
                    covered["blocks evicted from disk"] += lower.owned.evictions
                    now = lower.owned.placement.region_generation
                    covered["regions cut again"] += sum(max(0, b - max(a, 1)) for a, b in zip(cuts, now, strict=True))
            covered.update({f"fs {name}": count for name, count in self._around.counters().items()})
            if self._around.counters().get("defect"):
                self._watch.complain("something was raised in the tier below that nobody expected")

    async def run(self) -> None:
        """Open, use, close. What the stack must not do is told to the watch."""
        self._around.set_weather(self._weather)
        try:
            await self.stack.open()
        except ResourceError as error:
            self._watch.note(f"open failed: {type(error).__name__}")
            self._watch.record.covered["opens that failed"] += 1
            if self.calm:
                self._watch.complain(f"a stack did not open on a calm day: {error}")
            await self._let_go("an open that failed")
            return
        self._watch.note("open")
        self._watch.plane = self._opened = self.plane
        owned = [lower.owned for lower in self.plane.board.lowers]
        self._cuts = [list(tier.placement.region_generation) if tier is not None else [] for tier in owned]
        self._watch.record.covered["blocks recovered"] += sum(len(tier.directory) for tier in owned if tier is not None)
        self.is_open = True
        self.on_open()
        self._look()
        tasks = [asyncio.ensure_future(self._task(number)) for number in range(self._plan.tasks)]
        if not self.calm and self._dice.random() < 0.2:
            await asyncio.sleep(self._dice.random() * 0.2)
        else:
            await asyncio.gather(*tasks)
        if self.calm:
            await self._prove()
            if self._plan.shares_root:
                await self._sweep()
        await self._close()
        await asyncio.gather(*tasks)

    async def _task(self, number: int) -> None:
        actions = (self._store, self._store, self._load, self._load, self._load_cancelled, self._store_cancelled)
        rare = [self._reset, self._settle, self._reserve, self._pause, self._lookup]
        for _ in range(self._plan.actions):
            action = self._dice.choice(actions if self._dice.random() < 0.8 else rare)
            try:
                await action()
            except UsageError:
                if self.is_open:
                    raise
                return
            self.check()

    def check(self) -> None:
        """Every sum of the state machine agrees."""
        if self._watch.plane is not None:
            self._watch.plane.check_integrity()

    # -- what an embedder does -----------------------------------------------------------------------------------

    def _pick(self, favour_stored: bool = False) -> list[list[OffloadKey]]:
        """Some keys of each group, in the order of groups; as many as there are GPU blocks for."""
        picked = []
        room = len(self._free) // self._plan.layout.block_size_factor
        for group in range(len(self._plan.layout.groups)):
            known = [key for key in self._plan.keys if key_group(key) == group]
            if favour_stored:
                known = [key for key in known if key in self._watch.record.stored] or known
            most = min(len(known), room)
            count = min(most, self._dice.choice((1, 2, 3, 5, 12)))
            room -= count
            picked.append(self._dice.sample(known, count) if self._dice.random() < 0.8 else [])
        return picked

    def _groups(self, keys: list[list[OffloadKey]], partial: float) -> list[Part]:
        """Transfers on GPU blocks that are free; `partial` is the chance that a block's first ones are left out."""
        factor = self._plan.layout.block_size_factor
        parts = []
        for own in keys:
            if not own:
                continue
            firsts, counts, gpu, pages = [], [], [], []
            for key in own:
                first = self._dice.randrange(factor) if self._dice.random() < partial else 0
                firsts.append(first)
                counts.append(factor - first)
                for sub in range(first, factor):
                    gpu.append(self._free.pop(self._dice.randrange(len(self._free))))
                    pages.append(((sub, gpu[-1]), key))
            runs = GPURuns(int_array(range(len(own))), int_array(firsts), int_array(counts), int_array(gpu))
            parts.append(Part(GroupTransfer(key_group(own[0]), tuple(own), runs), gpu, pages))
        return parts

    def _give_back(self, parts: list[Part]) -> None:
        for part in parts:
            self._free += part.gpu

    def _smear(self, parts: list[Part], value: int) -> None:
        """Overwrite GPU blocks: what they held is gone."""
        for part in parts:
            for pages in self._around.gpu:
                pages[part.group.group][part.gpu] = value

    def _timeout(self) -> float | None:
        return self._dice.choice((None, None, None, None, None, 0.5, 0.5, 0.01, 0.0))

    async def _store(self, cancel_after: float | None = None) -> None:
        parts = self._groups(self._pick(), self._partial)
        if not parts:
            return
        job = self.stack.job(JobKind.STORE, [part.group for part in parts], self._timeout())

        async def store() -> JobResult:
            self._compute(parts)
            return await self.stack.store(job)

        try:
            result = await self._in_time(store(), job.deadline, cancel_after)
        finally:
            self._give_back(parts)
            self._smear(parts, 0xDB)
        self._tell("store", parts, result)

    def _compute(self, parts: list[Part]) -> None:
        """The engine computes blocks with the weights of the moment."""
        record = self._watch.record
        for part in parts:
            for (sub, gpu), key in part.pages:
                for worker, pages in enumerate(self._around.gpu):
                    page = pages[part.group.group][gpu]
                    page[:] = record.contents(key, record.generation, (worker, sub), len(page))
            self._watch.storing(part.group.keys)

    async def _load(self, cancel_after: float | None = None) -> None:
        parts = self._groups(self._pick(self._dice.random() < 0.8), self._partial)
        if not parts:
            return
        blocks = [(int(part.group.group), gpu) for part in parts for gpu in part.gpu]
        self._smear(parts, 0xEE)
        job = self.stack.job(JobKind.LOAD, [part.group for part in parts], self._timeout())
        self._watch.gpu_lent(blocks, job)
        allowed: set[int] = set()

        async def load() -> JobResult:
            allowed.update(self._watch.allowed)
            return await self.stack.load(job)

        try:
            result = await self._in_time(load(), job.deadline, cancel_after)
            if result is not None:
                self._compare(parts, result, allowed | self._watch.allowed)
        finally:
            self._watch.gpu_back(blocks)
            self._give_back(parts)
        self._tell("load", parts, result)

    def _compare(self, parts: list[Part], result: JobResult, allowed: set[int]) -> None:
        for part, outcomes in zip(parts, result.outcomes, strict=True):
            ok = [key for key, outcome in zip(part.group.keys, outcomes, strict=True) if outcome.ok]
            found: dict[OffloadKey, list[tuple[tuple[int, int], Bytes]]] = {key: [] for key in ok}
            for (sub, gpu), key in part.pages:
                if key in found:
                    for worker, pages in enumerate(self._around.gpu):
                        found[key].append(((worker, sub), pages[part.group.group][gpu]))
            for key, pages_found in found.items():
                self._watch.loaded(key, pages_found, allowed)

    async def _in_time(self, call: object, deadline: float | None, cancel_after: float | None) -> JobResult | None:
        """Await a call of the stack, perhaps cancel it. None if it was cancelled."""
        task = asyncio.ensure_future(call)  # type: ignore[call-overload]
        loop = asyncio.get_running_loop()
        if cancel_after is not None:
            loop.call_later(cancel_after, task.cancel)
        try:
            result: JobResult = await task
        except asyncio.CancelledError:
            self._watch.record.covered["calls cancelled"] += 1
            return None
        if deadline is not None and loop.time() > deadline + ENDS_LATE_SECONDS:
            self._watch.complain(f"a call went on for {loop.time() - deadline:.1f} s after its deadline")
        return result

    def _tell(self, what: str, parts: list[Part], result: JobResult | None) -> None:
        keys = ",".join(key.hex()[:4] for part in parts for key in part.group.keys)
        outcomes = [outcome for group in result.outcomes for outcome in group] if result is not None else []
        said = ",".join(f"{one.status}:{one.reason}" if one.reason else str(one.status) for one in outcomes)
        self._watch.note(f"{what} {keys}: {said or 'cancelled'}")

    def _moment(self) -> float:
        return self._dice.choice((0.0, 1e-5, 1e-3, 0.1)) * self._dice.random()

    async def _load_cancelled(self) -> None:
        await self._load(self._moment())

    async def _store_cancelled(self) -> None:
        await self._store(self._moment())

    async def _pause(self) -> None:
        await asyncio.sleep(self._dice.choice((0.0, 0.01, 2.0)) * self._dice.random())

    async def _settle(self) -> None:
        settled = await self.stack.settle(self._dice.choice((0.01, 1.0, 30.0)))
        self._watch.note(f"settle: {settled}")

    async def _reserve(self) -> None:
        self._requests += 1
        name = RequestId(f"request {self._requests}")
        self.stack.reserve(name, self._dice.sample(self._plan.keys, min(len(self._plan.keys), 4)))
        await self._pause()
        self.stack.end_request(name)

    async def _reset(self) -> None:
        generation = self._watch.reset_begins()
        self._watch.note(f"reset to {generation}")
        self.on_reset()
        try:
            await self.stack.reset()
        except (ResourceError, UsageError) as error:
            self._watch.note(f"reset failed: {type(error).__name__}")
            self._watch.record.covered["resets that failed"] += 1
            if self.calm and self.is_open:
                self._watch.complain(f"a reset failed on a calm day: {error}")
            if not self.is_open:
                return
        else:
            self._watch.reset_returned(generation)
            self._watch.record.covered["resets"] += 1
            self._watch.note(f"reset {generation} is done")
        self._look()

    async def _lookup(self) -> None:
        """Ask where keys are; a shared tier is asked in turn."""
        keys = self._dice.sample(self._plan.keys, min(len(self._plan.keys), 6))
        allowed = set(self._watch.allowed)
        found = await self.stack.lookup(keys)
        self._watch.found(keys, ["a row" if one is LookupResult.HIT else None for one in found], allowed)

    def _look(self) -> None:
        """What is said to be somewhere was stored since the last reset."""
        self._watch.found(self._plan.keys, self.stack.locate(self._plan.keys))

    # -- the end -------------------------------------------------------------------------------------------------

    async def _prove(self) -> None:
        """On a calm day all that is reachable is right, and what is stored can be loaded."""
        self._partial = 0.0
        self._timeout = lambda: 30.0  # type: ignore[method-assign]
        at_once = GPU_BLOCKS // self._plan.layout.block_size_factor
        keys = self._plan.keys
        for start in range(0, len(keys), at_once):
            await self._move(keys[start : start + at_once], self._load)
        key = self._dice.choice(keys)
        await self._move([key], self._store)
        covered = self._watch.record.covered
        before = covered["blocks loaded and compared"]
        await self._move([key], self._load)
        if covered["blocks loaded and compared"] == before:
            self._watch.complain(f"key {key.hex()[:8]} was stored on a calm day and could not be loaded")

    async def _sweep(self) -> None:
        """What dead processes left in a shared root is gone once their leases have expired."""
        await self.stack.settle(60)
        await asyncio.sleep(LEASES_EXPIRE_SECONDS)
        left = self._around.temporaries()
        if left:
            self._watch.complain(f"{', '.join(left)} are there {LEASES_EXPIRE_SECONDS} s after a calm open")

    async def _move(self, keys: Sequence[OffloadKey], action: Callable[[], Awaitable[None]]) -> None:
        """Load or store just these keys."""
        groups = range(len(self._plan.layout.groups))
        picked = [[key for key in keys if key_group(key) == group] for group in groups]
        self._pick = lambda favour_stored=False: picked  # type: ignore[method-assign]
        await action()

    async def _close(self) -> None:
        self.is_open = False
        if self.calm:
            await self.stack.settle(60)
        self._watch.note("close")
        await self.stack.close()
        report = self.stack.close_report
        assert report is not None
        self._watch.note(f"closed: {report.unfinished_jobs} jobs unfinished")
        self.check()
        if report.unfinished_jobs:
            self._watch.plane = None
            if self.calm:
                self._watch.complain(f"{report.unfinished_jobs} jobs had not ended at the close of a calm day")
            return
        for lower in (self.plane.board.cpu, *(lower.owned for lower in self.plane.board.lowers)):
            if lower is None:
                continue
            counts = lower.table.counts
            if counts[SlotState.FILLING] or counts[SlotState.QUARANTINED]:
                self._watch.complain(f"{lower.name} closed with slots not accounted for: {counts}")
        await self._let_go("close")

    async def _let_go(self, what: str) -> None:
        """A tier whose I/O outlived its close lets go of everything when it is closed again after that has ended."""
        self._watch.plane = None  # nobody is given a row any more, so what is stuck may go on
        if self._around.files_open() and not self.calm:
            self._around.set_weather(Weather())
            await asyncio.sleep(ENDS_LATE_SECONDS)
            await self._around.fs.close()
        if self._around.files_open():
            self._watch.complain(f"{self._around.files_open()} files are open after {what}")
