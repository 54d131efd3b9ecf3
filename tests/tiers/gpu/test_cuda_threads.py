"""The threads of a CUDA stream without a device: whatever raises, every plan ends and the threads end."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from faults.machine.raising import PlaceFault
from kvtier_gpu.engines import cuda
from kvtier_gpu.engines.contract import Direction

WAIT_SECONDS = 20.0


class Device:
    """In place of `torch.cuda`: a stream and events that complete at once. `refused`: it cannot be entered."""

    def __init__(self, refused: bool = False) -> None:
        self.refused = refused

    def device(self, _: Any) -> Any:
        if self.refused:
            raise RuntimeError("the device is gone")
        return nullcontext()

    def stream(self, _: Any) -> Any:
        return nullcontext()

    def Event(self, blocking: bool = False) -> Any:
        return self

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def copy(self, pages: Any, direction: Direction) -> None: ...


def copied(monkeypatch: pytest.MonkeyPatch, device: Device, fault: PlaceFault, plans: int = 3) -> list[Any]:
    """What each of some plans ended with, of a stream that was stopped afterwards."""
    monkeypatch.setattr(torch, "cuda", device)
    monkeypatch.setattr(cuda, "split", lambda plan, limit: [["pages"]])
    ended: SimpleQueue[Any] = SimpleQueue()
    with fault.installed():
        stream = cuda._CopyStream(Direction.TO_ROWS, None)
        stream._stream = stream._copier = device
        stream.start()
        with fault.armed_now():
            for _ in range(plans):
                stream.submit("plan", device, ended.put)
            said = [ended.get(timeout=WAIT_SECONDS) for _ in range(plans)]
            assert stream.stop(WAIT_SECONDS)
    assert not [thread for thread in threading.enumerate() if thread in stream._threads]
    return said


def test_every_plan_ends_wherever_memory_runs_out(monkeypatch):
    """Once at the first visit of each line of the threads' functions."""
    threads = ("_issue_all", "_entered", "_issue", "_copy", "_wait_all", "_wait", "_take_each")
    seen = PlaceFault([cuda.__file__])
    assert copied(monkeypatch, Device(), seen) == [None] * 3
    places = [place for place in seen.places if place[1].rpartition(".")[2] in threads]
    assert len(places) > 8
    for place in places:
        fault = PlaceFault([cuda.__file__])
        fault.at = place
        said = copied(monkeypatch, Device(), fault)
        assert fault.raised
        assert sum(one is not None for one in said) <= 1, place


def test_a_device_that_cannot_be_entered_ends_every_plan_with_that(monkeypatch):
    assert [str(one) for one in copied(monkeypatch, Device(refused=True), PlaceFault([]))] == ["the device is gone"] * 3
