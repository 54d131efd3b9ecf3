"""Opening a shared region: create it, or join the one that another participant has created."""

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from kvtier.errors import RegionError, SharedMemoryError
from kvtier.tier_api.contract import Clock
from kvtier.tier_api.memory_limits import MemoryLimits, SystemLimits, require
from kvtier_cpu.region.control_area import ControlArea
from kvtier_cpu.region.populate import (
    PopulatePlan,
    keep_from_core_dumps,
    keep_from_forks,
    make_resident,
    map_populated,
    reserve,
)
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
from kvtier_cpu.region.shared_region import RegionSpec, SharedRegion, Sharing

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_private: dict[tuple[int, str], SharedRegion] = {}
"""Private regions that wait for their last participant, by process id and engine id. State of the process: the two
sides of an engine that live in one process share nothing but the engine id."""


class Step(StrEnum):
    """How far the opening of a region has come; reported to `RegionHost.observe`."""

    PUBLISHED = "published"
    RESIDENT = "resident"
    LINKED = "linked"
    COUNTED = "counted"
    READY = "ready"
    JOINING = "joining"
    MAPPED = "mapped"
    JOINED = "joined"


def _ignore(step: Step) -> None:
    """Observe nothing."""


@dataclass(frozen=True, slots=True)
class RegionHost:
    """What opening a region needs of the outside: limits, a clock, a way to be stopped, an observer of its steps."""

    limits: MemoryLimits = field(default_factory=SystemLimits)
    clock: Clock = time.monotonic
    stop: threading.Event = field(default_factory=threading.Event)
    observe: Callable[[Step], None] = _ignore


def open_region(spec: RegionSpec, host: RegionHost | None = None) -> SharedRegion:
    """Create the region, or join the one its first participant created.

    Blocks: for the creator while memory is reserved and populated, for the others until it is ready. Call it off the
    event loop. Raises SharedMemoryError before any touch if memory does not suffice, RegionError for a region that
    must not be joined or was not ready by the deadline; nothing is left behind then.
    """
    host = host or RegionHost()
    patience = Patience(host.clock, host.clock() + spec.deadline_seconds, host.stop)
    sweep_leftovers(spec.directory, patience)
    if spec.sharing is not Sharing.NAMED:
        require(host.limits, spec.size_bytes, None)  # first: numpy describes no control area of more than 2**31 rows
        require(host.limits, spec.size_bytes + spec.shape.size_bytes, None)
        return _create_private(spec, host) if spec.sharing is Sharing.PRIVATE else _create_memfd(spec, host)
    if (private := _private.pop((os.getpid(), spec.engine_id), None)) is not None:
        return _join_private(spec, host, private)
    names = Names.of(spec.directory, spec.engine_id)
    while True:
        claim = open_claim(names)
        if claim is None:
            region = _create_named(spec, host, names, patience)
        else:
            try:
                region = _join(spec, host, claim, patience)
            finally:
                claim.close()
        if region is not None:
            return region
        patience.pause("the region's name to become stable")


def attach_region(spec: RegionSpec, rows_fd: int, control_fd: int) -> SharedRegion:
    """Map a memfd region whose descriptors were inherited or passed on. The caller keeps the descriptors.

    Raises RegionError unless they are a ready region of exactly this geometry, sealed against ever shrinking.
    """
    for fd, size_bytes in ((rows_fd, spec.size_bytes), (control_fd, spec.shape.size_bytes)):
        if not _sealed(fd) or os.fstat(fd).st_size != size_bytes:
            raise RegionError("the descriptors are not those of a shared region of this size")
    return _enter(spec, RegionHost(), _maps(spec, rows_fd, control_fd))


def _create_private(spec: RegionSpec, host: RegionHost) -> SharedRegion:
    """A region in memory of this process alone. Raises RegionError where the kernel cannot keep it from a fork.

    Where another participant is to join it, that one finds it by engine id in this process, until it is closed.
    """
    region = _build(spec, host, -1, -1)
    with _closed_on_error(region):
        place = (os.getpid(), spec.engine_id)
        if not region.complete:
            if _private.setdefault(place, region) is not region:
                raise RegionError("this process has a private region of this engine_id already; is it running twice?")
            region.at_close.callback(_private.pop, place, None)
    return region


def _join_private(spec: RegionSpec, host: RegionHost, private: SharedRegion) -> SharedRegion:
    """A region of its own over the private memory of this process, which goes back when both are closed.

    Raises RegionError unless it is the region this participant needs.
    """
    region = _enter(replace(spec, sharing=Sharing.PRIVATE), host, private.maps)
    region.populated = private.populated
    return region


def _create_memfd(spec: RegionSpec, host: RegionHost) -> SharedRegion:
    """A memfd region. Whatever goes wrong, closing the descriptors gives everything back."""
    with ExitStack() as undo:
        rows_fd = _sealed_memfd("kvtier-rows", spec.size_bytes, undo)
        control_fd = _sealed_memfd("kvtier-control", spec.shape.size_bytes, undo)
        reserve(control_fd, spec.shape.size_bytes, _plan(spec, host))
        region = _build(spec, host, rows_fd, control_fd)
        region.memfds = rows_fd, control_fd
        region.at_close.push(undo.pop_all())
    return region


def _sealed_memfd(label: str, size_bytes: int, undo: ExitStack) -> int:
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    undo.callback(os.close, fd)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        raise SharedMemoryError(size_bytes, 0, f"this system ({error.strerror})") from error
    return fd


def _create_named(spec: RegionSpec, host: RegionHost, names: Names, patience: Patience) -> SharedRegion | None:
    """Claim the name and build the region behind it; None if another process claimed it first.

    Memory is looked at only once the claim is ours: before, the winner of the race may just be taking it.
    """
    claim = _claim(spec, host, names)
    if claim is None:
        return None
    with ExitStack() as undo:
        undo.callback(claim.withdraw)
        host.observe(Step.PUBLISHED)
        require(host.limits, spec.size_bytes, spec.directory)
        rows_fd = new_file(spec.directory, spec.size_bytes)
        try:
            region = _build(spec, host, rows_fd, claim.fd, _linked(spec, host, claim, rows_fd, patience))
        finally:
            os.close(rows_fd)
        region.at_close.push(undo.pop_all())
    return region


@contextmanager
def _linked(spec: RegionSpec, host: RegionHost, claim: Claim, rows_fd: int, patience: Patience) -> Iterator[None]:
    """Give the rows their name for a creator that counts itself in, behind the gate."""
    with claim.gate(patience):
        if not claim.named():
            raise RegionError(f"{claim.names.control} was removed while the region was being created")
        link_rows(rows_fd, claim.names)
        host.observe(Step.LINKED)
        yield
        if spec.participants == 1:
            claim.unlink()


def _build(
    spec: RegionSpec,
    host: RegionHost,
    rows_fd: int,
    control_fd: int,
    counting_in: AbstractContextManager[None] | None = None,
) -> SharedRegion:
    """Map a fresh region, make it resident, count its creator in, and declare it ready, last of all."""
    region = SharedRegion(spec, *_maps(spec, rows_fd, control_fd))
    with _closed_on_error(region):
        if not region.incarnation:
            region.write_identity(spec.digest)
        region.populated = make_resident(rows_fd, region.maps[0], _plan(spec, host))
        host.observe(Step.RESIDENT)
        with counting_in or nullcontext():
            _count_in(spec, region)
            host.observe(Step.COUNTED)
            region.set_ready(*_file(rows_fd))
            host.observe(Step.READY)
    return region


def _enter(spec: RegionSpec, host: RegionHost, maps: tuple[mmap.mmap, mmap.mmap]) -> SharedRegion:
    """A region over memory that another participant has made ready, with this participant counted in.

    Raises RegionError unless it is the region this participant needs.
    """
    region = SharedRegion(spec, *maps)
    with _closed_on_error(region):
        host.observe(Step.MAPPED)
        region.check_identity(spec.digest)
        if not region.ready:
            raise RegionError("the shared region is not ready")
        _count_in(spec, region)
        host.observe(Step.JOINED)
    return region


@contextmanager
def _closed_on_error(region: SharedRegion) -> Iterator[None]:
    try:
        yield
    except BaseException:
        region.close()
        raise


def _claim(spec: RegionSpec, host: RegionHost, names: Names) -> Claim | None:
    """A control file, whole and identified, under its name and with our life lock; None if the name is taken."""
    fd = new_file(spec.directory, spec.shape.size_bytes)
    claim = None
    try:
        reserve(fd, spec.shape.size_bytes, _plan(spec, host))
        _control(spec, fd).write_identity(spec.digest)
        claim = publish(fd, names)
    finally:
        if claim is None:
            os.close(fd)
    return claim


def _join(spec: RegionSpec, host: RegionHost, claim: Claim, patience: Patience) -> SharedRegion | None:
    """Map the region behind a claim once it is ready; None if the claim died or went, to start over."""
    if not claim.alive():
        claim.sweep(patience)
        return None
    try:
        area = _identified(spec, claim)
    except RegionError:
        if claim.alive():
            raise
        return None
    while not area.ready:
        if not (claim.alive() and claim.named()):
            return None
        patience.pause("the shared region to become ready")
    with claim.gate(patience):
        if not (claim.alive() and claim.named()):
            return None
        host.observe(Step.JOINING)
        region = _map_ready(spec, host, claim, area)
    if spec.populate:
        region.populated = map_populated(region.maps[0])
    return region


def _identified(spec: RegionSpec, claim: Claim) -> ControlArea:
    """The control area behind a claim, if it is that of the region this process needs. Raises RegionError if not."""
    if os.fstat(claim.fd).st_size != spec.shape.size_bytes:
        raise RegionError(f"{claim.names.control} belongs to a region of another size, or to none")
    area = _control(spec, claim.fd)
    area.check_identity(spec.digest)
    return area


def _control(spec: RegionSpec, fd: int) -> ControlArea:
    return ControlArea(np.frombuffer(_map(fd, spec.shape.size_bytes), dtype=np.uint8), spec.shape)


def _map_ready(spec: RegionSpec, host: RegionHost, claim: Claim, area: ControlArea) -> SharedRegion:
    """Map a ready region and count in; the last participant removes the names. Behind the gate."""
    if area.complete:  # the last one died between counting in and removing the names
        claim.unlink()
        raise RegionError("every participant has mapped this region already; is one running twice?")
    rows_fd = open_rows(claim.names, area.rows_file, spec.size_bytes)
    try:
        region = _enter(spec, host, _maps(spec, rows_fd, claim.fd))
    finally:
        os.close(rows_fd)
    with _closed_on_error(region):
        if region.complete:
            claim.unlink()
    return region


def _file(fd: int) -> tuple[int, int]:
    """Device and inode of a file; zeros for private memory, which has none."""
    if fd < 0:
        return 0, 0
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _count_in(spec: RegionSpec, area: ControlArea) -> None:
    for worker in spec.serves:
        area.write_note(worker, spec.note)
    area.count_in(spec.participant)
    for worker in spec.serves:
        area.publish_worker(worker, spec.digest)


def _plan(spec: RegionSpec, host: RegionHost) -> PopulatePlan:
    directory = spec.directory if spec.sharing is Sharing.NAMED else None
    return PopulatePlan(
        where=directory or "anonymous memory", populate=spec.populate, huge_pages=spec.huge_pages, stop=host.stop
    )


def _maps(spec: RegionSpec, rows_fd: int, control_fd: int) -> tuple[mmap.mmap, mmap.mmap]:
    """The mappings of rows and control area; descriptors of -1 stand for private memory."""
    rows, control = maps = _map(rows_fd, spec.size_bytes), _map(control_fd, spec.shape.size_bytes)
    if not spec.dump_rows:
        keep_from_core_dumps(rows)
    if rows_fd < 0:
        keep_from_forks(rows)
        keep_from_forks(control)
    return maps


def _map(fd: int, size_bytes: int) -> mmap.mmap:
    """A mapping of a file; of memory of this process alone for fd -1."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise SharedMemoryError(size_bytes, 0, f"the address space of this process ({error.strerror})") from error


def _sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False
