"""A root of layout `files` opened for inspection: its superblock, its epochs, who has it open, its folders and locks.

Other processes use the root at the same time. Reading takes no lock and creates nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from kvtier.errors import RootError
from kvtier.inspection import Access, StoredNamespace
from kvtier_fs.files.blockfile import GONE, Wanted
from kvtier_fs.files.bucket import Bucket, BucketRules
from kvtier_fs.files.folder import EPOCHS_NAME, LEASES_NAME, Busy, TreeFolder, open_plain, read_small
from kvtier_fs.files.leases import LEASE_NAME, Holder, Leases, decode_holder, this_process
from kvtier_fs.files.places import BLOCK_NAME, BlockPlace, bucket_name, leaves
from kvtier_fs.files.records import FILES_VERSION, Tree, decode_epoch, decode_tree
from kvtier_fs.files.root import FilesSeams
from kvtier_fs.folder import LOCK_NAME, SUPERBLOCK_NAME, RootFolder
from kvtier_fs.inspect_reading import read_manifest
from kvtier_fs.options import FSOptions
from kvtier_fs.slot import FORMAT_VERSION, SlotHeader
from kvtier_fs.superblock import decode_superblock, foreign_version

T = TypeVar("T")

NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")
BUCKET_NAME = re.compile(r"bucket-([0-9a-f]{2})")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_SECONDS = 10.0
_WAIT_SECONDS = 0.01
_RUN_FILES = 64
_HOLDERS_SHOWN = 3


def _options(path: str) -> FSOptions:
    return FSOptions(roots=[path], layout="files", capacity=1, create=False, allow_network_fs=True)


def is_files_root(path: str) -> bool:
    """True if a folder holds a root of layout `files`, of whatever version or damaged. Raises RootError.

    Where no superblock says so, the folders of such a root do, if no slab lies beside them.
    """
    folder = RootFolder(path, _options(path))
    try:
        if not folder.enter():
            return False
        data = read_small(folder.fd, SUPERBLOCK_NAME)
        if decode_tree(data) is not None:
            return True
        version = FORMAT_VERSION if decode_superblock(data) is not None else foreign_version(data)
        if version is not None:
            return version >= FILES_VERSION - FORMAT_VERSION
        names = os.listdir(folder.fd)
        return not folder.existing_slabs() and any(name == EPOCHS_NAME or BUCKET_NAME.match(name) for name in names)
    except OSError:
        return False  # whoever opens it next says why
    finally:
        folder.leave()


class Run(NamedTuple):
    """Some files of one folder of blocks: what one thread goes through at a time. `first` counts in the bucket."""

    bucket: int
    leaf: str
    first: int
    names: tuple[str, ...]


class InspectedTree:
    """One root of layout `files` while a tool looks at it. Nothing is changed but with CHANGE access.

    Raises RootError for what keeps it from being inspected at all.
    """

    def __init__(self, path: str, access: Access) -> None:
        self.path = path
        self.changes = access is Access.CHANGE
        self.folder = TreeFolder(path, _options(path))
        self.data = b""
        self.tree: Tree
        self.epochs_fd = -1
        self.leases_fd = -1
        self.holders: list[Holder] = []
        self._leases = Leases("", this_process(), time.monotonic, FilesSeams().lease_seconds)
        self._epochs: dict[bytes, int] = {}
        self._rules = BucketRules(0, 0, False, self.expired, Counter())

    def open(self) -> None:
        """Enter, read the superblock, see who else is here."""
        try:
            if not self.folder.enter():
                raise RootError(self.path, "is not there")
            self.data = read_small(self.folder.fd, SUPERBLOCK_NAME)
            tree = self.folder.look()
            if tree is None:
                raise RootError(self.path, "cannot be checked: it has no superblock; empty it once nobody uses it")
            self.tree = tree
            if self.changes:
                self.folder.settle(tree)
            self.epochs_fd, self.leases_fd = self._small_folder(EPOCHS_NAME), self._small_folder(LEASES_NAME)
            self.holders = self._live_holders()
        except OSError as error:
            raise self.folder.refusal(error) from error

    def close(self) -> None:
        """Close everything. Idempotent."""
        for fd in (self.epochs_fd, self.leases_fd):
            if fd >= 0:
                os.close(fd)
        self.epochs_fd = self.leases_fd = -1
        self.folder.leave()

    def _small_folder(self, name: str) -> int:
        try:
            return os.open(name, _FOLDER, dir_fd=self.folder.fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return -1
            raise

    # -- who is here, and what counts --------------------------------------------------------------------------------

    def small_names(self, folder_fd: int) -> list[str]:
        """What lies in the folder of epochs or of leases, in order; nothing where that is missing."""
        return sorted(os.listdir(folder_fd)) if folder_fd >= 0 else []

    def _live_holders(self) -> list[Holder]:
        names = filter(LEASE_NAME.fullmatch, self.small_names(self.leases_fd))
        return [holder for name in names if not self.expired(name) and (holder := self._holder(name)) is not None]

    def _holder(self, lease: str) -> Holder | None:
        try:
            return decode_holder(read_small(self.leases_fd, lease))
        except OSError:
            return None

    def expired(self, lease: str) -> bool:
        """True if nobody holds a lease any more. What cannot be judged is taken to be held: a lease of another host is,
        until its heartbeat has stood still for a minute before our eyes."""
        try:
            return self._leases.expired(self.leases_fd, lease)
        except OSError:
            return False

    @property
    def owner(self) -> str:
        """Who has the root open, in words; empty if nobody has."""
        words = [f"process {holder.pid} on {holder.host[:64]!r}" for holder in self.holders]
        more = len(words) - _HOLDERS_SHOWN
        return ", ".join(words[:_HOLDERS_SHOWN]) + (f" and {more} more" if more > 0 else "")

    def epoch(self, namespace: bytes, at_least: int = 0) -> int | None:
        """The epoch that blocks of a namespace must have; None if no whole file states one.

        Read again where a block claims a later one: somebody may have raised it since.
        """
        known = self._epochs.get(namespace)
        if known is not None and known >= at_least:
            return known
        try:
            known = decode_epoch(read_small(self.epochs_fd, namespace.hex()), namespace)
        except OSError:
            known = None
        if known is not None:
            self._epochs[namespace] = known
        return known

    def namespaces(self) -> tuple[StoredNamespace, ...]:
        """The namespaces that have an epoch, with what their manifests tell people."""
        names = filter(NAMESPACE_NAME.fullmatch, self.small_names(self.epochs_fd))
        return tuple(self._namespace(bytes.fromhex(name)) for name in names)

    def _namespace(self, digest: bytes) -> StoredNamespace:
        manifest = read_manifest(self.folder.fd, digest)
        return StoredNamespace(digest, self.epoch(digest) or 0, None, None, manifest.model, manifest.tag)

    # -- folders -----------------------------------------------------------------------------------------------------

    def buckets(self) -> list[int]:
        """Numbers of the buckets that are there, in order."""
        matches = map(BUCKET_NAME.fullmatch, sorted(os.listdir(self.folder.fd)))
        return [number for match in matches if match and (number := int(match[1], 16)) < self.tree.buckets]

    @contextmanager
    def leaf(self, bucket: int, name: str) -> Iterator[int]:
        """The open folder of a bucket, or the one inside it that has this name. Raises OSError."""
        fd = os.open(bucket_name(bucket), _FOLDER, dir_fd=self.folder.fd)
        try:
            if name:
                inner = os.open(name, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def names(self, bucket: int, leaf: str) -> list[str]:
        """What lies in a folder of blocks, in order; nothing where it is gone or no folder. Raises OSError."""
        try:
            with self.leaf(bucket, leaf) as fd:
                return sorted(os.listdir(fd))
        except OSError as error:
            if error.errno in (*GONE, errno.ELOOP):
                return []
            raise

    def leaves(self) -> list[str]:
        """The folders of a bucket in which blocks may lie; the bucket itself comes first."""
        return ["", *leaves(self.tree)]

    def runs(self, bucket: int) -> Iterator[Run]:
        """Everything in a bucket that has the name of a block, a few at a time, in order. Raises OSError."""
        first = 0
        for leaf in self.leaves():
            found = [name for name in self.names(bucket, leaf) if BLOCK_NAME.fullmatch(name)]
            for at in range(0, len(found), _RUN_FILES):
                names = tuple(found[at : at + _RUN_FILES])
                yield Run(bucket, leaf, first, names)
                first += len(names)

    # -- locks -------------------------------------------------------------------------------------------------------

    def changing(self, number: int, work: Callable[[Bucket], T]) -> T | Busy:
        """Do some work on a bucket while holding its lock, as eviction does. BUSY, with nothing done, if others keep it
        for long. Raises OSError."""
        assert self.changes
        bucket = Bucket(self.folder, number, self._rules)
        return self._until_free(lambda: bucket.locked(lambda: work(bucket)))

    def reading(self, number: int, work: Callable[[int], T]) -> T | Busy:
        """Do some work on a bucket's folder while nobody changes the bucket. BUSY if others keep it for long.

        Raises OSError.
        """
        with self.leaf(number, "") as folder_fd:
            try:
                lock = open_plain(folder_fd, LOCK_NAME, os.O_RDONLY)
            except FileNotFoundError:
                return work(folder_fd)  # nobody has stored here yet
            try:
                if isinstance(self._until_free(lambda: _lock_shared(lock)), Busy):
                    return Busy.BUSY
                return work(folder_fd)
            finally:
                os.close(lock)

    @staticmethod
    def _until_free(attempt: Callable[[], T | Busy]) -> T | Busy:
        deadline = time.monotonic() + _LOCK_SECONDS
        while isinstance(result := attempt(), Busy) and time.monotonic() < deadline:
            time.sleep(_WAIT_SECONDS)
        return result

    def claim(self, place: BlockPlace) -> Wanted:
        """A place as its bucket wants it named when what lies there is to go."""
        nothing = SlotHeader(b"", 0, b"", place.bucket, 0, 0, 0, 0, 0, 0, b"")
        return Wanted(place, nothing, self.tree.header_bytes)


def _lock_shared(fd: int) -> Busy | None:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Busy.BUSY
    return None
