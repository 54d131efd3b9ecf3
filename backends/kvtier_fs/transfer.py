"""Moving blocks: jobs become slots, slots become requests, completions become outcomes.

One `Lane` for each root. Nothing here waits: requests go to the I/O engine in batches, verification goes to the
root's threads in batches, and one future for each job is all a caller waits for.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvtier.jobs import (
    CORRUPT,
    LATE,
    LOADED,
    STORED,
    BlockOutcome,
    DropReason,
    JobKind,
    JobResult,
    TransferJob,
    dropped,
    failed,
)
from kvtier_fs.buffers import HeaderPages
from kvtier_fs.io.contract import MAX_BUFFERS, IOKind, IORequest
from kvtier_fs.ledger import Ledger
from kvtier_fs.slot import SlotHeader, encode_slot_header
from kvtier_fs.strict import StrictIO, StrictRequest, span
from kvtier_fs.verify import Mismatch, ReadSlot, verify_slots

REQUEST_BYTES = 1 << 20
JOINED_BYTES = 512 << 10
"""Neighbouring slots go in one request up to here: fewer calls for the kernel and the disk, still several in flight."""
JOINED_MAX = MAX_BUFFERS // 2
STARTS_PER_TURN = 64
_FULL = (errno.ENOSPC, errno.EDQUOT)


def error_outcome(number: int) -> BlockOutcome:
    """The outcome of a block whose I/O ended with an errno: a full disk drops it, anything else fails it."""
    return dropped(DropReason.DISK_FULL) if number in _FULL else failed(number)


class JobRun:
    """One job on its way: its outcomes so far, and the future that is done when the last block has ended."""

    def __init__(self, job: TransferJob, kind: JobKind, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.kind = kind
        self.finished: asyncio.Future[None] = loop.create_future()
        self._outcomes: list[list[BlockOutcome | None]] = [[None] * len(group.keys) for group in job.groups]
        self._left = job.num_blocks
        self.bytes_moved = 0
        if not self._left:
            self.finished.set_result(None)

    def end(self, group: int, position: int, outcome: BlockOutcome, payload_bytes: int = 0) -> None:
        """Note what became of a block. The first word counts."""
        if self._outcomes[group][position] is not None:
            return
        self._outcomes[group][position] = outcome
        self.bytes_moved += payload_bytes
        self._left -= 1
        if not self._left and not self.finished.done():
            self.finished.set_result(None)

    def give_up(self) -> None:
        """Report every block that has not ended as late: its I/O is stuck in the kernel and keeps its buffers."""
        for group, outcomes in enumerate(self._outcomes):
            for position in range(len(outcomes)):
                self.end(group, position, LATE)

    def result(self, seconds: float) -> JobResult:
        """What to tell the stack, once finished."""
        outcomes = tuple(tuple(outcome or LATE for outcome in group) for group in self._outcomes)
        return JobResult(self.job.job_id, outcomes, self.bytes_moved, seconds)


class BlockPlace(NamedTuple):
    """Which block of which job: the job's group and the position in it."""

    run: JobRun
    group: int
    position: int


class BlockMove:
    """One block between a row and a slot. `payload` is the row's own memory; `header` what the slot says or should."""

    __slots__ = ("errno", "fd", "header", "offset", "page", "payload", "pieces", "place", "row")

    def __init__(
        self, place: BlockPlace, row: int, payload: memoryview, header: SlotHeader, at: tuple[int, int]
    ) -> None:
        self.place = place
        self.row = row
        self.payload = payload
        self.header = header
        self.fd, self.offset = at
        self.page = -1
        self.pieces = 0
        self.errno = 0

    def end(self, outcome: BlockOutcome) -> None:
        """Report the block's outcome to its job."""
        moved = len(self.payload) if outcome.ok else 0
        self.place.run.end(self.place.group, self.place.position, outcome, moved)


_Share = tuple[JobRun, Iterator[BlockMove]]
"""A job's blocks that have not begun."""


class _Piece(StrictRequest):
    """A request of at most REQUEST_BYTES that moves neighbouring blocks, or a part of one."""

    __slots__ = ("blocks",)

    def __init__(
        self, blocks: Sequence[BlockMove], kind: IOKind, offset: int, buffers: list[memoryview],
        done: Callable[..., None],
    ) -> None:  # fmt: skip
        super().__init__(kind, blocks[0].fd, offset, buffers, done)
        self.blocks = blocks

    def after(self, moved: int) -> _Piece:
        return _Piece(self.blocks, self.kind, self.offset + moved, self.left(moved), self.done)


@dataclass(frozen=True, slots=True)
class LaneParts:
    """What a lane works with, all handed in. `depth` is how many requests the engine has under way at once."""

    loop: asyncio.AbstractEventLoop
    io: StrictIO
    threads: Executor
    clock: Callable[[], float]
    set_checksum: Callable[[int, bytes], None]
    counters: Counter[str]
    ledger: Ledger
    header_bytes: int
    depth: int


class Lane:
    """The blocks of one root on their way, loads before stores; at most `2 * depth + 32` have I/O or checks running."""

    def __init__(self, parts: LaneParts) -> None:
        self._parts = parts
        self._loads: deque[_Share] = deque()
        self._stores: deque[_Share] = deque()
        self._pages = HeaderPages(2 * parts.depth + 32, parts.header_bytes)
        self._zeros = bytes(parts.header_bytes)
        self._unverified: list[BlockMove] = []
        self._running: dict[int, BlockMove] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._fill_called = False

    def enqueue(self, run: JobRun, blocks: Iterator[BlockMove]) -> None:
        """Take a job's blocks on. They are made one by one when there is room for them."""
        queue = self._loads if run.kind is JobKind.LOAD else self._stores
        queue.append((run, blocks))
        self._call_fill()

    def withdraw(self, outcome: BlockOutcome, run: JobRun | None = None) -> None:
        """End the blocks (of one job, or all) whose I/O has not begun; those under way go on to their end."""
        for queue in (self._loads, self._stores):
            shares = list(queue)
            queue.clear()
            for owner, blocks in shares:
                if run is not None and owner is not run:
                    queue.append((owner, blocks))
                    continue
                for block in blocks:
                    block.end(outcome)

    async def idle(self) -> None:
        """Wait until no block is under way."""
        await self._idle.wait()

    def give_up(self) -> None:
        """Report the jobs whose I/O did not end in time."""
        for block in list(self._running.values()):
            block.place.run.give_up()

    def _call_fill(self) -> None:
        if not self._fill_called:
            self._fill_called = True
            self._parts.loop.call_soon(self._fill)

    def _fill(self) -> None:
        """Begin blocks while there are header pages for them, some in each turn of the loop."""
        self._fill_called = False
        requests: list[IORequest] = []
        neighbours: list[BlockMove] = []
        now = self._parts.clock()
        starts = 0
        try:
            while starts < STARTS_PER_TURN and self._pages.free:
                queue = self._loads or self._stores
                if not queue:
                    break
                run, blocks = queue[0]
                block = next(blocks, None)
                if block is None:
                    queue.popleft()
                    requests.extend(self._requests(neighbours))
                    neighbours = []
                    continue
                starts += 1
                if run.job.deadline is not None and now > run.job.deadline:
                    block.end(LATE)
                    continue
                if neighbours and not self._joins(neighbours, block):
                    requests.extend(self._requests(neighbours))
                    neighbours = []
                self._begin(block)
                neighbours.append(block)
        finally:
            requests.extend(self._requests(neighbours))
            self._parts.io.engine.submit(requests)
            self._go_on_or_rest()

    def _go_on_or_rest(self) -> None:
        if self._loads or self._stores:
            if self._pages.free:
                self._call_fill()
        elif not self._running:
            self._idle.set()

    def _joins(self, neighbours: Sequence[BlockMove], block: BlockMove) -> bool:
        """True if a block lies right behind these, in the same file, and there is room for it in their request."""
        last, slot_bytes = neighbours[-1], self._parts.header_bytes + len(block.payload)
        behind = last.offset + self._parts.header_bytes + len(last.payload)
        return (
            block.fd == last.fd
            and block.offset == behind
            and (len(neighbours) + 1) * slot_bytes <= JOINED_BYTES
            and len(neighbours) < JOINED_MAX
        )

    def _begin(self, block: BlockMove) -> None:
        block.page = self._pages.acquire()
        self._running[block.page] = block
        self._idle.clear()
        page = self._pages.pages[block.page]
        if block.place.run.kind is JobKind.STORE:
            self._parts.ledger.begin(block.header)
            encode_slot_header(block.header, page, self._zeros)

    def _requests(self, blocks: Sequence[BlockMove]) -> list[_Piece]:
        """The requests that move blocks which lie one behind the other: one for all of them, or several for one."""
        if not blocks:
            return []
        first = blocks[0]
        kind = IOKind.WRITE if first.place.run.kind is JobKind.STORE else IOKind.READ
        buffers: list[memoryview] = []
        for block in blocks:
            block.pieces = 1
            buffers += self._pages.pages[block.page], block.payload
        total = self._parts.header_bytes + len(first.payload)
        if total <= REQUEST_BYTES:
            return [_Piece(blocks, kind, first.offset, buffers, self._piece_done)]
        spans = split(total, self._parts.header_bytes)
        first.pieces = len(spans)
        return [
            _Piece(blocks, kind, first.offset + start, span(buffers, start, end), self._piece_done)
            for start, end in spans
        ]

    def _piece_done(self, piece: IORequest, result: int) -> None:
        assert isinstance(piece, _Piece)
        error = self._parts.io.shortfall(piece, result)
        if error is None:
            return
        if error and len(piece.blocks) > 1:  # one bad place must not cost its neighbours
            self._parts.io.engine.submit([alone for block in piece.blocks for alone in self._requests([block])])
            return
        for block in piece.blocks:
            self._part_done(block, piece.kind, error)

    def _part_done(self, block: BlockMove, kind: IOKind, error: int) -> None:
        block.errno = block.errno or error
        block.pieces -= 1
        if block.pieces:
            return
        if block.errno:
            self._parts.io.count_error(block.errno)
            self._end(block, error_outcome(block.errno))
        elif kind is IOKind.WRITE:
            self._parts.ledger.record(block.header)
            self._end(block, STORED)
        else:
            if not self._unverified:
                self._parts.loop.call_soon(self._verify)
            self._unverified.append(block)

    def _verify(self) -> None:
        batch, self._unverified = self._unverified, []
        reads = [ReadSlot(self._pages.pages[block.page], block.payload, block.header) for block in batch]
        try:
            checked = self._parts.loop.run_in_executor(self._parts.threads, verify_slots, reads)
        except OSError as error:  # not one thread is to be had: nothing was checked, so nothing was loaded
            self._unchecked(batch, error.errno or errno.EAGAIN)
        else:
            checked.add_done_callback(partial(self._verified, batch))

    def _unchecked(self, batch: list[BlockMove], number: int) -> None:
        self._parts.counters["verify.failed"] += len(batch)
        for block in batch:
            self._end(block, failed(number))

    def _verified(self, batch: list[BlockMove], checked: asyncio.Future[list[Mismatch | bytes]]) -> None:
        if checked.cancelled() or checked.exception() is not None:
            self._unchecked(batch, errno.EIO)
            return
        for block, found in zip(batch, checked.result(), strict=True):
            if isinstance(found, Mismatch):
                self._parts.counters[f"mismatch.{found}"] += 1
                self._parts.ledger.refuse(block.header)
                self._end(block, CORRUPT)
            else:
                self._parts.set_checksum(block.row, found)
                self._end(block, LOADED)

    def _end(self, block: BlockMove, outcome: BlockOutcome) -> None:
        self._pages.release(block.page)
        del self._running[block.page]
        block.end(outcome)
        self._go_on_or_rest()


def split(total: int, alignment: int) -> list[tuple[int, int]]:
    """Cut a transfer into pieces of nearly one size, aligned, of at most REQUEST_BYTES each."""
    pieces = -(-total // REQUEST_BYTES)
    size = min(-(-total // pieces // alignment) * alignment, REQUEST_BYTES)
    return [(start, min(start + size, total)) for start in range(0, total, size)]
