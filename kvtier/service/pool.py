"""A namespace in a stack process: a stack whose GPU blocks are in the processes of its sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from errno import ECANCELED
from itertools import chain
from typing import Any, ClassVar, Literal

from kvtier.aio.shielded_wait import shielded_wait
from kvtier.errors import UsageError
from kvtier.options import TierOptions
from kvtier.service.session import Breach, Copy, JobNumbers, Session
from kvtier.service.wire import Copied, WireError
from kvtier.stack.assembly import StackParts
from kvtier.stack.guard import guard_step
from kvtier.stack.tier_stack import TierStack
from kvtier.tier.contract import LoadStore, Opened, ProvidesRows, TierContext
from kvtier.types.jobs import LOADED, JobResult, TransferJob, failed
from kvtier.types.keys import CPU, GPU, Medium


class SessionCopyOptions(TierOptions):
    """Options of copies that the processes of engines carry out."""

    type: Literal["session"] = "session"


class FillEnds:
    """The ends of fills, by row and generation; a worker may report one before the CPU tier waits for it."""

    def __init__(self, waiters: int) -> None:
        self._waiters = waiters
        self._ends: dict[tuple[int, int], tuple[asyncio.Future[int], list[int]]] = {}

    def end(self, row: int, generation: int, error: int) -> None:
        """A fill has ended; `error` is 0 or an errno."""
        future = self._entry(row, generation)[0]
        if not future.done():
            future.set_result(error)

    async def wait(self, row: int, generation: int) -> int:
        """The error of a fill, once it has ended; each of so many waiters takes it once."""
        future, left = self._entry(row, generation)
        error = await future
        left[0] -= 1
        if not left[0]:
            del self._ends[row, generation]
        return error

    def _entry(self, row: int, generation: int) -> tuple[asyncio.Future[int], list[int]]:
        entry = self._ends.get((row, generation))
        if entry is None:
            future = asyncio.get_running_loop().create_future()
            entry = self._ends[row, generation] = future, [self._waiters]
        return entry

    def cancel(self) -> None:
        """Every fill that has not ended fails."""
        for future, _ in self._ends.values():
            if not future.done():
                future.set_result(ECANCELED)


class SessionCopies(LoadStore):
    """Stands in for a worker's GPU tier: its jobs end when the workers of an engine have reported the copies."""

    medium: ClassVar[Medium] = GPU
    Options: ClassVar[type[TierOptions]] = SessionCopyOptions

    def __init__(self, ends: FillEnds) -> None:
        super().__init__(SessionCopyOptions())
        self._ends = ends

    async def open(self, context: TierContext) -> Opened:
        """Nothing is acquired."""
        return Opened(capacity_bytes=0, mode="copied by the engines' workers")

    async def load(self, job: TransferJob) -> JobResult:
        """GPU blocks to rows: what the workers reported for each row."""
        waits = [
            self._ends.wait(row, generation)
            for group in job.gpu_groups
            for row, generation in zip(group.rows.tolist(), group.generations.tolist(), strict=True)
        ]
        errors = iter(await shielded_wait(asyncio.gather(*waits)))
        outcomes = tuple(
            tuple(failed(error) if (error := next(errors)) else LOADED for _ in group.keys) for group in job.groups
        )
        return JobResult(job.job_id, outcomes)

    async def store(self, job: TransferJob) -> JobResult:
        """Loads of engines never pass here: an engine copies out of the rows that are leased to it."""
        raise UsageError("a stack process copies nothing into GPU blocks")

    async def close(self) -> None:
        """Fail what has not ended. Idempotent."""
        self._ends.cancel()


class Pool(TierStack):
    """The engines of one namespace and the stack that they share. In one event loop, with one control plane."""

    def __init__(self, parts: StackParts, send: Callable[[], None]) -> None:
        """`parts` without tensors and workers: those are the engines'. `send` is called when sessions may have items
        to send, in a step: it must not call the pool."""
        layout = parts.namespace.layout
        self._ends = FillEnds(layout.world_size if not layout.replicated else 1)
        workers = [SessionCopies(self._ends) for _ in range(layout.world_size)]
        tiers = [tier for tier in parts.tiers if tier.medium != GPU]
        super().__init__(replace(parts, tiers=_shared(tiers), workers=workers, kv_caches=None))
        self.sessions: dict[int, Session] = {}
        self._send = send
        self.on_defect: Callable[[BaseException], None] = lambda error: None
        self.numbers = JobNumbers(self._on_copy_end)
        self._last = 0

    @property
    def is_open(self) -> bool:
        """True from opening until closing begins."""
        return self._assembled is not None and not self._closing

    @property
    def num_rows(self) -> int:
        """Rows of the CPU tier."""
        return len(self._opened().plane.control.cpu.table)

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors of the rows and of the control area beside them."""
        rows: Any = next(tier for tier in self._parts.tiers if tier.medium == CPU)
        assert isinstance(rows, ProvidesRows)
        return rows.rows.descriptors  # type: ignore[attr-defined,no-any-return]

    def begin_session(self) -> Session:
        """A session for an engine that connects."""
        assembled = self._opened()
        self._last += 1
        session = Session(self._last, assembled.plane, assembled.geometry, self.numbers)
        self.sessions[session.number] = session
        return session

    @guard_step
    def handle(self, session: Session, items: Sequence[Any]) -> None:
        """Take in what an engine sent. Raises Breach, WireError: end its connection then."""
        for item in items:
            session.handle(item, self._clock())
        self._carry_out()

    @guard_step
    def on_copied(self, session: Session, worker: int, items: Sequence[Copied]) -> None:
        """Take in what a worker of an engine reported. Raises Breach."""
        for item in items:
            session.on_copied(worker, item)
        self._carry_out()

    @guard_step
    def end_session(self, session: Session, exited: bool) -> None:
        """The connections of an engine have ended; with `exited` its processes too."""
        if exited:
            session.on_exit(self._clock())
            self.sessions.pop(session.number, None)
        else:
            session.lose(self._clock())
        self._carry_out()

    def _carry_out(self, pumps: bool = True) -> None:
        super()._carry_out(pumps)
        now = self._clock()
        for session in self.sessions.values():
            session.advance(now)
        if self.sessions:
            super()._carry_out(pumps=False)
            self._send()

    def _on_result(self, result: JobResult) -> None:
        if not any(session.on_result(result) for session in self.sessions.values()):
            super()._on_result(result)

    def _fail(self, error: BaseException) -> None:
        """Wrong numbers are their engine's. All else is a defect: half a step may be wrong state."""
        if not isinstance(error, UsageError | Breach | WireError):
            self._failed = True
            self.on_defect(error)
        raise error

    def _on_copy_end(self, copy: Copy) -> None:
        for row, generation, error in zip(copy.rows, copy.generations, copy.errors, strict=True):
            self._ends.end(row, generation, error)


def _shared(tiers: Sequence[LoadStore]) -> list[LoadStore]:
    """The tiers, with a CPU tier whose rows other processes can map."""
    cpu = next(tier for tier in tiers if tier.medium == CPU)
    shared = type(cpu)(cpu.options.model_copy(update={"shared": "memfd"}))
    return list(chain((shared,), (tier for tier in tiers if tier is not cpu)))
