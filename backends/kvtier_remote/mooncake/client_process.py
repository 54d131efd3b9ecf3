"""A client of Mooncake in a process of its own, and the memory it shares with this one."""

from __future__ import annotations

import errno
import importlib.util
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.types.jobs import MISSING, BlockOutcome, DropReason, dropped, failed
from kvtier_remote.answers import items_of, number, reading_answers
from kvtier_remote.mooncake.options import START_SECONDS, MooncakeOptions
from kvtier_remote.reachable import try_connection

INSTALL = "needs the package mooncake-transfer-engine-non-cuda; pip install 'kvtier[mooncake]'"
_SCRIPT = Path(__file__).with_name("client_main.py")
_CHUNK_BYTES = 1 << 16
_ANSWER_BYTES_MAX = 1 << 20
_SHOWN = 200
_DETACHED: dict[str, Any] = {
    "start_new_session": True,
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.DEVNULL,
    "stderr": subprocess.DEVNULL,
}
"""The library writes its log to standard error; signals of a terminal are not for its process."""


def installed() -> bool:
    """True if the library is there; it is not imported."""
    return importlib.util.find_spec("mooncake") is not None


class ClientProcess:
    """A client in a process of its own, used by one thread. A request that is not answered within its time kills the
    process, so that nothing of it can be written later; the next request starts another one. The process ends with the
    thread that started it at the latest."""

    silent: ClassVar[bool] = False  # it connects again by itself

    def __init__(self, options: MooncakeOptions, memory_bytes: int) -> None:
        self._options = options
        fd = os.memfd_create("kvtier-mooncake", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, memory_bytes)
            self.memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, memory_bytes), np.uint8)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket
        self._received = b""
        self._ready = False

    @property
    def patience_seconds(self) -> float:
        """The time that requests after one another may take together."""
        return self._options.job_timeout_seconds

    def open(self) -> None:
        """Start the process and wait until it has connected. Raises ConfigError."""
        if not installed():
            raise ConfigError(INSTALL, "type")
        options, key = self._options, "master"
        try:
            try_connection(options.master, options.request_timeout_seconds)
            key = options.suspect_key
            self._connect(START_SECONDS)
        except OSError as error:
            reason = error.strerror or "does not answer"
            raise ConfigError(f"{options.master}: {reason}", key) from None

    def ask(self, call: str, names: Sequence[str], offsets: Sequence[int] = (), sizes: Sequence[int] = ()) -> list[int]:
        """Sends a question. The answer is a number for each name: a length or 0, or one of the library's error codes.
        Raises OSError."""
        seconds = self._options.request_timeout_seconds
        self._connect(seconds)
        counts = len(names), len(names)
        try:
            answer = [_code(one) for one in items_of(self._exchange([call, names, offsets, sizes], seconds), *counts)]
        except OSError:
            self._end()
            raise
        return answer

    def _connect(self, seconds: float) -> None:
        if self._process is None:
            self._start()
        if self._ready:
            return
        try:
            answer = self._receive(time.monotonic() + seconds)
        except TimeoutError:  # it goes on connecting
            raise
        except OSError:
            self._end()
            raise
        if answer != "ready":
            self._end()
            raise OSError(errno.ECONNREFUSED, f"the library cannot connect ({ascii(answer)[1:_SHOWN]})")
        self._ready = True

    def _start(self) -> None:
        own, theirs = socket.socketpair()
        with theirs:
            inherited = theirs.fileno(), self._fd
            command = [sys.executable, str(_SCRIPT), *map(str, inherited), str(os.getpid())]
            try:
                self._process = subprocess.Popen(command, pass_fds=inherited, **_DETACHED)
            except OSError:
                own.close()
                raise
        self._channel, self._received, self._ready = own, b"", False
        try:
            self._send(self._config(), time.monotonic() + self._options.request_timeout_seconds)
        except OSError:
            self._end()
            raise

    def _config(self) -> dict[str, Any]:
        options = self._options
        return {
            "seconds": START_SECONDS,
            "replicas": options.replicas,
            "local_hostname": options.local_hostname,
            "metadata_server": options.metadata_server,
            "global_segment_size": "0",
            "local_buffer_size": "0",
            "protocol": options.protocol,
            "rdma_devices": options.devices,
            "master_server_addr": options.master,
            "tenant_id": options.tenant,
        }

    def _exchange(self, request: object, seconds: float) -> object:
        deadline = time.monotonic() + seconds
        self._send(request, deadline)
        return self._receive(deadline)

    def _send(self, request: object, deadline: float) -> None:
        self._channel.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        except TimeoutError:
            raise _late() from None

    def _receive(self, deadline: float) -> object:
        while b"\n" not in self._received:
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                more = self._channel.recv(_CHUNK_BYTES)
            except TimeoutError:
                raise _late() from None
            if not more:
                raise OSError(errno.ECONNRESET, "the client's process has ended")
            self._received += more
            number(len(self._received), _ANSWER_BYTES_MAX)
        line, _, self._received = self._received.partition(b"\n")
        with reading_answers():
            found: object = json.loads(line)
        return found

    def _end(self) -> None:
        """Kill the process, and with it what it has in flight."""
        process, self._process = self._process, None
        if process is not None:
            self._channel.close()
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the process and give the memory back."""
        self._end()
        os.close(self._fd)


def _code(answer: object) -> int:
    """A length, or a code of the library, which is below 0. Raises OSError."""
    return -number(-answer) if isinstance(answer, int) and answer < 0 else number(answer)


def _late() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


MISSING_CODES = frozenset((-703, -704, -710, -712))
"""Not there, not complete yet, or without a replica."""
NO_SPACE = -200
_IN_PROGRESS = frozenset((-601, -705, -706, -708))
"""Another client writes the same name at this moment."""
_LEASE_EXPIRED = -707
_ERRNO = {
    NO_SPACE: errno.ENOSPC,
    -101: errno.EHOSTDOWN,
    -103: errno.EHOSTDOWN,
    -600: errno.EINVAL,
    -900: errno.ECONNREFUSED,
    -901: errno.ETIMEDOUT,
    _LEASE_EXPIRED: errno.EBUSY,
    **dict.fromkeys(_IN_PROGRESS, errno.EBUSY),
}


def outcome_of(code: int) -> BlockOutcome:
    """The outcome of a block whose request ended with a code below 0."""
    if code in MISSING_CODES:
        return MISSING
    if code == NO_SPACE:
        return dropped(DropReason.DISK_FULL)
    if code in _IN_PROGRESS:
        return dropped(DropReason.IN_FLIGHT)
    return failed(errno_of(code))


def errno_of(code: int) -> int:
    """The errno nearest to a code."""
    return _ERRNO.get(code, errno.EIO)


def os_error(code: int) -> OSError:
    """A code as an OSError."""
    number = errno_of(code)
    return OSError(number, f"{os.strerror(number)}, code {code} of the library")
