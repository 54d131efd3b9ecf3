"""A tree's folders and its small files. Blocking calls, made on the root's own threads only, never on the event loop.

Every file is opened relative to an open folder, without following links, closed on exec, 0600 whatever the umask.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TypeVar

from kvtier.aio.process_lock import keep_from_children, share_with_children
from kvtier.errors import RootError
from kvtier.tier.stack_files import MODEL_FILE
from kvtier_fs.format.superblock import foreign_version
from kvtier_fs.format.tree_records import (
    FILES_VERSION,
    SUPERBLOCK_COPY_BYTES,
    Tree,
    decode_epoch,
    decode_tree,
    encode_epoch,
    encode_tree,
    other_epoch_version,
)
from kvtier_fs.options import SharedFSOptions
from kvtier_fs.roots.disk import unknown_version
from kvtier_fs.roots.folder import (
    LOCK_NAME,
    MANIFEST_NAME,
    SUPERBLOCK_NAME,
    GuardedFolder,
    close_quietly,
    plain_file,
    write_all,
)
from kvtier_fs.roots.private_tree import names_in
from kvtier_fs.shared.paths import BUCKET_NAME, TEMPORARY_NAME, bucket_name, leaves, occupied

EPOCHS_NAME = "epochs"
LEASES_NAME = "leases"
_SMALL_BYTES_MAX = 1 << 16
_STALE_RETRIES = 3
_LOCK_IS_ELSEWHERE = (errno.EAGAIN, errno.EACCES, errno.ENOENT)
"""The lock is taken (EACCES where locks are made by fcntl), or its file was removed just now."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NO_PLAIN_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
"""Errors that mean: evicted, here or on another host, also while it was open."""

T = TypeVar("T")


class LockBusy(Enum):
    """Another process holds the lock."""

    BUSY = "busy"


@contextmanager
def vanished(errors: Collection[int] = GONE) -> Iterator[None]:
    """For work on what any process may remove or replace at any moment: these errors only end it."""
    try:
        yield
    except OSError as error:
        if error.errno not in errors:
            raise


def read_small(folder_fd: int, name: str) -> bytes:
    """A small file's bytes; empty if there is none. Raises OSError.

    Another host may replace it between its opening and the reading; then it is opened again, a few times.
    """
    for left in range(_STALE_RETRIES, -1, -1):
        try:
            with plain_file(folder_fd, name) as fd:
                return os.pread(fd, _SMALL_BYTES_MAX, 0)
        except FileNotFoundError:
            break
        except OSError as error:
            if error.errno != errno.ESTALE or not left:
                raise
    return b""


def write_new(folder_fd: int, name: str, data: bytes) -> None:
    """Write a small file that does not exist yet, durably. Raises OSError."""
    with plain_file(folder_fd, name, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        write_all(fd, data)
        os.fsync(fd)


def make_folder(folder_fd: int, name: str) -> int:
    """Open a folder in an open folder, made if it is not there. Raises OSError."""
    with suppress(FileNotFoundError):
        return os.open(name, _FOLDER, dir_fd=folder_fd)
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder_fd)
    fd = os.open(name, _FOLDER, dir_fd=folder_fd)
    try:
        os.fchmod(fd, 0o700)
    except Exception:
        close_quietly(fd)
        raise
    return fd


def with_lock(folder_fd: int, work: Callable[[], T]) -> T | LockBusy:
    """Do some work while holding a folder's lock file. BUSY, with nothing done, if another process holds it.

    A child that is forked meanwhile does not keep the lock, also when this process is killed.
    """
    with plain_file(folder_fd, LOCK_NAME, os.O_RDWR | os.O_CREAT) as fd:
        keep_from_children(fd)
        try:
            return work() if _lock_now(folder_fd, fd) else LockBusy.BUSY
        finally:
            try:
                with suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a child that C code forked has it too
            finally:
                share_with_children(fd)


def _lock_now(folder_fd: int, fd: int) -> bool:
    """Lock a folder's lock file; False if another process holds it or has replaced it after it was opened."""
    with vanished(_LOCK_IS_ELSEWHERE):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        named = os.stat(LOCK_NAME, dir_fd=folder_fd, follow_symlinks=False)
        return named.st_ino == os.fstat(fd).st_ino
    return False


class TreeFolder(GuardedFolder):
    """The folders of one root, open. Raises RootError for what an operator must correct, OSError for the rest.

    `epochs_fd` and `leases_fd` are the open folders of epochs and of leases, -1 where there is none. `tree` is how the
    root is laid out, once that is known.
    """

    def __init__(self, path: str, options: SharedFSOptions) -> None:
        super().__init__(path, options)
        self._open: dict[str, int] = {}
        self._made: set[int] = set()
        self.epochs_fd = -1
        self.leases_fd = -1
        self.tree: Tree

    def _close_files(self) -> None:
        while self._open:
            _, fd = self._open.popitem()
            close_quietly(fd)
        self._made = set()
        self.epochs_fd = self.leases_fd = -1

    def _opened(self, name: str, make: bool) -> int:
        """A folder in the root, which stays open until `leave`. Raises OSError, also if it is missing and not made."""
        with self._guard:
            self._check_not_left()
            if name not in self._open:
                self._open[name] = make_folder(self.fd, name) if make else os.open(name, _FOLDER, dir_fd=self.fd)
            return self._open[name]

    def read_tree(self) -> Tree | None:
        """The tree as its superblock states it; None if there is none yet. Raises RootError if it is unusable."""
        data = read_small(self.fd, SUPERBLOCK_NAME)
        if not data:
            return None
        tree = decode_tree(data)
        if tree is None:
            raise self._refusal_of(data)
        return tree

    def _refusal_of(self, data: bytes) -> RootError:
        if _is_slab(data):
            return RootError(self.path, "holds a tier of type fs; use another folder or type: fs")
        version = foreign_version(data)
        if version is not None and version > 1000 and version != FILES_VERSION:
            return unknown_version(self.path, version - 1000, "files")
        return RootError(self.path, "the superblock is damaged; stop all processes that use this folder and empty it")

    def make(self, tree: Tree, temporary: str) -> Tree:
        """Publish a superblock, unless another process has made one. Returns the tree that counts."""
        try:
            write_new(self.fd, temporary, encode_tree(tree))
            self._publish_once(temporary)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=self.fd)
        os.fsync(self.fd)
        made = self.read_tree()
        if made is None:
            raise RootError(
                self.path, "the superblock vanished while it was made; is another process emptying the folder?"
            )
        return made

    def _publish_once(self, temporary: str) -> None:
        try:
            os.link(temporary, SUPERBLOCK_NAME, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if with_lock(self.fd, lambda: self._rename_once(temporary)) is LockBusy.BUSY:
                raise RootError(self.path, "another process is making this root right now; try again") from error

    def _rename_once(self, temporary: str) -> None:
        if self.read_tree() is None:
            os.rename(temporary, SUPERBLOCK_NAME, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def join(self, make: bool = True) -> None:
        """Open the folders of epochs and of leases. With `make` those that are missing are made. Raises OSError."""
        self.epochs_fd = self._small_folder(EPOCHS_NAME, make)
        self.leases_fd = self._small_folder(LEASES_NAME, make)

    def _small_folder(self, name: str, make: bool) -> int:
        with vanished(() if make else _NO_FOLDER):
            return self._opened(name, make)
        return -1

    def buckets(self) -> list[int]:
        """The numbers of the buckets that exist, in order. Raises OSError."""
        matches = map(BUCKET_NAME.fullmatch, sorted(names_in(self.fd)))
        return [number for match in matches if match and (number := int(match[1], 16)) < self.tree.buckets]

    def bucket(self, number: int) -> int:
        """The open folder of a bucket. Raises OSError; FileNotFoundError if it was not made yet."""
        return self._opened(bucket_name(number), make=False)

    def make_bucket(self, number: int) -> int:
        """The open folder of a bucket, made with the folders inside it where they are not there. Raises OSError."""
        fd = self._opened(bucket_name(number), make=True)
        with self._guard:
            self._check_not_left()
            for leaf in leaves(self.tree) if number not in self._made else ():
                close_quietly(make_folder(fd, leaf))
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
            close_quietly(fd)

    def epoch(self, namespace: bytes) -> int | None:
        """The epoch of a namespace now; None if its file is missing, damaged or no plain file, so that nothing counts.

        Raises OSError: what cannot be read does not mean a reset.
        """
        with vanished(_NO_PLAIN_FILE):
            return decode_epoch(read_small(self.epochs_fd, namespace.hex()), namespace)
        return None

    def has_lost_epoch(self, namespace: bytes) -> bool:
        """True if what is in the place of a namespace's epoch states none: a reset may have been stated there.

        Raises RootError for the epoch of another release, OSError.
        """
        name, data = namespace.hex(), b""
        try:
            os.stat(name, dir_fd=self.epochs_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if self.epoch(namespace) is not None:
            return False
        with vanished(_NO_PLAIN_FILE):
            data = read_small(self.epochs_fd, name)
        version = other_epoch_version(data)
        if version is not None:
            raise unknown_version(self.path, version - 1000, "files")
        return True

    def swap_epoch(self, namespace: bytes, held: int | None, epoch: int, temporary: str) -> int | LockBusy | None:
        """Make a namespace's file state `epoch` if it states `held`; None: if it is missing, or states none.

        Returns what it states now, durable when this returns. BUSY, with nothing done, if another process holds the
        lock. Raises OSError.
        """
        stated = self.durable_epoch(namespace)
        if stated != held:
            return stated
        return with_lock(self.epochs_fd, lambda: self._swap(namespace, held, epoch, temporary))

    def _swap(self, namespace: bytes, held: int | None, epoch: int, temporary: str) -> int | None:
        stated = self.durable_epoch(namespace)
        if stated != held:
            return stated
        self.publish(self.epochs_fd, namespace.hex(), encode_epoch(namespace, epoch), temporary)
        return epoch

    def durable_epoch(self, namespace: bytes) -> int | None:
        """The epoch on the disk, durable when this returns."""
        stated = self.epoch(namespace)
        os.fsync(self.epochs_fd)  # the process that wrote it may not have flushed the folder yet
        return stated

    def publish(self, folder_fd: int, name: str, data: bytes, temporary: str) -> None:
        """Put a small file in place in one step, durably when this returns. Raises OSError."""
        try:
            write_new(folder_fd, temporary, data)
            os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except Exception:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder_fd)
            raise
        os.fsync(folder_fd)

    def is_own(self, name: str) -> bool:
        known = (BUCKET_NAME, TEMPORARY_NAME, MANIFEST_NAME, MODEL_FILE)
        small = (SUPERBLOCK_NAME, LOCK_NAME, EPOCHS_NAME, LEASES_NAME)
        return name in small or any(own.fullmatch(name) for own in known)

    def small_folders(self) -> tuple[int, ...]:
        """The open folders of everything that lies in no bucket."""
        return tuple(fd for fd in (self.fd, self.epochs_fd, self.leases_fd) if fd >= 0)

    def small_bytes(self) -> int:
        """Bytes of disk of everything in this root that lies in no bucket. Raises OSError."""
        total = 0
        for folder_fd in self.small_folders():
            total += occupied(os.fstat(folder_fd))
            for name in names_in(folder_fd):
                with suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                    total += occupied(status) if not stat.S_ISDIR(status.st_mode) else 0
        return total


def _is_slab(data: bytes) -> bool:
    return len(data) >= SUPERBLOCK_COPY_BYTES and data[24:28] == (1).to_bytes(4, "little")
