"""A run over time, for a page: the work of every tier in each interval, spans in which one stood still, and the paths
of some requests.

Memory is bounded, whatever the run's length: figures are counted since the start, so when there are too many samples
every second one is left out and the interval doubles, and nothing is lost from the sums. Of requests every n-th is
kept, and the slowest ones.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvtier.planner import GroupLoad
from kvtier.stack import TierStats
from kvtier.tools.replay.engine import EngineBlocks
from kvtier.tools.replay.serve import DRAIN_SECONDS, ActiveRequest, Prefill, ReplayLoop, ServedStack, ServeOptions
from kvtier.traces.requests import Request
from kvtier.types.jobs import BlockOutcome, BlockStatus, SkipReason

SAMPLES_MAX = 200
REQUESTS_MAX = 1500
SLOWEST_KEPT = 100
SPANS_MAX = 500
PARTS_MAX = 64
INTERVAL_SECONDS = 0.02
LOOKS = 4
"""Looks in an interval: a span is noticed this many times sooner than a sample is kept."""
STALL_SECONDS = 0.5
COMPUTED = "computed"
PHASES = ("queued", "prepare", "lookup", "gpu_blocks", "load", "verify", "compute", "store", "write_back")
"""What a request waits for, in its order. The first token is out after `compute`."""
FAULTS = ("failed", "corrupt", "missing", "late")


@dataclass(frozen=True, slots=True)
class StackSnapshot:
    """Figures of a stack now: every tier from the GPU down since the start, and the blocks on their way to
    lower tiers."""

    tiers: Mapping[str, TierStats]
    backlog: int


@dataclass(slots=True)
class RequestPath:
    """Path of a request: where each part of its prompt came from, in order, and how long it was in each phase.

    Times are seconds since the run began. `failed` are blocks that a tier was to load and did not. After PARTS_MAX
    parts the rest of the prompt is in the last of its source.
    """

    number: int
    arrived: float
    prompt_tokens: int
    since: float
    parts: list[list[Any]] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)

    def end_phase(self, phase: str, now: float) -> None:
        """Add the time since the phase before to this one."""
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self.since
        self.since = now

    def add(self, source: str, tokens: int) -> None:
        """The next tokens of the prompt came from a source."""
        if not self.parts or self.parts[-1][0] != source:
            if len(self.parts) >= PARTS_MAX:
                for part in reversed(self.parts):
                    if part[0] == source:
                        part[1] += tokens
                        return
            self.parts.append([source, 0])
        self.parts[-1][1] += tokens

    @property
    def first_token_seconds(self) -> float:
        """From its arrival until the whole prompt was there."""
        before = PHASES[: PHASES.index("compute") + 1]
        return sum(self.phases.get(phase, 0.0) for phase in before)

    def to_json(self) -> dict[str, Any]:
        """The request for programs; phases in their order."""
        return {
            "number": self.number,
            "arrived": round(self.arrived, 6),
            "prompt_tokens": self.prompt_tokens,
            "first_token_seconds": round(self.first_token_seconds, 6),
            "parts": self.parts,
            "phases": {name: round(self.phases[name], 6) for name in PHASES if self.phases.get(name)},
            "failed": self.failed,
        }


@dataclass(frozen=True, slots=True)
class _Sample:
    """Figures since the start, at the end of an interval."""

    seconds: float
    reading: StackSnapshot
    requests: int
    tokens: dict[str, int]
    phases: dict[str, float]


@dataclass(slots=True)
class _Progress:
    """Progress of one direction of a tier, and since when no transfer ended while one was in flight."""

    moved_bytes: int = 0
    busy_seconds: float = 0.0
    since: float = 0.0

    def stalled(self, moved_bytes: int, busy_seconds: float, before: float, now: float) -> bool:
        """Note the figures of this look; True after STALL_SECONDS without a byte."""
        in_flight = busy_seconds - self.busy_seconds >= 0.9 * (now - before)
        if moved_bytes != self.moved_bytes or not in_flight:
            self.since = now
        self.moved_bytes, self.busy_seconds = moved_bytes, busy_seconds
        return now - self.since >= STALL_SECONDS


class Timeline:
    """Samples of a run by `watch`. `clock` counts seconds from any start; `name` is `real` or `virtual`."""

    def __init__(
        self, clock: Callable[[], float], name: str, samples_max: int = SAMPLES_MAX, requests_max: int = REQUESTS_MAX
    ) -> None:
        self.interval = INTERVAL_SECONDS
        self._name = name
        self._clock = clock
        self._all_served = False
        self._final = StackSnapshot({}, 0)
        self._samples_max = samples_max
        self._started = clock()
        self._read: Callable[[], StackSnapshot] = lambda: StackSnapshot({}, 0)
        self._samples: list[_Sample] = []
        self._looked = 0.0
        self._due = self.interval
        self._tokens: dict[str, int] = {}
        self._phases: dict[str, float] = {}
        self._requests = 0
        self._paths = _Paths(requests_max)
        self._spans = _Spans()

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._started

    def since_start(self, at: float) -> float:
        """A moment of the clock in seconds since the run began."""
        return at - self._started

    def begin(self, read: Callable[[], StackSnapshot]) -> None:
        """Begin the run now; `read` gives the figures at any time."""
        self._read = read
        self._started = self._clock()

    async def watch(self) -> None:
        """Look again and again until all requests are served and nothing is on its way to lower tiers, or nothing of it
        has moved for DRAIN_SECONDS."""
        backlog, changed = 0, 0.0
        while not self._all_served or (backlog and self.now < changed + DRAIN_SECONDS):
            await asyncio.sleep(self.interval / LOOKS)
            left = self.look()
            if left != backlog or not self._all_served:
                backlog, changed = left, self.now

    def all_served(self) -> None:
        """No further request comes: `watch` may end."""
        self._all_served = True

    def end(self, final: StackSnapshot, at: float) -> None:
        """The run ended at this second with these figures, or when it was looked at last."""
        self._final = final
        self._looked = max(self._looked, at)

    def look(self) -> int:
        """Follow the spans, and keep a sample if one is due. Returns the blocks on their way to lower tiers."""
        now, reading = self.now, self._read()
        self._spans.follow(reading.tiers, self._looked, now)
        self._looked = now
        if now >= self._due:
            self._keep(now, reading)
        return reading.backlog

    def served(self, path: RequestPath) -> None:
        """A request has ended."""
        self._requests += 1
        for source, tokens in path.parts:
            self._tokens[source] = self._tokens.get(source, 0) + tokens
        for phase, seconds in path.phases.items():
            self._phases[phase] = self._phases.get(phase, 0.0) + seconds
        self._paths.add(path)

    def _keep(self, now: float, reading: StackSnapshot) -> None:
        self._samples.append(_Sample(now, reading, self._requests, dict(self._tokens), dict(self._phases)))
        if len(self._samples) > self._samples_max:
            del self._samples[-2::-2]
            self.interval *= 2
        self._due = max(self._due + self.interval, now)

    def to_json(self) -> dict[str, Any]:
        """The whole run, after its end.

        Lists have an entry for each interval, which ends at its entry in `times`: what was counted in it, and of
        `used_bytes` and `backlog` what was there at its end. The last interval may be half as long or as long again.
        Requests are in the order in which they began.
        """
        final, full = self._final, self._looked - self.interval / 2
        samples = [sample for sample in self._samples if sample.seconds <= full]
        samples.append(_Sample(self._looked, final, self._requests, dict(self._tokens), dict(self._phases)))
        sources = [name for name in (*final.tiers, *self._tokens) if self._tokens.get(name) and name != COMPUTED]
        return {
            "clock": self._name,
            "interval_seconds": round(self.interval, 6),
            "times": [round(sample.seconds, 6) for sample in samples],
            "requests_ended": _steps(sample.requests for sample in samples),
            "tokens": {
                name: _steps(sample.tokens.get(name, 0) for sample in samples)
                for name in (*dict.fromkeys(sources), COMPUTED)
            },
            "phases": {
                name: [round(step, 6) for step in _steps(sample.phases.get(name, 0.0) for sample in samples)]
                for name in PHASES
                if self._phases.get(name)
            },
            "backlog": [sample.reading.backlog for sample in samples],
            "tiers": {name: _tier(name, samples) for name in final.tiers},
            "spans": self._spans.to_json(self._looked),
            "spans_left_out": self._spans.left_out,
            "requests": [path.to_json() for path in self._paths.kept()],
            "requests_every": self._paths.every,
            "requests_slowest": SLOWEST_KEPT,
        }


def _tier(name: str, samples: Sequence[_Sample]) -> dict[str, Any]:
    """A tier over time; of losses and faults those that there were."""
    found = [sample.reading.tiers.get(name, TierStats()) for sample in samples]
    losses = [_losses(stats) for stats in found]
    return {
        "capacity_bytes": found[-1].capacity_bytes,
        "used_bytes": [stats.used_bytes for stats in found],
        "load_bytes": _steps(stats.load_bytes for stats in found),
        "store_bytes": _steps(stats.store_bytes for stats in found),
        "lost": {what: _steps(loss.get(what, 0) for loss in losses) for what, count in losses[-1].items() if count},
        "faults": {what: _steps(stats.errors[what] for stats in found) for what in FAULTS if found[-1].errors[what]},
    }


def _losses(stats: TierStats) -> dict[str, int]:
    """Blocks that a tier did not keep, and why."""
    found = {"evicted": stats.evictions, "expired": stats.expired}
    found |= {f"dropped: {reason}": count for reason, count in sorted(stats.dropped.items())}
    skipped = {reason: count for reason, count in stats.skipped.items() if reason != SkipReason.ALREADY_THERE}
    return found | {f"not sent: {reason}": count for reason, count in sorted(skipped.items())}


def _steps(values: Iterable[Any]) -> list[Any]:
    """Growth in each interval of figures that are counted since the start."""
    before, steps = 0, []
    for value in values:
        steps.append(value - before)
        before = value
    return steps


class _Paths:
    """Every n-th request and the slowest ones, of as many as there may be."""

    def __init__(self, requests_max: int) -> None:
        self.every = 1
        self._requests_max = requests_max
        self._regular: list[RequestPath] = []
        self._slowest: list[tuple[float, int, RequestPath]] = []

    def add(self, path: RequestPath) -> None:
        """Add a path, in any order of their numbers."""
        if not path.number % self.every:
            self._regular.append(path)
            if len(self._regular) > self._requests_max:
                self.every *= 2
                self._regular = [kept for kept in self._regular if not kept.number % self.every]
        entry = (path.first_token_seconds, path.number, path)
        if len(self._slowest) < SLOWEST_KEPT:
            heapq.heappush(self._slowest, entry)
        else:
            heapq.heappushpop(self._slowest, entry)

    def kept(self) -> list[RequestPath]:
        """In the order of their numbers."""
        found = {path.number: path for path in self._regular} | {number: path for _, number, path in self._slowest}
        return [found[number] for number in sorted(found)]


class _Spans:
    """Spans of time in which a breaker of a tier was not closed, or no transfer of it ended."""

    def __init__(self) -> None:
        self.left_out = 0
        self._ended: list[dict[str, Any]] = []
        self._open: dict[tuple[str, str], float] = {}
        self._progress: dict[tuple[str, str], _Progress] = {}

    def follow(self, tiers: Mapping[str, TierStats], before: float, now: float) -> None:
        """Record the spans that there are now, after the look before."""
        there: dict[tuple[str, str], float] = {}
        for name, stats in tiers.items():
            for breaker in _not_closed(stats.breaker):
                there[name, breaker] = now
            for what in ("load", "store"):
                progress = self._progress.setdefault((name, what), _Progress(since=before))
                moved, busy = getattr(stats, f"{what}_bytes"), getattr(stats, f"{what}_seconds")
                if progress.stalled(moved, busy, before, now):
                    there[name, f"no {what} ended"] = progress.since
        for span in [span for span in self._open if span not in there]:
            self._end(span, now)
        for span, since in there.items():
            self._open.setdefault(span, since)

    def _end(self, span: tuple[str, str], now: float) -> None:
        entry = _span(span, self._open.pop(span), now)
        if len(self._ended) < SPANS_MAX:
            self._ended.append(entry)
        else:
            self.left_out += 1

    def to_json(self, now: float) -> list[dict[str, Any]]:
        """All spans, those that have not ended up to now, in the order of their beginning."""
        still = [_span(span, since, now) for span, since in self._open.items()]
        return sorted(self._ended + still, key=lambda span: (span["begin"], span["tier"], span["what"]))


def _not_closed(breakers: str) -> list[str]:
    """Of a tier's breakers, as `TierStats` has them, those that are not closed: `breaker open`, `load breaker open`."""
    found = []
    for state in breakers.split(", "):
        what, _, of_one = state.rpartition(" ") if ":" not in state else ("", "", state)
        if of_one != "closed":
            found.append(f"{what} breaker {of_one}".strip())
    return found


def _span(span: tuple[str, str], begin: float, end: float) -> dict[str, Any]:
    return {"tier": span[0], "what": span[1], "begin": round(begin, 6), "end": round(end, 6)}


class WatchedLoop(ReplayLoop):
    """A `ReplayLoop` that gives the path of each request to a timeline.

    `arrived` is when a request came, in seconds of the timeline's clock; without it, that is when it began.
    """

    def __init__(
        self,
        timeline: Timeline,
        engine: EngineBlocks,
        stack: ServedStack,
        options: ServeOptions,
        prefill: Prefill | None = None,
        arrived: Callable[[Request], float] | None = None,
    ) -> None:
        super().__init__(engine, stack, options, prefill)
        self._timeline = timeline
        self._arrived = arrived
        self._paths: dict[Request, RequestPath] = {}

    async def serve(self, request: Request) -> None:
        timeline = self._timeline
        came = timeline.now if self._arrived is None else timeline.since_start(self._arrived(request))
        path = RequestPath(self._begun + 1, came, request.prompt_tokens, came)
        if self._arrived is not None:
            path.end_phase("queued", timeline.now)
        self._paths[request] = path
        await super().serve(request)
        path.end_phase("write_back", timeline.now)
        timeline.served(self._paths.pop(request))

    def _on_phase(self, work: ActiveRequest, phase: str) -> None:
        if phase == "compute":
            self._add_parts(work)
        self._paths[work.request].end_phase(phase, self._timeline.now)

    def _take(self, work: ActiveRequest, load: GroupLoad, outcomes: Sequence[BlockOutcome]) -> None:
        path, where = self._paths[work.request], work.where[load.group]
        for row, outcome in zip(load.positions.tolist(), outcomes, strict=True):
            if outcome.status is not BlockStatus.LOADED:
                tier = where[row] or self._options.cpu_name
                path.failed[tier] = path.failed.get(tier, 0) + 1
        super()._take(work, load, outcomes)

    def _add_parts(self, work: ActiveRequest) -> None:
        """Record where each block of the prompt came from; the rest is computed."""
        path, where, tokens = self._paths[work.request], work.where[0], self._block_tokens
        missing = work.missing[0][: work.length].tolist()
        for position, lacks in enumerate(missing):
            if position < work.computed:
                path.add(self._options.gpu_name, tokens)
            elif lacks:
                path.add(COMPUTED, tokens)
            else:
                path.add(where[position // self._factor] or self._options.cpu_name, tokens)
        if work.request.prompt_tokens > work.length * tokens:
            path.add(COMPUTED, work.request.prompt_tokens - work.length * tokens)


@asynccontextmanager
async def watching(timeline: Timeline | None, figures: Callable[[], StackSnapshot]) -> AsyncIterator[None]:
    """The timeline looks at the figures until the end of the block; nothing without one."""
    if timeline is None:
        yield
        return
    timeline.begin(figures)
    task = asyncio.create_task(timeline.watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()
