"""The account of a bucket: how many bytes of disk everything in it takes, and which of its blocks are the oldest.

Everything here runs with the bucket's lock held. The account never states less than the disk holds: space is charged
before it is taken and released after it was freed.
"""

import errno
import os
import stat
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier_fs.format.tree_records import decode_account, encode_account
from kvtier_fs.roots.folder import plain_file, write_all
from kvtier_fs.shared.folder import TreeFolder, names_in, read_small, vanished
from kvtier_fs.shared.leases import FolderLeases
from kvtier_fs.shared.paths import BLOCK_NAME, DISK_BLOCK_BYTES, LEAF_NAME, TEMPORARY_NAME, occupied

ACCOUNT_NAME = "account"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors that mean: no room on the disk, of bytes or of inodes."""
_VICTIMS_MIN = 64
_VICTIMS_SHARE = 4


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


class BucketUsage:
    """Content of one bucket, as this process counted it. `victims`: the oldest blocks of the last count. `known`: it
    was counted by this process, and stated since."""

    def __init__(self, folder: TreeFolder, number: int, rules: BucketRules) -> None:
        self.victims: deque[Victim] = deque()
        self._folder = folder
        self._number = number
        self._rules = rules
        self.known = False

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
