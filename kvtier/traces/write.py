"""Writing traces: gzip'ed JSON lines in the format of `kvtier.traces.read`, with salted hashes as block ids."""

import fcntl
import logging
import os
import secrets
import stat
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvtier.errors import ConfigError

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
    mode 0600 again. What cannot be done is left to `read_salt`, which judges the file.
    """
    with suppress(OSError), open(path, "r+b", buffering=0, opener=_made) as file:
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


def _made(path: str, flags: int) -> int:
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
