"""Leases: each process holds one, and its temporaries may be removed once its lease has expired."""

import errno
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from kvtier.tier.block_envelope import COUNTER_LIMIT
from kvtier_fs.format.tree_records import LEASE_BYTES_MAX, decode_lease, encode_lease
from kvtier_fs.roots.folder import Pid, ShortText, plain_file, write_all
from kvtier_fs.roots.private_tree import names_in

LEASE_NAME = re.compile(r"[0-9a-f]{16}")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease. `boot` and `pid_namespace` say where `pid` means anything; `started` tells pids apart."""

    host: ShortText
    boot: ShortText
    pid_namespace: Annotated[int, Field(strict=True, ge=0, lt=COUNTER_LIMIT)]
    pid: Pid
    started: Annotated[int, Field(strict=True, ge=0, lt=COUNTER_LIMIT)]


_HOLDER = TypeAdapter(Holder)


def this_process() -> Holder:
    """The holder of this process's leases. Raises OSError where /proc is not what it should be."""
    with open(_BOOT_ID, encoding="ascii") as file:
        boot = file.read().strip()
    pid = os.getpid()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return Holder(socket.gethostname()[:64], boot, namespace, pid, _start_ticks(pid) or 0)


def _start_ticks(pid: int) -> int | None:
    """The time a process began, in ticks since boot; None if there is none, or if it has ended and was not reaped yet.

    A process whose first thread has ended still exists while another thread is in a system call that cannot be
    interrupted.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    ended = fields[0] == b"X" or (fields[0] == b"Z" and int(fields[17]) <= 1)
    return None if ended else int(fields[19])


def decode_holder(data: bytes) -> Holder | None:
    """The holder that a lease file names; None if it is damaged."""
    try:
        return _HOLDER.validate_json(decode_lease(data) or "")
    except ValidationError:
        return None


class FolderLeases:
    """This process's lease, and which leases of others have expired. Blocking calls.

    A holder in this pid namespace of this boot is looked up by its pid and start time. Any other lease has expired when
    its heartbeat (the file's mtime) has not changed for `seconds` of this process's monotonic clock, so the clocks of
    two hosts are never compared.
    """

    def __init__(self, folder_fd: int, name: str, holder: Holder, clock: Callable[[], float], seconds: float) -> None:
        self.name = name
        self._folder_fd = folder_fd
        self._holder = holder
        self._clock = clock
        self._seconds = seconds
        self._seen: dict[str, tuple[int, float]] = {}

    def take(self) -> None:
        """Write our lease. Raises OSError."""
        with plain_file(self._folder_fd, self.name, os.O_RDWR | os.O_CREAT, os.close) as fd:
            write_all(fd, encode_lease(_HOLDER.dump_json(self._holder).decode()))

    def beat(self) -> None:
        """Renew the heartbeat. A lease that others removed meanwhile is taken again. Raises OSError."""
        try:
            os.utime(self.name, dir_fd=self._folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            self.take()

    def expired(self, name: str) -> bool:
        """True if no process holds this lease any more; one that cannot be read counts as held. Ours never expires."""
        if name == self.name:
            return False
        try:
            with plain_file(self._folder_fd, name) as fd:
                status, holder = os.fstat(fd), decode_holder(os.pread(fd, LEASE_BYTES_MAX, 0))
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ESTALE)
        ours = self._holder
        if holder is not None and (holder.boot, holder.pid_namespace) == (ours.boot, ours.pid_namespace):
            return _start_ticks(holder.pid) != holder.started
        beat, since = self._seen.get(name, (-1, 0.0))
        now = self._clock()
        if beat != status.st_mtime_ns:
            self._seen[name] = (status.st_mtime_ns, now)
            return False
        return now - since >= self._seconds

    def dead(self) -> list[str]:
        """The leases that exist but have expired. Raises OSError if they cannot be listed."""
        names = [name for name in names_in(self._folder_fd) if LEASE_NAME.fullmatch(name)]
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        return list(filter(self.expired, names))

    def remove(self, name: str) -> None:
        """Remove our own lease, or one that has expired: what it covers has expired with it. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder_fd)
