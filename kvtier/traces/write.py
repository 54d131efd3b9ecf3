"""Traces as files: gzip'ed JSON lines in the format of `kvtier.traces.read`, with salted hashes as block ids.

A `Recorder` writes those of a running stack, off the engine's thread.
"""

import asyncio
import fcntl
import heapq
import itertools
import logging
import math
import os
import secrets
import stat
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvtier.aio.shielded_wait import wait_done
from kvtier.errors import ConfigError
from kvtier.options import RecordOptions

SALT_BYTES = 32
SALT_BYTES_MIN = 16
ID_BITS = 53
"""An id is a whole number that every reader of JSON takes in exactly. Two of a million blocks share one in 1 of 18,000
traces."""
GZIP_LEVEL = 6
_log = logging.getLogger(__name__)
_GZIP = 16 + zlib.MAX_WBITS
_OVERHEAD_BYTES = 1024
"""More than gzip's header, end and flush markers, and than what it adds to lines that it cannot compress."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """The record of one request in a trace: its time in seconds, the keys of its prompt's whole blocks, lengths."""

    arrived: float
    keys: Sequence[bytes]
    input_tokens: int
    output_tokens: int


class TraceLines:
    """Makes lines. Their times count from `epoch`, which is in the clock of `RecordedRequest.arrived`.

    An id is a hash of the block's key under `salt`: equal for equal keys, and of no use to find out the tokens for
    those who do not have the salt.
    """

    def __init__(self, salt: bytes, block_tokens: int, epoch: float) -> None:
        self._salt = salt[: blake2b.MAX_KEY_SIZE]
        self._block_tokens = block_tokens
        self._epoch = epoch

    def ids(self, keys: Iterable[bytes]) -> list[int]:
        """An id for each key."""
        salt = self._salt
        hashed = (blake2b(key, key=salt, digest_size=8).digest() for key in keys)
        return [int.from_bytes(digest, "big") >> (64 - ID_BITS) for digest in hashed]

    def line(self, request: RecordedRequest) -> bytes:
        """A line of a trace, with its end."""
        ids = ",".join(map(str, self.ids(request.keys)))
        milliseconds = max(0, round((request.arrived - self._epoch) * 1000))
        return (
            f'{{"timestamp":{milliseconds},"input_length":{request.input_tokens},'
            f'"output_length":{request.output_tokens},"block_tokens":{self._block_tokens},"hash_ids":[{ids}]}}\n'
        ).encode()


class TraceFile:
    """A new gzip file that only grows, mode 0600. What was flushed can be read, also if the process is killed next."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if there is such a file already, or if it cannot be made."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        self._compressor = zlib.compressobj(GZIP_LEVEL, wbits=_GZIP)
        self._size = 0
        self._unflushed = 0

    @property
    def size_max(self) -> int:
        """Bytes of the file once it is closed, at most."""
        return self._size + self._unflushed + _OVERHEAD_BYTES

    def add(self, line: bytes) -> None:
        """Append a whole line. Raises OSError if that cannot be written."""
        self._unflushed += len(line)
        self._append(self._compressor.compress(line))

    def flush(self) -> None:
        """Write every line that was added. Raises OSError if that cannot be done."""
        if self._unflushed:
            self._append(self._compressor.flush(zlib.Z_SYNC_FLUSH))
            self._unflushed = 0

    def close(self) -> None:
        """End the file. Raises OSError if that cannot be written; the file is closed all the same."""
        try:
            self._append(self._compressor.flush())
        finally:
            os.close(self._file)

    def _append(self, data: bytes) -> None:
        while data:
            written = os.write(self._file, data)
            self._size += written
            data = data[written:]


def prepare_salt(path: Path) -> None:
    """Make a salt's file, also where a link leads, and fill one that is empty, as a kill or a full disk leaves it.

    Of several processes one does that. A file of this user's whose group may read it, as in a pod with `fsGroup`, gets
    mode 0600 again. What cannot be done is left to `read_salt`, which checks the file.
    """
    with suppress(OSError), open(path, "r+b", buffering=0, opener=_open_or_create) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = os.fstat(file.fileno())
        others = stat.S_IMODE(found.st_mode) & 0o077
        if others & 0o007 or found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            return
        if others:
            os.fchmod(file.fileno(), 0o600)
            _log.warning("%s: its group could read it; it has mode 0600 again", path)
        if not found.st_size:
            file.write(secrets.token_bytes(SALT_BYTES))
            os.fsync(file.fileno())


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NONBLOCK, 0o600)


def read_salt(path: Path | None) -> bytes:
    """The salt in a file, which is made with a random one if it is absent; a random salt without a file.

    Raises ConfigError for a file that is too short or that others can read, OSError for one that cannot be read.
    """
    salt = secrets.token_bytes(SALT_BYTES)
    if path is None:
        return salt
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _salt_in(path)
    with open(file, "wb") as stream:
        stream.write(salt)
    return salt


def _salt_in(path: Path) -> bytes:
    with path.open("rb") as stream:
        found = os.fstat(stream.fileno())
        salt = stream.read(blake2b.MAX_KEY_SIZE)
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError("others than its owner can read it; chmod 600", str(path))
    if len(salt) < SALT_BYTES_MIN:
        raise ConfigError(f"holds {len(salt)} bytes; a salt has at least {SALT_BYTES_MIN}", str(path))
    return salt


QUEUED_BLOCKS_MAX = 1 << 18
"""Blocks of requests that wait for the thread, at most, with one more for each request. They take about 20 MB."""
WRITE_SECONDS = 1.0
"""How often the thread writes what was recorded."""
HOLD_SECONDS = 30.0
"""How long a line waits for those of requests that came earlier and ended later."""
CLOSE_SECONDS = 2.0
FILES = 8
"""Files of a full folder, about."""
_PATTERN = "trace-*.jsonl.gz"
HELD_BYTES_MAX = 16 << 20
"""Lines that wait, at most: beyond that the earliest are written."""


class Recorder:
    """Writes the requests of a stack to files of `options.folder`, the oldest of which are removed.

    `record` costs the engine's thread a few appends, never waits and never raises: what the thread cannot keep up with
    is dropped and counted. After an error of the disk, which is logged once, nothing is recorded any more. Lines are in
    the order in which requests came, but for requests that ran longer than HOLD_SECONDS. A process that is killed loses
    what came in that time.
    """

    def __init__(self, options: RecordOptions, block_tokens: int, hold_seconds: float = HOLD_SECONDS) -> None:
        self.recorded = 0
        self._options = options
        self._block_tokens = block_tokens
        self._hold_seconds = hold_seconds
        self._queue: deque[RecordedRequest] = deque()
        self._queued_blocks = 0
        self._taken_blocks = 0
        self._accepted = 0
        self._refused = 0
        self._lost = 0
        self._stopping = False
        self._waking = threading.Event()
        self._failed = False
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="kvtier-recorder", daemon=True)

    def open(self) -> None:
        """Start the thread. What is wrong with the folder it finds by itself, and logs."""
        self._epoch = time.monotonic()
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has none to give
            self._fail(error)

    @property
    def dropped(self) -> int:
        """Requests that are not written: the thread was behind, or the disk failed."""
        return self._refused + self._lost

    def record(self, keys: Sequence[bytes], input_tokens: int, output_tokens: int, arrived: float) -> None:
        """A request has ended: the keys of its prompt's whole blocks, in prefix order, and when it came.

        `keys` must not change afterwards. Call it from one thread.
        """
        size = 1 + len(keys)
        if self._failed or self._queued_blocks - self._taken_blocks + size > QUEUED_BLOCKS_MAX:
            self._refused += 1
            return
        self._accepted += 1
        self._queued_blocks += size
        self._queue.append(RecordedRequest(arrived, keys, input_tokens, output_tokens))

    def wake(self) -> None:
        """Have the thread write what was recorded now, and not after WRITE_SECONDS."""
        self._waking.set()

    async def close(self) -> asyncio.CancelledError | None:
        """Write what was recorded, and end the thread; a disk that does not answer in time is left behind.

        Idempotent. Returns the cancellation that came meanwhile.
        """
        self._stopping = True
        self.wake()
        ended = asyncio.wrap_future(self._ended)
        cancelled = await wait_done(ended, CLOSE_SECONDS)
        if self.dropped:
            _log.warning("%d of the requests are not in the trace", self.dropped)
        return cancelled

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write_all(_Folder(self._options, self._block_tokens, self._epoch))
        except Exception as error:
            self._fail(error)
        else:
            self._ended.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        self._queue.clear()
        self._lost = self._accepted - self.recorded
        _log.error("requests are not recorded any more in %s: %s", self._options.folder, error)
        self._ended.set_result(None)

    def _write_all(self, folder: "_Folder") -> None:
        held = _HeldLines()
        try:
            stopping = False
            while not stopping:
                self._waking.wait(WRITE_SECONDS)
                self._waking.clear()
                stopping = self._stopping
                while self._queue:
                    request = self._queue.popleft()
                    self._taken_blocks += 1 + len(request.keys)
                    held.add(request.arrived, folder.lines.line(request))
                added = 0
                for line in held.take(math.inf if stopping else time.monotonic() - self._hold_seconds):
                    whole = folder.add(line)
                    added += whole
                    self._lost += not whole
                folder.flush()
                self.recorded += added
        finally:
            folder.close()


class _HeldLines:
    """Lines by when their requests came, at most HELD_BYTES_MAX."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()
        self._bytes = 0

    def add(self, arrived: float, line: bytes) -> None:
        heapq.heappush(self._heap, (arrived, next(self._numbers), line))
        self._bytes += len(line)

    def take(self, until: float) -> Iterator[bytes]:
        """Take out the lines of requests that came by then, in that order, and those that are too many."""
        while self._heap and (self._heap[0][0] <= until or self._bytes > HELD_BYTES_MAX):
            line = heapq.heappop(self._heap)[-1]
            self._bytes -= len(line)
            yield line


class _Folder:
    """The files of one recorder, at most `max_bytes` together with those that were there before.

    Each file has a share of that. A new one is begun when one is full, and the oldest are removed before.
    """

    def __init__(self, options: RecordOptions, block_tokens: int, epoch: float) -> None:
        self._path = Path(options.folder)
        self._max_bytes = options.max_bytes
        self._share = options.max_bytes // FILES
        self._file: TraceFile | None = None
        self._numbers = itertools.count(1)
        self._make_folder()
        self._name = f"trace-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
        salt_file = None if options.salt_file is None else Path(options.salt_file)
        if salt_file is not None:
            prepare_salt(salt_file)
        salt = read_salt(salt_file)
        self.lines = TraceLines(salt, block_tokens, epoch)

    def add(self, line: bytes) -> bool:
        """Append a line; False if it is longer than half a file may be."""
        if self._file is None or self._file.size_max + len(line) > self._share:
            if 2 * len(line) > self._share:
                return False
            self._begin_file()
        assert self._file is not None
        self._file.add(line)
        return True

    def flush(self) -> None:
        """Have everything that was added be in the file."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """End the file, if there is one; also where that fails it is closed once."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _begin_file(self) -> None:
        self.close()
        self._make_folder()
        left = self._max_bytes - self._share
        for path in sorted(self._path.glob(_PATTERN), key=self._age):
            with suppress(FileNotFoundError):
                found = path.lstat()
                left -= found.st_size if stat.S_ISREG(found.st_mode) else 0
                if left < 0 and stat.S_ISREG(found.st_mode):
                    path.unlink()
        while self._file is None:
            with suppress(FileExistsError):  # another stack of this process that began in the same second
                self._file = TraceFile(self._path / f"{self._name}-{next(self._numbers):05}.jsonl.gz")

    def _make_folder(self) -> None:
        """Also where a link leads that names no folder yet."""
        Path(os.path.realpath(self._path)).mkdir(mode=0o700, parents=True, exist_ok=True)

    def _age(self, path: Path) -> tuple[int, tuple[int, ...]]:
        """The order from the youngest file to the oldest: this recorder's, those before it, those from the future.

        A clock that was ahead has named the last ones. They go first, or this recorder's would go in their place.
        """
        own = path.name.startswith(f"{self._name}-")
        named = tuple(-ord(letter) for letter in path.name)
        return (0 if own else 2 if path.name > self._name else 1), named
