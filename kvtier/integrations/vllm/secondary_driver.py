"""A tier below vLLM's CPU tier at work: its backend, in a thread of its own, behind rows of our own.

The scheduler's thread sends jobs and questions and takes answers from a queue; it waits only in `open`, `wait` and
`close`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvtier.control.board import Emission
from kvtier.errors import ConfigError, ResourceError, RootBusyError
from kvtier.integrations.vllm.secondary_options import SecondaryOptions, rows_geometry
from kvtier.integrations.vllm.secondary_staging import Passages, PrimaryRows, StagedTier, StagingRows
from kvtier.keys import OffloadKey
from kvtier.loadstore import LoadStore, LookupResult, Opened, TierContext
from kvtier.namespace import Namespace
from kvtier.registry import discover
from kvtier.stack.assembly import resolve_alignment
from kvtier.stack.closing import close_each
from kvtier.stack.dispatcher import Delivery, Dispatcher, Lane
from kvtier.stack.forking import OwnerProcess

T = TypeVar("T")

OPEN_SECONDS = 600.0
BUSY_POLL_SECONDS = 0.2
GRACE_SECONDS = 1.0
PART_BLOCKS = 128
_log = logging.getLogger("vllm.kvtier.fs")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a shared tier said of some keys."""

    keys: Sequence[OffloadKey]
    results: Sequence[LookupResult]


@dataclass(frozen=True, slots=True)
class Staged:
    """An open tier: what it said, and how many rows of how many bytes its blocks pass through in each direction."""

    opened: Opened
    lanes: Sequence[Lane]
    lane_rows: int
    row_bytes: int

    @property
    def part_blocks(self) -> int:
        """Blocks of one job: several jobs side by side, so that copies and I/O overlap."""
        return max(1, min(PART_BLOCKS, self.lane_rows // 4))


class SecondaryDriver:
    """One tier. `open` once, `close` once; every other call from the scheduler's thread."""

    def __init__(self, options: SecondaryOptions, namespace: Namespace, primary: PrimaryRows) -> None:
        self.passages = Passages()
        self._options = options
        self._namespace = namespace
        self._primary = primary
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtier-secondary", daemon=True)
        self._threads = ThreadPoolExecutor(options.copy_threads, "kvtier-secondary-copy")
        self._inbox: deque[Delivery | Answer] = deque()
        self._arrived = threading.Event()
        self._owner = OwnerProcess()
        self._tier: StagedTier
        self._dispatcher: Dispatcher | None = None
        self._closed = False
        self._at_exit = partial(_close_at_exit, weakref.ref(self))

    # -- life ----------------------------------------------------------------------------------------------------

    def open(self) -> Staged:
        """Start the thread and open the tier; waits for a root that another process is about to leave.

        Raises ConfigError, GeometryError or ResourceError with nothing left behind.
        """
        self._owner.claim()
        self._thread.start()
        try:
            staged = self._await(self._open(), OPEN_SECONDS)
        except TimeoutError as error:
            self._stop()
            raise ResourceError(f"the tier did not open within {OPEN_SECONDS:g} s") from error
        except BaseException:
            self._stop()
            raise
        atexit.register(self._at_exit)
        return staged

    async def _open(self) -> Staged:
        deadline = time.monotonic() + self._options.busy_root_seconds
        while True:
            backend = discover().get(self._options.type)(self._options)
            try:
                return await self._open_backend(backend)
            except RootBusyError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(BUSY_POLL_SECONDS)

    async def _open_backend(self, backend: LoadStore) -> Staged:
        num_groups = len(self._namespace.layout.groups)
        alignment = await resolve_alignment([backend])
        geometry = rows_geometry(num_groups, self._primary.row_bytes, alignment)
        row_bytes = geometry.row_bytes
        lane_rows = self._options.inflight_bytes // 2 // row_bytes
        if not lane_rows:
            raise ConfigError(
                f"is {self._options.inflight_bytes} bytes, but a row needs {row_bytes} for each direction: "
                f"write at least {2 * row_bytes}",
                "inflight_bytes",
            )
        rows = StagingRows(2 * lane_rows, row_bytes)
        tier = StagedTier(backend, self._primary, self.passages, self._threads)
        name = self._options.name or self._options.type
        opened = await tier.open(TierContext(name, geometry, self._namespace, time.monotonic, rows=rows))
        lanes = [Lane(tier, lane_rows * row_bytes) for _ in range(2)]
        self._tier = tier
        self._dispatcher = Dispatcher(lanes, row_bytes, time.monotonic, self._deliver)
        return Staged(opened, lanes, lane_rows, row_bytes)

    def close(self) -> None:
        """End I/O within the tier's own deadline and let go of everything. Idempotent; nothing in a forked child.

        Every passage must be shut: vLLM's rows are not touched from here on.
        """
        if self._closed or self._owner.elsewhere:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        seconds = self._options.close_timeout_seconds + GRACE_SECONDS
        try:
            if self.alive and self._dispatcher is not None:
                self._await(self._close(seconds), 2 * seconds)
        except TimeoutError:
            _log.warning("the tier did not close within %g s and is left behind", 2 * seconds)
        finally:
            self._stop()

    async def _close(self, seconds: float) -> None:
        assert self._dispatcher is not None
        self._dispatcher.stop()
        await close_each([self._tier], seconds)
        await asyncio.sleep(0)  # what has ended is told in the next turn of the loop

    def _stop(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                self._await(_cancel_tasks(), GRACE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(GRACE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        self._threads.shutdown(cancel_futures=True)  # copies take moments

    def _await(self, work: Coroutine[Any, Any, T], timeout_seconds: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_seconds)
        finally:
            future.cancel()

    # -- moving blocks -------------------------------------------------------------------------------------------

    def send(self, jobs: Sequence[Emission], questions: Sequence[OffloadKey]) -> None:
        """Hand over what was decided."""
        assert self._dispatcher is not None
        if jobs:
            self._loop.call_soon_threadsafe(self._dispatcher.submit, jobs)
        if questions:
            asyncio.run_coroutine_threadsafe(self._ask(questions), self._loop)

    async def _ask(self, keys: Sequence[OffloadKey]) -> None:
        try:
            results = await self._tier.lookup(keys)
        except Exception:
            # The keys' own deadline makes them misses.
            _log.exception("a lookup of %d keys failed", len(keys))
            return
        if len(results) == len(keys):
            self._inbox.append(Answer(keys, results))
            self._arrived.set()

    def _deliver(self, batch: list[Delivery]) -> None:
        """In the loop's thread: a deque append is atomic, and the scheduler's thread drains it."""
        self._inbox.extend(batch)
        self._arrived.set()

    def receive(self) -> list[Delivery | Answer]:
        """What arrived since the last call."""
        self._arrived.clear()
        arrived = []
        while self._inbox:
            arrived.append(self._inbox.popleft())
        return arrived

    def wait(self, timeout_seconds: float) -> None:
        """Wait until something arrived, or the time is over."""
        self._arrived.wait(max(0.0, timeout_seconds))

    @property
    def alive(self) -> bool:
        """False once the thread that moves blocks is gone: nothing will arrive any more."""
        return self._thread.is_alive()

    @property
    def elsewhere(self) -> bool:
        """True in a child that was forked from the process that opened the tier; nothing works there."""
        return self._owner.elsewhere


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE_SECONDS)


def _close_at_exit(reference: weakref.ref[SecondaryDriver]) -> None:
    """Close what was left open when the interpreter ends; its threads must not be caught moving bytes."""
    driver = reference()
    if driver is not None:
        driver.passages.shut_all()
        driver.close()
