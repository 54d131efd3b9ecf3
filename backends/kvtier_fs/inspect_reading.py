"""How a store is read under inspection: by a few threads, results in order; payloads in pieces; errors as reasons."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import xxhash

from kvtier.inspection import BlockState, FindingKind
from kvtier_fs.files.folder import open_plain
from kvtier_fs.slot import SlotHeader
from kvtier_fs.texts import manifest_name
from kvtier_fs.verify import Mismatch

W = TypeVar("W")
T = TypeVar("T")

SHORT = "truncated"
LEFTOVERS = {
    BlockState.OLD: FindingKind.OLD,
    BlockState.ORPHANED: FindingKind.ORPHANED,
    BlockState.FOREIGN: FindingKind.FOREIGN,
}
"""What a check calls blocks that can no longer be loaded."""
_THREADS = 4
_AHEAD = 2 * _THREADS
_PIECE_BYTES = 1 << 20
_MANIFEST_BYTES_MAX = 256 << 10
_TEXT_MAX = 64


class Readers:
    """A few threads that read side by side; what they find comes in the order in which it was asked for."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-fs-inspect")

    def in_order(self, work: Callable[[W], T], pieces: Iterable[W]) -> Iterator[T]:
        """Do something with every piece, a few at once, however many there are."""
        waiting: deque[Future[T]] = deque()
        for piece in pieces:
            waiting.append(self._threads.submit(work, piece))
            if len(waiting) >= _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def close(self) -> None:
        """End the reads under way. Idempotent."""
        self._threads.shutdown(cancel_futures=True)


def read_fault(error: OSError) -> str:
    """The reason for what the disk does not give back."""
    return f"unreadable_{errno.errorcode.get(error.errno or 0, 'unknown')}"


def payload_fault(fd: int, offset: int, header: SlotHeader) -> str:
    """What is wrong with the payload at an offset; empty if it is what was stored. Read in pieces."""
    piece = memoryview(bytearray(min(_PIECE_BYTES, header.payload_bytes)))
    digest, left = xxhash.xxh3_128(), header.payload_bytes
    while left:
        try:
            length = os.preadv(fd, [piece[:left]], offset)
        except OSError as error:
            return read_fault(error)
        if not length:
            return SHORT
        digest.update(piece[:length])
        offset, left = offset + length, left - length
    return "" if digest.digest() == header.payload_digest else Mismatch.PAYLOAD


class Manifest(NamedTuple):
    """What a namespace's readable description says; None for what it does not. `written_at`: seconds since 1970."""

    written_at: float | None = None
    model: str | None = None
    tag: str | None = None


def read_manifest(folder_fd: int, namespace: bytes) -> Manifest:
    """A namespace's description in an open root. It is for people only, so nothing here ever fails."""
    try:
        fd = open_plain(folder_fd, manifest_name(namespace), os.O_RDONLY)
    except OSError:
        return Manifest()
    try:
        fields = json.loads(os.pread(fd, _MANIFEST_BYTES_MAX, 0))
        return Manifest(os.fstat(fd).st_mtime, str(fields["model"])[:_TEXT_MAX], str(fields["tag"])[:_TEXT_MAX])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return Manifest()
    finally:
        os.close(fd)
