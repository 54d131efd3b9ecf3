"""The protocol of a device for the CUDA engine. `TorchDevice` is a real one; tests bring one that copies in host
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast

import torch

from kvtier_gpu.engines.kernel_copy import Launch, load_kernel
from kvtier_gpu.engines.pinned_region import Runtime

SYMBOL = b"cuMemcpyBatchAsync"
CUDA_VERSION = 12080


class DeviceEvent(Protocol):
    """A mark in the work of a stream."""

    def record(self, stream: Any, /) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class DeviceStream(Protocol):
    """A queue of work. Each call raises RuntimeError once the device is in error for good."""

    @property
    def cuda_stream(self) -> int:
        """The driver's handle; 0 is the legacy default stream."""

    def wait_event(self, event: Any, /) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class CudaDevice(Protocol):
    """A CUDA device, used from several threads."""

    def capability(self) -> int:
        """The compute capability's first number."""

    def new_stream(self, urgent: bool) -> DeviceStream:
        """A stream of its own, which no other stream waits for."""

    def new_event(self, blocking: bool) -> DeviceEvent:
        """An event. Threads that wait for a blocking one sleep; for another they spin."""

    def current_stream(self) -> DeviceStream:
        """The calling thread's."""

    def entered(self, stream: DeviceStream) -> AbstractContextManager[None]:
        """In it the calling thread's work goes to this stream of the device."""

    def enqueue(self, stream: DeviceStream, operation: Callable[[], None]) -> None:
        """Issue torch operations to a stream that the calling thread has entered."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of the device, flat uint8."""

    def runtime(self) -> Runtime:
        """The runtime that pins memory."""

    def batch_function(self) -> int | str:
        """The address of the driver's `cuMemcpyBatchAsync`, or why there is none."""

    def copy_kernel(self) -> Launch | str:
        """The kernel for many copies, or why there is none. The calling thread has entered the device."""


class TorchDevice:
    """A device by way of torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __str__(self) -> str:
        return str(self._device)

    def capability(self) -> int:
        return torch.cuda.get_device_capability(self._device)[0]

    def new_stream(self, urgent: bool) -> DeviceStream:
        stream = torch.cuda.Stream(self._device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]
        return cast(DeviceStream, stream)

    def new_event(self, blocking: bool) -> DeviceEvent:
        return cast(DeviceEvent, torch.cuda.Event(blocking=blocking))  # type: ignore[no-untyped-call]

    def current_stream(self) -> DeviceStream:
        return cast(DeviceStream, torch.cuda.current_stream(self._device))

    @contextmanager
    def entered(self, stream: DeviceStream) -> Iterator[None]:
        # inference mode is a thread's own; in it both normal and inference tensors may be written
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(cast(Any, stream)):
            yield

    def enqueue(self, stream: DeviceStream, operation: Callable[[], None]) -> None:
        operation()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def runtime(self) -> Runtime:
        return cast(Runtime, torch.cuda.cudart())  # type: ignore[no-untyped-call]

    def batch_function(self) -> int | str:
        return "AMD's drivers have another one" if torch.version.hip else find_batch_function()

    def copy_kernel(self) -> Launch | str:
        if torch.version.hip:
            return "AMD's devices have another compiler"
        return load_kernel(torch.cuda.get_device_capability(self._device), torch.cuda.current_device())


def find_batch_function() -> int | str:
    """The address of the driver's function, or why there is none."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return "it needs the package cuda-bindings: pip install 'kvtier[cuda]'"
    try:
        error, address, _ = driver.cuGetProcAddress(SYMBOL, CUDA_VERSION, 0)
    except RuntimeError as absent:  # no driver at all
        return str(absent).partition("\n")[0]
    if int(error) != 0 or not address:
        return f"the driver is older than CUDA 12.8 (CUDA error {int(error)})"
    return int(address)
