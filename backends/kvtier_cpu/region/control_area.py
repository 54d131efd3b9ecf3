"""The control area beside the rows: the identity of the region, and the rows' checksums.

One small mapping of native 64-bit words, laid out as::

    header       one page: identity of the region, written once; `ready` is written last
    checksums    (rows, 16) u8, written by the owner of the region
"""

import mmap
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import RegionError, UsageError
from kvtier.types.arrays import IntArray
from kvtier.types.checks import outside
from kvtier.types.geometry import round_up

MAGIC = b"kvtierR\0"
VERSION = 4
DIGEST_BYTES = 32
CHECKSUM_BYTES = 16
HEADER_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class ControlShape:
    """The sizes that decide where everything is; the header holds them under the same names, in this order."""

    num_rows: int
    row_bytes: int
    world_size: int
    copies: int

    @property
    def sections(self) -> np.dtype[np.void]:
        """The sections in the order of the module's docstring, as one structure."""
        checksums_bytes = self.num_rows * CHECKSUM_BYTES
        return np.dtype(
            {
                "names": ["header", "checksums"],
                "formats": [HEADER, ("u1", (checksums_bytes,))],
                "offsets": [0, HEADER_BYTES],
                "itemsize": round_up(HEADER_BYTES + checksums_bytes, mmap.PAGESIZE),
            }
        )

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
        ("ready", "u8"),
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
        self._checksums: memoryview = area["checksums"][0].data

    def write_identity(self, digest: bytes) -> None:
        """Record what this region is, and as the very last word that it may be used."""
        for name, value in self._identity().items():
            self._header[name] = value
        self._header["digest"] = np.frombuffer(digest, dtype=np.uint8)
        self._header["ready"] = 1

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
        if header["ready"] != 1:
            raise RegionError("the region is not ready")

    def _identity(self) -> dict[str, bytes | int]:
        """The words of the header that two processes must agree about, beside the digest."""
        sizes = {"control_bytes": self._shape.size_bytes, **asdict(self._shape)}
        return {"magic": MAGIC.rstrip(b"\0"), "version": VERSION, **sizes}

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

    def _no_row(self, row: int) -> UsageError:
        return UsageError(f"there is no row {row} among {self._num_rows}")

    def _rows(self, rows: IntArray) -> IntArray:
        if (wrong := outside(rows, self._num_rows)) is not None:
            raise self._no_row(wrong)
        return rows
