"""The control area beside the rows: its participants, the generations that are valid, the uses that have ended.

One small shared mapping of native 64-bit words, laid out as::

    header             one page: identity of the region, written once; `ready` is written last
    mapped             (participants,) u64     1 once a participant has mapped the rows
    worker digests     (world_size, 32) u8     the geometry each worker was built for, published by that worker
    valid generations  (copies, rows) u64      generation + 1 of what worker w's slice of a row holds; 0: nothing
    uses ended         (world_size, rows) u64  counts up; only that worker writes it
    checksums          (rows, 16) u8           written by the coordinator
    notes              (world_size, 8192) u8   a text of each worker, length first, before it counts itself in
    words              (world_size + 1, 8) u64 for the two sides of an integration; the coordinator's are the last

Every word has one writer, so none needs a lock; an integration may have a semaphore among its words. Sections and each
worker's stretch begin on a cache line of their own: two workers never write the same line.
"""

import mmap
import secrets
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import RegionError, UsageError
from kvtier.types.arrays import IntArray
from kvtier.types.checks import outside
from kvtier.types.geometry import round_up

MAGIC = b"kvtierR\0"
VERSION = 3
DIGEST_BYTES = 32
CHECKSUM_BYTES = 16
NOTE_BYTES = 8192
HEADER_BYTES = mmap.PAGESIZE
CACHE_LINE_BYTES = 64
WORD_BYTES = 8

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ControlShape:
    """The sizes that decide where everything is; the header holds them under the same names, in this order."""

    num_rows: int
    row_bytes: int
    world_size: int
    copies: int
    participants: int

    @property
    def sections(self) -> np.dtype[np.void]:
        """The sections in the order of the module's docstring, as one structure."""
        stride = round_up(self.num_rows, CACHE_LINE_BYTES // WORD_BYTES)  # the next worker's words: a line of their own
        sections: dict[str, Any] = {
            "header": HEADER,
            "mapped": ("u8", (self.participants,)),
            "digests": ("u1", (self.world_size, DIGEST_BYTES)),
            "valid": ("u8", (self.copies, stride)),
            "ended": ("u8", (self.world_size, stride)),
            "checksums": ("u1", (self.num_rows * CHECKSUM_BYTES,)),
            "notes": ("u1", (self.world_size, NOTE_BYTES)),
            "words": ("u8", (self.world_size + 1, CACHE_LINE_BYTES // WORD_BYTES)),
        }
        formats = [np.dtype(section) for section in sections.values()]
        starts = [0, HEADER_BYTES]
        for section in formats[1:]:
            starts.append(starts[-1] + round_up(section.itemsize, CACHE_LINE_BYTES))
        size_bytes = round_up(starts.pop(), mmap.PAGESIZE)
        return np.dtype({"names": list(sections), "formats": formats, "offsets": starts, "itemsize": size_bytes})

    @property
    def size_bytes(self) -> int:
        """Bytes of the control area, whole pages."""
        return self.sections.itemsize


SIZES = [size.name for size in fields(ControlShape)]

HEADER = np.dtype(
    [
        ("magic", "S8"),
        *[(word, "u8") for word in ("version", "control_bytes", *SIZES)],
        ("digest", "u1", (DIGEST_BYTES,)),
        *[(word, "u8") for word in ("incarnation", "rows_device", "rows_inode", "ready")],
    ]
)


class ControlArea:
    """The control area of one region, as arrays over the mapping `memory` (shape (size_bytes,), uint8).

    The mapping stays alive as long as this object. Ids out of range raise UsageError; nothing is written then.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], shape: ControlShape) -> None:
        area = memory.view(shape.sections)
        self._shape = shape
        self._num_rows = shape.num_rows
        self._header: Any = area["header"]
        self._mapped: Words = area["mapped"][0]
        self._digests: npt.NDArray[np.uint8] = area["digests"][0]
        self._valid: Words = area["valid"][0]
        self._ended: Words = area["ended"][0]
        self._checksums: memoryview = area["checksums"][0].data
        self._notes: npt.NDArray[np.uint8] = area["notes"][0]
        self.words: Words = area["words"][0]

    def write_identity(self, digest: bytes) -> None:
        """Record what this region is, with a new incarnation. It must not be used before `set_ready`."""
        for name, value in self._identity().items():
            self._header[name] = value
        self._header["digest"] = np.frombuffer(digest, dtype=np.uint8)
        self._header["incarnation"] = secrets.randbits(63) | 1

    def check_identity(self, digest: bytes) -> None:
        """Compare the identity of the region with what this process was built for.

        Raises RegionError naming the first difference.
        """
        header = self._header[0]
        for name, value in self._identity().items():
            if header[name] != value:
                raise RegionError(f"the region's {name} is {header[name]!s}, this process needs {value!s}")
        if bytes(header["digest"]) != digest:
            raise RegionError("the region was laid out for another model, geometry or parallel layout")
        if self.incarnation == 0:
            raise RegionError("the region has no incarnation")

    def _identity(self) -> dict[str, bytes | int]:
        """The words of the header that two processes must agree about, beside the digest."""
        sizes = {"control_bytes": self._shape.size_bytes, **asdict(self._shape)}
        return {"magic": MAGIC.rstrip(b"\0"), "version": VERSION, **sizes}

    @property
    def incarnation(self) -> int:
        """A random number that no two regions share; 0 before one is written."""
        return int(self._header["incarnation"][0])

    @property
    def ready(self) -> bool:
        """True once the region may be used."""
        return bool(self._header["ready"][0] == 1)

    def set_ready(self, rows_device: int, rows_inode: int) -> None:
        """Record which file holds the rows, then, as the very last word, that the region may be used."""
        self._header["rows_device"] = rows_device
        self._header["rows_inode"] = rows_inode
        self._header["ready"] = 1

    @property
    def rows_file(self) -> tuple[int, int]:
        """Device and inode of the file that holds the rows."""
        return int(self._header["rows_device"][0]), int(self._header["rows_inode"][0])

    def count_in(self, participant: int) -> None:
        """Participant `participant` has mapped the rows. Raises RegionError if it had before."""
        if self._mapped[participant]:
            raise RegionError(f"participant {participant} has mapped this region already; is it running twice?")
        self._mapped[participant] = 1

    @property
    def participants_mapped(self) -> tuple[int, ...]:
        """The participants that have mapped the region so far."""
        return tuple(np.flatnonzero(self._mapped).tolist())

    @property
    def complete(self) -> bool:
        """True once every participant has mapped the region; from then on it has no name."""
        return bool(self._mapped.all())

    def publish_worker(self, worker: int, digest: bytes) -> None:
        """Record the geometry that worker `worker` was built for."""
        self._digests[self._worker(worker)] = np.frombuffer(digest, dtype=np.uint8)

    def write_note(self, worker: int, note: str) -> None:
        """Writes the note of worker `worker`. Raises UsageError if it is too long."""
        text = note.encode()
        if len(text) > NOTE_BYTES - WORD_BYTES:
            raise UsageError(f"a worker's note has at most {NOTE_BYTES - WORD_BYTES} bytes, this one {len(text)}")
        line = self._notes[self._worker(worker)]
        line[WORD_BYTES : WORD_BYTES + len(text)] = np.frombuffer(text, dtype=np.uint8)
        line[:WORD_BYTES].view(np.uint64)[0] = len(text)

    def note(self, worker: int) -> str:
        """The note of a worker, written before it counted itself in; empty if nothing."""
        line = self._notes[self._worker(worker)]
        length = min(int(line[:WORD_BYTES].view(np.uint64)[0]), NOTE_BYTES - WORD_BYTES)
        return bytes(line[WORD_BYTES : WORD_BYTES + length]).decode(errors="replace")

    def stamp(self, worker: int, rows: IntArray, generations: IntArray) -> None:
        """Record that the whole slice of `worker` in these rows holds these generations. Only that worker calls it."""
        if self._worker(worker) >= self._shape.copies:
            raise UsageError(f"worker {worker} has no slice of its own: worker 0 stores what all hold in common")
        self._valid[worker, self._rows(rows)] = generations.astype(np.uint64) + np.uint64(1)

    def stamped(self, rows: IntArray, generations: IntArray) -> npt.NDArray[np.bool_]:
        """For each row: True if every worker with a slice of its own stamped it with that generation, and all were
        built for this very geometry."""
        agree = (self._digests == self._header["digest"][0]).all()
        expected = generations.astype(np.uint64) + np.uint64(1)
        result: npt.NDArray[np.bool_] = (self._valid[:, self._rows(rows)] == expected).all(axis=0) & agree
        return result

    def end_use(self, worker: int, rows: IntArray) -> None:
        """Worker `worker` has ended one use of each of these rows. Only that worker calls it."""
        # a row may be named twice by one job; add.at counts both
        np.add.at(self._ended[self._worker(worker)], self._rows(rows), np.uint64(1))

    def uses_ended(self, worker: int, rows: IntArray) -> IntArray:
        """The number of uses of each row that worker `worker` has ended so far, shape (rows,)."""
        ended: IntArray = self._ended[self._worker(worker), self._rows(rows)].astype(np.int64)
        return ended

    def checksum(self, row: int) -> bytes:
        """The 16-byte checksum that travels with the row."""
        if not 0 <= row < self._num_rows:
            raise self._no_row(row)
        start = row * CHECKSUM_BYTES
        return bytes(self._checksums[start : start + CHECKSUM_BYTES])

    def set_checksum(self, row: int, digest: bytes) -> None:
        """Record a row's checksum. Raises UsageError unless it has 16 bytes."""
        if len(digest) != CHECKSUM_BYTES:
            raise UsageError(f"a row's checksum has {CHECKSUM_BYTES} bytes, got {len(digest)}")
        if not 0 <= row < self._num_rows:
            raise self._no_row(row)
        start = row * CHECKSUM_BYTES
        self._checksums[start : start + CHECKSUM_BYTES] = digest

    def _worker(self, worker: int) -> int:
        if not 0 <= worker < self._shape.world_size:
            raise UsageError(f"there is no worker {worker} among {self._shape.world_size}")
        return worker

    def _no_row(self, row: int) -> UsageError:
        return UsageError(f"there is no row {row} among {self._num_rows}")

    def _rows(self, rows: IntArray) -> IntArray:
        if (wrong := outside(rows, self._num_rows)) is not None:
            raise self._no_row(wrong)
        return rows
