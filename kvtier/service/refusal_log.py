"""Log lines of connections that are refused: an engine that is refused tries again for as long as it lives."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from kvtier.tier.contract import Clock

WINDOW_SECONDS = 60.0
LINES_MAX = 64
"""Lines in `WINDOW_SECONDS` at most, of all refusals together."""
SUBJECTS_MAX = 256
"""Engines and reasons that are known again."""
_CHARACTERS_MAX = 64


@dataclass(slots=True)
class Reason:
    """The time at which a reason was written last, and how often it has come since."""

    at: float
    again: int = 0


class RefusalLog:
    """Writes a line for each engine and reason; once more in `WINDOW_SECONDS` at most, with the number since."""

    def __init__(self, logger: logging.Logger, clock: Clock) -> None:
        self._logger = logger
        self._clock = clock
        self._reasons: OrderedDict[tuple[str, str], Reason] = OrderedDict()
        self._began = clock()
        self._lines = self._left_out = 0

    def tell(self, text: str, engine: str = "") -> None:
        """A connection is refused, of an engine if that is known."""
        now, subject = self._clock(), (engine[:_CHARACTERS_MAX], text)
        reason = self._reasons.setdefault(subject, Reason(now, -1))
        self._reasons.move_to_end(subject)
        if len(self._reasons) > SUBJECTS_MAX:
            self._reasons.popitem(last=False)
        reason.again += 1
        if reason.again and now < reason.at + WINDOW_SECONDS:
            return
        if self._has_room(now):
            self._write(text, reason.again)
        else:
            self._left_out += 1
        reason.at, reason.again = now, 0

    def _has_room(self, now: float) -> bool:
        if now >= self._began + WINDOW_SECONDS:
            self._began, self._lines = now, 0
        self._lines += 1
        return self._lines <= LINES_MAX

    def _write(self, text: str, again: int) -> None:
        more = f" ({again} times since the last such line)" if again else ""
        if self._left_out:
            more += f" ({self._left_out} lines of others were left out)"
            self._left_out = 0
        self._logger.warning("%s%s", text, more)
