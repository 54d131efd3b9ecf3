"""A stack process of an engine's own: started by the first of its processes, found by the others."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.service.channel import is_listening

START_SECONDS = 60.0
LINGER_SECONDS = 10.0
PATH_BYTES_MAX = 107


def private_socket(stack: str, folder: str = "") -> str:
    """The socket of the stack process of this user for this stack file; starts the process unless it is there.

    `stack` is the text of the file. The folder is `folder`, or one of this user below XDG_RUNTIME_DIR or the folder of
    temporary files. Raises ConfigError if the process cannot be started.
    """
    name = hashlib.sha256(stack.encode()).hexdigest()[:16]
    path = str(_private_folder(folder) / f"{name}.sock")
    if len(path.encode()) > PATH_BYTES_MAX:
        raise ConfigError(f"the socket {path} has a longer path than {PATH_BYTES_MAX} bytes", "runtime_dir")
    with _locked(f"{path}.lock"):
        if not is_listening(path):
            Path(path).unlink(missing_ok=True)
            _start(stack, path)
    return path


def _private_folder(folder: str) -> Path:
    """A folder of mode 0700 that is this user's."""
    base = folder or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    found = Path(base) / f"kvtier-{os.geteuid()}"
    try:
        found.mkdir(mode=0o700, exist_ok=True)
        about = found.lstat()
    except OSError as error:
        raise ConfigError(f"no folder for the stack process can be made: {error}", "runtime_dir") from error
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) != 0o700:
        raise ConfigError(f"{found} is not a folder of this user with mode 0700", "runtime_dir")
    return found


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
