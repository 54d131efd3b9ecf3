"""A tree's folders and its small files. Blocking calls, made on the root's own threads only, never on the event loop.

Every file is opened relative to an open folder, without following links, closed on exec, 0600 whatever the umask.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TypeVar

from kvtier.errors import RootError
from kvtier_fs.files.places import bucket_name, leaves, occupied
from kvtier_fs.files.records import (
    SUPERBLOCK_COPY_BYTES,
    Tree,
    decode_epoch,
    decode_tree,
    encode_epoch,
    encode_tree,
)
from kvtier_fs.folder import LOCK_NAME, SUPERBLOCK_NAME, RootFolder
from kvtier_fs.options import FSOptions
from kvtier_fs.superblock import foreign_version

EPOCHS_NAME = "epochs"
LEASES_NAME = "leases"
_SMALL_BYTES_MAX = 1 << 16
_STALE_RETRIES = 3
_LOCK_IS_ELSEWHERE = (errno.EAGAIN, errno.EACCES, errno.ENOENT)
"""Somebody holds the lock (EACCES where locks go by way of fcntl), or its file was removed just now."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_PLAIN_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

T = TypeVar("T")


class Busy(Enum):
    """Somebody else holds the lock."""

    BUSY = "busy"


def let_go(fd: int) -> None:
    """Close what was only read, or is on the disk already, or is given up: that closing fails says nothing then."""
    try:
        os.close(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            raise


def open_plain(folder_fd: int, name: str, flags: int) -> int:
    """Open a plain file in an open folder. Raises OSError; ELOOP for anything that is no plain file."""
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=folder_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ELOOP, "is no plain file")
        if flags & os.O_CREAT and stat.S_IMODE(status.st_mode) != 0o600:
            os.fchmod(fd, 0o600)
    except OSError:
        let_go(fd)
        if flags & os.O_EXCL:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder_fd)
        raise
    return fd


def read_small(folder_fd: int, name: str) -> bytes:
    """A small file's bytes; empty if there is none. Raises OSError.

    Another host may replace it between its opening and the reading; then it is opened again, a few times.
    """
    for _ in range(_STALE_RETRIES):
        try:
            return _read_small(folder_fd, name)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return _read_small(folder_fd, name)


def _read_small(folder_fd: int, name: str) -> bytes:
    try:
        fd = open_plain(folder_fd, name, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(fd, _SMALL_BYTES_MAX, 0)
    finally:
        let_go(fd)


def names_in(folder_fd: int) -> list[str]:
    """The names in an open folder, each once. Raises OSError.

    Through a descriptor of its own: all copies of one share the place a listing has come to, so that two threads that
    list the same open folder would each find some names missing and others twice.
    """
    fd = os.open(".", _FOLDER, dir_fd=folder_fd)
    try:
        return os.listdir(fd)
    finally:
        let_go(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write a small file from its beginning. Raises OSError."""
    view, at = memoryview(data), 0
    while at < len(view):
        at += os.pwrite(fd, view[at:], at)


def make_folder(folder_fd: int, name: str) -> int:
    """Open a folder in an open folder, made if it is not there. Raises OSError."""
    with suppress(FileNotFoundError):
        return os.open(name, _FOLDER, dir_fd=folder_fd)
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder_fd)
    fd = os.open(name, _FOLDER, dir_fd=folder_fd)
    try:
        os.fchmod(fd, 0o700)
    except OSError:
        let_go(fd)
        raise
    return fd


def with_lock(folder_fd: int, work: Callable[[], T]) -> T | Busy:
    """Do some work while holding a folder's lock file. BUSY, with nothing done, if somebody else holds it."""
    fd = open_plain(folder_fd, LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            named = os.stat(LOCK_NAME, dir_fd=folder_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in _LOCK_IS_ELSEWHERE:
                return Busy.BUSY
            raise
        if named.st_ino != os.fstat(fd).st_ino:
            return Busy.BUSY  # the file was replaced under us: the lock that counts is another one
        try:
            return work()
        finally:
            with suppress(OSError):  # a child forked meanwhile has this descriptor too, so closing ours is not enough
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        let_go(fd)


class TreeFolder:
    """The folders of one root, open. Raises RootError for what a person must put right, OSError for the rest."""

    def __init__(self, path: str, options: FSOptions) -> None:
        self.path = path
        # A tier that several hosts share lies on a network file system by intention.
        self._root = RootFolder(path, options.model_copy(update={"allow_network_fs": True}))
        self._guard = threading.Lock()
        self._left = False
        self._buckets: dict[int, int] = {}
        self._made: set[int] = set()
        self._epochs_fd = -1
        self.leases_fd = -1
        self.tree: Tree

    @property
    def fd(self) -> int:
        """The open root."""
        return self._root.fd

    def refusal(self, error: OSError) -> RootError:
        """What an error of the operating system means to whoever configured this root."""
        return self._root.refusal(error)

    def enter(self) -> bool:
        """Open the root, creating it where that is allowed. False if it is not there."""
        return self._root.enter()

    def leave(self) -> None:
        """Close everything. Idempotent; no other call may be under way."""
        with self._guard:
            self._left = True
            held = [fd for fd in (*self._buckets.values(), self._epochs_fd, self.leases_fd) if fd >= 0]
            self._buckets, self._made = {}, set()
            self._epochs_fd = self.leases_fd = -1
            for fd in held:
                let_go(fd)
        self._root.leave()

    def look(self) -> Tree | None:
        """The tree as its superblock states it; None if there is none yet. Raises RootError if it is not for us."""
        data = read_small(self.fd, SUPERBLOCK_NAME)
        if not data:
            return None
        tree = decode_tree(data)
        if tree is None:
            raise RootError(self.path, self._why_not(data))
        return tree

    @staticmethod
    def _why_not(data: bytes) -> str:
        if _is_slab(data):
            return "holds a tier of layout slab; use another folder or layout: slab"
        version = foreign_version(data)
        if version is not None and version > 1000:
            return f"holds format version {version - 1000} of layout files, which this release does not know"
        return "the superblock is damaged; stop whoever uses this folder and empty it"

    def make(self, tree: Tree, temporary: str) -> Tree:
        """Write the superblock, by way of a temporary, unless somebody was faster. Returns the tree that counts."""
        try:
            fd = open_plain(self.fd, temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                write_all(fd, encode_tree(tree))
                os.fsync(fd)
            finally:
                let_go(fd)
            self._publish_once(temporary)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=self.fd)
        os.fsync(self.fd)
        made = self.look()
        if made is None:
            raise RootError(self.path, "the superblock vanished while it was made; is somebody emptying the folder?")
        return made

    def _publish_once(self, temporary: str) -> None:
        try:
            os.link(temporary, SUPERBLOCK_NAME, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if with_lock(self.fd, lambda: self._rename_once(temporary)) is Busy.BUSY:
                raise RootError(self.path, "somebody else is making this root right now; try again") from error

    def _rename_once(self, temporary: str) -> None:
        if self.look() is None:
            os.rename(temporary, SUPERBLOCK_NAME, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def join(self) -> None:
        """Open the folders every process needs, made where they are not there. Raises OSError."""
        with self._guard:
            self._check_not_left()
            if self._epochs_fd < 0:
                self._epochs_fd = make_folder(self.fd, EPOCHS_NAME)
            if self.leases_fd < 0:
                self.leases_fd = make_folder(self.fd, LEASES_NAME)

    def settle(self, tree: Tree) -> None:
        """Join, and know how the root is laid out. Raises OSError."""
        self.join()
        self.tree = tree

    def _check_not_left(self) -> None:
        if self._left:
            raise OSError(errno.EBADF, "the folder was left")

    def bucket(self, number: int) -> int:
        """The open folder of a bucket. Raises OSError; FileNotFoundError if nobody made it yet."""
        with self._guard:
            self._check_not_left()
            fd = self._buckets.get(number, -1)
            if fd < 0:
                fd = self._buckets[number] = os.open(bucket_name(number), _FOLDER, dir_fd=self.fd)
            return fd

    def make_bucket(self, number: int) -> int:
        """The open folder of a bucket, made with the folders inside it where they are not there. Raises OSError."""
        with self._guard:
            self._check_not_left()
            fd = self._buckets.get(number, -1)
            if number in self._made:
                return fd
            if fd < 0:
                fd = self._buckets[number] = make_folder(self.fd, bucket_name(number))
            for leaf in leaves(self.tree):
                let_go(make_folder(fd, leaf))
            self._made.add(number)
            return fd

    @contextmanager
    def leaf(self, bucket: int, name: str) -> Iterator[int]:
        """The open folder inside a bucket that a block lies in. Raises OSError."""
        folder = self.bucket(bucket)
        if not name:
            yield folder
            return
        fd = os.open(name, _FOLDER, dir_fd=folder)
        try:
            yield fd
        finally:
            let_go(fd)

    def epoch(self, namespace: bytes) -> int | None:
        """The epoch of a namespace now; None if its file is missing, damaged or no plain file, so that nothing counts.

        Raises OSError: a disk that cannot be read says nothing of a reset.
        """
        try:
            return decode_epoch(read_small(self._epochs_fd, namespace.hex()), namespace)
        except OSError as error:
            if error.errno in _NO_PLAIN_FILE:
                return None
            raise

    def begin_epoch(self, namespace: bytes, temporary: str) -> int | Busy:
        """The epoch of a namespace, its file made if there is none, durable when this returns.

        Raises RootError if it is damaged, OSError.
        """
        if read_small(self._epochs_fd, namespace.hex()):
            epoch = self._sound_epoch(namespace)
            os.fsync(self._epochs_fd)  # whoever raised it may not have come to this yet
            return epoch
        return self.raise_epoch(namespace, 0, temporary)

    def _sound_epoch(self, namespace: bytes) -> int:
        epoch = decode_epoch(read_small(self._epochs_fd, namespace.hex()), namespace)
        if epoch is None:
            name = f"{EPOCHS_NAME}/{namespace.hex()}"
            raise RootError(self.path, f"{name} is damaged, so no block of this namespace counts; empty the folder")
        return epoch

    def raise_epoch(self, namespace: bytes, epoch: int, temporary: str) -> int | Busy:
        """Make a namespace's epoch at least `epoch`, durably when this returns. Returns the one that counts.

        BUSY, with nothing done, if another process is at it. Raises RootError if the file is damaged, OSError.
        """
        return with_lock(self._epochs_fd, lambda: self._raise_epoch(namespace, epoch, temporary))

    def _raise_epoch(self, namespace: bytes, epoch: int, temporary: str) -> int:
        if read_small(self._epochs_fd, namespace.hex()):
            stored = self._sound_epoch(namespace)
            if stored >= epoch:
                os.fsync(self._epochs_fd)  # whoever raised it may not have come to this yet
                return stored
        self.publish(self._epochs_fd, namespace.hex(), encode_epoch(namespace, epoch), temporary)
        return epoch

    def publish(self, folder_fd: int, name: str, data: bytes, temporary: str) -> None:
        """Put a small file in place in one step, durably when this returns. Raises OSError."""
        fd = open_plain(folder_fd, temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            write_all(fd, data)
            os.fsync(fd)
            os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder_fd)
            raise
        finally:
            let_go(fd)
        os.fsync(folder_fd)

    def small_folders(self) -> tuple[int, ...]:
        """The open folders of everything that lies in no bucket."""
        return self.fd, self._epochs_fd, self.leases_fd

    def small_bytes(self) -> int:
        """Bytes of disk of everything in this root that lies in no bucket. Raises OSError."""
        total = occupied(os.fstat(self.fd))
        for folder_fd in self.small_folders():
            for name in names_in(folder_fd):
                with suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                    total += occupied(status) if not stat.S_ISDIR(status.st_mode) else 0
        return total + occupied(os.fstat(self._epochs_fd)) + occupied(os.fstat(self.leases_fd))


def _is_slab(data: bytes) -> bool:
    return len(data) >= SUPERBLOCK_COPY_BYTES and data[24:28] == (1).to_bytes(4, "little")
