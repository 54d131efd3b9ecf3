"""Loads of an engine: every block from the highest tier that has it, streamed through a bounded window of rows.

A `LoadRequest` is copied here, a `LeasedLoad` by the engine itself, out of rows that were leased to it before. A load
never holds a row while it waits for another: a row is held from its promotion to the end of its copy, and
both always end. So any number of loads longer than the CPU tier get through any CPU tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from kvtier.control.flow.demotions import Demotions
from kvtier.control.flow.engine_job import EngineJob
from kvtier.control.flow.promotions import Promotions
from kvtier.control.flow.row_request import RowRequest
from kvtier.control.jobs import CPU_TIER, JobOwner
from kvtier.control.tiers.slot_table import READY
from kvtier.types.jobs import (
    CANCELLED,
    CORRUPT,
    LOADED,
    MISSING,
    BlockOutcome,
    BlockStatus,
    GPUGroup,
    JobKind,
    JobResult,
    TransferJob,
    failed,
)
from kvtier.types.keys import OffloadKey, group_runs


class LoadRequest(EngineJob, RowRequest):
    """A load: the blocks that are being promoted and copied, and the tiers that failed for each.

    `brought` has the position of the lower tier that brought a block up for this request, be it before the load, for
    its reservation. All others were in rows.
    """

    def __init__(self, promotions: Promotions, job: TransferJob, now: float, age: int) -> None:
        EngineJob.__init__(self, promotions.control, job, now, age)
        RowRequest.__init__(self, promotions, age)
        self.resets = self.control.resets
        self.filling = 0
        self.arrived: list[tuple[int, int]] = []
        self.brought: dict[OffloadKey, int] = {}

    @property
    def moving(self) -> int:
        """Rows this load keeps in motion."""
        return self.filling + len(self.in_copy) + len(self.arrived)

    @property
    def full(self) -> bool:
        """True if it keeps as many rows in motion as it may: it goes on when one of its transfers has ended."""
        return self.moving >= max(1, self.control.num_rows // 2)

    @property
    def next_key(self) -> OffloadKey:
        """The first block of which no transfer is under way. There is one."""
        return self.keys[self.todo[0]]

    @property
    def loaded_keys(self) -> list[OffloadKey]:
        """The keys that were loaded so far."""
        if self.outcomes.count(LOADED) == len(self.keys):
            return self.keys
        return [key for key, outcome in zip(self.keys, self.outcomes, strict=True) if outcome is LOADED]

    def on_fills(self, fills: Sequence[tuple[int, int]], success: bool, position: int, now: float) -> None:
        """Rows this load waits for ended their fills."""
        self.filling -= len(fills)
        own = [each for each in fills if self.outcomes[each[0]] is None]
        if not own:
            return
        self.control.filled_ages.append(self.age)
        indices = [index for index, _ in own]
        if position != CPU_TIER:
            self._on_load_failure(indices, position)
        if not success:
            self.todo.extendleft(indices)
            return
        if position != CPU_TIER:
            self.brought |= {self.keys[index]: position for index in indices}
        self.control.cpu.pin([row for _, row in own])
        self.arrived += own

    def on_copy(self, indices: Sequence[int]) -> None:
        """These blocks are loaded. Each is a hit of the highest tier that had it when the request asked for it."""
        cpu, lowers = self.control.cpu_counters, self.control.lowers
        cpu.loaded += len(indices)
        if not self.brought:
            cpu.hits += len(indices)
            return
        for index in indices:
            position = self.brought.get(self.keys[index])
            counters = cpu if position is None else lowers[position - 1].counters
            counters.hits += 1

    def stop(self, outcome: BlockOutcome) -> None:
        """No new transfers. Blocks whose copy is not in flight end now; copies end first, their buffers are in use."""
        self.stopping = outcome
        self.todo.clear()
        self.control.filled_ages.append(self.age)
        self.control.cpu.unpin([row for _, row in self.arrived])
        self.arrived.clear()
        for index in self.all:
            if index not in self.in_copy:
                self.complete(index, outcome)

    def take_rows(self, now: float) -> bool:
        """Copy the blocks that are in rows already; True if that is all of them.

        No other request loses a row by it, so it needs no admission.
        """
        if self._copy_all(now):
            return True
        self.promote(0, None, now)
        self.copy_promoted(now)
        return False

    def advance(self, now: float) -> int:
        control, promotions = self.control, self.promotions
        window = max(1, control.num_rows // 2)
        quota = promotions.quota(now)
        while self.todo and self.promote(min(control.cpu.available, window - self.moving), quota, now):
            pass
        self.copy_promoted(now)
        if control.cpu.available or not quota:
            return 0
        return max(0, min(len(self.todo), window - self.moving))

    def _hold(self, ready: dict[int, int]) -> None:
        cpu, rows = self.control.cpu, list(ready.values())
        cpu.pin(rows)
        self.arrived += ready.items()
        if not self.walked:
            # Here and now these are the most recent: a load must not throw out its own hits to fetch the rest.
            cpu.touch(rows[::-1])

    def _wait(self, indices: Sequence[int]) -> None:
        self.filling += len(indices)

    def _miss(self, index: int) -> None:
        self.complete(index, MISSING)

    def _copy_all(self, now: float) -> bool:
        """The usual case in a few batch calls: every block is in a row. False when there is more to look at.

        Their use is recorded when they have been copied, not now: until then they are pinned.
        """
        control = self.control
        rows = list(map(control.cpu.directory.get, self.keys))
        state = control.cpu.table.state
        if None in rows:
            return False
        found: list[int] = rows  # type: ignore[assignment]  # looked at just now
        for row in found:
            if state[row] != READY:
                return False
        control.cpu.pin(found)
        self.todo.clear()
        self.walked = True
        self._copy(self.all, found, now)
        return True

    def copy_promoted(self, now: float) -> None:
        """Copy the blocks in pinned rows to the GPU."""
        if self.arrived:
            arrived, self.arrived = self.arrived, []
            self._copy([index for index, _ in arrived], [row for _, row in arrived], now)

    def _copy(self, indices: Sequence[int], rows: list[int], now: float) -> None:
        if not self.promotions.demotions.admits_all:
            self.promotions.demotions.on_use(rows[::-1], now)
        self.in_copy.update(indices)
        groups = self.transfers(indices, rows)
        self.control.emit(CPU_TIER, JobKind.LOAD, groups, None, CopyJob(self, indices, rows, groups))


class CopyJob(JobOwner):
    """Rows to GPU blocks for one load. It has no deadline: GPU blocks belong to it until the copy has ended."""

    def __init__(
        self, request: LoadRequest, indices: Sequence[int], rows: list[int], groups: tuple[GPUGroup, ...]
    ) -> None:
        self.request = request
        self.indices = indices
        self.rows = rows
        self.groups = groups

    def finish(self, result: JobResult, now: float) -> None:
        request, control = self.request, self.request.control
        outcomes = list(chain.from_iterable(result.outcomes))
        request.in_copy.difference_update(self.indices)
        request.bytes_moved += result.bytes_moved
        control.cpu_counters.load_bytes += result.bytes_moved
        if outcomes.count(LOADED) == len(self.indices) == len(outcomes) and request.resets == control.resets:
            self._finish_whole()
            return
        refused: list[tuple[int, int]] = []
        issued = [generation for group in self.groups for generation in group.generations.tolist()]
        for m, generation, outcome in zip(request.order_of(self.indices), issued, outcomes, strict=True):
            index = self.indices[m]
            control.cpu_counters.count(outcome)
            if outcome.ok and request.resets != control.resets:
                request.complete(index, CANCELLED)
            elif outcome.ok:
                request.on_copy((index,))
                request.complete(index, LOADED)
            elif outcome.status is BlockStatus.CORRUPT:
                refused.append((m, generation))
            else:
                request.complete(index, outcome)
        control.cpu.unpin(self.rows)
        for m, generation in sorted(refused, reverse=True):
            request.promotions.demotions.dirty.clean((self.rows[m],))
            control.cpu.discard(self.rows[m], generation)
            if request.stopping is None:
                request.todo.appendleft(self.indices[m])
            else:
                request.complete(self.indices[m], CORRUPT)

    def _finish_whole(self) -> None:
        """The usual case in a few batch calls: every block was copied."""
        self.request.on_copy(self.indices)
        self.request.complete_all(self.indices, LOADED)
        self.request.control.cpu.unpin(self.rows)


class LeasedLoad:
    """A copy out of rows, which it pins until its end. `hits`: the blocks it has loaded, by the position of the tier
    that brought them up."""

    def __init__(
        self,
        demotions: Demotions,
        keys: Sequence[OffloadKey],
        rows: Sequence[int],
        brought: Mapping[OffloadKey, int],
        now: float,
    ) -> None:
        self.keys = keys
        self._control = control = demotions.control
        self._rows = rows
        self._brought = brought
        self.hits = Counter[int]()
        self._resets = control.resets
        control.cpu.pin(rows)
        blocks = control.group_blocks[JobKind.LOAD]
        for group, count in group_runs(keys):
            blocks[group] += count
        if not demotions.admits_all:
            demotions.on_use(rows[::-1], now)

    def end(self, errors: Sequence[int], bytes_moved: int) -> list[BlockOutcome]:
        """The outcome of each block by its errno, 0 for success. What a reset overtook is cancelled."""
        control = self._control
        counters = control.cpu_counters
        counters.load_bytes += bytes_moved
        good = LOADED if self._resets == control.resets else CANCELLED
        outcomes = [failed(error) if error else good for error in errors]
        for outcome in outcomes:
            if outcome is not LOADED:
                counters.count(outcome)
        loaded = [key for key, each in zip(self.keys, outcomes, strict=True) if each is LOADED]
        counters.loaded += len(loaded)
        self.hits.update([self._brought.get(key, CPU_TIER) for key in loaded])
        for position, count in self.hits.items():
            control.counters(position).hits += count
        control.cpu.unpin(self._rows)
        return outcomes
