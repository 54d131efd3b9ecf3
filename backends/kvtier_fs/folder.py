"""One root's folder and its files. Blocking calls, made on the root's own threads only, never on the event loop.

Every file is opened relative to the folder, without following links, closed on exec, 0600 whatever the umask.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
from contextlib import suppress

from kvtier.errors import RootError
from kvtier_fs.options import FSOptions
from kvtier_fs.regions import REGIONS_PER_FILE, RegionPlan
from kvtier_fs.superblock import COPY_BYTES
from kvtier_fs.syscalls import NETWORK_MAGICS, fallocate, filesystem_magic

SUPERBLOCK_NAME = "superblock"
SNAPSHOT_NAME = "snapshot"
LOCK_NAME = "lock"
_SNAPSHOT_TEMPORARY = f"{SNAPSHOT_NAME}.new"
_SLAB_NAME = re.compile(r"slab-([0-9]{5,9})")
_OWN_NAME = re.compile(rf"superblock|lock|snapshot(\.new)?|{_SLAB_NAME.pattern}|manifest-[0-9a-f]{{32}}\.json(\.new)?")
_NO_SUPPORT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_SUPERBLOCK_READ_BYTES = 1 << 16


class RootFolder:
    """The files of one root. Raises RootError for what a person must put right, OSError for what the disk does."""

    def __init__(self, path: str, options: FSOptions) -> None:
        self.path = path
        self._options = options
        self._folder_fd = -1
        self._lock_fd = -1
        self._lock_pid = 0
        self._slabs: dict[int, int] = {}
        self._guard = threading.Lock()
        self._left = False
        self.direct = False
        self.preallocates = True

    @property
    def fd(self) -> int:
        """The open folder."""
        return self._folder_fd

    def enter(self) -> bool:
        """Open the folder, creating it where that is allowed. False if it is not there."""
        with self._guard:
            self._check_not_left()
            return self._enter()

    def _enter(self) -> bool:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._folder_fd = os.open(self.path, flags)
        except FileNotFoundError:
            if not self._options.create or not os.path.isdir(os.path.dirname(self.path)):
                return False
            self._create()
            self._folder_fd = os.open(self.path, flags)
        except OSError as error:
            if os.path.islink(self.path):
                raise RootError(self.path, "is a symbolic link; name the folder it leads to") from error
            raise self.refusal(error) from error
        self._check_folder()
        return True

    def _create(self) -> None:
        try:
            os.mkdir(self.path, 0o700)
        except FileExistsError:
            return
        except OSError as error:
            raise RootError(self.path, f"cannot be created ({error.strerror}); create it for this user") from error
        try:
            os.chmod(self.path, 0o700)  # whatever the umask left of it
        except OSError as error:
            with suppress(OSError):
                os.rmdir(self.path)
            raise self.refusal(error) from error

    def _check_folder(self) -> None:
        status = os.fstat(self._folder_fd)
        if status.st_mode & 0o022:
            mode = status.st_mode & 0o7777
            raise RootError(self.path, f"others may write into it (mode {mode:04o}); chmod go-w it")
        if status.st_uid not in (os.geteuid(), 0):
            raise RootError(self.path, f"belongs to another user ({status.st_uid}), who may write into it; chown it")
        system = NETWORK_MAGICS.get(filesystem_magic(self._folder_fd))
        if system is not None and not self._options.allow_network_fs:
            raise RootError(
                self.path, f"lies on a network file system ({system}); use a local disk or allow_network_fs"
            )

    def refusal(self, error: OSError) -> RootError:
        """What an error of the operating system means to whoever configured this root."""
        reasons = {
            errno.ENOTDIR: "is not a folder; name a folder for this tier alone",
            errno.EACCES: "no permission; make this user its owner with mode 0700",
            errno.EPERM: "no permission; make this user its owner with mode 0700",
            errno.EROFS: "lies on a read-only file system; choose one that can be written",
            errno.ENOSPC: "the disk is full; free some space or choose another disk",
        }
        fallback = f"cannot be used ({error.strerror})"
        return RootError(self.path, reasons.get(error.errno or 0, fallback))

    def open_file(self, name: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        """Open one of the root's own files; it must be a plain one. Raises RootError if it is something else."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        if not flags & os.O_RDWR:
            flags |= os.O_NONBLOCK  # a planted pipe must not hold the open up
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self._folder_fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise RootError(self.path, f"{name} is not a plain file; remove it") from error
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise RootError(self.path, f"{name} is not a plain file; remove it")
            if stat.S_IMODE(status.st_mode) != 0o600 and flags & os.O_CREAT:
                os.fchmod(fd, 0o600)
        except BaseException:
            self._close(fd)
            raise
        return fd

    def try_lock(self) -> bool:
        """Become the root's owner, until `leave`. False if another process is."""
        with self._guard:
            self._check_not_left()
            return self._try_lock()

    def _check_not_left(self) -> None:
        """A call that was still waiting for a thread when the folder was left must not open anything any more."""
        if self._left:
            raise OSError(errno.EBADF, "the folder was left")

    def _try_lock(self) -> bool:
        try:
            fd = self.open_file(LOCK_NAME)
        except OSError as error:
            raise self.refusal(error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise RootError(self.path, f"the file system cannot lock files ({error.strerror})") from error
        self._lock_fd, self._lock_pid = fd, os.getpid()
        return True

    def read_superblock(self) -> bytes:
        """The superblock file's bytes; empty if there is none."""
        try:
            fd = self.open_file(SUPERBLOCK_NAME, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(fd, _SUPERBLOCK_READ_BYTES, 0)
        finally:
            os.close(fd)

    def write_superblock(self, copy: bytes) -> None:
        """Write both copies, one after the other, each on the disk before the next is touched.

        When this returns, the superblock is durable, and no single damaged copy can bring an older one back.
        """
        fd = self.open_file(SUPERBLOCK_NAME)
        try:
            for at in (0, COPY_BYTES):
                self.write_at(fd, copy, at)
                self.sync(fd)
            self.sync(self._folder_fd)
        finally:
            os.close(fd)

    def read_snapshot(self, limit: int) -> bytes:
        """The bytes of the snapshot that a clean close left; empty if there is none, or if it is over `limit`."""
        try:
            fd = self.open_file(SNAPSHOT_NAME, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        try:
            if os.fstat(fd).st_size > limit:
                return b""
            with open(fd, "rb", closefd=False) as file:
                return file.read(limit)
        finally:
            os.close(fd)

    def drop_snapshot(self) -> None:
        """Remove the snapshot, and what a crash left of one that was being written."""
        for name in (SNAPSHOT_NAME, _SNAPSHOT_TEMPORARY):
            try:
                self.unlink(name)
            except FileNotFoundError:
                continue
            except IsADirectoryError as error:
                raise RootError(self.path, f"{name} is not a plain file; remove it") from error

    def write_snapshot(self, data: bytes) -> None:
        """Put a snapshot in place in one step. Raises OSError, and leaves none, if there is no room for it."""
        self.drop_snapshot()
        try:
            fd = self.open_file(_SNAPSHOT_TEMPORARY, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                self._keep_free(fd, len(data))
                self.write_at(fd, data, 0)
            finally:
                os.close(fd)
            self.rename(_SNAPSHOT_TEMPORARY, SNAPSHOT_NAME)
        except OSError:
            self.drop_snapshot()
            raise

    def write_at(self, fd: int, data: bytes, at: int) -> None:
        """Write all bytes at an offset. Raises OSError. With the four below: all that this class changes on a disk."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, at)
            if not written:
                raise OSError(errno.EIO, "nothing was written")
            view, at = view[written:], at + written

    def sync(self, fd: int) -> None:
        """Make a file's contents durable, or the folder's entries."""
        os.fsync(fd) if fd == self._folder_fd else os.fdatasync(fd)

    def unlink(self, name: str) -> None:
        """Remove a file of the root."""
        os.unlink(name, dir_fd=self._folder_fd)

    def rename(self, old: str, new: str) -> None:
        """Give a file of the root another name, which it takes over."""
        os.replace(old, new, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)

    def truncate(self, fd: int, size: int) -> None:
        """Cut a file's tail off."""
        os.ftruncate(fd, size)

    def trim(self, plan: RegionPlan | None) -> None:
        """Remove what lies outside a plan: files and tails of regions it does not have; everything if there is none."""
        for name in os.listdir(self._folder_fd):
            match = _SLAB_NAME.fullmatch(name)
            if match is None:
                continue
            number = int(match[1])
            if plan is None or number >= plan.files:
                self.unlink(name)
                continue
            fd = self.open_file(name)
            try:
                last = min(plan.regions - number * REGIONS_PER_FILE, REGIONS_PER_FILE)
                if os.fstat(fd).st_size > last * plan.stride:
                    self.truncate(fd, last * plan.stride)
            finally:
                os.close(fd)

    def existing_slabs(self) -> list[int]:
        """Numbers of the slab files that are there, in order."""
        matches = (_SLAB_NAME.fullmatch(name) for name in os.listdir(self._folder_fd))
        return sorted(int(match[1]) for match in matches if match)

    def slab(self, number: int) -> int:
        """The open slab file of a number, created empty if it is not there. Stays open until `leave`."""
        with self._guard:
            self._check_not_left()
            if number not in self._slabs:
                flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.direct else 0)
                self._slabs[number] = self.open_file(f"slab-{number:05d}", flags)
            return self._slabs[number]

    def allocate(self, plan: RegionPlan, region: int) -> int:
        """Reserve a region's blocks, keeping `min_free_bytes`, and return its file.

        Raises OSError: ENOSPC if there is no room. Where the file system cannot reserve, the place arithmetic alone
        holds the bound.
        """
        fd = self.slab(plan.file_of(region))
        self._keep_free(fd, plan.stride)
        if self.preallocates:
            try:
                fallocate(fd, plan.region_offset(region), plan.stride)
            except OSError as error:
                if error.errno not in _NO_SUPPORT:
                    raise
                self.preallocates = False
        return fd

    def _keep_free(self, fd: int, growth: int) -> None:
        """Raise OSError (ENOSPC) if the file system would be left with less than `min_free_bytes`."""
        status = os.fstatvfs(fd)
        # No blocks at all: the file system does not say how large it is (ramfs, a tmpfs without a limit).
        if status.f_blocks and status.f_bavail * status.f_frsize - growth < self._options.min_free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def unknown(self) -> list[str]:
        """Names in the folder that are none of ours, in order."""
        return sorted(name for name in os.listdir(self._folder_fd) if _OWN_NAME.fullmatch(name) is None)

    def leave(self) -> None:
        """Close every file and give the lock up. Idempotent.

        The lock is given up by name, for a child forked meanwhile may keep the file open. Such a child closes its own
        files here and leaves the lock alone.
        """
        with self._guard:
            self._left = True
            slabs, self._slabs = self._slabs, {}
            for fd in slabs.values():
                self._close(fd)
            if self._lock_fd >= 0:
                if self._lock_pid == os.getpid():
                    with suppress(OSError):
                        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
                self._close(self._lock_fd)
            if self._folder_fd >= 0:
                self._close(self._folder_fd)
            self._lock_fd = self._folder_fd = -1

    @staticmethod
    def _close(fd: int) -> None:
        """Close a file; what the disk has to say to that changes nothing any more, and the descriptor is gone."""
        with suppress(OSError):
            os.close(fd)
