"""The serving loop: what an engine does with a tier stack, without a model.

For each request, in prefix order: blocks that the GPU still holds are used where they are; blocks that the stack
holds are loaded into fresh GPU blocks and compared byte for byte before anything uses them; the rest is "computed",
that is, written as its key demands. Computed blocks that are whole are stored. A block whose load failed is computed.

The loop goes as fast as it can, without a trace's clock, so it would outrun the disks and write-through would drop
what finds no room. Flow control takes the clock's place: before and after each store the loop waits
until at most `backlog` demotions are queued or in flight. Without a backlog a request served alone finds no transfer
under way when it looks up, stores or ends, so what a policy may evict does not depend on the disks' speed.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.planner import GroupLoad, StoreMode, StorePlan, StorePlanner, plan_load, usable_prefix
from kvtier.planner.prefix import window_start
from kvtier.tier.contract import LookupResult
from kvtier.tools.replay.content import Pages, WrongPage
from kvtier.tools.replay.engine import NO_BLOCK, EngineBlocks
from kvtier.traces.requests import KeyChain, Request, group_keys, offload_keys
from kvtier.types.arrays import IntArray, distinct, int_array
from kvtier.types.geometry import KVLayout
from kvtier.types.jobs import BlockOutcome, BlockStatus, GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import OffloadKey, RequestId
from kvtier.types.requests import RequestInfo

WRONG_PAGES_KEPT = 16
DRAIN_SECONDS = 60.0
LOADABLE = (LookupResult.HIT, LookupResult.HIT_PENDING)

Flags = npt.NDArray[np.bool_]
Prefill = Callable[[Request, int], Awaitable[None]]
"""Called with a request and how many tokens of its prompt are left to compute; returns when the first token is out."""


class ReplayedRequest(Protocol):
    """The calls of a request that the loop makes."""

    def touch(self, keys: Sequence[OffloadKey]) -> None: ...
    def end(self, output_tokens: int | None) -> None: ...


class ServedStack(Protocol):
    """Calls of a stack that the loop needs: a `TierStack`, or one in virtual time."""

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]: ...
    def locate(self, keys: Sequence[OffloadKey]) -> list[str | None]: ...
    def job(self, kind: JobKind, groups: Sequence[GPUGroup]) -> TransferJob: ...
    async def run(self, job: TransferJob) -> JobResult: ...
    def request(
        self, request_id: RequestId, keys: Sequence[OffloadKey], *, info: RequestInfo | None, time: float | None
    ) -> ReplayedRequest: ...
    async def drain(self, timeout_seconds: float, backlog: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the loop: how many requests are served at once, how many demotions may be queued or in flight when the
    next request begins, how many blocks one store names.

    Hits in the loop's own cache are counted under `gpu_name`, hits of blocks still on their way into a tier under
    `cpu_name`.
    """

    concurrency: int = 1
    backlog: int = 0
    store_blocks: int = 256
    gpu_name: str = "gpu"
    cpu_name: str = "cpu"


@dataclass(slots=True)
class Counts:
    """Counts of a run: `hit_tokens` by tier; `stored`, `loaded`, `verified` and `mismatched` in offloaded blocks, and
    `earlier`: those loaded that were in the stack before this loop began.

    `gpu_verified` counts GPU blocks that were hit in place and compared too. `block_references` and `block_hits` leave
    the GPU out: of the prompts' offloaded blocks of the first group, those in the longest prefix that the stack held
    when the request was looked up, a prompt's last block included.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    stored: int = 0
    dropped: int = 0
    loaded: int = 0
    earlier: int = 0
    load_failed: int = 0
    verified: int = 0
    mismatched: int = 0
    gpu_verified: int = 0
    computed: int = 0
    block_references: int = 0
    block_hits: int = 0
    longest_load: int = 0
    wrong: list[WrongPage] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request in flight; every list has one entry for each group, every position counts GPU blocks.

    `keys` are the GPU blocks' keys, `offload` the offloaded blocks', `in_stack` and `where` the stack's answers for
    those. The first `computed` blocks were hit on the GPU, those up to `length` in the stack. `tables` hold GPU block
    ids (NO_BLOCK: not needed), and `missing` marks those that still have to be filled.
    """

    request_id: RequestId
    request: Request
    keys: list[tuple[OffloadKey, ...]]
    offload: list[tuple[OffloadKey, ...]]
    in_stack: list[list[bool]] = field(default_factory=list)
    where: list[list[str | None]] = field(default_factory=list)
    computed: int = 0
    length: int = 0
    tables: list[IntArray] = field(default_factory=list)
    missing: list[Flags] = field(default_factory=list)

    def pages(self, group: int, positions: IntArray) -> Pages:
        """The GPU blocks at some positions, with the keys they are to hold."""
        keys = self.keys[group]
        return Pages([keys[position] for position in positions.tolist()], self.tables[group][positions])


class ReplayLoop:
    """Serves requests over one engine's blocks and one stack. Counts are in `counts`.

    `prefill` computes what is missing of a prompt.
    """

    def __init__(
        self,
        engine: EngineBlocks,
        stack: ServedStack,
        options: ServeOptions | None = None,
        prefill: Prefill | None = None,
    ) -> None:
        self.counts = Counts()
        self._engine = engine
        self._stack = stack
        self._options = options or ServeOptions()
        self._layout = engine.layout
        self._gpu_layout = replace(engine.layout, block_size_factor=1)
        self._groups = engine.layout.groups
        self._block_tokens = engine.layout.groups[0].block_size
        self._factor = engine.layout.block_size_factor
        self._chain = KeyChain()
        self._freed = asyncio.Condition()
        self._prefill = prefill
        self._begun = 0
        self._stored: set[OffloadKey] = set()

    async def run(self, requests: Iterator[Request], progress: Callable[[], None] = lambda: None) -> Counts:
        """Serve every request, `concurrency` at a time. Raises ConfigError for a request longer than the GPU pool."""

        async def worker() -> None:
            for request in requests:
                await self.serve(request)
                progress()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._options.concurrency):
                    group.create_task(worker())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return self.counts

    async def serve(self, request: Request) -> None:
        """Serve one request from lookup to store. On return its GPU blocks are idle and still cached."""
        work = self._begin(request)
        if self._engine.planners[0].mode is StoreMode.LAZY:
            await self._store_coldest(len(work.keys[0]))
        served = self._announce(work)
        self._on_phase(work, "prepare")
        await self._lookup(work)
        self._on_phase(work, "lookup")
        async with self._blocks(work):
            self._on_phase(work, "gpu_blocks")
            self._check_hits(work)
            self._on_phase(work, "verify")
            await self._load(work)
            await self._compute(work)
            self._on_phase(work, "compute")
            await self._wait_for_demotions()
            await self._store(work)
            self._on_phase(work, "store")
        served.touch(self._touched(work))
        served.end(request.output_tokens)
        self.counts.requests += 1
        self.counts.prompt_tokens += request.prompt_tokens

    def _on_phase(self, work: ActiveRequest, phase: str) -> None:
        """The phase of `timeline.PHASES` has ended, which a `WatchedLoop` notes."""

    def _begin(self, request: Request) -> ActiveRequest:
        """Hash the request."""
        digests = self._chain.digests(request)
        if len(digests) > self._engine.pools[0].num_blocks:
            reason = f"a request needs {len(digests)} GPU blocks, the pool has {self._engine.pools[0].num_blocks}"
            raise ConfigError(reason, "--gpu-blocks")
        self._begun += 1
        keys = [group_keys(digests, group) for group in range(len(self._groups))]
        offload = [offload_keys(of_group, self._factor) for of_group in keys]
        return ActiveRequest(RequestId(str(self._begun)), request, keys, offload)

    def _announce(self, work: ActiveRequest) -> ReplayedRequest:
        """Name the blocks of the prompt. Policies that follow requests take the time of the trace for theirs."""
        request, whole = work.request, work.request.prompt_blocks // self._factor
        keys = [key for offload in work.offload for key in offload[:whole]]
        return self._stack.request(work.request_id, keys, info=request.info, time=request.arrived)

    async def _lookup(self, work: ActiveRequest) -> None:
        """Look up every block of the request, and count what the stack has."""
        for offload in work.offload:
            work.in_stack.append([result in LOADABLE for result in await self._stack.lookup(offload)])
            work.where.append(self._stack.locate(offload))
        held = [name is not None for name in work.where[0][: work.request.prompt_blocks // self._factor]]
        self.counts.block_references += len(held)
        self.counts.block_hits += held.index(False) if False in held else len(held)

    @asynccontextmanager
    async def _blocks(self, work: ActiveRequest) -> AsyncIterator[None]:
        """Take all the GPU blocks a request needs. A request that cannot have them all takes none and waits. It does
        not wait forever: the pool has room for any one request."""
        async with self._freed:
            while not self._claim(work):
                await self._freed.wait()
        try:
            yield
        finally:
            self._engine.release(work.tables)
            async with self._freed:
                self._freed.notify_all()

    def _claim(self, work: ActiveRequest) -> bool:
        """Choose the usable prefix and take GPU blocks; False, and nothing taken, if the pool is too full now."""
        self._choose_prefix(work)
        work.tables, work.missing = [], []
        for group, pool in enumerate(self._engine.pools):
            first = window_start(self._groups[group], work.length * self._block_tokens) // self._block_tokens
            table = np.full(len(work.keys[group]), NO_BLOCK, dtype=np.int64)
            held = [pool.find(key) for key in work.keys[group][first : work.computed]]
            table[first : work.computed] = int_array([NO_BLOCK if block is None else block for block in held])
            pool.retain(table[table != NO_BLOCK].tolist())
            work.tables.append(table)
            missing = table == NO_BLOCK
            missing[:first] = False
            taken = pool.allocate(int(missing.sum()))
            if taken is None:
                self._engine.release(work.tables)
                return False
            self._engine.planners[group].reused(taken)
            table[missing] = taken
            work.missing.append(missing)
        return True

    def _choose_prefix(self, work: ActiveRequest) -> None:
        """The prefix the GPU holds, then the longer one that it and the stack hold together."""
        cached = zip(self._engine.pools, work.keys, strict=True)
        on_gpu = [[pool.find(key) is not None for key in keys] for pool, keys in cached]
        work.computed = self._usable_blocks(self._gpu_layout, on_gpu, work)
        whole = work.computed // self._factor
        present = [[True] * whole + in_stack[whole:] for in_stack in work.in_stack]
        work.length = max(work.computed, self._usable_blocks(self._layout, present, work))

    def _usable_blocks(self, layout: KVLayout, present: list[list[bool]], work: ActiveRequest) -> int:
        """The longest prefix, in GPU blocks, that is valid in every group."""
        return usable_prefix(layout, present, work.request.prompt_tokens) // self._block_tokens

    def _check_hits(self, work: ActiveRequest) -> None:
        """Compare the blocks hit on the GPU: nothing may have written over them since they were filled."""
        for group, table in enumerate(work.tables):
            hit = np.flatnonzero((table != NO_BLOCK) & ~work.missing[group])
            wrong = self._engine.contents[group].check(work.pages(group, hit))
            self.counts.gpu_verified += len(hit)
            self._note_wrong(wrong, len({page.gpu_block for page in wrong}))
        self._count_hits(self._options.gpu_name, work.computed)

    async def _load(self, work: ActiveRequest) -> None:
        """Load what the stack has of the prefix, compare it, and leave `missing` what did not come whole."""
        if work.length == work.computed:
            return
        tokens, computed_tokens = work.length * self._block_tokens, work.computed * self._block_tokens
        loads = plan_load(self._layout, tokens, computed_tokens, [table.tolist() for table in work.tables])
        transfers = [load.transfer(work.offload[load.group]) for load in loads]
        self.counts.longest_load = max(self.counts.longest_load, *(len(load.positions) for load in loads))
        result = await self._stack.run(self._stack.job(JobKind.LOAD, transfers))
        self._on_phase(work, "load")
        for load, outcomes in zip(loads, result.outcomes, strict=True):
            self._take(work, load, outcomes)
        self._on_phase(work, "verify")

    def _take(self, work: ActiveRequest, load: GroupLoad, outcomes: Sequence[BlockOutcome]) -> None:
        """Compare loaded GPU blocks before use. A wrong one counts, and is computed like one that did not come."""
        group, counts, where = load.group, self.counts, work.where[load.group]
        came = np.array([outcome.status is BlockStatus.LOADED for outcome in outcomes], dtype=np.bool_)
        loaded_rows = load.positions[came].tolist()
        counts.earlier += sum(work.offload[group][row] not in self._stored for row in loaded_rows)
        for row in load.positions[~came].tolist():
            # The stack has dropped it, so it is stored again once computed.
            where[row] = None
        of_block, sub_blocks, _ = load.runs.pages()
        positions = (load.positions[of_block] * self._factor + sub_blocks)[came[of_block]]
        pages = work.pages(group, positions)
        wrong = self._engine.contents[group].check(pages)
        bad = np.isin(pages.gpu_blocks, [page.gpu_block for page in wrong])
        good = positions[~bad]
        counts.loaded += len(loaded_rows)
        counts.verified += len(loaded_rows)
        counts.load_failed += len(came) - len(loaded_rows)
        self._note_wrong(wrong, len(distinct(positions[bad] // self._factor)))
        work.missing[group][good] = False
        self._publish(work, group, good)
        if not group:
            for row in (good // self._factor).tolist():
                self._count_hits(where[row] or self._options.cpu_name, 1)

    async def _compute(self, work: ActiveRequest) -> None:
        """Fill what is missing, as the model would have."""
        if self._prefill is not None:
            present = int(np.argmax(work.missing[0])) if work.missing[0].any() else len(work.missing[0])
            tokens = work.request.prompt_tokens - min(present, work.length) * self._block_tokens
            await self._prefill(work.request, tokens)
        for group, missing in enumerate(work.missing):
            positions = np.flatnonzero(missing)
            self._engine.contents[group].write(work.pages(group, positions))
            self._publish(work, group, positions)
            self.counts.computed += len(positions)

    async def _store(self, work: ActiveRequest) -> None:
        """Name the whole blocks that the stack lacks to the planners, and store what they choose now."""
        for group, planner in enumerate(self._engine.planners):
            offload, where = work.offload[group], work.where[group]
            places = work.tables[group][: len(offload) * self._factor].reshape(-1, self._factor).tolist()
            lacking = [row for row in range(len(places)) if where[row] is None]
            keys = [offload[row] for row in lacking]
            planner.computed(work.request_id, group, keys, [block for row in lacking for block in places[row]])
            planner.end_request(work.request_id)
        await self._store_planned()

    async def _store_coldest(self, num_blocks: int) -> None:
        """Lazy mode: store what the pools would forget to make room for a request."""
        for pool, planner in zip(self._engine.pools, self._engine.planners, strict=True):
            planner.about_to_evict(list(islice(pool.coldest(), max(0, num_blocks - pool.num_empty))))
        await self._store_planned()

    async def _store_planned(self) -> None:
        """Store everything that is queued, at most `store_blocks` of a group in one job."""
        planners, step = self._engine.planners, self._options.store_blocks
        while plans := [(planner, plan) for planner in planners if (plan := planner.take(step)) is not None]:
            await self._store_plans(plans)
            await self._wait_for_demotions()

    async def _wait_for_demotions(self) -> None:
        """Flow control: until at most `backlog` are queued or in flight."""
        await self._stack.drain(DRAIN_SECONDS, self._options.backlog)

    async def _store_plans(self, plans: Sequence[tuple[StorePlanner, StorePlan]]) -> None:
        """Store a plan of each group in one job. The planners are given the outcomes, or None."""
        groups = [group for _, plan in plans for group in plan.groups]
        outcomes: Sequence[Sequence[BlockOutcome]] = ()
        try:
            result = await self._stack.run(self._stack.job(JobKind.STORE, groups))
            outcomes = result.outcomes
            self._count_stores(result)
            self._stored.update(key for group in groups for key in group.keys)
        finally:
            ended = iter(outcomes)
            for planner, plan in plans:
                planner.finish(plan, list(islice(ended, len(plan.groups))) or None)
        async with self._freed:
            self._freed.notify_all()

    def _count_stores(self, result: JobResult) -> None:
        statuses = [outcome.status for outcomes in result.outcomes for outcome in outcomes]
        stored = statuses.count(BlockStatus.STORED)
        self.counts.stored += stored
        self.counts.dropped += len(statuses) - stored - statuses.count(BlockStatus.PRESENT)

    def _touched(self, work: ActiveRequest) -> list[OffloadKey]:
        """The offload keys that the request used and the stack had, in prefix order, the groups side by side.

        What it has stored itself was used once: to `arc` a second use would be that of another request.
        """
        used = [
            (row, group)
            for group, table in enumerate(work.tables)
            for row in distinct(np.flatnonzero(table != NO_BLOCK) // self._factor).tolist()
            if row < len(work.offload[group]) and work.where[group][row] is not None
        ]
        return [work.offload[group][row] for row, group in sorted(used)]

    def _publish(self, work: ActiveRequest, group: int, positions: IntArray) -> None:
        pool, keys, table = self._engine.pools[group], work.keys[group], work.tables[group]
        for position in positions.tolist():
            pool.publish(int(table[position]), keys[position])

    def _count_hits(self, tier: str, blocks: int) -> None:
        self.counts.hit_tokens[tier] = self.counts.hit_tokens.get(tier, 0) + blocks * self._block_tokens

    def _note_wrong(self, wrong: Sequence[WrongPage], blocks: int) -> None:
        self.counts.mismatched += blocks
        self.counts.wrong += wrong[: WRONG_PAGES_KEPT - len(self.counts.wrong)]
