"""The meeting of processes that cannot pass a descriptor: two names in /dev/shm that exist until all have mapped.

`kvtier-<user>-<digest>.control` is the claim. It is built without a name, complete and with its *life lock* (byte 0)
held by the creator, and only then linked into the directory. So a name always leads to a claimed region, and a life
lock once free stays free: a name whose life lock is free is a leftover of a dead creator, and any process of the user
may remove it.
`kvtier-<user>-<digest>.rows` is linked after the claim and removed before it, never the other way round.

Counting in, unlinking and sweeping happen under the *gate* (byte 1 of the same file) and only while the name still
leads to that very file, so no process removes a successor's name. The locks are open file description locks: the kernel
drops them when their process dies, however it dies. A child made by a bare fork() shares them until it ends too.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice

from kvtier.errors import RegionError
from kvtier.tier.contract import Clock

FILE_MODE = 0o600
POLL_SECONDS = 0.005
WITHDRAW_SECONDS = 1.0
NAMES_MAX = 1 << 16
"""Names in the folder that one sweep lists: 0.1 s at most."""
CLAIMS_MAX = 256
"""Names like ours that one sweep opens: anyone may make such names."""
SWEEP_SECONDS = 1.0

_LIFE_LOCK = 0
_GATE = 1
_FLOCK = "hhqqi4x"
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Patience:
    """The limit of waiting for another process: until `deadline` on `clock`, or until `stop` is set."""

    clock: Clock
    deadline: float
    stop: threading.Event

    def at_most(self, seconds: float) -> Patience:
        """The same for work that may take so long, and no longer."""
        return replace(self, deadline=min(self.deadline, self.clock() + seconds))

    @property
    def over(self) -> bool:
        """True at the deadline, or when stopped."""
        return self.stop.is_set() or self.clock() >= self.deadline

    def check(self) -> None:
        """Raise RegionError when stopped."""
        if self.stop.is_set():
            raise RegionError("opening the region was given up before it was ready")

    def pause(self, waiting_for: str) -> None:
        """Sleep one poll. Raises RegionError at the deadline or when stopped."""
        self.stop.wait(POLL_SECONDS)
        self.check()
        if self.clock() >= self.deadline:
            raise RegionError(f"gave up waiting for {waiting_for}; is the process that created the region stuck?")


@dataclass(frozen=True, slots=True)
class Names:
    """The two paths of a region. They show nothing of the engine but its user and a digest."""

    directory: str
    stem: str

    @staticmethod
    def of(directory: str, engine_id: str) -> Names:
        """The names for an engine id; two users never share one."""
        text = f"kvtier region\0{os.geteuid()}\0{engine_id}"
        return Names(directory, f"kvtier-{os.geteuid()}-{hashlib.sha256(text.encode()).hexdigest()[:32]}")

    @staticmethod
    def own(directory: str) -> list[Names]:
        """The names under which there may be a region of this user, from a listing with bounds. Raises OSError.

        Names of others are not even looked at: there may be any number of them.
        """
        control = re.compile(rf"(kvtier-{os.geteuid()}-[0-9a-f]{{32}})\.control")
        with os.scandir(directory) as entries:
            found = (control.fullmatch(entry.name) for entry in islice(entries, NAMES_MAX))
            return [Names(directory, match[1]) for match in islice(filter(None, found), CLAIMS_MAX)]

    @property
    def control(self) -> str:
        return os.path.join(self.directory, f"{self.stem}.control")

    @property
    def rows(self) -> str:
        return os.path.join(self.directory, f"{self.stem}.rows")


class Claim:
    """An open control file: its locks and its names. The descriptor is closed by `close`."""

    def __init__(self, fd: int, names: Names) -> None:
        self.fd = fd
        self.names = names

    def close(self) -> None:
        """Drop every lock this process holds on the claim and close it. Idempotent."""
        if self.fd >= 0:
            # mappings hold duplicates of the descriptor, so closing alone would keep the locks
            _set_lock(self.fd, _LIFE_LOCK, 2, fcntl.F_UNLCK)
            os.close(self.fd)
            self.fd = -1

    def alive(self) -> bool:
        """True while another process, the creator, holds the life lock."""
        answer = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, _LIFE_LOCK, 1))
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)

    def named(self) -> bool:
        """True while the name leads to this very file."""
        try:
            found = os.stat(self.names.control, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self.fd))

    @contextmanager
    def gate(self, patience: Patience) -> Iterator[None]:
        """Hold the gate; one process at a time. Raises RegionError when it cannot be had in time."""
        while not _set_lock(self.fd, _GATE, 1, fcntl.F_WRLCK):
            patience.pause("another process to finish joining the region")
        try:
            yield
        finally:
            _set_lock(self.fd, _GATE, 1, fcntl.F_UNLCK)

    def unlink(self) -> None:
        """Remove both names, rows first. Only behind the gate; does nothing if the name leads elsewhere by now."""
        if self.named():
            remove_own(self.names.rows)
            remove_own(self.names.control)

    def withdraw(self) -> None:
        """Remove the names and close the claim, as its creator leaves or fails.

        A gate that stays busy belongs to a peer that stopped while joining; then the next start sweeps the names.
        """
        patience = Patience(time.monotonic, time.monotonic() + WITHDRAW_SECONDS, threading.Event())
        try:
            with suppress(RegionError), self.gate(patience):
                self.unlink()
        finally:
            self.close()

    def sweep(self, patience: Patience) -> None:
        """Remove the names if the creator is dead."""
        with self.gate(patience):
            if not self.alive():
                self.unlink()


def open_claim(names: Names) -> Claim | None:
    """Open an existing claim, or None if there is none.

    Raises RegionError for anything that is not a plain file of this user alone: it is neither read nor removed.
    """
    fd = _open(names.control)
    return None if fd is None else Claim(fd, names)


def new_file(directory: str, size_bytes: int) -> int:
    """A file of this size without a name, in `directory`; it vanishes with its last descriptor unless linked."""
    try:
        fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise RegionError(f"cannot create shared memory in {directory}: {error.strerror}") from error
    try:
        os.fchmod(fd, FILE_MODE)
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        os.close(fd)
        raise RegionError(f"cannot size shared memory in {directory}: {error.strerror}") from error
    return fd


def publish(fd: int, names: Names) -> Claim | None:
    """Take the life lock of a complete control file and give it its name; None if another process was first."""
    if not _set_lock(fd, _LIFE_LOCK, 1, fcntl.F_WRLCK):
        raise RegionError("a file without a name is locked by another process")
    return Claim(fd, names) if _link(fd, names.control) else None


def link_rows(fd: int, names: Names) -> None:
    """Give the rows file its name. The claim is held, so a file in the way is a leftover: removed if it is ours.

    Raises RegionError if what is in the way is foreign.
    """
    if not _link(fd, names.rows):
        remove_own(names.rows)
        if not _link(fd, names.rows):
            raise RegionError(_foreign(names.rows, "is in the way of this region's rows"))


def open_rows(names: Names, identity: tuple[int, int], size_bytes: int) -> int:
    """Open the rows file a ready claim names by device and inode. Raises RegionError if it is another file."""
    fd = _open(names.rows, (*identity, size_bytes))
    if fd is None:
        raise RegionError(_foreign(names.rows, os.strerror(errno.ENOENT)))
    return fd


def sweep_leftovers(directory: str, patience: Patience) -> None:
    """Remove the regions of this user in `directory` whose creator is dead, as far as a second suffices. What is
    foreign or alive is left alone."""
    with suppress(OSError):
        patience = patience.at_most(SWEEP_SECONDS)
        for names in Names.own(directory):
            if patience.over:
                return
            with suppress(RegionError):
                _sweep(names, patience)


def _sweep(names: Names, patience: Patience) -> None:
    claim = open_claim(names)
    if claim is not None:
        with closing(claim):
            if not claim.alive():
                claim.sweep(patience)


def remove_own(path: str) -> None:
    """Unlink a plain file of this user; leave anything else, or nothing, as it is."""
    with suppress(FileNotFoundError):
        found = os.stat(path, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            os.unlink(path)


def _open(path: str, expected: tuple[int, int, int] | None = None) -> int | None:
    """Open a plain file of this user alone; None if there is none. `expected` is its device, inode and size.

    Raises RegionError for any other file.
    """
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RegionError(_foreign(path, error.strerror or "cannot be opened")) from error
    found = os.fstat(fd)
    reason = _suspicion(found)
    if not reason and expected not in (None, (found.st_dev, found.st_ino, found.st_size)):
        reason = "is not the file the region was created with"
    if reason:
        os.close(fd)
        raise RegionError(_foreign(path, reason))
    return fd


def _suspicion(found: os.stat_result) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "is not a plain file"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    if stat.S_IMODE(found.st_mode) != FILE_MODE:
        return f"has mode {stat.S_IMODE(found.st_mode):04o} where {FILE_MODE:04o} is expected"
    return ""


def _foreign(path: str, reason: str) -> str:
    return f"{path} {reason}; it is not used and not removed: remove it yourself or give the engine another engine_id"


def _link(fd: int, path: str) -> bool:
    """Give an unnamed file a name, atomically; False if the name is taken."""
    try:
        # without a directory descriptor Python calls link(2), which does not follow the link; linkat(2) does. For an
        # absolute path the kernel ignores which descriptor it is
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise RegionError(f"cannot create {path}: {error.strerror}") from error
    return True


def _flock(kind: int, start: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)


def _set_lock(fd: int, start: int, length: int, kind: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(kind, start, length))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise RegionError(f"cannot lock the region's control file: {error.strerror}") from error
    return True
