"""A tier that goes wrong as planned: any LoadStore behind a plan of faults, the same for the same seed."""

from __future__ import annotations

import asyncio
import errno as errors
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Protocol

from kvtier.errors import UsageError
from kvtier.options import TierOptions
from kvtier.tier.contract import (
    AnswersLookups,
    AttachesRows,
    FencesCopies,
    FitsGeometry,
    LoadStore,
    Opened,
    ProbesAlignment,
    ProvidesRows,
    Resettable,
    SealsRows,
    StatesEpoch,
    TierContext,
)
from kvtier.types.arrays import int_array
from kvtier.types.jobs import (
    CORRUPT,
    LATE,
    MISSING,
    STORED,
    BlockOutcome,
    DropReason,
    GPUGroup,
    JobKind,
    JobResult,
    RowGroup,
    TransferJob,
    dropped,
    failed,
)
from kvtier.types.keys import Medium, OffloadKey


class FaultKind(StrEnum):
    """Kinds of planned faults. The first five befall a block, which then never reaches the tier; the others a whole
    job.

    FAIL: it fails with `errno`. CORRUPT: a load is refused by verification. MISSING: a load finds nothing. DROP: a
    store is dropped with `reason`. LOSE: a store ends as STORED and stored nothing.

    RAISE: the call raises, as a defect would. HOLD: the call does not end before `release` or `close`, nor when it is
    cancelled; its blocks move when it is released. LATE: held until its deadline has passed, then it runs.
    """

    FAIL = "fail"
    CORRUPT = "corrupt"
    MISSING = "missing"
    DROP = "drop"
    LOSE = "lose"
    RAISE = "raise"
    HOLD = "hold"
    LATE = "late"


_ONLY = {
    FaultKind.CORRUPT: JobKind.LOAD,
    FaultKind.MISSING: JobKind.LOAD,
    FaultKind.DROP: JobKind.STORE,
    FaultKind.LOSE: JobKind.STORE,
}
_OF_JOBS = (FaultKind.RAISE, FaultKind.HOLD, FaultKind.LATE)


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault, and its direction (None: both)."""

    kind: FaultKind
    direction: JobKind | None = None
    errno: int = errors.EIO
    reason: DropReason = DropReason.BACKLOG

    def __post_init__(self) -> None:
        only = _ONLY.get(self.kind)
        if only is not None and self.direction not in (None, only):
            raise UsageError(f"{self.kind} befalls a {only} only")

    @property
    def of_job(self) -> bool:
        """True when it befalls a whole job, not a block."""
        return self.kind in _OF_JOBS

    def befalls(self, kind: JobKind) -> bool:
        """True when it can happen to a job of this kind."""
        return kind is (_ONLY.get(self.kind) or self.direction or kind)

    def outcome(self) -> BlockOutcome:
        """The outcome that is reported for a block."""
        outcomes = {FaultKind.CORRUPT: CORRUPT, FaultKind.MISSING: MISSING, FaultKind.LOSE: STORED}
        if self.kind is FaultKind.DROP:
            return dropped(self.reason)
        return outcomes.get(self.kind) or failed(self.errno)


class FaultPlan(Protocol):
    """Says what goes wrong. `number` counts a backend's jobs from 1; None lets a thing go its way."""

    def of_job(self, number: int, kind: JobKind) -> Fault | None: ...
    def of_block(self, number: int, kind: JobKind, key: OffloadKey) -> Fault | None: ...


class SeededFaults:
    """Faults by chance: each with the probability it is given. The same seed, jobs and keys give the same faults."""

    def __init__(self, seed: int, chances: Sequence[tuple[float, Fault]]) -> None:
        self.seed = seed
        self._chances = tuple(chances)

    def of_job(self, number: int, kind: JobKind) -> Fault | None:
        """The fault of the job of this number, if there is one."""
        return self._draw(f"{self.seed}/{number}/{kind}", kind, of_job=True)

    def of_block(self, number: int, kind: JobKind, key: OffloadKey) -> Fault | None:
        """The fault of a block of that job, if there is one."""
        return self._draw(f"{self.seed}/{number}/{kind}/{key.hex()}", kind, of_job=False)

    def _draw(self, name: str, kind: JobKind, of_job: bool) -> Fault | None:
        rng = random.Random(name)
        for chance, fault in self._chances:
            if fault.of_job is of_job and fault.befalls(kind) and rng.random() < chance:
                return fault
        return None


@dataclass(frozen=True, slots=True)
class NthJob:
    """A fault in the N-th job of a backend if it can befall it; with `every` also in all jobs after that."""

    number: int
    fault: Fault
    every: bool = False

    def of_job(self, number: int, kind: JobKind) -> Fault | None:
        """The fault, if it is one of jobs and this is the job."""
        return self.fault if self.fault.of_job and self._is_it(number, kind) else None

    def of_block(self, number: int, kind: JobKind, key: OffloadKey) -> Fault | None:
        """The fault, if it is one of blocks and this is the job."""
        return self.fault if not self.fault.of_job and self._is_it(number, kind) else None

    def _is_it(self, number: int, kind: JobKind) -> bool:
        return self.fault.befalls(kind) and (number == self.number or (self.every and number > self.number))


NO_FAULTS: FaultPlan = SeededFaults(0, ())


ATTRIBUTES = ("medium", "BLOCK_SIZE_ALIGNMENT", "Options")
ABILITIES: dict[type, tuple[str, ...]] = {
    ProbesAlignment: ("probe_alignment",),
    AnswersLookups: ("lookup",),
    Resettable: ("reset",),
    StatesEpoch: ("state_epoch", "leave_epoch"),
    SealsRows: ("seal",),
    AttachesRows: ("attach",),
    FitsGeometry: ("use_geometry",),
}
"""What the optional protocols of a tier consist of."""
WHILE_OPEN: dict[type, tuple[str, ...]] = {ProvidesRows: ("rows",), FencesCopies: ("beside_engine", "fence")}
"""Those with properties, which a tier has once it is open."""


class FaultyBackend(LoadStore):
    """A tier behind a plan of faults; everything else is the inner tier's.

    `plan` may be changed at any time, for the jobs that follow. `injected` counts faults by kind, `held` is the number
    of jobs held back, `holding` is set while there are some. It has the optional abilities of the inner tier.
    """

    medium: ClassVar[Medium] = Medium("FAULTY")
    Options: ClassVar[type[TierOptions]] = TierOptions

    def __init__(self, inner: LoadStore, plan: FaultPlan = NO_FAULTS) -> None:
        self.options = inner.options
        self.inner = inner
        self.plan = plan
        self.injected: Counter[str] = Counter()
        self.holding = asyncio.Event()
        self.held = 0
        self._jobs = 0
        self._context: TierContext | None = None
        self._release = asyncio.Event()
        self._closing = False
        # The attributes of the class and the optional protocols are those of the inner tier; protocols are
        # recognised by their attributes, so those that the inner tier lacks must be absent here.
        vars(self).update({name: getattr(inner, name) for name in ATTRIBUTES})
        self._take(ABILITIES)

    def _take(self, abilities: Mapping[type, Sequence[str]]) -> None:
        able = [name for protocol, names in abilities.items() if isinstance(self.inner, protocol) for name in names]
        vars(self).update({name: getattr(self.inner, name) for name in able})

    async def open(self, context: TierContext) -> Opened:
        """Open the inner tier."""
        opened = await self.inner.open(context)
        self._context = context
        self._take(WHILE_OPEN)
        return opened

    async def store(self, job: TransferJob) -> JobResult:
        """The inner tier's store, but for the faults."""
        return await self._run(job, JobKind.STORE)

    async def load(self, job: TransferJob) -> JobResult:
        """The inner tier's load, but for the faults."""
        return await self._run(job, JobKind.LOAD)

    def release(self) -> None:
        """Let every job go on that is held."""
        self._release.set()
        self._release = asyncio.Event()

    async def close(self) -> None:
        """Close the inner tier. Jobs that are held end as LATE, and their blocks never move."""
        self._closing = True
        self.release()
        await self.inner.close()

    async def _run(self, job: TransferJob, kind: JobKind) -> JobResult:
        self._jobs += 1
        plan, number = self.plan, self._jobs
        fault = plan.of_job(number, kind)
        if fault is not None:
            self.injected[fault.kind] += 1
            if fault.kind is FaultKind.RAISE:
                raise OSError(fault.errno, "a planned fault")
            cancelled = await self._held(job if fault.kind is FaultKind.LATE else None)
            if self._closing:
                return JobResult.uniform(job, LATE)
            result = await self._move(plan, number, job, kind)
            if cancelled:
                raise asyncio.CancelledError
            return result
        return await self._move(plan, number, job, kind)

    async def _held(self, until_late: TransferJob | None) -> bool:
        """Wait for the release, or for a job to be late. Returns True if the waiting was cancelled meanwhile."""
        release, cancelled = self._release, False
        self.held += 1
        self.holding.set()
        try:
            while not release.is_set():
                try:
                    async with asyncio.timeout(self._seconds_left(until_late)):
                        await release.wait()
                except TimeoutError:
                    break
                except asyncio.CancelledError:
                    cancelled = True
        finally:
            self.held -= 1
            if not self.held:
                self.holding.clear()
        return cancelled

    def _seconds_left(self, job: TransferJob | None) -> float | None:
        if job is None or job.deadline is None or self._context is None:
            return None
        return max(0.0, job.deadline - self._context.clock()) + 0.001

    async def _move(self, plan: FaultPlan, number: int, job: TransferJob, kind: JobKind) -> JobResult:
        move = self.inner.load if kind is JobKind.LOAD else self.inner.store
        spoiled = [[plan.of_block(number, kind, key) for key in group.keys] for group in job.groups]
        injected = [fault for faults in spoiled for fault in faults if fault is not None]
        if not injected:
            return await move(job)
        self.injected.update(str(fault.kind) for fault in injected)
        good = [[i for i, fault in enumerate(faults) if fault is None] for faults in spoiled]
        groups = tuple(_select(group, positions) for group, positions in zip(job.groups, good, strict=True))
        result = await move(replace(job, groups=groups))
        outcomes = []
        for faults, ended in zip(spoiled, result.outcomes, strict=True):
            rest = iter(ended)
            outcomes.append(tuple(next(rest) if fault is None else fault.outcome() for fault in faults))
        return replace(result, outcomes=tuple(outcomes))


def _select(group: GPUGroup | RowGroup, positions: list[int]) -> GPUGroup | RowGroup:
    """The blocks of a group at some positions."""
    keys = tuple(group.keys[position] for position in positions)
    if isinstance(group, RowGroup):
        slots, generations = ([ids[i] for i in positions] if ids else ids for ids in (group.slots, group.generations))
        return RowGroup(group.group, keys, [group.rows[i] for i in positions], slots, generations)
    chosen = int_array(positions)
    rows_of = group.rows[chosen] if len(group.rows) else group.rows
    issued = group.generations[chosen] if len(group.generations) else group.generations
    return GPUGroup(group.group, keys, group.runs.select(chosen), rows_of, issued)
