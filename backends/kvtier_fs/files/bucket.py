"""One bucket: a folder with a share of the capacity, an account of what it holds, and the order of eviction.

Everything here that changes the account runs with the bucket's lock held, on the root's threads. The account never
falls short of what is on the disk: space is charged before it is taken and given back after it was freed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvtier.geometry import round_up
from kvtier.jobs import DropReason
from kvtier_fs.files.blockfile import Absent, Temporary, Wanted, Wrong, header_now, remove_if
from kvtier_fs.files.folder import Busy, TreeFolder, open_plain, read_small, with_lock, write_all
from kvtier_fs.files.places import BLOCK_NAME, DISK_BLOCK_BYTES, LEAF_NAME, TEMPORARY_NAME, occupied
from kvtier_fs.files.records import decode_account, encode_account
from kvtier_fs.slot import SlotHeader
from kvtier_fs.syscalls import fallocate

ACCOUNT_NAME = "account"
_VICTIMS_MIN = 64
_VICTIMS_SHARE = 4
_NO_SUPPORT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BucketRules:
    """What holds for every bucket of a root. `expired` judges the lease a temporary names."""

    budget_bytes: int
    min_free_bytes: int
    direct: bool
    expired: Callable[[str], bool]
    counters: Counter[str]


class _Victim(NamedTuple):
    touched_ns: int
    leaf: str
    name: str
    inode: int


class Bucket:
    """A bucket as this process knows it. `turn` keeps this process to one visit at a time."""

    def __init__(self, folder: TreeFolder, number: int, rules: BucketRules) -> None:
        self.turn = asyncio.Lock()
        self._folder = folder
        self._number = number
        self._rules = rules
        self._victims: deque[_Victim] = deque()
        self._known = False

    def locked(self, work: Callable[[], T]) -> T | Busy:
        """Do some work while holding the bucket's lock, BUSY if another process holds it. Raises OSError."""
        return with_lock(self._folder.bucket(self._number), work)

    def reserve(self, wanted: Wanted, name: str) -> Temporary | SlotHeader | DropReason:
        """Make room for a block and its temporary of full size.

        Returns the header of the file that is already there, or why there is no room. Raises OSError.
        """
        used = self._used()
        with self._folder.leaf(wanted.place.bucket, wanted.place.leaf) as leaf:
            there = header_now(leaf, wanted)
            if isinstance(there, SlotHeader) and there.epoch >= wanted.header.epoch:
                return there
            if there is not Absent.ABSENT:
                remove_if(leaf, wanted, _wrong(leaf, wanted, there))
                used = self._scan()  # what was wrong with it may have changed its size
        need = round_up(wanted.file_bytes, DISK_BLOCK_BYTES)
        used = self._evict(used, self._rules.budget_bytes - need)
        if used + need > self._rules.budget_bytes:
            self._write(used)
            return DropReason.NO_SLOT
        if not self._leaves_free(need):
            used = self._evict(used, used - need)
            if not self._leaves_free(need):
                self._write(used)
                return DropReason.DISK_FULL
        return self._make(wanted, name, used, need)

    def _make(self, wanted: Wanted, name: str, used: int, need: int) -> Temporary | DropReason:
        """Charge the bucket and create the temporary; where the disk is full all the same, evict and try once more."""
        for attempt in range(2):
            self._write(used + need)
            try:
                fd = self._create(name, wanted.file_bytes)
            except OSError as error:
                self._write(used)
                if error.errno not in _FULL:
                    raise
                if not attempt:
                    used = self._evict(used, used - need)
                continue
            try:
                return Temporary(name, fd, self._charge(fd, used, need))
            except OSError:
                os.close(fd)
                os.unlink(name, dir_fd=self._folder.bucket(self._number))
                raise
        return DropReason.DISK_FULL

    def _charge(self, fd: int, used: int, need: int) -> int:
        """What a new file really takes, charged: file systems may need blocks of their own for it."""
        charged = max(need, occupied(os.fstat(fd)))
        if charged > need:
            used = self._evict(used, self._rules.budget_bytes - charged)
            self._write(used + charged)
        return charged

    def _create(self, name: str, file_bytes: int) -> int:
        folder = self._folder.bucket(self._number)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self._rules.direct else 0)
        fd = open_plain(folder, name, flags)
        try:
            try:
                fallocate(fd, 0, file_bytes)
            except OSError as error:
                if error.errno not in _NO_SUPPORT:
                    raise
                os.ftruncate(fd, file_bytes)
        except OSError:
            os.close(fd)
            os.unlink(name, dir_fd=folder)
            raise
        return fd

    def give_back(self, freed_bytes: int) -> None:
        """Some bytes that were charged are free. Raises OSError."""
        self._write(max(0, self._used() - freed_bytes))

    def remove(self, wanted: Wanted, wrong: Wrong) -> bool:
        """Remove what was found wrong, if it is still that. Raises OSError.

        What was charged for it may differ from what it took, so the account goes too: the next store counts anew.
        """
        with self._folder.leaf(wanted.place.bucket, wanted.place.leaf) as leaf:
            removed = remove_if(leaf, wanted, wrong)
        if removed:
            with suppress(FileNotFoundError):
                os.unlink(ACCOUNT_NAME, dir_fd=self._folder.bucket(self._number))
        return removed

    def sweep(self) -> None:
        """Count the bucket anew, and remove the temporaries whose lease has expired. Raises OSError."""
        self._scan()

    def prune(self, stale: Callable[[int, str], bool]) -> int:
        """Remove the blocks of which `stale(folder, name)` is true. Returns how many went. Raises OSError."""
        used, removed = self._used(), 0
        for leaf_name in self._leaves():
            with self._folder.leaf(self._number, leaf_name) as leaf:
                for name in os.listdir(leaf):
                    if BLOCK_NAME.fullmatch(name) is None or not stale(leaf, name):
                        continue
                    with suppress(FileNotFoundError):
                        freed = occupied(os.stat(name, dir_fd=leaf, follow_symlinks=False))
                        os.unlink(name, dir_fd=leaf)
                        used, removed = used - freed, removed + 1
        self._write(max(0, used))
        return removed

    def has_temporaries(self) -> bool:
        """True if there is a temporary of a lease that has expired. Needs no lock. Raises OSError."""
        names = map(TEMPORARY_NAME.fullmatch, os.listdir(self._folder.bucket(self._number)))
        return any(self._rules.expired(match[1]) for match in names if match)

    def _used(self) -> int:
        """Bytes of disk of everything here, by the account; by counting on the first visit of this process, because
        an account may be older than the files after a power loss, and where there is no whole account."""
        data = read_small(self._folder.bucket(self._number), ACCOUNT_NAME)
        stated = decode_account(data, self._folder.tree, self._number)
        if stated is None or not self._known:
            return self._scan()
        return stated

    def _write(self, used: int) -> None:
        fd = open_plain(self._folder.bucket(self._number), ACCOUNT_NAME, os.O_RDWR | os.O_CREAT)
        try:
            write_all(fd, encode_account(self._folder.tree, self._number, used))
        finally:
            os.close(fd)

    def _leaves(self) -> list[str]:
        names = sorted(name for name in os.listdir(self._folder.bucket(self._number)) if LEAF_NAME.fullmatch(name))
        return names if self._folder.tree.fan_out else [""]

    def _scan(self) -> int:
        """Count everything, remember the oldest blocks, remove expired temporaries. Writes the account."""
        folder = self._folder.bucket(self._number)
        used = self._count(folder)
        found: list[_Victim] = []
        for leaf in self._leaves():
            with self._folder.leaf(self._number, leaf) as leaf_fd:
                used += self._count_blocks(leaf_fd, leaf, found)
        found.sort()
        self._victims = deque(found[: max(_VICTIMS_MIN, len(found) // _VICTIMS_SHARE)])
        self._known = True
        self._rules.counters["bucket.scanned"] += 1
        self._write(used)
        return used

    def _count(self, folder: int) -> int:
        """Bytes of disk of a bucket's folder and of what lies in it beside blocks and the folders of blocks."""
        used = os.fstat(folder).st_blocks * 512 + DISK_BLOCK_BYTES  # the account's block, there or not
        for name in os.listdir(folder):
            if name == ACCOUNT_NAME or BLOCK_NAME.fullmatch(name) or LEAF_NAME.fullmatch(name):
                continue
            with suppress(FileNotFoundError):
                match = TEMPORARY_NAME.fullmatch(name)
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if match is not None and self._rules.expired(match[1]):
                    os.unlink(name, dir_fd=folder)
                    self._rules.counters["temporary.swept"] += 1
                else:
                    used += occupied(status)
        return used

    def _count_blocks(self, leaf_fd: int, leaf: str, found: list[_Victim]) -> int:
        used = os.fstat(leaf_fd).st_blocks * 512 if leaf else 0
        for name in os.listdir(leaf_fd):
            if not leaf and BLOCK_NAME.fullmatch(name) is None:
                continue
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=leaf_fd, follow_symlinks=False)
                used += occupied(status)
                if BLOCK_NAME.fullmatch(name) and not stat.S_ISDIR(status.st_mode):
                    found.append(_Victim(status.st_mtime_ns, leaf, name, status.st_ino))
        return used

    def _evict(self, used: int, at_most: int) -> int:
        """Remove the oldest blocks until at most `at_most` bytes are used, or none is left. Returns the bytes used."""
        counted = False
        while used > at_most:
            if not self._victims:
                if counted:
                    break
                counted, used = True, self._scan()
                continue
            used -= self._remove_victim(self._victims.popleft())
        return used

    def _remove_victim(self, victim: _Victim) -> int:
        """Remove a block unless it was touched or replaced since it was counted. Returns the bytes freed."""
        with suppress(FileNotFoundError), self._folder.leaf(self._number, victim.leaf) as leaf:
            status = os.stat(victim.name, dir_fd=leaf, follow_symlinks=False)
            if (status.st_ino, status.st_mtime_ns) == (victim.inode, victim.touched_ns):
                os.unlink(victim.name, dir_fd=leaf)
                self._rules.counters["evicted"] += 1
                return occupied(status)
        return 0

    def _leaves_free(self, need: int) -> bool:
        status = os.fstatvfs(self._folder.bucket(self._number))
        return status.f_bavail * status.f_frsize - need >= self._rules.min_free_bytes


def _wrong(leaf_fd: int, wanted: Wanted, there: SlotHeader | Wrong) -> Wrong:
    """What is to be removed: a header of an older epoch counts as wrong, too."""
    if isinstance(there, Wrong):
        return there
    return Wrong(os.stat(wanted.place.name, dir_fd=leaf_fd, follow_symlinks=False).st_ino)
