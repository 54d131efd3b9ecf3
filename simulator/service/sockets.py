"""A connection without a kernel: order is kept, each message takes its time, and a cut loses what is on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from kvtier.service.wire import Codec, Item
from simulator.loop import VirtualLoop


class SimulatedEnd:
    """One end of a connection. `on_items` and `on_close` are called when messages, or the end of them, have arrived."""

    def __init__(self, loop: VirtualLoop, rng: Random, slow: float) -> None:
        self.on_items: Callable[[list[Any]], None] = lambda items: None
        self.on_close: Callable[[], None] = lambda: None
        self.peer: SimulatedEnd
        self.closed = False
        self.theirs: Codec
        self._loop, self._rng, self._slow = loop, rng, slow
        self._sent = self._received = 0
        self._arrives = 0.0

    def send(self, items: Sequence[Item]) -> None:
        """Send these items, in one message or several."""
        if self.closed or not items:
            return
        for message in Codec.encode(items, self._sent):
            self._sent += 1
            self._later(lambda message=message: self.peer._take(message))  # type: ignore[misc]

    def close(self) -> None:
        """Close this end; the peer is told after what was sent."""
        if not self.closed:
            self.closed = True
            self._later(self.peer._end)

    def cut(self) -> None:
        """The connection breaks: what is on its way in either direction is lost."""
        for end in (self, self.peer):
            if not end.closed:
                end.closed = True
                self._loop.outside(self._rng.random() * 0.05, end.on_close)

    def _later(self, event: Callable[[], None]) -> None:
        """In order: an event waits for those before it."""
        seconds = self._rng.random() * (0.05 if self._rng.random() < self._slow else 0.0008)
        self._arrives = max(self._arrives + 1e-9, self._loop.time() + seconds)
        self._loop.outside(self._arrives - self._loop.time(), event)

    def _take(self, message: bytes) -> None:
        if self.closed:
            return
        sequence, items = self.theirs.decode(message)
        assert sequence == self._received, "a message was lost or overtaken"
        self._received += 1
        self.on_items(items)

    def _end(self) -> None:
        if not self.closed:
            self.closed = True
            self.on_close()


def make_connection(
    loop: VirtualLoop, rng: Random, slow: float, codecs: tuple[Codec, Codec]
) -> tuple[SimulatedEnd, SimulatedEnd]:
    """(the first end, the second end); `codecs` decode what the first and what the second one receives."""
    first, second = SimulatedEnd(loop, rng, slow), SimulatedEnd(loop, rng, slow)
    first.peer, second.peer = second, first
    first.theirs, second.theirs = codecs
    return first, second
