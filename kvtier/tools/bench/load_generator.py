"""Jobs at a tier and their times: a number of jobs at once for some time, with every outcome checked."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import xxhash

from kvtier.errors import ResourceError
from kvtier.types.jobs import BlockStatus, JobResult, TransferJob
from kvtier.types.keys import OffloadKey, make_key

CHUNK_BLOCKS = 32
"""Blocks of one job of many, at most."""
SINGLE_JOBS = 256
"""Jobs of one block that are timed, at most."""
WIPED = 0xEE
"""What rows and tensors are overwritten with before blocks come back."""

Move = Callable[[TransferJob], Awaitable[JobResult]]


def block_key(seed: int, number: int, row: int, group: int = 0) -> OffloadKey:
    """The key of a measured block. Its content follows from its key, so each pass `number` stores other bytes."""
    return make_key(xxhash.xxh3_128_digest(f"{seed}/{number}/{row}".encode()), group)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed; 0 of no values."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if len(values) else 0.0


@dataclass(slots=True)
class Timing:
    """Time taken by jobs: wall and CPU seconds of the whole process, payload bytes, seconds of each job.

    `corrupt` counts blocks that a tier refused by their checksum.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    moved_bytes: int = 0
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

    def percentile_us(self, percent: float) -> float:
        """The time of one job that `percent` % of the jobs did not exceed, in microseconds; 0 without jobs."""
        return percentile(self.jobs, percent) * 1e6


async def drive(move: Move, jobs: Sequence[TransferJob], timing: Timing, lanes: int, seconds: float = math.inf) -> int:
    """Move the jobs in their order, `lanes` at a time, and add to the timing; begin none once it has `seconds`.

    Returns how many were begun; at least the first is. Raises ResourceError for a block that was neither moved nor
    refused as corrupt.
    """
    left = iter(jobs)
    results: list[JobResult] = []
    started, cpu_started = time.perf_counter(), time.process_time()
    deadline = started + max(0.0, seconds - timing.seconds)

    async def lane() -> None:
        for job in left:
            before = time.perf_counter()
            results.append(await move(job))
            after = time.perf_counter()
            timing.jobs.append(after - before)
            if after >= deadline:
                return

    await asyncio.gather(*(lane() for _ in range(min(lanes, len(jobs)))))
    timing.seconds += time.perf_counter() - started
    timing.cpu_seconds += time.process_time() - cpu_started
    timing.moved_bytes += sum(result.bytes_moved for result in results)
    timing.corrupt += refused(results)
    return len(results)


def refused(results: Iterable[JobResult]) -> int:
    """Number of corrupt blocks. Raises ResourceError, naming the outcomes, if any failed in another way."""
    outcomes = Counter(chain.from_iterable(chain.from_iterable(result.outcomes for result in results)))
    corrupt = sum(count for outcome, count in outcomes.items() if outcome.status is BlockStatus.CORRUPT)
    bad = {outcome: count for outcome, count in outcomes.items() if not outcome.ok}
    if sum(bad.values()) > corrupt:
        reasons = ", ".join(
            f"{count} {_ended(outcome.status, outcome.reason or outcome.errno)}" for outcome, count in bad.items()
        )
        raise ResourceError(f"{reasons} of {sum(outcomes.values())} blocks")
    return corrupt


def _ended(status: str, why: object) -> str:
    return f"{status} ({why})" if why else status
