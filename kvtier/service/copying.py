"""Rows lent ahead to one engine, and the copies of its workers: each ends when every worker has reported it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from errno import ECONNRESET, ESTALE
from functools import partial
from itertools import groupby

from kvtier.control.flow.lent_fills import LentFill
from kvtier.control.flow.loads import LeasedLoad
from kvtier.control.jobs import CPU_TIER
from kvtier.service import wire
from kvtier.service.leasing import Leases
from kvtier.service.quotas import PoolState
from kvtier.service.wire import Breach, Item
from kvtier.stack.watching.stats import EngineStats
from kvtier.types.jobs import CANCELLED, STORED, BlockOutcome, DropReason, JobKind, dropped, failed
from kvtier.types.keys import OffloadKey, group_runs

RUNS_KEPT_MAX = 1 << 16
"""Runs of outcomes in reports of workers that are kept: until the rest comes, or the engine's own word of their job."""
LENT_PARTS = 8
"""An engine is lent rows ahead once one of so many parts of them is missing, and not one row after another."""
ENGINE = -1
"""In the place of a worker: the engine's own word, for a fill that waits."""
HELD_BACK = dropped(DropReason.HELD_BACK)


@dataclass(slots=True)
class JobPart:
    """Rows of a job of which more are to come; with keys if they are to be filled."""

    job: int
    fills: bool
    rows: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    keys: list[OffloadKey] = field(default_factory=list)
    waits: bool = False


@dataclass(slots=True, eq=False)
class Copy:
    """A copy that workers of an engine carry out. `left`: those that have not reported. `errors`: of each block.

    `size` are the bytes of its rows.

    `load` is that of the control plane, for rows that hold what was stored; None for a fill, and after a reset.
    `fill` is that of the control plane; without one a fill is of no use: its rows are free when it has ended.
    """

    job: int
    rows: list[int]
    generations: list[int]
    left: set[int]
    errors: list[int]
    fills: bool
    size: int
    fill: LentFill | None = None
    load: LeasedLoad | None = None

    def report(self, worker: int, errors: list[int]) -> bool:
        """A worker's part has ended. True if that was the last."""
        if any(self.errors):
            errors = [mine or theirs for mine, theirs in zip(self.errors, errors, strict=True)]
        self.errors = errors
        self.left.discard(worker)
        return not self.left


class Copying:
    """The copies of one engine. `out` takes its answers; `end_fill` is called when a fill has been reported by all;
    `counts` are added to.

    `needed`: rows that the engine needs now, beside those that are lent ahead.
    """

    def __init__(
        self, pool: PoolState, out: list[Item], end_fill: Callable[[Copy, float], None], counts: EngineStats
    ) -> None:
        self.lent: dict[int, int] = {}
        self.needed = 0
        self.rows = 0
        self._pool = pool
        self._plane = pool.plane
        self._out = out
        self._end_fill = end_fill
        self._counts = counts
        self._workers = pool.geometry.world_size
        self._fillers = pool.geometry.num_copies
        self._lent_now: list[int] = []
        self._recalled = False
        self._copies: dict[int, Copy] = {}
        self._early: dict[int, dict[int, list[tuple[int, int]]]] = {}
        self._last_job = 0
        self._part: JobPart | None = None
        self._reports: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._runs_kept = 0
        self._fills: set[int] = set()
        traffic = pool.stack.dispatcher.queues[CPU_TIER].traffic
        self._traffic = {True: traffic[JobKind.STORE], False: traffic[JobKind.LOAD]}

    @property
    def held(self) -> int:
        """Rows that are lent or in copies."""
        return len(self.lent) + self.rows

    @property
    def in_flight(self) -> int:
        """Copies that have not ended."""
        return len(self._copies)

    @property
    def is_busy(self) -> bool:
        """True if a copy has not ended, or what it has filled is not stored yet."""
        return bool(self._copies or self._fills)

    def has_work(self, wanted: int) -> bool:
        """True if the engine may be lent rows, has yet to be sent some, or has some beyond its bound."""
        beyond = len(self.lent) > self._pool.quotas.lent_most
        return beyond or bool(self._lent_now) or self.rows_lacking(wanted) > 0

    # -- rows lent ahead -----------------------------------------------------------------------------------------

    def rows_lacking(self, wanted: int) -> int:
        """Rows that the engine needs now, or all that lack of those it wants ahead, once a part of them does."""
        lent, quotas = len(self.lent), self._pool.quotas
        ahead = min(wanted, quotas.lent_most)
        lacking = ahead - lent
        if lacking < max(1, ahead // LENT_PARTS):
            lacking = 0
        return max(min(lacking, quotas.lent_most_of_all - quotas.lent), self.needed - lent)

    def on_lent(self, rows: Sequence[int], generations: Sequence[int]) -> None:
        """These rows are lent to the engine."""
        self.lent.update(zip(rows, generations, strict=True))
        self._pool.quotas.lent += len(rows)
        self._lent_now += rows

    def take_lent_now(self) -> list[wire.Lent]:
        """The rows that the engine has yet to be sent."""
        if not self._lent_now:
            return []
        rows = [row for row in self._lent_now if row in self.lent]
        self._lent_now.clear()
        parts = [rows[first : first + wire.ITEM_KEYS_MAX] for first in range(0, len(rows), wire.ITEM_KEYS_MAX)]
        return [wire.Lent(wire.Places.of(some, [self.lent[row] for row in some])) for some in parts]

    def take_back(self, places: wire.Places) -> None:
        """The engine returns rows. Raises Breach."""
        rows, generations = (each.tolist() for each in places.unpack())
        self._take_lent(rows, generations)
        self._plane.return_lent(rows)

    def take_excess(self, wanted: int) -> int:
        """The rows lent that are to come back: so many, and those beyond a bound that has become less; once until some
        have come."""
        most = max(self._pool.quotas.lent_most, min(self.needed, self._pool.quotas.pinned_most))
        excess = max(len(self.lent) - most, min(wanted, len(self.lent)))
        if excess <= 0 or self._recalled:
            return 0
        self._recalled = True
        return excess

    def _take_lent(self, rows: list[int], generations: list[int]) -> None:
        """These rows are lent no more. Raises Breach, with nothing changed, unless they were."""
        if len(set(rows)) < len(rows) or list(map(self.lent.get, rows)) != generations:
            raise Breach("an engine names rows that were not lent to it")
        for row in rows:
            del self.lent[row]
        self._pool.quotas.lent -= len(rows)
        self._recalled = False

    # -- copies --------------------------------------------------------------------------------------------------

    def fill(self, item: wire.Fill, keys: list[OffloadKey], stores: bool, now: float) -> None:
        """A copy into lent rows begins. The blocks are dropped unless this `stores` them. Raises Breach."""
        part = self._whole(item, keys)
        if part is None:
            return
        if len(part.keys) != len(part.rows):
            raise Breach("a fill has as many keys as rows")
        self._take_lent(part.rows, part.generations)
        copy = self._begin(part, now)
        if stores:
            self._fills.add(part.job)
            copy.fill = self._plane.begin_fill(part.keys, part.rows, partial(self._on_fill_end, part.job), now)
        else:
            self._plane.control.cpu.end_loan(part.rows)
        if self._early:
            self._take_early(copy, now)

    def _whole(self, item: wire.Fill | wire.Load, keys: Sequence[OffloadKey] = ()) -> JobPart | None:
        """The job with the rows of this item, unless more are to come. Raises Breach."""
        fills = isinstance(item, wire.Fill)
        part = self._part or JobPart(item.job, fills)
        rows, generations = item.places.unpack()
        if (part.job, part.fills) != (item.job, fills) or item.job <= self._last_job:
            raise Breach(f"job {item.job} came after job {max(part.job, self._last_job)}")
        if not len(rows) or len(part.rows) + len(rows) > wire.JOB_BLOCKS_MAX:
            raise Breach(f"job {item.job} has no row, or too many")
        part.rows += rows.tolist()
        part.generations += generations.tolist()
        part.keys += keys
        part.waits = isinstance(item, wire.Fill) and item.waits
        self._part = part if item.more else None
        return None if item.more else part

    def load(self, item: wire.Load, leases: Leases | None, now: float) -> bool:
        """A copy out of leased rows, which it pins, begins. False if more of it is to come. Raises Breach."""
        part = self._whole(item)
        if part is None:
            return False
        plane, rows = self._plane, part.rows
        generation = plane.control.cpu.table.generation
        named = {row: key for key, row in leases.rows.items()} if leases is not None else {}
        void = set(leases.void) if leases is not None else set()
        if leases is None or not (named.keys() | void).issuperset(rows):
            raise Breach("a load names rows that are not leased to its request")
        if [int(generation[row]) for row in rows] != part.generations:
            raise Breach("a load names another fill than its rows have")
        copy = self._begin(part, now)
        if void.isdisjoint(rows):
            keys = [named[row] for row in rows]
            brought = {key: leases.brought[key] for key in keys if key in leases.brought}
            copy.load = plane.begin_leased_load(keys, rows, brought, now)
        else:
            plane.control.cpu.pin(rows)
        if self._early:
            self._take_early(copy, now)
        return True

    def _begin(self, part: JobPart, now: float) -> Copy:
        self._last_job = part.job
        left = {ENGINE} if part.waits else set()
        left.update(range(self._fillers if part.fills else self._workers))
        errors = [0] * len(part.rows)
        size = len(part.rows) * self._pool.geometry.row_bytes
        copy = self._copies[part.job] = Copy(part.job, part.rows, part.generations, left, errors, part.fills, size)
        self.rows += len(part.rows)
        self._traffic[part.fills].begin(copy, size, now)
        return copy

    # -- reports -------------------------------------------------------------------------------------------------

    def on_copied(self, worker: int, item: wire.Copied, now: float) -> None:
        """A worker's part has ended. Raises Breach for a copy that is not its, or other outcomes than it has blocks."""
        copy = self._copies.get(item.job)
        before = self._reports.pop((item.job, worker), [])
        self._runs_kept -= len(before) + 1 if before else 0
        runs = before + item.outcomes
        left = len(copy.rows) if copy is not None else wire.JOB_BLOCKS_MAX
        for count, _ in runs:
            left -= count
            if count < 1 or left < 0:
                raise Breach(f"worker {worker} reports other blocks than job {item.job} has")
        if item.more:
            self._reports[item.job, worker] = self._kept(worker, runs)
        elif copy is None:
            self._keep_early(worker, item.job, runs)
        else:
            self._report(copy, worker, runs, now)

    def on_filled(self, item: wire.Filled, now: float) -> None:
        """The engine's own word of a fill that waits. Raises Breach for another copy."""
        copy = self._copies.get(item.job)
        if copy is None or not copy.fills:
            raise Breach(f"an engine says that job {item.job} is filled, which is not in flight")
        self._report(copy, ENGINE, [(len(copy.rows), item.errno)], now)

    def _kept(self, worker: int, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        self._runs_kept += len(runs) + 1
        if self._runs_kept > RUNS_KEPT_MAX:
            raise Breach(f"worker {worker} reports too much that is not in flight")
        return runs

    def _keep_early(self, worker: int, job: int, runs: list[tuple[int, int]]) -> None:
        """The report has come before the engine's own word of the job, which takes it in."""
        reports = self._early.get(job, {})
        if job <= self._last_job and worker >= self._fillers:
            return  # of a fill that has ended: a worker without a slice of its own fills nothing
        if job <= self._last_job or worker in reports:
            raise Breach(f"worker {worker} reports job {job}, which is not in flight")
        self._early[job] = reports | {worker: self._kept(worker, runs)}

    def _take_early(self, copy: Copy, now: float) -> None:
        for worker, runs in self._early.pop(copy.job, {}).items():
            self._runs_kept -= len(runs) + 1
            self._report(copy, worker, runs, now)

    def _report(self, copy: Copy, worker: int, runs: Sequence[tuple[int, int]], now: float) -> None:
        if copy.fills and worker >= self._fillers:
            return
        errors: list[int] = []
        for count, error in runs:
            errors += [error] * count
        if worker not in copy.left or len(errors) != len(copy.rows):
            raise Breach(f"worker {worker} reports {len(errors)} blocks of job {copy.job}, which is not its")
        if not copy.report(worker, errors):
            return
        del self._copies[copy.job]
        self.rows -= len(copy.rows)
        self._traffic[copy.fills].end(copy, copy.size, now)
        if not copy.fills:
            self._end_load(copy)
        elif copy.fill is not None:
            self._end_fill(copy, now)
        else:
            self._plane.control.cpu.unpin(copy.rows)
            self._end_job(copy.job, [HELD_BACK] * len(copy.rows))

    def _end_load(self, copy: Copy) -> None:
        plane, geometry = self._plane, self._pool.geometry
        if copy.load is None:
            plane.control.cpu.unpin(copy.rows)
            self._end_job(copy.job, [failed(error) if error else CANCELLED for error in copy.errors])
            return
        good = [key for key, error in zip(copy.load.keys, copy.errors, strict=True) if not error]
        moved = sum([count * geometry.kv_bytes_per_offloaded_block(group) for group, count in group_runs(good)])
        outcomes = plane.end_leased_load(copy.load, copy.errors, moved)
        for position, count in copy.load.hits.items():
            name = plane.control.cpu.name if position == CPU_TIER else plane.control.lowers[position - 1].name
            self._counts.loaded[name] = self._counts.loaded.get(name, 0) + count
        self._end_job(copy.job, outcomes)

    def _on_fill_end(self, job: int, outcomes: Sequence[BlockOutcome]) -> None:
        """Every block of a fill has an outcome."""
        self._counts.stored += outcomes.count(STORED)
        self._fills.discard(job)
        self._end_job(job, outcomes)

    def _end_job(self, job: int, outcomes: Sequence[BlockOutcome]) -> None:
        runs = []
        for outcome, run in groupby(outcomes):
            reason = outcome.reason.value if outcome.reason else ""
            runs.append((len(list(run)), outcome.status.value, reason, outcome.errno))
        for first in range(0, len(runs), wire.ITEM_KEYS_MAX):
            some = runs[first : first + wire.ITEM_KEYS_MAX]
            self._out.append(wire.Ended(job, some, more=first + len(some) < len(runs)))

    def spoil_fills(self) -> None:
        """Store nothing that workers have yet to report: it may be of other weights, or of GPU blocks used again."""
        for copy in self._copies.values():
            if copy.fills:
                copy.errors = [error or ESTALE for error in copy.errors]

    def end_all(self, now: float) -> None:
        """No process of the engine copies any more: rows that are lent come back, copies in flight have failed."""
        rows = list(self.lent)
        self._plane.return_lent(rows)
        self._pool.quotas.lent -= len(rows)
        self.lent.clear()
        self._early.clear()
        self._reports.clear()
        for copy in list(self._copies.values()):
            for worker in sorted(copy.left):
                self._report(copy, worker, [(len(copy.rows), ECONNRESET)], now)
