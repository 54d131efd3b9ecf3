"""Copies between CUDA memory and the region, on streams of their own: one for each direction, one for urgent loads.

A copy must run after the work that the compute stream had been given when the copy was asked for: towards the rows
because that work computes the pages, towards the GPU because it may still read or zero them. Two threads serve a
stream: one issues copies, the other waits for their events. So several copies are in flight, and the event loop's
thread never waits for the device. How bytes move is in `plan_copier`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from kvtier.errors import ResourceError
from kvtier_gpu.copy_plan import CopyPlan
from kvtier_gpu.engines.batch_copy import BatchCopy
from kvtier_gpu.engines.check_copies import find_refusal
from kvtier_gpu.engines.contract import CopyEngine, CopyFailure, Direction, Done, ManyCopies, join_failures
from kvtier_gpu.engines.device import CudaDevice, DeviceEvent, DeviceStream
from kvtier_gpu.engines.kernel_copy import KernelCopy
from kvtier_gpu.engines.pinned_region import PinnedRegion
from kvtier_gpu.engines.plan_copier import (
    STAGING_BYTES,
    URGENT_STAGING_BYTES,
    CopyPath,
    CopySides,
    PlanCopier,
    choose_paths,
)


class Fences:
    """The last fence of each stream of the engine. A copy waits for all of them, since it may belong to any.

    While the last fence of a stream has failed, every copy fails: it could take bytes that have not been computed yet.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._unfenced = device.current_stream()
        self._lock = threading.Lock()
        self._last: dict[int, DeviceEvent] = {}
        self._refused: dict[int | None, RuntimeError] = {}

    def add(self) -> None:
        """Fence the calling thread's current stream. From any thread; never raises because of the device."""
        handle = None
        try:
            stream = self._device.current_stream()
            handle = stream.cuda_stream
            event = self._event(stream)
            with self._lock:
                if handle not in self._last:
                    self._last = {key: last for key, last in self._last.items() if not last.query()}
                self._last[handle] = event
                self._refused.pop(handle, None)
        except RuntimeError as refusal:  # all that a device refuses
            with self._lock:
                self._refused[handle] = refusal.with_traceback(None)

    def events(self) -> list[DeviceEvent]:
        """The events that a copy has to wait for. Until the first fence that is the work of the stream that was current
        at first.

        Raises RuntimeError where a fence has failed.
        """
        with self._lock:
            found = list(self._last.values())
            for refusal in self._refused.values():
                raise RuntimeError(f"the engine's work could not be fenced: {refusal}") from refusal
        return found or [self._event(self._unfenced)]

    def _event(self, stream: DeviceStream) -> DeviceEvent:
        event = self._device.new_event(blocking=False)
        event.record(stream)
        return event


BATCH_CAPABILITY_MAX = 9
"""Up to this compute capability the driver's call is used unasked. Peers have seen it crash on newer devices."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Copy:
    """A plan on its way through a stream. `computed`: the events that say that what it copies has been computed.

    `ended` is the event that ends its copies, `failures` why not all were issued.
    """

    plan: CopyPlan
    computed: Sequence[DeviceEvent]
    done: Done
    ended: DeviceEvent | None = None
    failures: list[CopyFailure] = field(default_factory=list)


class _CopyStream:
    """A stream of one direction: a thread that issues copies and a thread that waits for them."""

    def __init__(self, name: str, direction: Direction, device: CudaDevice) -> None:
        self._direction = direction
        self._device = device
        self._warned = False
        self._requests: SimpleQueue[_Copy | None] = SimpleQueue()
        self._issued: SimpleQueue[_Copy | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"kvtier-{name}-{part}", daemon=True)
            for target, part in ((self._issue_all, "issue"), (self._wait_all, "wait"))
        ]

    def prepare(self, sides: CopySides, paths: Sequence[CopyPath], *, urgent: bool) -> None:
        """Make the stream and its staging. Raises RuntimeError if the device has no room."""
        self._stream: DeviceStream = self._device.new_stream(urgent)
        with self._device.entered(self._stream):
            staging = URGENT_STAGING_BYTES if urgent else STAGING_BYTES
            self._copier: PlanCopier | None = PlanCopier(sides, self._stream, self._direction, paths, staging)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, plan: CopyPlan, computed: Sequence[DeviceEvent], done: Done) -> None:
        self._requests.put(_Copy(plan, computed, done))

    def stop(self, timeout_seconds: float) -> bool:
        self._requests.put(None)
        for thread in filter(threading.Thread.is_alive, self._threads):  # those that could be started
            thread.join(timeout_seconds)
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            self._copier = None
        return ended

    def failure(self, failure: CopyFailure) -> CopyFailure:
        """A failure with the answer to whether the device is in error for good: it refuses everything then."""
        try:
            self._stream.query()
        except RuntimeError:
            return replace(failure, lasting=True)
        return failure

    def _issue_all(self) -> None:
        serving = True
        try:
            with self._device.entered(self._stream):
                for copy in iter(self._requests.get, None):
                    self._issue(copy)
                    del copy
                serving = False
        except Exception as refusal:
            _log.exception("the device could not be entered or left")
            failure = CopyFailure(refusal.with_traceback(None))
            for copy in iter(self._requests.get, None) if serving else ():
                copy.failures = [failure]
                self._issued.put(copy)
        self._issued.put(None)

    def _issue(self, copy: _Copy) -> None:
        """Issue a plan's copies, and have their end waited for."""
        try:
            self._copy(copy)
        except Exception as refusal:
            copy.failures = [CopyFailure(refusal.with_traceback(None))]
        self._issued.put(copy)

    def _copy(self, copy: _Copy) -> None:
        assert self._copier is not None
        for computed in copy.computed:
            self._stream.wait_event(computed)
        failures = self._copier.issue(copy.plan)
        ended = self._device.new_event(blocking=True)
        ended.record(self._stream)
        copy.ended, copy.failures = ended, failures
        if (refused := self._copier.driver_error) and not failures and not self._warned:
            self._warned = True
            lane = self._threads[0].name
            _log.warning("%s: %s refused copies (CUDA error %d), which are made singly", lane, *refused)

    def _wait_all(self) -> None:
        for copy in iter(self._issued.get, None):
            self._wait(copy)
            del copy  # nothing is kept while the thread waits

    def _wait(self, copy: _Copy) -> None:
        try:
            (copy.ended or self._stream).synchronize()  # without an event, part of the plan may have been issued
        except RuntimeError as refusal:  # a device in error ends every copy; the job must end with an outcome
            copy.failures = [CopyFailure(refusal.with_traceback(None))]
        failure = join_failures(copy.failures)
        copy.done(failure if failure is None else self.failure(failure))


class CudaEngine(CopyEngine):
    """Copies between KV tensors of one CUDA device and the region.

    `wanted` is the path that is taken wherever it works; None: by rule for each group. With `urgent_lane` urgent copies
    to the GPU have a stream, threads and staging of their own. The current stream of the thread that makes it computes
    what is copied, until the first fence.
    """

    def __init__(self, sides: CopySides, wanted: CopyPath | None, *, urgent_lane: bool = False) -> None:
        self._sides: CopySides | None = sides
        self._device = sides.device
        self._wanted = wanted
        self._streams = {direction: _CopyStream(direction, direction, sides.device) for direction in Direction}
        self._urgent = _CopyStream("urgent", Direction.TO_GPU, sides.device) if urgent_lane else None
        self._all = [*self._streams.values(), *filter(None, [self._urgent])]
        self._pinned: PinnedRegion | None = None
        self._fences = Fences(sides.device)

    def start(self) -> tuple[str, ...]:
        assert self._sides is not None
        device, region = self._device, self._sides.region
        with device.entered(device.current_stream()):
            self._pinned = PinnedRegion(device.runtime(), region, self._sides.rows)
            error = self._pinned.pin()
            notes = [f"the region is not pinned (CUDA error {error}): copies are slow and synchronous"] if error else []
            many = {} if error else self._find_many(notes)
            try:
                paths = self._prepare(replace(self._sides, many=many))
            except RuntimeError as refusal:
                self._pinned.unpin()
                raise ResourceError(f"{device} has no room for streams and staging: {refusal}") from refusal
        for stream in self._all:
            stream.start()
        ways = "; ".join(f"{direction} by {_path_names(one)}" for direction, one in paths.items())
        self.mode = f"{device}, {len(self._all)} streams, {'pageable' if error else 'pinned'} rows; {ways}"
        return tuple(notes)

    def _find_many(self, notes: list[str]) -> dict[CopyPath, ManyCopies]:
        """The calls for many copies that work, of those that are wanted. Adds why another one is not used to notes."""
        found: dict[CopyPath, ManyCopies] = {}
        ways = ((CopyPath.KERNEL, KernelCopy.name, self._kernel), (CopyPath.BATCH, BatchCopy.name, self._batch))
        for path, name, find in ways:
            if self._wanted not in (None, path):
                continue
            copies = find()
            if not isinstance(copies, str) and (refusal := find_refusal(self._device, copies)) is not None:
                copies = f"it failed when it was tried: {refusal}"
            if isinstance(copies, str):
                notes.append(f"{name} is not used: {copies}")
            else:
                found[path] = copies
        return found

    def _kernel(self) -> KernelCopy | str:
        found = self._device.copy_kernel()
        return found if isinstance(found, str) else KernelCopy(found)

    def _batch(self) -> BatchCopy | str:
        found = self._device.batch_function()
        if isinstance(found, int) and self._wanted is None and self._device.capability() > BATCH_CAPABILITY_MAX:
            return f"it has crashed on devices as new as {self._device}; `cuda_copies: batch` uses it all the same"
        return found if isinstance(found, str) else BatchCopy(found)

    def _prepare(self, sides: CopySides) -> dict[Direction, tuple[CopyPath, ...]]:
        """Choose the paths and make the streams. Raises RuntimeError if the device has no room."""
        tables = [group.table for group in sides.groups]
        paths = choose_paths(tables, self._wanted, sides.many)
        for direction, stream in self._streams.items():
            stream.prepare(sides, paths[direction], urgent=False)
        if self._urgent is not None:
            self._urgent.prepare(sides, paths[Direction.TO_GPU], urgent=True)
        return paths

    def fence(self) -> None:
        self._fences.add()

    def submit(self, plan: CopyPlan, direction: Direction, done: Done, urgent: bool = False) -> None:
        stream = self._streams[direction]
        if urgent and direction is Direction.TO_GPU and self._urgent is not None:
            stream = self._urgent
        try:
            computed = self._fences.events()
        except RuntimeError as refusal:
            done(stream.failure(CopyFailure(refusal.with_traceback(None))))
        else:
            stream.submit(plan, computed, done)

    def stop(self, timeout_seconds: float) -> bool:
        stopped = [stream.stop(timeout_seconds) for stream in self._all]
        ended = all(stopped)
        if ended:
            if self._pinned is not None:
                self._unpin(self._pinned)
            self._sides = None
        return ended

    def _unpin(self, pinned: PinnedRegion) -> None:
        """On the device: else the runtime would begin to use the one that is current in this thread."""
        try:
            with self._device.entered(self._device.current_stream()):
                pinned.unpin()
        except RuntimeError:  # a device in error for good cannot be entered
            pinned.unpin()


def _path_names(paths: Sequence[CopyPath]) -> str:
    """The paths of the groups in one direction, each once."""
    return " and ".join(dict.fromkeys(paths))
