"""A CUDA device made of host memory, for the CUDA engine as it is.

Streams hold their work until somebody waits, and a seeded choice says whose is next, so everything happens late, in any
order and piece by piece, as far as events allow. The driver's call for many copies is a C function that reads its
arguments as the driver does. What a real driver refuses is refused here; what it would not notice is a violation.
"""

from __future__ import annotations

import ctypes
import random
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kvtier_gpu.engines.kernel_copy import PIECES

INVALID_VALUE, ILLEGAL_ADDRESS, ALREADY_REGISTERED = 1, 700, 712
LEGACY, PER_THREAD = (0, 1), 2
IN_STREAM_ORDER, ANY_ORDER = 1, 3
WAIT_SECONDS = 30.0

PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 3, ctypes.c_size_t, *(ctypes.c_void_p,) * 2,
                             ctypes.c_size_t, *(ctypes.c_void_p,) * 2)  # fmt: skip
ATTRIBUTES = struct.Struct("=iiiiiI")
"""srcAccessOrder, type and id of both locations, flags."""


class DeviceError(RuntimeError):
    """As torch raises it."""


@dataclass
class Mark:
    """An event's place in a stream."""

    done: bool = False


@dataclass
class Copies:
    """Copies of one call that have not been made: (to, from or what was there, length)."""

    left: list[tuple[int, int | bytes, int]]


Work = Copies | Mark | Callable[[], None] | tuple[Mark]
"""Of a stream; a tuple waits for its mark."""


@dataclass(frozen=True)
class Call:
    """One call of the driver: how many copies, their order, the stream, and the lengths."""

    count: int
    order: int
    stream: int
    lengths: tuple[int, ...]


def name_of(operation: Callable[[], None]) -> str:
    """The name of the function that an operation calls."""
    return str(getattr(operation, "func", operation).__name__)


def inside(ranges: list[tuple[int, int]], at: np.ndarray, length: np.ndarray) -> np.ndarray:
    """For each piece of memory whether it lies in one of some ranges that do not overlap."""
    starts, ends = np.array(sorted(ranges), dtype=np.int64).reshape(-1, 2).T
    place = np.searchsorted(starts, at, side="right") - 1
    return (place >= 0) & (at + length <= ends[place]) if len(starts) else np.zeros(len(at), dtype=np.bool_)


class FakeStream:
    """Work in order. `held`: none of it is done. `reluctant`: only where no other stream can go on."""

    def __init__(self, device: FakeCuda, handle: int, reluctant: bool) -> None:
        self.device, self.cuda_stream, self.reluctant, self.held = device, handle, reluctant, False
        self.work: deque[Work] = deque()

    def push(self, work: Work) -> None:
        with self.device.changed:
            self.device.check()
            self.work.append(work)
            self.device.changed.notify_all()

    def wait_event(self, event: FakeEvent) -> None:
        self.device.check()
        if event.mark is not None and not self.device.deaf:
            self.push((event.mark,))

    def query(self) -> bool:
        self.device.check()
        return not self.work

    def synchronize(self) -> None:
        event = FakeEvent(self.device)
        event.record(self)
        event.synchronize()


class FakeEvent:
    """An event; one that was never recorded has passed."""

    def __init__(self, device: FakeCuda) -> None:
        self.device = device
        self.mark: Mark | None = None

    def record(self, stream: FakeStream) -> None:
        mark = Mark()
        stream.push(mark)
        self.mark = mark

    def query(self) -> bool:
        self.device.check()
        return self.mark is None or self.mark.done

    def synchronize(self) -> None:
        if self.mark is not None:
            self.device.run_until(self.mark)


@dataclass
class Faults:
    """What goes wrong. `refuse`, `refuse_launch`: whether the driver refuses a call or a launch, by its number.
    `no_single`: no page or piece can be copied alone. `lost_after`: pieces of work after which the device is in error
    for good. `wrong_byte`: what is copied by the driver's call or by the kernel has one. `hangs`: calls of the driver
    wait for this."""

    refuse: Callable[[int], bool] = lambda call: False
    refuse_launch: Callable[[int], bool] = lambda launch: False
    no_single: bool = False
    lost_after: int | None = None
    wrong_byte: bool = False
    no_memory: bool = False
    hangs: threading.Event | None = None
    register_error: int = 0


class FakeCuda:
    """The device. `deaf`: streams do not wait for events, which shows that a test would notice it."""

    def __init__(
        self,
        seed: int,
        *,
        deaf: bool = False,
        function: str | None = None,
        kernel: str | None = None,
        capability: int = 9,
    ) -> None:
        self.random, self.deaf, self.faults = random.Random(seed), deaf, Faults()
        self.changed = threading.Condition(threading.RLock())
        self.calls: list[Call] = []
        self.launches: list[int] = []
        self.violations: list[str] = []
        self.pinned: dict[int, int] = {}
        self.lost = False
        self.steps = 0
        self._function, self._kernel, self._capability = function, kernel, capability
        self._callback = PROTOTYPE(self._called)
        self._memory: list[tuple[int, int]] = []
        self._kept: list[object] = []
        self._local = threading.local()
        self.default = FakeStream(self, 0, reluctant=True)
        self.streams = [self.default]

    def __str__(self) -> str:
        return "cuda:0"

    # -- what the engine calls -------------------------------------------------------------------------------------

    def capability(self) -> int:
        return self._capability

    def new_stream(self, urgent: bool, reluctant: bool = False) -> FakeStream:
        self.check()
        stream = FakeStream(self, 0x1000 + len(self.streams), reluctant)
        with self.changed:
            self.streams.append(stream)
        return stream

    def new_event(self, blocking: bool) -> FakeEvent:
        self.check()
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def entered(self, stream: FakeStream) -> Iterator[None]:
        self.check()
        before, inside = self.current_stream(), self._entered()
        self._local.stream, self._local.entered = stream, True
        try:
            yield
        finally:
            self._local.stream, self._local.entered = before, inside

    def _entered(self) -> bool:
        return getattr(self._local, "entered", False)

    def enqueue(self, stream: FakeStream, operation: Callable[[], None]) -> None:
        if self.current_stream() is not stream:
            self.violations.append("an operation was issued from a thread that has not entered the stream")
        if self.faults.no_single and name_of(operation) in ("move_pages", "move_each"):
            raise DeviceError("CUDA error: invalid argument")
        stream.push(operation)

    def empty(self, nbytes: int) -> torch.Tensor:
        self.check()
        if self.faults.no_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        memory = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
        self.own([memory])
        return memory

    def runtime(self) -> FakeCuda:
        return self

    def batch_function(self) -> int | str:
        return ctypes.cast(self._callback, ctypes.c_void_p).value if self._function is None else self._function

    def copy_kernel(self) -> Callable[[int, int], int] | str:
        if not self._entered():
            self.violations.append("a kernel was asked for from a thread that has not entered the device")
        return self._launched if self._kernel is None else self._kernel

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self._entered():
            self.violations.append("memory was pinned from a thread that has not entered the device")
        if self.faults.register_error:
            return self.faults.register_error
        if any(address < at + length and at < address + size for at, length in self.pinned.items()):
            return ALREADY_REGISTERED
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        with self.changed:
            if not self._entered() and not self.lost:
                self.violations.append("memory was unpinned from a thread that has not entered the device")
            if any(isinstance(work, Copies) for stream in self.streams for work in stream.work) and not self.lost:
                self.violations.append("memory was unpinned while copies are in flight")
        return 0 if self.pinned.pop(address, None) else INVALID_VALUE

    # -- what a test calls -----------------------------------------------------------------------------------------

    def own(self, tensors: list[torch.Tensor]) -> None:
        """These tensors are memory of the device."""
        self._kept += tensors
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._memory.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def check(self) -> None:
        if self.lost:
            raise DeviceError("CUDA error: an illegal memory access was encountered")

    def run_until(self, mark: Mark) -> None:
        """Do work, of any stream that can go on, until a mark has been reached."""
        with self.changed:
            while not mark.done:
                self.check()
                if not self._step() and not self.changed.wait(WAIT_SECONDS):
                    self.violations.append("a stream waited for what nobody gave to the device")
                    self.lose()

    def release(self, stream: FakeStream) -> None:
        with self.changed:
            stream.held = False
            self.changed.notify_all()

    def lose(self) -> None:
        """From now on every call fails, and nothing that was issued is done."""
        with self.changed:
            self.lost = True
            self.changed.notify_all()

    # -- its work --------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        able = [stream for stream in self.streams if not stream.held and self._can_go_on(stream.work)]
        eager = [stream for stream in able if not stream.reluctant]
        if not able:
            return False
        stream = self.random.choice(eager or able)
        work = stream.work[0]
        self.steps += 1
        if self.faults.lost_after is not None and self.steps > self.faults.lost_after:
            self.lose()
            return True
        if isinstance(work, Copies):
            self._copy(work)
            if work.left:
                return True
        stream.work.popleft()
        if isinstance(work, Mark):
            work.done = True
        elif callable(work):
            try:
                work()
            except Exception as error:  # the engine took it to be issued
                self.violations.append(f"an operation failed on the device: {error}")
        self.changed.notify_all()
        return True

    @staticmethod
    def _can_go_on(work: deque[Work]) -> bool:
        return bool(work) and (not isinstance(work[0], tuple) or work[0][0].done)

    def _copy(self, work: Copies) -> None:
        if work.left:
            to, source, length = work.left.pop(self.random.randrange(len(work.left)))
            ctypes.memmove(to, source, length)
            if self.faults.wrong_byte:
                last = ctypes.c_uint8.from_address(to + length - 1)
                last.value ^= 1

    # -- the driver's call -----------------------------------------------------------------------------------------

    def _called(self, *arguments: int | None) -> int:
        try:
            if self.faults.hangs is not None and not self.faults.hangs.wait(WAIT_SECONDS):
                self.violations.append("a call of the driver hung until the end")
            with self.changed:
                return self._batch(*arguments)
        except BaseException as error:  # ctypes would print it and return success
            self.violations.append(f"{type(error).__name__}: {error}")
            return INVALID_VALUE

    def _batch(self, *arguments: int | None) -> int:
        if self.lost:
            return ILLEGAL_ADDRESS
        *arrays, count, attrs, firsts, num_attrs, failed, stream = arguments
        to, source, length = (list((ctypes.c_size_t * count).from_address(at)) for at in arrays)
        order, *rest = ATTRIBUTES.unpack(ctypes.string_at(attrs, ATTRIBUTES.size))
        index_of_failed = ctypes.c_size_t.from_address(failed)
        index_of_failed.value = 2**64 - 1
        if num_attrs != 1 or any(list((ctypes.c_size_t * count).from_address(firsts))) or any(rest):
            self.violations.append("the attributes are not one entry for all copies")
        found = [one for one in self.streams if one.cuda_stream == stream and stream not in (*LEGACY, PER_THREAD, None)]
        if not found or order not in (IN_STREAM_ORDER, ANY_ORDER):
            self.violations.append(f"a batch with source order {order} on stream {stream}")
            return INVALID_VALUE
        self.calls.append(Call(count, order, stream, tuple(length)))
        copies = list(zip(to, source, length, strict=True))
        wrong = self._refused(*(np.array(numbers, dtype=np.int64) for numbers in (to, source, length)))
        if len(wrong):
            index_of_failed.value = int(wrong[0])
            return INVALID_VALUE
        self._check_independent(copies)
        refused = self.faults.refuse(len(self.calls) - 1)
        if refused:  # some may have been issued
            copies = self.random.sample(copies, self.random.randrange(count + 1))
        if order == ANY_ORDER:  # as early as can be
            found[0].push(Copies([(at, ctypes.string_at(there, size), size) for at, there, size in copies]))
        else:
            found[0].push(Copies(copies))
        return INVALID_VALUE if refused else 0

    # -- the kernel ------------------------------------------------------------------------------------------------

    def _launched(self, argument: int, stream: int) -> int:
        """As the kernel reads its argument: during the call, in 32,764 bytes at most."""
        with self.changed:
            if self.lost:
                return ILLEGAL_ADDRESS
            assert PIECES.itemsize <= 32764
            pieces = np.frombuffer(ctypes.string_at(argument, PIECES.itemsize), PIECES)[0]
            to, source, length = (pieces[name][: pieces["count"]] for name in ("targets", "sources", "lengths"))
            (found,) = [one for one in self.streams if one.cuda_stream == stream and stream not in LEGACY]
            self.launches.append(len(to))
            if len(self._refused(to, source, length.astype(np.int64))):
                self.violations.append("the kernel was given memory that is not pinned or not the device's")
                return ILLEGAL_ADDRESS
            copies = list(zip(to.tolist(), source.tolist(), length.tolist(), strict=True))
            self._check_independent(copies)
            if self.faults.refuse_launch(len(self.launches) - 1):
                return INVALID_VALUE
            found.push(Copies(copies))
            return 0

    def _refused(self, to: np.ndarray, source: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Where not one side lies in memory of the device and the other in memory that was pinned by one call."""
        pinned = [(at, at + size) for at, size in self.pinned.items()]
        out = inside(pinned, to, length) & inside(self._memory, source, length)
        back = inside(self._memory, to, length) & inside(pinned, source, length)
        return np.flatnonzero(~(out | back) | (length == 0))

    def _check_independent(self, copies: list[tuple[int, int, int]]) -> None:
        targets = np.array(sorted((to, to + length) for to, _, length in copies))
        if len(targets) > 1 and (targets[1:, 0] < targets[:-1, 1]).any():
            self.violations.append("two copies of a batch write the same bytes")
