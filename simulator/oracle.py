"""The oracle: what was stored, what may be found, who may write where; and the trace of all that happened.

A load may always miss. A block reported as loaded must hold exactly what was stored under its key since the last reset
that returned; every byte of it must have moved, from its own place; and no other job may have used its buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set

import numpy as np
import numpy.typing as npt

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.tiers.slot_table import FILLING, QUARANTINED, READY
from kvtier.testing.driver import content
from kvtier.tier.contract import Rows
from kvtier.types.keys import OffloadKey
from simulator.loop import VirtualLoop

Bytes = npt.NDArray[np.uint8]
VIOLATIONS_MAX = 20


class SeedRecord:
    """What outlives a process: the trace, the violations, and what each key may hold.

    A *generation* stands for the embedder's weights: every reset begins a new one. `confirmed` is the generation of
    the last reset that returned: nothing older may ever be seen again. `stored_times` is when a store of a key into a
    slot began, by key and the slot's generation.
    """

    def __init__(self) -> None:
        self.trace: list[tuple[float, str]] = []
        self.violations: list[str] = []
        self.generation = 0
        self.confirmed = 0
        self.stored: dict[OffloadKey, set[int]] = {}
        self.covered: Counter[str] = Counter()
        self.stored_times: dict[tuple[OffloadKey, int], float] = {}
        self._contents: dict[tuple[OffloadKey, int, tuple[int, int], int], Bytes] = {}

    def contents(self, key: OffloadKey, generation: int, page: tuple[int, int], length: int) -> Bytes:
        """What one page of a block holds: a function of key, generation, and (worker, sub-block). Read-only."""
        which = key, generation, page, length
        known = self._contents.get(which)
        if known is None:
            known = self._contents[which] = content(OffloadKey(key + bytes(page)), generation, length)
            known.flags.writeable = False
        return known

    def holds(self, found: Bytes, key: OffloadKey, generation: int, page: tuple[int, int]) -> bool:
        """True if these bytes are just what a page of a block holds."""
        return found.tobytes() == self.contents(key, generation, page, len(found)).tobytes()


class Oracle:
    """Checks one process while it runs. Violations go to the record of the seed."""

    def __init__(self, record: SeedRecord, loop: VirtualLoop) -> None:
        self.record = record
        self.loop = loop
        self.allowed = set(range(record.confirmed, record.generation + 1))
        self.plane: ControlPlane | None = None
        self.muted = False
        self.disks_closing = False
        self._base = self._size = 0
        self._row_bytes = 1
        self._fills: dict[int, object] = {}
        self._moved: dict[tuple[bool, int], int] = {}
        self._foreign: set[int] = set()
        self._gpu_owners: dict[tuple[int, int], object] = {}

    def note(self, text: str) -> None:
        """Write a line of the trace."""
        if not self.muted:
            self.record.trace.append((self.loop.time(), text))

    def violation(self, text: str) -> None:
        """A promise was broken: record it and end the run."""
        self.note(f"VIOLATION: {text}")
        if not self.muted and len(self.record.violations) < VIOLATIONS_MAX:
            self.record.violations.append(text)
        self.loop.stop()

    # -- rows ----------------------------------------------------------------------------------------------------

    def rows_are(self, rows: Rows) -> None:
        """Where the rows lie in memory."""
        self._base, self._size = int(rows.view.ctypes.data), rows.num_rows * rows.row_bytes
        self._row_bytes = rows.row_bytes

    def row_at(self, address: int) -> int:
        """The row an address lies in, -1 if in none."""
        at = address - self._base
        return at // self._row_bytes if 0 <= at < self._size else -1

    def row_written(self, row: int, by: str) -> None:
        """A write into a row: the row must be filling, or in quarantine until its late fill has ended.

        A tier that closes may leave stuck I/O behind: by then no row is handed out any more.
        """
        if self.plane is None or (self.disks_closing and by.startswith("a read")):
            return
        table = self.plane.control.cpu.table
        if table.state[row] not in (FILLING, QUARANTINED) or not table.pins[row]:
            self.violation(f"{by} wrote into row {row}, which is in state {table.state[row]}")
        elif by.startswith("a read") and row not in self._fills:
            self.violation(f"{by} wrote into row {row} after its job had ended")

    def row_read(self, row: int, by: str) -> None:
        """A read of a row: it must stay pinned until the read has ended."""
        if self.plane is not None:
            table = self.plane.control.cpu.table
            if table.state[row] not in (READY, QUARANTINED) or not table.pins[row]:
                self.violation(f"{by} read row {row}: state {table.state[row]}, {table.pins[row]} pins")

    # -- what moved between rows and disks -----------------------------------------------------------------------

    def job_begins(self, reading: bool, rows: Iterable[int], job: object) -> None:
        """A job of the tier below owns these rows as buffers until it ends."""
        for row in rows:
            self._moved[reading, row] = 0
            if reading:
                self._foreign.discard(row)
                if row in self._fills:
                    self.violation(f"row {row} is filled by two jobs at once")
                self._fills[row] = job

    def job_ended(self, reading: bool, rows: Iterable[int]) -> None:
        if reading:
            for row in rows:
                self._fills.pop(row, None)

    def moved(self, reading: bool, row: int, count: int, begins: bool, foreign: bool) -> None:
        """Bytes between a row and a disk were reported as moved; with `begins` from the block's first byte on, perhaps
        once more. `foreign`: their header is of another place.
        """
        if (reading, row) in self._moved:
            self._moved[reading, row] = count + (0 if begins else self._moved[reading, row])
        if foreign:
            self._foreign.add(row)

    def succeeded(self, reading: bool, row: int, length: int) -> None:
        """A block between a row and a disk was reported as moved: every byte must have been, from its own place."""
        count = self._moved.get((reading, row), 0)
        what = "loaded from" if reading else "stored on"
        if count != length:
            self.violation(f"row {row} was {what} disk with {count} of {length} bytes")
        elif reading and row in self._foreign:
            self.violation(f"row {row} was loaded from another place")

    # -- GPU blocks ----------------------------------------------------------------------------------------------

    def gpu_begins(self, blocks: Iterable[tuple[int, int]], job: object) -> None:
        """A load may write these (group, block) from now on."""
        for block in blocks:
            self._gpu_owners[block] = job

    def gpu_ends(self, blocks: Iterable[tuple[int, int]]) -> None:
        """The load has ended: the embedder may reuse these blocks."""
        for block in blocks:
            self._gpu_owners.pop(block, None)

    def gpu_written(self, group: int, block: int) -> None:
        if (group, block) not in self._gpu_owners:
            self.violation(f"block {block} of group {group} was written after its load had ended")

    # -- keys ----------------------------------------------------------------------------------------------------

    def storing(self, keys: Iterable[OffloadKey]) -> None:
        """The embedder hands these to a store, with the contents of the present generation."""
        for key in keys:
            self.record.stored.setdefault(key, set()).add(self.record.generation)

    def loaded(self, key: OffloadKey, pages: Sequence[tuple[tuple[int, int], Bytes]], allowed: set[int]) -> None:
        """A load reported this block: its pages ((worker, sub-block), bytes) must be of one allowed generation."""
        self.record.covered["blocks loaded and compared"] += 1
        for generation in sorted(allowed & self.record.stored.get(key, set())):
            if all(self.record.holds(found, key, generation, page) for page, found in pages):
                return
        self.violation(f"key {key.hex()[:8]} was loaded with {self._owner(key, pages)}; allowed are {sorted(allowed)}")

    def _owner(self, key: OffloadKey, pages: Sequence[tuple[tuple[int, int], Bytes]]) -> str:
        page, found = pages[0]
        for other, generations in self.record.stored.items():
            for generation in sorted(generations):
                if self.record.holds(found, other, generation, page):
                    whose = "itself" if other == key else f"key {other.hex()[:8]}"
                    return f"the bytes of {whose} of generation {generation}"
        return "bytes of no block"

    def found(self, keys: Sequence[OffloadKey], where: Sequence[str | None], before: Set[int] = frozenset()) -> None:
        """The stack says where keys are: only what was stored since the last reset may be anywhere.

        `before` are the generations that were allowed when it was asked.
        """
        allowed = self.allowed | before
        for key, tier in zip(keys, where, strict=True):
            if tier is not None:
                self.record.covered["keys found"] += 1
                if not allowed & self.record.stored.get(key, set()):
                    self.violation(f"key {key.hex()[:8]} is in {tier}, but was not stored since the reset")

    def reset_begins(self) -> int:
        """New weights: from here on the stack may only know what is stored from here on."""
        self.record.generation += 1
        self.allowed = {self.record.generation}
        return self.record.generation

    def reset_returned(self, generation: int) -> None:
        """The reset is durable: nothing older may come back, not even after a crash."""
        self.record.confirmed = max(self.record.confirmed, generation)
