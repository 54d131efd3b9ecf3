"""How long a filesystem tier takes to open again: by scan after kill -9, and from the snapshot of a clean close.

    python -m benchmarks.restart [--slots 10000,100000,1000000] [--folder DIR] [--cold] [--json FILE] [--quick]

A child process really writes every slot and is killed with SIGKILL; the parent opens the tier again, closes it in order
and opens it again. For each further repetition a child opens it and is killed. After each open some blocks are loaded
and compared. The page cache is as warm as the machine leaves it; with --cold it is dropped before each open, which
needs root. `directory` is what the control plane then takes to enter the keys. Medians.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import xxhash

from benchmarks.options import JSON_FILE, QUICK
from benchmarks.report import Report, median, table
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.tier.contract import Opened, TierContext
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import JobKind, RegionFormat, RowGroup, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey, make_key
from kvtier.types.namespace import Namespace
from kvtier_fs import FSBackend, FSOptions

ROOT = Path(__file__).resolve().parent.parent
BATCH = 256
SAMPLE = 256


class Rows:
    """A page-aligned region of one process, with a checksum for each row."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        self.view = np.frombuffer(mmap.mmap(-1, num_rows * row_bytes), dtype=np.uint8).reshape(num_rows, row_bytes)
        self.digests = [bytes(16)] * num_rows

    def fill(self, row: int, key: OffloadKey) -> None:
        """Put the bytes that belong to a key into a row: its digest, over and over."""
        self.view[row] = np.resize(np.frombuffer(hashlib.sha256(key).digest(), dtype=np.uint8), self.row_bytes)
        self.digests[row] = xxhash.xxh3_128_digest(self.view[row].data)

    def checksum(self, row: int) -> bytes:
        return self.digests[row]

    def set_checksum(self, row: int, digest: bytes) -> None:
        self.digests[row] = digest


class Store:
    """One root of one block size, opened and closed as asked."""

    def __init__(self, root: Path, slots: int, block_bytes: int) -> None:
        self.geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, block_bytes),)),)), mmap.PAGESIZE)
        slot = block_bytes + mmap.PAGESIZE
        capacity = int(slots * slot * 1.1) + (4 << 20)
        self.options = FSOptions.model_validate({"roots": [str(root)], "capacity": capacity, "min_free_bytes": 0})
        self.slots = slots
        self.rows = Rows(BATCH, self.geometry.row_bytes)
        self.backend = FSBackend(self.options)

    async def open(self) -> Opened:
        """Open a new backend on the root."""
        self.backend = FSBackend(self.options)
        namespace = Namespace(self.geometry.layout)
        context = TierContext("fs", self.geometry, namespace, time.monotonic, rows=self.rows)  # type: ignore[arg-type]
        return await self.backend.open(context)

    def _job(self, kind: JobKind, keys: Sequence[OffloadKey], slots: Sequence[int], gens: Sequence[int], formats=()):
        group = RowGroup(GroupIndex(0), tuple(keys), range(len(keys)), slots, gens)
        return TransferJob(JobId(1), kind, (group,), None, 0, tuple(formats))

    async def write(self, opened: Opened) -> None:
        """Store a block in each of the first slots."""
        space = opened.space
        assert space is not None
        formatted: set[int] = set()
        for start in range(0, self.slots, BATCH):
            slots = range(start, min(start + BATCH, self.slots))
            keys = [make_key(hashlib.sha256(slot.to_bytes(8, "big")).digest(), 0) for slot in slots]
            for row, key in enumerate(keys):
                self.rows.fill(row, key)
            fresh = {slot // space.slots_per_region for slot in slots} - formatted
            formatted |= fresh
            formats = [RegionFormat(region, space.slot_bytes[0], 1) for region in sorted(fresh)]
            result = await self.backend.store(
                self._job(JobKind.STORE, keys, slots, [slot + 1 for slot in slots], formats)
            )
            bad = [outcome for outcome in result.outcomes[0] if not outcome.ok]
            if bad:
                raise SystemExit(f"a block was not stored: {bad[0]}")

    async def check(self, opened: Opened) -> None:
        """Every block was found; a sample of them is loaded and compared byte by byte."""
        found = opened.recovered
        if len(found.keys) != self.slots:
            raise SystemExit(f"{len(found.keys)} blocks were found, {self.slots} were stored")
        picks = np.linspace(0, self.slots - 1, min(SAMPLE, self.slots)).astype(int)
        keys = [found.keys[at] for at in picks]
        self.rows.view[:] = 0xEE
        job = self._job(JobKind.LOAD, keys, found.slots[picks].tolist(), found.generations[picks].tolist())
        outcomes = (await self.backend.load(job)).outcomes[0]
        for row, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            got = bytes(self.rows.view[row])
            self.rows.fill(row, key)
            if not outcome.ok or got != bytes(self.rows.view[row]):
                raise SystemExit(f"block {row} of the sample: {outcome}")

    async def reopen(self, cold: bool) -> tuple[str, dict[str, float]]:
        """Open, check and close. Returns what it was opened from, and the seconds that each step took."""
        if cold:
            drop_caches()
        start = time.perf_counter()
        opened = await self.open()
        seconds = time.perf_counter() - start
        assert opened.space is not None
        directory = OwnedTier("fs", opened.space, "lru")
        start = time.perf_counter()
        directory.restore(opened.recovered)
        entered = time.perf_counter() - start
        await self.check(opened)
        how = "snapshot" if self.backend.counters["open.snapshot"] else "scan"
        start = time.perf_counter()
        await self.backend.close()
        closed = time.perf_counter() - start
        self.mode = opened.mode
        return how, {"open": seconds, "directory": entered, "close": closed}


def drop_caches() -> None:
    """Forget what the kernel has read; needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


async def be_killed(store: Store, writing: bool) -> None:
    """Open, write everything if asked to, say so, and wait for the end."""
    opened = await store.open()
    if writing:
        await store.write(opened)
    print("ready", flush=True)
    await asyncio.Event().wait()


def open_and_kill(root: Path, slots: int, block_bytes: int, writing: bool) -> float:
    """Open a root in a child process, fill it if asked to, and kill the child. Returns the seconds that took."""
    arguments = ["--slots", str(slots), "--block-bytes", str(block_bytes), "--child", str(root)]
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.restart", *arguments, *(["--writing"] if writing else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        word = child.stdout.readline().strip()
        seconds = time.perf_counter() - start
        child.send_signal(signal.SIGKILL)
    if word != "ready":
        raise SystemExit("the child that was to be killed failed")
    return seconds


def measure(root: Path, slots: int, block_bytes: int, cold: bool, repetitions: int) -> list[dict[str, Any]]:
    """The rows of one number of slots: by scan, and from the snapshot."""
    written = open_and_kill(root, slots, block_bytes, writing=True)
    store = Store(root, slots, block_bytes)
    found: dict[str, list[dict[str, float]]] = {"scan": [], "snapshot": []}
    for repetition in range(repetitions):
        if repetition:
            open_and_kill(root, slots, block_bytes, writing=False)
        for wanted in found:
            how, seconds = asyncio.run(store.reopen(cold))
            if how != wanted:
                raise SystemExit(f"opened by {how} where {wanted} was to be expected")
            found[how].append(seconds)
    return [
        {
            "what": f"{slots:,} slots, {how}",
            **{f"{step}_seconds": median(each[step] for each in rows) for step in ("open", "directory", "close")},
            "slots_per_second": slots / median(each["open"] for each in rows),
            "write_seconds": written,
            "mode": store.mode,
            "all": rows,
        }
        for how, rows in found.items()
    ]


@click.command()
@click.option("--slots", default="10000,100000,1000000", show_default=True, help="Slots to write; a store for each.")
@click.option("--block-bytes", default=16384, show_default=True, help="Payload of a slot, a multiple of a page.")
@click.option("--repetitions", default=3, show_default=True)
@click.option("--folder", default=None, help="Where the roots are made; a temporary folder by default.")
@click.option("--cold", is_flag=True, help="Drop the page cache before each open.")
@QUICK
@click.option("--child", default=None, hidden=True)
@click.option("--writing", is_flag=True, hidden=True)
@JSON_FILE
def main(
    slots: str,
    block_bytes: int,
    repetitions: int,
    folder: str | None,
    cold: bool,
    quick: bool,
    child: str | None,
    writing: bool,
    json_file: Path | None,
) -> None:
    """Time the reopening of a filesystem tier."""
    if child is not None:
        asyncio.run(be_killed(Store(Path(child), int(slots), block_bytes), writing))
        return
    counts = [int(count) for count in slots.split(",")]
    if quick:
        counts, repetitions = [500], 1
    report = Report("restart", {"slots": slots, "block_bytes": block_bytes, "repetitions": repetitions, "cold": cold})
    report.head()
    for count in counts:
        with temporary_folder("kvtier-restart-", folder) as name:
            needed, free = int(count * (block_bytes + mmap.PAGESIZE) * 1.2), shutil.disk_usage(name).free
            if needed > free:
                report.notes.append(
                    f"{count:,} slots: left out, they need {needed >> 30} GiB and {free >> 30} are free"
                )
                continue
            report.results += measure(Path(name).resolve() / "root", count, block_bytes, cold, repetitions)
    report.verified = True
    table(
        "reopening",
        ("store", "open s", "slots/s", "directory s", "close s"),
        [
            [row[key] for key in ("what", "open_seconds", "slots_per_second", "directory_seconds", "close_seconds")]
            for row in report.results
        ],
    )
    report.end(json_file)


if __name__ == "__main__":
    main()
