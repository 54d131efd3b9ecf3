"""What the tier would be on this machine, found without opening it: for `kvtier check`."""

from __future__ import annotations

import fcntl
import os

from kvtier.errors import GeometryError, RootBusyError, RootError
from kvtier.geometry import Geometry
from kvtier.loadstore import SlotSpace
from kvtier.registry import Preview
from kvtier_fs.folder import LOCK_NAME, RootFolder
from kvtier_fs.io.probe import DirectProbe, probe_direct
from kvtier_fs.io.uring import probe_uring
from kvtier_fs.opening import MISSING, lay_out, mode
from kvtier_fs.options import FSOptions
from kvtier_fs.root import Root
from kvtier_fs.superblock import decode_superblock, foreign_version
from kvtier_fs.texts import OWNER_BYTES_MAX, owner_in_words
from kvtier_fs.threads import RootCrew


def preview(options: FSOptions, geometry: Geometry, look: bool) -> Preview:
    """The space, the mode, and what would go wrong. Without `look` it is arithmetic over the options alone.

    With it each root is looked at, briefly and blocking: nothing is created, nothing is written but a nameless file.
    """
    problems: list[str] = []
    notes: list[str] = []
    roots = []
    for path in options.roots:
        root = _unopened(path, options)
        roots.append(root)
        if look:
            try:
                notes += _look(root, options)
            except RootError as error:
                problems.append(str(error))
    engine, engine_notes, engine_problems = _engine(options, look)
    space = None
    try:
        layout = lay_out(roots, options, geometry)
        space = SlotSpace(layout.plan.region_bytes, (layout.plan.regions,) * len(roots), layout.slot_bytes)
        notes += layout.notes
    except (GeometryError, RootError) as error:
        problems.append(str(error))
    return Preview(
        capacity_bytes=options.capacity,
        space=space,
        mode=mode(engine, all(root.probe.direct for root in roots)) if look else "",
        notes=(*notes, *engine_notes),
        problems=(*problems, *engine_problems),
    )


def _unopened(path: str, options: FSOptions) -> Root:
    """A root without a lock, whose threads never start."""
    folder = RootFolder(path, options.model_copy(update={"create": False}))
    return Root(folder, RootCrew.of(path, 1), DirectProbe(False))


def _engine(options: FSOptions, look: bool) -> tuple[str, list[str], list[str]]:
    """The engine that would serve, notes, problems."""
    if not look or options.io_engine == "threads":
        return "threads", [], []
    reason = probe_uring()
    if not reason:
        return "io_uring", [], []
    if options.io_engine == "io_uring":
        return "io_uring", [], [f"io_engine is io_uring but {reason}; choose auto or threads"]
    return "threads", [f"{reason}; threads would serve instead"], []


def _look(root: Root, options: FSOptions) -> list[str]:
    """Look at one root. Returns notes; raises RootError for what would keep it from opening."""
    folder = root.folder
    try:
        if not folder.enter():
            return _look_beside(root, options)
        _check_owner(root)
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder.fd, effective_ids=True):
            raise RootError(folder.path, "no permission; make this user its owner with mode 0700")
        _check_disk(root, folder.fd, options)
        data = folder.read_superblock()
        root.stored = decode_superblock(data)
        version = foreign_version(data)
        if version is not None:
            raise RootError(folder.path, f"holds format version {version}, which this release does not know")
        return []
    except OSError as error:
        raise folder.refusal(error) from error
    finally:
        folder.leave()


def _look_beside(root: Root, options: FSOptions) -> list[str]:
    """Judge a root that is not there by the folder it would be created in."""
    parent = os.path.dirname(root.path)
    if not options.create or not os.path.isdir(parent):
        raise RootError(root.path, MISSING)
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        raise RootError(root.path, "cannot be created (no permission); create it for this user")
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_disk(root, fd, options)
    finally:
        os.close(fd)
    return [f"{root.path}: will be created"]


def _check_disk(root: Root, folder_fd: int, options: FSOptions) -> None:
    if options.direct != "off":
        root.probe = probe_direct(folder_fd)
    if options.direct == "required" and not root.probe.direct:
        raise RootError(
            root.path, f"direct I/O is required but {root.probe.reason}; choose another disk or direct: auto"
        )


def _check_owner(root: Root) -> None:
    """Raise RootBusyError if a live process holds the root's lock."""
    try:
        fd = root.folder.open_file(LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError as error:
        raise RootBusyError(root.path, owner_in_words(os.pread(fd, OWNER_BYTES_MAX, 0))) from error
    finally:
        os.close(fd)
