"""A root's folder, opened with checks on who may write to it. Blocking calls, for the root's own threads only.

Every file is opened relative to the folder, without following links, closed on exec, 0600 whatever the umask.
"""

import asyncio
import errno
import fcntl
import os
import re
import socket
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import aiofiles
from pydantic import Field, TypeAdapter, ValidationError

from kvtier.aio.process_lock import keep_from_children, share_with_children
from kvtier.aio.shielded_wait import shielded_wait
from kvtier.errors import RootError
from kvtier.types.geometry import round_up
from kvtier_fs.io.syscalls import NETWORK_MAGICS, filesystem_magic
from kvtier_fs.options import FSOptions, RootOptions
from kvtier_fs.roots.private_tree import PrivateTree

SUPERBLOCK_NAME = "superblock"
LOCK_NAME = "lock"
_OWNER_BYTES_MAX = 4096
SOURCE_MAX = 1024
Pid = Annotated[int, Field(strict=True, ge=1, lt=1 << 31)]
ShortText = Annotated[str, Field(strict=True, max_length=64)]


@dataclass(frozen=True, slots=True)
class LockOwner:
    """The process that a lock file names, for messages. `start`: seconds since 1970 when it became the owner.

    `source` is the root of the stack file that the folder is a share of, or is itself; empty where none was recorded.
    """

    pid: Pid
    host: ShortText
    start: Annotated[float, Field(ge=0, lt=1 << 36)]
    source: Annotated[str, Field(strict=True, max_length=SOURCE_MAX)] = ""


_LOCK_OWNER = TypeAdapter(LockOwner)


def close_quietly(fd: int) -> None:
    """Close a file whose bytes are already on the disk, or not needed: an error of the disk changes nothing then."""
    try:
        os.close(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            raise


def open_plain(folder_fd: int, name: str, flags: int) -> int:
    """Open a plain file in an open folder. Raises OSError; ELOOP for anything that is no plain file."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    if not flags & os.O_RDWR:
        flags |= os.O_NONBLOCK  # the open of a planted pipe must not block
    fd = os.open(name, flags, 0o600, dir_fd=folder_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ELOOP, "is no plain file")
        if flags & os.O_CREAT and stat.S_IMODE(status.st_mode) != 0o600:
            os.fchmod(fd, 0o600)
    except BaseException:
        close_quietly(fd)
        if flags & os.O_EXCL:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder_fd)
        raise
    return fd


@contextmanager
def plain_file(
    folder_fd: int, name: str, flags: int = os.O_RDONLY, close: Callable[[int], None] = close_quietly
) -> Iterator[int]:
    """A plain file in an open folder, open until the block ends. Raises as `open_plain`, and what `close` raises."""
    fd = open_plain(folder_fd, name, flags)
    try:
        yield fd
    finally:
        close(fd)


def write_all(fd: int, data: bytes, at: int = 0) -> None:
    """Write bytes into a file, from `at` on. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        view, at = view[written:], at + written


def keeps_free(fd: int, growth: int, min_free_bytes: int) -> bool:
    """True if the file system of an open file or folder keeps so many bytes free when it grows. Raises OSError.

    One without any blocks does not say how large it is (ramfs, a tmpfs without a limit); it counts as large enough.
    """
    status = os.fstatvfs(fd)
    return not status.f_blocks or status.f_bavail * status.f_frsize - growth >= min_free_bytes


class GuardedFolder(ABC):
    """The folder of one root. Raises RootError for what an operator must correct, OSError for errors of the disk.

    `fd` is the open folder, -1 before `enter` and after `leave`. `note` is what is changed of its modes by
    `make_private`, empty if that is nothing.
    """

    def __init__(self, path: str, options: RootOptions) -> None:
        self.path = path
        self._options = options
        self.fd = -1
        self.note = ""
        self._open_to_others: PrivateTree | None = None
        self._lock_fd = -1
        self._lock_pid = 0
        self._guard = threading.Lock()
        self._left = False

    def enter(self) -> bool:
        """Open the folder, creating it where that is allowed. False if it is not there."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._guard:
            self._check_not_left()
            try:
                self.fd = os.open(self.path, flags)
            except FileNotFoundError:
                if not self._options.create or not os.path.isdir(os.path.dirname(self.path)):
                    return False
                self._create()
                self.fd = os.open(self.path, flags)
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
        status = os.fstat(self.fd)
        if status.st_uid not in (os.geteuid(), 0):
            raise RootError(self.path, f"belongs to another user ({status.st_uid}), who may write into it; chown it")
        tree = PrivateTree(self.path, self.fd, status.st_mode, self.is_own)
        if tree.is_open_to_others:
            self._check_open_to_others(tree)
        system = NETWORK_MAGICS.get(filesystem_magic(self.fd))
        options = self._options
        if system is not None and isinstance(options, FSOptions) and not options.allow_network_fs:
            raise RootError(
                self.path, f"lies on a network file system ({system}); use a local disk or allow_network_fs"
            )

    def _check_open_to_others(self, tree: PrivateTree) -> None:
        """The environment rewrites modes. A root that all the same holds only what is this user's can be used."""
        tree.check()
        if not {SUPERBLOCK_NAME, LOCK_NAME}.intersection(os.listdir(self.fd)):
            raise tree.refusal("it is no root that kvtier has made")
        self._open_to_others, self.note = tree, tree.note

    def make_private(self) -> None:
        """Take away what others may do in a folder that was open to them and holds only what is this user's.

        For a process that is about to use the root; one that only reads it changes nothing. Raises RootError, OSError.
        """
        with self._guard:
            self._check_not_left()
            if self._open_to_others is not None:
                self._open_to_others.make_private()

    @abstractmethod
    def is_own(self, name: str) -> bool:
        """True for a name in the folder that its layout gives to a file of its own."""

    def refusal(self, error: OSError) -> RootError:
        """An error of the operating system, as a RootError that says what to change in the configuration."""
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
        try:
            return open_plain(self.fd, name, flags)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise RootError(self.path, f"{name} is not a plain file; remove it") from error
            raise

    @contextmanager
    def opened(self, name: str, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
        """A file of the root, open until the block ends. Raises as `open_file`, and what its close raises."""
        fd = self.open_file(name, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def try_lock(self, shared: bool = False) -> bool:
        """Become the root's owner, until `leave`. False if another process is. Raises OSError.

        `shared` only keeps owners out, and makes no lock file: FileNotFoundError if there is none.
        """
        with self._guard:
            self._check_not_left()
            fd = self.open_file(LOCK_NAME, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT)
            with ExitStack() as undo:
                undo.callback(os.close, fd)
                undo.callback(share_with_children, fd)
                keep_from_children(fd)
                try:
                    fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                        return False
                    raise RootError(self.path, f"the file system cannot lock files ({error.strerror})") from error
                self._lock_fd, self._lock_pid = fd, os.getpid()
                undo.pop_all()
            return True

    def keeps_lock(self) -> bool:
        """True if the lock file that this process holds is still the one in the folder. Raises OSError.

        Where it is another one, or gone, another process can have locked the root.
        """
        with suppress(FileNotFoundError):
            named = os.stat(LOCK_NAME, dir_fd=self.fd, follow_symlinks=False)
            return named.st_ino == os.fstat(self._lock_fd).st_ino
        return False

    def write_owner(self, source: str | None = None) -> None:
        """Name this process in the lock file, which it has locked, and the source; None: as before. Raises OSError."""
        source = self.recorded_source() if source is None else source
        kept = source if len(source) <= SOURCE_MAX else ""
        owner = LockOwner(os.getpid(), socket.gethostname()[:64], round(time.time()), kept)
        os.ftruncate(self._lock_fd, 0)
        write_all(self._lock_fd, _LOCK_OWNER.dump_json(owner))

    def recorded_source(self) -> str:
        """The root whose share this folder was last opened as; empty where nothing whole says so."""
        owner = self._recorded_owner()
        return "" if owner is None else owner.source

    def _recorded_owner(self) -> LockOwner | None:
        try:
            with plain_file(self.fd, LOCK_NAME) as fd:
                return _LOCK_OWNER.validate_json(os.pread(fd, _OWNER_BYTES_MAX, 0))
        except (ValidationError, OSError):
            return None

    def owner(self) -> str:
        """The holder of the lock that this process cannot have, in words. Only for a message: it never fails.

        The lock file names the last owner, also while tools share the lock.
        """
        with suppress(OSError, RootError):
            return self.live_owner() or "a tool that reads it, such as `kvtier fsck`"
        return self._recorded_owner_text()

    def _recorded_owner_text(self) -> str:
        owner = self._recorded_owner()
        if owner is None:
            return "another process"
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.start))
        return f"process {owner.pid} on {owner.host!r} since {started}"

    def live_owner(self) -> str:
        """The process that owns the root now, in words; empty if there is none. Raises as `try_lock(shared=True)`.

        It takes the lock for an instant, so the opening of a root tries more than once.
        """
        if not self.try_lock(shared=True):
            return self._recorded_owner_text()
        with self._guard:
            self._unlock()
        return ""

    def _check_not_left(self) -> None:
        """A call that was still waiting for a thread when the folder was left must not open anything any more."""
        if self._left:
            raise OSError(errno.EBADF, "the folder was left")

    def leave(self) -> None:
        """Close every file and release the lock. Idempotent."""
        with self._guard:
            self._left = True
            self._close_files()
            self._unlock()
            if self.fd >= 0:
                close_quietly(self.fd)
            self.fd = -1

    def _unlock(self) -> None:
        """Release the lock.

        That is done explicitly, because a child that C code forked may have the file open. A forked child closes its
        own files when it leaves and not the lock, which it closed right after the fork.
        """
        if self._lock_fd >= 0 and self._lock_pid == os.getpid():
            with suppress(OSError):
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            share_with_children(self._lock_fd)
            close_quietly(self._lock_fd)
        self._lock_fd = -1

    @abstractmethod
    def _close_files(self) -> None:
        """Close what a layout keeps open in the folder."""


# -- manifests -------------------------------------------------------------------------------------------------------
# Small readable files, one for each namespace of a root's blocks. For people only; no decision depends on them. File
# objects live on the root's threads.

_DISK_BLOCK_BYTES = 4096
MANIFEST_NAME = re.compile(r"manifest-([0-9a-f]{32})\.json(\.new)?")


def manifest_name(namespace: bytes) -> str:
    """The file that describes a namespace."""
    return f"manifest-{namespace.hex()}.json"


async def write_manifest(folder: GuardedFolder, namespace: bytes, text: str, executor: Executor) -> None:
    """Describe a namespace in a file of its own, replaced in one step. Raises OSError. Goes on when cancelled."""
    name = manifest_name(namespace)

    async def written() -> None:
        # Not `async with`: leaving it, aiofiles closes the file on the event loop's own threads.
        file = await aiofiles.open(f"{name}.new", "wb", opener=folder.open_file, executor=executor)
        try:
            await file.write(text.encode() + b"\n")
        finally:
            await file.close()

    await shielded_wait(written())
    replace = partial(os.replace, f"{name}.new", name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    await asyncio.get_running_loop().run_in_executor(executor, replace)


def make_room_for_manifest(folder: GuardedFolder, namespaces: list[bytes], own_bytes: int, room_bytes: int) -> bool:
    """Remove manifests until one of `own_bytes` fits: that of the namespace at hand, which comes first in
    `namespaces`, and those unused for longest. Returns False if it does not fit at all. Raises OSError.
    """
    sizes, own = {}, round_up(own_bytes, _DISK_BLOCK_BYTES)
    for name in os.listdir(folder.fd):
        match = MANIFEST_NAME.fullmatch(name)
        if match is None:
            continue
        if match[2] or bytes.fromhex(match[1]) not in namespaces[1:]:
            os.unlink(name, dir_fd=folder.fd)
        else:
            status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
            sizes[bytes.fromhex(match[1])] = round_up(status.st_size, _DISK_BLOCK_BYTES)
    room = room_bytes - own
    for namespace in sorted(sizes, key=namespaces.index):
        room -= sizes[namespace]
        if room < 0:
            os.unlink(manifest_name(namespace), dir_fd=folder.fd)
    return room_bytes >= own
