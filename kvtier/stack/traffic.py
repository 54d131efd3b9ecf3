"""Counts of a tier's transfers in one direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.control.tiers.histogram import Histogram, HistogramFigures, merged
from kvtier.types.jobs import TransferJob
from kvtier.types.keys import JobId
from kvtier.types.values import job_value

QUEUED, IN_FLIGHT = "queued", "in_flight"
"""Where a job was when its deadline passed."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Transfers of a tier in one direction: of the CPU tier copies to and from the GPU, of a lower tier promotions
    (`load`) or demotions (`store`).

    `took_seconds` is from a job's beginning to its end, `waited_seconds` from its arrival in the tier's queue to its
    beginning; both count jobs. Bytes are those of the rows that the jobs name. `deadlines_missed` counts jobs by where
    they were then: `queued`, and then they never began, or `in_flight`. `oldest_seconds` is how long the oldest job in
    flight has been so, 0 without one. It grows while I/O hangs, also after the job's deadline. `largest_queued_bytes`
    are those of the largest job that waits.
    """

    took_seconds: HistogramFigures
    waited_seconds: HistogramFigures
    in_flight_bytes: int
    queued_bytes: int
    deadlines_missed: dict[str, int]
    oldest_seconds: float = 0.0
    largest_queued_bytes: int = 0


@job_value
class QueuedJob:
    """A job that waits for its tier since a time; `size` are the bytes of the rows that it names."""

    job: TransferJob
    size: int
    since: float


@dataclass(slots=True)
class Traffic:
    """Transfers of a kind on a tier. One thread counts, any may read figures. Its queue adds to `queued_bytes`.

    `busy_seconds` are those in which at least one was in flight, before the one that is since `busy_since`.
    """

    busy_since: float = 0.0
    busy_seconds: float = 0.0
    in_flight_bytes: int = 0
    queued_bytes: int = 0
    took: Histogram = field(default_factory=Histogram)
    waited: Histogram = field(default_factory=Histogram)
    late_queued: int = 0
    late_in_flight: int = 0
    _begun: dict[JobId, float] = field(default_factory=dict)

    def unqueue(self, queued: QueuedJob, late: bool = False) -> None:
        """A job waits no more and does not begin, perhaps because it is late."""
        self.queued_bytes -= queued.size
        self.late_queued += late

    def begin(self, queued: QueuedJob, now: float) -> None:
        """A job that waited is in flight."""
        self.waited.observe(now - queued.since)
        self.queued_bytes -= queued.size
        self.in_flight_bytes += queued.size
        if not self._begun:
            self.busy_since = now
        self._begun[queued.job.job_id] = now

    def end(self, queued: QueuedJob, now: float) -> float:
        """A job that was in flight has ended, late or not. Returns when it had begun."""
        began = self._begun.pop(queued.job.job_id)
        self.took.observe(now - began)
        self.in_flight_bytes -= queued.size
        if not self._begun:
            self.busy_seconds += now - self.busy_since
        return began

    def late(self, job_id: JobId) -> None:
        """The deadline of a job in flight has passed, of this kind or another one."""
        self.late_in_flight += job_id in self._begun

    def seconds(self, now: float) -> float:
        """Busy seconds up to now. From any thread: the one in flight may have begun after `now` was read."""
        return self.busy_seconds + (max(0.0, now - self.busy_since) if self._begun else 0.0)

    def oldest_seconds(self, now: float) -> float:
        """The age of the oldest job in flight. From any thread: `list` of a dict is one step."""
        begun = list(self._begun.values())
        return max(0.0, now - begun[0]) if begun else 0.0


def transfer_stats(traffic: Sequence[Traffic], waiting: Sequence[QueuedJob], now: float) -> TransferStats:
    """The figures of one kind in the queues of one tier, at least one, in which these jobs wait. From any thread."""
    return TransferStats(
        merged([each.took.figures() for each in traffic]),
        merged([each.waited.figures() for each in traffic]),
        sum(each.in_flight_bytes for each in traffic),
        sum(each.queued_bytes for each in traffic),
        {QUEUED: sum(each.late_queued for each in traffic), IN_FLIGHT: sum(each.late_in_flight for each in traffic)},
        max(each.oldest_seconds(now) for each in traffic),
        max((each.size for each in waiting), default=0),
    )
