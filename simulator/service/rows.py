"""Rows of a simulated stack process, the tier that owns them, and the oracle of what may be in them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, ClassVar, Literal

import numpy as np

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.tiers.slot_table import FILLING, FREE, LENT, QUARANTINED, READY, RETIRED, SlotState
from kvtier.options import PolicyName, TierOptions
from kvtier.service.kept_memory import KeptMemory
from kvtier.testing.driver import TestRows, content
from kvtier.testing.memory import MemoryStorage, MemoryTier
from kvtier.tier.checksum import checksum
from kvtier.tier.contract import LoadStore, Opened, SlotSpace, TierContext
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import JobResult, TransferJob
from kvtier.types.keys import CPU, GroupIndex, Medium, OffloadKey
from simulator.loop import VirtualLoop
from simulator.service.kept import NamedRows

VIOLATIONS_MAX = 20
ID_BYTES = 8


class FillRecord:
    """A store of an engine: its bytes name it. `foreign`: of other weights than its namespace names."""

    __slots__ = ("foreign", "keys", "model", "number", "owner", "refused", "void")

    def __init__(self, number: int, model: str, owner: int, keys: Sequence[OffloadKey], foreign: bool) -> None:
        self.number = number
        self.model = model
        self.owner = owner
        self.keys = frozenset(keys)
        self.foreign = foreign
        self.refused = False
        self.void: dict[OffloadKey, int] = {}
        """For keys whose block was reachable when a reset came: the number of the first such reset."""


class ServiceOracle:
    """All that was stored, and what breaks a promise."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.trace: list[tuple[float, str]] = []
        self.violations: list[str] = []
        self.covered: Counter[str] = Counter()
        self.fills = [FillRecord(0, "", -1, (), False)]
        """By number. The first has no key: a row that nobody has filled yet begins with zeros."""
        self.resets = 0

    def note(self, text: str) -> None:
        """Write a line of the trace."""
        self.trace.append((self.loop.time(), text))

    def violation(self, text: str) -> None:
        """A promise was broken: record it and end the run."""
        self.note(f"VIOLATION: {text}")
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(text)
        self.loop.stop()

    def begin_fill(self, model: str, owner: int, keys: Sequence[OffloadKey], foreign: bool) -> FillRecord:
        """An engine stores blocks; each page holds the bytes of `page`."""
        self.fills.append(FillRecord(len(self.fills), model, owner, keys, foreign))
        return self.fills[-1]

    @staticmethod
    def page(key: OffloadKey, fill: int, worker: int, sub_block: int, length: int) -> bytes:
        """A page of a block of a fill."""
        body = content(OffloadKey(key + bytes((worker, sub_block))), fill, length - ID_BYTES)
        return fill.to_bytes(ID_BYTES, "little") + body.tobytes()

    def fill_of(self, page: bytes, key: OffloadKey, worker: int, sub_block: int) -> FillRecord | None:
        """The fill that a page was stored by; None if these are the bytes of no fill of this key."""
        number = int.from_bytes(page[:ID_BYTES], "little")
        if number >= len(self.fills) or key not in self.fills[number].keys:
            return None
        return self.fills[number] if page == self.page(key, number, worker, sub_block, len(page)) else None

    def on_reset(self, reachable: Sequence[tuple[OffloadKey, bytes]]) -> int:
        """A reset is handled: these blocks, by the pages that begin them, were reachable."""
        self.resets += 1
        for key, page in reachable:
            number = int.from_bytes(page[:ID_BYTES], "little")
            if number < len(self.fills):
                self.fills[number].void.setdefault(key, self.resets)
        return self.resets


class ServiceRows:
    """The rows of one life of the stack process, as its engines' workers map them."""

    def __init__(self, rows: TestRows, geometry: Geometry) -> None:
        self.rows = rows
        self.geometry = geometry
        self.plane: ControlPlane | None = None
        """None once the process has been killed: then only a process that has kept its rows gives them to others."""
        self.kept: KeptMemory | None = None
        self.next: ServiceRows | None = None
        """The rows of the next process, where these are the same."""

    def check(self, oracle: ServiceOracle, row: int, generation: int, filling: bool) -> None:
        """A copy is about to touch a row: it must be the copy's still."""
        if self.plane is None:
            self._check_kept(oracle, row)
            return
        table = self.plane.control.cpu.table
        allowed = (LENT, FILLING, QUARANTINED) if filling else (READY, QUARANTINED)
        if table.generation[row] != generation or table.state[row] not in allowed or not table.pins[row]:
            what = "filled" if filling else "read"
            oracle.violation(
                f"row {row} is {what} as generation {generation}, and is generation {table.generation[row]}, "
                f"{SlotState(table.state[row]).name} with {table.pins[row]} pins"
            )

    def _check_kept(self, oracle: ServiceOracle, row: int) -> None:
        """A copy of a former process's session is about to touch a row: no later process may have given it away."""
        later = self.next
        while later is not None and later.next is not None:
            later = later.next
        kept = None if later is None else later.kept
        if kept is not None and kept.has_joined and row not in kept.held and row not in kept.lost:
            oracle.violation(f"row {row} is copied for a session of a process before, and another one gives it away")

    def check_all_free(self, oracle: ServiceOracle) -> None:
        """Every engine has gone and nothing is in flight: no row is held."""
        assert self.plane is not None
        counts, lost = list(self.plane.control.cpu.table.counts), set[int]()
        if self.kept is not None and not self.kept.has_joined:
            return  # they wait for an engine: it is not known whose blocks they hold
        if self.kept is not None:
            lost.update(self.kept.lost)
            counts[LENT] -= len(lost)
            counts[RETIRED] += len(lost)
        if counts[LENT] or counts[QUARANTINED] or counts[FILLING]:
            oracle.violation(f"without an engine {counts[LENT]} rows are lent, {counts[QUARANTINED]} in quarantine")
        table = self.plane.control.cpu.table
        retained = self.plane.control.cpu.retained.slots
        held = [row for row in range(len(table)) if table.pins[row] > (row in retained) + (row in lost)]
        if held and not self.plane.dirty_rows:
            oracle.violation(f"without an engine and without dirty rows {held} are pinned")
        if counts[FREE] + counts[READY] + counts[RETIRED] != len(table):
            oracle.violation("rows are missing")


class ServiceCPUOptions(TierOptions):
    """Options of the simulated rows."""

    type: Literal["cpu"] = "cpu"
    rows: int = 8
    policy: PolicyName = "lru"
    free_watermark: float = 0.0
    retained_max: float = 0.25


class ServiceCPU(LoadStore):
    """A CPU tier whose rows are filled by engines: it seals them."""

    medium: ClassVar[Medium] = CPU
    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = 64
    Options: ClassVar[type[TierOptions]] = ServiceCPUOptions

    def __init__(self, options: ServiceCPUOptions, rng: Random | None = None) -> None:
        super().__init__(options)
        self.options: ServiceCPUOptions = options
        self._rng = rng
        self._context: TierContext | None = None
        self._rows: NamedRows | None = None
        self._kept: NamedRows | None = None
        self.is_killed = False
        self.mapped: ServiceRows

    @property
    def rows(self) -> Any:
        """The rows."""
        assert self._rows is not None
        return self._rows

    def find_rows(self, rows: NamedRows | None) -> None:
        """The rows of the process before, which its descriptors stand for."""
        self._kept = rows

    def keep(self, rows_fd: int, control_fd: int, _let_go: Callable[[], None]) -> None:
        """Use the rows of the process before, which always fit."""
        assert self._kept is not None
        self._kept.descriptors = rows_fd, control_fd
        self._rows = self._kept

    async def open(self, context: TierContext) -> Opened:
        """Make the rows, unless those of the process before are used."""
        geometry = context.geometry
        self._context = context
        self._rows = self._rows or NamedRows(self.options.rows, geometry.row_bytes)
        self.mapped = ServiceRows(self._rows, geometry)
        size = self.options.rows * geometry.row_bytes
        return Opened(size, SlotSpace(size, (1,), (geometry.row_bytes,) * geometry.num_groups))

    def seal(self, filled: Sequence[tuple[GroupIndex, Sequence[int]]]) -> asyncio.Future[None] | None:
        """Seal rows: now, or later."""
        if self._rng is None or self._rng.random() < 0.7:
            self._seal(filled)
            return None
        return asyncio.ensure_future(self._seal_later(filled, self._rng.random() * 0.002))

    async def _seal_later(self, filled: Sequence[tuple[GroupIndex, Sequence[int]]], seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.is_killed:
            raise asyncio.CancelledError  # its process seals nothing any more
        self._seal(filled)

    def _seal(self, filled: Sequence[tuple[GroupIndex, Sequence[int]]]) -> None:
        assert self._context is not None
        geometry = self._context.geometry
        for group, rows in filled:
            for row in rows:
                view = self.rows.view[row][: geometry.aligned_bytes(group)]
                view[geometry.kv_bytes_per_offloaded_block(group) :] = 0
                self.rows.set_checksum(row, checksum(view.data))

    async def store(self, job: TransferJob) -> JobResult:
        """Engines copy into rows themselves."""
        raise AssertionError("a stack process stores nothing out of GPU blocks")

    async def load(self, job: TransferJob) -> JobResult:
        """Engines copy out of rows themselves."""
        raise AssertionError("a stack process loads nothing into GPU blocks")

    async def close(self) -> None:
        """Nothing is released."""


class SlowMemory(MemoryTier):
    """The tier below, whose jobs take time and sometimes fail. `storage` outlives a killed process.

    A job that has begun goes on when its process is killed, as I/O of a disk may land later; none begins after that.
    """

    def __init__(self, options: TierOptions, storage: MemoryStorage, rng: Random) -> None:
        super().__init__(options, storage)
        self._rng = rng
        self.is_killed = False

    async def _run(self, job: TransferJob, kind: Any) -> JobResult:
        if self.is_killed:
            raise asyncio.CancelledError
        await asyncio.sleep(self._rng.random() * self._rng.choice((1e-4, 1e-3, 0.02)))
        return await super()._run(job, kind)


def zeros(length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A page of a GPU that nothing was loaded into."""
    return np.zeros(length, np.uint8)
