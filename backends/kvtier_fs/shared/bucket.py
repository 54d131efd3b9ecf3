"""A bucket: a folder with a share of the capacity, an account of what it holds, and the order of eviction.

Everything that changes the account runs on the root's threads and holds the bucket's lock. Renaming a temporary needs
no lock, because it does not change the account. The account never states less than the disk holds: space is charged
before it is taken and released after it was freed.
"""

import asyncio
import errno
import os
import stat
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kvtier.tier.block_age import AgeLimit
from kvtier.tier.block_envelope import SlotHeader, decode_slot_header
from kvtier.types.geometry import round_up
from kvtier.types.jobs import PRESENT, BlockOutcome, DropReason, dropped
from kvtier_fs.format.tree_records import decode_account, encode_account
from kvtier_fs.io.syscalls import fallocate
from kvtier_fs.roots.folder import keeps_free, open_plain, plain_file, write_all
from kvtier_fs.roots.private_tree import names_in
from kvtier_fs.shared.block_file import ExpectedBlock, MismatchedFile, Temporary, header_now, read_front, remove_if
from kvtier_fs.shared.folder import GONE, LockBusy, TreeFolder, read_small, vanished, with_lock
from kvtier_fs.shared.leases import FolderLeases
from kvtier_fs.shared.paths import BLOCK_NAME, DISK_BLOCK_BYTES, LEAF_NAME, TEMPORARY_NAME, occupied

ACCOUNT_NAME = "account"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors that mean: no room on the disk, of bytes or of inodes."""
_VICTIMS_MIN = 64
_VICTIMS_SHARE = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BucketRules:
    """Rules of every bucket of a root. `leases` judges the lease that a temporary names (None: none has
    expired); `wall` is the time that orders evictions; recency is written at most once in `touch_seconds`."""

    budget_bytes: int
    min_free_bytes: int
    direct: bool
    leases: FolderLeases | None
    counters: Counter[str]
    wall: Callable[[], float] = lambda: 0.0
    touch_seconds: float = 60.0
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note(self, event: str) -> None:
        """Count an event. For any thread."""
        with self._guard:
            self.counters[event] += 1

    def expired(self, lease: str) -> bool:
        """True if no process holds a lease any more."""
        return self.leases is not None and self.leases.expired(lease)

    def touch_at(self, touched: float) -> float | None:
        """The time to write for a block that is used now and was touched then; None if that is too soon.

        A time far in the future, from a host whose clock is ahead, is corrected as well.
        """
        now = self.wall()
        return now if abs(now - touched) >= self.touch_seconds else None


class Victim(NamedTuple):
    """A block as it was when it was counted, in the order of eviction."""

    touched_ns: int
    leaf: str
    name: str
    inode: int


class Bucket:
    """A bucket in this process. `visit_lock` allows one visit at a time. `refused`: when the lock was first
    found taken since this process last held it, or None. `leftovers`: temporaries, still charged, that the next visit
    discards. `victims`: the oldest blocks of the last count. `known`: it was counted by this process, and stated
    since."""

    def __init__(self, folder: TreeFolder, number: int, rules: BucketRules) -> None:
        self.visit_lock = asyncio.Lock()
        self.refused: float | None = None
        self.leftovers: list[Temporary] = []
        self.victims: deque[Victim] = deque()
        self.known = False
        self._folder = folder
        self._number = number
        self._rules = rules
        self._evicted = 0

    def locked(self, work: Callable[[], T]) -> T | LockBusy:
        """Do some work while holding the bucket's lock, BUSY if another process holds it. Raises OSError."""
        return with_lock(self._folder.make_bucket(self._number), lambda: self._visit(work))

    def _visit(self, work: Callable[[], T]) -> T:
        try:
            self._clear()
            return work()
        except Exception:
            self.forget_account()  # how much was done is unknown
            raise

    def reserve(self, wanted: ExpectedBlock, temporary: Temporary) -> Temporary | BlockOutcome:
        """Make room for a block, and make its temporary of full size.

        PRESENT if it is there already, which counts as a use of it; dropped if there is no room.
        Raises OSError.
        """
        used = self.used()
        with self._folder.leaf(wanted.place.bucket, wanted.place.leaf) as leaf:
            there = header_now(leaf, wanted)
            if isinstance(there, SlotHeader) and there.epoch > wanted.header.epoch:
                return dropped(DropReason.RESET)
            if isinstance(there, SlotHeader) and there.epoch == wanted.header.epoch:
                self._touch(leaf, wanted.place.name)
                return PRESENT
            if isinstance(there, MismatchedFile) and there.is_other_version:
                return dropped(DropReason.NO_SLOT)
            if there is not None:
                self.forget_account()
                remove_if(leaf, wanted.place.name, _wrong(leaf, wanted, there))
                used = self.count()  # the fault may have changed its size
        need = round_up(wanted.file_bytes, DISK_BLOCK_BYTES)
        used = self._evict(used, self._rules.budget_bytes - need)
        if used + need > self._rules.budget_bytes:
            self.write_account(used)
            return dropped(DropReason.NO_SLOT)
        if not keeps_free(self._folder.bucket(self._number), need, self._rules.min_free_bytes):
            self.write_account(used)
            return dropped(DropReason.DISK_FULL)
        return self._make(wanted, temporary, used, need)

    def _touch(self, leaf_fd: int, name: str) -> None:
        with suppress(OSError):
            now = self._rules.touch_at(os.stat(name, dir_fd=leaf_fd, follow_symlinks=False).st_mtime)
            if now is not None:
                os.utime(name, (now, now), dir_fd=leaf_fd, follow_symlinks=False)
                self._rules.note("touched")

    def _make(self, wanted: ExpectedBlock, temporary: Temporary, used: int, need: int) -> Temporary | BlockOutcome:
        """Charge the bucket and create the temporary."""
        self.write_account(used + need)
        try:
            self._create(temporary, wanted.file_bytes)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._remove(temporary)
            self.write_account(used)
            return dropped(DropReason.DISK_FULL)
        charged = max(need, occupied(os.fstat(temporary.fd)))  # file systems may need blocks of their own for it
        temporary.charged_bytes, total = charged, used + charged
        if charged > need:
            total = self._evict(total, self._rules.budget_bytes)
            self.write_account(total)
        if total <= self._rules.budget_bytes:
            return temporary
        self._remove(temporary)
        self.write_account(total - charged)
        return dropped(DropReason.NO_SLOT)

    def _create(self, temporary: Temporary, file_bytes: int) -> None:
        folder = self._folder.bucket(self._number)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self._rules.direct else 0)
        temporary.fd = open_plain(folder, temporary.name, flags)
        temporary.there = True
        if not fallocate(temporary.fd, 0, file_bytes):
            os.ftruncate(temporary.fd, file_bytes)

    def _remove(self, temporary: Temporary) -> None:
        temporary.close()
        if temporary.there:
            os.unlink(temporary.name, dir_fd=self._folder.bucket(self._number))
            temporary.there = False

    def charge_grown(self) -> bool:
        """A temporary takes more than it was charged for: count it as it is, and make room. False if there is none.

        Raises OSError.
        """
        used = self._evict(self.count(), self._rules.budget_bytes)
        self.write_account(used)
        return used <= self._rules.budget_bytes

    def discard(self, temporary: Temporary) -> bool:
        """Remove a temporary, closed already, that will not become a block, and give back what it was charged.

        False if it is not there any more: another process swept it and counted the bucket without it. Raises OSError.
        """
        folder, used = self._folder.bucket(self._number), self.used()
        try:
            freed = occupied(os.stat(temporary.name, dir_fd=folder, follow_symlinks=False))
            os.unlink(temporary.name, dir_fd=folder)
        except OSError as error:
            if error.errno in GONE:
                temporary.there = False
                return False
            raise
        temporary.there = False
        if freed == temporary.charged_bytes:
            self.write_account(used - freed)
        else:
            self.forget_account()
        return True

    def _clear(self) -> None:
        for temporary in tuple(self.leftovers):
            try:
                self.discard(temporary)
                self.leftovers.remove(temporary)
            except OSError:
                self.forget_account()

    def make_room(self, need: int) -> bool:
        """Evict the oldest blocks, for `need` bytes. False if there was nothing to evict. Raises OSError."""
        before, used = self._evicted, self.used()
        if not self.known:
            need += DISK_BLOCK_BYTES  # for the account itself, for which there is no room either
        self.write_account(self._evict(used, used - need))
        return self._evicted > before

    def is_over_budget(self) -> bool:
        """True if more is in use than may be, or if no account says how much. Needs no lock. Raises OSError."""
        stated = self.stated()
        return stated is None or stated > self._rules.budget_bytes

    def shrink(self) -> None:
        """Evict the oldest blocks until the budget holds. Raises OSError."""
        self.write_account(self._evict(self.count(victims_share=1), self._rules.budget_bytes))

    def remove(self, wanted: ExpectedBlock, wrong: MismatchedFile) -> bool:
        """Remove a file that was found wrong, if it is still the same. Raises OSError.

        What was charged may differ from what it took, so the account is removed too: the next store counts again.
        """
        with self._folder.leaf(wanted.place.bucket, wanted.place.leaf) as leaf:
            removed = remove_if(leaf, wanted.place.name, wrong)
        if removed:
            self.forget_account()
        return removed

    def sweep(self) -> None:
        """Count the bucket again, and remove the temporaries whose lease has expired. Raises OSError."""
        self.count()

    def sweep_after_death(self) -> None:
        """A process died, perhaps in the middle of a visit, so the next store counts the bucket. Raises OSError."""
        if self.has_temporaries():
            self.count()
        else:
            self.forget_account()

    def prune(self, namespace: bytes, epoch: int, ages: Callable[[], AgeLimit]) -> int:
        """Remove the blocks of a namespace of an epoch before `epoch`, and those that are too old.

        `ages` is asked while the lock is held: what is here was stored before. Returns their number. Raises OSError.
        """
        used, removed, young = self.used(), 0, ages()
        for leaf_name in self.leaves():
            with self._folder.leaf(self._number, leaf_name) as leaf:
                for name in names_in(leaf):
                    if not BLOCK_NAME.fullmatch(name) or not self._is_outdated(leaf, name, (namespace, epoch, young)):
                        continue
                    with vanished():
                        freed = occupied(os.stat(name, dir_fd=leaf, follow_symlinks=False))
                        os.unlink(name, dir_fd=leaf)
                        used, removed = used - freed, removed + 1
        self.write_account(used)
        return removed

    def _is_outdated(self, leaf_fd: int, name: str, right: tuple[bytes, int, AgeLimit]) -> bool:
        """True for a block of the namespace that is of an earlier epoch than the right one, or too old."""
        namespace, epoch, ages = right
        try:
            header = decode_slot_header(memoryview(read_front(leaf_fd, name, self._folder.tree.header_bytes)))
        except OSError:
            return False
        if header is None or header.namespace != namespace:
            return False
        return header.epoch < epoch or not ages.allows(header.generation)

    def has_temporaries(self) -> bool:
        """True if there is a temporary of a lease that has expired. Needs no lock. Raises OSError."""
        names = map(TEMPORARY_NAME.fullmatch, names_in(self._folder.bucket(self._number)))
        return any(self._rules.expired(match[1]) for match in names if match)

    def _evict(self, used: int, at_most: int) -> int:
        """Remove the oldest blocks until at most `at_most` bytes are used, or none is left. Returns the bytes used."""
        counted = False
        while used > at_most:
            if not self.victims:
                if counted:
                    break
                counted, used = True, self.count()
                continue
            used -= self._remove_victim(self.victims.popleft())
        return used

    def _remove_victim(self, victim: Victim) -> int:
        """Remove a block unless it was touched or replaced since it was counted. Returns the bytes freed."""
        with vanished(), self._folder.leaf(self._number, victim.leaf) as leaf:
            status = os.stat(victim.name, dir_fd=leaf, follow_symlinks=False)
            if (status.st_ino, status.st_mtime_ns) == (victim.inode, victim.touched_ns):
                os.unlink(victim.name, dir_fd=leaf)
                self._evicted += 1
                self._rules.note("evicted")
                return occupied(status)
        return 0

    # -- the account -------------------------------------------------------------------------------------------------

    def used(self) -> int:
        """Bytes of disk of everything here. Raises OSError.

        Counted on the first visit of this process, because an account may be older than the files after a power loss,
        and where there is no whole account.
        """
        stated = self.stated()
        if stated is None or not self.known:
            return self.count()
        return stated

    def write_account(self, used: int) -> None:
        """Write the bytes in use to the account. Raises OSError; then no account is left, and the next visit counts."""
        try:
            folder = self._folder.bucket(self._number)
            with plain_file(folder, ACCOUNT_NAME, os.O_RDWR | os.O_CREAT, os.close) as fd:
                write_all(fd, encode_account(self._folder.tree, self._number, max(0, used)))
        except OSError:
            self.forget_account()
            raise

    def forget_account(self) -> None:
        """Remove the account: the next visit, of this process or another, counts the bucket."""
        self.known = False
        with suppress(OSError):
            os.unlink(ACCOUNT_NAME, dir_fd=self._folder.bucket(self._number))

    def count(self, victims_share: int = _VICTIMS_SHARE) -> int:
        """Count everything, remember the oldest blocks, remove expired temporaries; state and return what is used.

        A disk too full for the account itself leaves it out. Raises OSError.
        """
        used = self.tally(victims_share)
        self.known = True
        self._rules.note("bucket.scanned")
        try:
            self.write_account(used)
        except OSError as error:
            if error.errno not in FULL:
                raise
        return used

    def stated(self) -> int | None:
        """The bytes in use as the account states them; None without a whole one. Raises OSError."""
        data = read_small(self._folder.bucket(self._number), ACCOUNT_NAME)
        return decode_account(data, self._folder.tree, self._number)

    def tally(self, victims_share: int = _VICTIMS_SHARE) -> int:
        """Bytes of disk of everything, as it lies there now; one in `victims_share` blocks becomes a victim. Raises
        OSError."""
        used, temporaries = self._count_small(self._folder.bucket(self._number))
        found: list[Victim] = []
        for leaf in self.leaves():
            with self._folder.leaf(self._number, leaf) as leaf_fd:
                used += self._count_blocks(leaf_fd, leaf, temporaries, found)
        found.sort()
        self.victims = deque(found[: max(_VICTIMS_MIN, len(found) // victims_share)])
        return used

    def leaves(self) -> list[str]:
        """The folders of blocks in this bucket; one without a name where they lie in the bucket itself."""
        if not self._folder.tree.fan_out:
            return [""]
        return sorted(name for name in names_in(self._folder.bucket(self._number)) if LEAF_NAME.fullmatch(name))

    def _count_small(self, folder: int) -> tuple[int, set[int]]:
        """Bytes of disk of a bucket's folder and of what lies in it beside blocks and the folders of blocks, and the
        inodes of its temporaries: one that becomes a block during the count must not be counted twice."""
        used = os.fstat(folder).st_blocks * 512 + DISK_BLOCK_BYTES  # the account's block, whether it exists or not
        inodes: set[int] = set()
        for name in names_in(folder):
            if name == ACCOUNT_NAME or BLOCK_NAME.fullmatch(name) or LEAF_NAME.fullmatch(name):
                continue
            with vanished():
                match = TEMPORARY_NAME.fullmatch(name)
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if match is not None and not stat.S_ISDIR(status.st_mode) and self._rules.expired(match[1]):
                    os.unlink(name, dir_fd=folder)
                    self._rules.note("temporary.swept")
                    continue
                used += occupied(status)
                inodes.add(status.st_ino)
        return used, inodes

    def _count_blocks(self, leaf_fd: int, leaf: str, counted: set[int], found: list[Victim]) -> int:
        used = os.fstat(leaf_fd).st_blocks * 512 if leaf else 0
        for name in names_in(leaf_fd):
            if not leaf and BLOCK_NAME.fullmatch(name) is None:
                continue
            with vanished():
                status = os.stat(name, dir_fd=leaf_fd, follow_symlinks=False)
                used += occupied(status) if status.st_ino not in counted else 0
                if BLOCK_NAME.fullmatch(name) and not stat.S_ISDIR(status.st_mode):
                    found.append(Victim(status.st_mtime_ns, leaf, name, status.st_ino))
        return used


def _wrong(leaf_fd: int, wanted: ExpectedBlock, there: SlotHeader | MismatchedFile) -> MismatchedFile:
    """The file to remove: a block of an older epoch counts as wrong, too."""
    if isinstance(there, MismatchedFile):
        return there
    return MismatchedFile(os.stat(wanted.place.name, dir_fd=leaf_fd, follow_symlinks=False).st_ino)
