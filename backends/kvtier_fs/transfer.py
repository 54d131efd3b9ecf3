"""Moving blocks: shares of jobs become batches, batches become requests, completions become outcomes.

One `Lane` for each root. Nothing here waits: requests go to the I/O engine in batches, small payloads are verified
where they arrive and large ones on the root's threads, and one future for each job is all a caller waits for.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from kvtier.jobs import CORRUPT, LATE, LOADED, STORED, BlockOutcome, JobKind, failed
from kvtier_fs.batches import Batch, JobRun, Share, error_outcome
from kvtier_fs.buffers import HeaderPages
from kvtier_fs.io.contract import MAX_BUFFERS, IOKind, IORequest
from kvtier_fs.io.turns import Turns
from kvtier_fs.ledger import Ledger
from kvtier_fs.slot import write_slot_header
from kvtier_fs.strict import StrictIO, StrictRequest, span
from kvtier_fs.verify import Check, Mismatch, verify_blocks

LOADS_BYTES = 32 << 20
LOADS_MAX = 1024
"""So much may be loaded at once: what a disk brings while another thread keeps the GIL for a switch interval (5 ms)."""
REQUEST_BYTES = 1152 << 10
JOINED_BYTES = 512 << 10
JOINED_BYTES_DEEP = 1 << 20
"""Neighbouring slots go in one request up to here: fewer calls for the kernel and the disk, still several in flight;
and up to twice as much once there are as many requests as may be in the kernel."""
JOINED_MAX = MAX_BUFFERS // 2
REQUESTS_ALONE = 4
"""A batch with nothing else under way goes in so many, so that the disk works on some while others are verified."""
BATCH_BLOCKS = 64
STARTS_AT_ONCE = 16
"""While blocks are under way, others begin when so many can: each batch has a price of its own."""


class _Piece(StrictRequest):
    """A request that moves blocks `first` to `last - 1` of a batch, neighbours on the disk, or a part of one block."""

    __slots__ = ("batch", "first", "last")

    def __init__(
        self, batch: Batch, first: int, last: int, kind: IOKind, offset: int, buffers: list[memoryview],
        done: Callable[..., None], places: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(kind, batch.fds[first], offset, buffers, done, places)
        self.batch, self.first, self.last = batch, first, last

    def after(self, moved: int) -> _Piece:
        offset, buffers = self.offset + moved, self.left(moved)
        return _Piece(self.batch, self.first, self.last, self.kind, offset, buffers, self.done)


@dataclass(frozen=True, slots=True)
class LaneParts:
    """What a lane works with, all handed in.

    `depth` is how many requests the engine has under way at once, `slot_bytes` the smallest slot. Payloads of up to
    `checked_here_bytes` are verified on the event loop, larger ones on `threads`.
    """

    loop: asyncio.AbstractEventLoop
    io: StrictIO
    threads: Executor
    clock: Callable[[], float]
    turns: Turns
    set_checksum: Callable[[int, bytes], None]
    counters: Counter[str]
    ledger: Ledger
    header_bytes: int
    slot_bytes: int
    depth: int
    checked_here_bytes: int


class Lane:
    """The blocks of one root on their way, loads before stores.

    At most `2 * depth + 32` stores have I/O running; loads have it or are checked up to LOADS_BYTES or LOADS_MAX, if
    that is more.
    """

    def __init__(self, parts: LaneParts) -> None:
        self._parts = parts
        self._loads: deque[Share] = deque()
        self._stores: deque[Share] = deque()
        stores = 2 * parts.depth + 32
        loads = min(LOADS_MAX, LOADS_BYTES // parts.slot_bytes)
        self._for_loads = max(0, loads - stores)
        self._pages = HeaderPages(stores + self._for_loads, parts.header_bytes)
        self._unverified: list[_Piece] = []
        self._running: set[Batch] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._fill_called = self._fill_wanted = False
        parts.io.engine.after_turn = self._fill_if_wanted

    def enqueue(self, share: Share) -> None:
        """Take a share of a job on; its blocks begin when there is room for them, the first before this returns."""
        queue = self._loads if share.run.kind is JobKind.LOAD else self._stores
        queue.append(share)
        if len(self._loads) + len(self._stores) == 1 and not self._fill_called:
            self._fill()
        else:
            self._call_fill()

    def withdraw(self, outcome: BlockOutcome, run: JobRun | None = None) -> None:
        """End the blocks (of one job, or all) whose I/O has not begun; those under way go on to their end."""
        for queue in (self._loads, self._stores):
            shares = list(queue)
            queue.clear()
            for share in shares:
                if run is not None and share.run is not run:
                    queue.append(share)
                else:
                    share.end(outcome)

    async def idle(self) -> None:
        """Wait until no block is under way."""
        await self._idle.wait()

    def give_up(self) -> None:
        """Report the jobs whose I/O did not end in time."""
        for batch in list(self._running):
            batch.run.give_up()

    def _call_fill(self) -> None:
        """Have blocks begin after the completions of this turn, or in the next turn if there are none."""
        self._fill_wanted = True
        if not self._fill_called:
            self._fill_called = True
            self._parts.loop.call_soon(self._called_fill)

    def _called_fill(self) -> None:
        self._fill_called = False
        self._fill_if_wanted()

    def _fill_if_wanted(self) -> None:
        if self._fill_wanted:
            self._fill()

    def _fill(self) -> None:
        """Begin blocks while there are header pages for them, for a while in each turn of the loop."""
        self._fill_wanted = False
        requests: list[IORequest] = []
        now = self._parts.clock()
        until = now + self._parts.turns.seconds
        try:
            while (queue := self._loads or self._stores) and (room := self._room(queue)) and now < until:
                share = queue[0]
                deadline = share.run.job.deadline
                if deadline is not None and now > deadline:
                    queue.popleft().end(LATE)
                    continue
                batch = share.take(min(BATCH_BLOCKS, room))
                if batch is None:
                    queue.popleft()
                elif len(batch):
                    self._begin(batch)
                    requests += self._requests(batch, self._parts.io.engine.in_flight + len(requests))
                now = self._parts.clock()
        finally:
            if requests:
                self._parts.io.engine.submit(requests)
            self._go_on_or_rest()

    def _room(self, queue: deque[Share]) -> int:
        """How many blocks of a queue may begin: stores leave most of the header pages to loads."""
        return self._pages.free if queue is self._loads else max(0, self._pages.free - self._for_loads)

    def _go_on_or_rest(self) -> None:
        if queue := self._loads or self._stores:
            if self._room(queue) >= STARTS_AT_ONCE or not self._running:
                self._call_fill()
        elif not self._running:
            self._idle.set()

    def _begin(self, batch: Batch) -> None:
        batch.pages = self._pages.acquire_all(len(batch))
        self._running.add(batch)
        self._idle.clear()
        if batch.run.kind is not JobKind.STORE:
            return
        self._parts.ledger.begin_all(batch.regions, batch.indices)
        pages = self._pages.pages
        for page, fixed, digest, key in zip(batch.pages, batch.fixed, batch.digests, batch.keys, strict=True):
            write_slot_header(pages[page], fixed, digest, key)

    def _requests(self, batch: Batch, under_way: int) -> list[IORequest]:
        """The requests that move a batch: one for blocks that lie one behind the other, or several for each block.

        `under_way` is how many requests there are already.
        """
        total, count = self._parts.header_bytes + len(batch.payloads[0]), len(batch)
        if total > REQUEST_BYTES:
            pieces = split(total, self._parts.header_bytes)
            batch.pieces, batch.errors = [len(pieces)] * count, [0] * count
            return [self._piece(batch, i, i + 1, part) for i in range(count) for part in pieces]
        most = min(JOINED_MAX, (JOINED_BYTES if under_way < self._parts.depth else JOINED_BYTES_DEEP) // total)
        if not under_way and count * total > JOINED_BYTES:
            most = min(most, -(-count // REQUESTS_ALONE))
        fds, offsets = batch.fds, batch.offsets
        requests: list[IORequest] = []
        first = 0
        for i in range(1, count):
            if offsets[i] != offsets[i - 1] + total or i - first >= most or fds[i] != fds[i - 1]:
                requests.append(self._piece(batch, first, i))
                first = i
        requests.append(self._piece(batch, first, count))
        return requests

    def _piece(self, batch: Batch, first: int, last: int, part: tuple[int, int] | None = None) -> _Piece:
        """The request for some blocks, or for bytes `part[0]` to `part[1]` of one block and its header."""
        kind = IOKind.WRITE if batch.run.kind is JobKind.STORE else IOKind.READ
        pages, headers, header_bytes = self._pages.pages, self._pages.addresses, self._parts.header_bytes
        length = len(batch.payloads[first])
        buffers: list[memoryview] = []
        places: list[int] = []
        for i in range(first, last):
            page = batch.pages[i]
            buffers += pages[page], batch.payloads[i]
            places += headers[page], header_bytes, batch.addresses[i], length
        offset = batch.offsets[first]
        if part is not None:
            return _Piece(batch, first, last, kind, offset + part[0], span(buffers, *part), self._piece_done)
        return _Piece(batch, first, last, kind, offset, buffers, self._piece_done, places)

    def _piece_done(self, piece: IORequest, result: int) -> None:
        assert isinstance(piece, _Piece)
        error = self._parts.io.shortfall(piece, result)
        if error is None:
            return
        batch, first, last = piece.batch, piece.first, piece.last
        if batch.pieces:
            batch.errors[first] = batch.errors[first] or error
            batch.pieces[first] -= 1
            if batch.pieces[first]:
                return
            error = batch.errors[first]
        if error and last - first > 1:  # one bad place must not cost its neighbours
            self._parts.io.engine.submit([self._piece(batch, i, i + 1) for i in range(first, last)])
        elif error:
            self._parts.io.count_error(error)
            self._end(batch, first, last, error_outcome(error))
        elif piece.kind is IOKind.WRITE:
            self._record(batch, first, last)
            self._end(batch, first, last, STORED)
        else:
            self._check(piece)

    def _record(self, batch: Batch, first: int, last: int) -> None:
        """Note in the ledger what slots hold that were written."""
        ledger, these = self._parts.ledger, slice(first, last)
        places = zip(batch.regions[these], batch.cuts[these], batch.indices[these], strict=True)
        number = ledger.own_number(batch.run.job.epoch)
        ledger.hold_all(number, places, batch.keys[these], batch.generations[these])

    # -- verification --------------------------------------------------------------------------------------------

    def _check(self, piece: _Piece) -> None:
        """Verify what was read: on the loop if it is short, else on the threads."""
        if len(piece.batch.payloads[piece.first]) <= self._parts.checked_here_bytes:
            try:
                found = verify_blocks(self._checks(piece), keep_gil=True)
            except Exception:  # whatever it was: nothing was checked, so nothing was loaded
                self._unchecked([piece], errno.EIO)
            else:
                self._judged(piece, found)
            return
        if not self._unverified:
            self._parts.loop.call_soon(self._verify)
        self._unverified.append(piece)

    def _checks(self, piece: _Piece) -> list[Check]:
        batch, pages = piece.batch, self._pages.pages
        return [
            Check(pages[batch.pages[i]], batch.payloads[i], batch.fixed[i], batch.keys[i])
            for i in range(piece.first, piece.last)
        ]

    def _verify(self) -> None:
        pieces, self._unverified = self._unverified, []
        checks = [check for piece in pieces for check in self._checks(piece)]
        try:
            checked = self._parts.loop.run_in_executor(self._parts.threads, verify_blocks, checks)
        except OSError as error:  # not one thread is to be had: nothing was checked, so nothing was loaded
            self._unchecked(pieces, error.errno or errno.EAGAIN)
        else:
            checked.add_done_callback(partial(self._verified, pieces))

    def _unchecked(self, pieces: Sequence[_Piece], number: int) -> None:
        for piece in pieces:
            self._parts.counters["verify.failed"] += piece.last - piece.first
            self._end(piece.batch, piece.first, piece.last, failed(number))

    def _verified(self, pieces: Sequence[_Piece], checked: asyncio.Future[list[Mismatch | bytes]]) -> None:
        if checked.cancelled() or checked.exception() is not None:
            self._unchecked(pieces, errno.EIO)
            return
        found, at = checked.result(), 0
        for piece in pieces:
            count = piece.last - piece.first
            self._judged(piece, found[at : at + count])
            at += count

    def _judged(self, piece: _Piece, found: Sequence[Mismatch | bytes]) -> None:
        """End the blocks of a request by what verification found."""
        batch, first = piece.batch, piece.first
        for i, stated in enumerate(found, first):
            if isinstance(stated, Mismatch):
                self._parts.counters[f"mismatch.{stated}"] += 1
                self._parts.ledger.refuse(batch.regions[i], batch.indices[i], batch.generations[i])
                self._end(batch, first, i, LOADED)
                self._end(batch, i, i + 1, CORRUPT)
                first = i + 1
            else:
                self._parts.set_checksum(batch.rows[i], stated)
        self._end(batch, first, piece.last, LOADED)

    def _end(self, batch: Batch, first: int, last: int, outcome: BlockOutcome) -> None:
        """Let go of what blocks of a batch held, and report their outcome."""
        if first == last:
            return
        self._pages.release_all(batch.pages[first:last])
        batch.left -= last - first
        if not batch.left:
            self._running.discard(batch)
        batch.end(first, last, outcome)
        self._go_on_or_rest()


def split(total: int, alignment: int) -> list[tuple[int, int]]:
    """Cut a transfer into pieces of nearly one size, aligned, of at most REQUEST_BYTES each."""
    pieces = -(-total // REQUEST_BYTES)
    size = min(-(-total // pieces // alignment) * alignment, REQUEST_BYTES)
    return [(start, min(start + size, total)) for start in range(0, total, size)]
