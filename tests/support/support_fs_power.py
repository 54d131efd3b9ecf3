"""Power loss on paper: every write, flush and rename of a root is recorded; any subset of what was not flushed is lost.

Works on 512-byte sectors. Entries of the folder (created, removed, renamed) are lost one by one as well, in any
combination, unless the folder was flushed after them. That is harsher than a journalling file system.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from support_fs_engine import FaultyEngine

from kvtier_fs import FSOptions
from kvtier_fs.io.contract import IOKind, IORequest
from kvtier_fs.local.folder import SlabFolder
from kvtier_fs.local.opening import Hooks

SECTOR = 512
EXHAUSTIVE_UP_TO = 16
"""Images of one moment: all of them up to this many, else this many drawn at random."""
TEXTS = ("lock", "manifest-")


@dataclass(frozen=True)
class Event:
    """One change. `what` is write, size, sync, dirsync, link (a name leads to a file) or unlink."""

    what: str
    file: int = -1
    name: str = ""
    at: int = 0
    data: bytes = b""


@dataclass
class Recorder:
    """What happened to one root since it was last whole on the disk. `syncs`: False forgets that flushes happened."""

    root: Path
    syncs: bool = True
    events: list[Event] = field(default_factory=list)
    base: dict[str, bytes] = field(default_factory=dict)
    _files: dict[str, int] = field(default_factory=dict)
    _fds: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.root.exists():
            self.base = {path.name: path.read_bytes() for path in sorted(self.root.iterdir())}
        self._files = {name: number for number, name in enumerate(self.base)}

    def add(self, event: Event) -> None:
        with self._lock:
            if event.what not in ("sync", "dirsync") or self.syncs:
                self.events.append(event)

    def opened(self, name: str, fd: int, existed: bool) -> None:
        with self._lock:
            if not existed:
                self._files[name] = len(self.base) + len(self.events)
                self.events.append(Event("link", self._files[name], name))
            self._fds[fd] = self._files[name]

    def file_of(self, fd: int) -> int:
        return self._fds[fd]

    def moved(self, old: str, new: str) -> None:
        self._files[new] = self._files.pop(old)
        self.add(Event("link", self._files[new], new))
        self.add(Event("unlink", name=old))

    def hooks(self) -> Hooks:
        """What a tier needs to be recorded."""
        return Hooks(folder=lambda path, options: _Folder(path, options, self), engine=lambda root: _Engine(self))

    def images(self, moment: int, rng: random.Random) -> Iterator[dict[str, bytes]]:
        """What may be on the disk if the power fails after `moment` events, every file with its bytes."""
        durable, pending = self._split(moment)
        atoms = [atom for event in pending for atom in _atoms(event)]
        atoms = [atom for atom in atoms if self._image([*durable, atom]) != self._image(durable)] or atoms[:1]
        if 2 ** len(atoms) <= EXHAUSTIVE_UP_TO:
            choices: list[Sequence[bool]] = list(product((False, True), repeat=len(atoms)))
        else:
            choices = [[False] * len(atoms), [True] * len(atoms)]
            choices += [[rng.random() < 0.5 for _ in atoms] for _ in range(EXHAUSTIVE_UP_TO - 2)]
        seen = set()
        for kept in choices:
            image = self._image([*durable, *(atom for atom, keep in zip(atoms, kept, strict=True) if keep)])
            mark = hash(tuple(sorted(image.items())))
            if mark not in seen:
                seen.add(mark)
                yield image

    def _split(self, moment: int) -> tuple[list[Event], list[Event]]:
        """The events of a moment that were flushed, and the others, both in order."""
        happened = self.events[:moment]
        last_sync = {event.file: number for number, event in enumerate(happened) if event.what == "sync"}
        last_dirsync = max((number for number, event in enumerate(happened) if event.what == "dirsync"), default=-1)
        durable, pending = [], []
        for number, event in enumerate(happened):
            limit = last_dirsync if event.what in ("link", "unlink") else last_sync.get(event.file, -1)
            (durable if number < limit else pending).append(event)
        return durable, pending

    def _image(self, events: Sequence[Event]) -> dict[str, bytes]:
        names = {name: number for number, name in enumerate(self.base)}
        contents = {number: bytearray(self.base[name]) for name, number in names.items()}
        for event in events:
            if event.what == "link":
                names[event.name] = event.file
            elif event.what == "unlink":
                names.pop(event.name, None)
            elif event.what in ("write", "size"):
                data = contents.setdefault(event.file, bytearray())
                end = event.at + len(event.data)
                data.extend(bytes(max(0, end - len(data))))
                data[event.at : end] = event.data
        return {name: bytes(contents.get(number, b"")) for name, number in names.items()}


def _atoms(event: Event) -> Iterator[Event]:
    """The parts of an event that are lost or kept each on its own."""
    if event.what != "write":
        if event.what in ("link", "unlink", "size"):
            yield event
        return
    for start in range(0, len(event.data), SECTOR):
        yield Event("write", event.file, "", event.at + start, event.data[start : start + SECTOR])


class _Folder(SlabFolder):
    def __init__(self, path: str, options: FSOptions, recorder: Recorder) -> None:
        super().__init__(path, options)
        self._recorder = recorder

    def open_file(self, name: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        existed = os.path.lexists(os.path.join(self.path, name))
        fd = super().open_file(name, flags)
        self._recorder.opened(name, fd, existed)
        return fd

    def write_at(self, fd: int, data: bytes, at: int) -> None:
        self._recorder.add(Event("write", self._recorder.file_of(fd), "", at, bytes(data)))
        super().write_at(fd, data, at)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._recorder.add(Event("dirsync") if fd == self.fd else Event("sync", self._recorder.file_of(fd)))

    def unlink(self, name: str) -> None:
        super().unlink(name)
        self._recorder.add(Event("unlink", name=name))

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._recorder.moved(old, new)


class _Engine(FaultyEngine):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def submit(self, requests: Sequence[IORequest]) -> None:
        for request in requests:
            if request.kind is IOKind.WRITE:
                data = b"".join(request.buffers)
                self._recorder.add(Event("write", self._recorder.file_of(request.fd), "", request.offset, data))
        super().submit(requests)


def put(image: dict[str, bytes], root: Path) -> None:
    """Make a root of an image."""
    root.mkdir(mode=0o700)
    for name, data in image.items():
        if not name.startswith(TEXTS):
            (root / name).write_bytes(data)
            (root / name).chmod(0o600)
