"""Copies between CUDA memory and the region, each direction on a stream of its own.

A copy must run after the work that the compute stream had been given when the copy was submitted: towards the rows
because that work computes the pages, towards the GPU because it may still read or zero them. Two threads serve a
direction: one issues copies, the other waits for their events. So several copies are in flight, and the event loop's
thread never waits for the device.
"""

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import ResourceError
from kvtier_gpu.copy_plan import CopyPlan, split
from kvtier_gpu.engines.contract import CopyEngine, Direction, Done
from kvtier_gpu.engines.gather import STAGING_BYTES, GatherCopier, GroupTensors, staging_bytes
from kvtier_gpu.engines.pinned_region import PinnedRegion, Runtime

_Requested = tuple[CopyPlan, torch.cuda.Event, Done]
"""A plan, the event that says that what it copies has been computed, and its call back."""
_Issued = tuple[torch.cuda.Event | None, Exception | None, Done]
"""The event that ends a plan's copies, or why they could not all be issued."""


class _CopyStream:
    """The stream of one direction: its staging, a thread that issues copies and a thread that waits for them."""

    def __init__(self, direction: Direction, device: torch.device) -> None:
        self._direction = direction
        self._device = device
        self._requests: SimpleQueue[_Requested | None] = SimpleQueue()
        self._issued: SimpleQueue[_Issued | None] = SimpleQueue()
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
        self._requests.put((plan, computed, done))

    def stop(self, timeout_seconds: float) -> bool:
        self._requests.put(None)
        for thread in filter(threading.Thread.is_alive, self._threads):  # those that could be started
            thread.join(timeout_seconds)
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            self._copier = None
        return ended

    def _issue_all(self) -> None:
        # inference mode is a thread's own; in it both normal and inference tensors may be written
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            while (request := self._requests.get()) is not None:
                plan, computed, done = request
                try:
                    self._issue(plan, computed)
                    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    event.record(self._stream)
                    self._issued.put((event, None, done))
                except Exception as failure:  # the thread must live on, and the job must end with an outcome
                    self._issued.put((None, failure.with_traceback(None), done))
                del request, plan, computed, done
            self._issued.put(None)

    def _issue(self, plan: CopyPlan, computed: torch.cuda.Event) -> None:
        self._stream.wait_event(computed)
        assert self._copier is not None
        for part in split(plan, STAGING_BYTES):
            for pages in part:
                self._copier.copy(pages, self._direction)

    def _wait_all(self) -> None:
        while (issued := self._issued.get()) is not None:
            event, error, done = issued
            try:
                (event or self._stream).synchronize()  # without an event, part of the job may have been issued
            except Exception as failure:  # a device in error ends every copy; the job must end with an outcome
                error = error or failure.with_traceback(None)
            done(error)
            del issued, event, error, done


class CudaEngine(CopyEngine):
    """Copies between KV tensors of one CUDA device and the region."""

    def __init__(
        self, region: npt.NDArray[np.uint8], row_bytes: int, groups: Sequence[GroupTensors], device: torch.device
    ) -> None:
        self._region: npt.NDArray[np.uint8] | None = region
        self._row_bytes = row_bytes
        self._groups = tuple(groups)
        self._device = device
        self._streams = {direction: _CopyStream(direction, device) for direction in Direction}
        self._pinned: PinnedRegion | None = None
        self.compute_stream: torch.cuda.Stream | None = None

    def start(self) -> tuple[str, ...]:
        assert self._region is not None
        notes: tuple[str, ...] = ()
        with torch.cuda.device(self._device):
            runtime = cast(Runtime, torch.cuda.cudart())  # type: ignore[no-untyped-call]
            self._pinned = PinnedRegion(runtime, self._region, self._row_bytes)
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

    def submit(self, plan: CopyPlan, direction: Direction, done: Done) -> None:
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record(self.compute_stream or torch.cuda.current_stream(self._device))
        self._streams[direction].submit(plan, computed, done)

    def stop(self, timeout_seconds: float) -> bool:
        stopped = [stream.stop(timeout_seconds) for stream in self._streams.values()]
        ended = all(stopped)
        if ended:
            if self._pinned is not None:
                self._pinned.unpin()
            self._region = None
            self._groups = ()
        return ended
