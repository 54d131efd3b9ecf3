"""Opening a shared region: create its memory, or map memory that another process has handed over."""

import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from kvtier.errors import RegionError, SharedMemoryError
from kvtier.tier.memory_limits import MemoryLimits, SystemLimits, require
from kvtier_cpu.region.populate import keep_from_core_dumps, keep_from_forks, make_resident, map_populated, reserve
from kvtier_cpu.region.shared_region import Pages, RegionSpec, SharedRegion, Sharing

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
LET_GO_SECONDS, PAUSE_SECONDS = 2.0, 0.05
"""How long memory that is let go may take to be free, and how often is looked."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RegionHost:
    """The surroundings of an opening: limits of memory, an event that stops it."""

    limits: MemoryLimits = field(default_factory=SystemLimits)
    stop: threading.Event = field(default_factory=threading.Event)


def open_region(spec: RegionSpec, host: RegionHost | None = None) -> SharedRegion:
    """Create the region. Blocks while memory is reserved and populated: call it off the event loop.

    Raises SharedMemoryError before any touch if memory does not suffice, RegionError for a system that cannot make it,
    or once it is given up; nothing is left behind then.
    """
    host = host or RegionHost()
    rows_bytes = 0 if spec.reserved else spec.size_bytes  # those were set aside before
    require(host.limits, rows_bytes + spec.control_bytes)
    if spec.sharing is Sharing.PRIVATE:
        return _build(spec, host, -1, -1)
    with ExitStack() as undo:  # closing the descriptors gives everything back
        rows_fd = _sealed_memfd("kvtier-rows", spec.size_bytes, undo, spec.reserved)
        if spec.reserved:
            reserve(rows_fd, os.fstat(rows_fd).st_size, spec, host.stop)
        control_fd = _sealed_memfd("kvtier-control", spec.control_bytes, undo)
        reserve(control_fd, spec.control_bytes, spec, host.stop)
        region = _build(spec, host, rows_fd, control_fd)
        region.memfds = rows_fd, control_fd
        region.at_close = undo.pop_all()
    return region


def attach_region(spec: RegionSpec, rows_fd: int, control_fd: int) -> SharedRegion:
    """Map a memfd region whose descriptors were inherited or passed on. The caller keeps the descriptors.

    Descriptors that are open for reading alone make rows that cannot be written, and a control area whose changes stay
    in this process.

    Raises RegionError unless they are a ready region of exactly this geometry, sealed against ever shrinking.
    """
    from kvtier_cpu.region.huge_pages import file_bytes  # most stacks have private memory

    for fd, size_bytes in ((rows_fd, file_bytes(rows_fd, spec.size_bytes)), (control_fd, spec.control_bytes)):
        if not _is_sealed(fd) or os.fstat(fd).st_size != size_bytes:
            raise RegionError("the descriptors are not those of a shared region of this size")
    writable = fcntl.fcntl(rows_fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    spec = replace(spec, writable=writable)
    region = SharedRegion(spec, *_maps(spec, rows_fd, control_fd))
    with _closed_on_error(region):
        region.check_identity()
    return region


def open_kept(kept: tuple[int, int], let_go: Callable[[], None], spec: RegionSpec, host: RegionHost) -> SharedRegion:
    """The region that a former process has left behind its descriptors of rows and control area, with its bytes as they
    are; a fresh one if that is not of these rows and blocks: after `let_go`, and once its memory is free.

    The caller keeps the descriptors until `let_go`. Blocks. Raises as `open_region`.
    """
    try:
        region = attach_region(spec, *kept)
    except RegionError as error:
        _log.warning("rows of the process before are not used: %s", error)
        let_go()
        return _open_once_free(spec, host)
    with _closed_on_error(region):
        rows_fd = os.dup(kept[0])
        region.at_close.callback(os.close, rows_fd)
        control_fd = os.dup(kept[1])
        region.at_close.callback(os.close, control_fd)
    region.memfds = rows_fd, control_fd
    region.populated = map_populated(region.maps[0])
    return region


def _open_once_free(spec: RegionSpec, host: RegionHost) -> SharedRegion:
    """A fresh region while another one is let go, which may take a moment. Raises as `open_region`."""
    until = time.monotonic() + LET_GO_SECONDS
    while True:
        try:
            return open_region(spec, host)
        except SharedMemoryError:
            if time.monotonic() > until:
                raise
        host.stop.wait(PAUSE_SECONDS)


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False


def _build(spec: RegionSpec, host: RegionHost, rows_fd: int, control_fd: int) -> SharedRegion:
    """Map a fresh region, make it resident, and declare it ready. Raises RegionError where the kernel cannot keep
    private memory from a fork."""
    region = SharedRegion(spec, *_maps(spec, rows_fd, control_fd))
    with _closed_on_error(region):
        region.populated = make_resident(rows_fd, region.maps[0], spec, host.stop)
        region.write_identity()
    return region


def _maps(spec: RegionSpec, rows_fd: int, control_fd: int) -> tuple[Pages, mmap.mmap]:
    """The mappings of rows and control area; descriptors of -1 stand for private memory."""
    rows, control = maps = _map_rows(spec, rows_fd), _map(control_fd, spec.control_bytes, spec.writable)
    if not spec.dump_rows:
        keep_from_core_dumps(rows)
    if rows_fd < 0:
        keep_from_forks(rows)
        keep_from_forks(control)
    return maps


def _map_rows(spec: RegionSpec, fd: int) -> Pages:
    if fd < 0:
        return _map(fd, spec.size_bytes)
    from kvtier_cpu.region.huge_pages import map_aligned  # most stacks have private memory

    try:
        return map_aligned(fd, spec.size_bytes, spec.writable)
    except OSError as error:
        raise no_address_space(spec.size_bytes, error) from error


def _sealed_memfd(label: str, size_bytes: int, undo: ExitStack, reserved: bool = False) -> int:
    """With `reserved` it is made of whole huge pages that were set aside. Raises SharedMemoryError, RegionError."""
    from kvtier_cpu.region.huge_pages import file_bytes  # most stacks have private memory

    huge = os.MFD_HUGETLB | os.MFD_HUGE_2MB if reserved else 0
    try:
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | huge)
    except OSError as error:
        if not reserved:
            raise
        raise RegionError(f"this system sets no huge pages of 2 MiB aside ({error.strerror})") from error
    try:
        os.ftruncate(fd, file_bytes(fd, size_bytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        undo.callback(os.close, fd)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise SharedMemoryError(size_bytes, 0, f"this system ({error.strerror})") from error
        raise
    return fd


@contextmanager
def _closed_on_error(region: SharedRegion) -> Iterator[None]:
    try:
        yield
    except BaseException:
        region.close()
        raise


def _map(fd: int, size_bytes: int, shared: bool = True) -> mmap.mmap:
    """A mapping of a file, with `shared` for all to see what is written; of memory of this process alone for fd -1."""
    flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise no_address_space(size_bytes, error) from error


def no_address_space(size_bytes: int, error: OSError) -> SharedMemoryError:
    """The error for a mapping that the kernel refuses."""
    return SharedMemoryError(size_bytes, 0, f"the address space of this process ({error.strerror})")
