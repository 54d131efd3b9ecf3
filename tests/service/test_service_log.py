"""The log of a stack process: it has a bound whoever is refused."""

from __future__ import annotations

import logging

import pytest

from kvtier.service import refusal_log
from kvtier.service.refusal_log import RefusalLog

REASON = "a process is not served: its blocks have another layout than those of the engines here"


class Hand:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hand:
    return Hand()


@pytest.fixture
def refusals(clock: Hand) -> RefusalLog:
    return RefusalLog(logging.getLogger("test"), clock)


def test_an_engine_that_is_refused_again_and_again_is_a_line_a_minute(
    refusals: RefusalLog, clock: Hand, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(180):
        refusals.tell(REASON, "one")
        clock.now += 1.0
    more = " (60 times since the last such line)"
    assert caplog.messages == [REASON, REASON + more, REASON + more]
    refusals.tell(REASON, "two")
    assert caplog.messages[3] == REASON, "another engine has a line of its own"


def test_lines_have_a_bound_also_where_each_engine_is_another(
    refusals: RefusalLog, clock: Hand, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1000):
        refusals.tell(REASON, f"engine {number}")
    assert len(caplog.messages) == refusal_log.LINES_MAX
    assert len(refusals._told) == refusal_log.SUBJECTS_MAX
    clock.now += refusal_log.WINDOW_SECONDS
    refusals.tell(REASON, "the next")
    assert caplog.messages[-1] == f"{REASON} ({1000 - refusal_log.LINES_MAX} lines of others were left out)"
