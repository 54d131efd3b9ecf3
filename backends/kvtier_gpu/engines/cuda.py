"""Copies between CUDA memory and the region, each direction on a stream of its own.

A copy must run after the work that the compute stream had been given when the copy was submitted: towards the rows
because that work computes the pages, towards the GPU because it may still read or zero them. Two threads serve a
direction: one issues copies, the other waits for their events. So several copies are in flight, and the event loop's
thread never waits for the device.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import ResourceError
from kvtier_gpu.copy_plan import CopyPlan, split
from kvtier_gpu.engines.contract import CALL_AGAIN_SECONDS, CALLS_MAX, CopyEngine, Direction, Done
from kvtier_gpu.engines.gather import STAGING_BYTES, GatherCopier, GroupTensors, staging_bytes
from kvtier_gpu.engines.pinned_region import PinnedRegion, RowSlices, Runtime

_log = logging.getLogger(__name__)
_NOT_ISSUED = RuntimeError("the copies could not be issued")


@dataclass(slots=True)
class _Copy:
    """A plan on its way through a stream. `computed`: the event that says that what it copies has been computed.

    `plan` is there until it is issued, `ended` is the event that ends its copies, `error` why not all were issued.
    """

    plan: CopyPlan | None
    computed: torch.cuda.Event
    done: Done
    ended: torch.cuda.Event | None = None
    error: Exception | None = _NOT_ISSUED


class _CopyStream:
    """The stream of one direction: its staging, a thread that issues copies and a thread that waits for them."""

    def __init__(self, direction: Direction, device: torch.device) -> None:
        self._direction = direction
        self._device = device
        self._requests: SimpleQueue[_Copy | None] = SimpleQueue()
        self._issued: SimpleQueue[_Copy | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"kvtier-{direction}-{part}", daemon=True)
            for target, part in ((self._issue_all, "issue"), (self._wait_all, "wait"))
        ]

    def prepare(self, groups: Sequence[GroupTensors], region: torch.Tensor) -> None:
        """Make the stream and its staging. The caller is on the engine's device."""
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            staging = torch.empty(staging_bytes(groups), dtype=torch.uint8, device=self._device)
        self._copier: GatherCopier | None = GatherCopier(groups, region, staging)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, plan: CopyPlan, computed: torch.cuda.Event, done: Done) -> None:
        self._requests.put(_Copy(plan, computed, done))

    def stop(self, timeout_seconds: float) -> bool:
        self._requests.put(None)
        for thread in filter(threading.Thread.is_alive, self._threads):  # those that could be started
            thread.join(timeout_seconds)
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            self._copier = None
        return ended

    def _issue_all(self) -> None:
        try:
            with self._entered():
                _take_each(self._requests, self._issue)
        except Exception:
            _log.exception("the device could not be entered, and is entered for each plan")
            _take_each(self._requests, self._enter_and_issue)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        # inference mode is a thread's own; in it both normal and inference tensors may be written
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def _enter_and_issue(self, copy: _Copy | None) -> None:
        try:
            with self._entered():
                self._issue(copy)
        except Exception as refusal:
            if copy is not None:
                copy.error = refusal.with_traceback(None)
            self._issued.put(copy)

    def _issue(self, copy: _Copy | None) -> None:
        """Issue a plan's copies, once, and have their end waited for."""
        if copy is not None and copy.plan is not None:
            plan, copy.plan = copy.plan, None
            try:
                self._copy(plan, copy)
            except Exception as failure:
                copy.error = failure.with_traceback(None)
        self._issued.put(copy)

    def _copy(self, plan: CopyPlan, copy: _Copy) -> None:
        assert self._copier is not None
        self._stream.wait_event(copy.computed)
        for part in split(plan, STAGING_BYTES):
            for pages in part:
                self._copier.copy(pages, self._direction)
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        ended.record(self._stream)
        copy.ended, copy.error = ended, None

    def _wait_all(self) -> None:
        _take_each(self._issued, self._wait)

    def _wait(self, copy: _Copy | None) -> None:
        if copy is None:
            return
        try:
            (copy.ended or self._stream).synchronize()  # without an event, part of the plan may have been issued
        except Exception as failure:  # a device in error ends every copy; the job must end with an outcome
            copy.error = copy.error or failure.with_traceback(None)
        copy.done(copy.error)


def _take_each(copies: SimpleQueue[_Copy | None], step: Callable[[_Copy | None], None]) -> None:
    """Take a step for each item of a queue up to None; again for the same one if it raised, because a job waits."""
    copy: _Copy | None = None
    held = False
    tries = 0
    while True:
        try:
            if not held:
                copy = copies.get()
                held = True
                tries = 0
            step(copy)
            held = False
            if copy is None:
                return
            copy = None
        except Exception:
            tries += 1
            held = held and tries < CALLS_MAX
            _log.exception("a copy could not be taken further")
            time.sleep(CALL_AGAIN_SECONDS)


class CudaEngine(CopyEngine):
    """Copies between KV tensors of one CUDA device and the region.

    With `urgent_lane` urgent copies to the GPU have a stream, threads and staging of their own.
    """

    def __init__(
        self,
        region: npt.NDArray[np.uint8],
        rows: RowSlices,
        groups: Sequence[GroupTensors],
        device: torch.device,
        urgent_lane: bool = False,
    ) -> None:
        self._region: npt.NDArray[np.uint8] | None = region
        self._rows = rows
        self._groups = tuple(groups)
        self._device = device
        self._streams = {(direction, False): _CopyStream(direction, device) for direction in Direction}
        if urgent_lane:
            self._streams[Direction.TO_GPU, True] = _CopyStream(Direction.TO_GPU, device)
        self._pinned: PinnedRegion | None = None
        self.compute_stream: torch.cuda.Stream | None = None

    def start(self) -> tuple[str, ...]:
        assert self._region is not None
        notes: tuple[str, ...] = ()
        with torch.cuda.device(self._device):
            runtime = cast(Runtime, torch.cuda.cudart())  # type: ignore[no-untyped-call]
            self._pinned = PinnedRegion(runtime, self._region, self._rows)
            error = self._pinned.pin()
            if error:
                notes = (f"the region is not pinned (CUDA error {error}): copies are slower and not asynchronous",)
            region = torch.from_numpy(self._region)
            try:
                for stream in self._streams.values():
                    stream.prepare(self._groups, region)
            except RuntimeError as refusal:
                self._pinned.unpin()
                raise ResourceError(f"{self._device} has no room for streams and staging: {refusal}") from refusal
        for stream in self._streams.values():
            stream.start()
        self.mode = f"{self._device}, {len(self._streams)} streams, {'pageable' if error else 'pinned'} rows"
        return notes

    def submit(self, plan: CopyPlan, direction: Direction, done: Done, urgent: bool = False) -> None:
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record(self.compute_stream or torch.cuda.current_stream(self._device))
        lane = direction, urgent and (direction, True) in self._streams
        self._streams[lane].submit(plan, computed, done)

    def stop(self, timeout_seconds: float) -> bool:
        stopped = [stream.stop(timeout_seconds) for stream in self._streams.values()]
        ended = all(stopped)
        if ended:
            if self._pinned is not None:
                self._pinned.unpin()
            self._region = None
            self._groups = ()
        return ended
