"""The file that a defect of a stack process leaves: the last messages by engine, and the place of each thread.

It lies beside the socket as PATH.crash-TIME-PROCESS, of mode 0600, from the start on: after a fatal signal nothing can
be made any more. Its head is mapped, and says at each moment whose message is being handled. A process that ends in
order removes it, and one that was killed leaves a head alone, which the next one removes. It holds types of messages,
names of files, functions and exceptions; no key, no payload.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import mmap
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kvtier.errors import KVTierError

EXIT_STATUS = 70
FILES_KEPT = 8
DEATHS_MAX = 2
"""Deaths within `WITHIN_SECONDS` after which an engine is refused, for `REFUSED_SECONDS` from the last on."""
WITHIN_SECONDS = 600.0
REFUSED_SECONDS = 3600.0
_LINE_BYTES = 96
_ENGINES_MAX, _MESSAGES_MAX = 64, 64
_ENGINES_AT = _LINE_BYTES
_MESSAGES_AT = _ENGINES_AT + _LINE_BYTES * _ENGINES_MAX
_HEAD_BYTES = _MESSAGES_AT + _LINE_BYTES * _MESSAGES_MAX
_NAME_CHARACTERS = 64
_NONE = "nothing"
_HANDLED_IN = "in _handle_items"
"""A dump of a fatal signal names this function where the thread that had it handled a message."""
_CONTEXTS_MAX = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Death:
    """A stack process that a defect has ended, at a time in seconds since 1970, by a message of an engine."""

    file: str
    at_seconds: float
    engine: str


class CrashFile:
    """Records which engine's message is handled; ends the process on a defect. One for each process."""

    def __init__(self, path: str, time_of_day: Callable[[], float] = time.time) -> None:
        """`path` is that of the socket. Where no file can be made there is a line in the log, and reports go there."""
        self._path, self._time_of_day = path, time_of_day
        self.file = f"{path}.crash-{time_of_day():.0f}-{os.getpid()}"
        self.deaths = tuple(_deaths(path))
        _remove_old(path)
        self._fd = -1
        self._engines: dict[str, int] = {}
        self._messages = 0
        try:
            self._fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            head = (b" " * (_LINE_BYTES - 1) + b"\n") * (_HEAD_BYTES // _LINE_BYTES)
            if os.write(self._fd, head) < len(head):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._head = mmap.mmap(self._fd, _HEAD_BYTES)
            faulthandler.enable(self._fd)
        except OSError as error:
            _log.warning("no file for defects can be made: %s", error)
            self.close()
            self._head = mmap.mmap(-1, _HEAD_BYTES)
        self._write_line(0, f"handled: {_NONE}")

    # -- whose messages ------------------------------------------------------------------------------------------

    def refusal(self, engine_id: str) -> str:
        """Why an engine is not served; empty if it is. Only one with an id can be known again."""
        name, now = _shown(engine_id), self._time_of_day()
        times = [death.at_seconds for death in self.deaths if engine_id and death.engine == name]
        pairs = zip(times, times[DEATHS_MAX - 1 :], strict=False)
        if not any(last - first <= WITHIN_SECONDS and now - last < REFUSED_SECONDS for first, last in pairs):
            return ""
        file = next(death.file for death in reversed(self.deaths) if death.engine == name)
        return f"its messages ended the stack process {DEATHS_MAX} times within ten minutes, see {file}"

    def forget(self, engine_id: str) -> int:
        """Hold no defect against an engine any more, also in later processes: the files get old. Returns how many."""
        forgotten = [death for death in self.deaths if death.engine == _shown(engine_id)]
        for death in forgotten:
            with suppress(FileNotFoundError):
                os.utime(death.file, (0, 0))
        self.deaths = tuple(death for death in self.deaths if death not in forgotten)
        return len(forgotten)

    def begin(self, engine_id: str, items: Sequence[object]) -> None:
        """These items of an engine are about to be handled."""
        slot = self._engines.get(engine_id)
        if slot is None:
            slot = self._take_slot(engine_id)
        at = _MESSAGES_AT + _LINE_BYTES * (self._messages % _MESSAGES_MAX)
        self._messages += 1
        types = " ".join([type(item).__name__ for item in items[:16]])
        self._write_line(at, f"message {self._messages} of engine {slot}: {types}")
        self._write_line(0, f"handled: engine {slot}")

    def _take_slot(self, engine_id: str) -> int:
        slot = len(self._engines)
        if slot == _ENGINES_MAX:
            slot = self._engines.pop(next(iter(self._engines)))
        self._engines[engine_id] = slot
        self._write_line(_ENGINES_AT + _LINE_BYTES * slot, f"engine {slot}: {_shown(engine_id)}")
        return slot

    def end(self) -> None:
        """They have been handled."""
        self._write_line(0, f"handled: {_NONE}")

    def _write_line(self, at: int, text: str) -> None:
        line = text.encode("ascii", "replace")[: _LINE_BYTES - 1]
        self._head[at : at + _LINE_BYTES] = line.ljust(_LINE_BYTES - 1) + b"\n"

    # -- the end -------------------------------------------------------------------------------------------------

    def exit(self, error: BaseException) -> NoReturn:
        """End the process, at once and with one line in the log: half a step may be wrong state, so nothing is kept."""
        try:
            where = self._report("".join(_describe(error)))
            _log.critical("the stack process ends with status %d: %s; see %s", EXIT_STATUS, _name(error), where)
            logging.shutdown()
        finally:
            os._exit(EXIT_STATUS)

    def _report(self, text: str) -> str:
        """Write a report into the file. Returns where it is: itself, if there is no file or its disk has failed."""
        if self._fd < 0:
            return text
        try:
            os.lseek(self._fd, 0, os.SEEK_END)
            os.write(self._fd, text.encode())
        except OSError:
            return text
        faulthandler.dump_traceback(self._fd)
        return self.file

    def close(self) -> None:
        """The process ends in order: nothing is left. Idempotent."""
        if self._fd >= 0:
            faulthandler.disable()
            with suppress(OSError):
                os.unlink(self.file)
            os.close(self._fd)
            self._fd = -1


def _shown(engine_id: str) -> str:
    """An engine's id in one line of a file."""
    return ascii(engine_id)[1:-1][:_NAME_CHARACTERS]


def _name(error: BaseException) -> str:
    """An exception without what it may hold of keys: only kvtier's own have a text without any."""
    name = type(error).__name__
    if isinstance(error, KVTierError):
        return f"{name}: {error}"
    return f"{name}: {os.strerror(error.errno)}" if isinstance(error, OSError) and error.errno else name


def _describe(error: BaseException) -> Iterator[str]:
    """The exception, those that it came from, and their places in the code."""
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and len(chain) < _CONTEXTS_MAX:
        chain.append(found)
        found = found.__cause__ or found.__context__
    for each in reversed(chain):
        yield f"\n{_name(each)}\n"
        for frame in traceback.extract_tb(each.__traceback__):
            yield f"  {frame.filename}:{frame.lineno} in {frame.name}\n"


# -- files of earlier processes -----------------------------------------------------------------------------------


def _files(path: str) -> list[Path]:
    """The files beside a socket, the oldest first."""
    socket = Path(path)
    found = [(file.stat().st_mtime, file) for file in socket.parent.glob(f"{_escaped(socket.name)}.crash-*")]
    return [file for _, file in sorted(found)]


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _deaths(path: str) -> Iterator[Death]:
    """The defects that the files tell of and that a message of an engine brought about, the oldest first."""
    with suppress(OSError):
        for file in _files(path):
            with suppress(OSError):
                engine = _blamed(file.read_bytes())
                if engine:
                    yield Death(str(file), file.stat().st_mtime, engine)


def _blamed(content: bytes) -> str:
    """The engine whose message was handled when a defect ended a process; empty if there is none."""
    head, report = content[:_HEAD_BYTES].decode("ascii", "replace"), content[_HEAD_BYTES:].decode("ascii", "replace")
    handled, _, slot = head.partition("\n")[0].strip().rpartition(" ")
    if not report or handled != "handled: engine":
        return ""
    if report.startswith("Fatal"):  # a signal, perhaps of another thread
        _, _, current = report.partition("Current thread")
        if _HANDLED_IN not in current.partition("\n\n")[0]:
            return ""
    lines = [line.strip().partition(": ") for line in head.splitlines()]
    return next((name for label, _, name in lines if label == f"engine {slot}"), "")


def _remove_old(path: str) -> None:
    """Keep the newest, and none of a process that was killed: its file has a head alone.

    The file of a process that runs has a head alone too; there is none, because this one owns the socket.
    """
    with suppress(OSError):
        reports = []
        for file in _files(path):
            if file.stat().st_size > _HEAD_BYTES:
                reports.append(file)
            else:
                file.unlink()
        for file in reports[: max(0, len(reports) - FILES_KEPT + 1)]:
            file.unlink()
