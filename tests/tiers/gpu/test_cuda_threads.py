"""The threads of a CUDA stream without a device: whatever raises, every plan ends and the threads end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from kvtier_gpu.engines import cuda
from kvtier_gpu.engines.contract import CopyFailure, Direction

WAIT_SECONDS = 20.0


class Device:
    """A device, its stream, its events and what issues copies, all of which are done at once. `refused`: it cannot be
    entered. `stays`: it cannot be left."""

    def __init__(self, refused: bool = False, stays: bool = False) -> None:
        self.refused = refused
        self.stays = stays
        self.waits = 0
        self.driver_error = 0

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        if self.refused:
            raise RuntimeError("the device is gone")
        yield
        if self.stays:
            raise RuntimeError("the device is gone")

    def new_event(self, blocking: bool) -> Any:
        return self

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None:
        self.waits += 1

    def query(self) -> bool:
        return True

    def issue(self, plan: Any) -> list[CopyFailure]:
        return []


def copied(device: Device, plans: int = 3) -> list[CopyFailure | None]:
    """What each of some plans ended with, of a stream that was stopped afterwards. None ends before it was waited for:
    its rows are given to others then."""
    ended: SimpleQueue[tuple[CopyFailure | None, int]] = SimpleQueue()
    stream = cuda._CopyStream("to_rows", Direction.TO_ROWS, device)
    stream._stream = stream._copier = device
    stream.start()
    for _ in range(plans):
        stream.submit("plan", [device], lambda failure: ended.put((failure, device.waits)))
    said = [ended.get(timeout=WAIT_SECONDS) for _ in range(plans)]
    assert stream.stop(WAIT_SECONDS)
    assert all(waits > number for number, (_, waits) in enumerate(said))
    assert not [thread for thread in threading.enumerate() if thread in stream._threads]
    return [failure for failure, _ in said]


def test_every_plan_ends_although_its_copies_cannot_be_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Device, plan: Any) -> list[CopyFailure]:
        raise LookupError("no such page")

    assert copied(Device()) == [None] * 3
    monkeypatch.setattr(Device, "issue", refuse)
    assert [str(one.error) for one in copied(Device()) if one is not None] == ["no such page"] * 3


def test_a_device_that_cannot_be_entered_ends_every_plan_with_that() -> None:
    said = copied(Device(refused=True))
    assert [str(one.error) for one in said if one is not None] == ["the device is gone"] * 3


def test_threads_end_although_a_device_cannot_be_left() -> None:
    """As one that fails between the last plan and the end; `stop` would call the threads stuck."""
    assert copied(Device(stays=True)) == [None] * 3
