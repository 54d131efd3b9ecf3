"""Jobs of any size for an engine at a stack process: stores take rows as they are lent, loads reserve a window of rows.

No I/O and no clock. A job whose rows are all there, as is usual, is one copy of `EngineCore`; a worker carries it out,
and the job ends with the worker's report. Others are copied in parts, as rows come, and end with the last of them. What
has not begun by the job's deadline ends there: a store is dropped for lack of a row, a load is late.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np

from kvtier.client.copies import RowCopy, by_groups, keys_of
from kvtier.client.core import EngineCore
from kvtier.client.request import ClientRequest
from kvtier.errors import IntegrityError, UsageError
from kvtier.service.wire import ITEM_KEYS_MAX, LATE
from kvtier.types import jobs
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry
from kvtier.types.gpu_runs import RunIndex
from kvtier.types.jobs import BlockOutcome, BlockStatus, DropReason, GPUGroup, JobKind, JobResult, TransferJob, dropped
from kvtier.types.keys import JobId, OffloadKey

WINDOW_MAX = 8 * ITEM_KEYS_MAX
"""Blocks of a window at most."""
MOVED = (BlockStatus.STORED, BlockStatus.LOADED)
RETRY_SECONDS = 0.02
"""The time after which a load that got no row tries once more."""
WINDOW_NAME = "\0window"
"""Requests of windows have this name and a number: no request of an engine begins with it."""


@dataclass(slots=True, eq=False)
class RowWindow:
    """Blocks of a load, by their positions in it, that rows are reserved for."""

    transfer: RunningJob
    positions: list[int]
    request: ClientRequest


@dataclass(slots=True, eq=False)
class CopiedPart:
    """Blocks of a job, by their positions in it, that a worker copies."""

    transfer: RunningJob
    positions: list[int]


@dataclass(slots=True, frozen=True, eq=False)
class WholeCopy:
    """A job that is one copy, since when, and the rows of those for loads that it holds."""

    begun: float
    rows: int


@dataclass(slots=True, eq=False)
class RunningJob:
    """A job that is copied in parts. `todo` are the positions of blocks without a row.

    `open` counts those without an outcome. `retry_at`: no window is reserved before, because the last one got no row.
    """

    job: TransferJob
    begun: float
    keys: list[OffloadKey] = field(init=False)
    outcomes: list[BlockOutcome | None] = field(init=False)
    todo: deque[int] = field(init=False)
    open: int = field(init=False)
    bytes_moved: int = 0
    retry_at: float = -math.inf
    _starts: list[int] = field(init=False)
    _indexes: dict[int, RunIndex] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        groups = self.job.gpu_groups
        self.keys = list(keys_of(self.job))
        self.outcomes = [None] * len(self.keys)
        self.todo = deque(range(len(self.keys)))
        self.open = len(self.keys)
        sizes = [len(group.keys) for group in groups]
        self._starts = [0, *accumulate(sizes[:-1])]

    @property
    def deadline(self) -> float:
        """The time at which what has not begun ends."""
        return math.inf if self.job.deadline is None else self.job.deadline

    @property
    def loads(self) -> bool:
        """True for a load."""
        return self.job.kind is JobKind.LOAD

    def complete(self, positions: Iterable[int], outcome: BlockOutcome) -> None:
        """These blocks have ended."""
        outcomes = self.outcomes
        for position in positions:
            if outcomes[position] is None:
                outcomes[position] = outcome
                self.open -= 1

    def stop(self, outcome: BlockOutcome) -> None:
        """End what has no row."""
        self.complete(self.todo, outcome)
        self.todo.clear()

    def drop_partial(self, factor: int) -> None:
        """A store keeps whole blocks alone."""
        for start, group in zip(self._starts, self.job.gpu_groups, strict=True):
            if not group.runs.all_whole(len(group.keys), factor):
                partial = np.flatnonzero(~group.runs.covers_whole(len(group.keys), factor)) + start
                self.complete(partial.tolist(), jobs.PARTIAL)
        if self.open < len(self.todo):
            self.todo = deque([position for position in self.todo if self.outcomes[position] is None])

    def groups_of(self, positions: Sequence[int]) -> tuple[list[GPUGroup], list[int]]:
        """(the groups of these blocks alone, their positions in the order of the groups)."""
        if len(positions) == len(self.keys):
            return list(self.job.gpu_groups), list(positions)
        groups, order = [], list[int]()
        for at, (start, group) in enumerate(zip(self._starts, self.job.gpu_groups, strict=True)):
            mine = [position - start for position in positions if 0 <= position - start < len(group.keys)]
            if len(mine) == len(group.keys):
                groups.append(group)
            elif mine:
                if at not in self._indexes:
                    self._indexes[at] = RunIndex(group.runs)
                runs = self._indexes[at].select(int_array(mine))
                groups.append(GPUGroup(group.group, tuple([group.keys[i] for i in mine]), runs))
            order += [start + position for position in mine]
        return groups, order

    def result(self, now: float) -> JobResult:
        """The result, once every block has an outcome."""
        outcomes = by_groups(self.job, [outcome or jobs.MISSING for outcome in self.outcomes])
        return JobResult(self.job.job_id, outcomes, self.bytes_moved, now - self.begun)


class Transfers:
    """The jobs of one engine. `begin_copy` has its worker copy a part. `results` are those of the jobs that have ended.

    Windows of all loads hold at most half of the `num_rows` rows, each at most a quarter.
    """

    def __init__(
        self, core: EngineCore, begin_copy: Callable[[TransferJob], None], geometry: Geometry, num_rows: int
    ) -> None:
        self.results: list[JobResult] = []
        self._core = core
        self._begin_copy = begin_copy
        self._factor = geometry.factor
        self._block_bytes = list(map(geometry.kv_bytes_per_offloaded_block, range(geometry.num_groups)))
        self._rows = self._rows_left = max(2, num_rows // 2)
        self._window_most = max(1, min(WINDOW_MAX, num_rows // 4))
        self._whole: dict[JobId, WholeCopy] = {}
        self._open: dict[JobId, RunningJob] = {}
        self._windows: list[RowWindow] = []
        self._parts: dict[int, CopiedPart] = {}
        self._last_window = 0

    @property
    def in_flight(self) -> int:
        """Jobs that have not ended."""
        return len(self._open) + len(self._whole)

    @property
    def copies(self) -> int:
        """Copies in flight."""
        return len(self._parts) + len(self._whole)

    def stores_soon(self, num_requests: int) -> bool:
        """True while a store has not ended, or one of so many requests is none of a load's window."""
        if num_requests > len(self._windows):
            return True
        stores = any(not whole.rows for whole in self._whole.values())
        return stores or any(not each.loads for each in self._open.values())

    def submit(self, job: TransferJob, request: ClientRequest | None, now: float) -> None:
        """Begin a job. A load ends the leases of its request; blocks that are leased to it need no window.

        Raises UsageError if a job of this id has not ended.
        """
        if job.job_id in self._whole or job.job_id in self._open:
            raise UsageError(f"job {job.job_id} is in flight already")
        keys, loads = keys_of(job), job.kind is JobKind.LOAD
        if self._has_rows(job, keys, request):
            self._whole[job.job_id] = WholeCopy(now, len(keys) if loads else 0)
            self._copy(job, request)
            return
        transfer = self._open[job.job_id] = RunningJob(job, now)
        if not loads:
            transfer.drop_partial(self._factor)
        elif request is not None:
            self._core.release(request)
        self.advance(now)

    def _has_rows(self, job: TransferJob, keys: Sequence[OffloadKey], request: ClientRequest | None) -> bool:
        """True if there is a row for each block, and each is worth one."""
        if job.kind is JobKind.STORE:
            if not 0 < len(keys) <= self._core.room:
                return False
            whole = [group.runs.all_whole(len(group.keys), self._factor) for group in job.gpu_groups]
            return False not in whole
        if request is None or not 0 < len(keys) <= WINDOW_MAX:
            return False
        return all(map(request.leased.__contains__, keys))

    def _copy(self, job: TransferJob, request: ClientRequest | None, part: CopiedPart | None = None) -> None:
        """Copy the blocks of a job, or a part of one: out of the rows leased to a request, or into rows that are lent.

        It is known whose copy it is before it begins: a signal's handler may raise at each line.
        """
        core = self._core
        if job.kind is JobKind.STORE:
            copy = core.begin_store(job)
        else:
            assert request is not None
            self._rows_left -= job.num_blocks
            copy = core.begin_load(job, request)
        assert copy is not None  # each block has a row
        if part is not None:
            self._parts[copy.job_id] = part
        self._begin_copy(copy)

    def cancel(self, job_id: JobId) -> None:
        """End a job early. Its result still comes, after the copies in flight."""
        transfer = self._open.get(job_id)
        if transfer is not None:
            self._stop(transfer, jobs.CANCELLED)

    def stop_all(self, reason: DropReason) -> None:
        """Begin no more copies: stores are dropped for this reason, loads cancelled."""
        for transfer in self._open.values():
            self._stop(transfer, jobs.CANCELLED if transfer.loads else dropped(reason))

    def _stop(self, transfer: RunningJob, outcome: BlockOutcome) -> None:
        transfer.stop(outcome)
        for window in [each for each in self._windows if each.transfer is transfer]:
            transfer.complete(window.positions, outcome)
            self._end_window(window)

    @property
    def next_deadline(self) -> float:
        """The time at which `advance` has work by time alone."""
        if not self._open:
            return math.inf
        waiting = [each for each in self._open.values() if each.todo]
        windows = (window.transfer.deadline for window in self._windows)
        retries = (each.retry_at for each in waiting if each.retry_at > -math.inf and self._rows_left > 0)
        return min(chain((each.deadline for each in waiting), windows, retries), default=math.inf)

    def advance(self, now: float) -> None:
        """Take in the parts that ended, begin others, and keep the results of the jobs that have ended."""
        core = self._core
        if core.ended:
            ended, core.ended = core.ended, []
            for copy in ended:
                self._on_end(copy, now)
        if self._open:
            self._advance_parts(now)

    def _advance_parts(self, now: float) -> None:
        for window in [each for each in self._windows if each.request.served]:
            self._on_window(window, now)
        for transfer in list(self._open.values()):
            if now >= transfer.deadline:
                self._stop(transfer, jobs.LATE if transfer.loads else dropped(DropReason.NO_ROW))
            elif transfer.todo:
                (self._advance_load if transfer.loads else self._advance_store)(transfer, now)
            if not transfer.open:
                del self._open[transfer.job.job_id]
                self.results.append(transfer.result(now))

    def _on_end(self, copy: RowCopy, now: float) -> None:
        """A copy has ended: the whole job, or a part of one."""
        part, count = self._parts.pop(copy.number, None), len(copy.keys)
        if copy.job.kind is JobKind.LOAD:
            self._rows_left += count
        if part is not None:
            first = 0
            for size, outcome in copy.runs:
                part.transfer.complete(part.positions[first : first + size], outcome)
                first += size
            part.transfer.bytes_moved += self._bytes_moved(copy)
            return
        job_id = copy.job.job_id
        begun = self._whole.pop(job_id).begun
        self.results.append(JobResult(job_id, copy.outcomes(), self._bytes_moved(copy), now - begun))

    def _bytes_moved(self, copy: RowCopy) -> int:
        """The bytes of the blocks that were copied, of a copy of all blocks of its job."""
        if len(self._block_bytes) == 1:
            return self._block_bytes[0] * sum([count for count, outcome in copy.runs if outcome.status in MOVED])
        return sum(
            self._block_bytes[group.group] * sum(outcome.status in MOVED for outcome in outcomes)
            for group, outcomes in zip(copy.job.groups, copy.outcomes(), strict=True)
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless what is open, in windows and in copies agrees."""
        windows: list[RowWindow | CopiedPart] = [*self._windows, *self._parts.values()]
        for transfer in self._open.values():
            away = [at for each in windows if each.transfer is transfer for at in each.positions]
            places = sorted([*transfer.todo, *away])
            if places != [at for at, outcome in enumerate(transfer.outcomes) if outcome is None]:
                raise IntegrityError(f"job {transfer.job.job_id} has blocks that are nowhere, or twice")
        held = sum(len(each.positions) for each in windows if each.transfer.loads)
        held += sum(whole.rows for whole in self._whole.values())
        if self._rows_left + held != self._rows:
            raise IntegrityError(f"loads hold {held} rows, and {self._rows_left} of {self._rows} are left")

    # -- stores --------------------------------------------------------------------------------------------------

    def _advance_store(self, transfer: RunningJob, now: float) -> None:
        """Copy into the rows that are lent: the ends of prefixes first, so that no parent ages before its child."""
        core = self._core
        if not core.connected or not core.joined:
            transfer.stop(dropped(DropReason.TIER_DOWN))
            return
        count = min(core.room, len(transfer.todo))
        if count < len(transfer.todo):
            core.need_rows(min(len(transfer.todo), self._rows))
        if count:
            positions = sorted([transfer.todo.pop() for _ in range(count)])
            self._begin(transfer, positions)

    def _begin(self, transfer: RunningJob, positions: list[int], request: ClientRequest | None = None) -> None:
        """Copy some blocks of a job."""
        groups, order = transfer.groups_of(positions)
        job = TransferJob(transfer.job.job_id, transfer.job.kind, tuple(groups))
        self._copy(job, request, CopiedPart(transfer, order))

    # -- loads ---------------------------------------------------------------------------------------------------

    def _advance_load(self, transfer: RunningJob, now: float) -> None:
        """Reserve rows for the next blocks, as far as windows may hold some."""
        if not self._core.serves:
            transfer.stop(jobs.MISSING)
            return
        while transfer.todo and self._rows_left > 0 and now >= transfer.retry_at:
            count = min(len(transfer.todo), self._window_most, self._rows_left)
            positions = [transfer.todo.popleft() for _ in range(count)]
            self._last_window += 1
            request = self._core.request(f"{WINDOW_NAME} {self._last_window}")
            self._core.reserve(request, [transfer.keys[position] for position in positions])
            self._windows.append(RowWindow(transfer, positions, request))
            self._rows_left -= count

    def _on_window(self, window: RowWindow, now: float) -> None:
        """Copy what has rows. What is in a tier and got no row in time is tried once more, until the job's deadline."""
        transfer, request = window.transfer, window.request
        there = [at for at in window.positions if transfer.keys[at] in request.leased]
        absent = [at for at in window.positions if transfer.keys[at] not in request.leased]
        late = [at for at in absent if request.states.get(transfer.keys[at]) == LATE]
        transfer.todo.extendleft(reversed(late))
        transfer.complete(set(absent).difference(late), jobs.MISSING)
        transfer.retry_at = -math.inf if there or not late else now + RETRY_SECONDS
        if there:
            self._begin(transfer, there, request)
        self._end_window(window)

    def _end_window(self, window: RowWindow) -> None:
        self._windows.remove(window)
        self._rows_left += len(window.positions)
        self._core.end(window.request)
