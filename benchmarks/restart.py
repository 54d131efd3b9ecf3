"""How long a filesystem tier takes to open again: by scan after kill -9, and from the snapshot of a clean close.

    python -m benchmarks.restart [--slots N] [--block-bytes N] [--folder DIR]

A child process really writes every slot and is killed with SIGKILL; the parent reopens, closes in order, reopens. After
each open some blocks are loaded and compared. The page cache is as warm as the machine leaves it; with --cold it is
dropped before each open, which needs root. `directory` is what the control plane then takes to enter the keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import xxhash

from kvtier.control.tier import OwnedTier
from kvtier.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.jobs import GroupTransfer, JobKind, RegionCut, TransferJob, int_array
from kvtier.keys import GroupIndex, JobId, OffloadKey, make_key
from kvtier.loadstore import Opened, TierContext
from kvtier.namespace import Namespace
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

    def _job(self, kind: JobKind, keys: Sequence[OffloadKey], slots: Sequence[int], gens: Sequence[int], cuts=()):
        rows = np.arange(len(keys), dtype=np.int64)
        group = GroupTransfer(GroupIndex(0), tuple(keys), rows, int_array(slots), int_array(gens))
        return TransferJob(JobId(1), kind, (group,), None, 0, tuple(cuts))

    async def write(self, opened: Opened) -> None:
        """Store a block in each of the first slots."""
        space = opened.space
        assert space is not None
        cut: set[int] = set()
        for start in range(0, self.slots, BATCH):
            slots = range(start, min(start + BATCH, self.slots))
            keys = [make_key(hashlib.sha256(slot.to_bytes(8, "big")).digest(), 0) for slot in slots]
            for row, key in enumerate(keys):
                self.rows.fill(row, key)
            fresh = {slot // space.slots_per_region for slot in slots} - cut
            cut |= fresh
            cuts = [RegionCut(region, space.slot_bytes[0], 1) for region in sorted(fresh)]
            result = await self.backend.store(self._job(JobKind.STORE, keys, slots, [slot + 1 for slot in slots], cuts))
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

    async def reopen(self, cold: bool) -> str:
        """Open, check and close; says how long opening took."""
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
        rate = self.slots / seconds
        return (
            f"{how:>8}: open {seconds:6.2f} s ({rate:9,.0f} slots/s), directory {entered:5.2f} s, "
            f"close {closed:5.2f} s  [{opened.mode}]"
        )


def drop_caches() -> None:
    """Forget what the kernel has read; needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


async def be_killed(store: Store) -> None:
    """Write everything, say so, and wait for the end."""
    await store.write(await store.open())
    print("written", flush=True)
    await asyncio.Event().wait()


def write_and_kill(root: Path, slots: int, block_bytes: int) -> float:
    """Fill a root in a child process and kill it. Returns the seconds it took to write."""
    arguments = ["--slots", str(slots), "--block-bytes", str(block_bytes), "--child", str(root)]
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.restart", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        word = child.stdout.readline().strip()
        seconds = time.perf_counter() - start
        child.send_signal(signal.SIGKILL)
    if word != "written":
        raise SystemExit("the child that was to write failed")
    return seconds


@click.command()
@click.option("--slots", default=2000, show_default=True, help="Slots to write.")
@click.option("--block-bytes", default=16384, show_default=True, help="Payload of a slot, a multiple of a page.")
@click.option("--folder", default=None, help="Where the root is made; a temporary folder by default.")
@click.option("--cold", is_flag=True, help="Drop the page cache before each open.")
@click.option("--child", default=None, hidden=True)
def main(slots: int, block_bytes: int, folder: str | None, cold: bool, child: str | None) -> None:
    """Time the reopening of a filesystem tier."""
    if child is not None:
        asyncio.run(be_killed(Store(Path(child), slots, block_bytes)))
        return
    with tempfile.TemporaryDirectory(dir=folder) as name:
        root = Path(name).resolve() / "root"
        seconds = write_and_kill(root, slots, block_bytes)
        print(f"wrote {slots:,} slots of {block_bytes:,} bytes in {seconds:.1f} s, then kill -9")
        store = Store(root, slots, block_bytes)
        for _ in range(2):
            print(asyncio.run(store.reopen(cold)))


if __name__ == "__main__":
    main()
