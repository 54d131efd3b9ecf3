"""A whole replay: set up, serve, tear down, report."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import torch

from kvtier.cli.metrics_page import metrics_page
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.config import StackConfig, build_tiers, find_tier
from kvtier.errors import ConfigError
from kvtier.planner import StoreMode
from kvtier.stack import StackStats, TierStats
from kvtier.stack.assembly import resolve_alignment
from kvtier.tier.registry import EmbedsServer
from kvtier.tools.replay.content import WrongPage, find_owners
from kvtier.tools.replay.engine import EngineBlocks, EngineCache, choose_device
from kvtier.tools.replay.report import ReplayReport
from kvtier.tools.replay.serve import DRAIN_SECONDS, Counts, ReplayLoop, ServedStack, ServeOptions
from kvtier.tools.replay.service_stack import ServiceStack
from kvtier.tools.replay.setup import (
    ReplayOptions,
    fit,
    make_layout,
    make_namespace,
    make_source,
    make_stack,
    read_config,
)
from kvtier.tools.replay.timeline import StackSnapshot, Timeline, WatchedLoop, watching
from kvtier.traces.requests import KeyChain, RequestSource, group_keys
from kvtier.types.geometry import Geometry, KVLayout
from kvtier.types.keys import CPU, GPU, REMOTE, Medium, OffloadKey

POOL_MARGIN_BLOCKS = 16
STORE_BLOCKS = 256
SERVER_BLOCKS = 16384
SERVER_BYTES_MAX = 4 << 30


class ReplayStack(ServedStack, Protocol):
    """An open stack of a replay."""

    @property
    def geometry(self) -> Geometry: ...
    def stats(self) -> StackStats: ...


MakeStack = Callable[[StackConfig, KVLayout, Sequence[torch.Tensor]], AbstractAsyncContextManager[ReplayStack]]
"""How a replay gets its stack; tests hand in others."""


class Replay:
    """A replay that is checked and ready. `source.num_requests` is known before it runs."""

    def __init__(self, options: ReplayOptions, stack: MakeStack = make_stack) -> None:
        """Reads the trace or generates the workload once. Raises ConfigError for what is wrong with either."""
        self.device = choose_device(options.device)
        self.source = make_source(options)
        self._options = options
        self._make_stack = stack
        self._gpu_blocks = gpu_pool_blocks(options, self.source)

    async def run(self, progress: Callable[[], None] = lambda: None, timeline: Timeline | None = None) -> ReplayReport:
        """Serve all requests over a new stack and report; a `timeline` (of `time.monotonic`) is shown the run. The
        default stack's storage is removed, also when the run is cancelled. Raises KVTierError for a stack that cannot
        be opened."""
        if self._options.service is not None:
            return await self._serve_at(self._options.service, progress, timeline)
        with temporary_folder("kvtier-replay-") as scratch:
            config = read_config(self._options, Path(scratch))
            layout = make_layout(self._options, self.source.block_tokens, config.block_size_factor)
            geometry = Geometry(layout, await resolve_alignment(build_tiers(config)))
            fitted = fit(config, self._options, geometry)
            with with_servers(fitted, self._options, geometry, Path(scratch)) as config:
                engine = self._engine(layout)
                stack = self._make_stack(config, layout, engine.tensors)
                options = serve_options(config, self._options, geometry)
                tiers = {"tiers": [tier.model_dump(mode="json") for tier in config.tiers]}
                return await self._serve(engine, stack, options, tiers, progress, timeline)

    async def _serve_at(self, service: str, progress: Callable[[], None], timeline: Timeline | None) -> ReplayReport:
        """Serve over the stack of a service, which has tiers and figures of its own, and other engines."""
        layout = make_layout(self._options, self.source.block_tokens, None)
        engine = self._engine(layout)
        stack = ServiceStack(service, make_namespace(layout), engine.tensors)
        options = ServeOptions(self._options.concurrency, max(self._options.backlog, STORE_BLOCKS), STORE_BLOCKS)
        return await self._serve(engine, stack, options, {"service": service}, progress, timeline)

    def _engine(self, layout: KVLayout) -> EngineCache:
        return EngineCache(layout, self._gpu_blocks, self.device, StoreMode(self._options.store_mode))

    async def _serve(
        self,
        engine: EngineCache,
        opened: AbstractAsyncContextManager[ReplayStack],
        options: ServeOptions,
        where: Mapping[str, object],
        progress: Callable[[], None],
        timeline: Timeline | None,
    ) -> ReplayReport:
        start = time.monotonic()
        async with opened as stack:
            recovered = sum(tier.slots.get("ready", 0) for tier in stack.stats().tiers.values())
            settings = self._settings(stack.geometry) | dict(where)
            loop = WatchedLoop(timeline, engine, stack, options) if timeline else ReplayLoop(engine, stack, options)

            def figures() -> StackSnapshot:
                stats = stack.stats()
                return StackSnapshot(
                    all_tiers(options.gpu_name, stats.tiers, engine, loop.counts, f"{engine.device} tensors"),
                    stats.backlog,
                )

            with self._metrics(stack):
                async with watching(timeline, figures):
                    counts = await loop.run(self.source.requests(), progress)
                    await stack.drain(DRAIN_SECONDS, 0)
            final = figures()
            seconds = time.monotonic() - start
            if timeline is not None:
                timeline.end(final, timeline.now)
        wrong = tuple(self._describe(counts.wrong, engine.layout))
        return ReplayReport(counts, final.tiers, seconds, recovered, settings, wrong)

    def _metrics(self, stack: ReplayStack) -> AbstractContextManager[object]:
        """Serve the stack's metrics while it is used, with the option for it."""
        port = self._options.metrics_port
        return nullcontext() if port is None else metrics_page(stack.stats, "127.0.0.1", port, "--metrics-port")

    def _describe(self, wrong: Sequence[WrongPage], layout: KVLayout) -> Iterator[str]:
        """A line for each wrong page, with the key whose content it holds if that is a key of this replay."""
        parts = max(len(group.refs) for group in layout.groups)
        owners = find_owners({page.origin for page in wrong if page.origin is not None}, self._keys(layout), parts)
        for page in wrong:
            owner = owners.get(page.origin) if page.origin is not None else None
            if owner is None:
                held = "bytes of no block of this replay"
            elif owner == page.key:
                held = "its own bytes otherwise"
            else:
                held = f"bytes of key {owner.hex()}"
            yield (
                f"key {page.key.hex()}, tensor {page.tensor}, GPU block {page.gpu_block}: {page.wrong_bytes} bytes "
                f"differ from byte {page.first_byte} on; it holds {held}"
            )

    def _keys(self, layout: KVLayout) -> Iterator[OffloadKey]:
        """Every GPU block's key of the whole source."""
        chain = KeyChain()
        for request in self.source.requests():
            digests = chain.digests(request)
            for group in range(len(layout.groups)):
                yield from group_keys(digests, group)

    def _settings(self, geometry: Geometry) -> dict[str, object]:
        options = self._options
        return {
            "source": self.source.name,
            "source_seconds": self.source.seconds,
            "device": self.device,
            "block_tokens": self.source.block_tokens,
            "block_bytes": geometry.page_bytes(0),
            "block_size_factor": geometry.factor,
            "row_bytes": geometry.row_bytes,
            "gpu_blocks": self._gpu_blocks,
            **{name: getattr(options, name) for name in ("seed", "store_mode", "concurrency", "backlog")},
        }


def gpu_pool_blocks(options: ReplayOptions, source: RequestSource) -> int:
    """GPU blocks of each group: room for the longest request, and half of it for each further one at once."""
    least = source.longest_blocks
    if options.gpu_blocks is not None and options.gpu_blocks < least:
        reason = f"the longest request has {least} blocks, which must fit; got {options.gpu_blocks}"
        raise ConfigError(reason, "--gpu-blocks")
    others = (options.concurrency - 1) * least // 2
    return options.gpu_blocks or least + others + least // 8 + POOL_MARGIN_BLOCKS


def serve_options(config: StackConfig, options: ReplayOptions, geometry: Geometry) -> ServeOptions:
    """A store job names at most half of the CPU tier's rows, so that one can be staged while one drains."""
    cpu = find_tier(config, CPU)
    budget = (cpu.capacity_bytes if cpu else None) or 0
    return ServeOptions(
        concurrency=options.concurrency,
        backlog=options.backlog,
        store_blocks=max(1, min(STORE_BLOCKS, budget // geometry.row_bytes // 2)),
        gpu_name=_name_of(config, GPU),
        cpu_name=_name_of(config, CPU),
    )


def _name_of(config: StackConfig, medium: Medium) -> str:
    """The name of the stack's first tier of a medium."""
    tier = find_tier(config, medium)
    return medium.lower() if tier is None else tier.label


def all_tiers(
    gpu: str, tiers: Mapping[str, TierStats], engine: EngineBlocks, counts: Counts, mode: str = ""
) -> dict[str, TierStats]:
    """Every tier from the GPU down. The GPU's own figures are the loop's: its prefix cache decides what stays there."""
    pools = [(pool, group.page_bytes) for pool, group in zip(engine.pools, engine.layout.groups, strict=True)]
    of_gpu = TierStats(
        hits=counts.hit_tokens.get(gpu, 0) // engine.layout.groups[0].block_size,
        evictions=sum(pool.evictions for pool in engine.pools),
        used_bytes=sum(pool.num_used * page_bytes for pool, page_bytes in pools),
        peak_bytes=sum(pool.peak_blocks * page_bytes for pool, page_bytes in pools),
        capacity_bytes=sum(pool.num_blocks * page_bytes for pool, page_bytes in pools),
        mode=mode,
    )
    return {gpu: of_gpu} | {name: tier for name, tier in tiers.items() if name != gpu}


@contextmanager
def with_servers(
    config: StackConfig, options: ReplayOptions, geometry: Geometry, scratch: Path
) -> Iterator[StackConfig]:
    """The stack with an embedded server below each tier on one, until the end of the block; the stack as it
    is where the options name none.

    Raises ConfigError for a stack without such a tier, for one whose server cannot be embedded, and where the server is
    not installed.
    """
    if options.server is None:
        if options.server_blocks is not None:
            raise ConfigError("goes with --server embedded only", "--server-blocks")
        yield config
        return
    row = geometry.row_bytes
    blocks = options.server_blocks or max(64, min(SERVER_BLOCKS, SERVER_BYTES_MAX // row))
    remote = [(i, tier) for i, tier in enumerate(build_tiers(config)) if tier.medium == REMOTE]
    if not remote:
        raise ConfigError("the stack has no tier on a server", "--server")
    tiers = list(config.tiers)
    with ExitStack() as servers:
        for i, tier in remote:
            if not isinstance(tier, EmbedsServer):
                raise ConfigError(f"a tier of type {tiers[i].type} cannot be given a server of its own", "--server")
            folder = scratch / f"server-{i}"
            folder.mkdir()
            try:
                tiers[i] = servers.enter_context(tier.embedded(folder, blocks, row))
            except ConfigError as error:
                raise error.below("--server") from None
        yield config.model_copy(update={"tiers": tuple(tiers)})
