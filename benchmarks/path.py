"""How much Python a block passes through: calls, source files and hand-overs between threads of each trip.

    python -m benchmarks.path [--blocks 1,64] [--repetitions 9] [--io-engine threads] [--json FILE] [--quick]

A call is a `call` event of `sys.setprofile`, in any thread, of a frame whose code lies in a file of kvtier's packages.
Besides functions that is every comprehension, every step of a generator and every resumption of a coroutine. The rest
is not counted: C functions, asyncio, and what dataclasses generate. Files are the distinct files of the counted calls.
A hand-over is a counted call in another thread than the counted call before it.

The trips, each of one job with one block and with a batch of blocks, of one group with one tensor on the CPU:

- store to disk: a `TierStack` stores blocks, until nothing is on its way below any more (`drain`). Rows and slots are
  free: nothing is evicted.
- load from a row: a `TierStack` loads blocks that are in rows.
- load from disk: the blocks are on disk alone and the rows are full, so each is promoted to the row of another block
  (which the disk has too) and copied to the GPU.
- lookup in a row, lookup on disk: one `lookup` of a `TierStack`, which answers from memory.
- store through a stack process: an engine's thread stores blocks into rows that are lent to it, until they are on disk.
  Counted in the threads of the stack process, which is in this process here, and in the engine's.
- a request, with `lru` and with `reuse`: one that continues a prompt of as many blocks, on a `TierStack`: `request`,
  `lookup`, the load of what is there, the store of as many new blocks, `end`, `drain`.

Stores and loads are counted from making the job (`GPUGroup` and `stack.job`; its `GPURuns` are made before) to
asking the result whether it is `ok`. Nothing polls: the stack's loop waits for events. Each trip is warmed up, so what
is made lazily is there; garbage collection is off while calls are counted.

What varies is how often the work was interrupted: the fs tier gives its loop back after 0.25 ms, and each further turn
is about 11 calls. A profiled run is slower and more often interrupted: the minimum is the figure to compare. For a
batch it still depends on the machine. Compare figures of one `--io-engine` only. Every byte that is loaded is compared.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import click
import torch

from benchmarks.options import JSON_FILE, QUICK
from benchmarks.report import Report, median, table
from kvtier.aio.loop_thread import LoopThread
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.config import open_stack, parse_stack, stack_parts
from kvtier.config.load import StackConfig
from kvtier.engines.process_stack import ProcessStack
from kvtier.service.server import StackServer
from kvtier.stack import TierStack
from kvtier.tier.contract import LookupResult
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId, make_key
from kvtier.types.namespace import Namespace

PACKAGES = ("kvtier", "kvtier_gpu", "kvtier_cpu", "kvtier_fs")
BLOCK_TOKENS = 16
FILLER_BLOCKS = 64
ROWS_MIN = 256
PAUSE_SECONDS = 0.01
WRITTEN_SECONDS = 0.1
"""Time in which a block is on disk that is in a row: rows are gathered for some milliseconds."""
DRAIN_SECONDS = 30.0
FIGURES = ("calls", "files", "hand_overs")


# -- counting ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Count:
    """What one trip took."""

    calls: int
    files: int
    hand_overs: int


class Counter:
    """Counts the calls of all threads that start while it is installed, and of the one that installs it."""

    def __init__(self) -> None:
        self.counts: list[Count] = []
        self._on = False
        self._seen: list[tuple[int, CodeType]] = []
        specs = [spec for name in PACKAGES if (spec := find_spec(name)) is not None]
        folders = [place for spec in specs for place in spec.submodule_search_locations or ()]
        self._folders = tuple(f"{folder.rstrip('/')}/" for folder in folders)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Open a stack within: its threads are then counted too."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        # As little as possible, for the clock interrupts the work: files are looked at afterwards.
        if event == "call" and self._on:
            self._seen.append((threading.get_ident(), frame.f_code))

    @contextmanager
    def trip(self) -> Iterator[None]:
        """Count what happens within as one trip."""
        gc.disable()
        self._seen.clear()
        self._on = True
        try:
            yield
        finally:
            self._on = False
            gc.enable()
        self.counts.append(self.count_without(()))

    def count_without(self, threads: Collection[int | None]) -> Count:
        """The last trip, but for these threads."""
        seen = [(thread, code.co_filename) for thread, code in self._seen if thread not in threads]
        ours = [(thread, file) for thread, file in seen if file.startswith(self._folders)]
        changes = sum(one[0] != other[0] for one, other in pairwise(ours))
        return Count(len(ours), len({file for _, file in ours}), changes)

    def take(self, what: str, blocks: int, warm: int) -> dict[str, object]:
        """The figures of one trip as a flat row, without those of the warm-up."""
        counts, self.counts = self.counts[warm:], []
        return self.row(what, blocks, counts)

    @staticmethod
    def row(what: str, blocks: int, counts: Sequence[Count]) -> dict[str, object]:
        """The figures of some trips as a flat row."""
        row: dict[str, object] = {"what": what, "blocks": blocks, "repetitions": len(counts)}
        for name in FIGURES:
            values = [getattr(count, name) for count in counts]
            row |= {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
        return row


# -- the stacks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Size:
    """What is moved and how often."""

    blocks: int
    block_bytes: int
    warm: int
    repetitions: int
    io_engine: str

    @property
    def rounds(self) -> int:
        return self.warm + self.repetitions

    @property
    def rows(self) -> int:
        """Rows for the blocks of all rounds, without any eviction."""
        return max(ROWS_MIN, self.rounds * self.blocks)


class Setting:
    """A stack's description, the GPU blocks, and the keys of each round. The first blocks are for stores, the last for
    loads, the ones between for what fills the rows."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size = size
        count = size.blocks
        self.blocks = torch.zeros((2 * count + FILLER_BLOCKS, size.block_bytes), dtype=torch.uint8)
        self.source, self.target = self.blocks[:count], self.blocks[-count:]
        self.source_runs = GPURuns.whole(list(range(count)))
        self.target_runs = GPURuns.whole(list(range(count + FILLER_BLOCKS, 2 * count + FILLER_BLOCKS)))
        self.filler_runs = GPURuns.whole(list(range(count, count + FILLER_BLOCKS)))
        self.rounds = [_keys(f"round {number}", count) for number in range(size.rounds)]
        random = torch.Generator().manual_seed(1)
        shape = (size.rounds, count, size.block_bytes)
        self.content = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        self.fillers = [_keys(f"filler {at}", FILLER_BLOCKS) for at in range(0, size.rows, FILLER_BLOCKS)]
        self.folder = folder

    def config(self, policy: str = "lru") -> StackConfig:
        rows, block_bytes = self.size.rows, self.size.block_bytes
        return parse_stack(
            f"tiers:\n  - type: gpu\n  - {{type: cpu, cpu_bytes_to_use: {rows * block_bytes}, policy: {policy}}}\n"
            f"  - {{type: fs, roots: [{self.folder}], capacity: {(64 << 20) + 4 * rows * (block_bytes + 8192)}, "
            f"min_free_bytes: 0, io_engine: {self.size.io_engine}}}\n"
        )

    def namespace(self) -> Namespace:
        page = TensorRef(0, self.size.block_bytes)
        return Namespace(KVLayout((GroupLayout((page,), BLOCK_TOKENS),)), model="benchmark")

    def caches(self) -> list[torch.Tensor]:
        return [self.blocks]


def _keys(name: str, count: int) -> tuple[OffloadKey, ...]:
    return tuple(make_key(f"{name}, block {i}".encode(), 0) for i in range(count))


def _check_place(stack: TierStack, keys: Sequence[OffloadKey], tier: str) -> None:
    places = stack.locate(keys)
    if places != [tier] * len(keys):
        raise AssertionError(f"blocks should be in tier {tier}, they are in {sorted(set(map(str, places)))}")


# -- the trips of a TierStack ------------------------------------------------------------------------------------


class Trips:
    """Stores, loads and lookups on an open stack, one at a time, each counted."""

    def __init__(self, stack: TierStack, setting: Setting, counter: Counter) -> None:
        self._stack = stack
        self._setting = setting
        self._counter = counter

    async def all(self) -> list[dict[str, object]]:
        size, rows = self._setting.size, []
        rounds = range(size.rounds)
        for number in rounds:
            await self._store(number)
        rows.append(self._counter.take("store to disk", size.blocks, size.warm))
        for number in rounds:
            await self._load(number, "cpu")
        rows.append(self._counter.take("load from a row", size.blocks, size.warm))
        rows.append(await self._lookups("in a row", LookupResult.HIT))
        for keys in self._setting.fillers:
            await self._move(JobKind.STORE, keys, self._setting.filler_runs)
        rows.append(await self._lookups("on disk", LookupResult.HIT_PENDING))
        for number in rounds:
            await self._load(number, "fs")
        rows.append(self._counter.take("load from disk", size.blocks, size.warm))
        return rows

    async def _store(self, number: int) -> None:
        setting = self._setting
        setting.source.copy_(setting.content[number])
        await asyncio.sleep(PAUSE_SECONDS)
        with self._counter.trip():
            await self._move(JobKind.STORE, setting.rounds[number], setting.source_runs)

    async def _load(self, number: int, tier: str) -> None:
        setting = self._setting
        setting.target.zero_()
        _check_place(self._stack, setting.rounds[number], tier)
        await asyncio.sleep(PAUSE_SECONDS)
        with self._counter.trip():
            await self._move(JobKind.LOAD, setting.rounds[number], setting.target_runs)
        if not torch.equal(setting.target, setting.content[number]):
            raise AssertionError(f"a load from {tier} brought wrong bytes")

    async def _lookups(self, where: str, expected: LookupResult) -> dict[str, object]:
        size, keys = self._setting.size, self._setting.rounds[0]
        for _ in range(size.rounds):
            with self._counter.trip():
                found = await self._stack.lookup(keys)
            if set(found) != {expected}:
                raise AssertionError(f"a lookup found {set(found)}, not {expected}")
        return self._counter.take(f"lookup {where}", size.blocks, size.warm)

    async def _move(self, kind: JobKind, keys: tuple[OffloadKey, ...], runs: GPURuns) -> None:
        job = self._stack.job(kind, [GPUGroup(GroupIndex(0), keys, runs)])
        result = await self._stack.run(job)
        if kind is JobKind.STORE and not await self._stack.drain(DRAIN_SECONDS):
            raise AssertionError("blocks did not reach the disk")
        if not result.ok:
            raise AssertionError(f"a {kind} did not move every block: {result.outcomes}")


async def moves(setting: Setting, counter: Counter) -> list[dict[str, object]]:
    """The rows of stores, loads and lookups."""
    async with open_stack(setting.config(), setting.namespace(), setting.caches()) as stack:
        return await Trips(stack, setting, counter).all()


async def requests(setting: Setting, counter: Counter, policy: str) -> dict[str, object]:
    """The row of a request that continues an earlier one."""
    size, said = setting.size, setting.rounds[0]
    async with open_stack(setting.config(policy), setting.namespace(), setting.caches()) as stack:
        await stack.run(stack.job(JobKind.STORE, [GPUGroup(GroupIndex(0), said, setting.source_runs)]))
        for number in range(size.rounds):
            new = _keys(f"turn {number}", size.blocks)
            await asyncio.sleep(PAUSE_SECONDS)
            with counter.trip():
                request = stack.request(RequestId(f"request {number}"), said + new)
                found = await stack.lookup(said + new)
                load = stack.job(JobKind.LOAD, [GPUGroup(GroupIndex(0), said, setting.target_runs)])
                store = stack.job(JobKind.STORE, [GPUGroup(GroupIndex(0), new, setting.source_runs)])
                results = [await stack.run(load, request), await stack.run(store)]
                request.end(1)
                drained = await stack.drain(DRAIN_SECONDS)
            if not drained or not all(result.ok for result in results) or found[0] is not LookupResult.HIT:
                raise AssertionError(f"a request found {set(found)} and moved {[one.outcomes for one in results]}")
    return counter.take(f"a request, {policy}", size.blocks, size.warm)


# -- the trip through a stack process ----------------------------------------------------------------------------


@contextmanager
def stack_process(setting: Setting, path: str) -> Iterator[ProcessStack]:
    """An engine, and the stack process that serves it, in a thread of this one."""
    config, namespace = setting.config(), setting.namespace()
    server = StackServer(lambda given: stack_parts(config, given), path)
    thread = LoopThread("stack process", "benchmark")
    thread.open()
    try:
        thread.run(server.__aenter__, DRAIN_SECONDS)
        try:
            with ProcessStack(stack_parts(config, namespace, setting.caches()), lambda: path) as engine:
                yield engine
        finally:
            thread.run(server.close, DRAIN_SECONDS)
    finally:
        thread.close()


def process_stores(setting: Setting, counter: Counter, path: str) -> list[dict[str, object]]:
    """The rows of stores through a stack process, on its side and on the engine's. A request keeps rows lent."""
    size, counts = setting.size, list[tuple[Count, Count]]()
    with stack_process(setting, path) as engine, engine.request(RequestId("running")):
        mine = threading.get_ident()
        names = ("kvtier-worker", "kvtier-copy")
        engines = {each.ident for each in threading.enumerate() if each.name.startswith(names)} | {mine}
        for keys, content in zip(setting.rounds, setting.content, strict=True):
            setting.source.copy_(content)
            engine.step()
            time.sleep(WRITTEN_SECONDS)
            with counter.trip():
                engine.submit_store(keys, gpu_blocks=range(size.blocks))
                while not (ended := engine.step()):
                    engine.wait(DRAIN_SECONDS)
                time.sleep(WRITTEN_SECONDS)
            if not ended[0].ok:
                raise AssertionError(f"a store did not move every block: {ended[0].outcomes}")
            others = {each.ident for each in threading.enumerate()} - {mine}
            counts.append((counter.count_without(engines), counter.count_without(others)))
        if (written := engine.stats().tiers["fs"].stored) != size.rounds * size.blocks:
            raise AssertionError(f"{written} of {size.rounds * size.blocks} blocks reached the disk")
    counter.counts.clear()
    sides = zip(("stack process", "engine's thread"), zip(*counts[size.warm :], strict=True), strict=True)
    return [counter.row(f"store, {side}", size.blocks, each) for side, each in sides]


# -- both --------------------------------------------------------------------------------------------------------


def measure(size: Size, folder: Path) -> list[dict[str, object]]:
    """The rows of one number of blocks."""
    counter = Counter()
    with counter.installed():
        rows = asyncio.run(moves(Setting(size, folder / "moves"), counter))
        rows += process_stores(Setting(size, folder / "process"), counter, str(folder / "socket"))
        return rows + [asyncio.run(requests(Setting(size, folder / name), counter, name)) for name in ("lru", "reuse")]


def _cell(row: dict[str, object], name: str) -> str:
    return f"{row[name]:g} ({row[f'{name}_min']}-{row[f'{name}_max']})"


@click.command()
@click.option("--blocks", default="1,64", show_default=True, help="Blocks of a job.")
@click.option("--block-kib", default=16, show_default=True, help="KiB of a block.")
@click.option("--repetitions", default=9, show_default=True, help="Trips that are counted.")
@click.option("--warm", default=5, show_default=True, help="Trips before those.")
@click.option("--io-engine", type=click.Choice(["threads", "io_uring"]), default="threads", show_default=True)
@click.option("--folder", default=None, help="Where the fs tier's root is made; a temporary folder by default.")
@QUICK
@JSON_FILE
def main(
    blocks: str,
    block_kib: int,
    repetitions: int,
    warm: int,
    io_engine: str,
    folder: str | None,
    quick: bool,
    json_file: Path | None,
) -> None:
    """Count the calls of each trip of a block."""
    wanted = [int(count) for count in blocks.split(",")]
    if quick:
        wanted, repetitions, warm = [1, 8], 3, 2
    report = Report(
        "path",
        {"blocks": wanted, "block_kib": block_kib, "repetitions": repetitions, "warm": warm, "io_engine": io_engine},
    )
    report.head()
    for count in wanted:
        size = Size(count, block_kib << 10, warm, repetitions, io_engine)
        with temporary_folder("kvtier-path-", folder) as scratch:
            report.results += measure(size, Path(scratch))
    report.verified = True
    table(
        "calls of a trip: median (minimum-maximum)",
        ("trip", "blocks", "calls", "files", "hand-overs"),
        [[row["what"], row["blocks"], *(_cell(row, name) for name in FIGURES)] for row in report.results],
    )
    report.end(json_file)


if __name__ == "__main__":
    main()
