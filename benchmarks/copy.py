"""Copies between GPU blocks and rows beside one plain copy of the same bytes in the same memory.

    python -m benchmarks.copy [--device cpu|cuda] [--json FILE] [--quick]

Jobs of several KV cache groups go through `kvtier_gpu`, planning included: a full-attention group of two tensors and a
sliding-window group of one, all pages of one size. `contiguous`: neighbouring blocks in neighbouring rows;
`scattered`: both in random order, as they are after a while. The yardstick on a CPU is `memmove` of one long stretch by
as many threads as the tier copies with; on CUDA one `cudaMemcpyAsync` of one pinned buffer. `both` moves half of the
bytes each way at the same time, and so does its yardstick. On CUDA each way to copy is measured, one call of the driver
for many copies among them, and `fastest`, which the tier chooses when it opens. Every byte is compared after each
direction. Medians of interleaved repetitions; a ratio is the median over the pairs. On CUDA a table more: how much
longer a model takes to decode beside scattered copies without end, and how fast these are then.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
import torch

from benchmarks.options import JSON_FILE, QUICK
from benchmarks.report import ABSENT, GIB, Report, median, paired_ratio, table
from kvtier.tier.contract import TierContext
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry, GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import GroupIndex, JobId, make_key
from kvtier.types.namespace import Namespace
from kvtier_cpu import CPUBackend, CPUOptions
from kvtier_gpu import GPUBackend, GPUOptions

PAGES = tuple(size << 10 for size in (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048))
QUICK_PAGES = (16 << 10, 64 << 10)
PAGES_OF_ROUND = 3
"""A block of the first group has two pages, one of the second has one: of each as many."""
JOBS = 4
WIPED = 0x5A
TO_ROWS, TO_GPU, BOTH = "to rows", "to GPU", "both"


Copies = Literal["fastest", "kernel", "batch", "gather", "single"]
COPIES: tuple[Copies, ...] = ("fastest", "kernel", "batch", "gather", "single")
YARDSTICK = "one copy"
MODEL_STEPS = 600


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured: pages of one size, bytes in all, where the tensors are, threads that copy on a CPU, and how
    bytes move on CUDA."""

    page_bytes: int
    num_bytes: int
    device: str
    threads: int
    copies: Copies = "fastest"


class Tiers:
    """KV tensors, a region of rows, and the GPU tier between them."""

    def __init__(self, setup: Setup) -> None:
        page = setup.page_bytes
        self.per_group = max(JOBS * 2, setup.num_bytes // page // PAGES_OF_ROUND)
        first, second = (
            GroupLayout((TensorRef(0, page), TensorRef(1, page))),
            GroupLayout((TensorRef(2, page),), kind=GroupKind.SLIDING_WINDOW, window_tokens=64),
        )
        self.setup = setup
        self.geometry = Geometry(KVLayout((first, second)), 4096)
        random = np.random.default_rng(page)
        shape = (self.per_group, page)
        self.content = [torch.from_numpy(random.integers(0, 256, shape, dtype=np.uint8)) for _ in range(3)]
        self.tensors = [one.clone().to(setup.device).view(torch.int8) for one in self.content]
        self.gpu = GPUBackend(GPUOptions(copy_threads=setup.threads, cuda_copies=setup.copies))
        rows = self.per_group * 2
        self.cpu = CPUBackend(CPUOptions(cpu_bytes_to_use=rows * self.geometry.row_bytes, shared="memfd"))
        self.payload_bytes = self.per_group * PAGES_OF_ROUND * page

    async def open(self) -> None:
        """Make the region and start the copy engine."""
        context = {"geometry": self.geometry, "namespace": Namespace(self.geometry.layout), "clock": time.monotonic}
        await self.cpu.open(TierContext("cpu", workers=[self.gpu], **context))  # type: ignore[arg-type]
        gpu = TierContext("gpu", kv_caches=self.tensors, rows=self.cpu.rows, **context)  # type: ignore[arg-type]
        opened = await self.gpu.open(gpu)
        self.mode, self.notes = opened.mode, opened.notes

    async def close(self) -> None:
        """Let go of everything."""
        await self.gpu.close()
        await self.cpu.close()

    def places(self, scattered: bool) -> tuple[np.ndarray, np.ndarray]:
        """GPU blocks and rows (of the first group; the second has the rows after them) that belong together."""
        plain = np.arange(self.per_group, dtype=np.int64)
        if not scattered:
            return plain, plain
        random = np.random.default_rng(7)
        return random.permutation(plain), random.permutation(plain)

    def jobs(self, blocks: np.ndarray, rows: np.ndarray) -> list[TransferJob]:
        """JOBS jobs over all the blocks, each of both groups."""
        parts = zip(np.array_split(blocks, JOBS), np.array_split(rows, JOBS), strict=True)
        return [
            TransferJob(JobId(number), JobKind.LOAD, (self._group(0, *part), self._group(1, *part)))
            for number, part in enumerate(parts)
        ]

    def _group(self, group: int, blocks: np.ndarray, rows: np.ndarray) -> GPUGroup:
        keys = tuple(make_key(int(row).to_bytes(8, "big"), group) for row in rows)
        at = int_array(rows + group * self.per_group)
        return GPUGroup(GroupIndex(group), keys, GPURuns.whole(blocks), at, at + 1)

    def wipe(self, rows: bool) -> None:
        """Overwrite one side."""
        if rows:
            self.cpu.rows.view[:] = WIPED
        else:
            for tensor in self.tensors:
                tensor.fill_(WIPED)
            self.settle()

    def check(self, blocks: np.ndarray, rows: np.ndarray) -> None:
        """Compare both sides with what they must hold. Raises AssertionError."""
        page, view = self.setup.page_bytes, self.cpu.rows.view
        for tensor, (group, offset) in enumerate(((0, 0), (0, page), (1, 0))):
            found = torch.from_numpy(view[group * self.per_group :, offset : offset + page][rows])
            if not torch.equal(found, self.content[tensor][blocks]):
                raise AssertionError(f"rows of tensor {tensor} are wrong")
            if not torch.equal(self.tensors[tensor].cpu().view(torch.uint8), self.content[tensor]):
                raise AssertionError(f"tensor {tensor} is wrong")

    def settle(self) -> None:
        """Wait for the device."""
        if self.setup.device == "cuda":
            torch.cuda.synchronize()


Move = Callable[[], Awaitable[None]]


def kvtier(tiers: Tiers, jobs: Sequence[TransferJob], direction: str) -> Move:
    """All jobs at once; with `both`, half of them the other way."""

    async def one(number: int, job: TransferJob) -> JobResult:
        to_rows = direction == TO_ROWS or (direction == BOTH and number % 2 == 0)
        return await (tiers.gpu.load if to_rows else tiers.gpu.store)(job)

    async def move() -> None:
        results = await asyncio.gather(*(one(number, job) for number, job in enumerate(jobs)))
        if not all(result.ok for result in results):
            raise AssertionError("a block was not copied")

    return move


def memcpy(tiers: Tiers, direction: str, pool: ThreadPoolExecutor) -> Move:
    """The same bytes in one stretch for each thread, in the very memory the tier copies in."""
    stretches = []
    at = tiers.cpu.rows.view.ctypes.data
    for tensor in tiers.tensors:
        stretches.append([tensor.data_ptr(), at, tensor.numel()])
        at += tensor.numel()
    threads = tiers.setup.threads

    def share(number: int) -> None:
        for gpu, row, length in stretches:
            first, last = length * number // threads, length * (number + 1) // threads
            to_rows = direction == TO_ROWS or (direction == BOTH and number % 2 == 0)
            target, source = (row, gpu) if to_rows else (gpu, row)
            ctypes.memmove(target + first, source + first, last - first)

    async def move() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(pool, share, number) for number in range(threads)))

    return move


def cuda_memcpy(tiers: Tiers, direction: str) -> Move:
    """One `cudaMemcpyAsync` of one pinned buffer, or of its halves on two streams."""
    size = tiers.payload_bytes
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    ways = {TO_ROWS: [(host, device)], TO_GPU: [(device, host)]}
    half = size // 2
    ways[BOTH] = [(host[:half], device[:half]), (device[half:], host[half:])]
    streams = [torch.cuda.Stream() for _ in range(2)]

    async def move() -> None:
        for (target, source), stream in zip(ways[direction], streams, strict=False):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    return move


class Model:
    """What decoding asks of a device, on a stream of its own: a few tokens through large weights."""

    def __init__(self) -> None:
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.tokens = torch.randn(16, 8192, **options)
        self.weights = [torch.randn(8192, 28672, **options) for _ in range(2)]
        self.stream = torch.cuda.Stream()

    def run(self) -> float:
        """Seconds of `MODEL_STEPS` steps on the device."""
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            begun.record()
            for _ in range(MODEL_STEPS):
                for weights in self.weights:
                    self.tokens @ weights
            ended.record()
            ended.synchronize()
        return begun.elapsed_time(ended) / 1e3


async def beside_model(contestants: dict[Copies, Tiers], pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
    """What each way to copy costs a model that decodes meanwhile."""
    loop, model, found = asyncio.get_running_loop(), Model(), []
    for copies, tiers in contestants.items():
        for direction in (TO_ROWS, TO_GPU):
            move, moved = kvtier(tiers, tiers.jobs(*tiers.places(scattered=True)), direction), 0
            alone = await loop.run_in_executor(pool, model.run)
            beside = loop.run_in_executor(pool, model.run)
            while not beside.done():
                await move()
                moved += tiers.payload_bytes
            seconds = beside.result()
            about = {"page_kib": tiers.setup.page_bytes >> 10, "direction": direction, "copies": copies}
            found.append(about | {"model": seconds / alone, "kvtier": moved / seconds / GIB})
    return found


async def measure(setup: Setup, repetitions: int, report: Report) -> None:
    """Every order and direction at one page size. On CUDA each way to copy has a tier and a region of its own."""
    ways = COPIES if setup.device == "cuda" else COPIES[:1]
    contestants = {copies: Tiers(replace(setup, copies=copies)) for copies in ways}
    try:
        for copies, tiers in tuple(contestants.items()):
            await tiers.open()
            report.settings[f"tier, {copies}"] = tiers.mode
            report.notes += [note for note in tiers.notes if note not in report.notes]
            if copies not in tiers.mode and copies != COPIES[0]:
                await contestants.pop(copies).close()  # the tier has said why it is not used
        with ThreadPoolExecutor(setup.threads) as pool:
            for scattered in (False, True):
                for direction in (TO_ROWS, TO_GPU, BOTH):
                    order = "scattered" if scattered else "contiguous"
                    report.results += await _measure(contestants, order, direction, pool, repetitions)
            if setup.device == "cuda":
                report.results += await beside_model(contestants, pool)
    finally:
        for tiers in contestants.values():
            await tiers.close()


async def _measure(
    contestants: dict[Copies, Tiers], order: str, direction: str, pool: ThreadPoolExecutor, repetitions: int
) -> list[dict[str, Any]]:
    """One result for each contestant, beside the same yardstick."""
    first = contestants[COPIES[0]]
    blocks, rows = first.places(order == "scattered")
    jobs = first.jobs(blocks, rows)
    moves = {copies: kvtier(tiers, jobs, direction) for copies, tiers in contestants.items()}
    on_cuda = first.setup.device == "cuda"
    moves[YARDSTICK] = cuda_memcpy(first, direction) if on_cuda else memcpy(first, direction, pool)
    rates = await _interleave(moves, first.payload_bytes, repetitions)
    for tiers in contestants.values():
        await _verify(tiers, jobs, direction, blocks, rows)
    return [
        _row(tiers.setup, order, direction, (rates[copies], rates[YARDSTICK])) for copies, tiers in contestants.items()
    ]


async def _interleave(moves: dict[str, Move], payload_bytes: int, repetitions: int) -> dict[str, list[float]]:
    """GiB/s of each, one after the other in turns; a first round of each is not counted."""
    found: dict[str, list[float]] = {name: [] for name in moves}
    for repetition in range(-1, repetitions):
        names = list(moves)
        for name in names if repetition % 2 == 0 else names[::-1]:
            started = time.perf_counter()
            await moves[name]()
            if repetition >= 0:
                found[name].append(payload_bytes / (time.perf_counter() - started) / GIB)
    return found


async def _verify(
    tiers: Tiers, jobs: Sequence[TransferJob], direction: str, blocks: np.ndarray, rows: np.ndarray
) -> None:
    """Once more with one side wiped before it is filled, and both compared."""
    for tensor, content in zip(tiers.tensors, tiers.content, strict=True):
        tensor.copy_(content.view(torch.int8))
    tiers.settle()
    tiers.wipe(rows=True)
    await kvtier(tiers, jobs, TO_ROWS)()
    tiers.check(blocks, rows)
    if direction != TO_ROWS:
        tiers.wipe(rows=False)
        await kvtier(tiers, jobs, TO_GPU)()
        tiers.settle()
        tiers.check(blocks, rows)
        await kvtier(tiers, jobs, direction)()
        tiers.settle()
        tiers.check(blocks, rows)


def _row(setup: Setup, order: str, direction: str, rates: tuple[list[float], list[float]]) -> dict[str, Any]:
    return {
        "page_kib": setup.page_bytes >> 10,
        "order": order,
        "direction": direction,
        "device": setup.device,
        "copies": setup.copies if setup.device == "cuda" else "host memory",
        "kvtier": median(rates[0]),
        "memcpy": median(rates[1]),
        "ratio": paired_ratio(*rates),
        "all": {"kvtier": rates[0], "memcpy": rates[1]},
    }


@click.command()
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--mib", default=256, show_default=True, help="MiB that are copied in each round.")
@click.option("--threads", default=2, show_default=True, help="Threads that copy on a CPU.")
@click.option("--pages", default=",".join(str(page >> 10) for page in PAGES), show_default=True, help="KiB of a page.")
@click.option("--repetitions", default=7, show_default=True)
@QUICK
@JSON_FILE
def main(
    device: str, mib: int, threads: int, pages: str, repetitions: int, quick: bool, json_file: Path | None
) -> None:
    """Measure copies."""
    sizes = [int(page) << 10 for page in pages.split(",")]
    if quick:
        sizes, mib, repetitions = list(QUICK_PAGES), 6, 2
    cuda = torch.cuda.is_available()
    devices = [name for name in ("cpu", "cuda") if device in (name, "auto") and (name == "cpu" or cuda)]
    settings = {"mib": mib, "threads": threads, "repetitions": repetitions}
    report = Report("copy", settings)
    report.head()
    if not cuda and device != "cpu":
        report.notes.append(f"CUDA: {ABSENT}")
    for name in devices:
        for page in sizes:
            asyncio.run(measure(Setup(page, mib << 20, name, threads), repetitions, report))
            report.write(json_file)
    report.verified = True
    about = ("direction", "copies", "kvtier")
    copied, beside = ([row for row in report.results if ("model" in row) is model] for model in (False, True))
    table(
        "GiB/s of payload",
        ("device", "page KiB", "order", "direction", "copies", "kvtier", YARDSTICK, "ratio"),
        [[row[name] for name in ("device", "page_kib", "order", *about, "memcpy", "ratio")] for row in copied],
    )
    if beside:
        columns = ("page KiB", "direction", "copies", "GiB/s", "the model's time / alone")
        values = [[row[name] for name in ("page_kib", *about, "model")] for row in beside]
        table("beside a model that decodes", columns, values)
    report.end(json_file)


if __name__ == "__main__":
    main()
