"""When requests come, and when the engine has computed their first tokens: a prompt after another, at a fixed speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvtier.errors import ConfigError
from kvtier.tools.replay.serve import ReplayLoop
from kvtier.tools.whatif.virtual_time import VirtualCondition, VirtualTime
from kvtier.traces.requests import Request


@dataclass(slots=True)
class FirstTokens:
    """Seconds from the arrival of each request to its first token, and what they were if every prompt were computed."""

    seconds: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)

    @property
    def saved(self) -> float:
        """Seconds saved in all; negative where loading took longer than computing."""
        return sum(self.computing) - sum(self.seconds)


class EngineTime:
    """Runs requests through a loop: one after another, or as they came. `prefill` is for that loop."""

    def __init__(self, time: VirtualTime, tokens_per_second: float) -> None:
        self.first_tokens = FirstTokens()
        self._time = time
        self._rate = tokens_per_second
        self._free_at = 0.0
        self._free_at_computing_all = 0.0
        self._arrived: dict[Request, float] = {}
        self._waiting: deque[Request] = deque()
        self._came = VirtualCondition(time)
        self._all_came = False

    def _arrive(self, request: Request) -> None:
        now = self._arrived[request] = self._time.now
        begins = max(now, self._free_at_computing_all)
        self._free_at_computing_all = begins + request.prompt_tokens / self._rate
        self.first_tokens.computing.append(self._free_at_computing_all - now)

    def arrived(self, request: Request) -> float:
        """When a request came that has no first token yet."""
        return self._arrived[request]

    async def prefill(self, request: Request, tokens: int) -> None:
        """Compute so many tokens of a prompt, after the prompts before it."""
        self._free_at = max(self._time.now, self._free_at) + tokens / self._rate
        await self._time.sleep(self._free_at - self._time.now)
        self.first_tokens.seconds.append(self._time.now - self._arrived.pop(request))

    async def one_by_one(self, loop: ReplayLoop, requests: Iterator[Request], progress: Callable[[], None]) -> None:
        """Each request comes when the one before has ended."""
        for request in requests:
            self._free_at_computing_all = self._time.now
            self._arrive(request)
            await loop.serve(request)
            progress()

    async def as_they_came(self, requests: Iterator[Request]) -> None:
        """Requests come at the times of the trace, made not to go back, and wait for a `worker`."""
        first: float | None = None
        for request in requests:
            if request.arrived is None:
                raise ConfigError("the trace says no times", "--arrivals")
            first = request.arrived if first is None else first
            await self._time.sleep(request.arrived - first - self._time.now)
            self._arrive(request)
            self._waiting.append(request)
            self._came.notify_all()
        self._all_came = True
        self._came.notify_all()

    async def worker(self, loop: ReplayLoop, progress: Callable[[], None]) -> None:
        """Serve one request at a time until no more will come."""
        while self._waiting or not self._all_came:
            if not self._waiting:
                await self._came.wait()
                continue
            await loop.serve(self._waiting.popleft())
            progress()
