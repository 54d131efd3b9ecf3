"""OpenTelemetry spans of transfer jobs: one for each job of a tier, from its place in the queue to its end.

Needs `pip install 'kvtier[otel]'`, and a program with a provider of traces. A span is made in the loop when its job has
ended: a job in flight costs nothing more, and the engine's thread makes none. No span has a key, a request or a tenant.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from kvtier.stack.traffic import QueuedJob
from kvtier.tier.contract import Clock
from kvtier.types.jobs import JobResult

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

SCOPE = "kvtier"
NANOSECONDS = 1_000_000_000


class JobSpans:
    """Makes the span of a job that has ended: a trace of its own, because a job may serve many requests or none."""

    def __init__(self, tracer: Tracer, clock: Clock) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode

        self._tracer = tracer
        self._root = Context()
        self._kind = SpanKind.CLIENT
        self._error = Status(StatusCode.ERROR)
        self._zero = time.time_ns() - int(clock() * NANOSECONDS)

    def ended(self, tier: str, queued: QueuedJob, began: float, now: float, result: JobResult) -> None:
        """A job that was in flight has ended, in time or late."""
        job = queued.job
        outcomes = Counter(outcome.status.value for group in result.outcomes for outcome in group)
        span = self._tracer.start_span(
            f"{SCOPE} {job.kind.value} {tier}",
            self._root,
            self._kind,
            {
                "kvtier.tier": tier,
                "kvtier.direction": job.kind.value,
                "kvtier.row_bytes": queued.size,
                "kvtier.waited_seconds": began - queued.since,
                **{f"kvtier.{status}_blocks": count for status, count in outcomes.items()},
            },
            start_time=self._zero + int(queued.since * NANOSECONDS),
        )
        if not result.ok:
            span.set_status(self._error)
        span.end(self._zero + int(now * NANOSECONDS))
