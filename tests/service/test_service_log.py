"""The log of a stack process: it has a bound whoever is refused, and is never waited for."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support_service import TestEngine, stack_process, stack_text

from kvtier.service import queued_log, refusal_log
from kvtier.service.queued_log import QueuedLog
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
    assert len(refusals._reasons) == refusal_log.SUBJECTS_MAX
    clock.now += refusal_log.WINDOW_SECONDS
    refusals.tell(REASON, "the next")
    assert caplog.messages[-1] == f"{REASON} ({1000 - refusal_log.LINES_MAX} lines of others were left out)"


# -- written by a thread of its own --------------------------------------------------------------------------------


def fill_pipe(end: int) -> int:
    """Fill a pipe, whose end does not wait; the bytes."""
    filled = 0
    with suppress(BlockingIOError):
        while True:
            filled += os.write(end, b"x" * 4096)
    return filled


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, QueuedLog, int]]:
    """A logger, its handler, and the other end of its pipe, which is full."""
    read, written = os.pipe()
    os.set_blocking(written, False)
    handler = QueuedLog(written)
    filled = fill_pipe(written)
    os.set_blocking(written, True)
    handler.open()
    logger = logging.Logger("test")
    logger.addHandler(handler)
    yield logger, handler, read
    handler.flush()
    os.close(read)
    os.close(written)
    assert filled


def lines_until(read: int, last: str) -> list[str]:
    """The lines that come, but what the pipe was full of, until the last of them is this one."""
    found = b""
    while not found.endswith(last.encode() + b"\n"):
        found += os.read(read, 1 << 16)
    return found.decode().lstrip("x").splitlines()


def test_a_log_that_nobody_reads_is_not_waited_for(
    log: tuple[logging.Logger, QueuedLog, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, handler, read = log
    monkeypatch.setattr(queued_log, "LINES_MAX", 100)
    monkeypatch.setattr(queued_log, "FLUSH_SECONDS", 0.01)
    for number in range(1000):
        logger.warning("line %d", number)
    handler.flush()
    os.read(read, 1 << 20)
    monkeypatch.setattr(queued_log, "FLUSH_SECONDS", 20.0)
    handler.flush()
    logger.warning("the next")
    first, left_out, *others = lines_until(read, "the next")
    assert first == "line 0"
    assert left_out.endswith(" lines were left out: nothing read the log")
    kept = 1000 - int(left_out.split()[0])
    assert kept in (100, 101), "100 that waited, and perhaps one that was being written"
    assert others[:99] == [f"line {number}" for number in range(1, 100)]
    assert len(others) == kept


def test_what_was_logged_is_written_before_the_end(log: tuple[logging.Logger, QueuedLog, int]) -> None:
    logger, handler, read = log
    os.read(read, 1 << 20)
    for number in range(50):
        logger.warning("line %d", number)
    handler.flush()
    assert lines_until(read, "line 49") == [f"line {number}" for number in range(50)]


def test_engines_are_served_and_the_process_ends_though_nobody_reads_its_log(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text(stack_text(256))
    path = str(tmp_path / "socket")
    with stack_process(tmp_path / "stack.yaml", path) as process, TestEngine(path) as engine:
        assert engine.store(range(8)) == ["stored"] * 8
        stderr = os.open(f"/proc/{process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        fill_pipe(stderr)
        os.close(stderr)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(20)
            sock.connect(path)
            sock.send(b"garbage")
            assert sock.recv(1) == b"", "it was logged"
        assert engine.load(range(8)) == ["hit"] * 8
        began = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
        assert time.monotonic() < began + 20.0
