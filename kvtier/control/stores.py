"""Stores of an engine: GPU blocks into fresh CPU rows, nothing twice, a row for each block or a reason."""

from __future__ import annotations

from collections import deque

import numpy as np

from kvtier.control.board import CPU_TIER, Board, InFlight
from kvtier.control.demotion import Demotions
from kvtier.control.requests import StackRequest
from kvtier.control.slots import FILLING, READY
from kvtier.jobs import (
    FEW,
    LATE,
    PRESENT,
    STORED,
    BlockOutcome,
    DropReason,
    GPURuns,
    JobKind,
    JobResult,
    TransferJob,
    dropped,
)
from kvtier.keys import OffloadKey


class Stores:
    """All stores under way. A key that is filling is not stored again: whoever asks waits for that fill."""

    def __init__(self, board: Board, demotions: Demotions, factor: int) -> None:
        self.board = board
        self.demotions = demotions
        self.factor = factor


class StoreRequest(StackRequest):
    """One store: which blocks wait for a row, are being copied, or wait for another store of the same key."""

    def __init__(self, stores: Stores, job: TransferJob, now: float) -> None:
        super().__init__(job, now)
        self.stores = stores
        self.in_copy = bytearray(len(self.keys))
        partial = False
        for start, group in zip(self.starts, job.groups, strict=True):
            runs, count = group.staging, len(group.keys)
            assert isinstance(runs, GPURuns)
            if _plainly_whole(runs, count, stores.factor):
                continue
            for position in np.flatnonzero(~runs.covers_whole(count, stores.factor)).tolist():
                self.settle(start + position, dropped(DropReason.PARTIAL))
                stores.board.cpu_counters.drop(DropReason.PARTIAL)
                partial = True
        if partial:
            self.todo = deque(i for i in self.todo if self.outcomes[i] is None)

    def filled(self, index: int, row: int | None, position: int, now: float) -> None:
        """Another fill of the same key ended: with success the block is present, else it is still to be stored."""
        if self.outcomes[index] is not None:
            return
        if row is not None:
            self.settle(index, PRESENT)
        else:
            self.todo.append(index)

    def stop(self, outcome: BlockOutcome) -> None:
        """No new copies; copies under way end first."""
        self.stopping = outcome
        self.todo.clear()
        for index in range(len(self.keys)):
            if not self.in_copy[index] and self.outcomes[index] is None:
                self.settle(index, outcome)
                self.stores.board.count(CPU_TIER, outcome)

    def advance(self, now: float) -> bool:
        """Start copies for the blocks that get rows; False when blocks are left without one.

        Where rows are short the leaf goes first and the root last: so no parent ages before its child, in any tier,
        and what is left in a CPU tier too small for all of it is the front of the prefix.
        """
        board = self.stores.board
        directory, state = board.cpu.directory, board.cpu.table.state
        room = board.cpu.available
        if room and self._advance_all_new(room):
            return not self.todo
        fresh: dict[OffloadKey, int] = {}
        again: list[int] = []
        while self.todo:
            index = self.todo.pop()
            key = self.keys[index]
            row = directory.get(key)
            if row is not None and state[row] == READY:
                self.settle(index, PRESENT)
            elif row is not None:
                board.wait_for_fill(row, self, index)
            elif key in fresh:
                again.append(index)
            elif len(fresh) < room:
                fresh[key] = index
            else:
                self.todo.append(index)
                break
        if fresh:
            self._copy(list(fresh.values())[::-1])
        for index in again:
            board.wait_for_fill(directory[self.keys[index]], self, index)
        return not self.todo

    def _advance_all_new(self, room: int) -> bool:
        """The usual case in a few batch calls: no key of the rest is known. False when there is more to look at."""
        directory = self.stores.board.cpu.directory
        indices = list(self.todo)
        keys = [self.keys[index] for index in indices]
        if len(set(keys)) < len(keys) or not directory.keys().isdisjoint(keys):
            return False
        self.todo = deque(indices[:-room])
        self._copy(indices[-room:])
        return True

    def _copy(self, indices: list[int]) -> None:
        """Copy blocks, given in prefix order, into rows of which there are enough."""
        board = self.stores.board
        rows = board.cpu.reserve([self.keys[index] for index in indices])
        generations = [board.cpu.table.generation[row] for row in rows]
        for index in indices:
            self.in_copy[index] = 1
        board.emit(
            CPU_TIER,
            JobKind.STORE,
            self.transfers(indices, rows, generations),
            self.job.deadline,
            FillJob(self, indices, rows),
        )


def _plainly_whole(runs: GPURuns, count: int, factor: int) -> bool:
    """True for runs that name each of `count` offloaded blocks once, in order, with all its sub-blocks."""
    if len(runs.blocks) != count or len(runs.gpu_blocks) != count * factor:
        return False
    if count <= FEW:
        told = (runs.blocks.tolist(), runs.firsts.tolist(), runs.counts.tolist())
        return bool(told == (list(range(count)), [0] * count, [factor] * count))
    everything = bool((runs.counts == factor).all()) and not runs.firsts.any()
    return everything and bool((runs.blocks == np.arange(count)).all())


class FillJob(InFlight):
    """GPU blocks to filling rows for one store."""

    def __init__(self, request: StoreRequest, indices: list[int], rows: list[int]) -> None:
        self.request = request
        self.indices = indices
        self.rows = rows
        self.order = request.order_of(indices)

    def finish(self, result: JobResult, now: float) -> None:
        request, board = self.request, self.request.stores.board
        outcomes = [outcome for group in result.outcomes for outcome in group]
        request.bytes_moved += result.bytes_moved
        board.cpu_counters.store_bytes += result.bytes_moved
        if outcomes.count(STORED) == len(outcomes) == len(self.rows) and self._finish_whole(now):
            return
        in_order = list(outcomes)
        for m, outcome in zip(self.order, outcomes, strict=True):
            in_order[m] = outcome
        bad = [m for m, outcome in enumerate(in_order) if outcome is not STORED and not outcome.ok]
        failed_rows = set()
        for m in bad:
            board.count(CPU_TIER, in_order[m])
            failed_rows.add(self.rows[m])
        leaf_to_root = [row for row in reversed(self.rows) if row not in failed_rows] if bad else self.rows[::-1]
        state = board.cpu.table.state
        board.cpu.commit(leaf_to_root)
        ready = [row for row in leaf_to_root if state[row] == READY]
        reset = len(ready) < len(leaf_to_root)
        board.cpu_counters.stored += len(ready)
        if not bad and not reset:
            request.settle_all(self.indices, STORED)
        for m, index in enumerate(self.indices):
            request.in_copy[index] = 0
            if request.outcomes[index] is not None:
                continue
            outcome = in_order[m]
            if outcome.ok:
                outcome = dropped(DropReason.RESET) if reset and state[self.rows[m]] != READY else STORED
            request.settle(index, outcome)
        self.request.stores.demotions.row_ready(ready, CPU_TIER, now)
        board.cpu.abort([self.rows[m] for m in bad])
        if board.fills:
            board.fill_ended([row for row in self.rows if state[row] == READY], True, CPU_TIER, now)
            board.fill_ended([row for row in self.rows if state[row] != READY], False, CPU_TIER, now)

    def _finish_whole(self, now: float) -> bool:
        """The usual case in a few batch calls: every block was stored. False, and nothing done, after a reset."""
        request, board = self.request, self.request.stores.board
        rows, state = self.rows[::-1], board.cpu.table.state
        if any(state[row] != FILLING for row in rows):
            return False
        board.cpu.commit(rows)
        board.cpu_counters.stored += len(rows)
        request.settle_all(self.indices, STORED)
        for index in self.indices:
            request.in_copy[index] = 0
        request.stores.demotions.row_ready(rows, CPU_TIER, now)
        if board.fills:
            board.fill_ended(self.rows, True, CPU_TIER, now)
        return True

    def late(self, now: float) -> None:
        """The copy goes on, but whatever it reads no longer matters: its rows are unreachable until it ends."""
        request = self.request
        board = request.stores.board
        board.cpu_counters.late += len(self.rows)
        board.cpu.quarantine(self.rows)
        for index in self.indices:
            request.in_copy[index] = 0
            request.settle(index, LATE)
        board.fill_ended(self.rows, False, CPU_TIER, now)

    def ended(self, now: float) -> None:
        self.request.stores.board.cpu.release(self.rows)
