"""An engine driven over a stack whose disk fails: what it gets, what its calls cost, whether every byte is right."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

import numpy as np

from kvtier import policy as policies
from kvtier.control.tiers.breaker import Breaker
from kvtier.options import PolicyName, TierOptions
from kvtier.stack import StackParts, StackSettings, TierStats
from kvtier.testing import Owners, content
from kvtier.testing.conformance import make_keys
from kvtier.tier.contract import LoadStore, LookupResult, Opened, TierContext
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import LOADED, STORED, BlockOutcome, GPUGroup, JobKind, JobResult, RowGroup, TransferJob
from kvtier.types.keys import GPU, GroupIndex, JobId, Medium, OffloadKey, RequestId
from kvtier.types.namespace import Namespace
from kvtier_cpu import CPUBackend, CPUOptions
from kvtier_fs import FSBackend, SharedFSBackend

from .machine.child import Line
from .stepped import SteppedStack

P = ParamSpec("P")
T = TypeVar("T")

PAGE_BYTES = 65536
REQUEST_BLOCKS = 8
POLICIES = tuple(policies.POLICIES)
"""What evicts in the tiers of an engine; drawn with the seed."""
ASK_SECONDS = 0.1
OPEN = (LookupResult.HIT, LookupResult.HIT_PENDING)


class Memory(LoadStore):
    """An engine's GPU blocks in plain memory, one page a block, for stacks in processes that do without torch."""

    medium: ClassVar[Medium] = GPU
    Options: ClassVar[type[TierOptions]] = TierOptions

    def __init__(self, num_blocks: int, page_bytes: int) -> None:
        self.options = TierOptions(type="gpu")
        self.pages = np.zeros((num_blocks, page_bytes), np.uint8)
        self._context: TierContext

    async def open(self, context: TierContext) -> Opened:
        self._context = context
        return Opened(self.pages.nbytes)

    async def store(self, job: TransferJob) -> JobResult:
        """Rows to GPU blocks."""
        return self._copy(job, STORED)

    async def load(self, job: TransferJob) -> JobResult:
        """GPU blocks to rows."""
        return self._copy(job, LOADED)

    def _copy(self, job: TransferJob, outcome: BlockOutcome) -> JobResult:
        rows = self._context.rows
        assert rows is not None
        for group in job.gpu_groups:
            blocks = group.runs.gpu_blocks
            if outcome is LOADED:
                rows.view[group.rows, : self.pages.shape[1]] = self.pages[blocks]
            else:
                self.pages[blocks] = rows.view[group.rows, : self.pages.shape[1]]
        return JobResult.uniform(job, outcome)

    async def close(self) -> None:
        """Nothing to release."""


class Felt:
    """What calls cost the thread of the engine, in seconds; time spent waiting for a busy CPU is apart."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._scheduled = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._scheduled)

    def _waited(self) -> float:
        return int(os.pread(self._scheduled, 64, 0).split()[1]) / 1e9

    def call(self, name: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a call and note what it cost."""
        waited, begun = self._waited(), time.perf_counter()
        result = call(*args, **kwargs)
        seconds = time.perf_counter() - begun
        self.seconds.setdefault(name, []).append(max(0.0, seconds - (self._waited() - waited)))
        return result

    def p99_us(self, name: str) -> int:
        """Microseconds that 99 of 100 calls did not exceed."""
        return int(np.percentile(self.seconds[name], 99) * 1e6)


@dataclass(slots=True)
class Drive:
    """What an engine got: blocks by outcome, and every block that was said to be loaded and was not right."""

    requests: int = 0
    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_load_seconds: float = 0.0


class Engine:
    """An engine over a stack that it drives step by step: looks up, loads what is there, computes and stores the rest.

    Its requests take `REQUEST_BLOCKS` keys each, from `sessions` distinct prompts chosen by a seed. `with Engine(...)`
    opens the stack and closes it; `close_seconds` says how long the latter took.
    """

    def __init__(self, parts: StackParts, memory: Memory, seed: int, sessions: int) -> None:
        self.stack = SteppedStack(parts)
        self.felt = Felt()
        self.wrong: list[str] = []
        self.close_seconds = 0.0
        self._drive = Drive()
        self._memory = memory
        self._random = random.Random(seed)
        names = make_keys(sessions * REQUEST_BLOCKS)
        self._prompts = [names[i : i + REQUEST_BLOCKS] for i in range(0, len(names), REQUEST_BLOCKS)]
        self._owners = Owners((name, 0) for name in names)
        self._results: dict[JobId, JobResult] = {}
        self._served = 0
        self._lower = parts.tiers[-1].options.label
        options = parts.tiers[0].options
        assert isinstance(options, CPUOptions)
        self.policy = options.policy

    def __enter__(self) -> Self:
        self.stack.open()
        return self

    def __exit__(self, *_: object) -> None:
        begun = time.monotonic()
        self.stack.close()
        self.close_seconds = time.monotonic() - begun
        self.felt.close()

    @property
    def lower(self) -> TierStats:
        """The figures so far of the tier below the CPU."""
        return self.stack.stats().tiers[self._lower]

    @property
    def breakers(self) -> tuple[Breaker, Breaker]:
        """The breakers of loads and of stores of that tier."""
        assert self.stack._assembled is not None
        lower = self.stack._assembled.plane.control.lowers[0]
        return lower.load_breaker, lower.store_breaker

    def fill(self) -> Drive:
        """Every prompt once, and what it stores reaches the disk before the next, as far as the disk takes it."""
        drive = self._drive = Drive()
        for prompt in self._prompts:
            self._serve(prompt)
            self.drain(5.0)
        return drive

    def run(self, seconds: float = 0.0, requests: int = 0) -> Drive:
        """Serve prompts by chance, for some time or so many. Returns what came of these alone."""
        drive = self._drive = Drive()
        until = time.monotonic() + seconds
        while drive.requests < requests or time.monotonic() < until:
            self._serve(self._random.choice(self._prompts))
        return drive

    def run_until(self, reached: Callable[[], bool], seconds: float) -> float | None:
        """Serve prompts until something is so. Returns the seconds that took, None if the time ran out."""
        begun = time.monotonic()
        while not reached():
            if time.monotonic() - begun > seconds:
                return None
            self._serve(self._random.choice(self._prompts))
        return time.monotonic() - begun

    def run_without_the_lower_tier(self, seconds: float) -> bool:
        """Serve prompts for some time, and then on until blocks of the tier failed or were late. True if some did.

        A call that fails and one that does not come back in time say the same; which comes first is up to the machine.
        """
        before = self.lower.failed + self.lower.late
        self.run(seconds)
        return self.run_until(lambda: self.lower.failed + self.lower.late > before, 30.0) is not None

    def drain(self, seconds: float) -> None:
        """Step until nothing is on its way to lower tiers, or the time ran out."""
        deadline = time.monotonic() + seconds
        while self.stack.stats().backlog and time.monotonic() < deadline:
            self._step()

    def _step(self) -> None:
        for result in self.felt.call("step", self.stack.step):
            self._results[result.job_id] = result
        self.stack.wait(0.005)

    def _serve(self, prompt: Sequence[OffloadKey]) -> None:
        """One request: load its blocks, compare every byte, compute what did not come, store what was not there."""
        self._served += 1
        request = self.stack.request(RequestId(f"request {self._served}"), prompt)
        self._answer(prompt)
        request.end(self._served % 500)

    def _answer(self, prompt: Sequence[OffloadKey]) -> None:
        there = [found in OPEN for found in self._look(prompt)]
        blocks = [i for i, found in enumerate(there) if found]
        if blocks:
            for i in self._load(prompt, blocks):
                there[i] = False
        missing = [i for i, found in enumerate(there) if not found]
        for i in missing:
            self._memory.pages[i] = content(prompt[i], 0, self._memory.pages.shape[1])
        if missing:
            result = self._job(JobKind.STORE, prompt, missing)
            self._drive.stores.update(_name(outcome) for outcome in result.outcomes[0])
        self._drive.requests += 1

    def _look(self, prompt: Sequence[OffloadKey]) -> list[LookupResult]:
        """Look up as an engine does: again in later steps while a shared tier has not answered, for a while."""
        until = time.monotonic() + ASK_SECONDS
        found = self.felt.call("lookup", self.stack.lookup, prompt)
        while LookupResult.RETRY in found and time.monotonic() < until:
            self._step()
            found = self.felt.call("lookup", self.stack.lookup, prompt)
        return found

    def _load(self, prompt: Sequence[OffloadKey], blocks: list[int]) -> list[int]:
        """Load blocks of a prompt; returns those that are to be computed."""
        self._memory.pages[:] = 0xEE
        begun = time.monotonic()
        result = self._job(JobKind.LOAD, prompt, blocks)
        self._drive.slowest_load_seconds = max(self._drive.slowest_load_seconds, time.monotonic() - begun)
        missed = []
        for i, outcome in zip(blocks, result.outcomes[0], strict=True):
            self._drive.loads[_name(outcome)] += 1
            if not outcome.ok:
                missed.append(i)
            elif complaint := self._owners.complaint(self._memory.pages[i], prompt[i], 0):
                self.wrong.append(complaint)
        return missed

    def _job(self, kind: JobKind, prompt: Sequence[OffloadKey], blocks: list[int]) -> JobResult:
        group = GPUGroup(GroupIndex(0), tuple(prompt[i] for i in blocks), GPURuns.whole(blocks))
        job = self.stack.job(kind, [group])
        self.felt.call(f"{kind} submit", self.stack.submit, job)
        while job.job_id not in self._results:
            self._step()
        return self._results.pop(job.job_id)


def _name(outcome: BlockOutcome) -> str:
    return f"{outcome.status}:{outcome.reason}" if outcome.reason else str(outcome.status)


LOAD_SECONDS = 0.3
CLOSE_SECONDS = 0.5
CAPACITY_BYTES = 16 << 20


def disk_settings(*roots: Path, layout: str = "slab", **more: Any) -> dict[str, Any]:
    """What a stack file says of a tier in these folders, called fs: of type fs, or shared_fs for layout `files`."""
    place = {"type": "fs", "roots": [str(root) for root in roots]}
    if layout == "files":
        (root,) = roots
        place = {"type": "shared_fs", "root": str(root)}
    return place | {"name": "fs", "capacity": CAPACITY_BYTES, "min_free_bytes": 0} | more


def drawn_policy(seed: int) -> PolicyName:
    """The policy of a seed."""
    return random.Random(f"policy/{seed}").choice(POLICIES)


def driven(
    *roots: Path, rows: int = 32, seed: int = 0, sessions: int = 40, policy: PolicyName | None = None, **fs: Any
) -> Engine:
    """An engine over a CPU tier of a few rows and a tier in some folders; its stack is not open yet. Both evict by the
    policy, or by one that the seed draws."""
    policy = policy or drawn_policy(seed)
    limits = {"io_threads": 4, "job_timeout_seconds": LOAD_SECONDS, "close_timeout_seconds": CLOSE_SECONDS}
    settings = disk_settings(*roots, **(limits | fs))
    if settings["type"] == "fs":
        settings["policy"] = policy
    backend = FSBackend if settings["type"] == "fs" else SharedFSBackend
    tier = backend(backend.Options.model_validate(settings))
    return engine_over(tier, rows=rows, seed=seed, sessions=sessions, policy=policy)


def engine_over(
    tier: LoadStore, *, rows: int = 32, seed: int = 0, sessions: int = 40, load_seconds: float = LOAD_SECONDS,
    page_bytes: int = PAGE_BYTES, policy: PolicyName | None = None,
) -> Engine:  # fmt: skip
    """An engine over a CPU tier of a few rows and a tier below it; its stack is not open yet. The rows are evicted by
    the policy, or by one that the seed draws."""
    policy = policy or drawn_policy(seed)
    layout = KVLayout((GroupLayout((TensorRef(0, page_bytes),)),))
    memory = Memory(REQUEST_BLOCKS, page_bytes)
    cpu = CPUBackend(CPUOptions(type="cpu", cpu_bytes_to_use=rows * page_bytes, huge_pages=False, policy=policy))
    seconds = StackSettings(
        load_timeout_seconds=load_seconds,
        store_timeout_seconds=1.0,
        close_timeout_seconds=CLOSE_SECONDS,
        tier_close_seconds=20.0,
    )
    parts = StackParts([cpu, tier], Namespace(layout, model="fault"), workers=[memory], settings=seconds)
    return Engine(parts, memory, seed, sessions)


class Neighbours:
    """A tier of two roots, blocks of which are stored and loaded on one of them at a time."""

    BLOCKS = 16

    def __init__(self, tier: Any) -> None:
        self.wrong = 0
        self._tier = tier
        self._names = [make_keys(self.BLOCKS, start=1000 * root) for root in (0, 1)]
        self._rows = [np.arange(self.BLOCKS) + root * self.BLOCKS for root in (0, 1)]
        regions = [0, tier.space.regions_by_root[0]]
        self._slots = [np.arange(self.BLOCKS) + region * tier.space.slots_per_region for region in regions]
        self._formats = [tier.format_region(region, 0) for region in regions]

    def job(self, kind: JobKind, root: int) -> TransferJob:
        """A job over all blocks of a root; a store's rows are filled anew, a load's are wiped."""
        tier, names, rows = self._tier, self._names[root], self._rows[root]
        if kind is JobKind.STORE:
            tier.generation += 1
            for row, name in zip(rows.tolist(), names, strict=True):
                tier.fill(row, name, tier.generation)
        else:
            tier.rows.view[rows] = 0xEE
        generations = [tier.generation] * self.BLOCKS
        tier.job += 1
        transfer = RowGroup(GroupIndex(0), tuple(names), rows.tolist(), self._slots[root].tolist(), generations)
        return TransferJob(JobId(tier.job), kind, (transfer,), None, tier.epoch, (self._formats[root],))

    async def blocks_a_second(self, root: int, seconds: float) -> float:
        """How fast blocks of a root are stored and loaded again; every byte that comes is compared."""
        tier, names, moved, spent = self._tier, self._names[root], 0, 0.0
        while spent < seconds:
            for kind, move in ((JobKind.STORE, tier.backend.store), (JobKind.LOAD, tier.backend.load)):
                job = self.job(kind, root)
                begun = time.perf_counter()
                result = await move(job)
                spent += time.perf_counter() - begun
                moved += sum(outcome.ok for outcome in result.outcomes[0])
            for row, name, outcome in zip(self._rows[root].tolist(), names, result.outcomes[0], strict=True):
                self.wrong += outcome.ok and not tier.holds(row, name, tier.generation)
        return moved / spent


def replay(line: Line, root: Path, requests: int, chosen: dict[str, Any]) -> None:
    """In a process of its own: `kvtier replay` over a stack whose disk is made to fail half-way."""
    from kvtier.tools.replay.run import Replay
    from kvtier.tools.replay.setup import ReplayOptions

    seed, policy = chosen.pop("seed"), chosen.pop("policy")
    cpu = {"type": "cpu", "cpu_bytes_to_use": 96 << 14, "huge_pages": False, "policy": policy}
    if chosen["layout"] == "slab":
        chosen["policy"] = policy
    fs = disk_settings(root, job_timeout_seconds=LOAD_SECONDS, close_timeout_seconds=CLOSE_SECONDS, **chosen)
    stack = root.with_name("stack.yaml")
    text = {"load_timeout_seconds": 1.0, "store_timeout_seconds": 1.0, "close_timeout_seconds": CLOSE_SECONDS}
    stack.write_text(json.dumps(text | {"tiers": [{"type": "gpu"}, cpu, fs]}))
    asked = ReplayOptions(stack=stack, workload="chat", requests=requests, block_bytes=1 << 14, seed=seed)
    served = 0

    def progress() -> None:
        nonlocal served
        served += 1
        if served == requests // 2:
            line.say("half-way")
            line.hear("bad")

    report = asyncio.run(Replay(asked).run(progress))
    counts, tier = report.counts, report.tiers["fs"]
    missed = counts.load_failed + counts.dropped + sum(tier.dropped.values())
    figures = {"requests": counts.requests, "mismatched": counts.mismatched, "verified": counts.verified}
    line.say("served", missed=missed, **figures)
