"""A line in the log where request after request loads nothing of what is stored, with the likeliest reason."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtier.engines.vllm.compat import LOGGER
from kvtier.engines.vllm.engine_config import ENDS_ALONE
from kvtier.engines.vllm.primary.served_requests import RequestState
from kvtier.stack import StackStats
from kvtier.stack.watching.operator_log import line

FOUND_MAX, MISSED_MAX = 100, 1000
"""Requests in a row that load nothing before the first line: of those that found blocks, and of all others."""
LATE = "the CPU tier has too few rows for a prefix, or the tiers below are too slow to bring one up"
TOO_FEW_ROWS = "the CPU tier has too few rows for a prefix of every group at once"
OTHER_ENDS = "requests share a prefix to another end each time, where no window or state was stored before"
OFF = "shared_prefixes is false: windows and states are stored at the ends of prompts alone"
EVICTED = "the last tier evicts windows and states before they are used again: give it more room"
FOREIGN = (
    "requests have none of the blocks that were there at the start: another PYTHONHASHSEED, tokenizer, chat template, "
    "cache salt or adapter"
)


class UnservedRequests:
    """Counts requests in a row that looked blocks up and loaded none. A load begins the count again.

    The next line comes after ten times as many. `ends_alone` is why windows and states are stored at the ends of
    prompts alone, if they are.
    """

    def __init__(self, stats: Callable[[], StackStats], num_groups: int, ends_alone: str) -> None:
        self._stats = stats
        self._num_groups = num_groups
        self._ends_alone = ends_alone
        self._found = self._missed = 0
        self._found_max, self._missed_max = FOUND_MAX, MISSED_MAX

    def on_end(self, state: RequestState) -> None:
        """A request has ended."""
        if state.loaded:
            self._found = self._missed = 0
        elif state.groups:
            self._found += 1
            if self._found == self._found_max:
                self._found_max *= 10
                self._write(self._found, self._reason(len(state.groups)))
        elif state.request is not None and not state.groups:
            self._missed += 1
            if self._missed == self._missed_max:
                self._missed_max *= 10
                if any(tier.recovered for tier in self._stats().tiers.values()):
                    self._write(self._missed, FOREIGN)

    def _reason(self, groups_found: int) -> str:
        if self._num_groups == 1:
            return LATE
        if self._ends_alone:
            return self._ends_alone
        if groups_found == self._num_groups:
            return TOO_FEW_ROWS
        tiers = list(self._stats().tiers.values())
        return EVICTED if tiers and tiers[-1].evictions else OTHER_ENDS

    def _write(self, requests: int, reason: str) -> None:
        logging.getLogger(LOGGER).warning(line("nothing_loaded", {"requests": requests, "reason": reason}))


def ends_alone(lines: tuple[str, ...], shares_prefixes: bool) -> str:
    """The reason why windows and states are stored at the ends of prompts alone; empty if they are not."""
    return ENDS_ALONE if ENDS_ALONE in lines else "" if shares_prefixes else OFF
