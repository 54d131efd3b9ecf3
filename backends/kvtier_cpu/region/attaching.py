"""Mapping a region whose descriptors were passed on."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace

from kvtier.errors import RegionError
from kvtier_cpu.region.huge_pages import file_bytes
from kvtier_cpu.region.opening import SEALS, Opening, RegionHost
from kvtier_cpu.region.shared_region import RegionSpec, SharedRegion


def attach_region(spec: RegionSpec, rows_fd: int, control_fd: int) -> SharedRegion:
    """Map a memfd region whose descriptors were inherited or passed on. The caller keeps the descriptors.

    Descriptors that are open for reading alone make rows that cannot be written, and a control area whose changes stay
    in this process.

    Raises RegionError unless they are a ready region of exactly this geometry, sealed against ever shrinking.
    """
    for fd, size_bytes in ((rows_fd, file_bytes(rows_fd, spec.size_bytes)), (control_fd, spec.shape.size_bytes)):
        if not _is_sealed(fd) or os.fstat(fd).st_size != size_bytes:
            raise RegionError("the descriptors are not those of a shared region of this size")
    writable = fcntl.fcntl(rows_fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    opening = Opening(replace(spec, writable=writable), RegionHost())
    return opening.enter(opening.maps(rows_fd, control_fd))


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False
