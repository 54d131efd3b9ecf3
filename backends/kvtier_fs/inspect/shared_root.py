"""A root of layout `files` opened for inspection: its superblock, epochs, live leases, folders and locks.

Other processes use the root at the same time. Reading takes no lock and creates nothing.
"""

import errno
import fcntl
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from kvtier.errors import RootError
from kvtier.tier.block_envelope import KEY_AT, MAGIC, Mismatch, decode_slot_header, is_other_version, page_fault
from kvtier.tier.inspection import Access, BlockState, StoreAbout, StoredNamespace
from kvtier_fs.format.tree_records import Tree
from kvtier_fs.inspect.store import SHORT, FolderInspection, HeaderVerdict, SlotContent, judge_header, read_fault
from kvtier_fs.options import SharedFSOptions
from kvtier_fs.roots.folder import LOCK_NAME, plain_file
from kvtier_fs.roots.private_tree import names_in
from kvtier_fs.shared.block_file import MismatchedFile
from kvtier_fs.shared.bucket import Bucket, BucketRules
from kvtier_fs.shared.folder import GONE, LockBusy, TreeFolder, read_small, vanished
from kvtier_fs.shared.leases import LEASE_NAME, FolderLeases, decode_holder, this_process
from kvtier_fs.shared.paths import (
    NAMESPACE_NAME,
    BlockPlace,
    bucket_name,
    is_of_this_version,
    leaves,
    occupied,
    place_of,
)
from kvtier_fs.shared.root import FilesHooks

NO_PLAIN_FILE = "file"

EpochOf = Callable[[bytes, int], int | None]
"""The epoch of a namespace that counts, given the one that a block states; None if none does."""


@dataclass(frozen=True, slots=True, eq=False)
class FileContent(SlotContent):
    """A file that has the name of a block. `fd` is -1 where nothing could be opened; `wrong` identifies the file when
    it is removed."""

    place: BlockPlace
    wrong: MismatchedFile


@contextmanager
def open_block_file(
    leaf_fd: int, place: BlockPlace, number: int, tree: Tree, epoch_of: EpochOf
) -> Iterator[FileContent | None]:
    """The content of a place, open meanwhile; None if it is gone. Only plain files are opened. `number`: in its bucket.

    Raises OSError.
    """
    with ExitStack() as closing:
        found = None
        with vanished():
            status = os.stat(place.name, dir_fd=leaf_fd, follow_symlinks=False)
            fd, judged, front = -1, HeaderVerdict(fault=NO_PLAIN_FILE), b""
            try:
                if stat.S_ISREG(status.st_mode):
                    fd = closing.enter_context(plain_file(leaf_fd, place.name))
                    status = os.fstat(fd)
                    page = memoryview(os.pread(fd, tree.header_bytes, 0))
                    judged, front = judge_file(page, status.st_size, place, tree, epoch_of), bytes(page[:KEY_AT])
            except OSError as error:
                if error.errno in GONE:
                    raise
                judged = HeaderVerdict(fault=unread_fault(error))
            found = FileContent(
                judged=judged,
                region=place.bucket,
                slot=number,
                stored_bytes=occupied(status),
                fd=fd,
                payload_at=tree.header_bytes,
                used_at=status.st_mtime,
                place=place,
                wrong=MismatchedFile(status.st_ino, front),
            )
        yield found


def unread_fault(error: OSError) -> str:
    """The reason for a file that cannot be read; links are not followed, so a link is no plain file."""
    return NO_PLAIN_FILE if error.errno == errno.ELOOP else read_fault(error)


def judge_file(page: memoryview, length: int, place: BlockPlace, tree: Tree, epoch_of: EpochOf) -> HeaderVerdict:
    """Judge the header page of a file of `length` bytes that lies in a place; the payload is not read.

    A block that another release stored is none of this one's.
    """
    if len(page) < tree.header_bytes:
        return HeaderVerdict(fault=SHORT)
    header = decode_slot_header(page)
    if header is None and is_other_version(page):
        return HeaderVerdict()
    if header is None:
        return HeaderVerdict(fault=page_fault(page) or MAGIC)
    if header.root_uuid != tree.root_uuid:
        return HeaderVerdict(BlockState.FOREIGN, header)
    due = place_of(tree, header.namespace, header.key)
    if due.name != place.name:
        return HeaderVerdict(fault=Mismatch.KEY)
    if due != place:
        return HeaderVerdict(BlockState.ORPHANED, header)
    if length < header.slot_bytes:
        return HeaderVerdict(fault=SHORT)
    expected = header._replace(
        region=place.bucket,
        slot_index=0,
        region_generation=0,
        slot_bytes=length,
        payload_bytes=max(1, length - len(page)),
    )
    return judge_header(header, expected, epoch_of(header.namespace, header.epoch))


T = TypeVar("T")

NOT_THERE = (*GONE, errno.ELOOP)
"""Errors that mean: a folder of blocks is gone, or something else lies in its place."""
_LOCK_SECONDS = 10.0
_WAIT_SECONDS = 0.01
_RUN_FILES = 256
"""Files of one run. Chosen ones are removed under one lock of the bucket; stores of others wait for it for a second
at most."""
_USERS_SHOWN = 3
_KEPT_NOT = "how often blocks were hit is not kept on disk; when they were used last is, to the minute"
_SHARED = "others may store and evict while this is read; what changes meanwhile may be missed"


class FileRun(NamedTuple):
    """Some files of one folder of blocks: what one thread reads at a time. `first` counts in the bucket."""

    bucket: int
    leaf: str
    first: int
    names: tuple[str, ...]

    @property
    def slots(self) -> int:
        return len(self.names)


class InspectedTree(FolderInspection[FileContent, FileRun]):
    """The records and folders of one root of layout `files`, whose parts are its buckets.

    Raises RootError for what keeps it from being inspected at all.
    """

    folder: TreeFolder

    def __init__(self, path: str, access: Access) -> None:
        super().__init__(path, access)
        self.folder = TreeFolder(path, SharedFSOptions(root=path, capacity=1, create=False))
        self.tree: Tree
        self.leases: FolderLeases
        self.owner = ""
        self._epochs: dict[bytes, int] = {}

    def _open(self) -> StoreAbout | None:
        """Read the superblock and the leases of the processes that use the root."""
        if not self.holds_files():
            return None
        tree = self.folder.read_tree()
        if tree is None:
            raise RootError(self.path, "cannot be checked: it has no superblock; empty it once no process uses it")
        self.tree = self.folder.tree = tree
        self.folder.join(make=self.access is Access.CHANGE)
        seconds = FilesHooks().lease_seconds
        self.leases = FolderLeases(self.folder.leases_fd, "", this_process(), time.monotonic, seconds)
        names = filter(LEASE_NAME.fullmatch, self.small_names(self.folder.leases_fd))
        users = list(filter(None, (self._user(name) for name in names if not self.leases.expired(name))))
        more = len(users) - _USERS_SHOWN
        self.owner = ", ".join(users[:_USERS_SHOWN]) + (f" and {more} more" if more > 0 else "")
        notes = (_KEPT_NOT, _SHARED) if users else (_KEPT_NOT,)
        return replace(self._describe("files", tree.root_uuid, tree.buckets, notes), parts="buckets")

    # -- leases and epochs ------------------------------------------------------------------------------------------

    def small_names(self, folder_fd: int) -> list[str]:
        """The names in the folder of epochs or of leases, in order; nothing where that is missing."""
        return sorted(names_in(folder_fd)) if folder_fd >= 0 else []

    def _user(self, lease: str) -> str:
        """The process that holds a lease, in words; empty if the lease cannot be read."""
        try:
            holder = decode_holder(read_small(self.folder.leases_fd, lease))
        except OSError:
            return ""
        return f"process {holder.pid} on {holder.host[:64]!r}" if holder else ""

    def epoch(self, namespace: bytes, at_least: int = 0) -> int | None:
        """The epoch that blocks of a namespace must have; None if no whole file states one.

        It is read again if a block states a later one: another process may have raised it since. Raises RootError if
        it cannot be read and blocks are to be changed: one error of the disk must not remove a whole namespace.
        """
        known = self._epochs.get(namespace)
        if known is not None and known >= at_least:
            return known
        try:
            known = self.folder.epoch(namespace)
        except OSError as error:
            if self.access is Access.CHANGE:
                raise self.folder.refusal(error) from error
            known = None
        if known is not None:
            self._epochs[namespace] = known
        return known

    def _namespaces(self) -> tuple[StoredNamespace, ...]:
        """The namespaces that have an epoch, with what their manifests say."""
        names = filter(NAMESPACE_NAME.fullmatch, self.small_names(self.folder.epochs_fd))
        digests = map(bytes.fromhex, names)
        return tuple(self.with_manifest(StoredNamespace(digest, self.epoch(digest) or 0, None)) for digest in digests)

    # -- folders -----------------------------------------------------------------------------------------------------

    def names(self, bucket: int, leaf: str) -> list[str]:
        """The names in a folder of blocks, in order; nothing where it is gone or no folder. Raises OSError."""
        with vanished(NOT_THERE), self.folder.leaf(bucket, leaf) as fd:
            return sorted(names_in(fd))
        return []

    def leaves(self) -> list[str]:
        """The folders of a bucket in which blocks may lie; the bucket itself comes first."""
        return ["", *leaves(self.tree)]

    def runs(self, part: int) -> Iterator[FileRun]:
        """Everything in a bucket that has the name of a block of this release's envelope, a few at a time, in order.

        Raises OSError.
        """
        first = 0
        for leaf in self.leaves():
            found = [name for name in self.names(part, leaf) if is_of_this_version(name)]
            for at in range(0, len(found), _RUN_FILES):
                names = tuple(found[at : at + _RUN_FILES])
                yield FileRun(part, leaf, first, names)
                first += len(names)

    # -- locks -------------------------------------------------------------------------------------------------------

    def bucket(self, number: int) -> Bucket:
        """A bucket as eviction sees it."""
        return Bucket(self.folder, number, BucketRules(0, 0, False, self.leases, Counter()))

    def bytes_held(self, number: int) -> int:
        """Bytes of disk of everything in a bucket, as its account counts them. Changes nothing. Raises OSError."""
        return Bucket(self.folder, number, BucketRules(0, 0, False, None, Counter())).tally()

    def changing(self, number: int, work: Callable[[Bucket], T]) -> T:
        """Do some work on a bucket while holding its lock, as eviction does.

        Raises RootError, with nothing done, if others keep the lock for long; OSError.
        """
        assert self.access is Access.CHANGE
        bucket = self.bucket(number)
        return self._until_free(number, lambda: bucket.locked(lambda: work(bucket)))

    def reading(self, number: int, work: Callable[[], T]) -> T:
        """Do some work while no process changes a bucket. Raises RootError if others keep its lock; OSError."""
        try:
            with plain_file(self.folder.bucket(number), LOCK_NAME) as lock:
                self._until_free(number, lambda: _lock_shared(lock))
                return work()
        except FileNotFoundError:
            return work()  # no block was stored here yet

    def _until_free(self, number: int, attempt: Callable[[], T | LockBusy]) -> T:
        deadline = time.monotonic() + _LOCK_SECONDS
        while isinstance(result := attempt(), LockBusy):
            if time.monotonic() >= deadline:
                raise RootError(self.path, f"{bucket_name(number)} stays locked by another process; try again")
            time.sleep(_WAIT_SECONDS)
        return result


def _lock_shared(fd: int) -> LockBusy | None:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return LockBusy.BUSY
    return None
