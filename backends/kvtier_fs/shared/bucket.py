"""A bucket: a folder with a share of the capacity, an account of what it holds, and the order of eviction.

Everything that changes the account runs on the root's threads and holds the bucket's lock. Renaming a temporary needs
no lock, because it does not change the account.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kvtier.tier.block_age import AgeLimit
from kvtier.tier.block_envelope import SlotHeader, decode_slot_header
from kvtier.types.geometry import round_up
from kvtier.types.jobs import PRESENT, BlockOutcome, DropReason, dropped
from kvtier_fs.io.syscalls import fallocate
from kvtier_fs.roots.folder import keeps_free, open_plain
from kvtier_fs.shared.block_file import ExpectedBlock, MismatchedFile, Temporary, header_now, read_front, remove_if
from kvtier_fs.shared.folder import GONE, LockBusy, TreeFolder, names_in, vanished, with_lock
from kvtier_fs.shared.paths import BLOCK_NAME, DISK_BLOCK_BYTES, TEMPORARY_NAME, occupied
from kvtier_fs.shared.usage import FULL, BucketRules, BucketUsage, Victim

T = TypeVar("T")


class Bucket(BucketUsage):
    """A bucket in this process. `visit_lock` allows one visit at a time. `refused`: when the lock was first
    found taken since this process last held it, or None. `leftovers`: temporaries, still charged, that the next visit
    discards."""

    def __init__(self, folder: TreeFolder, number: int, rules: BucketRules) -> None:
        super().__init__(folder, number, rules)
        self.visit_lock = asyncio.Lock()
        self.refused: float | None = None
        self.leftovers: list[Temporary] = []
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


def _wrong(leaf_fd: int, wanted: ExpectedBlock, there: SlotHeader | MismatchedFile) -> MismatchedFile:
    """The file to remove: a block of an older epoch counts as wrong, too."""
    if isinstance(there, MismatchedFile):
        return there
    return MismatchedFile(os.stat(wanted.place.name, dir_fd=leaf_fd, follow_symlinks=False).st_ino)
