"""What is observed while something runs: the bytes on a disk, and what the product logs."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Self

LAST_LOOK_SECONDS = 10.0


class Bound:
    """Samples from a thread how much space folders occupy, and keeps the maximum.

    On a disk that hangs the last look may not end: it is given `LAST_LOOK_SECONDS`, and those before it count.
    """

    def __init__(self, *roots: Path, every_seconds: float = 0.05) -> None:
        self.most_bytes = 0
        self._roots = roots
        self._every_seconds = every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="bound", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(LAST_LOOK_SECONDS)

    def _look(self) -> None:
        from support_files import disk_bytes  # to be found inside an attack only

        self.most_bytes = max(self.most_bytes, sum(map(disk_bytes, self._roots)))

    def _sample(self) -> None:
        while not self._stop.wait(self._every_seconds):
            self._look()
        self._look()


class Heard(logging.Handler):
    """Keeps what the product logs as warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Self:
        logging.getLogger("kvtier").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("kvtier").removeHandler(self)

    def count(self, words: str) -> int:
        """How many lines contain this text."""
        return sum(words in line for line in self.lines)
