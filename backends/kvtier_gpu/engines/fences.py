"""Fences that copies wait for: the engine's work on its own streams."""

from __future__ import annotations

import threading

from kvtier_gpu.engines.device import CudaDevice, DeviceEvent, DeviceStream


class Fences:
    """The last fence of each stream of the engine. A copy waits for all of them, since it may belong to any.

    While the last fence of a stream has failed, every copy fails: it could take bytes that have not been computed yet.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._unfenced = device.current_stream()
        self._lock = threading.Lock()
        self._last: dict[int, DeviceEvent] = {}
        self._refused: dict[int | None, Exception] = {}

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
        except Exception as refusal:
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
