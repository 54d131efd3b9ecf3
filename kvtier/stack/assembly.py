"""Puts a stack together: geometry from the tiers' alignments, tiers opened in order, the control plane above them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier.aio.shielded_wait import wait_done
from kvtier.control.deliveries import Delivery, PresenceAnswers, PresenceQuery
from kvtier.control.plane import ControlLimits, ControlPlane
from kvtier.control.state import TierSetup
from kvtier.errors import ConfigError, ResourceError, UsageError
from kvtier.options import MAX_LOWER_TIERS, LowerTierOptions
from kvtier.stack.assembled import Assembled
from kvtier.stack.dispatcher import Dispatcher, TierQueue
from kvtier.stack.shutdown import close_each
from kvtier.tier_api.contract import (
    AnswersLookups,
    Clock,
    JoinsRows,
    LoadStore,
    Opened,
    ProbesAlignment,
    ProvidesRows,
    Resettable,
    TierContext,
)
from kvtier.types.geometry import Geometry, stack_alignment
from kvtier.types.keys import CPU, GPU
from kvtier.types.namespace import Namespace

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

UNBOUNDED_BYTES = 1 << 62

T = TypeVar("T")
_closing_late: set[asyncio.Task[None]] = set()
"""Keeps tasks from being collected that close tiers which opened too late."""


@dataclass(frozen=True, slots=True)
class StackSettings(ControlLimits):
    """Deadlines of a stack, in seconds, and the limits of its control plane.

    A load that passes its deadline ends with what it has; a store that finds no row by its deadline is dropped;
    closing drains lower tiers for at most `close_seconds` and then gives each tier `tier_close_seconds` to end its
    I/O. Opening gives each tier `open_seconds`, in which the CPU tier may have to fill a large region with pages.
    `watermark_rows` is that of the CPU tier's options, whatever is given here.
    """

    open_seconds: float = 300.0
    load_seconds: float = 30.0
    store_seconds: float = 10.0
    lookup_seconds: float = 1.0
    close_seconds: float = 10.0
    tier_close_seconds: float = 60.0
    gather_seconds: float = 0.05


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
    kv_caches: Sequence[torch.Tensor] | None = None
    workers: Sequence[LoadStore] = ()
    engine_id: str = ""
    settings: StackSettings = StackSettings()
    refine: Callable[[Namespace, Sequence[str]], Namespace] | None = None


def order_problems(media: Sequence[str]) -> list[ConfigError]:
    """What is wrong with the order of a stack's tiers, given from the top down."""
    problems: list[ConfigError] = []
    for index, medium in enumerate(media):
        at = f"tiers[{index}]"
        if medium == GPU and index > 0:
            problems.append(ConfigError("the GPU tier comes first, once; move or remove this one", at))
        elif medium == CPU and CPU in media[:index]:
            problems.append(ConfigError("a stack has exactly one CPU tier; remove this one", at))
        elif medium == CPU and any(above != GPU for above in media[:index]):
            problems.append(ConfigError("the CPU tier comes before every lower tier; move it up", at))
        elif index - (GPU in media[:1]) > MAX_LOWER_TIERS:
            problems.append(ConfigError(f"a stack has at most {MAX_LOWER_TIERS} tiers below the CPU tier", at))
            break
    if CPU not in media:
        reason = "a stack needs a CPU tier; add `- type: cpu` with cpu_bytes_to_use after the GPU tier"
        problems.append(ConfigError(reason, "tiers"))
    return problems


def split_tiers(parts: StackParts) -> tuple[Sequence[LoadStore], LoadStore, list[LoadStore]]:
    """(who copies between GPU blocks and rows, CPU tier, lower tiers).

    Raises ConfigError when the order is wrong, UsageError when not exactly one copies for each worker of the layout.
    """
    tiers = list(parts.tiers)
    for problem in order_problems([tier.medium for tier in tiers]):
        raise problem
    gpu = [tiers.pop(0)] if tiers[0].medium == GPU else []
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


async def resolve_alignment(tiers: Sequence[LoadStore], settings: StackSettings | None = None) -> int:
    """The least common multiple of what the tiers declare and what their devices answer to a probe.

    Raises ResourceError for a device that does not answer in time.
    """
    alignments = []
    for tier in tiers:
        probed = 1
        if isinstance(tier, ProbesAlignment):
            probing = tier.probe_alignment()
            probed = await _within(settings or StackSettings(), tier, "answer a probe", probing, _ended_well)
        alignments.append(max(tier.BLOCK_SIZE_ALIGNMENT, probed))
    return stack_alignment(alignments)


async def _within(
    settings: StackSettings,
    tier: LoadStore,
    what: str,
    work: Coroutine[Any, Any, T],
    when_late: Callable[[asyncio.Future[T]], object],
) -> T:
    """The result of a tier's call. Raises ResourceError when it does not end in time.

    A call that is late, or whose caller is cancelled, is cancelled. It may go on for as long as a disk does not answer:
    nothing waits for that, and `when_late` is called with it when it ends after all.
    """
    call = asyncio.ensure_future(work)
    try:
        await asyncio.wait((call,), timeout=settings.open_seconds)
    except asyncio.CancelledError:
        call.cancel()
        await wait_done(call, settings.tier_close_seconds)
        call.add_done_callback(when_late)
        raise
    if not call.done():
        call.cancel()
        call.add_done_callback(when_late)
        raise ResourceError(f"tier {tier.options.label} did not {what} within {settings.open_seconds:g} s")
    return call.result()


def _ended_well(call: asyncio.Future[Any]) -> bool:
    """True if an ended call has a result. Its exception counts as seen."""
    return not call.cancelled() and call.exception() is None


async def open_tier(tier: LoadStore, context: TierContext, settings: StackSettings) -> Opened:
    """Open a tier within its deadline; one that opens later is closed then."""

    def close_late(opening: asyncio.Future[Opened]) -> None:
        if _ended_well(opening):
            closing = asyncio.get_running_loop().create_task(close_each([tier], settings.tier_close_seconds))
            _closing_late.add(closing)
            closing.add_done_callback(_closing_late.discard)

    try:
        opened = await _within(settings, tier, "open", tier.open(context), close_late)
    except OSError as error:  # such as a system without a thread or a descriptor to give
        raise ResourceError(f"tier {context.name} could not be opened: {error}") from error
    for note in opened.notes:
        logger.warning("tier %s: %s", context.name, note)
    return opened


async def assemble(parts: StackParts, clock: Clock, deliver: Callable[[list[Delivery]], None]) -> Assembled:
    """Open every tier and build the control plane over what they found.

    On any error all that was opened is closed, and the links to workers are closed.
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
    alignment = await resolve_alignment([*copiers, cpu, *lowers], parts.settings)
    geometry = Geometry(parts.namespace.layout, alignment)
    engine_id = parts.engine_id or uuid.uuid4().hex

    namespace = parts.namespace

    async def opened_with(tier: LoadStore, **more: object) -> Opened:
        context = TierContext(tier.options.label, geometry, namespace, clock, engine_id, **more)  # type: ignore[arg-type]
        result = await open_tier(tier, context, parts.settings)
        to_close.append(tier)
        return result

    opened = [await opened_with(cpu, workers=copiers)]
    if not isinstance(cpu, ProvidesRows):
        raise ConfigError("the cpu tier provides no rows", "tiers")
    for worker, copier in enumerate(copiers):
        await opened_with(copier, worker=worker, kv_caches=parts.kv_caches, rows=cpu.rows)
    if parts.refine is not None:
        if not isinstance(cpu, JoinsRows):
            raise ConfigError("workers in processes of their own cannot map its region", "tiers")
        namespace = parts.refine(namespace, cpu.worker_notes())
    for lower in lowers:
        opened.append(await opened_with(lower, rows=cpu.rows))
        if opened[-1].space is None:
            _check_shared(lower)
    plans = [_plan(tier, result, geometry, parts.settings) for tier, result in zip([cpu, *lowers], opened, strict=True)]
    limits = replace(parts.settings, watermark_rows=cpu.options.watermark_rows(cpu.rows.num_rows))
    plane = ControlPlane(plans[0], plans[1:], geometry.factor, limits)
    queues = [TierQueue(cpu, UNBOUNDED_BYTES)] + [TierQueue(lower, _inflight_bytes(lower)) for lower in lowers]
    dispatcher = Dispatcher(queues, geometry.row_bytes, clock, deliver)
    return Assembled(geometry, plane, dispatcher, queues, opened, to_close)


def _check_shared(lower: LoadStore) -> None:
    """Raises ConfigError unless a shared tier has the abilities that the control plane has for an owned one."""
    name = lower.options.label
    if not isinstance(lower, Resettable):
        raise ConfigError(f"tier {name} is shared and has no reset(epoch): it would serve old weights", "tiers")
    if not isinstance(lower, AnswersLookups):
        raise ConfigError(f"tier {name} is shared and has no lookup(keys): nothing would be found in it", "tiers")


async def look_up(tier: LoadStore, query: PresenceQuery) -> list[PresenceAnswers]:
    """A shared tier's answer to a query, or nothing: the deadline of its keys makes them misses then."""
    assert isinstance(tier, AnswersLookups)
    try:
        answers = await tier.lookup(query.keys)
    except Exception:
        logger.exception("tier %s could not answer a lookup", tier.options.label)
        return []
    if len(answers) != len(query.keys):
        logger.error("tier %s answered %d of %d keys", tier.options.label, len(answers), len(query.keys))
        return []
    return [PresenceAnswers(query, answers)]


def _inflight_bytes(tier: LoadStore) -> int:
    options = tier.options
    return options.inflight_bytes if isinstance(options, LowerTierOptions) else UNBOUNDED_BYTES


def _plan(tier: LoadStore, opened: Opened, geometry: Geometry, settings: StackSettings) -> TierSetup:
    options = tier.options
    name, policy = options.label, options.eviction_policy()
    if not isinstance(options, LowerTierOptions):
        return TierSetup(name, tier.medium, opened, policy)
    return TierSetup(
        name,
        tier.medium,
        opened,
        policy,
        options.write_policy,
        max(1, options.inflight_bytes // geometry.row_bytes),
        options.job_timeout_seconds,
        lookup_timeout_seconds=settings.lookup_seconds,
    )


__all__ = ["StackParts", "StackSettings", "assemble", "look_up", "open_tier", "resolve_alignment"]
