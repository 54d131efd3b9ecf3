"""A process that shares the CPU region dies with reads into it in flight; rows that were ready stay as they are."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from kvtier.testing.driver import content
from kvtier.tier.contract import Opened, TierContext
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import JobKind, RegionFormat, RowGroup, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey, make_key
from kvtier.types.namespace import Namespace
from kvtier_cpu import RegionSpec, SharedRegion, Sharing, open_region
from kvtier_cpu.region.rendezvous import Names
from kvtier_fs import FSBackend, FSOptions
from kvtier_fs.io.uring import probe_uring

from ..attack import Tally
from .shared_log import LogShape, SharedLog
from .slow_disk import SlowDisk, slow_disk
from .victim import Sign, Signals, Victim

BLOCK_BYTES = 60 << 10
BLOCKS = 48
ROWS = 48
STAMPED_ROWS = 16
_BATCH = 6
_READS_EACH_SECOND = 60
_KILL_SECONDS = 0.06
_BEGIN_SECONDS = 5.0
_WORKERS, _FOR_EVER = 4, 1 << 30
_QUIET_SECONDS = 0.04
_UNKNOWN, _FILLING, _READY = range(3)


class Claims:
    """What the coordinator says of each row, in memory that outlives it: nothing, being filled with, or ready with.

    The word behind them is the watching process's: the disk is slow now, go on.
    """

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, (ROWS + 1) * 24)).cast("Q")

    @property
    def begun(self) -> bool:
        return self._words[3 * ROWS] == 1

    def begin(self) -> None:
        """Let the coordinator load."""
        self._words[3 * ROWS] = 1

    def say(self, row: int, state: int, block: int = 0, generation: int = 0) -> None:
        """A record is invalid while it is being changed."""
        at = 3 * row
        self._words[at] = _UNKNOWN
        self._words[at + 1], self._words[at + 2] = block, generation
        self._words[at] = state

    def rows(self, state: int) -> dict[int, tuple[int, int]]:
        """The rows in a state, with the block and the generation they have or are to have."""
        words = self._words
        return {
            row: (words[3 * row + 1], words[3 * row + 2]) for row in range(ROWS) if words[3 * row] == state
        }  # fmt: skip

    def clear(self) -> None:
        """Forget all rows."""
        for row in range(ROWS):
            self.say(row, _UNKNOWN)
        self._words[3 * ROWS] = 0


class Engine:
    """What both processes know: the layout, the blocks, the region they meet in, the tier's options."""

    def __init__(self, root: Path, seed: int) -> None:
        group = GroupLayout((TensorRef(0, BLOCK_BYTES),))
        self.geometry = Geometry(KVLayout((group,)), mmap.PAGESIZE)
        self.namespace = Namespace(self.geometry.layout, tag="region")
        self.keys = [make_key(f"{seed} {number}".encode(), 0) for number in range(10 * BLOCKS)]
        self.options = FSOptions.model_validate(
            {"roots": [str(root)], "capacity": 16 << 20, "min_free_bytes": 0, "io_engine": "io_uring", "io_depth": 16,
             "direct": "required", "io_threads": 2}
        )  # fmt: skip

    def content(self, block: int, generation: int) -> np.ndarray:  # type: ignore[type-arg]
        return content(self.keys[block], generation, BLOCK_BYTES)

    def engine_id(self, pid: int, number: int) -> str:
        """The name under which the two processes of a round meet; `pid` is the one's that watches."""
        return f"kill {pid} {number}"

    def region(self, participant: int, number: int) -> SharedRegion:
        """The region of one round, opened by the coordinator (0) or by the process that watches (1)."""
        spec = RegionSpec(
            self.geometry, ROWS, self.namespace.digest(), serves=(0,) if participant else (), sharing=Sharing.NAMED,
            engine_id=self.engine_id(os.getpid() if participant else os.getppid(), number), participants=2,
            participant=participant, huge_pages=False, populate=False, deadline_seconds=20.0,
        )  # fmt: skip
        return open_region(spec)

    def job(
        self, kind: JobKind, blocks: Sequence[tuple[OffloadKey, int, int, int]], *formats: RegionFormat
    ) -> TransferJob:
        """A job over (key, row, slot, generation)."""
        keys, rows, slots, generations = zip(*blocks, strict=True)
        group = RowGroup(GroupIndex(0), keys, rows, slots, generations)
        return TransferJob(JobId(1), kind, (group,), None, 0, formats)

    async def open(self, region: SharedRegion) -> tuple[FSBackend, Opened]:
        backend = FSBackend(self.options)
        context = TierContext("fs", self.geometry, self.namespace, time.monotonic, rows=region)
        return backend, await backend.open(context)


async def fill(engine: Engine, number: int) -> None:
    """Store the blocks that the rounds load, generation = block + 1."""
    region = await asyncio.to_thread(engine.region, 0, number)
    backend, opened = await engine.open(region)
    assert opened.space is not None
    per_region = opened.space.region_bytes // opened.space.slot_bytes[0]
    for first in range(0, BLOCKS, _BATCH):
        blocks, formats = [], {}
        for row, block in enumerate(range(first, first + _BATCH)):
            at, index = divmod(block, per_region)
            formats[at] = RegionFormat(at, opened.space.slot_bytes[0], 1)
            put(engine, region, row, block, block + 1)
            blocks.append((engine.keys[block], row, at * opened.space.slots_per_region + index, block + 1))
        result = await backend.store(engine.job(JobKind.STORE, blocks, *formats.values()))
        assert result.ok, result
    await backend.close()
    region.close()


def put(engine: Engine, region: SharedRegion, row: int, block: int, generation: int) -> None:
    """Fill a row as a worker would from its GPU."""
    region.view[row] = engine.content(block, generation)
    region.set_checksum(row, xxhash.xxh3_128_digest(region.view[row].data))


class Coordinator:
    """The process that dies: it loads from the slow disk into rows, cancels some of it, and uses rows again at once."""

    def __init__(self, engine: Engine, claims: Claims, signals: Signals, number: int, seed: int) -> None:
        self.engine, self.claims, self._signals, self._number = engine, claims, signals, number
        self.rng = random.Random(seed)

    async def run(self) -> None:
        region = await asyncio.to_thread(self.engine.region, 0, self._number)
        while probe_uring():  # noqa: ASYNC110 - another row of the suite turns io_uring off on this machine for a while
            await asyncio.sleep(0.1)
        backend, opened = await self.engine.open(region)
        found = opened.recovered
        places = zip(found.keys, found.slots.tolist(), found.generations.tolist(), strict=True)
        self._stored = [(self.engine.keys.index(key), slot, generation) for key, slot, generation in places]
        free = list(range(STAMPED_ROWS, ROWS))
        self.rng.shuffle(free)
        shares = [free[at::_WORKERS] for at in range(_WORKERS)]
        await asyncio.gather(*(self._work(backend, region, rows, 2) for rows in shares))
        os.write(self._signals.write, b".")
        while not self.claims.begun:  # noqa: ASYNC110 - another process sets it
            await asyncio.sleep(0.0005)
        await asyncio.gather(*(self._work(backend, region, rows, _FOR_EVER) for rows in shares))

    async def _work(self, backend: FSBackend, region: SharedRegion, rows: list[int], times: int) -> None:
        """Load into some of these rows and fill the others, so many times."""
        for _ in range(times):
            self.rng.shuffle(rows)
            chosen = rows[:_BATCH]
            blocks = self.rng.sample(self._stored, len(chosen))
            for row, (block, _, generation) in zip(chosen, blocks, strict=True):
                self.claims.say(row, _FILLING, block, generation)
            named = [(self.engine.keys[block], row, slot, generation)
                     for row, (block, slot, generation) in zip(chosen, blocks, strict=True)]  # fmt: skip
            load = asyncio.create_task(backend.load(self.engine.job(JobKind.LOAD, named)))
            if self.rng.random() < 0.4:
                await asyncio.sleep(self.rng.random() * 0.01)
                load.cancel()
            outcomes = None
            with suppress(asyncio.CancelledError):
                outcomes = (await load).outcomes[0]
            for position, (row, (block, _, generation)) in enumerate(zip(chosen, blocks, strict=True)):
                if outcomes is not None and outcomes[position].ok:
                    self.claims.say(row, _READY, block, generation)
                else:  # the call has returned, so the row is ours again: it is filled with something else
                    other = self.rng.randrange(BLOCKS, len(self.engine.keys))
                    self.claims.say(row, _UNKNOWN)
                    put(self.engine, region, row, other, 1)
                    self.claims.say(row, _READY, other, 1)


class RegionKills:
    """The row "kill -9 of one process sharing the region". This process is the other one."""

    def __init__(self, folder: Path, seed: int, tally: Tally) -> None:
        self.folder, self.tally, self._seed = folder, tally, seed
        self._rng = random.Random(f"region {seed}")
        self._signals, self._claims = Signals(), Claims()
        self._log = SharedLog(LogShape(1, 1, mmap.PAGESIZE, 1, 1, mmap.PAGESIZE))

    def run(self, rounds: int) -> None:
        """So many coordinators die."""
        files = len(os.listdir("/proc/self/fd"))
        with slow_disk(self.folder) as disk:
            engine = Engine(disk.folder / "root", self._seed)
            self._fill(engine)
            for number in range(1, rounds + 1):
                self._round(disk, engine, number)
            shutil.rmtree(disk.folder / "root")
        left = len(os.listdir("/proc/self/fd")) - files
        self.tally.leaks += max(0, left)
        self.tally.expect(left <= 0, f"{left} descriptors are left")
        self._signals.close()

    def _fill(self, engine: Engine) -> None:
        victim = Victim(partial(fill, engine, 0), self._log, self._signals)
        region = engine.region(1, 0)
        victim.wait_end()
        victim.reap()
        region.close()
        if victim.status:
            raise RuntimeError(self._log.text)

    def _round(self, disk: SlowDisk, engine: Engine, number: int) -> None:
        tally, claims = self.tally, self._claims
        claims.clear()
        coordinator = Coordinator(engine, claims, self._signals, number, self._rng.getrandbits(48))
        victim = Victim(coordinator.run, self._log, self._signals)
        disk.take_in(victim.pid)
        region = engine.region(1, number)
        self._stamp(engine, region)
        sign = victim.wait()
        disk.slow_down(_READS_EACH_SECOND)
        claims.begin()
        until = time.perf_counter() + _BEGIN_SECONDS
        while not claims.rows(_FILLING) and time.perf_counter() < until:
            time.sleep(0.0005)
        time.sleep(self._rng.uniform(0.0, _KILL_SECONDS))
        os.kill(victim.pid, signal.SIGKILL)
        hangs = sign is Sign.NOTHING or victim.wait_end() is Sign.NOTHING
        killed = victim.reap()
        before = self._filling(engine, region)  # of a process that is gone
        disk.let_go()
        tally.hangs += hangs
        tally.expect(killed and not hangs, f"a coordinator was not killed: {self._log.text}")
        tally.iterations += killed
        self._watch(engine, region, before)
        region.close()
        names = Names.of("/dev/shm", engine.engine_id(os.getpid(), number))
        left = [path for path in (names.control, names.rows) if os.path.lexists(path)]
        tally.leaks += len(left)
        tally.expect(not left, f"{left} are left")

    def _stamp(self, engine: Engine, region: SharedRegion) -> None:
        """Fill rows as this process's worker does, and say so; they are ready, and not the coordinator's."""
        for row in range(STAMPED_ROWS):
            put(engine, region, row, BLOCKS + row, row)
            self._claims.say(row, _READY, BLOCKS + row, row)
        rows = int_array(range(STAMPED_ROWS))
        region.stamp(0, rows, rows)

    def _filling(self, engine: Engine, region: SharedRegion) -> dict[int, tuple[int, int]]:
        """The rows that were being filled and do not hold what they are to hold yet."""
        filling = self._claims.rows(_FILLING)
        return {row: what for row, what in filling.items() if not self._holds(engine, region, row, what)}

    def _holds(self, engine: Engine, region: SharedRegion, row: int, what: tuple[int, int]) -> bool:
        return bool(np.array_equal(region.view[row], engine.content(*what)))

    def _watch(self, engine: Engine, region: SharedRegion, before: dict[int, tuple[int, int]]) -> None:
        """Wait for the dead process's reads to land; what was ready is as it was, before and after."""
        tally, ready = self.tally, self._claims.rows(_READY)
        wrong = [row for row, what in ready.items() if not self._holds(engine, region, row, what)]
        missing, until = dict(before), time.perf_counter() + _QUIET_SECONDS
        while missing and time.perf_counter() < until:
            late = {row: what for row, what in missing.items() if not self._holds(engine, region, row, what)}
            if len(late) < len(missing):
                missing, until = late, time.perf_counter() + _QUIET_SECONDS
            time.sleep(0.002)
        wrong += [row for row, what in ready.items() if not self._holds(engine, region, row, what)]
        rows = int_array(range(STAMPED_ROWS))
        tally.expect(bool(region.stamped(rows, rows).all()), "a stamp changed after the death of the coordinator")
        tally.wrong_bytes += len(wrong)
        tally.expect(not wrong, f"ready rows {sorted(set(wrong))} changed after the death of the coordinator")
        landed = len(before) - len(missing)
        tally.notes["ready rows compared"] += len(ready)
        tally.notes["rows that were to be filled at the death"] += len(before)
        tally.notes["reads that landed after the death"] += landed
        tally.notes["kills with I/O in flight"] += bool(before)
        tally.notes["deaths with reads landing afterwards"] += bool(landed)
