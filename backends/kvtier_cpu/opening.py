"""Opening a shared region: create it, or join the one whoever came first created."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvtier.errors import RegionError, SharedMemoryError
from kvtier.loadstore import Clock
from kvtier_cpu.control import ControlArea
from kvtier_cpu.limits import MemoryLimits, SystemLimits, require
from kvtier_cpu.populate import Plan, reserve
from kvtier_cpu.region import RegionMaps, RegionSpec, SharedRegion, Sharing
from kvtier_cpu.rendezvous import (
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

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Step(StrEnum):
    """How far the opening of a region has come; told to `RegionHost.observe`."""

    PUBLISHED = "published"
    RESIDENT = "resident"
    LINKED = "linked"
    COUNTED = "counted"
    READY = "ready"
    JOINING = "joining"
    MAPPED = "mapped"
    JOINED = "joined"


def _ignore(step: Step) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class RegionHost:
    """What opening a region needs of the outside: limits, a clock, a way to be stopped, somebody who watches."""

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
    if spec.sharing is Sharing.PRIVATE:
        return _create_private(spec, host)
    if spec.sharing is Sharing.MEMFD:
        return _create_anonymous(spec, host)
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
        patience.pause("the region's name to settle")


def attach_region(spec: RegionSpec, rows_fd: int, control_fd: int) -> SharedRegion:
    """Map a memfd region whose descriptors were inherited or passed on. The caller keeps the descriptors.

    Raises RegionError unless they are a ready region of exactly this geometry, sealed against ever shrinking.
    """
    for fd, size_bytes in ((rows_fd, spec.size_bytes), (control_fd, spec.shape.size_bytes)):
        if not _sealed(fd) or os.fstat(fd).st_size != size_bytes:
            raise RegionError("the descriptors are not those of a shared region of this size")
    region = SharedRegion(spec, _maps(spec, rows_fd, control_fd))
    try:
        region.control.check_identity(spec.digest)
        region.control.require_ready()
        _count_in(spec, region.control)
    except BaseException:
        region.close()
        raise
    return region


def _create_private(spec: RegionSpec, host: RegionHost) -> SharedRegion:
    """A region in memory of this process alone. Raises RegionError where the kernel cannot keep it from a fork."""
    require(host.limits, spec.size_bytes + spec.shape.size_bytes, None)
    region = SharedRegion(spec, RegionMaps(_map(-1, spec.size_bytes), _map(-1, spec.shape.size_bytes)))
    try:
        region.control.write_identity(spec.digest, _new_incarnation())
        region.make_private_resident(_plan(spec, host))
        host.observe(Step.RESIDENT)
        _finish(spec, host, region.control, (0, 0))
    except BaseException:
        region.close()
        raise
    return region


def _create_anonymous(spec: RegionSpec, host: RegionHost) -> SharedRegion:
    """A memfd region. Whatever goes wrong, closing the descriptors gives everything back."""
    require(host.limits, spec.size_bytes + spec.shape.size_bytes, None)
    fds: list[int] = []
    region = None
    try:
        for label, size_bytes in (("rows", spec.size_bytes), ("control", spec.shape.size_bytes)):
            fds.append(_sealed_memfd(f"kvtier-{label}", size_bytes))
        rows_fd, control_fd = fds
        reserve(control_fd, spec.shape.size_bytes, _plan(spec, host))
        region = SharedRegion(spec, _maps(spec, rows_fd, control_fd))
        region.control.write_identity(spec.digest, _new_incarnation())
        region.make_resident(rows_fd, _plan(spec, host))
        host.observe(Step.RESIDENT)
        _finish(spec, host, region.control, _file(rows_fd))
    except BaseException:
        if region is not None:
            region.close()
        for fd in fds:
            os.close(fd)
        raise
    region.keep_descriptors(rows_fd, control_fd)
    return region


def _sealed_memfd(label: str, size_bytes: int) -> int:
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise SharedMemoryError(size_bytes, 0, f"this system ({error.strerror})") from error
    return fd


def _create_named(spec: RegionSpec, host: RegionHost, names: Names, patience: Patience) -> SharedRegion | None:
    """Claim the name and build the region behind it; None if another process claimed it first.

    Memory is looked at only once the claim is ours: before, the winner of the race may just be taking it.
    """
    claim = _claim(spec, host, names)
    if claim is None:
        return None
    region = None
    try:
        host.observe(Step.PUBLISHED)
        require(host.limits, spec.size_bytes, spec.directory)
        rows_fd = new_file(spec.directory, spec.size_bytes)
        try:
            region = SharedRegion(spec, _maps(spec, rows_fd, claim.fd))
            region.make_resident(rows_fd, _plan(spec, host))
            host.observe(Step.RESIDENT)
            with claim.gate(patience):
                if not claim.named():
                    raise RegionError(f"{names.control} was removed while the region was being created")
                link_rows(rows_fd, names)
                host.observe(Step.LINKED)
                _finish(spec, host, region.control, _file(rows_fd))
                if region.complete:
                    claim.unlink()
        finally:
            os.close(rows_fd)
    except BaseException:
        if region is not None:
            region.close()
        claim.withdraw()
        raise
    region.keep_claim(claim)
    return region


def _claim(spec: RegionSpec, host: RegionHost, names: Names) -> Claim | None:
    """A control file, whole and identified, under its name and with our life lock; None if the name is taken."""
    fd = new_file(spec.directory, spec.shape.size_bytes)
    claim = None
    try:
        reserve(fd, spec.shape.size_bytes, _plan(spec, host))
        area = ControlArea(np.frombuffer(_map(fd, spec.shape.size_bytes), dtype=np.uint8), spec.shape)
        area.write_identity(spec.digest, _new_incarnation())
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
        region.map_populated()
    return region


def _identified(spec: RegionSpec, claim: Claim) -> ControlArea:
    """The control area behind a claim, if it is that of the region this process needs. Raises RegionError if not."""
    if claim.size_bytes != spec.shape.size_bytes:
        raise RegionError(f"{claim.names.control} belongs to a region of another size, or to none")
    area = ControlArea(np.frombuffer(_map(claim.fd, spec.shape.size_bytes), dtype=np.uint8), spec.shape)
    area.check_identity(spec.digest)
    return area


def _map_ready(spec: RegionSpec, host: RegionHost, claim: Claim, area: ControlArea) -> SharedRegion:
    """Map a ready region and count in; the last participant removes the names. Behind the gate."""
    if area.complete:  # the last one died between counting in and removing the names
        claim.unlink()
        raise RegionError("every participant has mapped this region already; is one running twice?")
    rows_fd = open_rows(claim.names, area.rows_file, spec.size_bytes)
    try:
        region = SharedRegion(spec, _maps(spec, rows_fd, claim.fd))
    finally:
        os.close(rows_fd)
    try:
        host.observe(Step.MAPPED)
        _count_in(spec, area)
        host.observe(Step.JOINED)
        if area.complete:
            claim.unlink()
    except BaseException:
        region.close()
        raise
    return region


def _finish(spec: RegionSpec, host: RegionHost, area: ControlArea, rows_file: tuple[int, int]) -> None:
    """Count the creator in and declare the region ready, last of all."""
    _count_in(spec, area)
    host.observe(Step.COUNTED)
    area.set_ready(*rows_file)
    host.observe(Step.READY)


def _file(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _count_in(spec: RegionSpec, area: ControlArea) -> None:
    for worker in spec.serves:
        area.write_note(worker, spec.note)
    area.count_in(spec.participant)
    for worker in spec.serves:
        area.publish_worker(worker, spec.digest)


def _plan(spec: RegionSpec, host: RegionHost) -> Plan:
    directory = spec.directory if spec.sharing is Sharing.NAMED else None
    return Plan(
        where=directory or "anonymous memory",
        populate=spec.populate,
        huge_pages=spec.huge_pages,
        stop=host.stop,
    )


def _maps(spec: RegionSpec, rows_fd: int, control_fd: int) -> RegionMaps:
    return RegionMaps(_map(rows_fd, spec.size_bytes), _map(control_fd, spec.shape.size_bytes))


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


def _new_incarnation() -> int:
    return secrets.randbits(63) | 1
