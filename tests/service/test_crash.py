"""A defect ends the stack process, with one line and a file; an engine whose messages bring it about is refused."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from support_service import SECONDS, TestEngine, block_keys, end, stack_process, stack_text, until

from kvtier.client.inquiry import inquire
from kvtier.errors import ConfigError, IntegrityError
from kvtier.service import crash_file, wire
from kvtier.service.channel import is_listening
from kvtier.service.crash_file import EXIT_STATUS, FILES_KEPT, CrashFile
from kvtier.tier.contract import LookupResult

DEFECT = """
from kvtier.service.session import Session
handle = Session.handle
def broken(self, item, now):
    if type(item).__name__ == "Computed":
        {defect}
    return handle(self, item, now)
Session.handle = broken
"""
RAISE = DEFECT.format(defect="raise KeyError(b'the secret key')")
SEGV = DEFECT.format(defect="import ctypes; ctypes.string_at(0)")
ABORT = DEFECT.format(defect="import os; os.abort()")


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_text(stack_text())
    return path


@pytest.fixture
def path(tmp_path: Path) -> str:
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    return str(folder / "socket")


def files(path: str) -> list[Path]:
    return sorted(Path(path).parent.glob("*.crash-*"))


def strike(engine: TestEngine) -> None:
    """Send the message that ends the process."""
    engine.client._channel.send([wire.Ask("secret", 1, wire.Keys.of(block_keys(3))), wire.Computed(1, 1.0, 2.0)])


def died(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=SECONDS)
    return process.returncode, errors


def test_an_exception_in_a_step_ends_the_process_and_not_the_engines(stack: Path, path: str) -> None:
    running = stack_process(stack, path, RAISE)
    with running as process, TestEngine(path, "one") as one, TestEngine(path, "two") as two:
        assert one.store(range(4)) == ["stored"] * 4
        strike(two)
        status, log = died(process)
        one.step_until(lambda: one.look(range(4)) == [LookupResult.MISS] * 4, "misses")
    assert status == EXIT_STATUS
    (file,) = files(path)
    (line,) = [line for line in log.splitlines() if "CRITICAL" in line]
    assert line.endswith(f"the stack process ends with status 70: KeyError; see {file}")
    assert "Traceback" not in log
    assert file.stat().st_mode & 0o777 == 0o600
    content = file.read_text()
    assert "secret" not in content + log
    lines = [line.strip() for line in content.splitlines()]
    (slot,) = [line.removesuffix(": two") for line in lines if line.endswith(": two")]
    assert lines[0] == f"handled: {slot}"
    assert any(line.endswith(f"of {slot}: Ask Computed") for line in lines)
    assert any(" Fill" in line for line in lines)
    assert "KeyError" in lines
    assert any("session.py" in line or "in broken" in line for line in lines)
    assert "Current thread" in content


@pytest.mark.parametrize(("defect", "number"), [(SEGV, signal.SIGSEGV), (ABORT, signal.SIGABRT)])
def test_a_fatal_signal_leaves_the_same_file(defect: str, number: int, stack: Path, path: str) -> None:
    with stack_process(stack, path, defect) as process, TestEngine(path, "one") as engine:
        engine.store(range(4))
        strike(engine)
        assert died(process)[0] == -number
    (file,) = files(path)
    assert "Fatal Python error" in file.read_text()
    assert [death.engine for death in CrashFile(path).deaths] == ["one"]


def test_an_engine_whose_messages_ended_it_twice_is_refused_and_others_are_not(stack: Path, path: str) -> None:
    for _ in range(2):
        with stack_process(stack, path, RAISE) as process, TestEngine(path, "bad") as bad:
            strike(bad)
            assert died(process)[0] == EXIT_STATUS
    with stack_process(stack, path, RAISE) as process:
        with pytest.raises(ConfigError, match=r"its messages ended the stack process 2 times .* see .*\.crash-"):
            TestEngine(path, "bad")
        with TestEngine(path, "good") as good, TestEngine(path) as nameless:
            assert good.store(range(4)) == ["stored"] * 4
            assert nameless.load(range(4)) == ["hit"] * 4
        assert inquire(path, "forget", SECONDS, "good")["forgotten"] == 0
        assert inquire(path, "forget", SECONDS, "bad")["forgotten"] == 2
        TestEngine(path, "bad").client.close()
        end(process)
    assert len(files(path)) == 2
    with stack_process(stack, path) as process:
        TestEngine(path, "bad").client.close()
        end(process)


def test_an_orderly_end_leaves_no_file_and_a_killed_one_none_for_long(stack: Path, path: str) -> None:
    with stack_process(stack, path) as process:
        until(lambda: len(files(path)) == 1, "its file is there")
        end(process, signal.SIGKILL)
    (left,) = files(path)
    with stack_process(stack, path) as process:
        until(lambda: left not in files(path), "the head of a killed process is removed")
        until(lambda: len(files(path)) == 1, "its file is there")
        end(process)
    assert files(path) == []
    assert not is_listening(path)


# -- the file alone ------------------------------------------------------------------------------------------------


def written(path: str, engine: str, at_seconds: float, report: str = "\nKeyError\n", handled: bool = True) -> str:
    """The file of a process that ended at a time."""
    crash = CrashFile(path, lambda: at_seconds)
    crash.begin(engine, [wire.Drop("r")])
    if not handled:
        crash.end()
    with open(crash.file, "a") as file:
        file.write(report)
    os.utime(crash.file, (at_seconds, at_seconds))
    os.close(crash._fd)
    return crash.file


@pytest.fixture(autouse=True)
def keep_faulthandler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's own process keeps the handlers that pytest has set."""
    monkeypatch.setattr(crash_file.faulthandler, "enable", lambda file: None)
    monkeypatch.setattr(crash_file.faulthandler, "disable", lambda: None)


def refusal(path: str, now: float, engine: str = "one") -> str:
    crash = CrashFile(path, lambda: now)
    crash.close()
    return crash.refusal(engine)


@pytest.mark.parametrize(
    ("times", "now", "refused"),
    [
        ([0], 1, False),
        ([0, 599], 600, True),
        ([0, 601], 602, False),
        ([0, 599], 599 + 3601, False),
        ([0, 601, 1200], 1300, True),
    ],
)
def test_two_deaths_within_ten_minutes_refuse_an_engine_for_an_hour(
    times: Sequence[int], now: int, refused: bool, path: str
) -> None:
    for at in times:
        written(path, "one", 1e9 + at)
    assert bool(refusal(path, 1e9 + now)) == refused
    assert not refusal(path, 1e9 + now, "two")


FIRST = "(most recent call first)"
SIGNAL = f"Fatal Python error: Aborted\n\nThread 0x1 {FIRST}:\n{{other}}\n\nCurrent thread 0x2 {FIRST}:\n{{current}}\n"
HANDLING = '  File "/x/server.py", line 1 in _handle_items'


@pytest.mark.parametrize(
    ("report", "handled", "blamed"),
    [
        ("\nKeyError\n", True, True),
        ("\nKeyError\n", False, False),
        (SIGNAL.format(other="  File", current=HANDLING), True, True),
        (SIGNAL.format(other=HANDLING, current="  <no Python frame>"), True, False),
        (SIGNAL.format(other="  File", current=HANDLING), False, False),
    ],
)
def test_who_is_noted(report: str, handled: bool, blamed: bool, path: str) -> None:
    """A library that aborts in a thread of its own is no engine's doing."""
    for at in range(2):
        written(path, "one", 1e9 + at, report, handled)
    assert bool(refusal(path, 1e9 + 5)) == blamed


def test_eight_are_kept(path: str) -> None:
    names = [Path(written(path, "one", 1e9 + number)).name for number in range(FILES_KEPT + 4)]
    assert [file.name for file in files(path)] == names[-FILES_KEPT:]


def test_an_exception_is_shown_without_what_it_holds(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = CrashFile(path)
    monkeypatch.setattr(crash_file.os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    monkeypatch.setattr(crash_file.logging, "shutdown", lambda: None)
    try:
        try:
            {}[b"secret"]
        except KeyError:
            raise IntegrityError("a sum does not agree")  # noqa: B904
    except IntegrityError as error:
        with pytest.raises(SystemExit, match="70"):
            crash.exit(error)
    content = Path(crash.file).read_text()
    assert "IntegrityError: a sum does not agree" in content
    assert "\nKeyError\n" in content
    assert "secret" not in content


def test_a_disk_that_fails_does_not_keep_the_process(path: str, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """It would go on from half a step."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "the disk has failed")

    crash = CrashFile(path)
    monkeypatch.setattr(crash_file.os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    monkeypatch.setattr(crash_file.logging, "shutdown", lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(crash_file.os, "write", fail)
        with pytest.raises(SystemExit, match="70"):
            crash.exit(KeyError())
    assert "the stack process ends with status 70: KeyError; see \nKeyError" in caplog.text
    crash.close()


def test_many_engines_share_the_places_of_the_head(path: str) -> None:
    crash = CrashFile(path)
    for number in range(200):
        crash.begin(f"engine-{number}\n", [wire.Drop("r")] * 30)
        crash.end()
    crash.begin("engine-199\n", [wire.Drop("r")])
    content = Path(crash.file).read_bytes()
    crash.close()
    assert crash_file._blamed(content + b"\nKeyError\n") == "engine-199\\n"


def test_no_place_for_a_whole_head_is_a_line_in_the_log(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(crash_file.os, "write", lambda fd, data: write(fd, data[:4096]))
        crash = CrashFile(path)
    crash.begin("one", [wire.Drop("r")])
    crash.close()
    assert "no file for defects can be made: [Errno 28]" in caplog.text
    assert not files(path)


def test_no_place_for_a_file_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    crash = CrashFile(str(tmp_path / "absent" / "socket"))
    crash.begin("one", [wire.Drop("r")])
    crash.end()
    crash.close()
    assert "no file for defects can be made" in caplog.text
