"""The whole stack end to end: real request traces replayed over it, and what it adds to an engine's step.

    python -m benchmarks.stack [--traces FOLDER] [--requests N] [--folder DIR] [--json FILE] [--quick]

The replay is that of `kvtier replay`: GPU blocks on the CPU or on CUDA, a CPU tier, a filesystem tier, every loaded
byte compared. It runs as fast as it can, without the clock of the trace, and its time holds comparing and computing
blocks, which an engine would do otherwise. Bytes a second are those that moved between tiers.

`step` is a synchronous engine over a `ProcessStack` with 32 requests running. In every step it takes in what ended
(`step`) and stores the blocks that became full, two in the mean; every tenth step a request ends and a new one of 64
blocks is reserved, polled, loaded and, where it missed, computed and stored. What is timed is every call of the stack
that the engine's thread makes in a step, added up; between steps it sleeps as if it waited for its device.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import torch

from benchmarks.options import JSON_FILE, QUICK
from benchmarks.report import ABSENT, GIB, Report, percentile, table
from faults.stepped import SteppedStack, Within
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.config import parse_stack, stack_parts
from kvtier.engines.process_calls import ProcessRequest
from kvtier.engines.process_stack import ProcessStack, open_engine_stack
from kvtier.tools.replay.report import tier_json
from kvtier.tools.replay.run import Replay
from kvtier.tools.replay.setup import ReplayOptions
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, JobResult
from kvtier.types.keys import GroupIndex, JobId, OffloadKey, RequestId, make_key
from kvtier.types.namespace import Namespace

TRACES = {"conversation": "conversation.jsonl", "agentic": "agentic_coding.jsonl.gz"}
RUNNING = 32
BLOCK_TOKENS = 16
PROMPT_BLOCKS, SHARED_BLOCKS, OUTPUT_BLOCKS = 64, 48, 21
DOCUMENTS = 64
T = TypeVar("T")


# -- replays -----------------------------------------------------------------------------------------------------


def replay(name: str, options: ReplayOptions) -> dict[str, object]:
    """One replay's figures. Raises AssertionError for a wrong byte."""
    before = _cpu_seconds()
    report = asyncio.run(Replay(options).run())
    cpu = _cpu_seconds() - before
    if not report.ok:
        raise AssertionError(f"{name}: wrong bytes: {report.wrong}")
    counts, tiers = report.counts, {tier: one for tier, one in report.tiers.items() if tier != "gpu"}
    moved = sum(one.load_bytes + one.store_bytes for one in tiers.values())
    hit = sum(counts.hit_tokens.values())
    return {
        "what": f"replay {name}",
        "requests": counts.requests,
        "seconds": report.seconds,
        "requests_per_second": counts.requests / report.seconds,
        "gib_per_second": moved / report.seconds / GIB,
        "cpu_seconds": cpu,
        "cpu_seconds_per_gib": cpu / (moved / GIB) if moved else None,
        "hit_tokens_percent": 100 * hit / counts.prompt_tokens,
        "block_hit_percent": 100 * report.block_hit_rate,
        "blocks_verified": counts.verified,
        "dropped": counts.dropped,
        "tiers": {tier: tier_json(one) for tier, one in tiers.items()},
    }


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# -- the step of an engine ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Request:
    """One request of the engine: its keys, its GPU blocks, how far it is."""

    opened: ProcessRequest | Within
    keys: list[OffloadKey]
    blocks: list[int]
    phase: int
    arrived: float
    computed: int = 0
    loading: bool = False
    running: bool = False
    jobs: set[JobId] = field(default_factory=set)


@dataclass(slots=True)
class Spent:
    """Seconds of the engine's thread in calls of the stack: by call, and all of a step together.

    `until_loaded` are those from the arrival of a request to the end of its load, of requests that arrived since.
    """

    calls: dict[str, list[float]] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    steps_cpu: list[float] = field(default_factory=list)
    until_loaded: list[float] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)


class Engine:
    """A synchronous engine without a model: 32 running requests, each block's bytes those that its key says."""

    def __init__(
        self, stack: ProcessStack | SteppedStack, tensor: torch.Tensor, seed: int, *, records: bool = False
    ) -> None:
        self.stack = stack
        self._records = records
        self._follows = stack.engine.follows_requests
        self._pages = tensor.numpy().view(np.uint64)
        self._free = list(range(len(tensor)))
        self._random = np.random.default_rng(seed)
        self._documents = [self._fresh(SHARED_BLOCKS) for _ in range(DOCUMENTS)]
        self._requests: dict[str, Request] = {}
        self._ending: list[Request] = []
        self._of_job: dict[JobId, tuple[list[Request], list[int]]] = {}
        self._full: list[tuple[Request, list[int]]] = []
        self._number = 0
        self._now: tuple[float, float] = (0.0, 0.0)
        self.spent = Spent()
        self.loaded = 0

    def _fresh(self, count: int) -> list[OffloadKey]:
        return [make_key(self._random.bytes(32), 0) for _ in range(count)]

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = call()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        self.spent.calls.setdefault(name, []).append(wall)
        self._now = (self._now[0] + wall, self._now[1] + cpu)
        return result

    def step(self) -> None:
        """One step: what ended, arrivals, waiting requests, running ones; then the stores of what became full."""
        self._now = (0.0, 0.0)
        self._take_in()
        self._number += 1
        if self._number % (OUTPUT_BLOCKS * BLOCK_TOKENS // RUNNING) == 0 or len(self._requests) < RUNNING:
            self._arrive()
        for request in list(self._requests.values()):
            if not request.running:
                self._wait(request)
            elif (self._number + request.phase) % BLOCK_TOKENS == 0:
                self._decode(request)
        self._store()
        self.spent.steps.append(self._now[0])
        self.spent.steps_cpu.append(self._now[1])

    def drain(self, seconds: float = 30.0) -> None:
        """Step without new work until the stack has none, or for so long."""
        until = time.perf_counter() + seconds
        while self.stack.has_pending_work and time.perf_counter() < until:
            self._take_in()
            self.stack.wait(0.02)

    def _take_in(self) -> None:
        for result in self._timed("step", self.stack.step):
            self._ended(result)

    def _arrive(self) -> None:
        if len(self._free) < PROMPT_BLOCKS + OUTPUT_BLOCKS or len(self._requests) >= 2 * RUNNING:
            return
        arrived = time.perf_counter()
        document = self._documents[int(self._random.integers(DOCUMENTS))]
        keys = document + self._fresh(PROMPT_BLOCKS - SHARED_BLOCKS + OUTPUT_BLOCKS)
        blocks = [self._free.pop() for _ in keys]
        phase, name, prompt = int(self._random.integers(BLOCK_TOKENS)), f"r{self._number}", keys[:PROMPT_BLOCKS]
        announced = prompt if self._follows else None
        opened = self._timed("request", lambda: self.stack.request(RequestId(name), announced))
        self._timed("reserve", lambda: opened.reserve(prompt))
        self._requests[name] = Request(opened, keys, blocks, phase, arrived)

    def _wait(self, request: Request) -> None:
        """A request that does not run yet: its rows are waited for, loaded, and what missed is computed."""
        if request.loading:
            return
        reservation = self._timed("reservation", lambda: request.opened.reservation)
        if reservation is not None and not reservation.served:
            return
        hits = reservation.hits() if reservation is not None else []
        count = hits.index(False) if False in hits else len(hits)
        if count:
            request.loading = True
            self._submit("load", JobKind.LOAD, [(request, list(range(count)))])
            return
        if True in hits:
            self._timed("release", request.opened.release)
        self._prefill(request, 0)

    def _prefill(self, request: Request, first: int) -> None:
        request.running, request.computed = True, PROMPT_BLOCKS
        places = list(range(first, PROMPT_BLOCKS))
        self._compute(request, places)
        self._full.append((request, places))

    def _decode(self, request: Request) -> None:
        """A block of output became full; after the last one the request ends."""
        if self._follows:
            block = request.keys[request.computed]
            self._timed("extend", lambda: request.opened.extend([block]))
        self._compute(request, [request.computed])
        self._full.append((request, [request.computed]))
        request.computed += 1
        if request.computed == len(request.keys):
            del self._requests[request.opened.id]
            self._timed("end", lambda: self._end(request))
            self._ending.append(request)

    def _end(self, request: Request) -> None:
        output_tokens = OUTPUT_BLOCKS * BLOCK_TOKENS
        if self._records:
            input_tokens, prompt = PROMPT_BLOCKS * BLOCK_TOKENS, request.keys[:PROMPT_BLOCKS]
            request.opened.end(output_tokens, input_tokens=input_tokens, prompt=prompt)
        else:
            request.opened.end(output_tokens)

    def _store(self) -> None:
        full, self._full = self._full, []
        if full:
            self._submit("store", JobKind.STORE, full)
        for request in [one for one in self._ending if not one.jobs]:
            self._ending.remove(request)
            self._free += request.blocks

    def _submit(self, name: str, kind: JobKind, parts: Sequence[tuple[Request, list[int]]]) -> None:
        keys = tuple(request.keys[at] for request, places in parts for at in places)
        runs = GPURuns.whole([request.blocks[at] for request, places in parts for at in places])

        def submit() -> JobId:
            job = self.stack.job(kind, (GPUGroup(GroupIndex(0), keys, runs),))
            self.stack.submit(job, parts[0][0].opened if kind is JobKind.LOAD else None)
            return job.job_id

        job_id = self._timed(name, submit)
        for request, _ in parts:
            request.jobs.add(job_id)
        self._of_job[job_id] = [request for request, _ in parts], parts[0][1] if kind is JobKind.LOAD else []

    def _ended(self, result: JobResult) -> None:
        now = time.perf_counter()
        requests, places = self._of_job.pop(result.job_id)
        for request in requests:
            request.jobs.discard(result.job_id)
        if not places:
            return
        request = requests[0]
        request.loading = False
        good = [outcome.ok for outcome in result.outcomes[0]]
        count = good.index(False) if False in good else len(good)
        for at in places[:count]:
            if not np.array_equal(self._pages[request.blocks[at]], self._content(request.keys[at])):
                raise AssertionError(f"block {at} of a request holds wrong bytes")
        self.loaded += count
        if request.arrived >= self.spent.since:
            self.spent.until_loaded.append(now - request.arrived)
        self._prefill(request, count)

    def _compute(self, request: Request, places: list[int]) -> None:
        for at in places:
            self._pages[request.blocks[at]] = self._content(request.keys[at])

    def _content(self, key: OffloadKey) -> np.ndarray:
        first = np.uint64(int.from_bytes(key[:8], "little"))
        return first ^ np.arange(self._pages.shape[1], dtype=np.uint64)


@contextmanager
def engine_over(
    folder: Path,
    page_bytes: int,
    policy: str = "lru",
    traces: Path | None = None,
    runtime: str | None = None,
    **changes: Any,
) -> Iterator[Engine]:
    """An engine over a stack; with a folder for traces the stack records its requests.

    With a folder `runtime` for its socket the stack has a process of its own. Else the engine's thread turns its loop,
    and `changes` are of its parts.
    """
    layout = KVLayout((GroupLayout((TensorRef(0, page_bytes),), BLOCK_TOKENS),))
    per_request = PROMPT_BLOCKS + OUTPUT_BLOCKS
    tensor = torch.zeros((3 * RUNNING * per_request, page_bytes), dtype=torch.int8)
    rows = DOCUMENTS * SHARED_BLOCKS // 2
    text = (
        f"tiers:\n  - type: gpu\n  - {{type: cpu, cpu_bytes_to_use: {rows * page_bytes}, policy: {policy}}}\n"
        f"  - {{type: fs, roots: [{folder}], capacity: {8 * rows * (page_bytes + 8192)}, min_free_bytes: 0, "
        f"policy: {policy}}}\n"
    )
    if traces is not None:
        text += f"record: {{folder: {traces}}}\n"
    if runtime is not None:
        text += f"runtime_dir: {runtime}\n"
    config, namespace = parse_stack(text), Namespace(layout, model="benchmark")
    with (
        SteppedStack(replace(stack_parts(config, namespace, [tensor]), **changes))
        if runtime is None
        else open_engine_stack(config, namespace, [tensor])
    ) as stack:
        yield Engine(stack, tensor, seed=1, records=traces is not None)


def engine_steps(folder: Path, steps: int, warm: int, sleep_seconds: float, page_bytes: int) -> dict[str, object]:
    """Percentiles of the stack's share of a step, in microseconds."""
    with temporary_folder("kvtier-sockets-") as sockets, engine_over(folder, page_bytes, runtime=sockets) as engine:
        for _ in range(warm):
            engine.step()
            time.sleep(sleep_seconds)
        engine.spent = Spent()
        engine.loaded = 0
        for _ in range(steps):
            engine.step()
            time.sleep(sleep_seconds)
    spent = engine.spent
    found: dict[str, object] = {"what": "step, 32 running", "steps": steps, "blocks_loaded": engine.loaded}
    for name, values in {"step_all": spent.steps, "step_all_cpu": spent.steps_cpu, **spent.calls}.items():
        found[name] = {
            "calls": len(values),
            "p50_us": percentile(values, 50) * 1e6,
            "p99_us": percentile(values, 99) * 1e6,
        }
    return found


# -- both --------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--traces", default="../shared/traces", show_default=True, help="Folder of the request traces.")
@click.option("--requests", default=2000, show_default=True, help="Requests of each trace; 0 for all.")
@click.option("--block-kib", default=64, show_default=True, help="KiB of a block of 16 tokens, or of a trace's block.")
@click.option("--concurrency", default=4, show_default=True, help="Requests at once in a replay.")
@click.option("--steps", default=2000, show_default=True, help="Engine steps that are measured.")
@click.option("--sleep-ms", default=5.0, show_default=True, help="How long a step of the engine takes without us.")
@click.option("--folder", default=None, help="Where the fs tier's root is made; a temporary folder by default.")
@QUICK
@JSON_FILE
def main(folder: str | None, quick: bool, json_file: Path | None, **given: Any) -> None:
    """Replay traces, and measure an engine's steps."""
    report = Report("stack", dict(given))
    report.head()
    size = given["block_kib"] << 10
    steps, warm, sleep = given["steps"], 400, given["sleep_ms"] / 1000
    if quick:
        steps, warm, sleep, size = 60, 20, 0.0005, 4096
    with temporary_folder("kvtier-stack-", folder) as scratch:
        stepped = engine_steps(Path(scratch) / "steps", steps, warm, sleep, size)
        _replays(report, Path(scratch), size, given, quick)
    report.results.append(stepped)
    report.verified = True
    _show(report.results)
    report.end(json_file)


def _replays(report: Report, scratch: Path, size: int, given: dict[str, Any], quick: bool) -> None:
    """Each trace that is there; at a toy size a generated workload instead."""
    common = {"block_bytes": size, "concurrency": given["concurrency"], "backlog": 256}
    if quick:
        options = ReplayOptions(workload="chat", requests=40, fs_root=scratch / "chat", **common)
        report.results.append(replay("chat (generated)", options))
        return
    for name, file in TRACES.items():
        path = Path(given["traces"]) / file
        if not path.exists():
            report.notes.append(f"trace {name}: {ABSENT} ({path})")
            report.results.append({"what": f"replay {name}", "requests": ABSENT})
            continue
        options = ReplayOptions(trace=path, requests=given["requests"] or None, fs_root=scratch / name, **common)
        report.results.append(replay(name, options))


def _show(results: Sequence[dict[str, Any]]) -> None:
    names = ("requests", "requests_per_second", "gib_per_second", "cpu_seconds_per_gib", "hit_tokens_percent")
    table(
        "replays",
        ("what", "requests", "requests/s", "GiB/s", "CPU s/GiB", "hit tokens %", "hit blocks below GPU %"),
        [
            [row["what"], *(row.get(name) for name in (*names, "block_hit_percent"))]
            for row in results
            if row["what"].startswith("replay")
        ],
    )
    stepped = next(row for row in results if row["what"].startswith("step"))
    table(
        f"an engine's step, {RUNNING} running requests, {stepped['steps']} steps, microseconds",
        ("calls of the stack", "count", "p50", "p99"),
        [
            [name, cell["calls"], cell["p50_us"], cell["p99_us"]]
            for name, cell in stepped.items()
            if isinstance(cell, dict)
        ],
    )


if __name__ == "__main__":
    main()
