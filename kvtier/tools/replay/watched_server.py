"""The serving loop with a timeline: the same work, and the way of each request beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from kvtier.planner import GroupLoad
from kvtier.tools.replay.engine import EngineBlocks
from kvtier.tools.replay.serve import Condition, Prefill, ServedStack, ServeOptions, Server, Work
from kvtier.tools.replay.timeline import COMPUTED, Moment, RequestPath, Timeline
from kvtier.traces.requests import Request
from kvtier.types.jobs import BlockOutcome, BlockStatus


class WatchedServer(Server):
    """A `Server` that gives the path of each request to a timeline. `arrived` says when a request came, in seconds of
    the timeline's clock; without it, it came when it began."""

    def __init__(
        self,
        timeline: Timeline,
        engine: EngineBlocks,
        stack: ServedStack,
        options: ServeOptions,
        freed: Condition | None = None,
        prefill: Prefill | None = None,
        arrived: Callable[[Request], float] | None = None,
    ) -> None:
        super().__init__(engine, stack, options, freed, prefill)
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

    def _end_phase(self, work: Work, phase: str) -> RequestPath:
        path = self._paths[work.request]
        path.end_phase(phase, self._timeline.now)
        return path

    def _announce(self, work: Work) -> None:
        super()._announce(work)
        self._end_phase(work, "prepare")

    async def _lookup(self, work: Work) -> None:
        await super()._lookup(work)
        self._end_phase(work, "lookup")

    def _check_hits(self, work: Work) -> None:
        self._end_phase(work, "gpu_blocks")
        super()._check_hits(work)
        self._end_phase(work, "verify")

    async def _load(self, work: Work) -> None:
        await super()._load(work)
        self._end_phase(work, "load")

    def _take(self, work: Work, load: GroupLoad, outcomes: Sequence[BlockOutcome]) -> None:
        path, where = self._end_phase(work, "load"), work.where[load.group]
        for row, outcome in zip(load.positions.tolist(), outcomes, strict=True):
            if outcome.status is not BlockStatus.LOADED:
                tier = where[row] or self._options.cpu_name
                path.failed[tier] = path.failed.get(tier, 0) + 1
        super()._take(work, load, outcomes)
        self._end_phase(work, "verify")

    async def _compute(self, work: Work) -> None:
        self._add_parts(work)
        await super()._compute(work)
        self._end_phase(work, "compute")

    async def _store(self, work: Work) -> None:
        await super()._store(work)
        self._end_phase(work, "store")

    def _add_parts(self, work: Work) -> None:
        """Where each block of the prompt came from; the rest is computed."""
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
async def watching(timeline: Timeline | None, figures: Callable[[], Moment]) -> AsyncIterator[None]:
    """The timeline looks at the figures in real time until the end of the block; nothing without one."""
    if timeline is None:
        yield
        return
    timeline.begin(figures)
    task = asyncio.create_task(timeline.watch(asyncio.sleep))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()
