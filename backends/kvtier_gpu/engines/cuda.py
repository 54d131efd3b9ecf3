"""Copies between CUDA memory and the region, each direction on a stream of its own.

A copy waits for what the compute stream had been given when the copy was submitted: towards the rows because the
pages must have been computed, towards the GPU because earlier work may still read or zero the pages. Two threads serve
a direction: one issues copies, the other waits for their events, so several copies are in flight and the event
loop's thread never waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import ResourceError
from kvtier_gpu.engines.contract import CopyEngine, Direction, Done
from kvtier_gpu.engines.pinning import PinnedRegion, Runtime
from kvtier_gpu.engines.staged import STAGING_BYTES, GroupTensors, StagedCopier, staging_bytes
from kvtier_gpu.plan import CopyPlan, cut


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    plan: CopyPlan
    computed: torch.cuda.Event
    done: Done


@dataclass(frozen=True, slots=True, eq=False)
class _Landing:
    event: torch.cuda.Event | None
    error: Exception | None
    done: Done


class _Lane:
    """One direction: a stream, its staging, a thread that issues and a thread that waits."""

    def __init__(self, direction: Direction, device: torch.device) -> None:
        self._direction = direction
        self._device = device
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._landings: SimpleQueue[_Landing | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"kvtier-{direction}-{part}", daemon=True)
            for target, part in ((self._issue_all, "issue"), (self._land_all, "land"))
        ]

    def prepare(self, groups: Sequence[GroupTensors], region: torch.Tensor) -> None:
        """Make the stream and its staging. The caller is on the engine's device."""
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            staging = torch.empty(staging_bytes(groups), dtype=torch.uint8, device=self._device)
        self._copier: StagedCopier | None = StagedCopier(groups, region, staging)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, request: _Request) -> None:
        self._requests.put(request)

    def stop(self, timeout_seconds: float) -> bool:
        if self._threads[0].ident is None:
            return True
        self._requests.put(None)
        for thread in self._threads:
            thread.join(timeout_seconds)
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            self._copier = None
        return ended

    def _issue_all(self) -> None:
        # inference mode is a thread's own; in it both normal and inference tensors may be written
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            while (request := self._requests.get()) is not None:
                event: torch.cuda.Event | None = None
                error: Exception | None = None
                try:
                    self._issue(request)
                    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    event.record(self._stream)
                except Exception as failure:  # the thread must live on, and the job must end with an outcome
                    error, event = failure.with_traceback(None), None
                self._landings.put(_Landing(event, error, request.done))
                del request
            self._landings.put(None)

    def _issue(self, request: _Request) -> None:
        self._stream.wait_event(request.computed)
        assert self._copier is not None
        for share in cut(request.plan, STAGING_BYTES):
            for span in share:
                self._copier.copy(span, self._direction)

    def _land_all(self) -> None:
        while (landing := self._landings.get()) is not None:
            error = landing.error
            try:
                if landing.event is not None:
                    landing.event.synchronize()
                else:  # part of the job may have been issued before it failed
                    self._stream.synchronize()
            except Exception as failure:  # a device in error ends every copy; the job must end with an outcome
                error = error or failure.with_traceback(None)
            landing.done(error)
            del landing


class CudaEngine(CopyEngine):
    """Copies between KV tensors of one CUDA device and the region."""

    def __init__(
        self, region: npt.NDArray[np.uint8], row_bytes: int, groups: Sequence[GroupTensors], device: torch.device
    ) -> None:
        self._region: npt.NDArray[np.uint8] | None = region
        self._row_bytes = row_bytes
        self._groups = tuple(groups)
        self._device = device
        self._lanes = {direction: _Lane(direction, device) for direction in Direction}
        self._pinned: PinnedRegion | None = None
        self._mode = ""
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
                for lane in self._lanes.values():
                    lane.prepare(self._groups, region)
            except RuntimeError as refusal:
                self._pinned.unpin()
                raise ResourceError(f"{self._device} has no room for streams and staging: {refusal}") from refusal
        for lane in self._lanes.values():
            lane.start()
        self._mode = f"{self._device}, {len(self._lanes)} streams, {'pageable' if error else 'pinned'} rows"
        return notes

    @property
    def mode(self) -> str:
        return self._mode

    def submit(self, plan: CopyPlan, direction: Direction, done: Done) -> None:
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record(self.compute_stream or torch.cuda.current_stream(self._device))
        self._lanes[direction].submit(_Request(plan, computed, done))

    def stop(self, timeout_seconds: float) -> bool:
        stopped = [lane.stop(timeout_seconds) for lane in self._lanes.values()]
        ended = all(stopped)
        if ended:
            if self._pinned is not None:
                self._pinned.unpin()
            self._region = None
            self._groups = ()
        return ended
