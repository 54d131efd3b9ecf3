"""The shared region: page-aligned rows that a coordinator, its workers and every lower tier address in place."""

from __future__ import annotations

import hashlib
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.errors import GeometryError, UsageError
from kvtier.geometry import Geometry
from kvtier.jobs import IntArray
from kvtier_cpu.control import ControlArea, ControlShape
from kvtier_cpu.populate import Plan, Populated, make_private_resident, make_resident, map_populated
from kvtier_cpu.rendezvous import Claim

if TYPE_CHECKING:
    import torch


class Sharing(StrEnum):
    """PRIVATE: this process alone, in huge pages; a forked child finds zeros. MEMFD: no name, for one process or those
    handed the descriptors. NAMED: a name until all have mapped."""

    PRIVATE = "private"
    MEMFD = "memfd"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """Which region, and who is asking: participant `participant` of `participants` processes.

    `namespace_digest` is what the bytes mean; together with the geometry it decides who may join. `serves` are the
    workers whose slices this process writes. A region in a process of its own has one participant that serves all.
    `note` is what those workers say of themselves, for the coordinator.
    """

    geometry: Geometry
    num_rows: int
    namespace_digest: bytes
    serves: tuple[int, ...] = ()
    sharing: Sharing = Sharing.MEMFD
    engine_id: str = ""
    participants: int = 1
    participant: int = 0
    huge_pages: bool = True
    populate: bool = True
    deadline_seconds: float = 300.0
    directory: str = "/dev/shm"
    note: str = ""

    def __post_init__(self) -> None:
        if self.geometry.row_bytes % mmap.PAGESIZE:
            raise GeometryError(f"rows of {self.geometry.row_bytes} bytes are not whole pages of {mmap.PAGESIZE}")
        if self.num_rows < 1:
            raise GeometryError("a shared region needs at least one row")
        if not 0 <= self.participant < self.participants:
            raise UsageError(f"there is no participant {self.participant} among {self.participants}")
        if any(not 0 <= worker < self.geometry.world_size for worker in self.serves):
            raise UsageError(f"a process serves workers {self.serves} of {self.geometry.world_size}")
        if self.sharing is Sharing.NAMED and not self.engine_id:
            raise UsageError("a region shared by name needs an engine_id, or two engines would meet in one")

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows file: exactly the rows, nothing else."""
        return self.num_rows * self.geometry.row_bytes

    @property
    def shape(self) -> ControlShape:
        """The sizes of the control area."""
        geometry = self.geometry
        return ControlShape(
            self.num_rows, geometry.row_bytes, geometry.world_size, self.participants, geometry.num_copies
        )

    @property
    def digest(self) -> bytes:
        """SHA-256 over everything that decides what a byte at an offset means."""
        geometry = self.geometry
        text = repr((self.namespace_digest.hex(), geometry.alignment, self.num_rows, geometry.layout))
        return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, slots=True)
class RegionMaps:
    """The two mappings of one process: the rows, and the control area beside them."""

    rows: mmap.mmap
    control: mmap.mmap


class SharedRegion:
    """Rows in shared memory and the control area beside them. Implements `kvtier.loadstore.Rows`.

    Made by `open_region` or `attach_region`. After `close` every call raises UsageError, but memory a caller still
    holds a view of stays mapped until the last view is gone: closing under I/O is not a crash, and the memory goes
    back to the system only when nothing in this process can write into it any more.
    """

    def __init__(self, spec: RegionSpec, maps: RegionMaps) -> None:
        rows = np.frombuffer(maps.rows, dtype=np.uint8)
        self._spec = spec
        self._maps = maps
        self._claim: Claim | None = None
        self._descriptors: tuple[int, int] | None = None
        self._populated = Populated.SKIPPED
        self._view: npt.NDArray[np.uint8] | None = rows.reshape(spec.num_rows, spec.geometry.row_bytes)
        self._area: ControlArea | None = ControlArea(np.frombuffer(maps.control, dtype=np.uint8), spec.shape)

    @property
    def spec(self) -> RegionSpec:
        """What this region was opened with."""
        return self._spec

    @property
    def num_rows(self) -> int:
        return self._spec.num_rows

    @property
    def row_bytes(self) -> int:
        return self._spec.geometry.row_bytes

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """All rows, writable, zero-copy, shape (num_rows, row_bytes), uint8; base and rows are page-aligned."""
        if self._view is None:
            raise UsageError("the shared region is closed")
        return self._view

    def row(self, row: int) -> memoryview:
        """One row as a writable buffer for I/O, `row_bytes` long."""
        if not 0 <= row < self.num_rows:
            raise UsageError(f"there is no row {row} among {self.num_rows}")
        return memoryview(self.view[row])

    def blocks(self, rows: IntArray, nbytes: int) -> list[memoryview]:
        """The first `nbytes` of each of these rows, as writable buffers."""
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.num_rows:
            raise UsageError(f"rows {int(rows.min())}..{int(rows.max())} reach outside 0..{self.num_rows - 1}")
        memory, row_bytes = self.view.reshape(-1).data, self.row_bytes
        return [memory[start : start + nbytes] for start in (rows * row_bytes).tolist()]

    def worker_array(self, worker: int, group: int) -> npt.NDArray[np.uint8]:
        """A worker's slice of every row for one group: shape (num_rows, worker_bytes), strided by row_bytes.

        All workers have the same one where the layout is replicated.
        """
        start = self._spec.geometry.offset(group, worker)
        return self.view[:, start : start + self._spec.geometry.worker_bytes(group)]

    def worker_view(self, worker: int, group: int) -> torch.Tensor:
        """`worker_array` as a uint8 tensor on the CPU that shares the region's memory."""
        import torch

        return torch.from_numpy(self.worker_array(worker, group))

    @property
    def control(self) -> ControlArea:
        """The control area. Raises UsageError once closed."""
        if self._area is None:
            raise UsageError("the shared region is closed")
        return self._area

    @property
    def incarnation(self) -> int:
        """A random number no two regions share."""
        return self.control.incarnation

    @property
    def participants_mapped(self) -> tuple[int, ...]:
        """Which participants have mapped the region so far."""
        return self.control.participants_mapped

    @property
    def complete(self) -> bool:
        """True once every participant has mapped the region; from then on it has no name."""
        return self.control.complete

    @property
    def descriptors(self) -> tuple[int, int]:
        """The (rows, control) descriptors of a memfd region, to inherit or pass on; they stay the region's."""
        if self._descriptors is None:
            raise UsageError("only an open memfd region has descriptors to pass on")
        return self._descriptors

    @property
    def populated(self) -> Populated:
        """How the rows became resident in this process."""
        return self._populated

    def make_resident(self, rows_fd: int, plan: Plan) -> None:
        """Reserve and populate the rows of a region nobody else has mapped yet. Raises SharedMemoryError."""
        self._populated = make_resident(rows_fd, self._maps.rows, plan)

    def make_private_resident(self, plan: Plan) -> None:
        """Keep rows and control area from a fork, and populate the rows. Raises SharedMemoryError or RegionError."""
        self._populated = make_private_resident(self._maps.rows, self._maps.control, plan)

    def map_populated(self) -> None:
        """Fill this process's page table; changes no byte."""
        self._populated = map_populated(self._maps.rows)

    def keep_claim(self, claim: Claim) -> None:
        """Hold the claim this region was created under until `close`."""
        self._claim = claim

    def keep_descriptors(self, rows_fd: int, control_fd: int) -> None:
        """Own the descriptors of a memfd region until `close`."""
        self._descriptors = (rows_fd, control_fd)

    def note(self, worker: int) -> str:
        """What a worker said of itself when it mapped the region; empty if nothing."""
        return self.control.note(worker)

    def stamp(self, worker: int, rows: IntArray, generations: IntArray) -> None:
        """Worker `worker` says: its whole slice of these rows holds these generations. Only that worker calls it."""
        self.control.stamp(worker, rows, generations)

    def stamped(self, rows: IntArray, generations: IntArray) -> npt.NDArray[np.bool_]:
        """For each row: True if every worker with a slice of its own stamped it with that generation, and all were
        built for this very geometry."""
        return self.control.stamped(rows, generations)

    def end_use(self, worker: int, rows: IntArray) -> None:
        """Worker `worker` has ended one use of each of these rows. Only that worker calls it."""
        self.control.end_use(worker, rows)

    def uses_ended(self, worker: int, rows: IntArray) -> IntArray:
        """How many uses of each row a worker has ended so far, shape (rows,)."""
        return self.control.uses_ended(worker, rows)

    def checksum(self, row: int) -> bytes:
        """The 16-byte checksum that travels with the row."""
        return self.control.checksum(row)

    def set_checksum(self, row: int, digest: bytes) -> None:
        """Record a row's checksum. Raises UsageError unless it has 16 bytes."""
        self.control.set_checksum(row, digest)

    def close(self) -> None:
        """Let go of the region. Idempotent; never raises for views still held; an incomplete region loses its name."""
        self._view = None
        self._area = None
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.withdraw()
        descriptors, self._descriptors = self._descriptors, None
        for fd in descriptors or ():
            os.close(fd)
        for mapping in (self._maps.rows, self._maps.control):
            with suppress(BufferError):  # exported views keep the mapping; it goes with the last of them
                mapping.close()
