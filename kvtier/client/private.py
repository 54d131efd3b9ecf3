"""A stack process of an engine's own: started by the first of its processes, found by the others."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.service.channel import is_listening

START_SECONDS = 60.0
LINGER_SECONDS = 10.0
PATH_BYTES_MAX = 107
USUAL_PLACES = ("/run", "/tmp", "/dev/shm")
KEY = "runtime_dir"
"""The key of a stack file that names a place."""


def private_socket(stack: str, folder: str = "") -> str:
    """The socket of the stack process of this user for this stack file; starts the process unless it is there.

    `stack` is the text of the file, `folder` its `runtime_dir`. Raises ConfigError if the process cannot be started.
    """
    name = hashlib.sha256(stack.encode()).hexdigest()[:16]
    path = str(runtime_folder(folder) / f"{name}.sock")
    if len(path.encode()) > PATH_BYTES_MAX:
        raise ConfigError(f"the socket {path} has a longer path than {PATH_BYTES_MAX} bytes", KEY)
    with _locked(f"{path}.lock"):
        if not is_listening(path):
            Path(path).unlink(missing_ok=True)
            _start(stack, path)
    return path


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


@contextmanager
def _locked(path: str) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _start(stack: str, path: str) -> None:
    """Start the process and wait until it listens. Its log goes where this process writes its own."""
    given = json.dumps({"stack": stack, "path": path, "linger_seconds": LINGER_SECONDS}).encode()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtier.service"], stdin=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(given)
    except OSError as error:
        raise ConfigError(f"the stack process cannot be started: {error}", "stack") from error
    until = time.monotonic() + START_SECONDS
    while not is_listening(path):
        status = process.poll()
        if status is not None or time.monotonic() > until:
            process.kill()
            raise ConfigError(f"the stack process did not start: status {status}", "stack")
        time.sleep(0.02)
