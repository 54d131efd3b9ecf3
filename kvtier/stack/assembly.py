"""Puts a stack together: geometry from the tiers' alignments, tiers opened in order, the control plane above them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier.aio.shielded_wait import wait_done
from kvtier.control.jobs import Arrival
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.settings import StackSettings
from kvtier.control.tiers.lower_tier import LowerTier, TierSpec
from kvtier.control.tiers.tier_index import ASKED_AT_ONCE
from kvtier.errors import ConfigError, ResourceError, RootDamagedError, UsageError
from kvtier.options import (
    MAX_LOWER_TIERS,
    EvictsBlocks,
    KeepsRowsFree,
    LimitsWrites,
    LowerTierOptions,
    RecordOptions,
    SharedTierOptions,
    TierOptions,
    folders_of,
    quota_bytes,
)
from kvtier.policy import RequestModels
from kvtier.stack.dispatcher import Dispatcher, JobSpans, TierQueue, bytes_by_rows
from kvtier.stack.distinct_folders import check_folders
from kvtier.stack.joining import Joining, LowerTiers
from kvtier.stack.learned.installed_policies import find_policy
from kvtier.stack.open_stack import OpenStack
from kvtier.stack.shutdown import close_each
from kvtier.stack.watching.operator_log import LOGGER
from kvtier.tier.contract import (
    AnswersLookups,
    Clock,
    FencesCopies,
    LoadStore,
    Opened,
    ProbesAlignment,
    ProvidesRows,
    Resettable,
    Rows,
    TierContext,
)
from kvtier.types.geometry import Geometry, GroupKind, KVLayout, stack_alignment
from kvtier.types.keys import CPU, GPU, GroupIndex
from kvtier.types.namespace import Namespace

if TYPE_CHECKING:
    import torch
    from opentelemetry.trace import Tracer

    from kvtier.stack.learned.budget_records import BudgetRecord
    from kvtier.stack.learned.model_files import ModelFiles
    from kvtier.traces.write import Recorder

logger = logging.getLogger(__name__)


T = TypeVar("T")
UNBOUNDED_BYTES = 1 << 62
RESTORE_SECONDS = 5.0
"""How long an opening waits for the file of what policies have learned."""
_closing_late: set[asyncio.Task[None]] = set()
"""Keeps tasks from being collected that close tiers which opened too late."""


@dataclass(frozen=True, slots=True)
class StackParts:
    """Parts of a stack to open: tiers from the top down, the namespace, and the KV cache tensors or the workers.

    `workers`, one for each worker of the layout, replace the GPU tier where others copy between GPU blocks and rows; a
    gpu tier among `tiers` is theirs then and is not opened here. With `lends_rows` nothing here copies: the workers of
    engines do, in other processes. `engine_id` is the engine's name at a stack process.
    With `record` the stack keeps a trace of what it is given by `StackRequest.end`.

    `state_dir` is the folder for what policies have learned, for the next start; when empty, the first folder of the
    highest lower tier that has one. `stats_socket` is the path of a Unix socket that serves the stack's figures; empty:
    none. `operator_log` is the name of the logger for what operators must know. With a `tracer` of OpenTelemetry each
    job of a tier has a span.

    With `joins` the lower tiers are held back until it has a namespace: they neither load nor store. If they cannot be
    opened then, they are held back for the life of the stack. The layout of that namespace may have shorter blocks than
    the rows.
    """

    tiers: Sequence[LoadStore]
    namespace: Namespace
    kv_caches: Sequence[torch.Tensor] | None = None
    workers: Sequence[LoadStore] = ()
    lends_rows: bool = False
    engine_id: str = ""
    settings: StackSettings = field(default_factory=StackSettings)
    record: RecordOptions | None = None
    state_dir: str = ""
    stats_socket: str = ""
    operator_log: str = LOGGER
    tracer: Tracer | None = None
    joins: asyncio.Future[Namespace] | None = None


def order_problems(media: Sequence[str]) -> list[ConfigError]:
    """Problems of the order of a stack's tiers, given from the top down."""
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
    if parts.lends_rows:
        return (), tiers[0], tiers[1:]
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

    A call that is late, or whose caller is cancelled or cannot wait, is cancelled. It may go on for as long as a disk
    does not answer: nothing waits for that, and `when_late` is called with it when it ends after all.
    """
    try:
        call = asyncio.ensure_future(work)
    except Exception:
        work.close()
        raise
    try:
        await asyncio.wait((call,), timeout=settings.open_timeout_seconds)
    except BaseException:
        call.cancel()
        await wait_done(call, settings.tier_close_seconds)
        call.add_done_callback(when_late)
        raise
    if not call.done():
        call.cancel()
        call.add_done_callback(when_late)
        raise ResourceError(f"tier {tier.options.label} did not {what} within {settings.open_timeout_seconds:g} s")
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

    began = context.clock()
    try:
        opened = await _within(settings, tier, "open", tier.open(context), close_late)
        for note in opened.notes:
            logger.warning("tier %s: %s", context.name, note)
        return replace(opened, open_seconds=context.clock() - began)
    except OSError as error:  # such as a system without a thread or a descriptor to give
        raise ResourceError(f"tier {context.name} could not be opened: {error}") from error


async def assemble(parts: StackParts, clock: Clock, deliver: Callable[[Sequence[Arrival]], None]) -> OpenStack:
    """Open every tier and build the control plane over what they found.

    On any error all that was opened is closed, and so are the workers.
    """
    to_close: list[LoadStore] = []
    try:
        keyed = [(f"tiers[{index}]", tier.options) for index, tier in enumerate(parts.tiers)]
        await check_folders(keyed, parts.settings.open_timeout_seconds)
        return await _assemble(parts, clock, deliver, to_close)
    except BaseException:
        rest = [worker for worker in parts.workers if worker not in to_close]
        await close_each([*reversed(to_close), *rest], parts.settings.tier_close_seconds)
        raise


async def _assemble(
    parts: StackParts, clock: Clock, deliver: Callable[[Sequence[Arrival]], None], to_close: list[LoadStore]
) -> OpenStack:
    copiers, cpu, lowers = split_tiers(parts)
    namespace = parts.namespace
    geometry = Geometry(namespace.layout, await resolve_alignment([*copiers, cpu, *lowers], parts.settings))

    async def opened_with(tier: LoadStore, of: Namespace = namespace, **more: object) -> Opened:
        laid = replace(geometry, layout=of.layout) if tier in lowers else geometry
        context = TierContext(tier.options.label, laid, of, clock, **more)  # type: ignore[arg-type]
        to_close.append(tier)
        try:
            return await open_tier(tier, context, parts.settings)
        except BaseException as error:
            to_close.remove(tier)
            if isinstance(error, ConfigError) and tier in parts.tiers:
                raise error.below(f"tiers[{parts.tiers.index(tier)}]") from error
            raise

    def spec(tier: LoadStore, opened: Opened, layout: KVLayout) -> TierSpec:
        return tier_spec(tier, opened, replace(geometry, layout=layout), parts.settings.lookup_timeout_seconds)

    cpu_opened = await opened_with(cpu, workers=copiers)
    rows = _rows_of(cpu)
    for worker, copier in enumerate(copiers):
        await opened_with(copier, worker=worker, kv_caches=parts.kv_caches, rows=rows)
    queues = {tier: TierQueue(tier, inflight_bytes(tier)) for tier in (cpu, *lowers)}

    async def open_lower(lower: LoadStore, of: Namespace, new_epoch: int | None) -> TierSpec:
        made = partial(spec, layout=of.layout)
        return await _lower_spec(queues[lower], opened_with(lower, of, rows=rows, new_epoch=new_epoch), made)

    below = LowerTiers(lowers, open_lower)
    if parts.joins is None:
        specs = await below.open(namespace)
    else:
        specs = [replace(spec(lower, Opened(0), geometry.layout), held_back=True) for lower in lowers]
    completed = complete_settings(parts, watermark_rows(cpu.options, rows.num_rows))
    plane = ControlPlane(spec(cpu, cpu_opened, geometry.layout), specs, geometry.factor, completed, chains(geometry))
    models = plane.control.models
    files = model_files(parts, lowers, models, plane.control.lowers)
    if files is not None:
        below = replace(below, on_open=partial(files.restore_budgets, RESTORE_SECONDS))
    joining = None if parts.joins is None else Joining(below, parts.joins, rows.num_rows, models, deliver)
    if files is not None:
        await files.restore(RESTORE_SECONDS)
        if joining is None:
            await files.restore_budgets(RESTORE_SECONDS)
    dispatcher = Dispatcher([*queues.values()], bytes_by_rows(geometry.row_bytes), clock, deliver, _spans(parts, clock))
    return OpenStack(geometry, plane, dispatcher, to_close, to_fence(copiers), joining, _recorder(parts), files)


async def _lower_spec(
    queue: TierQueue, opening: Coroutine[Any, Any, Opened], spec: Callable[[LoadStore, Opened], TierSpec]
) -> TierSpec:
    """The spec of a lower tier that is being opened. A tier whose root is damaged is held back, and the stack opens.

    Raises what the opening raises, and ConfigError as `_checked`.
    """
    lower = queue.tier
    try:
        opened = _checked(lower, await opening)
        queue.look_up_first = opened.look_up_before_store
        return spec(lower, opened)
    except RootDamagedError as error:
        logger.error("tier %s is down: %s", lower.options.label, error)  # noqa: TRY400
        return replace(spec(lower, Opened(0)), held_back=True)


def inflight_bytes(tier: LoadStore) -> int:
    """Bytes of transfers that may be in flight to a tier at once."""
    options = tier.options
    return options.inflight_bytes if isinstance(options, LowerTierOptions) else UNBOUNDED_BYTES


def tier_spec(tier: LoadStore, opened: Opened, geometry: Geometry, lookup_seconds: float) -> TierSpec:
    """The spec of a tier that opened with this."""
    options = tier.options
    evicts = options if isinstance(options, EvictsBlocks) else None
    eviction = "lru" if evicts is None else evicts.policy
    policy, token_bytes = find_policy(eviction), _token_bytes(opened, geometry)
    spec = TierSpec(
        options.label,
        tier.medium,
        opened,
        policy,
        token_bytes=token_bytes,
        kind=options.type,
        eviction=eviction,
        retained_bytes_max=0 if evicts is None else quota_bytes(evicts.retained_max, opened.capacity_bytes),
    )
    if not isinstance(options, LowerTierOptions):
        return spec
    spec = replace(
        spec,
        write_policy=options.write_policy,
        inflight_blocks=max(1, options.inflight_bytes // geometry.row_bytes),
        timeout_seconds=options.job_timeout_seconds,
        lookup_timeout_seconds=lookup_seconds,
        admit=options.admit,
        write_bytes_per_day=options.write_bytes_per_day if isinstance(options, LimitsWrites) else None,
        block_bytes=max(opened.space.slot_bytes) if opened.space is not None else geometry.row_bytes,
    )
    probed_from = 0 if opened.probe_prefix else ASKED_AT_ONCE
    return replace(with_hints(spec, options, chains(geometry)), probed_from=probed_from)


def _token_bytes(opened: Opened, geometry: Geometry) -> float:
    """The bytes that the blocks of every group take up for one of their tokens."""
    groups = range(geometry.num_groups)
    sizes = opened.space.slot_bytes if opened.space is not None else list(map(geometry.aligned_bytes, groups))
    return sum(sizes[group] / geometry.tokens_per_offloaded_block(group) for group in groups)


def with_hints(
    spec: TierSpec, options: LowerTierOptions, probed_groups: frozenset[GroupIndex] = frozenset()
) -> TierSpec:
    """The spec with how long is believed what a shared tier holds, and how that is found out."""
    if not isinstance(options, SharedTierOptions):
        return spec
    hit, miss = options.hit_hint_seconds, options.miss_hint_seconds
    return replace(spec, hit_hint_seconds=hit, miss_hint_seconds=miss, probed_groups=probed_groups)


def chains(geometry: Geometry) -> frozenset[GroupIndex]:
    """The groups of which every block needs all those before it: the others keep a window of a prompt, or its end."""
    kinds = enumerate(group.kind for group in geometry.layout.groups)
    return frozenset(GroupIndex(index) for index, kind in kinds if kind is GroupKind.FULL)


def to_fence(copiers: Sequence[LoadStore]) -> list[FencesCopies]:
    """The open tiers among these before which each job is to be fenced."""
    return [copier for copier in copiers if isinstance(copier, FencesCopies) and copier.beside_engine]


def watermark_rows(options: TierOptions, num_rows: int) -> int:
    """The number of a CPU tier's rows that background demotion keeps free or clean."""
    return int(options.free_watermark * num_rows) if isinstance(options, KeepsRowsFree) else 0


def complete_settings(parts: StackParts, watermark_rows: int) -> StackSettings:
    """The settings with what follows from the tiers and the layout."""
    speed = parts.settings.prefill_tokens_per_second
    block_seconds = math.inf
    if not isinstance(speed, str) and speed:
        block_seconds = parts.namespace.layout.tokens_per_offloaded_block(0) / speed
    return replace(parts.settings, watermark_rows=watermark_rows, block_seconds=block_seconds)


def _spans(parts: StackParts, clock: Clock) -> JobSpans | None:
    return None if parts.tracer is None else JobSpans(parts.tracer, clock)


def _recorder(parts: StackParts) -> Recorder | None:
    """A recorder that has begun, of requests in offloaded blocks of the first group."""
    if parts.record is None:
        return None
    from kvtier.traces.write import Recorder

    recorder = Recorder(parts.record, parts.namespace.layout.tokens_per_offloaded_block(0))
    recorder.open()
    return recorder


def model_files(
    parts: StackParts, lowers: Sequence[LoadStore], models: RequestModels, limited: Sequence[LowerTier]
) -> ModelFiles | None:
    """The files of models and of what was written; None without a place for them, and without a model."""
    folders, own = [folder for lower in lowers for folder in folders_of(lower.options)], parts.state_dir
    if not list(models) or not (own or folders):
        return None
    from kvtier.stack.learned.model_files import ModelFiles

    budgets: Sequence[BudgetRecord] = ()
    if any(lower.budgeted is not None for lower in limited):
        from kvtier.stack.learned.budget_records import budget_records

        own_blocks = [not isinstance(lower.options, SharedTierOptions) for lower in lowers]  # others keep a record too
        budgets = budget_records(list(compress(limited, own_blocks)))
    return ModelFiles(Path(own or folders[0]), models, bool(own), budgets, parts.settings.close_timeout_seconds)


def _rows_of(cpu: LoadStore) -> Rows:
    if not isinstance(cpu, ProvidesRows):
        raise ConfigError("the cpu tier provides no rows", "tiers")
    return cpu.rows


def _checked(lower: LoadStore, opened: Opened) -> Opened:
    """Raises ConfigError unless a shared tier has the abilities that the control plane has for an owned one."""
    name = lower.options.label
    if opened.space is None and not isinstance(lower, Resettable):
        raise ConfigError(f"tier {name} is shared and has no reset(epoch): it would serve old weights", "tiers")
    if opened.space is None and not isinstance(lower, AnswersLookups):
        raise ConfigError(f"tier {name} is shared and has no lookup(keys): nothing would be found in it", "tiers")
    return opened


__all__ = ["StackParts", "StackSettings", "assemble", "open_tier", "resolve_alignment"]
