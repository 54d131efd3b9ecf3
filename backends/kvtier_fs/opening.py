"""Opening the roots: who may own them, what their disks offer, how they are cut, which session begins."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvtier.checksum import SHORT_BYTES
from kvtier.errors import GeometryError, ResourceError, RootBusyError, RootError
from kvtier.geometry import Geometry, round_up
from kvtier.options import INDEX_BYTES_PER_SLOT
from kvtier_fs import texts
from kvtier_fs.closing import RootEnd
from kvtier_fs.folder import RootFolder
from kvtier_fs.io.contract import IOEngine
from kvtier_fs.io.probe import DirectProbe, probe_direct
from kvtier_fs.io.threads import ThreadsEngine
from kvtier_fs.io.turns import Turns
from kvtier_fs.io.uring import UringEngine, probe_uring
from kvtier_fs.ledger import Ledger, Owner
from kvtier_fs.options import FSOptions
from kvtier_fs.regions import RegionDemand, RegionPlan, choose_plan, manifests_bytes, snapshot_bytes
from kvtier_fs.root import Root
from kvtier_fs.slot import DIGEST_BYTES, MIN_HEADER_BYTES
from kvtier_fs.snapshot import Snapshot, SnapshotOf, decode_snapshot
from kvtier_fs.superblock import Superblock, decode_superblock, foreign_version
from kvtier_fs.threads import RootCrew

OWNER_POLL_SECONDS = 0.1
MISSING = "is not there; mount the disk, or create the folder or the one it lies in"
_NAMES_SHOWN, _NAME_SHOWN = 3, 64

T = TypeVar("T")


async def side_by_side(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run something for every root at once. All have ended when this returns or raises the first error."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


@dataclass(frozen=True, slots=True)
class Seams:
    """What a simulator or a fault test replaces: the files, the I/O engine (None: chosen by the options), the dice,
    and how large a payload may be that is verified on the event loop."""

    folder: Callable[[str, FSOptions], RootFolder] = RootFolder
    engine: Callable[[Root], IOEngine] | None = None
    random_bytes: Callable[[int], bytes] = os.urandom
    checked_here_bytes: int = SHORT_BYTES


async def enter_root(path: str, options: FSOptions, seams: Seams) -> Root | None:
    """Open a root's folder, become its owner and look at its disk. None if the folder is not there.

    Raises RootError, having let go of everything.
    """
    folder = seams.folder(path, options)
    root = Root(folder, RootCrew.of(path, options.io_threads), DirectProbe(False, reason="turned off"))
    entered = False
    try:
        await root.crew.begin()
        entered = await root.call(folder.enter) and await _own(root, options)
    except OSError as error:
        raise folder.refusal(error) from error
    finally:
        if not entered:
            await RootEnd(root, Counter(), None).within(options.close_timeout_seconds)
    return root if entered else None


async def _become_owner(root: Root, patience_seconds: float) -> bool:
    """Lock the root; False if another process still has it when the patience ends."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_seconds
    while not await root.call(root.folder.try_lock):
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(min(OWNER_POLL_SECONDS, max(0.0, deadline - loop.time())))
    return True


async def _own(root: Root, options: FSOptions) -> bool:
    folder = root.folder
    if not await _become_owner(root, options.owner_timeout_seconds):
        raise RootBusyError(root.path, await texts.read_owner(folder, root.crew.files))
    with suppress(OSError):
        await texts.write_owner(folder, root.crew.files)  # for error messages only: a full disk must not keep us out
    if options.direct != "off":
        root.probe = await root.call(probe_direct, folder.fd)
    if options.direct == "required" and not root.probe.direct:
        raise RootError(
            root.path, f"direct I/O is required but {root.probe.reason}; choose another disk or direct: auto"
        )
    folder.direct = root.probe.direct
    data = await root.call(folder.read_superblock)
    root.stored = decode_superblock(data)
    version = foreign_version(data)
    if version is not None:
        raise RootError(
            root.path, f"holds format version {version}, which this release does not know; use another folder"
        )
    root.unreadable = bool(data) and root.stored is None
    return True


def header_bytes(roots: list[Root]) -> int:
    """Bytes of a header page, the same in every root. Raises RootError if a root was laid out for another disk."""
    needed = max(MIN_HEADER_BYTES, *(root.probe.offset_alignment for root in roots))
    stored = [root.stored.header_bytes for root in roots if root.stored is not None]
    chosen = max(needed, *stored) if stored else needed
    for root in roots:
        if root.stored is not None and root.stored.header_bytes != chosen:
            raise RootError(
                root.path,
                f"was laid out for a disk alignment of {root.stored.header_bytes} bytes, this stack needs {chosen}; "
                f"use another folder or empty this one",
            )
    return chosen


def check_alignment(roots: list[Root], row_alignment: int, header: int) -> None:
    """Rows must suit every disk, and what is stored must have been laid out for rows like these.

    Raises GeometryError or RootError.
    """
    wanted = max(root.probe.alignment for root in roots)
    if row_alignment % wanted or row_alignment % header:
        raise GeometryError(f"rows are aligned to {row_alignment} bytes but the disks need {max(wanted, header)}")
    for root in roots:
        if root.stored is not None and root.stored.row_alignment != row_alignment:
            raise RootError(
                root.path,
                f"was laid out for rows aligned to {root.stored.row_alignment} bytes, this stack aligns to "
                f"{row_alignment}; use another folder or empty this one",
            )


def plan_regions(roots: list[Root], demand: RegionDemand, region_bytes: int | None) -> tuple[RegionPlan, list[str]]:
    """The regions of every root: as they are already cut, if that still works, else anew. Raises GeometryError."""
    notes = []
    strides = Counter(root.stored.stride for root in roots if root.stored is not None)
    for stride, _ in strides.most_common():
        plan = demand.with_stride(stride)
        if demand.fits(plan):
            if region_bytes is not None and region_bytes // demand.alignment * demand.alignment != stride:
                notes.append(f"region_bytes is {stride} since the roots were made; empty them to change it")
            return plan, notes
    return choose_plan(demand, region_bytes), notes


@dataclass(frozen=True, slots=True)
class Layout:
    """How roots are cut for a KV layout: bytes of each root, the regions, the sizes of slots and payloads by group."""

    share: int
    plan: RegionPlan
    row_alignment: int
    slot_bytes: tuple[int, ...]
    payload_bytes: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def header_bytes(self) -> int:
        return self.plan.header_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a root that the snapshot of a clean close may take."""
        return snapshot_bytes(self.share, min(self.slot_bytes))


def lay_out(roots: list[Root], options: FSOptions, geometry: Geometry) -> Layout:
    """Decide how these roots are cut. Raises GeometryError or RootError."""
    header = header_bytes(roots)
    check_alignment(roots, geometry.alignment, header)
    payloads = tuple(geometry.aligned_bytes(group) for group in range(geometry.num_groups))
    sizes = tuple(round_up(header + payload, header) for payload in payloads)
    capacity = options.capacity
    if options.index_bytes_max is not None:
        capacity = min(capacity, options.index_bytes_max // INDEX_BYTES_PER_SLOT * min(sizes))
    share = capacity // len(options.roots) // 4096 * 4096
    demand = RegionDemand(share, len(roots), sizes, header, header)
    plan, notes = plan_regions(roots, demand, options.region_bytes)
    return Layout(share, plan, geometry.alignment, sizes, payloads, tuple(notes))


def mode(engine: str, direct: bool) -> str:
    """How the tier's I/O goes, in words."""
    return f"slab, {engine}, {'direct' if direct else 'buffered'}"


@dataclass(frozen=True, slots=True)
class Session:
    """What a session begins with: how the roots are cut, our namespace, its readable manifest, its epoch."""

    layout: Layout
    namespace: bytes
    manifest: str
    epoch: int


async def begin_session(root: Root, session: Session, random_bytes: Callable[[int], bytes]) -> str:
    """Mark the root as in use, durably, before anything else is written. Returns a note, empty if all is as it was.

    The snapshot of a clean close is read and removed before that, so it counts for this session only. A root cut for
    another plan, or without a readable superblock, starts empty under a new uuid, so that nothing left over from
    before can count. Raises RootError or OSError.
    """
    plan, stored = session.layout.plan, root.stored
    fresh = Superblock(
        root_uuid=random_bytes(DIGEST_BYTES),
        stride=plan.stride,
        regions=plan.regions,
        header_bytes=plan.header_bytes,
        row_alignment=session.layout.row_alignment,
    )
    note = ""
    root.snapshot = await _take_snapshot(root, session.layout)
    if stored is not None and stored.stride == plan.stride:
        block = replace(stored, regions=plan.regions)
    else:
        await root.call(root.folder.trim, None)
        block = fresh
        if root.unreadable:
            note = f"{root.path}: the superblock was damaged, so the root starts empty"
        if stored is not None:
            block = replace(stored, root_uuid=fresh.root_uuid, stride=plan.stride, regions=plan.regions)
            note = f"{root.path}: cut anew for this capacity and block size, so the root starts empty"
    block = replace(block, session=block.session + 1, clean=False)
    await root.write_superblock(block.with_epoch(session.namespace, session.epoch))
    await root.call(root.folder.trim, plan)
    owners = [Owner(namespace, entry.epoch) for namespace, entry in root.superblock.namespaces]
    root.take_plan(plan, Ledger(owners, session.namespace))
    return note


async def _take_snapshot(root: Root, layout: Layout) -> Snapshot | None:
    """The snapshot of the session before, if it ended in order and cut the root as we do; its file is gone then."""
    stored, data = root.stored, b""
    if stored is not None and stored.clean and stored.stride == layout.plan.stride:
        data = await root.call(root.folder.read_snapshot, layout.snapshot_bytes)
    await root.call(root.folder.drop_snapshot)
    if stored is None or not data:
        return None
    of = SnapshotOf(stored.root_uuid, stored.session, stored.stride)
    return await root.call(decode_snapshot, data, of)


async def unknown_files(root: Root) -> str:
    """A note on what lies in the root and is none of ours, empty if there is nothing. It is never touched."""
    names = await root.call(root.folder.unknown)
    if not names:
        return ""
    shown = ", ".join(repr(name[:_NAME_SHOWN]) for name in names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{root.path}: holds files of others, which stay and do not count: {shown}{more}"


async def describe(root: Root, session: Session) -> str:
    """Keep the namespace's readable manifest beside its data. Returns a note if there is no room for it."""
    known = sorted(root.superblock.namespaces, key=lambda item: item[1].session, reverse=True)
    order = [session.namespace, *(digest for digest, _ in known if digest != session.namespace)]
    room, own = manifests_bytes(session.layout.share), len(session.manifest) + 1
    if not await root.call(texts.make_room_for_manifest, root.folder, order, own, room):
        return f"{root.path}: no room for the readable manifest ({own} bytes)"
    try:
        await texts.write_manifest(root.folder, session.namespace, session.manifest, root.crew.files)
    except OSError as error:
        return f"{root.path}: the readable manifest could not be written ({error.strerror})"
    return ""


async def choose_engine(executor: Executor, options: FSOptions) -> tuple[str, str]:
    """Which engine serves, and a note if it is not the one hoped for. Raises ResourceError if io_uring was demanded."""
    if options.io_engine == "threads":
        return "threads", ""
    reason = await asyncio.get_running_loop().run_in_executor(executor, probe_uring)
    if not reason:
        return "io_uring", ""
    if options.io_engine == "io_uring":
        raise ResourceError(f"io_engine is io_uring but {reason}; choose auto or threads")
    return "threads", f"{reason}; threads serve instead"


def make_engine(name: str, root: Root, options: FSOptions, turns: Turns | None = None) -> IOEngine:
    """An engine of the chosen kind for one root; threads where a ring too many was asked for, unless demanded.

    Raises ResourceError.
    """
    loop = asyncio.get_running_loop()
    if name == "io_uring":
        engine = UringEngine(loop, options.io_depth, turns)
        try:
            engine.open()
        except ResourceError:
            if options.io_engine == "io_uring":
                raise
        else:
            return engine
    return ThreadsEngine(loop, root.crew.io, options.io_threads, turns)
