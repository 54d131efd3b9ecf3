"""Stores of an engine: GPU blocks into fresh CPU rows, nothing twice, a row for each block or a reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kvtier.control.flow.demotions import Demotions
from kvtier.control.flow.engine_job import EngineJob
from kvtier.control.jobs import CPU_TIER, JobOwner
from kvtier.control.state import ControlState, FillWaiter
from kvtier.control.tiers.slot_table import READY
from kvtier.types.jobs import (
    LATE,
    PARTIAL,
    PRESENT,
    STORED,
    BlockOutcome,
    DropReason,
    JobKind,
    JobResult,
    TransferJob,
    dropped,
)
from kvtier.types.keys import OffloadKey

BYPASSED = dropped(DropReason.BYPASSED)


class StoreRequest(EngineJob, FillWaiter):
    """A store: the blocks that wait for a row, are being copied, or wait for another store of the same key.

    A key that is filling is not stored again: a second store of it waits for that fill.
    """

    def __init__(self, demotions: Demotions, factor: int, job: TransferJob, now: float, age: int) -> None:
        super().__init__(demotions.control, job, now, age)
        self.demotions = demotions
        self._used: set[int] = set()
        for start, group in zip(self.starts, self.groups, strict=True):
            if group.runs.all_whole(len(group.keys), factor):
                continue
            for position in np.flatnonzero(~group.runs.covers_whole(len(group.keys), factor)).tolist():
                self.complete(start + position, PARTIAL)
                self.control.cpu_counters.drop(DropReason.PARTIAL)
        if self.open < len(self.all):
            self.todo = deque(i for i in self.todo if self.outcomes[i] is None)

    def on_fills(self, fills: Sequence[tuple[int, int]], success: bool, position: int, now: float) -> None:
        """Other fills of the same keys ended: with success the blocks are present, else they are still to be stored."""
        for index, row in fills:
            if self.outcomes[index] is not None:
                continue
            if success:
                self.complete(index, PRESENT)
                if not self.demotions.admits_all:
                    self.demotions.on_use((row,), now)
            else:
                self.control.filled_ages.append(self.age)
                self.todo.append(index)

    def stop(self, outcome: BlockOutcome) -> None:
        """No new copies; copies in flight end first."""
        self.stopping = outcome
        self.todo.clear()
        for index in self.all:
            if index not in self.in_copy and self.outcomes[index] is None:
                self.complete(index, outcome)
                self.control.cpu_counters.count(outcome)

    def advance(self, now: float) -> bool:
        """Start copies for the blocks that get rows; False when blocks are left without one.

        Where rows are short the leaf goes first and the root last: so no parent ages before its child, in any tier,
        and what is left in a CPU tier too small for all of it is the front of the prefix.
        """
        control = self.control
        if not self.demotions.admits_all:
            self._use_again(now)  # before room is counted: it pins rows
        if control.cpu.request_policy is not None and not control.cpu.skips_bypass(len(self.todo)):
            self._bypass(now)
        room = control.cpu.available
        if room and self._advance_all_new(room):
            return not self.todo
        directory, state = control.cpu.directory, control.cpu.table.state
        fresh: dict[OffloadKey, int] = {}
        again: list[int] = []
        while self.todo:
            index = self.todo.pop()
            key = self.keys[index]
            row = directory.get(key)
            if row is not None and state[row] == READY:
                self.complete(index, PRESENT)
            elif row is not None:
                control.wait_for_fills(self, [(index, row)])
            elif key in fresh:
                again.append(index)
            elif len(fresh) < room:
                fresh[key] = index
            else:
                self.todo.append(index)
                break
        if fresh:
            self._copy(list(fresh.values())[::-1], list(fresh)[::-1])
        control.wait_for_fills(self, [(index, directory[self.keys[index]]) for index in again])
        return not self.todo

    def _use_again(self, now: float) -> None:
        """Rows that hold what is stored once more are offered again: once, or they would never be clean for long."""
        keys = [self.keys[index] for index in reversed(self.todo)]
        if self.control.cpu.directory.keys().isdisjoint(keys):
            return
        found = map(self.control.cpu.ready, keys)
        rows = [row for row in found if row is not None and row not in self._used]
        self._used.update(rows)
        self.demotions.on_use(rows, now)

    def _bypass(self, now: float) -> None:
        """Drop the blocks that neither the CPU tier nor a tier below would keep if it had them."""
        directory = self.control.cpu.directory
        keys = dict.fromkeys(map(self.keys.__getitem__, self.todo))
        fresh = [key for key in keys if key not in directory]
        if bypassed := keys_kept_nowhere(self.control, fresh, now):
            for index in self.todo:
                if self.keys[index] in bypassed:
                    self.complete(index, BYPASSED)
                    self.control.cpu_counters.count(BYPASSED)
            self.todo = deque(index for index in self.todo if self.outcomes[index] is None)

    def _advance_all_new(self, room: int) -> bool:
        """The usual case in a few batch calls: no key of the rest is known. False when there is more to look at."""
        directory = self.control.cpu.directory
        indices: Sequence[int] = self.all if len(self.todo) == len(self.all) else list(self.todo)
        keys = list(map(self.keys.__getitem__, indices))
        if len(set(keys)) < len(keys) or not directory.keys().isdisjoint(keys):
            return False
        self.todo = deque(indices[:-room])
        self._copy(indices[-room:], keys[-room:])
        return True

    def _copy(self, indices: Sequence[int], keys: list[OffloadKey]) -> None:
        """Copy blocks, given in prefix order, into rows of which there are enough."""
        control = self.control
        rows = control.cpu.reserve(keys)
        if control.awaited.ages:
            control.awaited.on_change(keys)
        self.in_copy.update(indices)
        transfers = self.transfers(indices, rows)
        control.emit(
            CPU_TIER, JobKind.STORE, transfers, self.job.deadline, FillJob(self, indices, rows, control.resets)
        )


@dataclass(slots=True, eq=False)
class FillJob(JobOwner):
    """GPU blocks to filling rows for one store."""

    request: StoreRequest
    indices: Sequence[int]
    rows: list[int]
    resets: int

    def finish(self, result: JobResult, now: float) -> None:
        request, control = self.request, self.request.control
        outcomes = list(chain.from_iterable(result.outcomes))
        request.in_copy.difference_update(self.indices)
        request.bytes_moved += result.bytes_moved
        control.cpu_counters.store_bytes += result.bytes_moved
        if not outcomes.count(STORED) == len(outcomes) == len(self.rows):
            by_place = dict(zip(request.order_of(self.indices), outcomes, strict=True))
            outcomes = [by_place[m] for m in range(len(self.rows))]
        ended = request.demotions.end_stores(self.rows, outcomes, self.resets, now)
        if ended.count(STORED) == len(ended):
            request.complete_all(self.indices, STORED)
            return
        for index, outcome in zip(self.indices, ended, strict=True):
            request.complete(index, outcome)

    def on_late(self, now: float) -> None:
        """The copy goes on, but whatever it reads no longer matters: its rows are unreachable until it ends."""
        request = self.request
        control = request.control
        control.cpu_counters.late += len(self.rows)
        control.cpu.quarantine(self.rows)
        request.in_copy.difference_update(self.indices)
        for index in self.indices:
            request.complete(index, LATE)
        control.end_fill(self.rows, False, CPU_TIER, now)

    def on_end(self, now: float) -> None:
        self.request.control.cpu.unpin(self.rows)


def keys_kept_nowhere(control: ControlState, keys: Sequence[OffloadKey], now: float) -> set[OffloadKey]:
    """The keys, distinct and in prefix order, that neither the CPU tier, which has none, nor a tier below would keep.

    A lower tier that has a block already does not need it, and one without such a policy takes every block.
    """
    left = control.cpu.keys_to_bypass(keys)
    if not left:
        return set()
    for lower in control.lowers:
        if left and not lower.held_back:
            needed = [key for key in left if lower.index.needs(key, now)]
            bypassed = () if lower.owned is None else lower.owned.keys_to_bypass(needed)
            taken = set(needed).difference(bypassed)
            left = [key for key in left if key not in taken]
    return set(left)
