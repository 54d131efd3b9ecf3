"""Puts a stack together: geometry from the tiers' alignments, tiers opened in order, the control plane above them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.control.board import TierPlan
from kvtier.control.plane import ControlLimits, ControlPlane, Question
from kvtier.errors import ConfigError, UsageError
from kvtier.geometry import Geometry, stack_alignment
from kvtier.keys import CPU, GPU
from kvtier.loadstore import (
    Clock,
    JoinsRows,
    KVCaches,
    LoadStore,
    LookupResult,
    Opened,
    ProbesAlignment,
    ProvidesRows,
    Resettable,
    TierContext,
)
from kvtier.namespace import Namespace
from kvtier.options import MAX_LOWER_TIERS, LowerTierOptions
from kvtier.stack.closing import close_each
from kvtier.stack.dispatcher import Delivery, Dispatcher, Lane

logger = logging.getLogger(__name__)

UNBOUNDED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class StackSettings:
    """Deadlines of a stack, in seconds, and what it records.

    A load that passes its deadline ends with what it has; a store that finds no row by its deadline is dropped;
    closing drains lower tiers for at most `close_seconds` and then gives each tier `tier_close_seconds` to end its
    I/O. `reservation_seconds` and `lease_seconds` are for engines that are told of hits first.
    """

    load_seconds: float = 30.0
    store_seconds: float = 10.0
    lookup_seconds: float = 1.0
    close_seconds: float = 10.0
    tier_close_seconds: float = 60.0
    reservation_seconds: float = 10.0
    lease_seconds: float = 10.0
    events_max: int = 65536


@dataclass(frozen=True, slots=True)
class StackParts:
    """What an embedder hands over: tiers from the top down, the namespace, and the KV cache tensors or the workers.

    `refine` completes the namespace of the lower tiers by what the workers in other processes said of themselves when
    they mapped the CPU tier's region; it raises ConfigError where they contradict each other.

    `workers`, one for each worker of the layout, replace the GPU tier where other processes copy between GPU blocks
    and rows; a gpu tier among `tiers` is theirs then and is not opened here. `engine_id` names the shared region for
    processes that have to find it; random when empty.
    """

    tiers: Sequence[LoadStore]
    namespace: Namespace
    kv_caches: KVCaches | None = None
    workers: Sequence[LoadStore] = ()
    engine_id: str = ""
    settings: StackSettings = StackSettings()
    refine: Callable[[Namespace, Sequence[str]], Namespace] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """An open stack's insides. `lanes[i].tier` are the tiers from the CPU down; `opened[i]` what they said."""

    geometry: Geometry
    plane: ControlPlane
    dispatcher: Dispatcher
    lanes: Sequence[Lane]
    opened: Sequence[Opened]
    to_close: Sequence[LoadStore]


def split_tiers(parts: StackParts) -> tuple[Sequence[LoadStore], LoadStore, list[LoadStore]]:
    """(who copies between GPU blocks and rows, CPU tier, lower tiers).

    Raises ConfigError when the order is wrong, UsageError when not exactly one copies for each worker of the layout.
    """
    tiers = list(parts.tiers)
    gpu = [tiers.pop(0)] if tiers and tiers[0].medium == GPU else []
    if not tiers or tiers[0].medium != CPU:
        raise ConfigError("a stack needs a cpu tier, right below the gpu tier if there is one", "tiers")
    if any(tier.medium in (GPU, CPU) for tier in tiers[1:]):
        raise ConfigError("a stack has one gpu tier at the top and one cpu tier below it", "tiers")
    if len(tiers) - 1 > MAX_LOWER_TIERS:
        raise ConfigError(f"a stack has at most {MAX_LOWER_TIERS} tiers below the cpu tier", "tiers")
    if parts.workers and parts.kv_caches is not None:
        raise UsageError("a stack has kv_caches of its own or workers that have them, not both")
    if not parts.workers and not gpu:
        raise UsageError("a stack without a gpu tier needs workers that copy between GPU blocks and rows")
    if not parts.workers and parts.kv_caches is None:
        raise UsageError("a stack with a gpu tier needs the engine's kv_caches")
    copiers, world_size = parts.workers or gpu, parts.namespace.layout.world_size
    if len(copiers) != world_size:
        raise UsageError(f"the layout has {world_size} workers, but {len(copiers)} would copy their blocks")
    return copiers, tiers[0], tiers[1:]


async def resolve_alignment(tiers: Sequence[LoadStore]) -> int:
    """The least common multiple of what the tiers declare and what their devices answer to a probe."""
    alignments = []
    for tier in tiers:
        probed = await tier.probe_alignment() if isinstance(tier, ProbesAlignment) else 1
        alignments.append(max(tier.BLOCK_SIZE_ALIGNMENT, probed))
    return stack_alignment(alignments)


async def assemble(parts: StackParts, clock: Clock, deliver: Callable[[list[Delivery]], None]) -> Assembled:
    """Open every tier and build the control plane over what they found.

    On any error all that was opened is closed, and the links to workers are hung up.
    """
    to_close: list[LoadStore] = []
    try:
        return await _assemble(parts, clock, deliver, to_close)
    except BaseException:
        rest = [worker for worker in parts.workers if worker not in to_close]
        await close_each([*reversed(to_close), *rest], parts.settings.tier_close_seconds)
        raise


async def _assemble(
    parts: StackParts, clock: Clock, deliver: Callable[[list[Delivery]], None], to_close: list[LoadStore]
) -> Assembled:
    copiers, cpu, lowers = split_tiers(parts)
    geometry = Geometry(parts.namespace.layout, await resolve_alignment([*copiers, cpu, *lowers]))
    engine_id = parts.engine_id or uuid.uuid4().hex

    namespace = parts.namespace

    async def open_tier(tier: LoadStore, **more: object) -> Opened:
        name = tier.options.name or tier.options.type
        context = TierContext(name, geometry, namespace, clock, engine_id, **more)  # type: ignore[arg-type]
        result = await tier.open(context)
        to_close.append(tier)
        for note in result.notes:
            logger.warning("tier %s: %s", name, note)
        return result

    opened = [await open_tier(cpu, workers=copiers)]
    if not isinstance(cpu, ProvidesRows):
        raise ConfigError("the cpu tier provides no rows", "tiers")
    for worker, copier in enumerate(copiers):
        await open_tier(copier, worker=worker, kv_caches=parts.kv_caches, rows=cpu.rows)
    if parts.refine is not None:
        if not isinstance(cpu, JoinsRows):
            raise ConfigError("workers in processes of their own cannot map its region", "tiers")
        namespace = parts.refine(namespace, cpu.worker_notes())
    for lower in lowers:
        opened.append(await open_tier(lower, rows=cpu.rows))
        if opened[-1].space is None and not isinstance(lower, Resettable):
            name = lower.options.name or lower.options.type
            raise ConfigError(f"tier {name} is shared and has no reset(epoch): it would serve old weights", "tiers")
    plans = [_plan(tier, result, geometry, parts.settings) for tier, result in zip([cpu, *lowers], opened, strict=True)]
    plane = ControlPlane(plans[0], plans[1:], geometry.factor, _limits(cpu, cpu.rows.num_rows, parts.settings))
    lanes = [Lane(cpu, UNBOUNDED_BYTES)] + [Lane(lower, _inflight_bytes(lower)) for lower in lowers]
    dispatcher = Dispatcher(lanes, geometry.row_bytes, clock, deliver)
    return Assembled(geometry, plane, dispatcher, lanes, opened, to_close)


async def ask(assembled: Assembled, question: Question) -> Sequence[LookupResult] | None:
    """A shared tier's answer to a question, None if it has none: the keys' own deadline makes them misses then."""
    tier = assembled.lanes[question.position].tier
    try:
        answers = await tier.lookup(question.keys)
    except Exception:
        logger.exception("tier %s could not answer a lookup", tier.options.name or tier.options.type)
        return None
    if len(answers) != len(question.keys):
        logger.error(
            "tier %s answered %d of %d keys", tier.options.name or tier.options.type, len(answers), len(question.keys)
        )
        return None
    return answers


def _limits(cpu: LoadStore, num_rows: int, settings: StackSettings) -> ControlLimits:
    return ControlLimits(
        watermark_rows=int(getattr(cpu.options, "free_watermark", 0.0) * num_rows),
        reservation_seconds=settings.reservation_seconds,
        lease_seconds=settings.lease_seconds,
        events_max=settings.events_max,
    )


def _inflight_bytes(tier: LoadStore) -> int:
    options = tier.options
    return options.inflight_bytes if isinstance(options, LowerTierOptions) else UNBOUNDED_BYTES


def _plan(tier: LoadStore, opened: Opened, geometry: Geometry, settings: StackSettings) -> TierPlan:
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
        lookup_timeout_seconds=settings.lookup_seconds,
    )


__all__ = ["Assembled", "StackParts", "StackSettings", "ask", "assemble", "resolve_alignment"]
