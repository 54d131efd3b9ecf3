"""How long it takes until a shared region is there, mapped and resident, beside vLLM's.

    python -m benchmarks.region [--vllm-python PYTHON] [--gib 4] [--json FILE] [--quick]

kvtier: `open_region`, private, by memfd and by name; memory is checked against every limit before any is touched. vLLM:
`SharedOffloadRegion` as its scheduler makes it (one call populates it) and as a worker does (a call for each row). One
region at a time, each in a process that has made one before; afterwards every page is written, and must not fault.
Medians of interleaved repetitions; a ratio is theirs over ours, the median over the pairs.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from benchmarks.options import JSON_FILE, QUICK, VLLM_PYTHON
from benchmarks.peer import Peer, PeerFailed
from benchmarks.report import ABSENT, GIB, Report, median, paired_ratio, table
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier_cpu import RegionSpec, Sharing, open_region

Make = Callable[[], float]


def ours(num_bytes: int, row_bytes: int, sharing: Sharing) -> Make:
    """Opens a region as one process does, writes every page, closes it."""
    geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, row_bytes),)),)), 4096)
    spec = RegionSpec(geometry, num_bytes // row_bytes, bytes(16), sharing)

    def make() -> float:
        started = time.perf_counter()
        region = open_region(spec)
        seconds = time.perf_counter() - started
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        region.view[:, :: os.sysconf("SC_PAGE_SIZE")] = 1
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        pages = region.view.size // os.sysconf("SC_PAGE_SIZE")
        region.close()
        if faults > pages // 100 + 100:
            raise AssertionError(f"{faults} of {pages} pages were not resident")
        return seconds

    return make


def theirs(peer: Peer, num_bytes: int, row_bytes: int, whole: bool) -> Make:
    """The same by vLLM."""

    def make() -> float:
        answer = peer.ask("make", num_bytes=num_bytes, row_bytes=row_bytes, whole=whole)
        if answer["bytes"] != num_bytes or answer["later_faults"] > num_bytes // 4096 // 100 + 100:
            raise AssertionError(f"vLLM's region is not what was asked for: {answer}")
        return float(answer["seconds"])

    return make


@click.command()
@VLLM_PYTHON
@click.option("--gib", default=4.0, show_default=True, help="GiB of the region.")
@click.option("--row-kib", default=256, show_default=True, help="KiB of a row.")
@click.option("--repetitions", default=5, show_default=True)
@QUICK
@JSON_FILE
def main(
    vllm_python: str | None, gib: float, row_kib: int, repetitions: int, quick: bool, json_file: Path | None
) -> None:
    """Measure the making of regions."""
    row_bytes = row_kib << 10
    num_bytes = (64 << 20 if quick else int(gib * GIB)) // row_bytes * row_bytes
    repetitions = 2 if quick else repetitions
    report = Report("region", {"bytes": num_bytes, "row_bytes": row_bytes, "repetitions": repetitions})
    report.head()
    makers = {
        "kvtier private": ours(num_bytes, row_bytes, Sharing.PRIVATE),
        "kvtier memfd": ours(num_bytes, row_bytes, Sharing.MEMFD),
    }
    with ExitStack() as stack:
        peer = _peer(vllm_python, stack, report)
        if peer is not None:
            makers["vllm scheduler"] = theirs(peer, num_bytes, row_bytes, whole=True)
            makers["vllm worker"] = theirs(peer, num_bytes, row_bytes, whole=False)
        found: dict[str, list[float]] = {name: [] for name in makers}
        for repetition in range(-1, repetitions):
            for name in list(makers)[:: 1 if repetition % 2 else -1]:
                seconds = makers[name]()
                if repetition >= 0:
                    found[name].append(seconds)
    best = min((name for name in found if name.startswith("vllm")), key=lambda name: median(found[name]), default=None)
    for name in (*makers, *(() if peer is not None else ("vllm scheduler", "vllm worker"))):
        report.results.append(_row(name, num_bytes, found, best))
    report.verified = True
    columns = ("region", "seconds", "GiB/s", "vLLM's best / it")
    table(
        "until it is resident",
        columns,
        [[row[key] for key in ("who", "seconds", "gib_s", "ratio")] for row in report.results],
    )
    report.end(json_file)


def _peer(python: str | None, stack: ExitStack, report: Report) -> Peer | None:
    if python is None:
        report.notes.append("vLLM: absent (no --vllm-python)")
        return None
    try:
        peer = stack.enter_context(Peer(python, "benchmarks.region_vllm"))
        report.versions["vllm"] = peer.ask("open")["version"]
    except PeerFailed as error:
        report.notes.append(f"vLLM: absent ({error})")
        return None
    return peer


def _row(name: str, num_bytes: int, found: dict[str, list[float]], best: str | None) -> dict[str, Any]:
    if name not in found:
        return {"who": name, "seconds": ABSENT, "gib_s": None, "ratio": None}
    seconds = median(found[name])
    ratio = paired_ratio(found[best], found[name]) if best is not None else None
    return {"who": name, "seconds": seconds, "gib_s": num_bytes / seconds / GIB, "ratio": ratio, "all": found[name]}


if __name__ == "__main__":
    main()
