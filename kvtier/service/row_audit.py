"""Rows of a service, compared with their checksums in the background: any engine there can write into any of them.

So can a broken memory chip. A row that was changed after it was stored is dropped and counts as corrupt; an engine that
filled several of these is shut out, because a copy that goes on after its report is the usual cause.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.tiers.slot_table import READY
from kvtier.service.kept_memory import is_intact
from kvtier.tier.contract import Rows
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import CORRUPT
from kvtier.types.keys import key_group

PAUSE_SECONDS = 1.0
BYTES_AT_ONCE = 32 << 20
"""Bytes between two pauses, so that it takes about a hundredth of a processor."""
SHARE = 8
"""Part of the rows that are taken at once at most: nothing can have those meanwhile."""
LEASED_AT_ONCE = 64
"""Leased rows among them, which come first."""
SCANNED_AT_ONCE = 1 << 16
CHANGED_MAX = 3
"""Changed rows of an engine that shut it out."""


Step = Callable[[Callable[[], None]], None]
"""Carries a call out as a step of the pool."""


class AuditedRow(NamedTuple):
    """A row, the generation of its fill and the bytes of its block."""

    row: int
    generation: int
    nbytes: int


class RowAudit:
    """The rows of a pool in turn, leased ones first; `taken` are those of now, pinned until `end`.

    `blamed` are the sessions that have filled too many rows which were changed afterwards.
    """

    def __init__(self, plane: ControlPlane, geometry: Callable[[], Geometry]) -> None:
        """`geometry` is that of now: the first engine that joins may bring shorter blocks than its greeting named."""
        self.taken: list[AuditedRow] = []
        self.blamed: set[int] = set()
        self._changed = Counter[int]()
        self._control = plane.control
        self._dirty = plane.demotions.dirty
        self._geometry = geometry
        num_rows = len(plane.control.cpu.table)
        self._fillers, self._fills = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        self._at = 0

    def on_filled(self, rows: list[int], generations: list[int], session: int) -> None:
        """An engine has filled these rows, in fills of these generations."""
        self._fillers[rows], self._fills[rows] = session, generations

    def take(self, leased: Iterable[int]) -> None:
        """Take the rows that are next."""
        table, taken, size = self._control.cpu.table, dict[int, AuditedRow](), 0
        most, geometry = max(1, len(table) // SHARE), self._geometry()
        for row in chain(islice(leased, LEASED_AT_ONCE), self._next_rows()):
            key = table.keys[row]
            if table.state[row] != READY or key is None or row in taken:
                continue
            taken[row] = AuditedRow(row, table.generation[row], geometry.aligned_bytes(key_group(key)))
            size += taken[row].nbytes
            if size >= BYTES_AT_ONCE or len(taken) >= most:
                break
        self._control.cpu.pin(list(taken))
        self.taken = list(taken.values())

    def _next_rows(self) -> Iterator[int]:
        num_rows = len(self._fillers)
        for _ in range(min(num_rows, SCANNED_AT_ONCE)):
            self._at = (self._at + 1) % num_rows
            yield self._at

    def compare(self, rows: Rows) -> list[bool]:
        """True for each row that is taken and intact. In any thread."""
        return [is_intact(rows, each.row, each.nbytes) for each in self.taken]

    def end(self, intact: Iterable[bool]) -> None:
        """Drop rows that are not intact."""
        control = self._control
        taken, self.taken = self.taken, []
        for audited, ok in zip(taken, intact, strict=True):
            control.cpu.unpin((audited.row,))
            if ok or not control.cpu.has(audited.row, audited.generation):
                continue
            self._dirty.clean((audited.row,))
            control.cpu.discard(audited.row, audited.generation)
            control.cpu_counters.count(CORRUPT)
            if self._fills[audited.row] == audited.generation:  # else a lower tier has filled it since
                self._blame(int(self._fillers[audited.row]))

    def _blame(self, session: int) -> None:
        self._changed[session] += 1
        if self._changed[session] >= CHANGED_MAX:
            self.blamed.add(session)


async def audit_rows(audit: RowAudit, rows: Rows, leased: Callable[[], Iterable[int]], step: Step) -> None:
    """Take rows and end them in steps of a pool, until cancelled. `leased` gives the rows of its leases."""
    while True:
        await asyncio.sleep(PAUSE_SECONDS)
        step(lambda: audit.take(leased()))
        step(partial(audit.end, await asyncio.to_thread(audit.compare, rows)))
