"""The serving loop with a timeline: the same work, and the way of each request beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from kvtier.planner import GroupLoad
from kvtier.tools.replay.engine import EngineBlocks
from kvtier.tools.replay.serve import ActiveRequest, Condition, Prefill, ReplayLoop, ServedStack, ServeOptions
from kvtier.tools.replay.timeline import COMPUTED, RequestPath, StackSnapshot, Timeline
from kvtier.traces.requests import Request
from kvtier.types.jobs import BlockOutcome, BlockStatus


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
async def watching(timeline: Timeline | None, figures: Callable[[], StackSnapshot]) -> AsyncIterator[None]:
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
