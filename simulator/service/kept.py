"""Rows that outlive a simulated stack process, and the service manager that keeps them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from kvtier.service.kept_memory import TABLE
from kvtier.service.row_table import Worker
from kvtier.testing.driver import TestRows


class NamedRows(TestRows):
    """Rows with descriptors that name them."""

    descriptors: tuple[int, int] = (-1, -1)


class SimulatedManager:
    """Keeps descriptors over the lives of a stack process, and the rows that they stand for. The table of a killed
    process is copied: what still runs of it in this process cannot write it."""

    def __init__(self) -> None:
        self.stored: dict[str, int] = {}
        self.rows: NamedRows | None = None
        self._kept: dict[str, int] = {}

    def drop(self, names: Iterable[str]) -> None:
        """Keep nothing by these names any more."""
        for name in names:
            if name in self._kept:
                os.close(self._kept.pop(name))

    def keep(self, descriptors: Mapping[str, int]) -> None:
        """Keep these in the place of those before."""
        self.close()
        self._kept = {name: os.dup(descriptors[TABLE]) for name in descriptors}  # rows are known by numbers alone

    def on_kill(self) -> None:
        """Hand what is kept to the next process."""
        if not self._kept:
            return
        found, copy = self._kept[TABLE], os.memfd_create("kvtier-table")
        os.write(copy, os.pread(found, os.fstat(found).st_size, 0))
        os.close(found)
        self._kept[TABLE] = copy
        self.stored = {name: os.dup(fd) for name, fd in self._kept.items()}

    def close(self) -> None:
        """Close what is kept."""
        for fd in self._kept.values():
            os.close(fd)
        self._kept = {}


def worker_of(engine: Any, worker: int) -> Worker:
    """A worker of a simulated engine."""
    return Worker(1 + engine.number * 100 + worker, 1, 1)
