"""What every victim does, whatever the layout: it opens, loads all there is, stores until it is killed, or closes."""

from __future__ import annotations

import asyncio
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np

from kvtier.testing.driver import content
from kvtier.tier.checksum import checksum
from kvtier.tier.contract import TierContext
from kvtier.types.jobs import BlockOutcome, JobKind, JobResult, RowGroup, TransferJob
from kvtier.types.keys import JobId, OffloadKey, key_group
from kvtier_fs.io.contract import IOEngine, IOKind, IORequest

from .shared_log import SharedLog, Word
from .world import STORE_ROWS, World

JUNK = 0xEE
_WORKERS = 2
_PACE_SECONDS = 0.03


class Target(Enum):
    """The step during which a victim is to be killed: the timer starts at its first I/O."""

    OPEN = "open"
    LOAD = "load"
    STORE = "store"
    RESET = "reset"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is meant to happen to a victim. `batches`: stores before it resets or closes. `late`: writes of the dead
    victim before it land while this one lives. `companion`: it lives at a slower pace beside others."""

    target: Target
    seed: int
    favourite: int
    batches: int
    late: bool = False
    companion: bool = False


class Noted(IOEngine):
    """An engine around a production one that notes on the log what is submitted and what has ended."""

    name = "noted"

    def __init__(self, inner: IOEngine, log: SharedLog, file_of: Callable[[int], int]) -> None:
        self._inner, self._log, self._file_of = inner, log, file_of
        self.submitted: Callable[[Sequence[IORequest]], None] = lambda requests: None

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight

    def submit(self, requests: Sequence[IORequest]) -> None:
        log = self._log
        for request in requests:
            number = -1
            if request.kind is IOKind.WRITE:
                number = log.write_begins(self._file_of(request.fd), request.offset, request.buffers)
            request.done = partial(self._ended, request.done, number)
        log.words[Word.SUBMITTED] += len(requests)
        self._inner.submit(requests)
        self.submitted(requests)

    def _ended(self, done: Callable[[IORequest, int], None], number: int, request: IORequest, result: int) -> None:
        request.done = done  # it may be submitted again
        self._log.words[Word.ENDED] += 1
        if number >= 0:
            self._log.write_ended(number, 1 if result == request.length else 2)
        done(request, result)

    async def close(self, timeout_seconds: float) -> int:
        return await self._inner.close(timeout_seconds)


class Life(ABC):
    """One victim's life. `signal` is a descriptor it writes a byte to when the timer is to start."""

    def __init__(self, world: World, log: SharedLog, plan: Plan, signal: int) -> None:
        self.world, self.log, self.plan = world, log, plan
        self.rng = random.Random(plan.seed)
        self.epoch = self.era = 0
        self._signal = signal
        self._signalled = False
        self._stop = asyncio.Event()
        self._jobs = 0
        self._batches = 0
        self._enough = asyncio.Event()
        self._storing = False

    async def run(self) -> None:
        """Live, until killed; returns only if it was to close, and could."""
        if self.plan.target is Target.OPEN:
            self.tell()
        await self.begin()
        self._storing = True
        work = [asyncio.create_task(self._work(number)) for number in range(_WORKERS)]
        if self.plan.target in (Target.RESET, Target.CLOSE):
            enough = asyncio.create_task(self._enough.wait())
            done, _ = await asyncio.wait((enough, *work), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self.plan.target is Target.RESET:
                self.tell()
                await self.raise_epoch()
            else:
                self._stop.set()
        await asyncio.gather(*work)
        if self.plan.target is Target.CLOSE:
            self.tell()
            await self.close()
            self.log.words[Word.CLOSED] = 1

    async def begin(self) -> None:
        """Open, and load everything that is there."""
        begun = time.monotonic_ns()
        await self.open()
        self.log.words[Word.OPEN_NS] = time.monotonic_ns() - begun
        self.log.words[Word.OPENED] = 1
        await self.load_all()
        self.log.words[Word.LOADED] = 1

    async def raise_epoch(self) -> None:
        """Reset, as the stack does."""
        self.log.words[Word.RESET_BEGUN] = epoch = self.epoch + 1
        # What is stored from here on is of the new epoch, as in the stack; what is in flight is not.
        self.epoch, self.era = epoch, self.world.next_era
        await self.reset(epoch)
        self.log.words[Word.RESET_DONE] = epoch

    def opened(self, epoch: int) -> None:
        """The tier is open; `epoch` is what it says."""
        self.epoch = self.log.words[Word.EPOCH] = epoch
        self.era = self.world.eras[epoch]

    def tell(self) -> None:
        """The timer may start."""
        if not self._signalled:
            self._signalled = True
            os.write(self._signal, b".")

    def noted(self, engine: IOEngine, file_of: Callable[[int], int]) -> Noted:
        """The engine to use instead of another."""
        noted = Noted(engine, self.log, file_of)
        noted.submitted = self._submitted
        return noted

    def _submitted(self, requests: Sequence[IORequest]) -> None:
        if self._signalled or not requests:
            return
        writing = self._storing and any(request.kind is IOKind.WRITE for request in requests)
        loading = bool(self.log.words[Word.OPENED])
        if {Target.STORE: writing, Target.LOAD: loading}.get(self.plan.target, False):
            self.tell()

    def context(self) -> TierContext:
        """What the tier is opened with."""
        return TierContext("fs", self.world.geometry, self.world.namespace, time.monotonic, rows=self.log.rows)

    # -- rows and jobs -------------------------------------------------------------------------------------------

    def fill(self, row: int, number: int, tag: int) -> None:
        """Put a block and its checksum into a row; what a row holds beyond its block is junk."""
        length = self.world.block_bytes(number)
        view = self.log.rows.view[row]
        view[:length] = content(self.world.keys[number], tag, length)
        self.log.rows.set_checksum(row, checksum(view[:length].data))

    def job(self, kind: JobKind, blocks: Sequence[tuple[int, int, int, int]]) -> TransferJob:
        """A job over (key number, row, slot, generation); slots -1 where the tier has none."""
        self._jobs += 1
        groups: dict[int, list[tuple[int, int, int, int]]] = {}
        for block in blocks:
            groups.setdefault(key_group(self.world.keys[block[0]]), []).append(block)
        transfers = []
        for members in groups.values():
            names = tuple(self.world.keys[number] for number, *_ in members)
            owned = members[0][2] >= 0
            slots = [slot for _, _, slot, _ in members] if owned else []
            generations = [generation for *_, generation in members] if owned else []
            rows = [row for _, row, *_ in members]
            transfers.append(RowGroup(key_group(names[0]), names, rows, slots, generations))
        return TransferJob(JobId(self._jobs), kind, tuple(transfers), None, self.epoch)

    def outcomes(self, job: TransferJob, result: JobResult) -> dict[OffloadKey, BlockOutcome]:
        """The outcome of each key of a job."""
        pairs = zip(job.groups, result.outcomes, strict=True)
        return {key: one for group, ended in pairs for key, one in zip(group.keys, ended, strict=True)}

    def check_row(self, row: int, number: int, tag: int) -> None:
        """A block that counts as loaded while this victim lives must be the right one."""
        length = self.world.block_bytes(number)
        self.log.add(Word.CHECKED)
        if not np.array_equal(self.log.rows.view[row, :length], content(self.world.keys[number], tag, length)):
            self.log.add(Word.WRONG)
            self.log.say(f"wrong bytes in a living victim under {self.world.keys[number].hex()} tag {tag:x}")

    # -- storing -------------------------------------------------------------------------------------------------

    async def _work(self, worker: int) -> None:
        """Store batch after batch, and load some of it back, until the log is full or it is time to stop."""
        each = STORE_ROWS // _WORKERS
        first = self.log.shape.load_rows + worker * each
        rows = range(first, first + each)
        largest = each * (max(self.world.shape.block_bytes) + 8192)
        while not self._stop.is_set() and self.log.room_for(largest):
            await self.batch(rows[: self.rng.randint(1, each)])
            self._batches += 1
            if self._batches >= self.plan.batches:
                self._enough.set()
            if self.rng.random() < (0.5 if self.plan.late else 0.15):
                await self.load_some(rows[:4])
            await asyncio.sleep(self.rng.random() * _PACE_SECONDS if self.plan.companion else 0)
        if not self._stop.is_set():
            self.log.words[Word.IDLE] = 1
            self._enough.set()
            await self._stop.wait()

    def pick_group(self) -> int:
        """The group of the next batch: mostly one that this life prefers, so that regions of others grow cold."""
        return self.plan.favourite if self.rng.random() < 0.7 else self.rng.randrange(self.world.geometry.num_groups)

    @abstractmethod
    async def open(self) -> None:
        """Open the tier."""

    @abstractmethod
    async def load_all(self) -> None:
        """Load everything that was found, each block into a row of its own, and note the outcomes."""

    @abstractmethod
    async def batch(self, rows: Sequence[int]) -> None:
        """Store one batch from these rows."""

    @abstractmethod
    async def load_some(self, rows: Sequence[int]) -> None:
        """Load some blocks that are there into these rows and check them."""

    @abstractmethod
    async def reset(self, epoch: int) -> None:
        """Raise the epoch."""

    @abstractmethod
    async def close(self) -> None:
        """Close in order."""
