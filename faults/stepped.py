"""A `TierStack` that a plain thread drives step by step, with the calls of a `ProcessStack`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from kvtier.errors import UsageError
from kvtier.stack import CloseReport, StackParts, TierStack
from kvtier.stack.jobs import whole_groups
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import JobKind, JobResult, TransferJob
from kvtier.types.keys import JobId, OffloadKey

T = TypeVar("T")

TURN_SECONDS = 0.002


class Within:
    """An object of a stepped stack: each of its calls is made within the loop."""

    def __init__(self, target: Any, stack: SteppedStack) -> None:
        self.target = target
        self._stack = stack

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.target, name)
        return partial(self._stack.within, found) if callable(found) else found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class SteppedStack:
    """The stack's loop turns within its calls alone."""

    def __init__(self, parts: StackParts) -> None:
        self.stack = TierStack(parts)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: list[JobResult] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.stack, name)
        return partial(self.within, found) if callable(found) else found

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Turn the loop until a coroutine has ended."""
        assert self._loop is not None
        return self._loop.run_until_complete(work)

    def within(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Make a call within the loop, which does not turn for longer than that; where it does not turn, without it."""
        if not self._turns:
            return call(*args, **kwargs)

        async def made() -> T:
            return call(*args, **kwargs)

        return self.run(made())

    @property
    def _turns(self) -> bool:
        """False before the stack opens, once it is closed, and in a forked child, which must not turn this loop."""
        return not (self.stack._owner.is_forked_child or self._loop is None or self._loop.is_closed())

    def open(self) -> None:
        """As `TierStack.open`."""
        self._loop = asyncio.new_event_loop()
        try:
            self.run(self.stack.open())
        except BaseException:
            self._close_loop()
            raise

    def close(self) -> CloseReport:
        """As `TierStack.close`. Idempotent; in a forked child it does nothing."""
        if not self._turns:
            return self.stack.close_report or CloseReport(0, 0)
        try:
            self.run(self.stack.close())
        finally:
            self._close_loop()
        return self.stack.close_report or CloseReport(0, 0)

    def _close_loop(self) -> None:
        """End what is left in the loop; what hangs is left behind."""
        assert self._loop is not None
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run(_wait(tasks, self.stack._settings.tier_close_seconds))
        self.run(self._loop.shutdown_asyncgens())
        self._loop.close()

    def request(self, *args: Any, **kwargs: Any) -> Within:
        """As `TierStack.request`."""
        return Within(self.within(self.stack.request, *args, **kwargs), self)

    @property
    def engine(self) -> Within:
        """As `TierStack.engine`."""
        return Within(self.stack.engine, self)

    def submit(self, job: TransferJob, request: Within | None = None) -> JobId:
        """Begin a job; its result comes out of a later `step`."""
        self.stack._opened()
        assert self._loop is not None
        task = self._loop.create_task(self.stack.run(job, None if request is None else request.target))
        task.add_done_callback(self._on_end)
        self._turn()
        if task.done() and isinstance(error := task.exception(), UsageError):
            raise error
        return job.job_id

    def _on_end(self, task: asyncio.Task[JobResult]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._ended.append(task.result())

    def _job(self, kind: JobKind, keys: Sequence[OffloadKey], gpu_blocks: Sequence[int]) -> TransferJob:
        return self.stack.job(kind, whole_groups(keys, gpu_blocks, (), self.stack.geometry))

    def submit_store(self, keys: Sequence[OffloadKey], *, gpu_blocks: Sequence[int]) -> JobId:
        """Begin to store whole blocks."""
        return self.submit(self._job(JobKind.STORE, keys, gpu_blocks))

    def submit_load(
        self, keys: Sequence[OffloadKey], request: Within | None = None, *, gpu_blocks: Sequence[int]
    ) -> JobId:
        """Begin to load whole blocks."""
        return self.submit(self._job(JobKind.LOAD, keys, gpu_blocks), request)

    def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """Presence from memory; RETRY where a shared tier has yet to answer."""
        self.stack._opened()
        return self.within(self.stack._look, keys)

    def step(self) -> list[JobResult]:
        """Turn the loop once; the jobs that ended since the last call."""
        self.stack._opened()
        self._turn()
        ended, self._ended = self._ended, []
        return ended

    def _turn(self) -> None:
        assert self._loop is not None
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()

    def wait(self, timeout_seconds: float) -> bool:
        """Turn the loop until a job has ended, or for a moment."""
        self.stack._opened()
        if not self._ended:
            self.run(asyncio.sleep(min(timeout_seconds, TURN_SECONDS)))
        return True

    @property
    def has_pending_work(self) -> bool:
        """True while jobs are in flight or wait, the stack's own too."""
        return bool(self._ended) or not self.stack._opened().plane.idle

    def reset(self) -> None:
        """As `TierStack.reset`."""
        self.stack._opened()
        self.run(self.stack.reset())


async def _wait(tasks: set[asyncio.Task[Any]], seconds: float) -> None:
    await asyncio.wait(tasks, timeout=seconds)
