"""A simulation: a trace over a stack in virtual time, and an engine that computes one prompt after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from kvtier.config import StackConfig, load_stack, stack_parts
from kvtier.config.plan import plan_tier
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.errors import ConfigError
from kvtier.planner import StoreMode
from kvtier.stack import TierStats
from kvtier.stack.assembly import chains, complete_settings, inflight_bytes, tier_spec, watermark_rows
from kvtier.stack.dispatcher import TierQueue
from kvtier.tier.contract import LoadStore, Opened, SlotSpace
from kvtier.tier.registry import DryRun, DryRuns
from kvtier.tools.replay.content import Pages, WrongPage
from kvtier.tools.replay.engine import EngineBlocks
from kvtier.tools.replay.run import all_tiers, gpu_pool_blocks, serve_options
from kvtier.tools.replay.serve import DRAIN_SECONDS, Counts, ReplayLoop
from kvtier.tools.replay.setup import ReplayOptions, make_layout, make_source
from kvtier.tools.replay.timeline import REQUESTS_MAX, SAMPLES_MAX, StackSnapshot, Timeline, WatchedLoop, watching
from kvtier.tools.whatif.service import PREFILL_TOKENS_PER_SECOND, Calibration, Service, read_calibration
from kvtier.tools.whatif.stack import Device, SharedStore, VirtualLoop, VirtualStack, Waits
from kvtier.tools.whatif.variants import Changes, apply
from kvtier.traces.requests import Request
from kvtier.types.geometry import Geometry, stack_alignment
from kvtier.types.keys import CPU, GPU


@dataclass(slots=True)
class FirstTokens:
    """Seconds from the arrival of each request to its first token, and what they were if every prompt were computed."""

    seconds: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)

    @property
    def saved(self) -> float:
        """Seconds saved in all; negative where loading took longer than computing."""
        return sum(self.computing) - sum(self.seconds)


class EngineTime:
    """Runs requests through a loop: one after another, or as they came. `prefill` is for that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tokens_per_second: float) -> None:
        self.first_tokens = FirstTokens()
        self._loop = loop
        self._rate = tokens_per_second
        self._free_at = 0.0
        self._free_at_computing_all = 0.0
        self._arrived: dict[Request, float] = {}
        self._waiting: asyncio.Queue[Request | None] = asyncio.Queue()

    def _arrive(self, request: Request) -> None:
        now = self._arrived[request] = self._loop.time()
        begins = max(now, self._free_at_computing_all)
        self._free_at_computing_all = begins + request.prompt_tokens / self._rate
        self.first_tokens.computing.append(self._free_at_computing_all - now)

    def arrived(self, request: Request) -> float:
        """Time at which a request came that has no first token yet."""
        return self._arrived[request]

    async def prefill(self, request: Request, tokens: int) -> None:
        """Compute these tokens of a prompt, after the prompts before it."""
        self._free_at = max(self._loop.time(), self._free_at) + tokens / self._rate
        await self._until(self._free_at)
        self.first_tokens.seconds.append(self._loop.time() - self._arrived.pop(request))

    async def _until(self, at: float) -> None:
        if (seconds := at - self._loop.time()) > 0:
            await asyncio.sleep(seconds)

    async def serve_in_turn(self, loop: ReplayLoop, requests: Iterator[Request], progress: Callable[[], None]) -> None:
        """Each request comes when the one before has ended."""
        for request in requests:
            self._free_at_computing_all = self._loop.time()
            self._arrive(request)
            await loop.serve(request)
            progress()

    async def queue_as_they_came(self, requests: Iterator[Request], workers: int) -> None:
        """Requests come at the times of the trace, made not to go back, and wait for one of the `workers`."""
        first: float | None = None
        for request in requests:
            if request.arrived is None:
                raise ConfigError("the trace says no times", "--arrivals")
            first = request.arrived if first is None else first
            await self._until(request.arrived - first)
            self._arrive(request)
            self._waiting.put_nowait(request)
        for _ in range(workers):
            self._waiting.put_nowait(None)

    async def worker(self, loop: ReplayLoop, progress: Callable[[], None]) -> None:
        """Serve one request at a time until no more will come."""
        while (request := await self._waiting.get()) is not None:
            await loop.serve(request)
            progress()


NO_FLOW_CONTROL = 1 << 62
"""Blocks that may be on their way to lower tiers where nothing waits for them."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The stack file, the trace and the sizes, as of a replay; how fast tiers and prefill are; when requests come.

    `trace` arrivals come at the times of the trace, `concurrency` of them are served at once, and nothing waits for
    write-back.
    """

    stack: Path
    replay: ReplayOptions
    calibration: Path | None = None
    prefill_tokens_per_second: float = PREFILL_TOKENS_PER_SECOND
    arrivals: Literal["serial", "trace"] = "serial"


class _NoContent:
    """Blocks of a simulation hold nothing."""

    def write(self, pages: Pages) -> None:
        """Nothing to write."""

    def check(self, pages: Pages) -> list[WrongPage]:
        """Nothing to compare."""
        return []


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """Figures of one variant of a stack."""

    changes: Changes
    counts: Counts
    tiers: dict[str, TierStats]
    waits: dict[str, Waits]
    services: dict[str, Service]
    first_tokens: FirstTokens
    virtual_seconds: float
    seconds: float
    gpu_name: str
    timeline: Timeline | None = None

    @property
    def hit_share(self) -> float:
        """Tokens hit in any tier, as a share of all tokens of the prompts."""
        counts = self.counts
        return sum(counts.hit_tokens.values()) / counts.prompt_tokens if counts.prompt_tokens else 0.0


class Simulation:
    """A simulation that is checked and ready: the trace is read, and every variant of the stack has its plan."""

    def __init__(self, options: SimulateOptions, variants: Sequence[Changes]) -> None:
        """Raises ConfigError for what is wrong with the stack, the trace, a change or the calibration."""
        self.options = options
        self.source = make_source(options.replay)
        self.calibration = read_calibration(options.calibration)
        config = load_stack(options.stack)
        self.layout = make_layout(options.replay, self.source.block_tokens, config.block_size_factor)
        self.variants = [(changes, self._plan_variant(config, changes)) for changes in variants]
        self._gpu_blocks = gpu_pool_blocks(options.replay, self.source)

    def settings(self) -> dict[str, object]:
        """The options and what followed from them."""
        replay = self.options.replay
        return {
            "stack": str(self.options.stack),
            "source": self.source.name,
            "source_seconds": self.source.seconds,
            "block_tokens": self.source.block_tokens,
            "block_bytes": self.layout.groups[0].page_bytes,
            "gpu_blocks": self._gpu_blocks,
            "store_mode": replay.store_mode,
            "backlog": replay.backlog,
            "calibration": str(self.options.calibration) if self.options.calibration else None,
            "arrivals": self.options.arrivals,
            "concurrency": replay.concurrency,
            "prefill_tokens_per_second": self.options.prefill_tokens_per_second,
        }

    def _plan_variant(self, config: StackConfig, changes: Changes) -> tuple[StackConfig, Geometry]:
        config = apply(config, changes, self._geometry(config))
        return config, self._geometry(config)

    def _geometry(self, config: StackConfig) -> Geometry:
        tiers = stack_parts(config, self.layout).tiers
        return Geometry(self.layout, stack_alignment([tier.BLOCK_SIZE_ALIGNMENT for tier in tiers]))

    def run(self, progress: Callable[[], None] = lambda: None, watched: bool = False) -> Iterator[Simulated]:
        """Each variant in turn; `progress` is called after each request. `watched` ones have timelines, which together
        keep the samples and requests of two at most."""
        share = max(1, len(self.variants) // 2)
        for changes, (config, geometry) in self.variants:
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                found = runner.run(self._run(changes, (config, geometry), progress, share if watched else 0))
            yield found

    async def _run(
        self, changes: Changes, planned: tuple[StackConfig, Geometry], progress: Callable[[], None], share: int
    ) -> Simulated:
        """Run a variant. With a `share` it is watched, with one part in that many of a timeline's samples."""
        started, virtual, (config, geometry) = time.perf_counter(), asyncio.get_running_loop(), planned
        assert isinstance(virtual, VirtualLoop)
        timeline = None
        if share:
            timeline = Timeline(virtual.time, "virtual", SAMPLES_MAX // share, REQUESTS_MAX // share)
        stack = make_stack(config, geometry, self.calibration, virtual)
        contents = [_NoContent() for _ in self.layout.groups]
        blocks = EngineBlocks(self.layout, self._gpu_blocks, contents, StoreMode(self.options.replay.store_mode))
        engine = EngineTime(virtual, self.options.prefill_tokens_per_second)
        served = serve_options(config, self.options.replay, geometry)
        if self.options.arrivals == "trace":
            served = replace(served, backlog=NO_FLOW_CONTROL)
        parts = (blocks, stack, served, engine.prefill)
        loop = WatchedLoop(timeline, *parts, engine.arrived) if timeline else ReplayLoop(*parts)

        def figures() -> StackSnapshot:
            return StackSnapshot(all_tiers(served.gpu_name, stack.stats(), blocks, loop.counts), stack.plane.backlog)

        ended = 0.0

        def step() -> None:
            nonlocal ended
            ended = virtual.time()
            if timeline is not None and loop.counts.requests == self.source.num_requests:
                timeline.all_served()
            progress()

        async with watching(timeline, figures):
            await self._serve(engine, loop, stack, step)
            await virtual.idle()
        if timeline is not None:
            timeline.end(figures(), ended)
        names = [index.name for index in stack.plane.control.indexes]
        return Simulated(
            changes,
            loop.counts,
            stack.stats(),
            {name: device.waits for name, device in zip(names, stack.devices, strict=True)},
            {name: device.service for name, device in zip(names, stack.devices, strict=True)},
            engine.first_tokens,
            ended,
            time.perf_counter() - started,
            served.gpu_name,
            timeline,
        )

    async def _serve(self, engine: EngineTime, loop: ReplayLoop, stack: VirtualStack, step: Callable[[], None]) -> None:
        """Serve the whole trace."""
        requests, workers = self.source.requests(), self.options.replay.concurrency
        if self.options.arrivals == "serial":
            await engine.serve_in_turn(loop, requests, step)
            await stack.drain(DRAIN_SECONDS)
        else:
            served = (engine.worker(loop, step) for _ in range(workers))
            await asyncio.gather(engine.queue_as_they_came(requests, workers), *served)


def make_stack(
    config: StackConfig, geometry: Geometry, calibration: Calibration, virtual: asyncio.AbstractEventLoop
) -> VirtualStack:
    """The stack of a file in virtual time. Its tiers are planned, not opened. Raises ConfigError for what keeps a tier
    from opening."""
    parts = stack_parts(config, geometry.layout)
    tiers = [tier for tier in parts.tiers if tier.medium != GPU]
    seconds = parts.settings.lookup_timeout_seconds
    specs = [tier_spec(tier, _opened_empty(tier, geometry), geometry, seconds) for tier in tiers]
    rows = specs[0].opened.space
    assert rows is not None
    completed = complete_settings(parts, watermark_rows(tiers[0].options, rows.num_slot_ids))
    plane = ControlPlane(specs[0], specs[1:], geometry.factor, completed, chains(geometry))
    devices = []
    for tier, spec in zip(tiers, specs, strict=True):
        service = calibration.service(spec.name, tier.medium, geometry.row_bytes)
        queue = TierQueue(tier, inflight_bytes(tier))
        shared = None
        if spec.opened.space is None:
            capacity = spec.opened.capacity_bytes
            shared = SharedStore(capacity // geometry.row_bytes if capacity else None)
        devices.append(Device(queue, service, geometry, virtual, shared))
    return VirtualStack(plane, devices, parts.settings, virtual)


def _opened_empty(tier: LoadStore, geometry: Geometry) -> Opened:
    """Facts of the tier as if it were open and empty, by its dry run; of a CPU tier its budget in rows."""
    plan, problems = plan_tier(tier, geometry, geometry.alignment, probe=False, at=tier.options.label)
    for problem in problems:
        raise problem
    if tier.medium == CPU:
        size = (plan.capacity_bytes or 0) // geometry.row_bytes * geometry.row_bytes
        return Opened(plan.capacity_bytes or 0, SlotSpace(size, (1,), (geometry.row_bytes,) * geometry.num_groups))
    dry_run = tier.dry_run(geometry, False) if isinstance(tier, DryRuns) else DryRun()
    return Opened(plan.capacity_bytes or 0, dry_run.space, mode=plan.mode, probe_prefix=dry_run.probe_prefix)
