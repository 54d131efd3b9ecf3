"""Digests of whole files, such as a model's weights, remembered so that an unchanged file is read once.

The bytes of a file decide; its owner, its links and its times only decide when the bytes are read again. Samples that
touch every tensor of a file are read in milliseconds, where the whole takes seconds a GB.
"""

import hashlib
import json
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.errors import ResourceError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Names of files of weights."""
SAMPLE_BYTES = 1024
PIECES_MAX = 16
SAMPLES_MAX = 1 << 14
"""Pieces of a file, at most; with more tensors than this, a piece of each."""
HEADER_BYTES_MAX = 100 << 20
"""As the format has it."""
LENGTH_BYTES = 8


def tensor_samples(path: Path) -> str:
    """SHA-256, in hex, over the header of a safetensors file and pieces of each tensor, or the whole of a small one.

    Empty for a file of another format. Raises OSError for one that cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
        if not 0 < length <= min(HEADER_BYTES_MAX, size - LENGTH_BYTES):
            return ""
        header = os.pread(descriptor, length, LENGTH_BYTES)
        digest = hashlib.sha256(b"%d " % size + header)
        for first, end in _pieces(header):
            digest.update(os.pread(descriptor, end - first, LENGTH_BYTES + length + first))
        return digest.hexdigest()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""  # no header of tensors
    finally:
        os.close(descriptor)


def _pieces(header: bytes) -> Iterator[tuple[int, int]]:
    """Of each tensor up to 16 pieces, evenly spread from its first byte to its last."""
    tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
    count = max(1, min(PIECES_MAX, SAMPLES_MAX // max(1, len(tensors))))
    for first, end in sorted(map(_span, tensors.values())):
        if end - first <= count * SAMPLE_BYTES:
            yield first, end
        else:
            step = (end - first - SAMPLE_BYTES) / max(1, count - 1)
            starts = (first + int(number * step) for number in range(count))
            yield from ((start, start + SAMPLE_BYTES) for start in starts)


def _span(tensor: Any) -> tuple[int, int]:
    first, end = tensor["data_offsets"]
    if not 0 <= first <= end:
        raise ValueError(f"no span: {first} to {end}")
    return int(first), int(end)


THREADS = 4
CHUNK_BYTES = 1 << 20
ENTRIES_MAX = 8192
"""How many files' digests are remembered; the oldest go first."""
CACHE_BYTES_MAX = 8 << 20
READS_MAX = 3
"""How often a file is read whose owner, mode or links change meanwhile."""
YOUNG_SECONDS = 2.0
"""A file that was changed so recently is read again next time: the clock of a file system is coarse, so a second change
might leave its times as they are."""

_log = logging.getLogger(__name__)


class FileState(NamedTuple):
    """The state of a file by which a replaced or changed one is recognised; times in nanoseconds."""

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

    @property
    def written(self) -> tuple[str, int, int, int]:
        """The part of the state that writing into a file changes. `changed` also changes with its owner, its mode, its
        label, its links."""
        return self.path, self.inode, self.size, self.modified


class FileDigest(NamedTuple):
    """A file as it was read, the digest of its content, and that of samples of its tensors; empty without tensors."""

    state: FileState
    digest: str
    samples: str = ""


class FilesContent(NamedTuple):
    """The digest of several files' names and contents, what it is made of, and what of that rests on samples alone."""

    digest: str
    files: tuple[FileDigest, ...]
    sampled: tuple[FileDigest, ...]


class FilesChanged(ResourceError):
    """A file was written or replaced while it was read, or after it was loaded."""


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
        return self.content([(path.name, path) for path in files]).digest

    def content(self, named: Sequence[tuple[str, Path]], *, by_samples: bool = False) -> FilesContent:
        """The `digest` of files with these names.

        `by_samples`: of a file in which only owner, mode or links changed since it was read, samples that touch every
        tensor are compared. Where they are equal its digest is taken as known; `confirm` reads the whole.
        """
        states = [FileState.of(path) for _, path in named]
        known = self._load()
        found = {state: known[state] for state in states if state in known}
        sampled = []
        if by_samples:
            sampled = [each for state in states if state not in found and (each := _by_samples(state, known))]
            found |= {each.state: each for each in sampled}
        missing = [state for state in dict.fromkeys(states) if state not in found]
        found |= dict(zip(missing, self._read_all(missing), strict=True))
        files = tuple(found[state] for state in states)
        digests = sorted((name, file.digest) for (name, _), file in zip(named, files, strict=True))
        return FilesContent(hashlib.sha256(json.dumps(digests).encode()).hexdigest(), files, tuple(sampled))

    def confirm(self, sampled: Sequence[FileDigest]) -> list[FileDigest]:
        """Read files of which samples were compared wholly. Gives those that have another content; `remember` them
        when nothing rests on the samples any more. Raises as `digest` does."""
        read = [self._read_stable(each.state) for each in sampled]
        equal = [file.digest == each.digest for file, each in zip(read, sampled, strict=True)]
        self.remember([file for file, same in zip(read, equal, strict=True) if same])
        return [file for file, same in zip(read, equal, strict=True) if not same]

    def changed_since(self, files: Sequence[FileDigest], moment: int) -> list[str]:
        """Paths of files whose content may be another than at that moment, in nanoseconds of the clock of files.

        A file that was touched since has the content of then if that was read and is remembered, and is equal.
        """
        earlier: dict[str, FileDigest] = {}
        for file in self._load().values():
            last = earlier.get(file.state.path)
            if file.state.changed <= moment and (last is None or last.state.changed < file.state.changed):
                earlier[file.state.path] = file
        touched = [file for file in files if file.state.changed > moment]
        return [
            file.state.path
            for file in touched
            if file.state.path not in earlier or earlier[file.state.path].digest != file.digest
        ]

    def _read_all(self, states: Sequence[FileState]) -> list[FileDigest]:
        if not states:
            return []
        with ThreadPoolExecutor(min(THREADS, len(states), os.cpu_count() or 1), "kvtier-digest") as pool:
            found = list(pool.map(self._read_stable, states))
        self.remember(found)
        return found

    def _read_stable(self, state: FileState) -> FileDigest:
        """The file with a state that it had before and after it was read."""
        for _ in range(READS_MAX):
            digest, samples = self._read(state), tensor_samples(Path(state.path))
            before, state = state, FileState.of(Path(state.path))
            if state == before:
                return FileDigest(state, digest, samples)
            if state.written != before.written:
                break
        raise FilesChanged(f"{before.path} was changed while it was read")

    def _read(self, state: FileState) -> str:
        digest, buffer = hashlib.sha256(), bytearray(CHUNK_BYTES)
        view = memoryview(buffer)
        with open(state.path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                if self._cancelled.is_set():
                    raise Cancelled
                digest.update(view[:count])
        return digest.hexdigest()

    # -- what is remembered --------------------------------------------------------------------------------------

    def _load(self) -> dict[FileState, FileDigest]:
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
        files = (_entry(name, digests) for name, digests in entries.items())
        return {file.state: file for file in files if file is not None}

    def remember(self, files: Sequence[FileDigest]) -> None:
        """Keep the digests of files that are old enough for their times to differ from those of a later change."""
        limit = time.time_ns() - int(YOUNG_SECONDS * 1e9)
        found = {file.state: file for file in files if file.state.changed < limit}
        if not found:
            return
        with self._lock:
            kept = list({**self._load(), **found}.values())[-ENTRIES_MAX:]
            entries = {"|".join(map(str, file.state)): file.digest + file.samples for file in kept}
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=".digests-")  # mode 0600
                try:
                    with open(descriptor, "w") as file:
                        json.dump(entries, file)
                    os.replace(name, self._path)
                except BaseException:
                    os.unlink(name)
                    raise
            except OSError as error:
                _log.info("digests are not remembered: %s", error)


def _entry(name: str, digests: object) -> FileDigest | None:
    """The cache's entry for a file; None if it is damaged. 0.1.0 wrote no samples."""
    path, *numbers = name.rsplit("|", 4)
    if len(numbers) != 4 or not all(number.lstrip("-").isdecimal() for number in numbers):
        return None
    if not isinstance(digests, str) or len(digests) not in (64, 128) or set(digests) - set("0123456789abcdef"):
        return None
    return FileDigest(FileState(path, *map(int, numbers)), digests[:64], digests[64:])


def _by_samples(state: FileState, known: Mapping[FileState, FileDigest]) -> FileDigest | None:
    """The file under its present state, if one that was read differs in nothing but its last change, and samples are
    equal."""
    alike = [file for file in known.values() if file.samples and file.state.written == state.written]
    if not alike:
        return None
    last = max(alike, key=lambda file: file.state.changed)
    same = tensor_samples(Path(state.path)) == last.samples and FileState.of(Path(state.path)) == state
    return last._replace(state=state) if same else None


_REFUTED = "the weights are not those that samples of them showed"


class Confirmation:
    """Reads in the background what was known by samples alone, and finds if that was wrong."""

    def __init__(self, digests: ContentDigests | None = None) -> None:
        self.digests = digests or ContentDigests()
        self._thread = DaemonPool("kvtier-confirm", 1)
        self._confirming: Future[list[FileDigest]] | None = None

    def begin(self, sampled: Sequence[FileDigest]) -> None:
        """Start to read these files wholly."""
        if sampled:
            self._confirming = self._thread.submit(self.digests.confirm, sampled)

    def refutation(self) -> str:
        """The reason why samples were wrong; empty as long as they may be right."""
        if self._confirming is None or not self._confirming.done():
            return ""
        error = self._confirming.exception()
        if error is not None:
            return f"{_REFUTED}: the weights cannot be read again: {error}"
        if other := self._confirming.result():
            return f"{_REFUTED}: {', '.join(file.state.path for file in other)} was changed under its size and time"
        self._confirming = None
        return ""

    def wait(self) -> None:
        """Return when everything was read."""
        if self._confirming is not None:
            self._confirming.exception()

    def accept(self) -> None:
        """Nothing rests on the samples any more: the next start takes the files for what they are."""
        if self._confirming is not None and self._confirming.done() and self._confirming.exception() is None:
            self.digests.remember(self._confirming.result())
        self._confirming = None

    def close(self) -> None:
        """End reading."""
        self.digests.cancel()
        self._thread.shutdown()
