"""Lookups and whole cycles of the control plane beside vLLM's: how many keys a second one core decides about.

    python -m benchmarks.lookup [--vllm-python PYTHON] [--json FILE] [--quick]

`resident` keys are in the CPU tier, or on disk. `lookup` asks for a request's keys; `load` looks them up, pins them and
ends; `store` looks up new keys, makes room by evicting as many, and ends. vLLM's fs tier is asked in one step, answers
from a thread of its own, and is read in the next; kvtier knows what is on disk without asking it. No bytes move. Keys
are equal to those stored and never the same objects, as an engine would bring them. Medians of interleaved repetitions;
a ratio is the median over the pairs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click
import numpy as np

from benchmarks.options import JSON_FILE, QUICK, VLLM_PYTHON
from benchmarks.peer import Peer, PeerFailed, prefix_of, rate
from benchmarks.report import ABSENT, Report, median, paired_ratio, table
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.settings import StackSettings
from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.tier.contract import LookupResult, Opened, Recovered, SlotSpace
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import LOADED, STORED, BlockOutcome, GPUGroup, JobKind, JobResult, RegionFormat, TransferJob
from kvtier.types.keys import CPU, FS, GroupIndex, JobId, OffloadKey, make_key

ROW_BYTES = 65536
BATCHES = (1, 8, 64, 512, 4096, 8192)
QUICK_BATCHES = (1, 64)
WORKS = ("lookup", "fs_lookup", "load_cycle", "store_cycle")


class Plane:
    """kvtier's side: one control plane with the keys in rows, one with them on disk, one that is full and evicts."""

    def __init__(self, resident: int) -> None:
        self._random = random.Random(1)
        self._jobs = itertools.count(1)
        self.keys = self._fresh(resident)
        self._in_rows, self._full = (self._filled(resident) for _ in range(2))
        space = SlotSpace(resident * ROW_BYTES, (1,), (ROW_BYTES,))
        slots = np.arange(resident, dtype=np.int64)
        recovered = Recovered(self.keys, slots, slots + 1, (RegionFormat(0, ROW_BYTES, 1),))
        fs = TierSpec("fs", FS, Opened(resident * ROW_BYTES, space, recovered))
        self._on_disk = ControlPlane(_cpu(64), [fs], settings=StackSettings(gather_seconds=0.0))

    def _fresh(self, count: int) -> list[OffloadKey]:
        return [make_key(self._random.randbytes(32), 0) for _ in range(count)]

    def _filled(self, resident: int) -> ControlPlane:
        plane = ControlPlane(_cpu(resident), [])
        for first in range(0, resident, 512):
            self._store(plane, self.keys[first : first + 512])
        return plane

    def _job(self, kind: JobKind, keys: list[OffloadKey]) -> TransferJob:
        group = GPUGroup(GroupIndex(0), tuple(keys), GPURuns.whole(np.arange(len(keys))))
        return TransferJob(JobId(next(self._jobs)), kind, (group,))

    def _store(self, plane: ControlPlane, keys: list[OffloadKey]) -> int:
        return self._cycle(plane, self._job(JobKind.STORE, keys), LookupResult.MISS, STORED)

    def _cycle(self, plane: ControlPlane, job: TransferJob, state: LookupResult, ending: BlockOutcome) -> int:
        """Look up, submit, carry out, take the results; returns how many keys were in that state and ended so."""
        keys = job.groups[0].keys
        found = plane.lookup(keys, 0.0).count(state)
        plane.submit(job, 0.0)
        for emission in plane.collect().jobs:
            outcomes = tuple((ending,) * len(group.keys) for group in emission.job.groups)
            plane.finish(JobResult(emission.job.job_id, outcomes), 0.0)
        plane.pump(0.0)
        ended = sum(outcome is ending for result in plane.collect().results for outcome in result.outcomes[0])
        plane.take_events()
        return min(found, ended)

    def measure(self, what: str, batch: int, seconds: float) -> float:
        """Keys a second. Raises AssertionError unless all keys were where they are."""
        turn = itertools.count()

        def prepare() -> tuple[list[OffloadKey], TransferJob | None]:
            if what == "store_cycle":
                keys = self._fresh(batch)
                return keys, self._job(JobKind.STORE, keys)
            keys = [OffloadKey(key) for key in prefix_of(self.keys, batch, next(turn))]
            return keys, self._job(JobKind.LOAD, keys) if what == "load_cycle" else None

        def work(question: tuple[list[OffloadKey], TransferJob | None]) -> int:
            keys, job = question
            if what == "lookup":
                done = self._in_rows.lookup(keys, 0.0).count(LookupResult.HIT)
            elif what == "fs_lookup":
                done = self._on_disk.lookup(keys, 0.0).count(LookupResult.HIT_PENDING)
            elif what == "load_cycle":
                assert job is not None
                done = self._cycle(self._in_rows, job, LookupResult.HIT, LOADED)
            else:
                assert job is not None
                done = self._cycle(self._full, job, LookupResult.MISS, STORED)
            if done != len(keys):
                raise AssertionError(f"{what}: {done} of {len(keys)} keys")
            return done

        return rate(prepare, work, seconds)


def _cpu(rows: int) -> TierSpec:
    return TierSpec("cpu", CPU, Opened(rows * ROW_BYTES, SlotSpace(rows * ROW_BYTES, (1,), (ROW_BYTES,))))


def repeat(contestants: list[Callable[[], float]], repetitions: int) -> list[list[float]]:
    """Each contestant's figures, all of them in turn in every repetition."""
    found: list[list[float]] = [[] for _ in contestants]
    for repetition in range(repetitions):
        order = list(range(len(contestants)))
        for number in order if repetition % 2 == 0 else order[::-1]:
            found[number].append(contestants[number]())
    return found


@click.command()
@VLLM_PYTHON
@click.option("--resident", default=100_000, show_default=True, help="Keys resident.")
@click.option("--seconds", default=0.2, show_default=True, help="Of each measurement.")
@click.option("--repetitions", default=5, show_default=True)
@click.option("--folder", help="Where vLLM's fs tier keeps its (empty) files; a temporary folder by default.")
@QUICK
@JSON_FILE
def main(
    vllm_python: str | None,
    resident: int,
    seconds: float,
    repetitions: int,
    folder: str | None,
    quick: bool,
    json_file: Path | None,
) -> None:
    """Measure lookups and cycles."""
    batches = QUICK_BATCHES if quick else BATCHES
    if quick:
        resident, seconds, repetitions = 2000, 0.01, 2
    report = Report("lookup", {"resident": resident, "seconds": seconds, "repetitions": repetitions})
    report.head()
    ours = Plane(resident)
    with ExitStack() as stack:
        peer: Peer | None = None
        if vllm_python is None:
            report.notes.append("vLLM: absent (no --vllm-python)")
        else:
            try:
                peer = stack.enter_context(Peer(vllm_python, "benchmarks.lookup_vllm"))
                report.versions["vllm"] = peer.ask("open", resident=resident, folder=folder, fs=True)["version"]
            except PeerFailed as error:
                peer = None
                report.notes.append(f"vLLM: absent ({error})")
        for what in WORKS:
            for batch in batches:
                report.results.append(_row(what, batch, ours, peer, (seconds, repetitions)))
        if peer is not None:
            peer.ask("close")
    report.verified = True
    table(
        "keys a second, one core",
        ("what", "batch", "kvtier", "vLLM", "ratio"),
        [[row["what"], row["batch"], row["kvtier"], row["vllm"], row["ratio"]] for row in report.results],
    )
    report.end(json_file)


def _row(what: str, batch: int, ours: Plane, peer: Peer | None, course: tuple[float, int]) -> dict[str, object]:
    seconds, repetitions = course
    contestants: list[Callable[[], float]] = [lambda: ours.measure(what, batch, seconds)]
    if peer is not None:
        asked = peer
        contestants.append(lambda: float(asked.ask("measure", what=what, batch=batch, seconds=seconds)["rate"]))
    mine, *others = repeat(contestants, repetitions)
    theirs = others[0] if others else []
    return {
        "what": what,
        "batch": batch,
        "kvtier": round(median(mine)),
        "vllm": round(median(theirs)) if theirs else ABSENT,
        "ratio": paired_ratio(mine, theirs),
        "all": {"kvtier": mine, "vllm": theirs},
    }


if __name__ == "__main__":
    main()
