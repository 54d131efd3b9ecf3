"""One simulated process: it opens a production stack, uses it from several tasks at once, and closes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.tiers.slot_table import SlotState
from kvtier.errors import ResourceError, UsageError
from kvtier.stack.tier_stack import TierStack
from kvtier.tier.contract import LoadStore, LookupResult
from kvtier.types.arrays import int_array
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import DropReason, GPUGroup, JobKind, JobResult, dropped
from kvtier.types.keys import OffloadKey, RequestId, key_group
from simulator.ages import RECLAIM_SECONDS, AgeWatch
from simulator.fault_profile import FaultProfile
from simulator.hints import HintStream
from simulator.oracle import Bytes, Oracle
from simulator.requests import RequestStream
from simulator.seed_plan import GPU_BLOCKS, SeedPlan
from simulator.tiers import GPUPages, GroupBuffers

ENDS_LATE_SECONDS = 40.0
"""How long after its deadline a call may go on: a copy in flight is never interrupted."""

LEASES_EXPIRE_SECONDS = 200.0
"""Time enough for a process to see that a lease is not renewed, and to sweep."""

PREFETCHES_END_SECONDS = 40.0


@dataclass(slots=True)
class ProcessEnvironment:
    """What a process works with: its plan, rng and oracle, the GPU's memory, and hooks into the simulated system."""

    plan: SeedPlan
    rng: Random
    oracle: Oracle
    gpu: GPUPages
    fs: LoadStore
    set_fault_profile: Callable[[FaultProfile], None]
    files_open: Callable[[], int]
    temporaries: Callable[[], list[str]]
    counters: Callable[[], Mapping[str, int]]
    ages: AgeWatch | None = None


class SimulatedProcess:
    """Uses one stack from open to close. A `faultless` process has no faults and must find everything intact."""

    def __init__(
        self, stack: TierStack, environment: ProcessEnvironment, fault_profile: FaultProfile, faultless: bool
    ) -> None:
        self.stack = stack
        self.faultless = faultless
        self.on_open: Callable[[], None] = lambda: None
        self.on_reset: Callable[[], None] = lambda: None
        self._fault_profile = fault_profile
        self._environment = environment
        self._plan, self._rng, self._oracle = environment.plan, environment.rng, environment.oracle
        self._free = list(range(GPU_BLOCKS))
        self._requests = 0
        self._stream = RequestStream(stack, self._plan.prompts, self._rng)
        self._hints = HintStream(stack, self._plan.hinted, Random(repr(self._plan.hinted[:1])))
        self._partial = self._rng.choice((0.0, 0.2))
        self.is_open = False
        self._opened: ControlPlane | None = None
        self._formats_at_open: list[list[int]] = []

    @property
    def plane(self) -> ControlPlane:
        """The control plane of the open stack."""
        assembled = self.stack._assembled
        assert assembled is not None
        return assembled.plane

    def discard_stack(self) -> None:
        """The process has died: its stack, not closed, must not complain about that."""
        self.stack._assembled = None

    def count_coverage(self) -> None:
        """Count what the stack has done."""
        if self._opened is not None:
            covered, state = self._oracle.record.covered, self._opened.control
            covered["rows evicted"] += state.cpu.evictions
            covered["blocks of hints"] += self._hints.accepted
            for lower, formats in zip(state.lowers, self._formats_at_open, strict=True):
                covered["blocks late"] += lower.counters.late
                if lower.owned is not None:
                    covered["blocks evicted from disk"] += lower.owned.evictions
                    now = lower.owned.placement.region_generation
                    covered["regions formatted again"] += sum(
                        max(0, b - max(a, 1)) for a, b in zip(formats, now, strict=True)
                    )
            covered.update({f"fs {name}": count for name, count in self._environment.counters().items()})
            if self._environment.counters().get("defect"):
                self._oracle.violation("the tier below caught an exception it did not expect")

    async def run(self) -> None:
        """Open, use, close. The oracle records what the stack must not do."""
        self._environment.set_fault_profile(self._fault_profile)
        try:
            await self.stack.open()
        except ResourceError as error:
            self._oracle.note(f"open failed: {type(error).__name__}")
            self._oracle.record.covered["opens that failed"] += 1
            if self.faultless:
                self._oracle.violation(f"a stack did not open without faults: {error}")
            await self._check_released("an open that failed")
            return
        self._oracle.note("open")
        self._oracle.plane = self._opened = self.plane
        owned = [lower.owned for lower in self.plane.control.lowers]
        self._formats_at_open = [list(tier.placement.region_generation) if tier is not None else [] for tier in owned]
        self._oracle.record.covered["blocks recovered"] += sum(
            len(tier.directory) for tier in owned if tier is not None
        )
        self.is_open = True
        self.on_open()
        self._check_locations()
        tasks = [asyncio.ensure_future(self._task(number)) for number in range(self._plan.tasks)]
        if not self.faultless and self._rng.random() < 0.2:
            await asyncio.sleep(self._rng.random() * 0.2)
        else:
            await asyncio.gather(*tasks)
        if self.faultless:
            await self._check_contents()
            if self._plan.shares_root:
                await self._sweep()
            await self._grow_old()
        await self._close()
        await asyncio.gather(*tasks)

    async def _task(self, number: int) -> None:
        actions = (self._store, self._store, self._load, self._load, self._load_cancelled, self._store_cancelled)
        rare = [self._reset, self._drain, self._reserve, self._pause, self._lookup]
        for _ in range(self._plan.actions):
            action = self._rng.choice(actions if self._rng.random() < 0.8 else rare)
            try:
                self._stream.step()
                self._hints.step()
                await action()
            except UsageError:
                if self.is_open:
                    raise
                return
            self.check()

    def check(self) -> None:
        """Every sum of the state machine agrees."""
        if self._oracle.plane is not None:
            self._oracle.plane.check_integrity()

    # -- what an embedder does -----------------------------------------------------------------------------------

    def _pick(self, favour_stored: bool = False) -> list[list[OffloadKey]]:
        """Some keys of each group, in the order of groups; as many as there are GPU blocks for."""
        picked = []
        room = len(self._free) // self._plan.layout.block_size_factor
        if self._stream.prompt and self._rng.random() < 0.7:
            return self._stream.by_group(len(self._plan.layout.groups), room)
        for group in range(len(self._plan.layout.groups)):
            known = [key for key in self._plan.keys if key_group(key) == group]
            if favour_stored:
                known = [key for key in known if key in self._oracle.record.stored] or known
            most = min(len(known), room)
            count = min(most, self._rng.choice((1, 2, 3, 5, 12)))
            room -= count
            picked.append(self._rng.sample(known, count) if self._rng.random() < 0.8 else [])
        return picked

    def _groups(self, keys: list[list[OffloadKey]], partial: float) -> list[GroupBuffers]:
        """Transfers on GPU blocks that are free; `partial` is the chance that a block's first ones are left out."""
        factor = self._plan.layout.block_size_factor
        parts = []
        for own in keys:
            if not own:
                continue
            firsts, counts, gpu, pages = [], [], [], []
            for key in own:
                first = self._rng.randrange(factor) if self._rng.random() < partial else 0
                firsts.append(first)
                counts.append(factor - first)
                for sub in range(first, factor):
                    gpu.append(self._free.pop(self._rng.randrange(len(self._free))))
                    pages.append(((sub, gpu[-1]), key))
            runs = GPURuns(int_array(range(len(own))), int_array(firsts), int_array(counts), int_array(gpu))
            parts.append(GroupBuffers(GPUGroup(key_group(own[0]), tuple(own), runs), gpu, pages))
        return parts

    def _return_blocks(self, parts: list[GroupBuffers]) -> None:
        for part in parts:
            self._free += part.gpu

    def _overwrite(self, parts: list[GroupBuffers], value: int) -> None:
        """Overwrite GPU blocks, so that old contents cannot pass as loaded."""
        for part in parts:
            for pages in self._environment.gpu:
                pages[part.group.group][part.gpu] = value

    def _timeout(self) -> float | None:
        return self._rng.choice((None, None, None, None, None, 0.5, 0.5, 0.01, 0.0))

    async def _store(self, cancel_after: float | None = None) -> None:
        parts = self._groups(self._pick(), self._partial)
        if not parts:
            return
        job = self.stack.job(JobKind.STORE, [part.group for part in parts], self._timeout())

        async def store() -> JobResult:
            self._compute(parts)
            return await self.stack.run(job)

        try:
            result = await self._in_time(store(), job.deadline, cancel_after)
        finally:
            self._return_blocks(parts)
            self._overwrite(parts, 0xDB)
        self._report("store", parts, result)

    def _compute(self, parts: list[GroupBuffers]) -> None:
        """The engine computes blocks with the weights of the moment."""
        record = self._oracle.record
        for part in parts:
            for (sub, gpu), key in part.pages:
                for worker, pages in enumerate(self._environment.gpu):
                    page = pages[part.group.group][gpu]
                    page[:] = record.contents(key, record.generation, (worker, sub), len(page))
            self._oracle.storing(part.group.keys)

    async def _load(self, cancel_after: float | None = None) -> None:
        parts = self._groups(self._pick(self._rng.random() < 0.8), self._partial)
        if not parts:
            return
        blocks = [(int(part.group.group), gpu) for part in parts for gpu in part.gpu]
        self._overwrite(parts, 0xEE)
        job = self.stack.job(JobKind.LOAD, [part.group for part in parts], self._timeout())
        self._oracle.gpu_begins(blocks, job)
        allowed: set[int] = set()

        async def load() -> JobResult:
            allowed.update(self._oracle.allowed)
            return await self.stack.run(job)

        try:
            result = await self._in_time(load(), job.deadline, cancel_after)
            if result is not None:
                self._compare(parts, result, allowed | self._oracle.allowed)
        finally:
            self._oracle.gpu_ends(blocks)
            self._return_blocks(parts)
        self._report("load", parts, result)

    def _compare(self, parts: list[GroupBuffers], result: JobResult, allowed: set[int]) -> None:
        for part, outcomes in zip(parts, result.outcomes, strict=True):
            ok = [key for key, outcome in zip(part.group.keys, outcomes, strict=True) if outcome.ok]
            found: dict[OffloadKey, list[tuple[tuple[int, int], Bytes]]] = {key: [] for key in ok}
            for (sub, gpu), key in part.pages:
                if key in found:
                    for worker, pages in enumerate(self._environment.gpu):
                        found[key].append(((worker, sub), pages[part.group.group][gpu]))
            for key, pages_found in found.items():
                self._oracle.loaded(key, pages_found, allowed)

    async def _in_time(self, call: object, deadline: float | None, cancel_after: float | None) -> JobResult | None:
        """Await a call of the stack, perhaps cancel it. None if it was cancelled."""
        task = asyncio.ensure_future(call)  # type: ignore[call-overload]
        loop = asyncio.get_running_loop()
        if cancel_after is not None:
            loop.call_later(cancel_after, task.cancel)
        try:
            result: JobResult = await task
        except asyncio.CancelledError:
            self._oracle.record.covered["calls cancelled"] += 1
            return None
        if deadline is not None and loop.time() > deadline + ENDS_LATE_SECONDS:
            self._oracle.violation(f"a call went on for {loop.time() - deadline:.1f} s after its deadline")
        return result

    def _report(self, what: str, parts: list[GroupBuffers], result: JobResult | None) -> None:
        keys = ",".join(key.hex()[:4] for part in parts for key in part.group.keys)
        outcomes = [outcome for group in result.outcomes for outcome in group] if result is not None else []
        self._oracle.record.covered["blocks bypassed"] += outcomes.count(dropped(DropReason.BYPASSED))
        said = ",".join(f"{one.status}:{one.reason}" if one.reason else str(one.status) for one in outcomes)
        self._oracle.note(f"{what} {keys}: {said or 'cancelled'}")

    def _moment(self) -> float:
        return self._rng.choice((0.0, 1e-5, 1e-3, 0.1)) * self._rng.random()

    async def _load_cancelled(self) -> None:
        await self._load(self._moment())

    async def _store_cancelled(self) -> None:
        await self._store(self._moment())

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 0.01, 2.0)) * self._rng.random())

    async def _drain(self) -> None:
        drained = await self.stack.drain(self._rng.choice((0.01, 1.0, 30.0)))
        self._oracle.note(f"drain: {drained}")

    async def _reserve(self) -> None:
        self._requests += 1
        keys = self._rng.sample(self._plan.keys, min(len(self._plan.keys), 4))
        request = self.stack.request(RequestId(f"request {self._requests}"))
        request.reserve(keys)
        await self._pause()
        request.end()

    async def _reset(self) -> None:
        before = self._oracle.allowed
        generation = self._oracle.reset_begins()
        self._oracle.note(f"reset to {generation}")
        self.on_reset()
        try:
            await self.stack.reset()
        except (ResourceError, UsageError) as error:
            if isinstance(error, UsageError):  # refused, as the stack closes: nothing has changed
                self._oracle.allowed |= before
            self._oracle.note(f"reset failed: {type(error).__name__}")
            self._oracle.record.covered["resets that failed"] += 1
            if self.faultless and self.is_open:
                self._oracle.violation(f"a reset failed without faults: {error}")
            if not self.is_open:
                return
        else:
            self._oracle.reset_returned(generation)
            self._oracle.record.covered["resets"] += 1
            self._oracle.note(f"reset {generation} is done")
        self._check_locations()

    async def _lookup(self) -> None:
        """Look keys up, in a shared tier as well."""
        keys = self._rng.sample(self._plan.keys, min(len(self._plan.keys), 6))
        allowed = set(self._oracle.allowed)
        found = await self.stack.lookup(keys)
        self._oracle.found(keys, ["a row" if one is LookupResult.HIT else None for one in found], allowed)

    def _check_locations(self) -> None:
        """Every key that the stack locates was stored since the last reset."""
        where = self.stack.locate(self._plan.keys)
        self._oracle.found(self._plan.keys, where)
        if self._environment.ages is not None:
            self._environment.ages.located(self._plan.keys, where)

    # -- the end -------------------------------------------------------------------------------------------------

    async def _check_contents(self) -> None:
        """Without faults all that is reachable is right, and what is stored can be loaded."""
        self._hints.release()
        self._partial = 0.0
        self._timeout = lambda: 30.0  # type: ignore[method-assign]
        at_once = GPU_BLOCKS // self._plan.layout.block_size_factor
        keys = self._plan.keys
        for start in range(0, len(keys), at_once):
            await self._move(keys[start : start + at_once], self._load)
        if self.plane.hints.prefetches.busy:  # one that waits for rows may take that of the block stored next
            await asyncio.sleep(PREFETCHES_END_SECONDS)
        key = self._rng.choice(keys)
        covered = self._oracle.record.covered
        bypassed = covered["blocks bypassed"]
        await self._move([key], self._store)
        before = covered["blocks loaded and compared"]
        await self._move([key], self._load)
        if covered["blocks loaded and compared"] == before and covered["blocks bypassed"] == bypassed:
            self._oracle.violation(f"key {key.hex()[:8]} was stored without faults and could not be loaded")

    async def _sweep(self) -> None:
        """What dead processes left in a shared root is gone once their leases have expired."""
        await self.stack.drain(60)
        await asyncio.sleep(LEASES_EXPIRE_SECONDS)
        left = self._environment.temporaries()
        if left:
            self._oracle.violation(f"{', '.join(left)} are there {LEASES_EXPIRE_SECONDS} s after an open")

    async def _grow_old(self) -> None:
        """Where blocks have a `max_age`: nothing is done until they have passed it."""
        ages = self._environment.ages
        if ages is not None:
            await self.stack.drain(60)
            await asyncio.sleep(ages.plan.max_age_seconds + RECLAIM_SECONDS)
            ages.kept(self.plane)

    async def _move(self, keys: Sequence[OffloadKey], action: Callable[[], Awaitable[None]]) -> None:
        """Load or store just these keys."""
        groups = range(len(self._plan.layout.groups))
        picked = [[key for key in keys if key_group(key) == group] for group in groups]
        self._pick = lambda favour_stored=False: picked  # type: ignore[method-assign]
        await action()

    async def _close(self) -> None:
        self.is_open = False
        if self.faultless:
            await self.stack.drain(60)
        self._oracle.note("close")
        await self.stack.close()
        report = self.stack.close_report
        assert report is not None
        self._oracle.note(f"closed: {report.unfinished_jobs} jobs unfinished")
        self.check()
        if report.unfinished_jobs:
            self._oracle.plane = None
            if self.faultless:
                self._oracle.violation(f"{report.unfinished_jobs} jobs had not ended at the close without faults")
            return
        for lower in (self.plane.control.cpu, *(lower.owned for lower in self.plane.control.lowers)):
            if lower is None:
                continue
            counts = lower.table.counts
            if counts[SlotState.FILLING] or counts[SlotState.QUARANTINED]:
                self._oracle.violation(f"{lower.name} closed with slots not accounted for: {counts}")
        await self._check_released("close")

    async def _check_released(self, what: str) -> None:
        """A tier whose I/O outlived its close releases everything when it is closed again after that I/O."""
        self._oracle.plane = None  # no row is handed out any more, so stuck I/O may go on
        if self._environment.files_open() and not self.faultless:
            self._environment.set_fault_profile(FaultProfile())
            await asyncio.sleep(ENDS_LATE_SECONDS)
            await self._environment.fs.close()
        if self._environment.files_open():
            self._oracle.violation(f"{self._environment.files_open()} files are open after {what}")
