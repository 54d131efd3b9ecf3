"""Passes of blocks to a server and back by clients in turns, and what they come to, for remote tiers."""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.beside import Neighbour, Work, spin
from benchmarks.remote_clients import Client, Setup, Tier
from benchmarks.report import GIB, Report, median, paired_ratio, percentile, table

LOOKUP_KEYS = 256
Row = dict[str, Any]
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(client: Client) -> float:
    """CPU seconds of this process, of its children that have ended, and of those of the client that have not."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_of_process, client.processes()))


def _of_process(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS


def timed(client: Client, move: Callable[[], None], beside: Work | None) -> tuple[float, float]:
    """Wall and CPU seconds of one pass, beside another thread or alone."""
    with Neighbour(beside):
        begun, cpu = time.perf_counter(), cpu_seconds(client)
        move()
        return time.perf_counter() - begun, cpu_seconds(client) - cpu


def both_ways(client: Client, content: Any, beside: Work | None) -> dict[str, tuple[float, float]]:
    """One pass to the server and one back, compared with what was put."""
    client.rows[:] = content
    put = timed(client, client.put, beside)
    client.rows[:] = 0
    get = timed(client, client.get, beside)
    if client.compared and not np.array_equal(client.rows, content):
        raise AssertionError(f"{client.name}: a block is wrong")
    return {"put": put, "get": get}


def measure(setup: Setup, kinds: Sequence[type[Client]], repetitions: int) -> list[Row]:
    """The rows of one block size."""
    content = np.random.default_rng(setup.block_bytes).integers(0, 256, (setup.blocks, setup.block_bytes), np.uint8)
    clients = [kind(setup) for kind in kinds]
    found: list[Row] = []
    try:
        for client in clients:
            both_ways(client, content, None)
        for beside in (None, spin):
            passes: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
            for number in range(repetitions):
                for client in clients if number % 2 else reversed(clients):
                    for direction, figures in both_ways(client, content, beside).items():
                        passes[client.name, direction].append(figures)
            found += rows_of(setup, passes, beside is not None)
        found += lookups(setup, clients, repetitions)
    finally:
        for client in clients:
            client.close()
    return found


def rows_of(setup: Setup, passes: dict[tuple[str, str], list[tuple[float, float]]], busy: bool) -> list[Row]:
    """What one set of passes comes to. Beside a busy thread the CPU seconds are that thread's too, so they are left
    out, and the ratio is that of the speed."""
    gib = setup.block_bytes * setup.blocks / GIB
    rows = []
    for (name, direction), figures in passes.items():
        wall, cpu = ([one[part] for one in figures] for part in (0, 1))
        bare_wall, bare_cpu = ([one[part] for one in passes["bare", direction]] for part in (0, 1))
        rows.append(
            {
                "size_kib": setup.block_bytes >> 10,
                "what": f"{direction}, beside a busy thread" if busy else direction,
                "client": name,
                "gib_per_second": gib / median(wall),
                "cpu_seconds_per_gib": None if busy else median(cpu) / gib,
                "cpu_ratio": None if busy else paired_ratio(cpu, bare_cpu),
                "speed_ratio": paired_ratio(bare_wall, wall),
                "all": figures,
            }
        )
    return rows


def lookups(setup: Setup, clients: list[Client], repetitions: int) -> list[Row]:
    """Lookups of the tier, alone and beside loads."""
    tier = next(client for client in clients if isinstance(client, Tier))
    alone, beside = (
        [second for _ in range(repetitions) for second in tier.lookups(LOOKUP_KEYS, 10, loading)]
        for loading in (False, True)
    )
    shared = {"size_kib": setup.block_bytes >> 10, "client": "kvtier", "what": f"lookup of {LOOKUP_KEYS}"}
    figures = {f"p{rank}_ms": percentile(alone, rank) * 1e3 for rank in (50, 99)}
    loaded = {f"p{rank}_ms_beside_loads": percentile(beside, rank) * 1e3 for rank in (50, 99)}
    return [shared | figures | loaded | {"ratio": median(beside) / median(alone)}]


def finish(report: Report, json_file: Path | None) -> None:
    """Every pass was compared: print the tables and the report's end, and write the record if a file is named."""
    report.verified = True
    names = ("size_kib", "what", "client", "gib_per_second", "cpu_seconds_per_gib", "cpu_ratio", "speed_ratio")
    moved = [row for row in report.results if "all" in row]
    table(
        "blocks to a server and back",
        ("KiB", "what", "client", "GiB/s", "CPU s/GiB", "times bare", "speed, times bare"),
        [[row[name] for name in names] for row in moved],
    )
    names = ("size_kib", "p50_ms", "p99_ms", "p50_ms_beside_loads", "p99_ms_beside_loads", "ratio")
    table(
        f"lookups of {LOOKUP_KEYS} keys",
        ("KiB", "p50 ms", "p99 ms", "p50 ms beside loads", "p99 ms beside loads", "ratio of the medians"),
        [[row[name] for name in names] for row in report.results if "all" not in row],
    )
    report.end(json_file)
