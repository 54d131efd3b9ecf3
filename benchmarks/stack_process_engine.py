"""An engine's process of `benchmarks.stack_process`: a whole stack, and what is measured of it.

The time of the engine's thread is that thread's alone. The CPU time of a stack process is read from its own clock, that
of all its threads, in nanoseconds.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.beside import JOB_BLOCKS, Neighbour, nap, run, spin
from benchmarks.beside_process import other_process
from benchmarks.fs_child import FIRST, LOAD, Content, Contestant, Job, Pass, Refused, Setup
from benchmarks.fs_kvtier import keys_of
from benchmarks.peer import serve
from benchmarks.report import GIB, percentile
from benchmarks.stack import Engine, Spent, engine_over
from kvtier.config import parse_stack
from kvtier.engines.process_stack import open_engine_stack
from kvtier.service.pool import DOCUMENT_SECONDS
from kvtier.stack.watching.stats import TierStats
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.hints import Demote
from kvtier.types.jobs import JobResult
from kvtier.types.keys import RequestId
from kvtier.types.namespace import Namespace

LEAD_STEPS = 20
"""Steps of a turn before it is measured: they take in what ended meanwhile."""
AT_ONCE = 32
PROMPTS = 8
"""Prompts of `JOB_BLOCKS` blocks that are hit in turn."""
FRESH = 1 << 30
"""Numbers of blocks that are stored beside hits, far from those that are loaded."""
PATIENCE_SECONDS = 60.0
US, MS = 1e6, 1e3
Figures = dict[str, float]


class StackTiers(Contestant):
    """A whole stack of rows and a disk that an engine's thread stores in and loads from.

    Before a pass of loads its blocks give up their rows, so all of them come from the disk. The disk holds `capacity`
    times `Setup.blocks`. Engines with one `runtime` folder and the same setup share a stack process.
    """

    def __init__(self, runtime: str, capacity: int, engine_id: str = "") -> None:
        self._runtime, self._capacity, self._engine_id = runtime, capacity, engine_id
        self._ended: dict[int, JobResult] = {}
        self._requests = 0
        self.pause_seconds = 0.0

    def open(self, setup: Setup) -> npt.NDArray[np.uint8]:
        self._blocks, nbytes = setup.blocks, setup.blocks * setup.block_bytes
        tensor = torch.zeros((setup.blocks, setup.block_bytes), dtype=torch.uint8)
        layout = KVLayout((GroupLayout((TensorRef(0, setup.block_bytes),)),))
        capacity = self._capacity * (nbytes + 8192 * setup.blocks)
        config = parse_stack(
            f"runtime_dir: {self._runtime}\ntiers:\n  - {{type: cpu, cpu_bytes_to_use: {2 * nbytes}, policy: lru}}\n"
            f"  - {{type: fs, roots: [{setup.folder}/root], capacity: {capacity}, min_free_bytes: 0, policy: lru, "
            f"io_depth: {setup.depth}}}\n"
        )
        namespace = Namespace(layout, model="benchmark")
        self.stack = open_engine_stack(config, namespace, [tensor], engine_id=self._engine_id)
        self.stack.open()
        rows: npt.NDArray[np.uint8] = tensor.numpy()
        return rows

    def notes(self) -> str:
        return "process"

    def prepare(self, work: Pass, jobs: Sequence[Job]) -> float:
        """Have what is to be loaded on the disk alone, or nowhere. Raises Refused where that cannot be."""
        keys = [key for job in jobs for key in keys_of(job)] if work.kind == LOAD else []
        until = time.monotonic() + PATIENCE_SECONDS
        while above := [
            key for key, tier in zip(keys, self.stack.locate(keys), strict=True) if tier not in ("fs", None)
        ]:
            if time.monotonic() > until:
                raise Refused(f"{len(above)} of {len(keys)} blocks are not on the disk alone")
            self.stack.hint(Demote(above))
            self.rest(0.01)
        return 0.0

    def disk(self) -> TierStats:
        """Figures of the disk tier, of this moment: a stack process collects them once in a short time."""
        time.sleep(2 * DOCUMENT_SECONDS)
        return self.stack.stats().tiers["fs"]

    def move(self, work: Pass, jobs: Sequence[Job]) -> list[float]:
        return [seconds for seconds, _ in self.run_jobs(iter(jobs), work.kind == LOAD, work.at_once)]

    def run_jobs(self, jobs: Iterator[Job], loads: bool, at_once: int) -> list[tuple[float, int]]:
        """(seconds, blocks moved) of each job, so many at once. Raises Refused for a block that was not loaded."""
        begin: Callable[..., int] = self.stack.submit_load if loads else self.stack.submit_store
        begun: dict[int, float] = {}
        found = list[tuple[float, int]]()
        while True:
            while len(begun) < at_once and (job := next(jobs, None)) is not None:
                if self.pause_seconds:
                    time.sleep(self.pause_seconds)
                begun[begin(keys_of(job), gpu_blocks=self._gpu_blocks(job))] = time.perf_counter()
            if not begun:
                return found
            self._until(lambda: not begun.keys().isdisjoint(self._ended))
            for job_id in begun.keys() & self._ended.keys():
                good = [outcome.ok for outcome in self._ended.pop(job_id).outcomes[0]]
                if loads and not all(good):
                    raise Refused(f"{good.count(False)} blocks of a job were not loaded")
                found.append((time.perf_counter() - begun.pop(job_id), sum(good)))

    def _gpu_blocks(self, job: Job) -> list[int]:
        return [number % self._blocks for number in job.numbers]

    def rest(self, seconds: float) -> None:
        """A step, and a wait for something that arrives, at most so long."""
        self._ended |= {result.job_id: result for result in self.stack.step()}
        self.stack.wait(seconds)

    def _until(self, done: Callable[[], bool]) -> None:
        """Step, and wait in between for something that arrives, until a condition holds."""
        while True:
            self._ended |= {result.job_id: result for result in self.stack.step()}
            if done():
                return
            self.stack.wait(1.0)

    def hit(self, job: Job) -> tuple[float, int]:
        """(seconds from the arrival of a request to its loaded blocks, how many from the first on those are)."""
        keys, begun = keys_of(job), time.perf_counter()
        self._requests += 1
        with self.stack.request(RequestId(f"r{self._requests}")) as request:
            reservation = request.reserve(keys)
            self._until(lambda: reservation.served)
            hits = [*reservation.hits(), False].index(False)
            if not hits:
                return time.perf_counter() - begun, 0
            job_id = self.stack.submit_load(keys[:hits], request, gpu_blocks=self._gpu_blocks(job)[:hits])  # type: ignore[arg-type]
            self._until(lambda: job_id in self._ended)
        good = [outcome.ok for outcome in self._ended.pop(job_id).outcomes[0]]
        return time.perf_counter() - begun, [*good, False].index(False)

    def close(self) -> None:
        self.stack.close()


class EngineProcess:
    """The works that the benchmark asks this process for: each returns figures."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._child: int | None = None
        self._next_fresh = FRESH

    def _find_child(self, runtime: str) -> None:
        """The stack process is that which listens in this folder."""
        for path in Path(runtime).rglob("*.sock"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.connect(str(path))
                self._child = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]

    def _cpu(self) -> float:
        """CPU seconds of this process and its stack process."""
        clock = 0.0 if self._child is None else time.clock_gettime(~self._child << 3 | 2)  # clock_getcpuclockid(3)
        return time.process_time() + clock

    def _child_mib(self, when: str) -> Figures:
        """Resident memory of the stack process that is not shared, as rows are."""
        if self._child is None:
            return {}
        status = dict(line.split(":", 1) for line in Path(f"/proc/{self._child}/status").read_text().splitlines())
        kib = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssFile"))
        return {f"memory beyond rows, MiB, after {when}": kib / 1024}

    def _rest(self) -> None:
        """Wait until both processes are idle: rows become huge pages in a thread of theirs, for some seconds."""
        until, before = time.monotonic() + PATIENCE_SECONDS, -1.0
        while (now := self._cpu()) - before > 0.01 and time.monotonic() < until:
            before = now
            time.sleep(0.2)

    def open_steps(self, folder: str, runtime: str, warm: int, sleep_seconds: float) -> Figures:
        """32 running requests."""
        Path(runtime).mkdir()
        self._engine = self._open.enter_context(engine_over(Path(folder), 4096, runtime=runtime))
        self._sleep_seconds = sleep_seconds
        self._find_child(runtime)
        self._step(warm)
        return {}

    def _step(self, count: int) -> Engine:
        for _ in range(count):
            self._engine.step()
            time.sleep(self._sleep_seconds)
        return self._engine

    def steps(self, count: int, busy: bool) -> Figures:
        """A turn of steps, alone or beside a thread that is busy in Python."""
        with Neighbour(spin if busy else None):
            self._step(LEAD_STEPS).spent = Spent()
            all_before, thread_before = self._cpu(), time.thread_time()
            spent = self._step(count).spent
            thread, everything = time.thread_time() - thread_before, self._cpu() - all_before
        mine, beside = sum(spent.steps_cpu), ", beside a busy thread" if busy else ""
        found = {
            f"CPU of a step, us{beside}": mine / count * US,
            f"step p50, us{beside}": percentile(spent.steps, 50) * US,
            f"step p99, us{beside}": percentile(spent.steps, 99) * US,
            f"requests loaded{beside}": float(len(spent.until_loaded)),
        }
        if spent.until_loaded:
            found[f"arrival to loaded p50, ms{beside}"] = percentile(spent.until_loaded, 50) * MS
        if not busy:  # else it is that of the busy thread
            found["CPU of all processes a step, us"] = everything / count * US
            found["of it without the engine's own work, us"] = (everything - thread + mine) / count * US
            found |= self._child_mib("steps")
        return found

    def idle(self, seconds: float) -> Figures:
        """CPU of an engine that takes no step, once its stack has nothing to do."""
        self._engine.drain()
        self._rest()
        before, begun = self._cpu(), time.perf_counter()
        time.sleep(seconds)
        return {"CPU of an idle second, ms": (self._cpu() - before) / (time.perf_counter() - begun) * MS}

    def open_tiers(self, folder: str, runtime: str, setup: dict[str, Any], stored: int, **tiers: Any) -> Figures:
        """Blocks in rows and on a disk, the first of which are stored."""
        for path in (folder, runtime):
            Path(path).mkdir(exist_ok=True)
        self._tiers, self._setup = StackTiers(runtime=runtime, **tiers), Setup(folder, depth=AT_ONCE, **setup)
        self._content = Content(self._tiers.open(self._setup))
        self._open.callback(self._tiers.close)
        self._find_child(runtime)
        if stored:
            run(self._tiers, self._content, Pass(FIRST, 0, stored, JOB_BLOCKS, AT_ONCE), None)
            self._tiers.prepare(work := Pass(LOAD, 0, stored, JOB_BLOCKS, 1), work.jobs())
        self._rest()
        return {}

    def _load(self, at_once: int, beside: Callable[[Neighbour], None] | None) -> tuple[float, float, list[float]]:
        """(seconds, those in which the disk tier had a load in flight, delays) of a pass over all blocks."""
        before, nbytes = self._tiers.disk(), self._setup.blocks * self._setup.block_bytes
        work = Pass(LOAD, 0, self._setup.blocks, JOB_BLOCKS, at_once)
        seconds, delays = run(self._tiers, self._content, work, beside)
        after = self._tiers.disk()
        if after.load_bytes - before.load_bytes != nbytes:
            raise Refused(f"{after.load_bytes - before.load_bytes} of {nbytes} bytes were loaded from the disk")
        return seconds, after.load_seconds - before.load_seconds, delays

    def loads(self) -> Figures:
        """Loads one by one, alone, beside a thread that is busy in Python, and beside a process that is: there with the
        pauses between loads of the disk tier that the thread made."""
        size = f"{self._setup.block_bytes >> 10} KiB"
        (alone, disk_alone, _), (busy, disk_busy, _) = self._load(1, None), self._load(1, spin)
        self._tiers.pause_seconds = (busy - disk_busy) / (self._setup.blocks // JOB_BLOCKS)
        with other_process(spin):
            _, disk_beside, _ = self._load(1, None)
        self._tiers.pause_seconds = 0.0
        gib, name = self._setup.blocks * self._setup.block_bytes / GIB, f"{size} one by one"
        return {
            f"{name}, GiB/s": gib / alone,
            f"{name}, beside a busy thread, share": alone / busy,
            f"{name}, GiB/s of the disk tier": gib / disk_alone,
            f"{name}, beside a busy thread, share of the disk tier": disk_alone / disk_busy,
            f"{name}, beside a busy process, with pauses, share of the disk tier": disk_alone / disk_beside,
            **self._child_mib(f"{size} loads"),
        }

    def naps(self, seconds: float) -> Figures:
        """Lateness of a thread that naps, beside loads at full speed for so long and beside nothing; and meanwhile that
        of a process that does nothing else."""
        with Neighbour(nap) as alone:
            time.sleep(seconds)
        loading, spent = list[float](), 0.0
        with other_process(nap) as others:
            while spent < seconds:
                took, _, delays = self._load(AT_ONCE, nap)
                spent += took
                loading += delays
        name = f", beside {self._setup.block_bytes >> 10} KiB loads"
        found = {f"naps{name}": float(len(loading))}
        for beside, delays in (("", alone.delays), (name, loading), (f"{name}, of another process", others)):
            found |= {f"nap late p{rank}, ms{beside}": percentile(delays, rank) * MS for rank in (50, 99)}
        return found

    def hits(self, count: int, a_second: float) -> dict[str, list[float]]:
        """Seconds of requests with hits, at most so many a second: from the disk, and at once again from rows.

        `again` are blocks of those that were read from the disk a second time, `lost` those that were in no tier.
        """
        found: dict[str, list[float]] = {"disk": [], "rows": [], "lost": [0.0]}
        before, begun = self._tiers.disk().loaded, time.monotonic()
        for number in range(count):
            while (left := begun + number / a_second - time.monotonic()) > 0:
                self._tiers.rest(left)
            work = Pass(LOAD, number % PROMPTS * JOB_BLOCKS, JOB_BLOCKS, JOB_BLOCKS, 1)
            (job,) = work.jobs()
            lost = self._tiers.stack.locate(keys_of(job)).count(None)
            if lost:
                found["lost"][0] += lost
                run(self._tiers, self._content, Pass(FIRST, work.start, JOB_BLOCKS, JOB_BLOCKS, 1), None)
            self._tiers.prepare(work, [job])
            for where in ("disk", "rows"):
                self._content.spoil(work)
                seconds, hits = self._tiers.hit(job)
                if hits < JOB_BLOCKS:
                    found["lost"][0] += JOB_BLOCKS - hits
                    break
                self._content.check(work)
                found[where].append(seconds)
        again = self._tiers.disk().loaded - before - JOB_BLOCKS * len(found["disk"])
        return found | {"again": [float(again)]}

    def stores(self, seconds: float) -> Figures:
        """GiB/s of stores of new blocks at full speed for so long."""
        begun = time.perf_counter()

        def fresh() -> Iterator[Job]:
            while time.perf_counter() < begun + seconds:
                self._next_fresh += JOB_BLOCKS
                yield Job.of(range(self._next_fresh - JOB_BLOCKS, self._next_fresh))

        moved = sum(blocks for _, blocks in self._tiers.run_jobs(fresh(), False, AT_ONCE))
        return {"gib_s": moved * self._setup.block_bytes / GIB / (time.perf_counter() - begun)}

    def close(self) -> Figures:
        """End the stack, and its process with it."""
        self._open.close()
        self._child = None
        return {}


if __name__ == "__main__":
    engine = EngineProcess()
    works = ("open_steps", "steps", "idle", "open_tiers", "loads", "naps", "hits", "stores", "close")
    try:
        serve({name: getattr(engine, name) for name in works})
    finally:
        engine.close()
