"""A stack process of an engine's own: started by the first of the engine's processes, found by the others."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvtier.aio.process_lock import locked_file
from kvtier.aio.readable import wait_readable
from kvtier.errors import ConfigError, ResourceError
from kvtier.service.channel import is_listening, start_lock

START_SECONDS = 60.0
LINGER_SECONDS = 10.0
"""How long a process goes on without a connection."""
PATH_BYTES_MAX = 107
USUAL_PLACES = ("/run", "/tmp", "/dev/shm")
KEY = "runtime_dir"
"""The key of a stack file that names a place."""
RESTARTS_MAX = 3
HOUR_SECONDS = 3600.0
SCARCE = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""The system has no process, memory or descriptor to give just now."""
NOT_STARTED = "the stack process cannot be started"


class Restarts:
    """The times at which a stack process that has ended is started again: at once three times in an hour, then hourly.

    One that served for an hour counts as sound again. `count` is that of all restarts, for a metric; `clock` is in
    seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock = clock
        self._times: deque[float] = deque(maxlen=RESTARTS_MAX)
        self._runs = True
        self._hourly = False

    @property
    def next_seconds(self) -> float:
        """The time until the next restart is due; 0: now."""
        return max(0.0, self._times[-1] + HOUR_SECONDS - self._clock()) if self._hourly else 0.0

    def on_start(self) -> None:
        """The process is started again."""
        self.count += 1
        self._times.append(self._clock())
        self._runs = True

    def on_end(self) -> None:
        """The process has ended, or could not be started. Nothing unless `on_start` came before."""
        if not self._runs:
            return
        self._runs, now = False, self._clock()
        if self._times and now - self._times[-1] >= HOUR_SECONDS:
            self._times.clear()
            self._hourly = False
        while not self._hourly and self._times and now - self._times[0] >= HOUR_SECONDS:
            self._times.popleft()
        self._hourly = len(self._times) == RESTARTS_MAX

    def take_back(self) -> None:
        """The system had no process to give after `on_start`: that was no restart."""
        self.count -= 1
        self._times.pop()
        self._runs = False

    def begin(self) -> None:
        """The process has ended and is started again. Raises ResourceError if that is not due yet."""
        self.on_end()
        if self.next_seconds:
            raise ResourceError(f"the stack process is started again in {self.next_seconds:.0f} s")
        self.on_start()


class PrivateStack:
    """The stack process of this user for a stack file. `path` is its socket; `restarts` are those by this process."""

    def __init__(self, stack: str, folder: str = "", linger_seconds: float = LINGER_SECONDS) -> None:
        """`stack` is the text of the file, `folder` its `runtime_dir`. Raises ConfigError as `runtime_folder`."""
        name = hashlib.sha256(stack.encode()).hexdigest()[:16]
        self.path = str(runtime_folder(folder) / f"{name}.sock")
        if len(os.fsencode(self.path)) > PATH_BYTES_MAX:
            raise ConfigError(f"the socket {self.path} has a longer path than {PATH_BYTES_MAX} bytes", KEY)
        self.restarts = Restarts()
        self._stack = stack
        self._linger_seconds = linger_seconds

    def start(self, *, again: bool = False) -> None:
        """Start the process unless it is there. It serves for `linger_seconds` at least, in which the caller connects.

        `again`: it has ended, and is started as often as `restarts` allows. Blocks while it starts, up to a minute.
        Raises ConfigError if it cannot be started, ResourceError if it must not be started again yet.
        """
        try:
            with locked_file(start_lock(self.path), START_SECONDS):
                if is_listening(self.path):
                    return
                if again:
                    self.restarts.begin()
                given = {"path": self.path, "linger_seconds": self._linger_seconds, "level": _log_level()}
                try:
                    _start({"stack": self._stack, **given})
                except OSError as error:
                    if again and error.errno in SCARCE:
                        self.restarts.take_back()
                    raise
        except OSError as error:
            raise ConfigError(f"{NOT_STARTED}: {error.strerror or error}", "stack") from error


def runtime_folder(base: str = "") -> Path:
    """A folder of this user alone, of mode 0700, for sockets: below `base`, or below the first of the usual places.

    A usual place that is absent or cannot be written is passed over. Raises ConfigError where nothing is left, and for
    a folder that another user owns, that is a link or that others may enter: who made it is not known.
    """
    reasons = []
    for place in [base] if base else [*filter(None, [os.environ.get("XDG_RUNTIME_DIR")]), *USUAL_PLACES]:
        found = Path(place) / f"kvtier-{os.geteuid()}"
        try:
            with suppress(FileExistsError):
                found.mkdir(mode=0o700)
            about = found.lstat()
        except OSError as error:
            reasons.append(f"{place}: {error.strerror}")
            continue
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) != 0o700:
            raise ConfigError(f"{found} is no folder of this user of mode 0700; remove it, or name another place", KEY)
        if os.access(found, os.W_OK | os.X_OK):
            return found
        reasons.append(f"{found}: cannot be written")
    raise ConfigError(f"there is no place for the socket of a stack process ({'; '.join(reasons)})", KEY)


def _log_level() -> int:
    """The level of this process's log of kvtier."""
    return logging.getLogger("kvtier").getEffectiveLevel()


def _start(given: dict[str, object]) -> None:
    """Start the process and wait until it listens. Raises ConfigError, OSError.

    It is a grandchild, which this process need not wait for and which ends by itself. Its log goes where this process
    writes errors, and it says on a pipe that it listens, or why not.
    """
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        command = [sys.executable, "-P", "-m", "kvtier.service"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=theirs, start_new_session=True) as process:
            os.close(theirs)
            theirs = -1
            try:
                with suppress(BrokenPipeError):  # it has ended, and says why
                    process.communicate(json.dumps(given).encode(), START_SECONDS)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise ConfigError(f"{NOT_STARTED}: it does not begin within {START_SECONDS:g} s", "stack") from error
        fault = _read_fault(ours, time.monotonic() + START_SECONDS, process.returncode)
    finally:
        os.close(ours)
        if theirs >= 0:
            os.close(theirs)
    if fault:
        raise ConfigError(f"{NOT_STARTED}: {fault}", "stack")


def _read_fault(pipe: int, deadline: float, status: int) -> str:
    """Why a process that starts does not listen; empty once it does. It is killed if it does not say so in time."""
    said, process = b"", 0
    while True:
        if not wait_readable(pipe, deadline - time.monotonic()):
            if process:
                os.kill(process, signal.SIGKILL)
            return f"it does not listen within {START_SECONDS:g} s"
        part = os.read(pipe, 65536)
        said += part
        lines = [json.loads(line) for line in said.split(b"\n")[:-1]]
        process = lines[0]["process"] if lines else 0
        if len(lines) > 1:
            return str(lines[1]["fault"])
        if not part:
            return f"it ended with status {status}" if status else "it ended before it listened, see its log"
