"""Loads of an engine: every block from the highest tier that has it, streamed through a bounded window of rows.

A load never holds a row while it waits for another: a row is held from its promotion to the end of its copy, and
both always end. So any number of loads longer than the CPU tier get through any CPU tier.
"""

from __future__ import annotations

from kvtier.control.board import CPU_TIER, Board, InFlight
from kvtier.control.promotion import Promotions, Rooms, Want
from kvtier.control.requests import StackRequest
from kvtier.control.slots import READY
from kvtier.jobs import CANCELLED, CORRUPT, LOADED, MISSING, BlockOutcome, BlockStatus, JobKind, JobResult, TransferJob
from kvtier.keys import OffloadKey


class LoadRequest(StackRequest):
    """One load: which blocks are being promoted, copied, and which tiers were tried in vain."""

    def __init__(self, loads: Loads, job: TransferJob, now: float) -> None:
        super().__init__(job, now)
        self.loads = loads
        self.epoch = loads.board.epoch
        self.tried: dict[int, int] = {}
        self.in_copy = bytearray(len(self.keys))
        self.walked = False
        self.age = 0
        self.short_since: float | None = None
        self.filling = 0
        self.copying = 0
        self.arrived: list[tuple[int, int]] = []

    @property
    def moving(self) -> int:
        """Rows this load keeps in motion."""
        return self.filling + self.copying + len(self.arrived)

    def filled(self, index: int, row: int | None, position: int, now: float) -> None:
        """A row this load waits for ended its fill."""
        self.filling -= 1
        if self.outcomes[index] is not None:
            return
        board = self.loads.board
        if position != CPU_TIER:
            self.tried[index] = self.tried.get(index, 0) | board.lowers[position - 1].bit
        if row is None:
            self.todo.appendleft(index)
            return
        board.cpu.hold((row,))
        board.counters(position).hits += 1
        if not self.arrived:
            self.loads.arrived.append(self)
        self.arrived.append((index, row))

    def stop(self, outcome: BlockOutcome) -> None:
        """No new transfers. Blocks whose copy is not under way end now; copies end first, their buffers are in use."""
        self.stopping = outcome
        self.todo.clear()
        self.loads.board.cpu.release([row for _, row in self.arrived])
        self.arrived.clear()
        for index in range(len(self.keys)):
            if not self.in_copy[index]:
                self.settle(index, outcome)

    def disown(self) -> None:
        """After a reset: what was loaded before it must not be taken for valid."""
        self.outcomes = [CANCELLED if outcome is LOADED else outcome for outcome in self.outcomes]

    def take_rows(self, now: float) -> None:
        """Send on what is in rows already. That takes no row from anybody, so it waits for nobody."""
        self._collect(0, Rooms.none(self.loads.board.lowers), now)
        self.copy_arrived()

    def advance(self, now: float) -> int:
        """Start what can be started. Returns how many rows it could use at once and did not get.

        That is 0 also when blocks are left that wait for nothing but its own transfers, or for others of their tier.
        """
        board, promotions = self.loads.board, self.loads.promotions
        window = max(1, board.num_rows // 2)
        rooms = promotions.rooms(now)
        while self.todo:
            wants = self._collect(min(board.cpu.available, window - self.moving), rooms, now)
            started = promotions.start(wants, now) if wants else 0
            self.filling += started
            self.todo.extendleft(want.index for want in reversed(wants[started:]))
            if not started:
                break
        self.copy_arrived()
        if board.cpu.available or not rooms:
            return 0
        return max(0, min(len(self.todo), window - self.moving))

    def _collect(self, room: int, rooms: Rooms, now: float) -> list[Want]:
        """Walk the blocks to do: hold those in rows, wait for those on their way, list up to `room` to promote.

        `rooms` says how many each lower tier may be asked for, and is used up.

        The first walk goes over all blocks, so that what is in rows already is held before anything is evicted for
        the rest; later walks stop at the first block without room, so a waiting load costs O(1).
        """
        board = self.loads.board
        directory, state = board.cpu.directory, board.cpu.table.state
        if not self.walked and self._collect_ready():
            return []
        wants: list[Want] = []
        wanted: dict[OffloadKey, int] = {}
        skipped: list[int] = []
        while self.todo:
            index = self.todo.popleft()
            key = self.keys[index]
            row = directory.get(key)
            if row is not None and state[row] == READY:
                board.cpu.hold((row,))
                board.cpu_counters.hits += 1
                self.arrived.append((index, row))
            elif row is not None:
                board.wait_for_fill(row, self, index)
                self.filling += 1
            elif len(wants) < room and key not in wanted:
                lower = self.loads.promotions.source(key, self.tried.get(index, 0), now)
                if lower is None:
                    self.settle(index, MISSING)
                    continue
                if rooms.take(lower, key):
                    wanted[key] = index
                    wants.append(Want(key, lower, self, index))
                    continue
                skipped.append(index)
                if self.walked:
                    break
            else:
                skipped.append(index)
                if self.walked:
                    break
        if not self.walked:
            # Here and now these are the most recent: a load must not throw out its own hits to fetch the rest.
            board.cpu.touch([row for _, row in reversed(self.arrived)])
        self.walked = True
        self.todo.extendleft(reversed(skipped))
        return wants

    def _collect_ready(self) -> bool:
        """The usual case in a few batch calls: every block is in a row. False when there is more to look at.

        They are told as used when they have been copied, not now: until then they are held.
        """
        board = self.loads.board
        if len(self.todo) < len(self.keys):
            return False
        rows = list(map(board.cpu.directory.get, self.keys))
        state = board.cpu.table.state
        found = [row for row in rows if row is not None and state[row] == READY]
        if len(found) < len(rows):
            return False
        board.cpu.hold(found)
        board.cpu_counters.hits += len(found)
        self.arrived = list(enumerate(found))
        self.todo.clear()
        self.walked = True
        return True

    def copy_arrived(self) -> None:
        """Send the blocks that are held in rows on to the GPU."""
        if not self.arrived:
            return
        arrived, self.arrived = self.arrived, []
        indices = [index for index, _ in arrived]
        rows = [row for _, row in arrived]
        generation = self.loads.board.cpu.table.generation
        generations = [generation[row] for row in rows]
        self.copying += len(rows)
        for index in indices:
            self.in_copy[index] = 1
        copy = CopyJob(self, indices, rows, generations)
        transfers = self.transfers(indices, rows, generations)
        self.loads.board.emit(CPU_TIER, JobKind.LOAD, transfers, None, copy)


class Loads:
    """All loads under way. Order among them is the plane's business; `arrived` are those with blocks to copy."""

    def __init__(self, board: Board, promotions: Promotions) -> None:
        self.board = board
        self.promotions = promotions
        self.arrived: list[LoadRequest] = []

    def copy_arrived(self) -> None:
        """Whatever waits for rows: blocks that have theirs go on to the GPU, for that is what frees rows."""
        arrived, self.arrived = self.arrived, []
        for load in arrived:
            load.copy_arrived()


class CopyJob(InFlight):
    """Rows to GPU blocks for one load. It has no deadline: GPU blocks belong to it until the copy has ended."""

    def __init__(self, request: LoadRequest, indices: list[int], rows: list[int], generations: list[int]) -> None:
        self.request = request
        self.indices = indices
        self.rows = rows
        self.generations = generations
        self.order = request.order_of(indices)

    def finish(self, result: JobResult, now: float) -> None:
        request, board = self.request, self.request.loads.board
        outcomes = [outcome for group in result.outcomes for outcome in group]
        request.copying -= len(self.rows)
        request.bytes_moved += result.bytes_moved
        board.cpu_counters.load_bytes += result.bytes_moved
        if outcomes.count(LOADED) == len(self.indices) == len(outcomes) and request.epoch == board.epoch:
            self._finish_whole()
            return
        refused: list[int] = []
        for m, outcome in zip(self.order, outcomes, strict=True):
            index = self.indices[m]
            request.in_copy[index] = 0
            board.count(CPU_TIER, outcome)
            if outcome.ok and request.epoch != board.epoch:
                request.settle(index, CANCELLED)
            elif outcome.ok:
                board.cpu_counters.loaded += 1
                request.settle(index, LOADED)
            elif outcome.status is BlockStatus.CORRUPT:
                refused.append(m)
            else:
                request.settle(index, outcome)
        board.cpu.release(self.rows)
        for m in sorted(refused, reverse=True):
            request.loads.promotions.demotions.end_duty(self.rows[m])
            board.cpu.discard(self.rows[m], self.generations[m])
            if request.stopping is None:
                request.todo.appendleft(self.indices[m])
            else:
                request.settle(self.indices[m], CORRUPT)

    def _finish_whole(self) -> None:
        """The usual case in a few batch calls: every block was copied."""
        request, board = self.request, self.request.loads.board
        for index in self.indices:
            request.in_copy[index] = 0
        request.settle_all(self.indices, LOADED)
        board.cpu_counters.loaded += len(self.indices)
        board.cpu.release(self.rows)

    def late(self, now: float) -> None:
        """Not reached: these jobs carry no deadline."""
        raise AssertionError("a copy to the GPU has no deadline")

    def ended(self, now: float) -> None:
        """Not reached: these jobs carry no deadline."""
        raise AssertionError("a copy to the GPU has no deadline")
