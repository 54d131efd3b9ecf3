"""A stack process's server in a thread of this process, whose state a test can look at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest
from support_service import SECONDS, stack_text

from kvtier.aio.loop_thread import LoopThread
from kvtier.config import parse_stack, stack_parts
from kvtier.control.tiers.slot_table import SlotState
from kvtier.service.kept_memory import KeptMemory
from kvtier.service.server import StackServer
from kvtier.tier.memory_limits import Reading, SystemLimits

T = TypeVar("T")


class Served:
    """The server, and what its rows are doing."""

    def __init__(self, folder: Path, stack: str = "", kept: KeptMemory | None = None) -> None:
        config = parse_stack(stack or stack_text())
        self.path = str(folder / "socket")
        self.thread = LoopThread("test-service", "service")
        self.server = StackServer(lambda namespace: stack_parts(config, namespace), self.path, kept=kept)

    def run(self, call: Callable[[], T]) -> T:
        """The result of a call in the server's loop."""

        async def work() -> T:
            return call()

        return self.thread.run(work, SECONDS)

    @property
    def engines(self) -> int:
        """Engines that the server knows."""
        return self.run(lambda: len(self.server._engines))

    def rows(self) -> dict[str, int]:
        """Rows by state, after a check of all sums."""

        def look() -> dict[str, int]:
            pool = self.server.pool
            pool.check_integrity()
            counts = pool._opened().plane.control.cpu.table.counts
            return {state.name: counts[state] for state in SlotState if counts[state]}

        return self.run(look)

    def rests(self) -> bool:
        """True if no row is lent, being filled, or kept from being used again; READY ones hold blocks."""
        return set(self.rows()) <= {"FREE", "READY"}


def row_files() -> dict[int, int]:
    """The bytes of each file of rows that this process has open or mapped, by inode."""
    found = dict[int, int]()
    for entry in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if "memfd:kvtier-rows" in os.readlink(entry):
                stat = os.stat(entry)
                found[stat.st_ino] = stat.st_size
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:kvtier-rows" in line:
            extent, _, _, _, inode, *_ = line.split()
            first, end = (int(address, 16) for address in extent.split("-"))
            found.setdefault(int(inode), end - first)
    return found


def memory_for_rows(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Have this machine offer so many bytes, of which all rows of this process take their part."""
    monkeypatch.setattr(SystemLimits, "readings", lambda _: [Reading("test", nbytes - sum(row_files().values()))])


@contextmanager
def served(folder: Path, stack: str = "", kept: KeptMemory | None = None) -> Iterator[Served]:
    """A server that listens."""
    found = Served(folder, stack, kept)
    found.thread.open()
    try:
        found.thread.run(found.server.__aenter__, SECONDS)
        try:
            yield found
        finally:
            found.thread.run(found.server.close, SECONDS)
    finally:
        found.thread.close(10.0)
