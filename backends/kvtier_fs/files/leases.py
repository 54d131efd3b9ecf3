"""Whose temporaries are whose: each process holds a lease, and what it left behind goes when the lease has expired."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from kvtier_fs.files.folder import let_go, names_in, open_plain, write_all
from kvtier_fs.files.records import LEASE_BYTES_MAX, decode_lease, encode_lease

LEASE_NAME = re.compile(r"[0-9a-f]{16}")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease. `boot` and `pid_namespace` say where `pid` means anything; `started` tells pids apart."""

    host: str
    boot: str
    pid_namespace: int
    pid: int
    started: int


def this_process() -> Holder:
    """The holder of this process's leases. Raises OSError where /proc is not what it should be."""
    with open(_BOOT_ID, encoding="ascii") as file:
        boot = file.read().strip()
    pid = os.getpid()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return Holder(socket.gethostname()[:64], boot, namespace, pid, _started(pid) or 0)


def _started(pid: int) -> int | None:
    """When a process began, in ticks since boot; None if there is none, or if it has ended and waits to be reaped.

    A process whose first thread has ended is there as long as another one is in a system call it cannot be torn from.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    ended = fields[0] == b"X" or (fields[0] == b"Z" and int(fields[17]) <= 1)
    return None if ended else int(fields[19])


def decode_holder(data: bytes) -> Holder | None:
    """Whom a lease file names; None if it is damaged."""
    text = decode_lease(data)
    try:
        fields = json.loads(text or "")
        return Holder(
            str(fields["host"]),
            str(fields["boot"]),
            int(fields["pid_namespace"]),
            int(fields["pid"]),
            int(fields["started"]),
        )
    except (ValueError, TypeError, KeyError):
        return None


class Leases:
    """This process's lease and its judgement of others'. Blocking calls.

    A holder in this pid namespace of this boot is asked for by its pid and start time. Any other lease has expired when
    its heartbeat (the file's mtime) has not changed for `seconds` of our own monotonic clock, so no clocks of two
    hosts are ever compared.
    """

    def __init__(self, name: str, holder: Holder, clock: Callable[[], float], seconds: float) -> None:
        self.name = name
        self._holder = holder
        self._clock = clock
        self._seconds = seconds
        self._seen: dict[str, tuple[int, float]] = {}

    def take(self, folder_fd: int) -> None:
        """Write our lease. Raises OSError."""
        fd = open_plain(folder_fd, self.name, os.O_RDWR | os.O_CREAT)
        try:
            write_all(fd, encode_lease(json.dumps(asdict(self._holder))))
        finally:
            os.close(fd)

    def beat(self, folder_fd: int) -> None:
        """Show that we live; a lease that others took away while we stood still is taken anew. Raises OSError."""
        try:
            os.utime(self.name, dir_fd=folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            self.take(folder_fd)

    def release(self, folder_fd: int) -> None:
        """Give our lease up."""
        with suppress(FileNotFoundError):
            os.unlink(self.name, dir_fd=folder_fd)

    def expired(self, folder_fd: int, name: str) -> bool:
        """True if nobody holds this lease any more. Ours never expires for us. Raises OSError."""
        if name == self.name:
            return False
        try:
            fd = open_plain(folder_fd, name, os.O_RDONLY)
            try:
                status, holder = os.fstat(fd), decode_holder(os.pread(fd, LEASE_BYTES_MAX, 0))
            finally:
                let_go(fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return True
            raise
        ours = self._holder
        if holder is not None and (holder.boot, holder.pid_namespace) == (ours.boot, ours.pid_namespace):
            return _started(holder.pid) != holder.started
        beat, since = self._seen.get(name, (-1, 0.0))
        now = self._clock()
        if beat != status.st_mtime_ns:
            self._seen[name] = (status.st_mtime_ns, now)
            return False
        return now - since >= self._seconds

    def dead(self, folder_fd: int) -> list[str]:
        """The leases that are there but have expired; one that cannot be read is taken to be held. Raises OSError."""
        names = [name for name in names_in(folder_fd) if LEASE_NAME.fullmatch(name)]
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        dead = []
        for name in names:
            with suppress(OSError):
                if self.expired(folder_fd, name):
                    dead.append(name)
        return dead

    def remove(self, folder_fd: int, name: str) -> None:
        """Remove an expired lease: what it covers has expired with it. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder_fd)

    def sweep(self, folder_fd: int) -> int:
        """Remove all expired leases. Returns how many. Raises OSError."""
        dead = self.dead(folder_fd)
        for name in dead:
            self.remove(folder_fd, name)
        return len(dead)
