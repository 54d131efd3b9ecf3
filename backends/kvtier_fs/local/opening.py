"""Opening the roots: who may own them, what their disks offer, which session begins."""

import asyncio
import os
import re
import shlex
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from kvtier.errors import GeometryError, ResourceError, RootBusyError, RootDamagedError, RootError
from kvtier.options import size_text
from kvtier.tier.checksum import SHORT_BYTES
from kvtier.tier.contract import SlotSpace
from kvtier.tier.memory_limits import MemoryLimits, SystemLimits
from kvtier.tier.registry import DryRun
from kvtier.tier.shared_epoch import fresh_epoch, is_usable
from kvtier.types.geometry import Geometry
from kvtier_fs.format.region_header import RegionPlan, manifests_bytes, snapshot_bytes
from kvtier_fs.format.slot_map import Owner, SlotMap
from kvtier_fs.format.snapshot import Snapshot, decode_snapshot
from kvtier_fs.format.superblock import UUID_BYTES, Superblock
from kvtier_fs.io.contract import IOEngine
from kvtier_fs.io.probe import DirectProbe
from kvtier_fs.local.folder import SlabFolder
from kvtier_fs.local.layout import Layout, RootSession, check_index, lay_out
from kvtier_fs.local.root import Root, RootPools
from kvtier_fs.local.shrinking import plan_to_read
from kvtier_fs.options import FSOptions
from kvtier_fs.roots import disk
from kvtier_fs.roots.disk import probe_disk
from kvtier_fs.roots.folder import LOCK_NAME, SUPERBLOCK_NAME, make_room_for_manifest, write_manifest

OWNER_POLL_SECONDS = 0.1
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
class Hooks:
    """The parts that a simulator or a fault test replaces: the files, the I/O engine (None: chosen by the options), the
    rng, the size of payloads that are verified on the event loop, the limits of memory, and the time of day."""

    folder: Callable[[str, FSOptions], SlabFolder] = SlabFolder
    engine: Callable[[Root], IOEngine] | None = None
    random_bytes: Callable[[int], bytes] = os.urandom
    checked_here_bytes: int = SHORT_BYTES
    limits: MemoryLimits = field(default_factory=SystemLimits)
    wall_ns: Callable[[], int] = time.time_ns


def root_of(path: str, options: FSOptions, hooks: Hooks) -> Root:
    """A root of which nothing is open yet."""
    pools = RootPools.of(path, options.io_threads)
    return Root(hooks.folder(path, options), pools, DirectProbe(False, reason="turned off"))


async def enter_root(root: Root, options: FSOptions) -> bool:
    """Open a root's folder, become its owner and look at its disk. False if the folder is not there.

    Raises RootError. The caller closes the root.
    """
    try:
        await root.pools.begin()
        if not await root.call(root.folder.enter):
            return False
        await root.call(root.folder.make_private)
        return await _own(root, options)
    except OSError as error:
        raise root.folder.refusal(error) from error


async def _become_owner(root: Root, patience_seconds: float) -> bool:
    """Lock the root; False if another process still has it when the patience ends.

    It is tried twice at least, because a tool that tests the lock has it for an instant.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + max(patience_seconds, OWNER_POLL_SECONDS)
    while not await root.call(root.folder.try_lock):
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(min(OWNER_POLL_SECONDS, max(0.0, deadline - loop.time())))
    return True


async def _own(root: Root, options: FSOptions) -> bool:
    folder = root.folder
    if not await _become_owner(root, options.owner_timeout_seconds):
        raise RootBusyError(root.path, await root.call(folder.owner))
    with suppress(OSError):  # it is for error messages only: a full disk must not keep us out
        await root.call(folder.write_owner, options.source(root.path))
    root.probe = await root.call(probe_disk, root.path, folder.fd, options)
    folder.direct = root.probe.direct
    data = await root.call(folder.read_superblock)
    root.stored = folder.known_superblock(data)
    slabs = [] if root.stored is not None else await root.call(folder.existing_slabs)
    if slabs:
        raise RootDamagedError(
            root.path,
            "its superblock is damaged or gone, so nothing in it counts, and it is left as it is; this empties it: "
            f"find {shlex.quote(root.path)} -mindepth 1 -delete",
        )
    return True


def first_epoch(stored: Iterable[Superblock | None], namespace: bytes, new_epoch: int | None) -> int:
    """The epoch that a session begins with. Tables that list the namespace state it; where none does, `new_epoch` is
    what others state. Without others, a table that forgot the namespace counts as well: what it forgot may have been
    reset while a root that lists it was away. An epoch beyond what can be counted from is none."""
    blocks = [block for block in stored if block is not None]
    listed = [epoch for block in blocks if (epoch := block.listed_epoch(namespace)) is not None]
    stated = list(filter(is_usable, listed))
    if new_epoch is not None:
        return max(stated, default=new_epoch)
    floors = [block.floor_epoch for block in blocks if block.listed_epoch(namespace) is None]
    if (listed and not stated) or not all(map(is_usable, floors)):
        return fresh_epoch()
    return max([*stated, *floors], default=0)


async def begin_session(root: Root, session: RootSession, random_bytes: Callable[[int], bytes]) -> str:
    """Mark the root as in use, durably, before anything else is written. Returns a note, empty if all is as it was.

    The snapshot of a clean close is read and removed before that, so it counts for this session only. A root with
    another size of regions, or whose first opening never completed, starts empty under a new uuid: nothing left from
    before can count. One with more regions than the plan keeps them until it was read. Raises RootError or OSError.
    """
    plan, stored = session.layout.plan, root.stored
    note = ""
    read = await plan_to_read(root, plan, session.layout.slot_bytes)
    root.snapshot = await _take_snapshot(root, session.layout, read)
    block = stored or Superblock(b"", 0, 0, plan.header_bytes, session.layout.row_alignment)
    if block.stride != read.stride:
        await root.call(root.folder.trim, None)
        block = replace(block, root_uuid=random_bytes(UUID_BYTES), stride=plan.stride)
        if stored is not None:
            note = f"{root.path}: formatted for this capacity and block size, so the root starts empty"
    block = replace(block, regions=read.regions, session=block.session + 1, clean=False)
    await root.write_superblock(block.with_epoch(session.namespace, session.epoch))
    await root.call(root.folder.trim, read)
    owners = [Owner(namespace, entry.epoch) for namespace, entry in root.superblock.namespaces]
    root.take_plan(read, SlotMap(owners, session.namespace))
    return note


async def _take_snapshot(root: Root, layout: Layout, read: RegionPlan) -> Snapshot | None:
    """The snapshot of the session before, if it was closed in order with our stride; its file is removed."""
    stored, data = root.stored, b""
    if stored is not None and stored.clean and stored.stride == read.stride:
        share = max(layout.share, 2 * read.regions * read.stride)
        data = await root.call(root.folder.read_snapshot, snapshot_bytes(share, min(layout.slot_bytes)))
    await root.call(root.folder.drop_snapshot)
    return await root.call(decode_snapshot, data, stored) if stored is not None and data else None


async def unknown_files(root: Root) -> str:
    """A note on what lies in the root and is none of ours, empty if there is nothing. It is never touched."""
    names = await root.call(root.folder.unknown)
    if not names:
        return ""
    shown = ", ".join(repr(name[:_NAME_SHOWN]) for name in names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{root.path}: holds files of others, which stay and do not count: {shown}{more}"


async def describe(root: Root, session: RootSession) -> str:
    """Keep the namespace's readable manifest beside its data. Returns a note if there is no room for it."""
    known = sorted(root.superblock.namespaces, key=lambda item: item[1].session, reverse=True)
    order = [session.namespace, *(digest for digest, _ in known if digest != session.namespace)]
    room, own = manifests_bytes(session.layout.share), len(session.manifest) + 1
    if not await root.call(make_room_for_manifest, root.folder, order, own, room):
        return f"{root.path}: no room for the readable manifest ({own} bytes)"
    try:
        await write_manifest(root.folder, session.namespace, session.manifest, root.pools.files)
    except OSError as error:
        return f"{root.path}: the readable manifest could not be written ({error.strerror})"
    return ""


# -- without opening -------------------------------------------------------------------------------------------------


def dry_run(options: FSOptions, geometry: Geometry, probe: bool) -> DryRun:
    """Space and mode of a tier that is not opened, and what would go wrong, for `kvtier check`.

    Without `probe` it is arithmetic over the options alone. With it each root is probed, briefly and blocking: nothing
    is created, nothing is written but a nameless file.
    """
    problems: list[str] = []
    notes: list[str] = []
    roots = []
    for path in options.roots:
        root = _make_unopened(path, options)
        roots.append(root)
        if probe:
            try:
                notes += _probe(root, options)
            except RootError as error:
                problems.append(str(error))
    space = None
    try:
        layout = lay_out(roots, options, geometry)
        space = SlotSpace(layout.plan.region_bytes, (layout.plan.regions,) * len(roots), layout.slot_bytes)
        notes += layout.notes
        if probe:
            check_index(layout, len(roots), SystemLimits())
    except (GeometryError, ResourceError) as error:
        problems.append(str(error))
    direct = all(root.probe.direct for root in roots) if probe else None
    return replace(disk.dry_run("slab", options, direct, notes, problems), space=space)


def _make_unopened(path: str, options: FSOptions) -> Root:
    """A root without a lock, whose threads never start."""
    folder = SlabFolder(path, options.model_copy(update={"create": False}))
    return Root(folder, RootPools.of(path, 1), DirectProbe(False))


def _probe(root: Root, options: FSOptions) -> list[str]:
    """Probe one root. Returns notes; raises RootError for what would keep it from opening."""
    stored, root.probe, notes = disk.dry_probe(root.folder, options, lambda: _read_superblock(root))
    root.stored = stored
    return notes


def _read_superblock(root: Root) -> Superblock | None:
    with suppress(FileNotFoundError):
        if owner := root.folder.live_owner():
            raise RootBusyError(root.path, owner)
    return root.folder.known_superblock(root.folder.read_superblock())


# -- leftovers -------------------------------------------------------------------------------------------------------
# Folders that an earlier configuration with another number of engines left beside a root. Their bytes are part of no
# capacity. One whose own record names the same source, and that no process uses, is removed.

_FOLDERS_SHOWN = 3
_REMOVED_LAST = (SUPERBLOCK_NAME, LOCK_NAME)
"""What is removed last: by these the rest of a folder is found again after a crash."""


class _Left(Enum):
    """The fate of a folder that may be left over, in words."""

    REMOVED = "removed: an earlier configuration with another number of engines had left it"
    USED = "still in use by an engine of an earlier configuration, beyond the capacity; a later start removes it"
    STRANGE = "left by an earlier configuration, and it holds files of others too"
    FAILED = "left by an earlier configuration, and it could not be removed whole"
    UNKNOWN = "no part of the capacity, and perhaps left by an earlier configuration with another number of engines"

    @property
    def is_named_only(self) -> bool:
        """True if it is for a person to remove it."""
        return self not in (_Left.REMOVED, _Left.USED)


def remove_leftovers(root: str, options: FSOptions) -> list[str]:
    """Remove what an earlier configuration left of the source of a root. Returns notes, of removed folders and of
    those of which too little is known. Never raises."""
    source, found = options.source(root), dict[_Left, list[tuple[str, int]]]()
    for path in _candidates(source, options):
        left, size = _remove_left(path, source, options)
        if left is not None:
            found.setdefault(left, []).append((shlex.quote(path), size))
    return [_note_on(left, folders) for left, folders in found.items()]


def _note_on(left: _Left, folders: list[tuple[str, int]]) -> str:
    shown = ", ".join(f"{path} ({size_text(size)})" for path, size in folders[:_FOLDERS_SHOWN])
    more = f" and {len(folders) - _FOLDERS_SHOWN} more" if len(folders) > _FOLDERS_SHOWN else ""
    command = f"; if nothing uses it: rm -r {' '.join(path for path, _ in folders[:_FOLDERS_SHOWN])}"
    return f"{shown}{more}: {left.value}{command if left.is_named_only else ''}"


def _candidates(source: str, options: FSOptions) -> list[str]:
    """The places of the shares of a source, and its own, but for those that today's engines use."""
    parent, name = os.path.split(source)
    shares = re.compile(rf"{re.escape(name)}-(0|[1-9][0-9]{{0,3}})")
    try:
        names = os.listdir(parent)
    except OSError:
        return []  # what cannot be listed has had its root opened by name
    numbers = sorted(int(match[1]) for match in map(shares.fullmatch, names) if match)
    first = options.engines if options.engines > 1 else 0
    places = [f"{source}-{number}" for number in numbers if number >= first]
    if options.engines > 1:
        places.append(source)
    return [path for path in places if path not in options.roots]


def _remove_left(path: str, source: str, options: FSOptions) -> tuple[_Left | None, int]:
    """The fate of a folder, and its bytes of disk; None for one that is no root, or that another stack uses."""
    folder = SlabFolder(path, options.model_copy(update={"create": False}))
    size = 0
    try:
        if not folder.enter():
            return None, 0
        names = os.listdir(folder.fd)
        size = sum(os.stat(name, dir_fd=folder.fd, follow_symlinks=False).st_blocks * 512 for name in names)
        if SUPERBLOCK_NAME not in names and folder.recorded_source() != source:
            return None, size
        recorded = folder.recorded_source() == source
        if not folder.try_lock(shared=not recorded):
            return (_Left.USED if recorded else None), size
        return (_remove_locked(folder, names, source) if recorded else _Left.UNKNOWN), size
    except (RootError, FileNotFoundError):
        return None, 0  # another's, or another engine of this configuration removes it
    except OSError:
        return _Left.FAILED, size
    finally:
        folder.leave()


def _remove_locked(folder: SlabFolder, names: list[str], source: str) -> _Left | None:
    if folder.recorded_source() != source:
        return None  # it was opened for something else until just now
    if not all(map(folder.is_own, names)):
        return _Left.STRANGE
    for name in sorted(names, key=lambda name: _REMOVED_LAST.index(name) if name in _REMOVED_LAST else -1):
        folder.unlink(name)
    with suppress(OSError):  # its parent may not be this user's; it is empty
        os.rmdir(folder.path)
    return _Left.REMOVED
