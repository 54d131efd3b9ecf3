"""Opening a shared region: create it, or join the one that another participant has created."""

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from kvtier.errors import RegionError, SharedMemoryError
from kvtier.tier.contract import Clock
from kvtier.tier.memory_limits import MemoryLimits, SystemLimits, require
from kvtier_cpu.region.control_area import ControlArea
from kvtier_cpu.region.populate import keep_from_core_dumps, keep_from_forks, make_resident, map_populated, reserve
from kvtier_cpu.region.rendezvous import (
    Claim,
    Names,
    Patience,
    link_rows,
    new_file,
    open_claim,
    open_rows,
    publish,
    sweep_leftovers,
)
from kvtier_cpu.region.shared_region import Pages, RegionSpec, SharedRegion, Sharing

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_private: dict[tuple[int, str], SharedRegion] = {}
"""Private regions that wait for their last participant, by process id and engine id. State of the process: the two
sides of an engine that live in one process share nothing but the engine id."""


class Step(StrEnum):
    """A step in the opening of a region; reported to `RegionHost.observe`."""

    PUBLISHED = "published"
    RESIDENT = "resident"
    LINKED = "linked"
    COUNTED = "counted"
    READY = "ready"
    JOINING = "joining"
    MAPPED = "mapped"
    JOINED = "joined"


@dataclass(frozen=True, slots=True)
class RegionHost:
    """The surroundings of an opening: limits of memory, a clock, an event that stops it, an observer of its steps."""

    limits: MemoryLimits = field(default_factory=SystemLimits)
    clock: Clock = time.monotonic
    stop: threading.Event = field(default_factory=threading.Event)
    observe: Callable[[Step], None] = lambda step: None


def open_region(spec: RegionSpec, host: RegionHost | None = None) -> SharedRegion:
    """Create the region, or join the one its first participant created.

    Blocks: for the creator while memory is reserved and populated, for the others until it is ready. Call it off the
    event loop. Raises SharedMemoryError before any touch if memory does not suffice, RegionError for a region that
    must not be joined or was not ready by the deadline; nothing is left behind then.
    """
    opening = Opening(spec, host or RegionHost())
    if spec.sharing is not Sharing.NAMED:
        limits = opening.host.limits
        rows_bytes = 0 if spec.reserved else spec.size_bytes  # those were set aside before
        require(limits, rows_bytes, None)  # first: numpy describes no control area of more than 2**31 rows
        require(limits, rows_bytes + spec.shape.size_bytes, None)
        return opening.create_private() if spec.sharing is Sharing.PRIVATE else opening.create_memfd()
    if (private := _private.pop((os.getpid(), spec.engine_id), None)) is not None:
        return opening.join_private(private)
    names = Names.of(spec.directory, spec.engine_id)
    while True:
        claim = open_claim(names)
        if claim is None:
            sweep_leftovers(spec.directory, opening.patience)  # what the dead hold is not there for a new region
            region = opening.create_named(names)
        else:
            with closing(claim):
                region = opening.join(claim)
        if region is not None:
            return region
        opening.patience.pause("the region's name to become stable")


class Opening:
    """The opening of a region by one participant: what it asks for, and until when it waits for other processes."""

    def __init__(self, spec: RegionSpec, host: RegionHost) -> None:
        self.spec = spec
        self.host = host
        self.patience = Patience(host.clock, host.clock() + spec.deadline_seconds, host.stop)

    def create_private(self) -> SharedRegion:
        """A region in memory of this process alone. Raises RegionError where the kernel cannot keep it from a fork.

        Where another participant is to join it, that one finds it by engine id in this process, until it is closed.
        """
        region = self._build(-1, -1, nullcontext())
        if region.complete:
            return region
        with _closed_on_error(region):
            place = (os.getpid(), self.spec.engine_id)
            if _private.setdefault(place, region) is not region:
                raise RegionError("this process has a private region of this engine_id already; is it running twice?")
            region.at_close.callback(_private.pop, place, None)
        return region

    def join_private(self, private: SharedRegion) -> SharedRegion:
        """A region of its own over the private memory of this process, which goes back when both are closed.

        Raises RegionError unless it is the region this participant needs.
        """
        region = Opening(replace(self.spec, sharing=Sharing.PRIVATE), self.host).enter(private.maps)
        region.populated = private.populated
        return region

    def create_memfd(self) -> SharedRegion:
        """A memfd region. Whatever goes wrong, closing the descriptors gives everything back."""
        with ExitStack() as undo:
            rows_fd = _sealed_memfd("kvtier-rows", self.spec.size_bytes, undo, self.spec.reserved)
            if self.spec.reserved:
                reserve(rows_fd, os.fstat(rows_fd).st_size, self.spec, self.patience)
            control_fd = _sealed_memfd("kvtier-control", self.spec.shape.size_bytes, undo)
            reserve(control_fd, self.spec.shape.size_bytes, self.spec, self.patience)
            region = self._build(rows_fd, control_fd, nullcontext())
            region.memfds = rows_fd, control_fd
            region.at_close = undo.pop_all()
        return region

    def create_named(self, names: Names) -> SharedRegion | None:
        """Claim the name and build the region behind it; None if another process claimed it first.

        Memory is looked at only once the claim is ours: before, the winner of the race may just be taking it.
        """
        claim = self._claim(names)
        if claim is None:
            return None
        with ExitStack() as undo:
            undo.callback(claim.withdraw)
            self.host.observe(Step.PUBLISHED)
            require(self.host.limits, self.spec.size_bytes, self.spec.directory)
            rows_fd = new_file(self.spec.directory, self.spec.size_bytes)
            try:
                region = self._build(rows_fd, claim.fd, self._linked(claim, rows_fd))
            finally:
                os.close(rows_fd)
            region.at_close = undo.pop_all()
        return region

    @contextmanager
    def _linked(self, claim: Claim, rows_fd: int) -> Iterator[None]:
        """Give the rows their name for a creator that counts itself in, behind the gate."""
        with claim.gate(self.patience):
            if not claim.named():
                raise RegionError(f"{claim.names.control} was removed while the region was being created")
            link_rows(rows_fd, claim.names)
            self.host.observe(Step.LINKED)
            yield
            if self.spec.participants == 1:
                claim.unlink()

    def _build(self, rows_fd: int, control_fd: int, counting_in: AbstractContextManager[None]) -> SharedRegion:
        """Map a fresh region, make it resident, count its creator in, and declare it ready, last of all."""
        region = SharedRegion(self.spec, *self.maps(rows_fd, control_fd))
        with _closed_on_error(region):
            if not region.incarnation:
                region.write_identity(self.spec.digest)
            region.populated = make_resident(rows_fd, region.maps[0], self.spec, self.patience)
            self.host.observe(Step.RESIDENT)
            with counting_in:
                self._count_in(region)
                self.host.observe(Step.COUNTED)
                region.set_ready(*_file(rows_fd))
                self.host.observe(Step.READY)
        return region

    def enter(self, maps: tuple[Pages, mmap.mmap], counted: bool = True) -> SharedRegion:
        """A region over memory that another participant has made ready, with this participant counted in.

        Raises RegionError unless it is the region this participant needs.
        """
        region = SharedRegion(self.spec, *maps)
        with _closed_on_error(region):
            self.host.observe(Step.MAPPED)
            region.check_identity(self.spec.digest)
            if not region.ready:
                raise RegionError("the shared region is not ready")
            if counted:
                self._count_in(region)
            self.host.observe(Step.JOINED)
        return region

    def _claim(self, names: Names) -> Claim | None:
        """A control file, whole and identified, under its name and with our life lock; None if the name is taken."""
        fd = new_file(self.spec.directory, self.spec.shape.size_bytes)
        claim = None
        try:
            reserve(fd, self.spec.shape.size_bytes, self.spec, self.patience)
            self._control(fd).write_identity(self.spec.digest)
            claim = publish(fd, names)
        finally:
            if claim is None:
                os.close(fd)
        return claim

    def join(self, claim: Claim) -> SharedRegion | None:
        """Map the region behind a claim once it is ready; None if the claim died or went, to start over."""
        if not claim.alive():
            claim.sweep(self.patience)
            return None
        try:
            area = self._identified(claim)
        except RegionError:
            if claim.alive():
                raise
            return None
        while not area.ready:
            if not (claim.alive() and claim.named()):
                return None
            self.patience.pause("the shared region to become ready")
        with claim.gate(self.patience):
            if not (claim.alive() and claim.named()):
                return None
            self.host.observe(Step.JOINING)
            region = self._map_ready(claim, area)
        if self.spec.populate:
            region.populated = map_populated(region.maps[0])
        return region

    def _identified(self, claim: Claim) -> ControlArea:
        """The control area behind a claim. Raises RegionError if it is not that of the region this process needs."""
        if os.fstat(claim.fd).st_size != self.spec.shape.size_bytes:
            raise RegionError(f"{claim.names.control} belongs to a region of another size, or to none")
        area = self._control(claim.fd)
        area.check_identity(self.spec.digest)
        return area

    def _control(self, fd: int) -> ControlArea:
        return ControlArea(np.frombuffer(_map(fd, self.spec.shape.size_bytes), dtype=np.uint8), self.spec.shape)

    def _map_ready(self, claim: Claim, area: ControlArea) -> SharedRegion:
        """Map a ready region and count in; the last participant removes the names. Behind the gate."""
        if area.complete:  # the last one died between counting in and removing the names
            claim.unlink()
            raise RegionError("every participant has mapped this region already; is one running twice?")
        rows_fd = open_rows(claim.names, area.rows_file, self.spec.size_bytes)
        try:
            region = self.enter(self.maps(rows_fd, claim.fd))
        finally:
            os.close(rows_fd)
        with _closed_on_error(region):
            if region.complete:
                claim.unlink()
        return region

    def _count_in(self, area: ControlArea) -> None:
        for worker in self.spec.serves:
            area.write_note(worker, self.spec.note)
        area.count_in(self.spec.participant)
        for worker in self.spec.serves:
            area.publish_worker(worker, self.spec.digest)

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
        if fd < 0 or self.spec.sharing is not Sharing.MEMFD:
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


def _file(fd: int) -> tuple[int, int]:
    """Device and inode of a file; zeros for private memory, which has none."""
    if fd < 0:
        return 0, 0
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


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
