"""The log of a victim, in memory that survives it, shared with the harness. One writer, the victim."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.types.geometry import round_up
from kvtier.types.jobs import BlockStatus

STATUSES = tuple(BlockStatus)
_WORD_BYTES = 8
_TEXT_BYTES = 4096


class Word(IntEnum):
    """The 64-bit words at the front of a log."""

    OPENED = 0
    LOADED = 1
    SWEPT = 2
    CLOSED = 3
    EPOCH = 4
    RESET_BEGUN = 5
    RESET_DONE = 6
    SUBMITTED = 7
    ENDED = 8
    WRITES = 9
    EVENTS = 10
    LOADS = 11
    ARENA = 12
    EVICTED = 13
    REFORMATTED = 14
    STORED = 15
    REFUSED = 16
    CHECKED = 17
    MISSED = 18
    WRONG = 19
    FROM_SNAPSHOT = 20
    OPEN_NS = 21
    IDLE = 22
    STEPS = 23


WORDS = len(Word)


class Write(NamedTuple):
    """A write that was submitted: where (`file` is what the life says it is), its bytes' place in the arena, if it
    ended."""

    file: int
    offset: int
    length: int
    data: int
    ended: int


class EventKind(IntEnum):
    STORE = 0
    """A store of this key is about to be submitted."""
    STORED = 1
    """It was acknowledged."""
    EVICTED = 2
    """This key was taken out of the directory; its slot may be used again."""
    MET = 3
    """A load returned the whole block that this word names (`slot`), which the victim does not know: another process
    stored it."""


class Event(NamedTuple):
    """A decision of a victim, or an answer it got. `key` is a number, `tag` says which bytes, `slot` where (slab)."""

    kind: int
    key: int
    tag: int
    slot: int


class Load(NamedTuple):
    """One block that a victim loaded after opening, into a row of its own. `status` is a position in STATUSES."""

    key: int
    tag: int
    row: int
    status: int


class LogShape(NamedTuple):
    """How much a log takes. Rows come last; loads use the first `load_rows` of them."""

    load_rows: int
    rows: int
    row_bytes: int
    writes: int = 2048
    events: int = 4096
    arena_bytes: int = 16 << 20


class _Log:
    """Records of one format, appended by the victim; the word that counts them is written last."""

    def __init__(self, memory: mmap.mmap, words: memoryview, at: int, form: str, limit: int, word: Word) -> None:
        self.form = struct.Struct(form)
        self._memory, self._words, self._at, self._limit, self._word = memory, words, at, limit, word

    @property
    def end(self) -> int:
        """The byte behind the log."""
        return self._at + self._limit * self.form.size

    def append(self, *values: int) -> int:
        """Add a record. Returns its number, -1 if there is no room."""
        number = self._words[self._word]
        if number >= self._limit:
            return -1
        self.form.pack_into(self._memory, self._at + number * self.form.size, *values)
        self._words[self._word] = number + 1
        return number

    def place(self, number: int) -> int:
        """Where a record lies."""
        return self._at + number * self.form.size

    def all(self) -> list[tuple[int, ...]]:
        """Every record, in order."""
        count = self._words[self._word]
        return list(self.form.iter_unpack(self._memory[self._at : self._at + count * self.form.size]))


class SharedLog:
    """The shared memory of one victim at a time; `clear` it before the next."""

    def __init__(self, shape: LogShape) -> None:
        self.shape = shape
        logs = WORDS * _WORD_BYTES + _TEXT_BYTES
        sizes = (shape.writes * 40, shape.events * 32, shape.load_rows * 32)
        arena = round_up(logs + sum(sizes), mmap.PAGESIZE)
        rows = round_up(arena + shape.arena_bytes, mmap.PAGESIZE)
        self._memory = mmap.mmap(-1, rows + shape.rows * shape.row_bytes)
        whole = memoryview(self._memory)
        self.words = whole[: WORDS * _WORD_BYTES].cast("Q")
        self._text_at = WORDS * _WORD_BYTES
        self._arena_at = arena
        self._writes = _Log(self._memory, self.words, logs, "<QQQQQ", shape.writes, Word.WRITES)
        self._events = _Log(self._memory, self.words, self._writes.end, "<QQQQ", shape.events, Word.EVENTS)
        self._loads = _Log(self._memory, self.words, self._events.end, "<QQQQ", shape.load_rows, Word.LOADS)
        self.rows = LogRows(np.frombuffer(self._memory, dtype=np.uint8)[rows:].reshape(shape.rows, shape.row_bytes))

    def clear(self) -> None:
        """Forget the last victim."""
        self.words[:] = memoryview(bytes(WORDS * _WORD_BYTES)).cast("Q")
        self._memory[self._text_at : self._text_at + _TEXT_BYTES] = bytes(_TEXT_BYTES)

    # -- the victim's side ---------------------------------------------------------------------------------------

    def add(self, word: Word, count: int = 1) -> None:
        """Count something."""
        self.words[word] += count

    def say(self, text: str) -> None:
        """Leave a text for people; the last one counts."""
        data = text.encode(errors="replace")[-_TEXT_BYTES + 1 :]
        self._memory[self._text_at : self._text_at + _TEXT_BYTES] = data.ljust(_TEXT_BYTES, b"\0")

    def room_for(self, length: int) -> bool:
        """True if as many bytes of writes can still be noted, with what else goes with them."""
        words, shape = self.words, self.shape
        return (
            words[Word.ARENA] + length <= shape.arena_bytes
            and words[Word.WRITES] + 64 <= shape.writes
            and words[Word.EVENTS] + 256 <= shape.events
        )

    def write_begins(self, file: int, offset: int, buffers: Sequence[memoryview]) -> int:
        """Note a write and its bytes before it is submitted. Returns its number, -1 if there is no room."""
        start = at = self.words[Word.ARENA]
        length = sum(map(len, buffers))
        if start + length > self.shape.arena_bytes:
            return -1
        for buffer in buffers:
            self._memory[self._arena_at + at : self._arena_at + at + len(buffer)] = buffer
            at += len(buffer)
        self.words[Word.ARENA] = at
        return self._writes.append(file, offset, length, start, 0)

    def write_ended(self, number: int, ended: int) -> None:
        """A noted write has ended; `ended` 1: all of it was written, 2: not so."""
        at = self._writes.place(number) + 32
        self._memory[at] = ended

    def event(self, kind: EventKind, key: int, tag: int = 0, slot: int = 0) -> None:
        """Note something decided."""
        self._events.append(kind, key, tag, slot)

    def load(self, key: int, tag: int, row: int, status: BlockStatus) -> None:
        """Note how the load of one block after opening ended."""
        self._loads.append(key, tag, row, STATUSES.index(status))

    # -- the harness's side --------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The last text of the victim."""
        raw = self._memory[self._text_at : self._text_at + _TEXT_BYTES]
        return raw.rstrip(b"\0").decode(errors="replace")

    def writes(self) -> list[Write]:
        return [Write(*record) for record in self._writes.all()]

    def events(self) -> list[Event]:
        return [Event(*record) for record in self._events.all()]

    def loads(self) -> list[Load]:
        return [Load(*record) for record in self._loads.all()]

    def data(self, write: Write) -> bytes:
        """The bytes of a noted write."""
        return self._memory[self._arena_at + write.data : self._arena_at + write.data + write.length]


class LogRows:
    """The rows of a log, as a tier below the CPU gets them. The victim keeps the checksums."""

    def __init__(self, view: npt.NDArray[np.uint8]) -> None:
        self.view = view
        self.num_rows, self.row_bytes = view.shape
        self._checksums = [bytes(16)] * self.num_rows

    def checksum(self, row: int) -> bytes:
        return self._checksums[row]

    def set_checksum(self, row: int, digest: bytes) -> None:
        self._checksums[row] = digest
