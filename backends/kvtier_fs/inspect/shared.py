"""A root of layout `files` for `kvtier fsck`, `ls`, `du` and `gc`: read, repaired and pruned beside its users."""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from kvtier.errors import RootError
from kvtier.tier.inspection import Access, CheckStep, Finding, FindingKind
from kvtier.tier.stack_files import MODEL_FILE
from kvtier.tier.store_inspection import CheckedPage
from kvtier_fs.format.tree_records import decode_account, decode_epoch, decode_tree, encode_epoch, encode_tree
from kvtier_fs.inspect.shared_root import NOT_THERE, FileContent, FileRun, InspectedTree, open_block_file, unread_fault
from kvtier_fs.inspect.store import CheckedRun, read_fault, shown
from kvtier_fs.roots.folder import LOCK_NAME, SUPERBLOCK_NAME, plain_file, write_all
from kvtier_fs.shared.block_file import remove_if
from kvtier_fs.shared.bucket import ACCOUNT_NAME, Bucket
from kvtier_fs.shared.folder import EPOCHS_NAME, LEASES_NAME, read_small, vanished, with_lock
from kvtier_fs.shared.leases import LEASE_NAME, decode_holder
from kvtier_fs.shared.paths import BLOCK_NAME, BUCKET_NAME, NAMESPACE_NAME, TEMPORARY_NAME, BlockPlace, bucket_name

_DAMAGED = "checksum"
_REMOVED = read_fault(OSError(errno.ESTALE, ""))
_RECOUNTED = (FindingKind.ORPHANED, FindingKind.BAD_ACCOUNT, FindingKind.STALE_ACCOUNT)
"""What a new count of its bucket repairs."""
_MANIFEST_NAME = re.compile(r"manifest-[0-9a-f]{32}\.json")


class SharedInspection(InspectedTree):
    """The inspection of one root of layout `files` with its blocks. Other processes use it at the same time.

    A block is removed under the lock of its bucket, if it is still what was read. The bucket is counted again once it
    was read whole: until then its account states too much, or is gone.
    """

    def __init__(self, path: str, access: Access) -> None:
        super().__init__(path, access)
        self._uncounted: set[int] = set()

    def _parts(self) -> Iterator[int]:
        for number in self.folder.buckets():
            yield number
            if number in self._uncounted and _recount(self, number):
                self._uncounted.discard(number)

    def _read_places(self, run: FileRun) -> Iterator[FileContent]:
        with vanished(NOT_THERE), self.folder.leaf(run.bucket, run.leaf) as leaf_fd:
            for number, name in enumerate(run.names, run.first):
                place = BlockPlace(run.bucket, run.leaf, name)
                with open_block_file(leaf_fd, place, number, self.tree, self.epoch) as found:
                    if found is not None:
                        yield found

    def _verify(self, run: FileRun) -> CheckedRun[FileContent, FileRun]:
        """Read the payloads; a file that another host removed while it was open is gone, as one removed before."""
        checked = super()._verify(run)
        return checked._replace(others=[(one, fault) for one, fault in checked.others if fault != _REMOVED])

    def _place_in_words(self, one: FileContent) -> str:
        place = one.place
        return "/".join(part for part in (bucket_name(place.bucket), place.leaf, place.name) if part)

    def _remove(self, contents: Sequence[FileContent], must: bool) -> set[FileContent]:
        number = contents[0].region
        try:
            gone = self.changing(number, partial(self._remove_locked, contents, must))
        except (OSError, RootError):
            if must:
                raise
            return set()
        if gone:
            self._uncounted.add(number)
        return gone

    def _remove_locked(self, found: Sequence[FileContent], must: bool, _: Bucket) -> set[FileContent]:
        gone = set()
        for bucket, leaf in sorted({(one.place.bucket, one.place.leaf) for one in found}):
            with self.folder.leaf(bucket, leaf) as leaf_fd:
                for one in found:
                    try:
                        if remove_if(leaf_fd, one.place.name, one.wrong):
                            gone.add(one)
                    except OSError:
                        if must:
                            raise
                os.fsync(leaf_fd)
        return gone

    def _check_records(self, repair: bool) -> Iterator[Finding]:
        return _check_records(self, repair)

    def _check_part(self, part: int, repair: bool) -> Iterator[CheckedPage[FileContent]]:
        """The bucket's names and account, then its blocks."""
        try:
            yield CheckedPage(CheckStep(findings=_check_bucket(self, part, repair)))
        except OSError as error:
            if error.errno not in NOT_THERE:  # no folder: reported already, or gone meanwhile
                finding = Finding(FindingKind.CORRUPT, read_fault(error), bucket_name(part))
                yield CheckedPage(CheckStep(findings=(finding,)))
        yield from super()._check_part(part, repair)

    def _end_check(self, repair: bool) -> Iterable[Finding]:
        return _check_leases(self, repair)

    def _sync(self) -> None:
        """Count the buckets that could not be counted, and those that hold temporaries of processes that died."""
        for number in self.folder.buckets():
            if number in self._uncounted or self.bucket(number).has_temporaries():
                self.changing(number, Bucket.sweep)


# -- records -----------------------------------------------------------------------------------------------------------


def _check_records(root: InspectedTree, repair: bool) -> Iterator[Finding]:
    """Check what lies in no bucket. Raises OSError for a folder that cannot be read."""
    yield from _check_copies(root.folder.fd, SUPERBLOCK_NAME, FindingKind.BAD_SUPERBLOCK, _whole_superblock, repair)
    yield from _check_root_names(root, repair)
    epochs_fd = root.folder.epochs_fd
    for name in root.small_names(epochs_fd):
        if NAMESPACE_NAME.fullmatch(name):
            whole = partial(_whole_epoch, bytes.fromhex(name))
            yield from _check_copies(epochs_fd, f"{EPOCHS_NAME}/{name}", FindingKind.BAD_EPOCH, whole, repair)
        elif name != LOCK_NAME:
            yield from _stray(root, epochs_fd, f"{EPOCHS_NAME}/", name, repair)


def _whole_superblock(data: bytes) -> bytes | None:
    tree = decode_tree(data)
    return None if tree is None else encode_tree(tree)


def _whole_epoch(namespace: bytes, data: bytes) -> bytes | None:
    epoch = decode_epoch(data, namespace)
    return None if epoch is None else encode_epoch(namespace, epoch)


def _check_copies(
    folder_fd: int, where: str, kind: FindingKind, whole_of: Callable[[bytes], bytes | None], repair: bool
) -> Iterator[Finding]:
    """The damaged copies of a small file that holds two; one that is missing is damaged as well.

    `whole_of` is what the file should be by its sound copy, from which repair writes the other again.
    """
    damaged = partial(_find_damage, folder_fd, os.path.basename(where), whole_of)
    try:
        bad = damaged(mend=False)
    except OSError as error:
        yield Finding(kind, unread_fault(error), where)
        return
    if bad is None:
        yield Finding(kind, _DAMAGED, where)
        return
    repaired = False
    if bad and repair:
        mend = partial(damaged, mend=True)
        with suppress(OSError):  # processes replace an epoch's file; they lock its folder meanwhile
            repaired = isinstance(with_lock(folder_fd, mend) if kind is FindingKind.BAD_EPOCH else mend(), list)
    for at in bad:
        yield Finding(kind, _DAMAGED, f"{where}, copy {int(at > 0)}", repaired)


def _find_damage(folder_fd: int, name: str, whole_of: Callable[[bytes], bytes | None], mend: bool) -> list[int] | None:
    """The offsets of damaged copies; None if no copy is sound. With `mend` they are written again. Raises OSError."""
    data = read_small(folder_fd, name)
    whole = whole_of(data)
    if whole is None:
        return None
    half = len(whole) // 2
    bad = [at for at in (0, half) if data[at : at + half] != whole[at : at + half]]
    if bad and mend:
        with plain_file(folder_fd, name, os.O_RDWR) as fd:
            for at in bad:
                write_all(fd, whole[at : at + half], at)
            os.fdatasync(fd)
    return bad


def _check_leases(root: InspectedTree, repair: bool) -> Iterator[Finding]:
    """Check the leases; repair removes those that have expired. Comes last: their temporaries go first."""
    for name in root.small_names(root.folder.leases_fd):
        where = f"{LEASES_NAME}/{name}"
        if LEASE_NAME.fullmatch(name) is None:
            yield from _stray(root, root.folder.leases_fd, f"{LEASES_NAME}/", name, repair)
            continue
        kind, reason = FindingKind.ORPHANED, "lease"
        try:
            if decode_holder(read_small(root.folder.leases_fd, name)) is None:
                kind, reason = FindingKind.BAD_LEASE, _DAMAGED
        except OSError as error:
            kind, reason = FindingKind.BAD_LEASE, unread_fault(error)
        gone = root.leases.expired(name)
        if kind is FindingKind.BAD_LEASE or gone:
            yield Finding(kind, reason, where, repair and gone and _unlink(root.folder.leases_fd, name))


# -- names ------------------------------------------------------------------------------------------------------------


def _check_root_names(root: InspectedTree, repair: bool) -> Iterator[Finding]:
    """Unknown files in the root, and files in the place of its folders."""
    planned = [bucket_name(number) for number in range(root.tree.buckets)]
    own = {SUPERBLOCK_NAME, LOCK_NAME, EPOCHS_NAME, LEASES_NAME, *planned}
    for name in sorted(os.listdir(root.folder.fd)):
        if name not in own and not (_MANIFEST_NAME.fullmatch(name) or MODEL_FILE.fullmatch(name)):
            yield from _stray(root, root.folder.fd, "", name, repair)
    for name in (EPOCHS_NAME, LEASES_NAME, *planned):
        if not _is_folder(root.folder.fd, name):
            yield Finding(FindingKind.CORRUPT, "folder", name)


def _is_folder(folder_fd: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return True  # it is made when it is needed


def _stray(root: InspectedTree, folder_fd: int, folder: str, name: str, repair: bool) -> Iterator[Finding]:
    """Other files in a folder: unknown ones, and temporaries whose lease has expired. One that a process may still be
    writing is no finding."""
    temporary = TEMPORARY_NAME.fullmatch(name)
    if temporary is None:
        reason = "outside_the_plan" if BUCKET_NAME.fullmatch(name) else "name"
        yield Finding(FindingKind.UNKNOWN_FILE, reason, f"{folder}{shown(name)}")
    elif root.leases.expired(temporary[1]):
        yield Finding(FindingKind.ORPHANED, "temporary", f"{folder}{name}", repair and _unlink(folder_fd, name))


def _unlink(folder_fd: int, name: str) -> bool:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder_fd)
        return True
    return False


# -- buckets -----------------------------------------------------------------------------------------------------------


def _check_bucket(root: InspectedTree, number: int, repair: bool) -> list[Finding]:
    """Check what lies in a bucket beside blocks, and its account; repair removes temporaries and counts it again.

    Raises OSError.
    """
    findings = [*_check_bucket_names(root, number), *_check_account(root, number)]
    if repair and any(finding.kind in _RECOUNTED for finding in findings):
        done = _recount(root, number)
        return [finding._replace(repaired=done and finding.kind in _RECOUNTED) for finding in findings]
    return findings


def _recount(root: InspectedTree, number: int) -> bool:
    """Remove a bucket's orphaned temporaries and write its account again. False if others keep its lock, or the disk
    fails."""

    def work(bucket: Bucket) -> None:
        with suppress(OSError), root.folder.leaf(number, "") as folder_fd:
            status = os.stat(ACCOUNT_NAME, dir_fd=folder_fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                os.unlink(ACCOUNT_NAME, dir_fd=folder_fd)
        bucket.sweep()

    with suppress(OSError, RootError):
        root.changing(number, work)
        return True
    return False


def _check_bucket_names(root: InspectedTree, number: int) -> Iterator[Finding]:
    folder, leaves, folder_fd = bucket_name(number), set(root.leaves()), root.folder.bucket(number)
    for name in root.names(number, ""):
        if name in leaves:
            if not _is_folder(folder_fd, name):
                yield Finding(FindingKind.CORRUPT, "folder", f"{folder}/{name}")
        elif name not in (LOCK_NAME, ACCOUNT_NAME) and BLOCK_NAME.fullmatch(name) is None:
            yield from _stray(root, folder_fd, f"{folder}/", name, repair=False)  # a new count removes a temporary
    for leaf in filter(None, root.leaves()):
        for name in root.names(number, leaf):
            if BLOCK_NAME.fullmatch(name) is None:
                yield Finding(FindingKind.UNKNOWN_FILE, "name", f"{folder}/{leaf}/{shown(name)}")


def _check_account(root: InspectedTree, number: int) -> Iterator[Finding]:
    """Compare the account with what the bucket holds; if they differ, again while no process changes the bucket."""
    if _compare_account(root, number) is not None:
        try:
            yield from filter(None, (root.reading(number, lambda: _compare_account(root, number)),))
        except RootError:
            yield Finding(FindingKind.UNCHECKED, "account_locked", bucket_name(number))


def _compare_account(root: InspectedTree, number: int) -> Finding | None:
    where = f"{bucket_name(number)}/{ACCOUNT_NAME}"
    try:
        data = read_small(root.folder.bucket(number), ACCOUNT_NAME)
    except OSError as error:
        return Finding(FindingKind.BAD_ACCOUNT, unread_fault(error), where)
    stated = decode_account(data, root.tree, number)
    if data and stated is None:
        return Finding(FindingKind.BAD_ACCOUNT, _DAMAGED, where)
    held = root.bytes_held(number)
    if stated is None:
        return Finding(FindingKind.STALE_ACCOUNT, "missing", where) if next(root.runs(number), None) else None
    if stated < held:
        return Finding(FindingKind.BAD_ACCOUNT, "understated", where)
    return Finding(FindingKind.STALE_ACCOUNT, "overstated", where) if stated > held else None
