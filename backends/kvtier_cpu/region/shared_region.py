"""The shared region: page-aligned rows that a stack, its workers and every lower tier address in place.

Beside the rows is the control area, a small mapping of native 64-bit words, laid out as::

    header       one page: identity of the region, written once; `ready` is written last
    checksums    (rows, 16) u8, written by the owner of the region
"""

from __future__ import annotations

import hashlib
import mmap
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import GeometryError, RegionError, UsageError
from kvtier.tier.checksum import CHECKSUM_BYTES, SHORT_BYTES, checksum
from kvtier.types.arrays import IntArray
from kvtier.types.checks import outside
from kvtier.types.geometry import Geometry, round_up

MAGIC = b"kvtierR"
VERSION = 4
HEADER_BYTES = mmap.PAGESIZE
_WORDS = ("version", "control_bytes", "num_rows", "row_bytes", "world_size", "copies")
HEADER = np.dtype([("magic", "S8"), *[(word, "u8") for word in _WORDS], ("digest", "u1", (32,)), ("ready", "u8")])

Pages = mmap.mmap | Any
"""A mapping: a buffer with a length."""


class Sharing(StrEnum):
    """Kinds of memory of a region.

    PRIVATE: memory of this process alone, in huge pages; a forked child finds zeros. MEMFD: for one process or those
    that are handed the descriptors.
    """

    PRIVATE = "private"
    MEMFD = "memfd"


class Populated(StrEnum):
    """The way in which the region's pages became resident. SKIPPED: they are reserved, and mapped at first use."""

    SKIPPED = "skipped"
    POPULATE_WRITE = "populate_write"
    TOUCHED = "touched"


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """A region to open.

    `namespace_digest` is what the bytes mean; together with the geometry it decides who may map it. `dump_rows` lets
    core dumps hold the rows. `reserved`: a memfd is made of huge pages that the host has set aside. `writable`: this
    process may write the rows.
    """

    geometry: Geometry
    num_rows: int
    namespace_digest: bytes
    sharing: Sharing = Sharing.MEMFD
    huge_pages: bool = True
    reserved: bool = False
    populate: bool = True
    dump_rows: bool = False
    writable: bool = True

    def __post_init__(self) -> None:
        if self.geometry.row_bytes % mmap.PAGESIZE:
            raise GeometryError(f"rows of {self.geometry.row_bytes} bytes are not whole pages of {mmap.PAGESIZE}")
        if self.num_rows < 1:
            raise GeometryError("a shared region needs at least one row")

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows file: exactly the rows, nothing else."""
        return self.num_rows * self.geometry.row_bytes

    @property
    def where(self) -> str:
        """Names the region's memory in errors."""
        if self.reserved:
            return "the huge pages of 2 MiB that this host has set aside (vm.nr_hugepages)"
        return "anonymous memory"

    @property
    def control_bytes(self) -> int:
        """Bytes of the control area, whole pages."""
        return round_up(HEADER_BYTES + self.num_rows * CHECKSUM_BYTES, mmap.PAGESIZE)

    @property
    def identity(self) -> dict[str, bytes | int]:
        """The words of the header that two processes must agree about, beside the digest."""
        geometry = self.geometry
        sizes = (self.control_bytes, self.num_rows, geometry.row_bytes, geometry.world_size, geometry.num_copies)
        return {"magic": MAGIC} | dict(zip(_WORDS, (VERSION, *sizes), strict=True))

    @property
    def digest(self) -> bytes:
        """SHA-256 over everything that decides what a byte at an offset means."""
        geometry = self.geometry
        text = repr((self.namespace_digest.hex(), geometry.alignment, self.num_rows, geometry.layout))
        return hashlib.sha256(text.encode()).digest()


class SharedRegion:
    """The rows in shared memory, and the control area beside them.

    Implements `kvtier.tier.contract.Rows`. Made by `open_region` or `attach_region`. After `close` every call
    raises UsageError. Memory that a caller still has a view of stays mapped until the last view is gone: closing under
    I/O is not a crash, and the system gets the memory only when nothing in this process can write into it any more.
    Rows out of range raise UsageError; nothing is written then.

    `view` is all rows, writable, without a copy: shape (num_rows, row_bytes), uint8; base and rows are page-aligned.
    `spec` is what the region was opened with, `geometry` has the length of a block of each group, `populated` how the
    rows became resident here. `maps` are the mappings of rows and control area, `at_close` the calls of closing.
    """

    def __init__(self, spec: RegionSpec, rows: Pages, control: mmap.mmap) -> None:
        area = np.frombuffer(control, dtype=np.uint8)
        self._header: Any = area[: HEADER.itemsize].view(HEADER)
        self._checksums: memoryview = area[HEADER_BYTES : HEADER_BYTES + spec.num_rows * CHECKSUM_BYTES].data
        self.spec, self.geometry = spec, spec.geometry
        self.num_rows, self.row_bytes = spec.num_rows, spec.geometry.row_bytes
        flat = np.frombuffer(rows, dtype=np.uint8, count=spec.size_bytes)  # the last huge page may be longer
        flat.flags.writeable = spec.writable
        self.view: npt.NDArray[np.uint8] = flat.reshape(self.num_rows, self.row_bytes)
        self.populated = Populated.SKIPPED
        self.maps = rows, control
        self.memfds: tuple[int, int] | None = None
        self.at_close = ExitStack()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Only what there is not, or what `close` has taken away, is looked up here."""
            raise AttributeError(name) if "view" in vars(self) else UsageError("the shared region is closed")

    def write_identity(self) -> None:
        """Record what this region is, and as the very last word that it may be used."""
        for name, value in self.spec.identity.items():
            self._header[name] = value
        self._header["digest"] = np.frombuffer(self.spec.digest, dtype=np.uint8)
        self._header["ready"] = 1

    def check_identity(self) -> None:
        """Compare the identity of the region with what this process was built for.

        Raises RegionError naming the first difference.
        """
        header = self._header[0]
        for name, value in self.spec.identity.items():
            if header[name] != value:
                raise RegionError(f"the region's {name} is {header[name]!s}, this process needs {value!s}")
        if bytes(header["digest"]) != self.spec.digest:
            raise RegionError("the region was laid out for another model, geometry or parallel layout")
        if header["ready"] != 1:
            raise RegionError("the region is not ready")

    def checksum(self, row: int) -> bytes:
        """The 16-byte checksum that travels with the row."""
        if not 0 <= row < self.num_rows:
            raise self._no_row(row)
        start = row * CHECKSUM_BYTES
        return bytes(self._checksums[start : start + CHECKSUM_BYTES])

    def set_checksum(self, row: int, digest: bytes) -> None:
        """Record a row's checksum. Raises UsageError unless it has 16 bytes."""
        if len(digest) != CHECKSUM_BYTES:
            raise UsageError(f"a row's checksum has {CHECKSUM_BYTES} bytes, got {len(digest)}")
        if not 0 <= row < self.num_rows:
            raise self._no_row(row)
        start = row * CHECKSUM_BYTES
        self._checksums[start : start + CHECKSUM_BYTES] = digest

    def _no_row(self, row: int) -> UsageError:
        return UsageError(f"there is no row {row} among {self.num_rows}")

    def row(self, row: int) -> memoryview:
        """A row as a writable buffer for I/O, `row_bytes` long."""
        if not 0 <= row < self.num_rows:
            raise self._no_row(row)
        return memoryview(self.view[row])

    def blocks(self, rows: IntArray, nbytes: int) -> list[memoryview]:
        """The first `nbytes` of each of these rows, as writable buffers."""
        if (wrong := outside(rows, self.num_rows)) is not None:
            raise self._no_row(wrong)
        memory = self.view.reshape(-1).data
        return [memory[start : start + nbytes] for start in (rows * self.row_bytes).tolist()]

    @property
    def descriptors(self) -> tuple[int, int]:
        """The (rows, control) descriptors of a memfd region, to inherit or pass on; they stay the region's."""
        if self.memfds is None:
            raise UsageError("only an open memfd region has descriptors to pass on")
        return self.memfds

    def close(self) -> None:
        """Release the region. Idempotent; never raises for views still held."""
        held = vars(self)
        if "at_close" in held:
            self.at_close.close()
        held.pop("view", None)
        for name in held.keys() - {"maps"}:
            del held[name]  # with every other view of the memory
        for mapping in held.get("maps", ()):
            if isinstance(mapping, mmap.mmap):  # one of another kind goes with the last view of it
                with suppress(BufferError):  # exported views keep the mapping; it goes with the last of them
                    mapping.close()
        held.clear()


def seal_rows(region: SharedRegion, group: int, rows: IntArray) -> None:
    """Seal rows after their fill: zeros up to the aligned length of a block, then each row's checksum is recorded.

    The zeros replace what an earlier block left there, so that nothing of it reaches a disk. No lower tier reads beyond
    the aligned length.
    """
    nbytes, gaps = region.geometry.aligned_bytes(group), region.geometry.gaps(group)
    for row, block in zip(rows.tolist(), region.blocks(rows, nbytes), strict=True):
        for first, end in gaps:
            block[first:end] = bytes(end - first)
        region.set_checksum(row, checksum(block, nbytes <= SHORT_BYTES))


def intact_rows(region: SharedRegion, group: int, rows: IntArray) -> list[bool]:
    """For each row: True if its bytes still match its checksum."""
    nbytes = region.geometry.aligned_bytes(group)
    blocks = zip(rows.tolist(), region.blocks(rows, nbytes), strict=True)
    return [checksum(block, nbytes <= SHORT_BYTES) == region.checksum(row) for row, block in blocks]
