"""Digests of whole files, such as a model's weights, remembered so that an unchanged file is read once."""

import hashlib
import json
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import ResourceError

THREADS = 4
CHUNK_BYTES = 1 << 20
ENTRIES_MAX = 8192
"""How many files' digests are remembered; the oldest go first."""
CACHE_BYTES_MAX = 8 << 20
YOUNG_SECONDS = 2.0
"""A file that was changed so recently is read again next time: the clock of a file system is coarse, so a second change
might leave its times as they are."""

_log = logging.getLogger(__name__)


class FileState(NamedTuple):
    """What tells a file from one that was replaced or written since; times in nanoseconds."""

    path: str
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """The state now, of what a link leads to. Raises OSError for a file that cannot be seen."""
        real = path.resolve(strict=True)
        found = real.stat()
        return cls(str(real), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class FilesChanged(ResourceError):
    """A file was written or replaced while it was read."""


class Cancelled(Exception):
    """Reading was ended by `cancel`."""


def default_cache() -> Path:
    """The file of the user's cache folder in which digests are remembered."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "kvtier" / "digests.json"


class ContentDigests:
    """Digests of files' contents. Safe to use from several threads and processes.

    What is remembered is a file of mode 0600; one that another user could have written, or that is damaged, is not
    used. Without a folder that can be written nothing is remembered, and all works but for the time it takes.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._path = cache or default_cache()
        self._cancelled = threading.Event()
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Have running and later calls of `digest` end with Cancelled."""
        self._cancelled.set()

    def digest(self, files: Sequence[Path]) -> str:
        """SHA-256 over the names and whole contents of the files, in hex; their order does not matter.

        Reads only what changed since the last time, at the speed of the disk or about 1 GB/s for each processor.
        Raises OSError for a file that cannot be read, FilesChanged for one that is changed meanwhile, Cancelled.
        """
        states = [FileState.of(path) for path in files]
        known = self._load()
        missing = [state for state in states if known.get(_name(state)) is None]
        if missing:
            with ThreadPoolExecutor(min(THREADS, len(missing), os.cpu_count() or 1), "kvtier-digest") as pool:
                found = dict(zip(map(_name, missing), pool.map(self._read, missing), strict=True))
            known |= found
            limit = time.time_ns() - int(YOUNG_SECONDS * 1e9)
            self._remember({_name(state): found[_name(state)] for state in missing if state.changed < limit})
        each = sorted((path.name, known[_name(state)]) for path, state in zip(files, states, strict=True))
        return hashlib.sha256(json.dumps(each).encode()).hexdigest()

    def _read(self, state: FileState) -> str:
        digest, buffer = hashlib.sha256(), bytearray(CHUNK_BYTES)
        view = memoryview(buffer)
        with open(state.path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                if self._cancelled.is_set():
                    raise Cancelled
                digest.update(view[:count])
        if FileState.of(Path(state.path)) != state:
            raise FilesChanged(f"{state.path} was changed while it was read")
        return digest.hexdigest()

    # -- what is remembered --------------------------------------------------------------------------------------

    def _load(self) -> dict[str, str]:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return {}
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
            if not private or found.st_size > CACHE_BYTES_MAX:
                _log.warning("%s is not this user's own file of mode 0600: digests are computed again", self._path)
                return {}
            try:
                entries = json.loads(file.read())
            except (ValueError, RecursionError):
                return {}
        if not isinstance(entries, dict):
            return {}
        return {name: digest for name, digest in entries.items() if _is_digest(digest)}

    def _remember(self, found: dict[str, str]) -> None:
        if not found:
            return
        with self._lock:
            entries = list(({**self._load(), **found}).items())[-ENTRIES_MAX:]
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=".digests-")  # mode 0600
                try:
                    with open(descriptor, "w") as file:
                        json.dump(dict(entries), file)
                    os.replace(name, self._path)
                except BaseException:
                    os.unlink(name)
                    raise
            except OSError as error:
                _log.info("digests are not remembered: %s", error)


def _name(state: FileState) -> str:
    return "|".join(map(str, state))


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and not set(text) - set("0123456789abcdef")
