"""A contestant of the fs benchmark in a process of its own: what it is asked, what its blocks hold, how it is timed.

The benchmark speaks to it in lines of JSON, so a contestant can run under another Python. The CPU time of a pass is
that of the whole process: its threads, the kernel on their behalf, and the workers of its rings.
"""

from __future__ import annotations

import cProfile
import hashlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FIRST, OVERWRITE, LOAD = "first", "overwrite", "load"
GROUP = bytes(4)
FOLDERS = 1000
"""Folders that keys fall into where a contestant makes folders of the first bytes: many files in each, as in a store
that has been in use."""
_FILL_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    """One contest: `blocks` rows in memory, room for twice as many blocks on disk, `depth` requests at once."""

    folder: str
    block_bytes: int
    blocks: int
    depth: int
    profile: str = ""


@dataclass(frozen=True, slots=True)
class Pass:
    """`blocks` blocks from number `start` on, in jobs of `job_blocks`, `at_once` of them under way.

    A block's row is its number modulo the rows. Numbers never stored before are first writes as long as there is
    room, and overwrites, which evict, once there is none.
    """

    kind: str
    start: int
    blocks: int
    job_blocks: int
    at_once: int

    def jobs(self) -> list[Job]:
        """The jobs with their keys, which a caller has ready before it stores or asks."""
        ends = range(self.start, self.start + self.blocks, self.job_blocks)
        return [Job.of(range(at, min(at + self.job_blocks, self.start + self.blocks))) for at in ends]


class Job(NamedTuple):
    """Numbered blocks and their keys: a hash, and the group in four bytes."""

    numbers: range
    keys: list[bytes]

    @staticmethod
    def of(numbers: range) -> Job:
        return Job(numbers, [block_key(number) for number in numbers])


def block_key(number: int) -> bytes:
    """The key of a numbered block: a hash whose first three bytes are those of FOLDERS others, and the group."""
    folder = hashlib.sha256(b"folder %d" % (number % FOLDERS)).digest()[:3]
    return folder + hashlib.sha256(b"%d" % number).digest()[3:] + GROUP


class Refused(Exception):
    """A contestant did not do what it was asked; the text says what."""


class Contestant(ABC):
    """Something that stores blocks of a region in memory in a folder, and loads them again."""

    @abstractmethod
    def open(self, setup: Setup) -> npt.NDArray[np.uint8]:
        """Open in an empty folder. Returns the rows, shape (blocks, block bytes), resident in memory."""

    @abstractmethod
    def prepare(self, work: Pass, jobs: Sequence[Job]) -> float:
        """What precedes a pass and is not timed. Returns CPU seconds of it that count all the same."""

    @abstractmethod
    def move(self, work: Pass, jobs: Sequence[Job]) -> list[float]:
        """Do a pass. Returns the seconds from the start to the end of each job; raises Refused."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    @abstractmethod
    def notes(self) -> str:
        """How it works here, once open: engine, direct I/O, memory."""


class Content:
    """What blocks hold: random bytes that are another's in every word. Fast to write and to compare."""

    def __init__(self, rows: npt.NDArray[np.uint8]) -> None:
        import numpy as np

        self._words = rows.view(np.uint64)
        self._base = np.random.Generator(np.random.SFC64(11)).integers(0, 1 << 63, rows.shape[1] // 8, dtype=np.uint64)
        self._step = max(1, _FILL_BYTES // rows.shape[1])

    def fill(self, work: Pass) -> None:
        """Put the blocks of a pass into their rows."""
        for rows, expected in self._pieces(work):
            rows[:] = expected

    def spoil(self, work: Pass) -> None:
        """Leave nothing in the rows that a load could be taken for."""
        for rows, _ in self._pieces(work):
            rows[:] = 0xEEEEEEEEEEEEEEEE

    def check(self, work: Pass) -> None:
        """Compare every byte. Raises Refused."""
        for rows, expected in self._pieces(work):
            if not (rows == expected).all():
                raise Refused("a block was loaded with other bytes than were stored")

    def _pieces(self, work: Pass):  # type: ignore[no-untyped-def]
        import numpy as np

        for at in range(work.start, work.start + work.blocks, self._step):
            numbers = np.arange(at, min(at + self._step, work.start + work.blocks), dtype=np.uint64)
            first = at % len(self._words)
            expected = self._base + (numbers * np.uint64(0x9E3779B97F4A7C15))[:, None]
            yield self._words[first : first + len(numbers)], expected


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 of the jobs of a pass, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "job_p50_ms": ordered[len(ordered) // 2] * 1e3,
        "job_p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e3,
    }


def run_pass(contestant: Contestant, content: Content, work: Pass, profile: str = "") -> dict[str, float]:
    """Do one pass and time it: wall clock and CPU of the process. What was loaded is compared, outside the time."""
    jobs = work.jobs()
    if work.kind == LOAD:
        content.spoil(work)
    else:
        content.fill(work)
    before = contestant.prepare(work, jobs)
    profiler = cProfile.Profile() if profile else None
    os.sync()
    cpu, begun = time.process_time(), time.perf_counter()
    with profiler or nullcontext():
        seconds = contestant.move(work, jobs)
    measured = {"seconds": time.perf_counter() - begun, "cpu_seconds": before + time.process_time() - cpu}
    if profiler is not None:
        profiler.dump_stats(f"{profile}-{work.kind}-{work.job_blocks}-{work.at_once}.prof")
    if work.kind == LOAD:
        content.check(work)
    return measured | percentiles(seconds)


def serve(contestant: Contestant) -> None:
    """Answer the benchmark line by line until it says end. Nothing else reaches the standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    content, profile = None, ""
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["ask"] == "open":
                setup = Setup(**question["setup"])
                content, profile = Content(contestant.open(setup)), setup.profile
                answer: dict[str, object] = {"notes": contestant.notes()}
            elif question["ask"] == "pass":
                assert content is not None
                answer = {**run_pass(contestant, content, Pass(**question["pass"]), profile)}
            else:
                content = None
                contestant.close()
                answer = {}
        except (Refused, OSError, ImportError) as error:
            answer = {"refused": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
