"""Checks of a root's disk and the folder around it before the root is opened, and the choice of its I/O engine."""

import asyncio
import os
import shlex
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.loop_budget import TimeBudget
from kvtier.errors import ResourceError, RootError
from kvtier.tier.registry import DryRun
from kvtier_fs.format.superblock import Superblock
from kvtier_fs.format.tree_records import Tree
from kvtier_fs.io.contract import IOEngine
from kvtier_fs.io.probe import DirectProbe, probe_direct
from kvtier_fs.io.threads import ThreadsEngine
from kvtier_fs.io.uring import UringEngine, probe_uring
from kvtier_fs.options import RootOptions
from kvtier_fs.roots.folder import GuardedFolder


def choose_engine(options: RootOptions) -> tuple[str, str]:
    """The name of the I/O engine, and a note if it is not the preferred one. Blocks.

    Raises ResourceError if the options require io_uring and it is not available.
    """
    reason = probe_uring() if options.io_engine != "threads" else ""
    if reason and options.io_engine == "io_uring":
        raise ResourceError(f"io_engine is io_uring but {reason}; choose auto or threads")
    name = "threads" if reason or options.io_engine == "threads" else "io_uring"
    return name, f"{reason}; threads serve instead" if reason else ""


def make_engine(
    name: str,
    threads: DaemonPool,
    options: RootOptions,
    hold: Callable[[IOEngine], object],
    budget: TimeBudget | None = None,
) -> IOEngine:
    """An engine of the chosen kind for one root; threads if the ring cannot be made and io_uring is not required.

    `hold` is called with it before it is opened, so that its owner can close it in any case. Raises ResourceError.
    """
    loop = asyncio.get_running_loop()
    if name == "io_uring":
        ring = UringEngine(loop, options.io_depth, budget)
        hold(ring)
        try:
            ring.open()
        except ResourceError:
            if options.io_engine == "io_uring":
                raise
        else:
            return ring
    engine = ThreadsEngine(loop, threads, options.io_threads, budget)
    hold(engine)
    engine.open()
    return engine


def mode(layout: str, engine: str, direct: bool) -> str:
    """A tier's way of I/O, in words."""
    return f"{layout}, {engine}, {'direct' if direct else 'buffered'}"


T = TypeVar("T")

ROOT_MISSING = "is not there; mount the disk, or create the folder or the one it lies in"


def probe_disk(path: str, folder_fd: int, options: RootOptions) -> DirectProbe:
    """The ability of the disk of a root for direct I/O. Raises RootError if the options require it and it has none."""
    probe = DirectProbe(False, reason="turned off") if options.direct == "off" else probe_direct(folder_fd)
    if options.direct == "required" and not probe.direct:
        raise RootError(path, f"direct I/O is required but {probe.reason}; choose another disk or direct: auto")
    return probe


def probe_parent(path: str, options: RootOptions) -> DirectProbe:
    """Judge a root that is not there by the folder it would be created in. Raises RootError."""
    parent = os.path.dirname(path)
    if not options.create or not os.path.isdir(parent):
        raise RootError(path, ROOT_MISSING)
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        raise RootError(path, "cannot be created (no permission); create it for this user")
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return probe_disk(path, fd, options)
    finally:
        os.close(fd)


def dry_probe(
    folder: GuardedFolder, options: RootOptions, read: Callable[[], T]
) -> tuple[T | None, DirectProbe, list[str]]:
    """The result of `read` in a root, the abilities of its disk, and notes; found without changing anything.

    Raises RootError for what would keep the root from opening.
    """
    try:
        if not folder.enter():
            return None, probe_parent(folder.path, options), [f"{folder.path}: will be created"]
        check_writable(folder.path, folder.fd)
        return read(), probe_disk(folder.path, folder.fd, options), [folder.note] if folder.note else []
    except OSError as error:
        raise folder.refusal(error) from error
    finally:
        folder.leave()


def dry_run(
    layout: str, options: RootOptions, direct: bool | None, notes: Sequence[str], problems: Sequence[str]
) -> DryRun:
    """The tier of a layout as it would be, given what is known of its roots. `direct` None: nothing is probed."""
    name, note = "threads", ""
    if direct is not None:
        try:
            name, note = choose_engine(options)
        except ResourceError as error:
            name, problems = "io_uring", (*problems, str(error))
    return DryRun(
        capacity_bytes=options.capacity,
        mode="" if direct is None else mode(layout, name, direct),
        notes=(*notes, *filter(None, (note,))),
        problems=tuple(problems),
    )


def check_writable(path: str, folder_fd: int) -> None:
    """Raise RootError if this user may not write into an open root."""
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder_fd, effective_ids=True):
        raise RootError(path, "no permission; make this user its owner with mode 0700")


def check_laid_out(path: str, stored: Superblock | Tree, header_bytes: int, row_alignment: int) -> None:
    """Raise RootError for a root that was laid out for another disk, or for a stack with other rows."""
    if stored.header_bytes != header_bytes:
        was, now = f"a disk alignment of {stored.header_bytes} bytes", f"needs {header_bytes}"
    elif stored.row_alignment != row_alignment:
        was, now = f"rows aligned to {stored.row_alignment} bytes", f"aligns to {row_alignment}"
    else:
        return
    raise RootError(path, f"was laid out for {was}, this stack {now}; use another folder or empty this one")


def unknown_version(path: str, version: int, layout: str = "slab") -> RootError:
    """Why a root that another release wrote is not opened: its bytes may mean something else."""
    return RootError(
        path,
        f"holds format version {version} of layout {layout}, which this release does not know; "
        f"use another folder, or remove the root: rm -r {shlex.quote(path)}",
    )
