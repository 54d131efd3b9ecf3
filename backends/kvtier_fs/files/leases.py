"""Whose temporaries are whose: each process holds a lease, and what it left behind goes when the lease has expired."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from kvtier_fs.files.folder import open_plain, write_all
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
    """When a process began, in ticks since boot; None if there is none, or if it has ended and waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


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
        except FileNotFoundError:
            return True
        try:
            status, holder = os.fstat(fd), decode_holder(os.pread(fd, LEASE_BYTES_MAX, 0))
        finally:
            os.close(fd)
        ours = self._holder
        if holder is not None and (holder.boot, holder.pid_namespace) == (ours.boot, ours.pid_namespace):
            return _started(holder.pid) != holder.started
        beat, since = self._seen.get(name, (-1, 0.0))
        now = self._clock()
        if beat != status.st_mtime_ns:
            self._seen[name] = (status.st_mtime_ns, now)
            return False
        return now - since >= self._seconds

    def sweep(self, folder_fd: int) -> int:
        """Remove expired leases; what they cover has expired with them. Returns how many. Raises OSError."""
        removed = 0
        names = [name for name in os.listdir(folder_fd) if LEASE_NAME.fullmatch(name)]
        for name in names:
            if self.expired(folder_fd, name):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder_fd)
                removed += 1
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        return removed
