"""The log of a stack process: a thread of its own writes it, because what it is written to may be full."""

from __future__ import annotations

import logging
import os
import queue
import threading

LINES_MAX = 4096
"""Lines that wait to be written. More are left out, and counted in the next one that is written."""
FLUSH_SECONDS = 2.0
"""How long the end of the process waits for the lines before it."""
_STDERR = 2


class QueuedLog(logging.Handler):
    """Takes records without waiting; a daemon thread writes them to a descriptor, in order.

    `flush` waits until those of before are written, for `FLUSH_SECONDS` at most, so nothing is lost at an orderly end,
    nor before a defect ends the process. It writes no buffered stream: the interpreter would wait for its lock at the
    end.
    """

    def __init__(self, fd: int = _STDERR) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()  # a signal's handler may log too
        self._left_out = 0
        self._writer = threading.Thread(target=self._write_lines, name="kvtier log", daemon=True)

    def open(self) -> None:
        """Begin to write. No process is forked from here on."""
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have a record written, or count it if too many wait."""
        if self._lines.qsize() >= LINES_MAX:
            self._left_out += 1
            return
        try:
            self._lines.put(self.format(record))
        except (TypeError, ValueError, KeyError):  # its arguments are not those of its text
            self.handleError(record)

    def flush(self) -> None:
        """Wait until what has come is written, within the deadline."""
        if self._writer.is_alive():
            written = threading.Event()
            self._lines.put(written)
            written.wait(FLUSH_SECONDS)

    def _write_lines(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            self._write(line)
            if self._left_out:
                self._write(self.format(self._left_out_record()))

    def _left_out_record(self) -> logging.LogRecord:
        left_out, self._left_out = self._left_out, 0
        fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
        text = {"msg": "%d lines were left out: nothing read the log", "args": (left_out,)}
        return logging.makeLogRecord({**fields, **text})

    def _write(self, line: str) -> None:
        left = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:  # such as a pipe that has no other end any more
            self._left_out += 1


def log_to_stderr(form: str, level: int | str = logging.INFO) -> None:
    """Have all loggers of this process write to stderr, unless they have handlers already."""
    if logging.getLogger().hasHandlers():
        return
    handler = QueuedLog()
    logging.basicConfig(level=level, format=form, handlers=[handler])
    handler.open()


def flush_logs() -> None:
    """Have what was logged written, before something ends the process."""
    for handler in logging.getLogger().handlers:
        handler.flush()
