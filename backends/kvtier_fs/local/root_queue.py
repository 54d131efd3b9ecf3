"""Moving blocks: shares of jobs become batches, batches become requests, completions become outcomes.

One `RootQueue` for each root. Nothing here waits: requests go to the I/O engine in batches, small payloads are verified
where they arrive and large ones on the root's threads, and one future for each job is all a caller waits for.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from kvtier.tier.block_envelope import SLOT_MAGIC, Check, Mismatch, verify_blocks
from kvtier.tier.checksum import seal
from kvtier.tier.job_run import JobRun, error_outcome
from kvtier.types.jobs import CORRUPT, LATE, LOADED, STORED, BlockOutcome, JobKind, failed
from kvtier_fs.io.contract import MAX_BUFFERS, HeaderPages, IOKind, IORequest
from kvtier_fs.io.full_transfer import REQUEST_BYTES, span, split
from kvtier_fs.local.block_batches import Batch, RootShare, TierSide
from kvtier_fs.local.root import Root

LOADS_BYTES = 32 << 20
LOADS_MAX = 1024
"""So much may be loaded at once: what a disk brings while another thread keeps the GIL for a switch interval (5 ms)."""
JOINED_BYTES = REQUEST_BYTES // 2
"""Neighbouring slots go in one request up to here: fewer calls for the kernel and the disk, still several in flight.
Once there are as many requests as the engine runs at once, they go in one up to REQUEST_BYTES."""
JOINED_MAX = MAX_BUFFERS // 2
REQUESTS_ALONE = 4
"""A batch with nothing else under way goes in so many, so that the disk works on some while others are verified."""
BATCH_BLOCKS = 64
STARTS_AT_ONCE = 16
"""While blocks are under way, others begin when so many can: each batch has a price of its own."""
_FAILED = failed(errno.EIO)
_LOOK_SECONDS = 0.01
_log = logging.getLogger("kvtier.fs")


class _Piece(IORequest):
    """A request that moves blocks `first` to `last - 1` of a batch, neighbours on the disk, or a part of one block."""

    __slots__ = ("batch", "first", "last")

    def __init__(
        self, batch: Batch, first: int, last: int, kind: IOKind, offset: int, buffers: list[memoryview],
        done: Callable[..., None], places: array[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(kind, batch.fd, offset, buffers, done, places)
        self.batch, self.first, self.last = batch, first, last


class RootQueue:
    """The blocks of one root on their way, loads before stores.

    At most `2 * depth + 32` stores have I/O running; loads have it or are checked up to LOADS_BYTES or LOADS_MAX, if
    that is more.
    """

    def __init__(self, root: Root, side: TierSide, io_depth: int, checked_here_bytes: int) -> None:
        """Payloads of up to `checked_here_bytes` are verified on the event loop, larger ones on the root's threads."""
        self.root, self.side = root, side
        self._io, self._engine = root.io, root.io.engine
        self._loop = asyncio.get_running_loop()
        self._header_bytes, self._checked_here_bytes = side.header_bytes, checked_here_bytes
        self._loads: deque[RootShare] = deque()
        self._stores: deque[RootShare] = deque()
        stores = 2 * io_depth + 32
        loads = min(LOADS_MAX, LOADS_BYTES // min(side.layout.slot_bytes))
        self._for_loads = max(0, loads - stores)
        self._pages = HeaderPages(stores + self._for_loads, self._header_bytes)
        self._unverified: list[_Piece] = []
        self._running: set[Batch] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._fill_called = self._fill_wanted = False
        self._shares: set[RootShare] = set()
        self.failed = False
        """True once a step raised. No block begins any more, and the slot map may be wrong."""
        self._engine.after_turn = self._fill_if_wanted

    def enqueue(self, share: RootShare) -> None:
        """Take a share of a job on, until `forget`; its blocks begin when there is room, the first before this returns.

        In a queue that has failed they end as failed.
        """
        self._shares.add(share)
        if self.failed:
            share.end(_FAILED)
            return
        (self._loads if share.run.kind is JobKind.LOAD else self._stores).append(share)
        if len(self._loads) + len(self._stores) == 1 and not self._fill_called:
            self._taking(self._fill)
        else:
            self._call_fill()

    def forget(self, share: RootShare) -> None:
        """The job of a share has ended."""
        self._shares.discard(share)

    def withdraw(self, outcome: BlockOutcome, run: JobRun | None = None) -> None:
        """End the blocks (of one job, or all) whose I/O has not begun; those under way go on to their end."""
        self._taking(self._withdraw, outcome, run)

    def _withdraw(self, outcome: BlockOutcome, run: JobRun | None) -> None:
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
            self._loop.call_soon(self._taking, self._on_fill_turn)

    def _on_fill_turn(self) -> None:
        self._fill_called = False
        self._fill_if_wanted()

    def _fill_if_wanted(self) -> None:
        """After completions: begin blocks if there was room for some."""
        if self._fill_wanted and not self.failed:
            self._fill()

    def _fill(self) -> None:
        """Begin blocks while there are header pages for them, for a while in each turn of the loop."""
        self._fill_wanted = False
        requests: list[IORequest] = []
        now = self.side.clock()
        until = now + self.root.budget.seconds
        try:
            while (queue := self._loads or self._stores) and now < until:
                room = len(self._pages.free) - (0 if self._loads else self._for_loads)
                if room <= 0:
                    break
                share = queue[0]
                deadline = share.run.job.deadline
                if deadline is not None and now > deadline:
                    queue.popleft().end(LATE)
                    continue
                batch = share.take(min(BATCH_BLOCKS, room)) if share.left else None
                if not share.left:
                    queue.popleft()
                if batch is not None:
                    self._begin(batch)
                    requests += self._requests(batch, self._engine.in_flight + len(requests))
                now = self.side.clock()
        finally:
            if requests:
                self._engine.submit(requests)
            self._continue_or_rest()

    def _continue_or_rest(self) -> None:
        if self._loads or self._stores:  # stores leave most of the header pages to loads
            room = len(self._pages.free) - (0 if self._loads else self._for_loads)
            if room >= STARTS_AT_ONCE or not self._running:
                self._call_fill()
        elif not self._running:
            self._idle.set()

    def _begin(self, batch: Batch) -> None:
        batch.pages = self._pages.acquire_all(batch.left)
        self._running.add(batch)
        self._idle.clear()
        if batch.run.kind is not JobKind.STORE:
            return
        self.root.slot_map.begin_all(batch.region, batch.indices)
        pages, size, digests = self._pages.pages, self._header_bytes, map(self.side.rows.checksum, batch.rows)
        for page, fixed, digest, key in zip(batch.pages, batch.fixed, digests, batch.keys, strict=True):
            pages[page][:] = seal(SLOT_MAGIC, fixed + digest + key, size)

    def _requests(self, batch: Batch, under_way: int) -> list[IORequest]:
        """The requests that move a batch: one for blocks that lie one behind the other, or several for each block.

        `under_way` is how many requests there are already.
        """
        total, count = self._header_bytes + len(batch.payloads[0]), batch.left
        if total > REQUEST_BYTES:
            pieces = split(total, self._header_bytes)
            batch.pieces, batch.errors = [len(pieces)] * count, [0] * count
            return [self._piece(batch, i, i + 1, part) for i in range(count) for part in pieces]
        if count == 1:
            return [self._piece(batch, 0, 1)]
        most = min(JOINED_MAX, (JOINED_BYTES if under_way < self._engine.depth else REQUEST_BYTES) // total)
        if not under_way and count * total > JOINED_BYTES:
            most = min(most, -(-count // REQUESTS_ALONE))
        if total != batch.slot_bytes:  # blocks do not reach to the next slot
            most = 1
        return [self._piece(batch, first, last) for first, last in neighbours(batch.indices, max(most, 1))]

    def _piece(self, batch: Batch, first: int, last: int, part: tuple[int, int] | None = None) -> _Piece:
        """The request for some blocks, or for bytes `part[0]` to `part[1]` of one block and its header."""
        kind = IOKind.WRITE if batch.run.kind is JobKind.STORE else IOKind.READ
        header_bytes, numbers, payloads = self._header_bytes, batch.pages[first:last], batch.payloads[first:last]
        pages, headers = self._pages.pages, self._pages.addresses
        buffers = payloads * 2
        buffers[0::2] = map(pages.__getitem__, numbers)
        buffers[1::2] = payloads
        offset = batch.start + batch.indices[first] * batch.slot_bytes
        if part is not None:
            return _Piece(batch, first, last, kind, offset + part[0], span(buffers, *part), self._piece_done)
        address, row_bytes = self.side.address, self.side.row_bytes
        places = array("Q", (0, header_bytes, 0, len(payloads[0]))) * len(payloads)
        places[0::4] = array("Q", map(headers.__getitem__, numbers))
        places[2::4] = array("Q", [address + row * row_bytes for row in batch.rows[first:last]])
        return _Piece(batch, first, last, kind, offset, buffers, self._piece_done, places)

    def _piece_done(self, piece: IORequest, result: int) -> None:
        try:
            if not self.failed:
                assert isinstance(piece, _Piece)
                self._piece_ended(piece, result)
        except Exception:
            self._fail()
            raise

    def _piece_ended(self, piece: _Piece, result: int) -> None:
        error = self._io.shortfall(piece, result) if result != piece.length else 0
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
            self._engine.submit([self._piece(batch, i, i + 1) for i in range(first, last)])
        elif error:
            self._io.count_error(error)
            self._end(batch, first, last, error_outcome(error))
        elif piece.kind is IOKind.WRITE:
            self._record(batch, first, last)
            self._end(batch, first, last, STORED)
        else:
            self._check(piece)

    def _record(self, batch: Batch, first: int, last: int) -> None:
        """Record in the slot map what the written slots hold."""
        slot_map, these = self.root.slot_map, slice(first, last)
        number = slot_map.number_of(slot_map.owners[slot_map.own].namespace, batch.run.job.epoch)
        format_of = batch.region, batch.region_generation
        slot_map.hold_all(number, format_of, batch.indices[these], batch.keys[these], batch.generations[these])

    # -- exceptions ----------------------------------------------------------------------------------------------

    def _taking(self, step: Callable[..., None], *args: Any) -> None:
        try:
            step(*args)
        except Exception:
            self._fail()
            _log.exception("%s: a step was left half done", self.root.path)

    def _fail(self) -> None:
        """A step raised: no block begins any more, and all jobs end as failed as soon as no I/O uses their rows."""
        self.failed = True
        self._idle.clear()
        self._end_failed()

    def _end_failed(self) -> None:
        if self._engine.in_flight:
            self._loop.call_later(_LOOK_SECONDS, self._end_failed)
            return
        for share in self._shares:
            share.run.end_all(share.number, share.positions, _FAILED)
        for each in (self._loads, self._stores, self._running, self._unverified):
            each.clear()
        self._idle.set()

    # -- verification --------------------------------------------------------------------------------------------

    def _check(self, piece: _Piece) -> None:
        """Verify what was read: on the loop if it is short, else on the threads."""
        if len(piece.batch.payloads[piece.first]) <= self._checked_here_bytes:
            try:
                found = verify_blocks(self._checks(piece), keep_gil=True)
            except Exception:  # whatever it was: nothing was checked, so nothing was loaded
                self._end_unchecked([piece], errno.EIO)
            else:
                self._end_judged(piece, found)
            return
        if not self._unverified:
            self._loop.call_soon(self._taking, self._verify)
        self._unverified.append(piece)

    def _checks(self, piece: _Piece) -> Iterator[Check]:
        batch, these = piece.batch, slice(piece.first, piece.last)
        headers = map(self._pages.pages.__getitem__, batch.pages[these])
        return zip(headers, batch.payloads[these], batch.fixed[these], batch.keys[these], strict=True)

    def _verify(self) -> None:
        pieces, self._unverified = self._unverified, []
        checks = [check for piece in pieces for check in self._checks(piece)]
        try:
            checked = self._loop.run_in_executor(self.root.pools.checks, verify_blocks, checks)
        except OSError as error:  # not one thread is to be had: nothing was checked, so nothing was loaded
            self._end_unchecked(pieces, error.errno or errno.EAGAIN)
        else:
            checked.add_done_callback(partial(self._taking, self._on_verified, pieces))

    def _end_unchecked(self, pieces: Sequence[_Piece], number: int) -> None:
        for piece in pieces:
            self.side.counters["verify.failed"] += piece.last - piece.first
            self._end(piece.batch, piece.first, piece.last, failed(number))

    def _on_verified(self, pieces: Sequence[_Piece], checked: asyncio.Future[list[Mismatch | bytes]]) -> None:
        if self.failed:
            return
        if checked.cancelled() or checked.exception() is not None:
            self._end_unchecked(pieces, errno.EIO)
            return
        found, at = checked.result(), 0
        for piece in pieces:
            count = piece.last - piece.first
            self._end_judged(piece, found[at : at + count])
            at += count

    def _end_judged(self, piece: _Piece, found: Sequence[Mismatch | bytes]) -> None:
        """End the blocks of a request by what verification found."""
        batch, first, rows, set_checksum = piece.batch, piece.first, piece.batch.rows, self.side.rows.set_checksum
        for i, stated in enumerate(found, first):
            if isinstance(stated, bytes):
                set_checksum(rows[i], stated)
                continue
            self.side.counters[f"mismatch.{stated}"] += 1
            self.root.slot_map.refuse(batch.region, batch.indices[i], batch.generations[i])
            self._end(batch, first, i, LOADED)
            self._end(batch, i, i + 1, CORRUPT)
            first = i + 1
        self._end(batch, first, piece.last, LOADED)

    def _end(self, batch: Batch, first: int, last: int, outcome: BlockOutcome) -> None:
        """Let go of what blocks of a batch held, and report their outcome."""
        if first == last:
            return
        self._pages.free += batch.pages[first:last]
        batch.left -= last - first
        if not batch.left:
            self._running.discard(batch)
        moved = len(batch.payloads[first]) if outcome.ok else 0
        batch.run.end_all(batch.group, batch.positions[first:last], outcome, moved)
        self._continue_or_rest()


def neighbours(indices: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """The beginnings and ends of runs of numbers that count up by one, each 1 to `most` long."""
    first, count = 0, len(indices)
    while first < count:
        last = min(first + most, count)
        run = range(indices[first], indices[first] + last - first)
        if indices[first:last] != list(run):
            last = next(i for i, number in enumerate(run, first) if indices[i] != number)
        yield first, last
        first = last
