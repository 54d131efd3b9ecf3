"""Control plane on one core: lookups, store-complete-evict cycles, a step with many waiting requests, memory a slot.

    python -m benchmarks.control [--slots 1000000] [--batch 256] [--json FILE]

No I/O is done: jobs are reported finished at once, so only decisions are timed. Figures are medians over repetitions.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

from benchmarks.options import JSON_FILE
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.settings import StackSettings
from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.tier.contract import Opened, SlotSpace
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import STORED, GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import CPU, FS, GroupIndex, JobId, OffloadKey, RequestId, make_key

ROW_BYTES = 65536


def key(number: int) -> OffloadKey:
    """A key with a 16-byte hash, spread like a real one."""
    return make_key((number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)).to_bytes(16, "big"), 0)


def keys(first: int, count: int) -> list[OffloadKey]:
    return [key(first + i) for i in range(count)]


def owned(slots: int, policy: str) -> OwnedTier:
    tier = OwnedTier("cpu", SlotSpace(slots * ROW_BYTES, (1,), (ROW_BYTES,)), policy)
    tier.placement.format_all()
    return tier


def plane(rows: int, slots: int, policy: str) -> ControlPlane:
    cpu = TierSpec("cpu", CPU, Opened(rows * ROW_BYTES, SlotSpace(rows * ROW_BYTES, (1,), (ROW_BYTES,))), policy)
    fs = TierSpec("fs", FS, Opened(slots * ROW_BYTES, SlotSpace(slots * ROW_BYTES, (1,), (ROW_BYTES,))), policy)
    return ControlPlane(cpu, [fs] if slots else [], settings=StackSettings(gather_seconds=0.0))


def store(control: ControlPlane, job_id: int, batch: list[OffloadKey], runs: GPURuns, now: float) -> None:
    """One store through the control plane, with every job it causes finished at once."""
    control.submit(TransferJob(JobId(job_id), JobKind.STORE, (GPUGroup(GroupIndex(0), tuple(batch), runs),)), now)
    finish_all(control, now)


def finish_all(control: ControlPlane, now: float) -> None:
    while jobs := control.collect().jobs:
        for emission in jobs:
            outcomes = tuple((STORED,) * len(group.keys) for group in emission.job.groups)
            control.finish(JobResult(emission.job.job_id, outcomes), now)
        control.pump(now)
    control.take_events()


def rate(work: Callable[[], int], seconds: float = 1.0, repetitions: int = 5) -> float:
    """Median operations a second of `work`, which returns how many it did."""
    rates = []
    for _ in range(repetitions):
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds / repetitions:
            done += work()
        rates.append(done / (time.perf_counter() - start))
    return statistics.median(rates)


def lookups(batch: int, policy: str) -> float:
    """Key lookups a second through ControlPlane.lookup, every key resident."""
    control = plane(100_000, 0, policy)
    runs = GPURuns.whole(np.arange(1000))
    for i in range(100):
        store(control, i, keys(i * 1000, 1000), runs, 0.0)
    wanted = [keys(i * batch % 99_000, batch) for i in range(64)]
    turn = iter(range(1 << 60))

    def work() -> int:
        control.lookup(wanted[next(turn) % 64], 0.0)
        return batch

    return rate(work)


def tier_cycles(batch: int, policy: str, slots: int = 100_000) -> float:
    """Store-complete-evict cycles a second of one tier: reserve (evicting), commit."""
    tier = owned(slots, policy)
    for start in range(0, slots, 1000):
        tier.commit(tier.reserve(keys(start, 1000)))
    fresh = [keys(slots + i * batch, batch) for i in range(max(1, 400_000 // batch))]
    turn = iter(range(1 << 60))

    def work() -> int:
        tier.commit(tier.reserve(fresh[next(turn) % len(fresh)]))
        tier.take_changes()
        return batch

    return rate(work)


def plane_cycles(batch: int, policy: str, rows: int = 100_000) -> float:
    """The same through the whole control plane: a store job in, a copy job out, its end, the eviction, the result."""
    control = plane(rows, 0, policy)
    runs = GPURuns.whole(np.arange(batch))
    count = max(1, 300_000 // batch)
    fresh = [keys(i * batch, batch) for i in range(count)]
    for i in range(rows // batch + 1):
        store(control, i, fresh[i], runs, 0.0)
    turn = iter(range(rows // batch + 1, 1 << 60))

    def work() -> int:
        i = next(turn)
        store(control, i, fresh[i % count], runs, 0.0)
        return batch

    return rate(work)


def waiting_step(requests: int, per_request: int, policy: str) -> float:
    """Median milliseconds of an engine step with many waiting requests: a poll of each, and one pump."""
    control = plane(2_000, 200_000, policy)
    runs = GPURuns.whole(np.arange(500))
    for i in range(requests * per_request // 500):
        store(control, i, keys(i * 500, 500), runs, 0.0)
    for r in range(requests):
        control.reserve(RequestId(f"r{r}"), keys(r * per_request, per_request), 0.0)
    control.collect()
    names = [RequestId(f"r{r}") for r in range(requests)]
    times = []
    for step in range(200):
        start = time.perf_counter()
        for name in names:
            reservation = control.reservation(name)
            assert reservation is not None
            if reservation.served:
                raise AssertionError("a request was served although nothing finished")
        control.pump(step * 1e-3)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def memory(slots: int, policy: str) -> float:
    """Bytes a slot of a full tier, keys of 16-byte hashes included, as the allocator counts them."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tier = owned(slots, policy)
    for start in range(0, slots, 1000):
        tier.commit(tier.reserve(keys(start, 1000)))
        tier.take_changes()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    if len(tier.directory) != slots:
        raise AssertionError(f"{len(tier.directory)} of {slots} slots are filled")
    return used / slots


@click.command()
@click.option("--slots", default=1_000_000, show_default=True, help="slots of the memory measurement")
@click.option("--batch", default=256, show_default=True, help="keys in one call")
@JSON_FILE
def main(slots: int, batch: int, json_file: Path | None) -> None:
    """Measure the control plane."""
    figures: dict[str, object] = {"machine": platform.machine(), "python": sys.version.split()[0], "batch": batch}
    for policy in ("lru", "arc"):
        figures[policy] = {
            "lookups_per_second": round(lookups(batch, policy)),
            "tier_cycles_per_second": round(tier_cycles(batch, policy)),
            "plane_cycles_per_second": round(plane_cycles(batch, policy)),
            "step_100x1000_waiting_ms": round(waiting_step(100, 1000, policy), 3),
            "bytes_per_slot": round(memory(slots, policy), 1),
        }
        click.echo(f"{policy}: " + ", ".join(f"{name} {value:,}" for name, value in figures[policy].items()))  # type: ignore[attr-defined]
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
