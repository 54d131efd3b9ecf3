"""Log lines for the operator of a stack, one a change: `event=tier_down tier=fs breakers="load open, store closed"`.

A line is an event and `name=value` pairs. A value with other characters than those of words and paths is quoted as in
JSON, so it never breaks a line. No line has a key, a request or a tenant in it. `docs/operations.md` lists them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.control.tiers.breaker import BreakerState
from kvtier.control.tiers.lower_tier import LowerTier, TierSpec
from kvtier.stack.shutdown import CloseReport
from kvtier.tier.contract import Clock

LOGGER = __name__
logger = logging.getLogger(__name__)
LINES_MAX = 6
WINDOW_SECONDS = 60.0
_PLAIN = re.compile(r"[\w./:+-]+")
_LEFT_OUT = "left_out"


class OperatorLog:
    """Writes lines to a logger, at most `LINES_MAX` of one subject in `WINDOW_SECONDS`; of the rest the next line says
    how many those were.
    """

    def __init__(self, logger: logging.Logger, clock: Clock) -> None:
        self._logger = logger
        self._clock = clock
        self._times: dict[str, deque[float]] = {}
        self._left_out: dict[str, int] = {}

    def has_room(self, subject: str) -> bool:
        """True if a line of this subject is written now."""
        times = self._times.setdefault(subject, deque(maxlen=LINES_MAX))
        return len(times) < LINES_MAX or self._clock() >= times[0] + WINDOW_SECONDS

    def tell(self, event: str, subject: str, level: int = logging.INFO, **values: object) -> bool:
        """Write a line; False if it was left out, because there were too many of this subject."""
        if not self.has_room(subject):
            self._left_out[subject] = self._left_out.get(subject, 0) + 1
            return False
        self._times[subject].append(self._clock())
        if left_out := self._left_out.pop(subject, 0):
            values[_LEFT_OUT] = left_out
        self._logger.log(level, "%s", line(event, values))
        return True

    def opened(self, spec: TierSpec) -> bool:
        """A tier is open: how, how large it may become, and what it has found, if it keeps a directory."""
        opened, found = spec.opened, {}
        if opened.space is not None:
            found["recovered_blocks"] = len(opened.recovered.slots)
        return self.tell(
            "tier_open",
            spec.name,
            tier=spec.name,
            type=spec.kind,
            mode=opened.mode,
            capacity_bytes=opened.capacity_bytes,
            **found,
            seconds=opened.open_seconds,
        )

    def reset(self, epoch: int, began: float, ended: asyncio.Future[Any]) -> None:
        """All that was stored before is unreachable: durably if this ended well, else as long as this process lives."""
        durable = not ended.cancelled() and ended.exception() is None
        level, word = (logging.INFO, "yes") if durable else (logging.ERROR, "no")
        self.tell("reset", "reset", level, epoch=epoch, durable=word, seconds=self._clock() - began)

    def closed(self, report: CloseReport, began: float) -> None:
        """The stack is closed, since a time; a warning if that has cost something."""
        level = logging.WARNING if report.dropped_blocks or report.unfinished_jobs else logging.INFO
        figures = {"dropped_blocks": report.dropped_blocks, "unfinished_jobs": report.unfinished_jobs}
        self.tell("closed", "closed", level, **figures, seconds=self._clock() - began)


def line(event: str, values: Mapping[str, object]) -> str:
    """An event with its values as one line."""
    return " ".join([f"event={event}", *(f"{name}={_text(value)}" for name, value in values.items())])


def _text(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class TierWatch:
    """Says when a lower tier opens, is refused by a breaker, is used again, or is held back.

    What the log leaves out is made up for by a later look: what is now is compared with what was written last. A
    half-open breaker is no change: the tier is used again when its probe succeeds. `due`: a look may find something,
    because a tier is not as it should be, or something of it has failed since the last one. `errors` counts the looks
    that raised, as out of a handler of the log: that costs no request anything.
    """

    def __init__(self, log: OperatorLog, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._seen: dict[str, BreakerState] = {}
        self._written: dict[str, BreakerState] = {}
        self._down_since: dict[str, float] = {}
        self.due = True
        self.errors = 0

    def _failure(self) -> None:
        self.due = True

    def look(self, lowers: Sequence[LowerTier], reason: str = "", level: int = logging.WARNING) -> None:
        """Write what has changed. `reason` is why tiers are held back, `level` how much that matters."""
        try:
            self._look_at_each(lowers, reason, level)
        except Exception:
            self.errors += 1
            logger.exception("the state of the tiers could not be logged")

    def _look_at_each(self, lowers: Sequence[LowerTier], reason: str, level: int) -> None:
        self.due = False
        for lower in lowers:
            for breaker in lower.breakers.values():
                breaker.after_failure = self._failure
            state = lower.health
            self._look(lower, state, reason, level)
            if not (state is self._written.get(lower.name) is BreakerState.CLOSED):
                self.due = True

    def _look(self, lower: LowerTier, state: BreakerState, reason: str, level: int) -> None:
        if state is BreakerState.HALF_OPEN:
            return
        seen_before, self._seen[lower.name] = self._seen.get(lower.name), state
        if state is BreakerState.OPEN is not seen_before:
            self._down_since[lower.name] = self._clock()
        if state is self._written.get(lower.name):
            return
        if state is seen_before and not self._log.has_room(lower.name):
            return  # it was left out, and counts once
        if self._write(lower, state, reason, level):
            self._written[lower.name] = state

    def _write(self, lower: LowerTier, state: BreakerState, reason: str, level: int) -> bool:
        name = lower.name
        if state is BreakerState.HELD_BACK:
            more = {"reason": reason} if reason else {}
            return self._log.tell("tier_held_back", name, level, tier=name, **more)
        if state is BreakerState.OPEN:
            return self._write_down(lower)
        if self._written.get(name) is not BreakerState.OPEN:
            return self._log.opened(lower.spec)
        seconds = self._clock() - self._down_since[name]
        return self._log.tell("tier_up", name, tier=name, down_seconds=seconds)

    def _write_down(self, lower: LowerTier) -> bool:
        counters = lower.counters
        return self._log.tell(
            "tier_down",
            lower.name,
            logging.WARNING,
            tier=lower.name,
            breakers=lower.health_text,
            failed_blocks=counters.failed,
            corrupt_blocks=counters.corrupt,
            late_blocks=counters.late,
        )
