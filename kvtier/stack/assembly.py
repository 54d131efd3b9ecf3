"""Puts a stack together: geometry from the tiers' alignments, tiers opened in order, the control plane above them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.control.board import TierPlan
from kvtier.control.plane import ControlLimits, ControlPlane
from kvtier.errors import ConfigError, UsageError
from kvtier.geometry import Geometry, stack_alignment
from kvtier.keys import CPU, GPU
from kvtier.loadstore import (
    Clock,
    KVCaches,
    LoadStore,
    Opened,
    ProbesAlignment,
    ProvidesRows,
    TierContext,
)
from kvtier.namespace import Namespace
from kvtier.options import LowerTierOptions
from kvtier.stack.dispatcher import Delivery, Dispatcher, Lane

logger = logging.getLogger(__name__)

UNBOUNDED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class StackSettings:
    """Deadlines of a stack, in seconds, and what it records.

    A load that passes its deadline ends with what it has; a store that finds no row by its deadline is dropped;
    closing drains lower tiers for at most `close_seconds`. `reservation_seconds` and `lease_seconds` are for engines
    that are told of hits first.
    """

    load_seconds: float = 30.0
    store_seconds: float = 10.0
    lookup_seconds: float = 1.0
    close_seconds: float = 10.0
    reservation_seconds: float = 10.0
    lease_seconds: float = 10.0
    events_max: int = 65536


@dataclass(frozen=True, slots=True)
class StackParts:
    """What an embedder hands over: tiers from the top down, the namespace, and the KV cache tensors or the workers.

    `workers` replaces the GPU tier where other processes copy between GPU blocks and rows. `engine_id` names the
    shared region for processes that have to find it; random when empty.
    """

    tiers: Sequence[LoadStore]
    namespace: Namespace
    kv_caches: KVCaches | None = None
    workers: Sequence[LoadStore] = ()
    engine_id: str = ""
    settings: StackSettings = StackSettings()


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """An open stack's insides. `lanes[i].tier` are the tiers from the CPU down; `opened[i]` what they said."""

    geometry: Geometry
    plane: ControlPlane
    dispatcher: Dispatcher
    lanes: Sequence[Lane]
    opened: Sequence[Opened]
    to_close: Sequence[LoadStore]


def split_tiers(parts: StackParts) -> tuple[LoadStore | None, LoadStore, list[LoadStore]]:
    """(GPU tier or None, CPU tier, lower tiers). Raises ConfigError when the order is wrong."""
    tiers = list(parts.tiers)
    gpu = tiers.pop(0) if tiers and tiers[0].medium == GPU else None
    if not tiers or tiers[0].medium != CPU:
        raise ConfigError("a stack needs a cpu tier, right below the gpu tier if there is one", "tiers")
    if any(tier.medium in (GPU, CPU) for tier in tiers[1:]):
        raise ConfigError("a stack has one gpu tier at the top and one cpu tier below it", "tiers")
    if gpu is None and not parts.workers:
        raise UsageError("a stack without a gpu tier needs workers that copy between GPU blocks and rows")
    if gpu is not None and parts.kv_caches is None:
        raise UsageError("a stack with a gpu tier needs the engine's kv_caches")
    return gpu, tiers[0], tiers[1:]


async def resolve_alignment(tiers: Sequence[LoadStore]) -> int:
    """The least common multiple of what the tiers declare and what their devices answer to a probe."""
    alignments = []
    for tier in tiers:
        probed = await tier.probe_alignment() if isinstance(tier, ProbesAlignment) else 1
        alignments.append(max(tier.BLOCK_SIZE_ALIGNMENT, probed))
    return stack_alignment(alignments)


async def assemble(parts: StackParts, clock: Clock, deliver: Callable[[list[Delivery]], None]) -> Assembled:
    """Open every tier and build the control plane over what they found. On any error all that was opened is closed."""
    gpu, cpu, lowers = split_tiers(parts)
    geometry = Geometry(parts.namespace.layout, await resolve_alignment(parts.tiers))
    engine_id = parts.engine_id or uuid.uuid4().hex
    opened: list[Opened] = []
    to_close: list[LoadStore] = []

    async def open_tier(tier: LoadStore, **more: object) -> Opened:
        name = tier.options.name or tier.options.type
        context = TierContext(name, geometry, parts.namespace, clock, engine_id, **more)  # type: ignore[arg-type]
        result = await tier.open(context)
        to_close.append(tier)
        for note in result.notes:
            logger.warning("tier %s: %s", name, note)
        return result

    try:
        workers = [gpu, *parts.workers] if gpu is not None else list(parts.workers)
        opened.append(await open_tier(cpu, workers=workers))
        if not isinstance(cpu, ProvidesRows):
            raise ConfigError("the cpu tier provides no rows", "tiers")
        if gpu is not None:
            await open_tier(gpu, kv_caches=parts.kv_caches, rows=cpu.rows)
        for lower in lowers:
            opened.append(await open_tier(lower, rows=cpu.rows))
        plans = [_plan(tier, result, geometry) for tier, result in zip([cpu, *lowers], opened, strict=True)]
        watermark = getattr(cpu.options, "free_watermark", 0.0)
        settings = parts.settings
        limits = ControlLimits(
            watermark_rows=int(watermark * cpu.rows.num_rows),
            reservation_seconds=settings.reservation_seconds,
            lease_seconds=settings.lease_seconds,
            events_max=settings.events_max,
        )
        plane = ControlPlane(plans[0], plans[1:], geometry.factor, limits)
    except BaseException:
        for tier in reversed(to_close):
            await tier.close()
        raise
    lanes = [Lane(cpu, UNBOUNDED_BYTES)] + [Lane(lower, _inflight_bytes(lower)) for lower in lowers]
    dispatcher = Dispatcher(lanes, geometry.row_bytes, clock, deliver)
    return Assembled(geometry, plane, dispatcher, lanes, opened, to_close)


def _inflight_bytes(tier: LoadStore) -> int:
    options = tier.options
    return options.inflight_bytes if isinstance(options, LowerTierOptions) else UNBOUNDED_BYTES


def _plan(tier: LoadStore, opened: Opened, geometry: Geometry) -> TierPlan:
    options = tier.options
    name = options.name or options.type
    policy = getattr(options, "policy", "lru")
    if not isinstance(options, LowerTierOptions):
        return TierPlan(name, tier.medium, opened, policy)
    return TierPlan(
        name,
        tier.medium,
        opened,
        policy,
        options.write_policy,
        max(1, options.inflight_bytes // geometry.row_bytes),
        options.job_timeout_seconds,
    )


__all__ = ["Assembled", "StackParts", "StackSettings", "assemble", "resolve_alignment"]
