"""A world for the control plane: rows, slots and GPU blocks that hold tokens, and jobs that end when told to.

A token names the key and the epoch it was stored in, so a wrong block names its owner. While a job is under way its
places are watched: nobody else may write what it reads or touch what it writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvtier.control.jobs import PresenceQuery, TierJob
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.settings import StackSettings
from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.tier.contract import LookupResult, Opened, SlotSpace
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import (
    CORRUPT,
    LOADED,
    MISSING,
    STORED,
    BlockOutcome,
    GPUGroup,
    JobKind,
    JobResult,
    TransferJob,
    failed,
)
from kvtier.types.keys import CPU, FS, JobId, Medium, OffloadKey, key_group, make_key

ROW_BYTES = 4096


def key(number: int, group: int = 0) -> OffloadKey:
    return make_key(number.to_bytes(16, "big"), group)


def key_number(k: OffloadKey) -> int:
    return int.from_bytes(k[:16], "big")


def cpu_setup(rows: int, policy: str = "lru", groups: int = 1) -> TierSpec:
    space = SlotSpace(rows * ROW_BYTES, (1,), (ROW_BYTES,) * groups)
    return TierSpec("cpu", CPU, Opened(rows * ROW_BYTES, space), policy)


def fs_setup(
    slots: int = 64, regions: int = 4, sizes: tuple[int, ...] = (ROW_BYTES,), roots: int = 1, **more: object
) -> TierSpec:
    per_region = slots // regions
    space = SlotSpace(per_region * max(sizes), (regions // roots,) * roots, sizes)
    return TierSpec("fs", FS, Opened(slots * max(sizes), space), **more)  # type: ignore[arg-type]


def shared_setup(hint_seconds: float | None = None, **more: object) -> TierSpec:
    """A shared tier; `hint_seconds` is for hits and misses alike."""
    if hint_seconds is not None:
        more |= {"hit_hint_seconds": hint_seconds, "miss_hint_seconds": hint_seconds}
    return TierSpec("shared", Medium("SHARED"), Opened(1 << 30, None), **more)  # type: ignore[arg-type]


def plane_settings(**more: Any) -> StackSettings:
    """Settings of a plane in which no row waits for others before it is written back, unless that is given."""
    return StackSettings(**{"gather_seconds": 0.0} | more)


@dataclass
class Watch:
    """Who reads and who writes a place right now."""

    readers: dict[tuple[str, int], list[JobId]] = field(default_factory=dict)
    writers: dict[tuple[str, int], JobId] = field(default_factory=dict)

    def read(self, place: tuple[str, int], job: JobId) -> None:
        assert place not in self.writers, f"{place} is read by job {job} while job {self.writers[place]} writes it"
        self.readers.setdefault(place, []).append(job)

    def write(self, place: tuple[str, int], job: JobId) -> None:
        assert place not in self.writers, f"{place} has two writers: {job} and {self.writers[place]}"
        assert not self.readers.get(place), f"{place} is written by job {job} while {self.readers[place]} read it"
        self.writers[place] = job

    def done(self, job: JobId) -> None:
        self.writers = {place: owner for place, owner in self.writers.items() if owner != job}
        self.readers = {place: [j for j in jobs if j != job] for place, jobs in self.readers.items()}
        self.readers = {place: jobs for place, jobs in self.readers.items() if jobs}


class World:
    """Drives one control plane. `bytes_at[(place, id)]` is what a place holds."""

    def __init__(
        self, cpu: TierSpec, lowers: list[TierSpec], factor: int = 1, limits: StackSettings | None = None
    ) -> None:
        self.plane = ControlPlane(cpu, lowers, factor, limits or plane_settings())
        self.factor = factor
        self.names = ["cpu", *(plan.name for plan in lowers)]
        self.shared = {i for i, plan in enumerate(lowers, start=1) if plan.opened.space is None}
        self.bytes_at: dict[tuple[str, int], tuple[OffloadKey, int]] = {}
        self.remote: dict[OffloadKey, tuple[OffloadKey, int]] = {}
        self.running: dict[JobId, TierJob] = {}
        self.late: dict[JobId, TierJob] = {}
        self.watch = Watch()
        self.results: dict[JobId, JobResult] = {}
        self.jobs: dict[JobId, TransferJob] = {}
        self.now = 0.0
        self._next_job = 1
        self._next_gpu = 0
        self.wrong: list[str] = []
        self.silent = False
        self.unanswered: list[PresenceQuery] = []

    # -- the engine's side

    def gpu_blocks(self, count: int) -> list[int]:
        first = self._next_gpu
        self._next_gpu += count
        return list(range(first, first + count))

    def job(self, kind: JobKind, keys: list[OffloadKey], timeout: float | None = 100.0) -> TransferJob:
        groups: dict[int, list[OffloadKey]] = {}
        for k in keys:
            groups.setdefault(key_group(k), []).append(k)
        transfers = []
        for group, members in groups.items():
            ids = self.gpu_blocks(len(members) * self.factor)
            if kind is JobKind.STORE:
                for i, k in enumerate(members):
                    for block in ids[i * self.factor : (i + 1) * self.factor]:
                        self.bytes_at["gpu", block] = (k, self.plane.control.epoch)
            transfers.append(GPUGroup(group, tuple(members), GPURuns.whole(ids, self.factor)))
        job_id = JobId(self._next_job)
        self._next_job += 1
        return TransferJob(job_id, kind, tuple(transfers), None if timeout is None else self.now + timeout)

    def submit(self, kind: JobKind, keys: list[OffloadKey], timeout: float | None = 100.0) -> JobId:
        job = self.job(kind, keys, timeout)
        self.jobs[job.job_id] = job
        self.plane.submit(job, self.now)
        self.step()
        return job.job_id

    def store(self, *numbers: int, timeout: float | None = 100.0) -> JobId:
        return self.submit(JobKind.STORE, [key(n) for n in numbers], timeout)

    def load(self, *numbers: int, timeout: float | None = 100.0) -> JobId:
        return self.submit(JobKind.LOAD, [key(n) for n in numbers], timeout)

    def statuses(self, job_id: JobId) -> list[str]:
        return [outcome.status.value for group in self.results[job_id].outcomes for outcome in group]

    # -- the data plane's side

    def _places(self, emission: TierJob) -> list[tuple[tuple[str, int], tuple[str, int] | None, OffloadKey]]:
        """(source, target, key) of each block (each GPU page for the CPU tier); target None: the remote store."""
        name = self.names[emission.position]
        load = emission.job.kind is JobKind.LOAD
        result = []
        if emission.position == 0:
            for group in emission.job.gpu_groups:
                blocks, _, gpu = group.runs.pages()
                for block, page in zip(blocks.tolist(), gpu.tolist(), strict=True):
                    row, side = ("row", int(group.rows[block])), ("gpu", page)
                    result.append((row, side, group.keys[block]) if load else (side, row, group.keys[block]))
            return result
        for below in emission.job.row_groups:
            for i, k in enumerate(below.keys):
                row = ("row", below.rows[i])
                low = ("remote", 0) if emission.position in self.shared else (name, below.slots[i])
                result.append((low, row, k) if load else (row, low, k))
        return result

    def collect(self) -> None:
        """Take what the plane decided; its jobs are under way from here on."""
        decided = self.plane.collect()
        for emission in decided.jobs:
            self.running[emission.job.job_id] = emission
            for source, target, _ in self._places(emission):
                if source[0] not in ("gpu", "remote"):
                    self.watch.read(source, emission.job.job_id)
                watched = target is not None and target[0] not in ("gpu", "remote")
                if watched and self.watch.writers.get(target) != emission.job.job_id:
                    self.watch.write(target, emission.job.job_id)
        for result in decided.results:
            assert result.job_id not in self.results, "a job ended twice"
            self.results[result.job_id] = result
            self._verify(result)
        for question in decided.queries:
            if self.silent:
                self.unanswered.append(question)
                continue
            answers = [LookupResult.HIT if k in self.remote else LookupResult.MISS for k in question.keys]
            self.plane.answer(question, answers, self.now)

    def _verify(self, result: JobResult) -> None:
        job = self.jobs[result.job_id]
        for group, outcomes in zip(job.gpu_groups, result.outcomes, strict=True):
            assert len(outcomes) == len(group.keys)
            if job.kind is not JobKind.LOAD:
                continue
            blocks, _, gpu = group.runs.pages()
            for block, page in zip(blocks.tolist(), gpu.tolist(), strict=True):
                if outcomes[block].ok:
                    held = self.bytes_at.get(("gpu", page))
                    if held != (group.keys[block], self.plane.control.epoch):
                        self.wrong.append(f"{group.keys[block].hex()} loaded as {held}")

    def _move(self, emission: TierJob) -> None:
        for source, target, k in self._places(emission):
            token = self.remote.get(k) if source[0] == "remote" else self.bytes_at.get(source)
            if target is not None and target[0] == "remote":
                if token is not None and emission.job.epoch == self.plane.control.epoch:
                    self.remote[k] = token
            elif target is not None and token is not None:
                self.bytes_at[target] = token

    def finish(self, job_id: JobId, fault: str | None = None, every: int = 1) -> None:
        """End a job in time; with a fault, every n-th block gets it (`failed`, `corrupt`)."""
        emission = self.running.pop(job_id)
        self._move(emission)
        load = emission.job.kind is JobKind.LOAD
        number = 0
        outcomes = []
        for group in emission.job.groups:
            mine = []
            for k in group.keys:
                number += 1
                if fault and number % every == 0:
                    mine.append(failed(5) if fault == "failed" or not load else CORRUPT)
                elif load and emission.position in self.shared and k not in self.remote:
                    mine.append(MISSING)
                else:
                    mine.append(LOADED if load else STORED)
            outcomes.append(tuple(mine))
        self.watch.done(job_id)
        self.plane.finish(JobResult(job_id, tuple(outcomes), emission.job.num_blocks * ROW_BYTES, 0.001), self.now)
        self.step()

    def end(self, job_id: JobId, *outcomes: BlockOutcome) -> None:
        """End a job in time with these outcomes, one for each block in the job's own order (one alone: for all)."""
        emission = self.running.pop(job_id)
        self._move(emission)
        self.watch.done(job_id)
        total = emission.job.num_blocks
        left = iter(outcomes * total if len(outcomes) == 1 else outcomes)
        result = tuple(tuple(next(left) for _ in group.keys) for group in emission.job.groups)
        assert next(left, None) is None or len(outcomes) == 1, f"{len(outcomes)} outcomes for {total} blocks"
        self.plane.finish(JobResult(job_id, result, total * ROW_BYTES, 0.001), self.now)
        self.step()

    def under_way(self, position: int, kind: JobKind) -> list[JobId]:
        """Jobs of one kind on the tier at a position, oldest first."""
        return [j for j, e in self.running.items() if e.position == position and e.job.kind is kind]

    def run_tier(self, position: int) -> None:
        """End everything under way on one tier well, and what follows from it there."""
        while jobs := [j for j, e in self.running.items() if e.position == position]:
            self.finish(jobs[0])

    def numbers(self, job_id: JobId) -> list[int]:
        """The numbers of the keys of a job under way, in the job's own order."""
        emission = self.running.get(job_id) or self.late[job_id]
        return [key_number(k) for group in emission.job.groups for k in group.keys]

    def held_below(self, position: int) -> int:
        """Rows that transfers of a lower tier hold: under way, or late and not ended."""
        return sum(
            emission.job.num_blocks
            for jobs in (self.running, self.late)
            for emission in jobs.values()
            if emission.position == position
        )

    def make_late(self, job_id: JobId) -> None:
        emission = self.running.pop(job_id)
        self.late[job_id] = emission
        self.plane.on_late(job_id, self.now)
        self.step()

    def end_late(self, job_id: JobId, landed: bool) -> None:
        emission = self.late.pop(job_id)
        if landed:
            self._move(emission)
        self.watch.done(job_id)
        self.plane.on_end(job_id, self.now)
        self.step()

    def step(self) -> None:
        self.plane.pump(self.now)
        self.collect()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    def run_all(self, limit: int = 10_000) -> None:
        """Let everything under way end well, oldest first, until nothing is under way."""
        for _ in range(limit):
            if not self.running:
                return
            self.finish(next(iter(self.running)))
        raise AssertionError(f"{len(self.running)} jobs are still under way after {limit}")

    def check(self) -> None:
        assert not self.wrong, self.wrong
        for position in range(1, len(self.names)):
            held, most = self.held_below(position), max(1, self.plane.control.num_rows // 4)
            assert held <= most, f"transfers of {self.names[position]} hold {held} rows, more than {most}"
            lower = self.plane.control.lowers[position - 1]
            late = sum(e.job.num_blocks for e in self.late.values() if e.position == position)
            assert (lower.rows_in_flight, lower.rows_late) == (held, late)
        self.plane.check_integrity()


def below(count: int, rows: int = 8, slots: int = 64, others: list[TierSpec] | None = None, **more: object) -> World:
    """A world with keys 1 .. count in its first lower tier and other keys, from 1000 on, in all rows of the CPU tier.

    `more` are options of the first lower tier; `others` are tiers below it.
    """
    world = World(cpu_setup(rows), [fs_setup(slots, **more), *(others or [])])
    step = max(1, rows // 4)
    for first, last in ((1, count), (1000, 999 + rows)):
        for start in range(first, last + 1, step):
            world.store(*range(start, min(start + step, last + 1)))
            world.run_all()
    assert world.plane.locate([key(n) for n in range(1, count + 1)], world.now) == [more.get("name", "fs")] * count
    return world
