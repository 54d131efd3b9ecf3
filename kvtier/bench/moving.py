"""Driving jobs at a tier and taking the time: so many at once, for so long, and every outcome is looked at."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvtier.errors import ResourceError
from kvtier.jobs import BlockStatus, JobResult, TransferJob

CHUNK_BLOCKS = 32
"""Blocks of one job of many, at most."""
SINGLE_JOBS = 256
"""Jobs of one block that are timed, at most."""
KEY_BYTES = 16

Move = Callable[[TransferJob], Awaitable[JobResult]]


@dataclass(slots=True)
class Timing:
    """Time taken by jobs: wall and CPU seconds of the whole process, payload bytes, blocks, seconds of each job.

    `corrupt` counts blocks that a tier refused by their checksum.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    moved_bytes: int = 0
    blocks: int = 0
    corrupt: int = 0
    jobs: list[float] = field(default_factory=list)

    @property
    def gib_per_second(self) -> float:
        """Payload over wall time; 0 when nothing moved."""
        return self.moved_bytes / self.seconds / (1 << 30) if self.seconds else 0.0

    @property
    def cpu_seconds_per_gib(self) -> float:
        """CPU time of all threads over payload; 0 when nothing moved."""
        return self.cpu_seconds / self.moved_bytes * (1 << 30) if self.moved_bytes else 0.0

    def percentile_us(self, share: float) -> float:
        """The time of one job that `share` of the jobs did not exceed, in microseconds; 0 without jobs."""
        ordered = sorted(self.jobs)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e6 if ordered else 0.0


class Course:
    """How jobs are driven: `lanes` of them at a time, no new one after `seconds` of measured time."""

    def __init__(self, seconds: float, lanes: int) -> None:
        self._seconds = seconds
        self._lanes = lanes

    def over(self, timing: Timing) -> bool:
        """True once as much time was measured as may be."""
        return timing.seconds >= self._seconds

    async def run(self, move: Move, jobs: Sequence[TransferJob], timing: Timing) -> int:
        """Move the jobs in their order and add to the timing. Returns how many were begun; at least the first is.

        Raises ResourceError for a block that was neither moved nor refused as corrupt.
        """
        left = iter(jobs)
        begun = 0
        results: list[JobResult] = []
        started, cpu_started = time.perf_counter(), time.process_time()
        deadline = started + max(0.0, self._seconds - timing.seconds)

        async def lane() -> None:
            nonlocal begun
            for job in left:
                begun += 1
                before = time.perf_counter()
                results.append(await move(job))
                after = time.perf_counter()
                timing.jobs.append(after - before)
                if after >= deadline:
                    return

        await asyncio.gather(*(lane() for _ in range(min(self._lanes, len(jobs)))))
        timing.seconds += time.perf_counter() - started
        timing.cpu_seconds += time.process_time() - cpu_started
        for result in results:
            timing.moved_bytes += result.bytes_moved
            timing.blocks += sum(map(len, result.outcomes))
        timing.corrupt += refused(results)
        return begun


def refused(results: Iterable[JobResult]) -> int:
    """How many blocks were corrupt. Raises ResourceError, naming the outcomes, if any came to another bad end."""
    outcomes = Counter(chain.from_iterable(chain.from_iterable(result.outcomes for result in results)))
    corrupt = sum(count for outcome, count in outcomes.items() if outcome.status is BlockStatus.CORRUPT)
    bad = {outcome: count for outcome, count in outcomes.items() if not outcome.ok}
    if sum(bad.values()) > corrupt:
        told = ", ".join(
            f"{count} {_ended(outcome.status, outcome.reason or outcome.errno)}" for outcome, count in bad.items()
        )
        raise ResourceError(f"{told} of {sum(outcomes.values())} blocks")
    return corrupt


def _ended(status: str, why: object) -> str:
    return f"{status} ({why})" if why else status
