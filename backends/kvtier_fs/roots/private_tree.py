"""A root that others were allowed to write into, as a pod's `fsGroup` does at each mount, made private again."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtier.errors import RootError

_GROUP_WRITES, _ALL_WRITE = stat.S_IWGRP, stat.S_IWOTH
_UNFINISHED = stat.S_ISVTX | 0o700
"""Mode of a root while it is made private: no other user can enter it, and an opening after a crash looks again."""
_DEPTH_MAX = 8
_GONE = (errno.ENOENT, errno.ESTALE)
_ADVICE = (
    "chmod go-w it once all of it is this user's; for a pod with fsGroup set fsGroupChangePolicy: OnRootMismatch, or "
    "name a subfolder of the volume"
)


class PrivateTree:
    """Everything below the open folder of a root, which has this `mode`.

    All of it must belong to this user, with no name outside. Links are never followed: what is opened is judged by its
    descriptor. Raises RootError for what is another's, and OSError. Names that `is_own` denies are judged and left as
    they are. Blocking calls.
    """

    def __init__(self, path: str, fd: int, mode: int, is_own: Callable[[str], bool]) -> None:
        self._path = path
        self._fd = fd
        self._mode = stat.S_IMODE(mode)
        self._is_own = is_own
        self._names_missing: dict[int, tuple[int, str]] = {}

    @property
    def is_open_to_others(self) -> bool:
        """True if others may write into the folder, or if it was not made private to the end."""
        return bool(self._mode & (_GROUP_WRITES | _ALL_WRITE | stat.S_ISVTX))

    @property
    def note(self) -> str:
        """The changes, for people."""
        return (
            f"{self._path}: others were allowed to write into it (mode {self._mode:04o}, as a pod's fsGroup sets it), "
            f"and all of it is this user's: folders get mode 0700, files 0600"
        )

    def check(self) -> None:
        """Look at everything, and change nothing. What every user may write into no environment has made so."""
        if self._mode & _ALL_WRITE:
            raise self.refusal("not only its group")
        self._judge("the folder", os.fstat(self._fd))
        self._walk(self._fd, "", make_private=False)
        for missing, name in self._names_missing.values():
            if missing:
                raise self.refusal(f"{name} has another name elsewhere (a hard link)")

    def make_private(self) -> None:
        """Take away what others may do, after `check`. What came in since is judged as well."""
        os.fchmod(self._fd, _UNFINISHED)
        self._walk(self._fd, "", make_private=True)
        os.fchmod(self._fd, 0o700)
        if stat.S_IMODE(os.fstat(self._fd).st_mode) & (_GROUP_WRITES | _ALL_WRITE):
            raise self.refusal("the file system does not change its mode")

    def _walk(self, folder_fd: int, where: str, make_private: bool) -> None:
        if where.count("/") > _DEPTH_MAX:
            raise self.refusal(f"folders in it are nested too deeply: {where}")
        for name in names_in(folder_fd):
            at = f"{where}{name!r}"
            with _opened(folder_fd, name) as (fd, status):
                if status is None:
                    continue
                self._judge(at, status)
                if not make_private:
                    self._count_names(at, status)
                elif status.st_nlink > 1 and stat.S_ISREG(status.st_mode) and status.st_ino not in self._names_missing:
                    raise self.refusal(f"{at} has another name elsewhere (a hard link)")
                if fd < 0:
                    continue
                is_folder = stat.S_ISDIR(status.st_mode)
                mode = 0o700 if is_folder else 0o600
                if make_private and (where or self._is_own(name)) and stat.S_IMODE(status.st_mode) != mode:
                    os.fchmod(fd, mode)
                if is_folder:
                    self._walk(fd, f"{at}/", make_private)

    def _judge(self, at: str, status: os.stat_result) -> None:
        if status.st_uid != os.geteuid():
            raise self.refusal(f"{at} belongs to another user ({status.st_uid})")

    def _count_names(self, at: str, status: os.stat_result) -> None:
        """A file with several names is this user's alone if all of them are found here."""
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            missing, _ = self._names_missing.get(status.st_ino, (status.st_nlink, at))
            self._names_missing[status.st_ino] = missing - 1, at

    def refusal(self, reason: str) -> RootError:
        """Why it stays open to others, and what to set."""
        return RootError(self._path, f"others may write into it (mode {self._mode:04o}), and {reason}; {_ADVICE}")


def names_in(folder_fd: int) -> list[str]:
    """The names in an open folder, each once. Raises OSError.

    Through a descriptor of its own: all copies of one share the place a listing has come to, so that two threads that
    list the same open folder would each find some names missing and others twice.
    """
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


@contextmanager
def _opened(folder_fd: int, name: str) -> Iterator[tuple[int, os.stat_result | None]]:
    """A plain file or folder, open, and what it is; -1 for anything else, which stays closed; None if it is gone."""
    fd, status = -1, None
    try:
        try:
            status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
                status = os.fstat(fd)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            status = None
        yield fd, status
    finally:
        if fd >= 0:
            os.close(fd)
