"""A neighbour in a process of its own: what the machine takes from others beside a work, without the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.beside import Neighbour, Work, nap, spin
from benchmarks.peer import Peer, serve

MODULE = "benchmarks.beside_process"
WORKS: dict[str, Work] = {work.__name__: work for work in (nap, spin)}


@contextmanager
def other_process(work: Work) -> Iterator[list[float]]:
    """A process works while a `with` lasts. The list has its delays in seconds afterwards, if it naps."""
    delays: list[float] = []
    with Peer(sys.executable, MODULE) as peer:
        peer.ask("begin", work_name=work.__name__)
        yield delays
        delays += peer.ask("end")["delays"]


class NeighbourProcess:
    """The child's side."""

    def begin(self, work_name: str) -> dict[str, Any]:
        """Begin to work."""
        self._neighbour = Neighbour(WORKS[work_name])
        self._neighbour.__enter__()
        return {}

    def end(self) -> dict[str, Any]:
        """End, with the delays."""
        self._neighbour.__exit__()
        return {"delays": self._neighbour.delays}


if __name__ == "__main__":
    child = NeighbourProcess()
    serve({"begin": child.begin, "end": child.end})
