"""Opening a shared region: create its memory, or map memory that another process has handed over."""

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from kvtier.errors import RegionError, SharedMemoryError
from kvtier.tier.memory_limits import MemoryLimits, SystemLimits, require
from kvtier_cpu.region.populate import keep_from_core_dumps, keep_from_forks, make_resident, reserve
from kvtier_cpu.region.shared_region import Pages, RegionSpec, SharedRegion, Sharing

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


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
    opening = Opening(spec, host or RegionHost())
    limits = opening.host.limits
    rows_bytes = 0 if spec.reserved else spec.size_bytes  # those were set aside before
    require(limits, rows_bytes)  # first: numpy describes no control area of more than 2**31 rows
    require(limits, rows_bytes + spec.shape.size_bytes)
    return opening.create_private() if spec.sharing is Sharing.PRIVATE else opening.create_memfd()


class Opening:
    """The opening of a region: what is asked for, and where."""

    def __init__(self, spec: RegionSpec, host: RegionHost) -> None:
        self.spec = spec
        self.host = host

    def create_private(self) -> SharedRegion:
        """A region in memory of this process alone. Raises RegionError where the kernel cannot keep it from a fork."""
        return self._build(-1, -1)

    def create_memfd(self) -> SharedRegion:
        """A memfd region. Whatever goes wrong, closing the descriptors gives everything back."""
        with ExitStack() as undo:
            rows_fd = _sealed_memfd("kvtier-rows", self.spec.size_bytes, undo, self.spec.reserved)
            if self.spec.reserved:
                reserve(rows_fd, os.fstat(rows_fd).st_size, self.spec, self.host.stop)
            control_fd = _sealed_memfd("kvtier-control", self.spec.shape.size_bytes, undo)
            reserve(control_fd, self.spec.shape.size_bytes, self.spec, self.host.stop)
            region = self._build(rows_fd, control_fd)
            region.memfds = rows_fd, control_fd
            region.at_close = undo.pop_all()
        return region

    def _build(self, rows_fd: int, control_fd: int) -> SharedRegion:
        """Map a fresh region, make it resident, and declare it ready."""
        region = SharedRegion(self.spec, *self.maps(rows_fd, control_fd))
        with _closed_on_error(region):
            region.populated = make_resident(rows_fd, region.maps[0], self.spec, self.host.stop)
            region.write_identity(self.spec.digest)
        return region

    def enter(self, maps: tuple[Pages, mmap.mmap]) -> SharedRegion:
        """A region over memory that another process has made ready. Raises RegionError unless it is that of `spec`."""
        region = SharedRegion(self.spec, *maps)
        with _closed_on_error(region):
            region.check_identity(self.spec.digest)
        return region

    def maps(self, rows_fd: int, control_fd: int) -> tuple[Pages, mmap.mmap]:
        """The mappings of rows and control area; descriptors of -1 stand for private memory."""
        rows, control = maps = self._map_rows(rows_fd), _map(control_fd, self.spec.shape.size_bytes, self.spec.writable)
        if not self.spec.dump_rows:
            keep_from_core_dumps(rows)
        if rows_fd < 0:
            keep_from_forks(rows)
            keep_from_forks(control)
        return maps

    def _map_rows(self, fd: int) -> Pages:
        if fd < 0:
            return _map(fd, self.spec.size_bytes)
        from kvtier_cpu.region.huge_pages import map_aligned  # most stacks have private memory

        try:
            return map_aligned(fd, self.spec.size_bytes, self.spec.writable)
        except OSError as error:
            raise no_address_space(self.spec.size_bytes, error) from error


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
