"""A table of what the rows of a stack process hold, in memory that outlives it: the next process finds its blocks.

One memfd beside that of the rows, which this process alone maps::

    header      one page: `live` is 0 while the table must not be believed
    processes   (PROCESSES_MAX,) of WORKER: workers that may have a copy into or out of rows in flight
    state       (rows,) u8       as `SlotState`
    pins        (rows,) u32      of any kind
    generations (rows,) u64
    names       (rows,) of NAME  the key, written before the row becomes READY, and `by_io`: a tier fills it, no worker
    lost        (rows,) u8       1: a former process was filling it from a tier below when it ended

These arrays are the control plane's own, so nothing is written twice, and a process that is killed at any instruction
leaves what was true then. A READY row has its key and its bytes. A row with a pin may be written or read by a worker.

I/O that was in flight into a row may land after the exit of its process: nothing says when it has ended (io_uring). So
such a row is lost, for this process and all that follow.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.control.tiers.slot_table import FILLING, FREE, QUARANTINED, READY, SlotTable
from kvtier.errors import ConfigError
from kvtier.types.arrays import IntArray
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import DIGEST_BYTES

MAGIC, VERSION = b"kvtierT", 1
KEY_BYTES_MAX = 94
"""Rows of longer keys are not found again."""
PROCESSES_MAX, SPACES_MAX = 1024, 8
ROWS_MAX = 1 << 31

HEADER = np.dtype(
    [
        ("magic", "S8"),
        *[(word, "u8") for word in ("version", "num_rows", "live", "epoch", "spaces")],
        ("digests", "u1", (SPACES_MAX, DIGEST_BYTES)),
    ]
)
WORKER = np.dtype([("pid", "u8"), ("started", "u8"), ("name", "u8")])
NAME = np.dtype([("length", "u1"), ("by_io", "u1"), ("key", "u1", (KEY_BYTES_MAX,))])


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of an engine: a number made of the engine's token and the worker's, its process, and when that began.

    `pid` 0: it is in another PID namespace.
    """

    name: int
    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Contents of the table of a former process: the rows that have a block, from the oldest on, with their keys; those
    that a worker may still write or read; those that are lost; the greatest generation."""

    rows: Sequence[int]
    keys: Sequence[OffloadKey]
    held: frozenset[int]
    lost: frozenset[int]
    generation: int


class RowTable:
    """The table over one memfd, whose descriptor is its own. `epoch` is that of the lower tiers."""

    def __init__(self, fd: int, num_rows: int) -> None:
        """Raises ConfigError for a descriptor that is no table of so many rows in this format."""
        self.fd, self.num_rows = fd, num_rows
        layout = _layout(num_rows)
        if os.fstat(fd).st_size != layout.itemsize:
            raise ConfigError("the row table is of another format, or of other rows")
        memory = mmap.mmap(fd, layout.itemsize)
        area = np.frombuffer(memory, np.uint8).view(layout)
        self._header: Any = area["header"][0]
        self._workers: Any = area["workers"][0]
        self.state: Any = area["state"][0].data
        self.pins: Any = area["pins"][0].data
        self.generation: Any = area["generations"][0].data
        self._states, self._pins = area["state"][0], area["pins"][0]
        self._generations = area["generations"][0]
        self._entries, self._lost = area["names"][0], area["lost"][0]
        self._names: memoryview = area["names"][0].view(np.uint8).data
        found = bytes(self._header["magic"]), int(self._header["version"]), int(self._header["num_rows"])
        if found != (MAGIC, VERSION, num_rows):
            raise ConfigError("the row table is of another format, or of other rows")

    @classmethod
    def read(cls, fd: int) -> RowTable:
        """The table that a former process has left. Raises ConfigError, OSError."""
        header = np.frombuffer(os.pread(fd, HEADER.itemsize, 0).ljust(HEADER.itemsize, b"\0"), HEADER)[0]
        return cls(fd, max(1, min(int(header["num_rows"]), ROWS_MAX)))

    @classmethod
    def create(cls, num_rows: int) -> RowTable:
        """An empty table, of which nothing is believed yet. Raises OSError."""
        header = np.zeros(1, HEADER)
        header["magic"], header["version"], header["num_rows"] = MAGIC, VERSION, num_rows
        fd = os.memfd_create("kvtier-table", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _layout(num_rows).itemsize)
            os.pwrite(fd, header.tobytes(), 0)
            return cls(fd, num_rows)
        except BaseException:
            os.close(fd)
            raise

    # -- what is believed ----------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """True if the table holds what the rows do."""
        return bool(self._header["live"])

    @property
    def spaces(self) -> list[bytes]:
        """The digests of the namespaces in keys: the first has no prefix, the others have their digest."""
        return [bytes(digest) for digest in self._header["digests"][: int(self._header["spaces"])]]

    def begin(self, spaces: Sequence[bytes], epoch: int) -> None:
        """The table is believed from here on."""
        self._header["spaces"] = 0
        for digest in spaces:
            self.add_space(digest)
        self._header["epoch"] = epoch
        self._header["live"] = len(spaces) <= SPACES_MAX

    def add_space(self, digest: bytes) -> None:
        """Keys may be of one namespace more. Of too many, nothing is believed any more."""
        count = int(self._header["spaces"])
        if count == SPACES_MAX:
            self.void()
            return
        self._header["digests"][count] = np.frombuffer(digest, np.uint8)
        self._header["spaces"] = count + 1

    def void(self) -> None:
        """Nothing here is believed by a later process."""
        self._header["live"] = 0

    @property
    def epoch(self) -> int:
        return int(self._header["epoch"])

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._header["epoch"] = epoch

    # -- rows ----------------------------------------------------------------------------------------------------

    def take_over(self, slots: SlotTable) -> None:
        """Have a slot table of as many slots use these arrays from here on."""
        self._states[:], self._pins[:] = np.frombuffer(slots.state, np.uint8), np.frombuffer(slots.pins, np.uint32)
        self._generations[:] = slots.generations
        arrays: Any = slots
        arrays.state, arrays.pins, arrays.generation = self.state, self.pins, self.generation
        slots.generations = self._generations.view(np.int64)
        slots.on_named, slots.on_io_end = self.record, self.leave_to_workers

    def record(self, rows: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        """These rows, which are not READY, are to get blocks of these keys."""
        names, state, size = self._names, self.state, NAME.itemsize
        for row, key in zip(rows, keys, strict=True):
            start, length = row * size, len(key)
            names[start + 1] = state[row] == FREE  # else it was lent
            if length > KEY_BYTES_MAX:
                names[start] = 0
                continue
            names[start] = length
            names[start + 2 : start + 2 + length] = key

    def leave_to_workers(self, rows: Sequence[int]) -> None:
        """No tier fills these rows now: they are lent, filled, or hold what they did for a former process."""
        self._entries["by_io"][rows] = 0

    def find(self) -> FoundRows:
        """Read what a former process has left; the arrays are free for another use then."""
        pins: IntArray = self._pins.astype(np.int64)
        held = frozenset(np.flatnonzero(pins).tolist())
        is_lost = (self._entries["by_io"] > 0) & (self._pins > 0) & np.isin(self._states, (FILLING, QUARANTINED))
        self._lost[is_lost] = 1
        ready = np.flatnonzero((self._states == READY) & (self._entries["length"] > 0))
        ready = ready[np.argsort(self._generations[ready], kind="stable")]
        newest: dict[OffloadKey, int] = {}
        for row in ready.tolist():
            key = OffloadKey(bytes(self._entries["key"][row, : int(self._entries["length"][row])]))
            newest.pop(key, None)  # of two rows the newer one
            newest[key] = row
        lost = frozenset(np.flatnonzero(self._lost).tolist())
        return FoundRows(list(newest.values()), list(newest), held, lost, int(self._generations.max(initial=0)))

    # -- workers -------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Worker]:
        """The workers that may have a copy in flight."""
        return [Worker(*map(int, (each["name"], each["pid"], each["started"]))) for each in self._used_workers()]

    def _used_workers(self) -> Any:
        return self._workers[self._workers["name"] > 0]

    def add_worker(self, worker: Worker) -> None:
        """A worker has connected. Of too many, nothing is believed any more."""
        free = np.flatnonzero(self._workers["name"] == 0)
        if not len(free):
            self.void()
            return
        place = self._workers[free[0] : free[0] + 1]
        place["pid"], place["started"] = worker.pid, worker.started
        place["name"] = worker.name

    def remove_worker(self, worker: Worker) -> None:
        """A worker has no copy in flight any more, and begins none."""
        same = (self._workers["name"] == worker.name) & (self._workers["pid"] == worker.pid)
        self._workers["name"][np.flatnonzero(same & (self._workers["started"] == worker.started))[:1]] = 0

    def close(self) -> None:
        """Close the descriptor. The mapping goes with the last view of it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _layout(num_rows: int) -> np.dtype[np.void]:
    formats: list[Any] = [
        HEADER,
        (WORKER, (PROCESSES_MAX,)),
        ("u8", (num_rows,)),
        ("u4", (num_rows,)),
        ("u1", (num_rows,)),
        ("u1", (num_rows,)),
        (NAME, (num_rows,)),
    ]
    names = ["header", "workers", "generations", "pins", "state", "lost", "names"]
    starts = [0, mmap.PAGESIZE]
    for each in formats[1:]:
        starts.append(-(-(starts[-1] + np.dtype(each).itemsize) // 64) * 64)
    size = -(-starts.pop() // mmap.PAGESIZE) * mmap.PAGESIZE
    return np.dtype({"names": names, "formats": formats, "offsets": starts, "itemsize": size})
