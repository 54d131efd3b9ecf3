"""One whole replay: set up, serve, tear down, report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from kvtier.config import StackConfig, build_tiers, open_stack, tier_name
from kvtier.errors import ConfigError
from kvtier.geometry import Geometry, KVLayout
from kvtier.keys import CPU, GPU, Medium, OffloadKey
from kvtier.loadstore import KVCaches
from kvtier.planner import StoreMode
from kvtier.registry import discover
from kvtier.replay.content import WrongPage, find_owners
from kvtier.replay.engine import EngineCache, choose_device
from kvtier.replay.report import ReplayReport, TierReport
from kvtier.replay.requests import KeyChain, RequestSource, group_keys
from kvtier.replay.serve import Counts, ServeOptions, Server, Stack
from kvtier.replay.setup import ReplayOptions, fit, make_layout, make_namespace, make_source, read_config
from kvtier.stack import StackStats
from kvtier.stack.assembly import resolve_alignment

POOL_MARGIN_BLOCKS = 16
SETTLE_SECONDS = 60.0
STORE_BLOCKS = 256


class ReportingStack(Stack, Protocol):
    """A stack that serves and reports."""

    def stats(self) -> StackStats: ...


MakeStack = Callable[[StackConfig, KVLayout, KVCaches], AbstractAsyncContextManager[ReportingStack]]
"""How a replay gets its stack; tests hand in others."""


class Replay:
    """A replay that is checked and ready. `shape.num_requests` is known before it runs."""

    def __init__(self, options: ReplayOptions, make_stack: MakeStack | None = None) -> None:
        """Reads the trace or generates the workload once. Raises ConfigError for what is wrong with either."""
        self.device = choose_device(options.device)
        self.source: RequestSource = make_source(options)
        self.shape = self.source.shape
        self._options = options
        self._make_stack = make_stack or real_stack
        least = self.shape.longest_blocks
        if options.gpu_blocks is not None and options.gpu_blocks < least:
            reason = f"the longest request has {least} blocks, which must fit; got {options.gpu_blocks}"
            raise ConfigError(reason, "--gpu-blocks")
        others = (options.concurrency - 1) * least // 2
        self._gpu_blocks = options.gpu_blocks or least + others + least // 8 + POOL_MARGIN_BLOCKS

    async def run(self, progress: Callable[[], None] = lambda: None) -> ReplayReport:
        """Serve everything over a stack of its own and report. The default stack's storage is removed, also when the
        run is cancelled. Raises KVTierError for a stack that cannot be opened."""
        with tempfile.TemporaryDirectory(prefix="kvtier-replay-", ignore_cleanup_errors=True) as scratch:
            config = read_config(self._options, Path(scratch))
            layout = make_layout(self._options, self.shape.block_tokens, config.block_size_factor)
            geometry = Geometry(layout, await resolve_alignment(build_tiers(config)))
            config = fit(config, self._options, geometry)
            engine = EngineCache.allocate(layout, self._gpu_blocks, self.device, StoreMode(self._options.store_mode))
            start = time.monotonic()
            async with self._make_stack(config, layout, engine.kv_caches) as stack:
                recovered = _recovered_blocks(stack.stats())
                server = Server(engine, stack, self._serve_options(config, geometry, recovered > 0))
                counts = await server.run(self.source.requests(), progress)
                await stack.settle(SETTLE_SECONDS)
                tiers = _tier_reports(config, stack.stats(), engine, counts)
                seconds = time.monotonic() - start
        wrong = tuple(self._describe(counts.wrong, layout))
        return ReplayReport(counts, tiers, seconds, recovered, self._settings(config, geometry), wrong)

    def _serve_options(self, config: StackConfig, geometry: Geometry, watch_earlier: bool) -> ServeOptions:
        """A store job names at most half of the CPU tier's rows, so that one can be staged while one drains."""
        budget = min(
            (getattr(tier, "cpu_bytes_to_use", 0) for tier in config.tiers if hasattr(tier, "cpu_bytes_to_use")),
            default=0,
        )
        return ServeOptions(
            concurrency=self._options.concurrency,
            backlog=self._options.backlog,
            store_blocks=max(1, min(STORE_BLOCKS, budget // geometry.row_bytes // 2)),
            settle_seconds=SETTLE_SECONDS,
            gpu_name=name_of(config, GPU),
            cpu_name=name_of(config, CPU),
            watch_earlier=watch_earlier,
        )

    def _describe(self, wrong: Sequence[WrongPage], layout: KVLayout) -> Iterator[str]:
        """One line for each wrong page, with the key whose content it holds if that is a key of this replay."""
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

    def _settings(self, config: StackConfig, geometry: Geometry) -> dict[str, object]:
        options = self._options
        return {
            "source": self.source.name,
            "seed": options.seed,
            "device": self.device,
            "block_tokens": self.shape.block_tokens,
            "block_bytes": geometry.page_bytes(0),
            "block_size_factor": geometry.factor,
            "row_bytes": geometry.row_bytes,
            "gpu_blocks": self._gpu_blocks,
            "store_mode": options.store_mode,
            "concurrency": options.concurrency,
            "backlog": options.backlog,
            "tiers": [tier.model_dump(mode="json") for tier in config.tiers],
        }


def real_stack(
    config: StackConfig, layout: KVLayout, kv_caches: KVCaches
) -> AbstractAsyncContextManager[ReportingStack]:
    """The stack a config describes, not yet open."""
    return open_stack(config, make_namespace(config, layout), kv_caches)


def name_of(config: StackConfig, medium: Medium) -> str:
    """The name of the stack's first tier of a medium."""
    backends = discover()
    names = (tier_name(tier) for tier in config.tiers if backends.get(tier.type).medium == medium)
    return next(names, medium.lower())


def _recovered_blocks(stats: StackStats) -> int:
    """Blocks the tiers held when they were opened."""
    return sum(tier.slots.get("ready", 0) for tier in stats.tiers.values())


def _tier_reports(config: StackConfig, stats: StackStats, engine: EngineCache, counts: Counts) -> dict[str, TierReport]:
    """Every tier from the GPU down. The GPU's own figures are the loop's: its prefix cache decides what stays there."""
    name = name_of(config, GPU)
    reports = {
        name: TierReport(
            hits=counts.hit_tokens.get(name, 0) // engine.layout.groups[0].block_size,
            load_bytes=0,
            load_seconds=0.0,
            store_bytes=0,
            store_seconds=0.0,
            evictions=sum(pool.evictions for pool in engine.pools),
            dropped={},
            used_bytes=engine.used_bytes(),
            peak_bytes=engine.peak_bytes(),
            capacity_bytes=engine.capacity_bytes(),
            mode=f"{engine.device} tensors",
        )
    }
    fields = TierReport.__dataclass_fields__
    for tier, found in stats.tiers.items():
        if tier != name:
            reports[tier] = TierReport(**{field: getattr(found, field) for field in fields})
    return reports
