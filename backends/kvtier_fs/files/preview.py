"""What the tier would be on this machine, found without opening it: for `kvtier check`."""

from __future__ import annotations

import os

from kvtier.errors import GeometryError, RootError
from kvtier.geometry import Geometry
from kvtier.registry import Preview
from kvtier_fs.files.folder import TreeFolder, let_go
from kvtier_fs.files.opening import lay_out
from kvtier_fs.files.records import Tree
from kvtier_fs.io.probe import DirectProbe, probe_direct
from kvtier_fs.io.uring import probe_uring
from kvtier_fs.opening import MISSING
from kvtier_fs.options import FSOptions


def preview(options: FSOptions, geometry: Geometry, look: bool) -> Preview:
    """The mode, and what would go wrong. Without `look` it is arithmetic over the options alone.

    With it the root is looked at, briefly and blocking: nothing is created, nothing is written but a nameless file.
    """
    path, problems, notes = options.roots[0], [], []
    stored, probe = None, DirectProbe(False)
    if look:
        try:
            stored, probe, note = _look(path, options)
            notes += [note] if note else []
        except RootError as error:
            problems.append(str(error))
    try:
        lay_out(path, stored, options, geometry, probe.offset_alignment)
    except (GeometryError, RootError) as error:
        problems.append(str(error))
    engine = "threads"
    if look and options.io_engine != "threads":
        reason = probe_uring()
        engine = "threads" if reason else "io_uring"
        if reason and options.io_engine == "io_uring":
            problems.append(f"io_engine is io_uring but {reason}; choose auto or threads")
        elif reason:
            notes.append(f"{reason}; threads would serve instead")
    mode = f"files, {engine}, {'direct' if probe.direct else 'buffered'}" if look else ""
    return Preview(capacity_bytes=options.capacity, mode=mode, notes=tuple(notes), problems=tuple(problems))


def _look(path: str, options: FSOptions) -> tuple[Tree | None, DirectProbe, str]:
    """The root's tree if it has one, its disk, a note. Raises RootError for what would keep it from opening."""
    folder = TreeFolder(path, options.model_copy(update={"create": False}))
    try:
        if not folder.enter():
            return None, _look_beside(path, options), f"{path}: will be created"
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder.fd, effective_ids=True):
            raise RootError(path, "no permission; make this user its owner with mode 0700")
        return folder.look(), _probe(path, folder.fd, options), ""
    except OSError as error:
        raise folder.refusal(error) from error
    finally:
        folder.leave()


def _look_beside(path: str, options: FSOptions) -> DirectProbe:
    """Judge a root that is not there by the folder it would be created in."""
    parent = os.path.dirname(path)
    if not options.create or not os.path.isdir(parent):
        raise RootError(path, MISSING)
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        raise RootError(path, "cannot be created (no permission); create it for this user")
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _probe(path, fd, options)
    finally:
        let_go(fd)


def _probe(path: str, folder_fd: int, options: FSOptions) -> DirectProbe:
    probe = probe_direct(folder_fd) if options.direct != "off" else DirectProbe(False)
    if options.direct == "required" and not probe.direct:
        raise RootError(path, f"direct I/O is required but {probe.reason}; choose another disk or direct: auto")
    return probe
