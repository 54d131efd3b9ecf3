"""What a root of layout `files` says of itself, checked and repaired: superblock, epochs, leases, accounts, names."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

from kvtier.inspection import Finding, FindingKind
from kvtier_fs.files.bucket import ACCOUNT_NAME, Bucket
from kvtier_fs.files.folder import EPOCHS_NAME, LEASES_NAME, Busy, open_plain, read_small, with_lock
from kvtier_fs.files.leases import LEASE_NAME, decode_holder
from kvtier_fs.files.places import BLOCK_NAME, DISK_BLOCK_BYTES, LEAF_NAME, TEMPORARY_NAME, bucket_name, occupied
from kvtier_fs.files.records import (
    EPOCH_COPY_BYTES,
    SUPERBLOCK_COPY_BYTES,
    decode_account,
    decode_epoch,
    encode_epoch,
    encode_tree,
)
from kvtier_fs.folder import LOCK_NAME, SUPERBLOCK_NAME
from kvtier_fs.inspect_files_blocks import NO_PLAIN_FILE
from kvtier_fs.inspect_files_root import BUCKET_NAME, NAMESPACE_NAME, InspectedTree
from kvtier_fs.inspect_reading import read_fault

DAMAGED = "checksum"
_MANIFEST_NAME = re.compile(r"manifest-[0-9a-f]{32}\.json")
_NAME_MAX = 64


def check_records(root: InspectedTree, repair: bool) -> Iterator[Finding]:
    """Check what lies in no bucket. Raises OSError for a folder that cannot be read."""
    yield from _copies(
        root.data, encode_tree(root.tree), SUPERBLOCK_COPY_BYTES, FindingKind.BAD_SUPERBLOCK, SUPERBLOCK_NAME,
        partial(_mend_superblock, root) if repair else None,
    )  # fmt: skip
    yield from _root_names(root, repair)
    for name in root.small_names(root.epochs_fd):
        if NAMESPACE_NAME.fullmatch(name):
            yield from _epoch(root, name, repair)
        elif name != LOCK_NAME:
            yield from _stray(root, root.epochs_fd, f"{EPOCHS_NAME}/", name, repair)


def _copies(
    data: bytes, whole: bytes, copy_bytes: int, kind: FindingKind, where: str, mend: Callable[[int], bool] | None
) -> Iterator[Finding]:
    """The copies of a small file that are not as the whole one is; a copy that is missing is damaged as well."""
    for number in (0, 1):
        at = number * copy_bytes
        if data[at : at + copy_bytes] != whole[at : at + copy_bytes]:
            yield Finding(kind, DAMAGED, f"{where}, copy {number}", mend is not None and mend(at))


def _mend(folder_fd: int, name: str, whole: bytes, at: int, copy_bytes: int) -> bool:
    """Write a damaged copy anew; the other one is not touched. False if the disk will not have it."""
    try:
        fd = open_plain(folder_fd, name, os.O_RDWR)
        try:
            done = os.pwrite(fd, whole[at : at + copy_bytes], at) == copy_bytes
            os.fdatasync(fd)
        finally:
            os.close(fd)
    except OSError:
        return False
    return done


def _mend_superblock(root: InspectedTree, at: int) -> bool:
    return _mend(root.folder.fd, SUPERBLOCK_NAME, encode_tree(root.tree), at, SUPERBLOCK_COPY_BYTES)


def _epoch(root: InspectedTree, name: str, repair: bool) -> Iterator[Finding]:
    """A namespace's epoch. One copy is written anew from the other; without any no block of it counts."""
    namespace, where = bytes.fromhex(name), f"{EPOCHS_NAME}/{name}"
    try:
        data = read_small(root.epochs_fd, name)
    except OSError as error:
        yield Finding(FindingKind.BAD_EPOCH, _unread(error), where)
        return
    epoch = decode_epoch(data, namespace)
    if epoch is None:
        yield Finding(FindingKind.BAD_EPOCH, DAMAGED, where)
        return
    mend = partial(_mend_epoch, root, name) if repair else None
    yield from _copies(data, encode_epoch(namespace, epoch), EPOCH_COPY_BYTES, FindingKind.BAD_EPOCH, where, mend)


def _mend_epoch(root: InspectedTree, name: str, at: int) -> bool:
    def mend() -> bool:
        namespace = bytes.fromhex(name)
        epoch = decode_epoch(read_small(root.epochs_fd, name), namespace)
        whole = encode_epoch(namespace, epoch or 0)
        return epoch is not None and _mend(root.epochs_fd, name, whole, at, EPOCH_COPY_BYTES)

    try:
        return with_lock(root.epochs_fd, mend) is True
    except OSError:
        return False


def check_leases(root: InspectedTree, repair: bool) -> Iterator[Finding]:
    """Check the leases; those that have expired go with repair. Comes last: their temporaries go before them."""
    for name in root.small_names(root.leases_fd):
        where = f"{LEASES_NAME}/{name}"
        if LEASE_NAME.fullmatch(name) is None:
            yield from _stray(root, root.leases_fd, f"{LEASES_NAME}/", name, repair)
            continue
        kind, reason = FindingKind.ORPHANED, "lease"
        try:
            if decode_holder(read_small(root.leases_fd, name)) is None:
                kind, reason = FindingKind.BAD_LEASE, DAMAGED
        except OSError as error:
            kind, reason = FindingKind.BAD_LEASE, _unread(error)
        gone = root.expired(name)
        if kind is FindingKind.BAD_LEASE or gone:
            yield Finding(kind, reason, where, repair and gone and _unlink(root.leases_fd, name))


def _unread(error: OSError) -> str:
    return NO_PLAIN_FILE if error.errno == errno.ELOOP else read_fault(error)


# -- what lies about ---------------------------------------------------------------------------------------------------


def _root_names(root: InspectedTree, repair: bool) -> Iterator[Finding]:
    """What lies in the root and is none of ours, and what is not what it should be."""
    planned = [bucket_name(number) for number in range(root.tree.buckets)]
    own = {SUPERBLOCK_NAME, LOCK_NAME, EPOCHS_NAME, LEASES_NAME, *planned}
    for name in sorted(os.listdir(root.folder.fd)):
        if name not in own and _MANIFEST_NAME.fullmatch(name) is None:
            yield from _stray(root, root.folder.fd, "", name, repair)
    for name in (EPOCHS_NAME, LEASES_NAME, *planned):
        if not _is_folder(root.folder.fd, name):
            yield Finding(FindingKind.CORRUPT, "folder", name)


def _shown(name: str) -> str:
    return ascii(name)[1:-1][:_NAME_MAX]


def _is_folder(folder_fd: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return True  # it is made when it is needed


def _stray(root: InspectedTree, folder_fd: int, folder: str, name: str, repair: bool) -> Iterator[Finding]:
    """What lies in a folder of small files and is no such file: temporaries, and what somebody else put there."""
    if TEMPORARY_NAME.fullmatch(name):
        for finding in _temporary(root, folder, name):
            yield finding._replace(repaired=repair and _unlink(folder_fd, name))
    else:
        reason = "outside_the_plan" if BUCKET_NAME.fullmatch(name) else "name"
        yield Finding(FindingKind.UNKNOWN_FILE, reason, f"{folder}{_shown(name)}")


def _temporary(root: InspectedTree, folder: str, name: str) -> Iterator[Finding]:
    """A temporary whose lease has expired; one that somebody may still be writing is none of our business."""
    match = TEMPORARY_NAME.fullmatch(name)
    assert match is not None
    if root.expired(match[1]):
        yield Finding(FindingKind.ORPHANED, "temporary", f"{folder}{name}")


def _unlink(folder_fd: int, name: str) -> bool:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder_fd)
        return True
    return False


# -- buckets -----------------------------------------------------------------------------------------------------------


def check_bucket(root: InspectedTree, number: int, repair: bool) -> list[Finding]:
    """Check what lies in a bucket beside blocks, and its account; with repair temporaries go and it is counted anew.

    Raises OSError.
    """
    findings = list(_bucket_names(root, number))
    account = _account(root, number)
    if account is not None:
        findings.append(account)
    orphaned = any(finding.kind is FindingKind.ORPHANED for finding in findings)
    if not repair or not (orphaned or (account is not None and account.kind is not FindingKind.UNCHECKED)):
        return findings
    done = count_anew(root, number)
    ours = (FindingKind.ORPHANED, FindingKind.BAD_ACCOUNT, FindingKind.STALE_ACCOUNT)
    return [finding._replace(repaired=done and finding.kind in ours) for finding in findings]


def count_anew(root: InspectedTree, number: int) -> bool:
    """Remove a bucket's orphaned temporaries and write its account anew. False if others keep its lock, or if the disk
    will not have it."""

    def work(bucket: Bucket) -> None:
        with suppress(OSError), root.leaf(number, "") as folder_fd:
            status = os.stat(ACCOUNT_NAME, dir_fd=folder_fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                os.unlink(ACCOUNT_NAME, dir_fd=folder_fd)
        bucket.sweep()

    try:
        return not isinstance(root.changing(number, work), Busy)
    except OSError:
        return False


def _bucket_names(root: InspectedTree, number: int) -> Iterator[Finding]:
    folder, leaves = bucket_name(number), set(root.leaves())
    with root.leaf(number, "") as folder_fd:
        for name in root.names(number, ""):
            if TEMPORARY_NAME.fullmatch(name):
                yield from _temporary(root, f"{folder}/", name)
            elif name in leaves:
                if not _is_folder(folder_fd, name):
                    yield Finding(FindingKind.CORRUPT, "folder", f"{folder}/{name}")
            elif name not in (LOCK_NAME, ACCOUNT_NAME) and BLOCK_NAME.fullmatch(name) is None:
                yield Finding(FindingKind.UNKNOWN_FILE, "name", f"{folder}/{_shown(name)}")
    for leaf in filter(None, root.leaves()):
        for name in root.names(number, leaf):
            if BLOCK_NAME.fullmatch(name) is None:
                yield Finding(FindingKind.UNKNOWN_FILE, "name", f"{folder}/{leaf}/{_shown(name)}")


def _account(root: InspectedTree, number: int) -> Finding | None:
    """Does the account say what the bucket holds? Where it seems not to, ask again while nobody changes the bucket."""
    with root.leaf(number, "") as folder_fd:
        if _compared(root, number, folder_fd) is None:
            return None
    found = root.reading(number, lambda folder_fd: _compared(root, number, folder_fd))
    if isinstance(found, Busy):
        return Finding(FindingKind.UNCHECKED, "account_locked", bucket_name(number))
    return found


def _compared(root: InspectedTree, number: int, folder_fd: int) -> Finding | None:
    where = f"{bucket_name(number)}/{ACCOUNT_NAME}"
    try:
        data = read_small(folder_fd, ACCOUNT_NAME)
    except OSError as error:
        return Finding(FindingKind.BAD_ACCOUNT, _unread(error), where)
    stated = decode_account(data, root.tree, number)
    if data and stated is None:
        return Finding(FindingKind.BAD_ACCOUNT, DAMAGED, where)
    held = bytes_held(root, number, folder_fd)
    if stated is None:
        return Finding(FindingKind.STALE_ACCOUNT, "missing", where) if next(root.runs(number), None) else None
    if stated < held:
        return Finding(FindingKind.BAD_ACCOUNT, "understated", where)
    return Finding(FindingKind.STALE_ACCOUNT, "overstated", where) if stated > held else None


def bytes_held(root: InspectedTree, number: int, folder_fd: int) -> int:
    """Bytes of disk of everything in a bucket, as its account counts them. Raises OSError.

    A file that gets its name meanwhile is counted once.
    """
    used, seen = os.fstat(folder_fd).st_blocks * 512 + DISK_BLOCK_BYTES, set[int]()
    flat = not root.tree.fan_out

    def add(fd: int, names: Iterable[str]) -> int:
        added = 0
        for name in names:
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if status.st_ino not in seen:
                    seen.add(status.st_ino)
                    added += occupied(status)
        return added

    names = root.names(number, "")
    used += add(folder_fd, (name for name in names if _counts(name) and (flat or BLOCK_NAME.fullmatch(name) is None)))
    for leaf in [] if flat else filter(LEAF_NAME.fullmatch, names):
        with root.leaf(number, leaf) as leaf_fd:
            used += os.fstat(leaf_fd).st_blocks * 512 + add(leaf_fd, root.names(number, leaf))
    return used


def _counts(name: str) -> bool:
    """True for what lies in a bucket beside its account and the folders of blocks, which are counted on their own."""
    return name != ACCOUNT_NAME and LEAF_NAME.fullmatch(name) is None
