"""`kvtier serve --keep-rows`: a parent keeps the rows over the ends of the stack process, and starts it again."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support_service import SECONDS, TestEngine, kill_listener, peer_pid, stack_process, stack_text, until

from faults.machine import warm
from kvtier.service import service_manager
from kvtier.service.kept_memory import NAMES
from kvtier.service.service_manager import ServiceManager
from kvtier.service.supervisor import KEPT_MAX, SILENCE_PART_SECONDS, WATCHDOG_SECONDS, Notices, Supervisor

SHORT_WATCHDOG = """
import asyncio, logging, sys
from kvtier.service.supervisor import Supervisor
from kvtier.tools.commands import serve
logging.basicConfig()
serve.supervise = lambda words: sys.exit(asyncio.run(Supervisor(words, 3.0).run()))
"""
SECOND_FORK_FAILS = f"""
import errno, os
fork, forks = os.fork, []
def fork_but_once():
    forks.append(0)
    if len(forks) == 2:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = fork_but_once
{SHORT_WATCHDOG}
"""
BUSY_AT_A_SIGNAL = """
import signal, time
def hang(*_):
    while True:
        time.sleep(0.5)
signal.signal(signal.SIGUSR1, hang)
"""
"""Of each process that is started by another program: its event loop does not run any more."""


def is_alive(pid: int) -> bool:
    """True unless a process has ended."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


class Supervised:
    """A supervisor, and an engine with eight blocks in its rows."""

    def __init__(self, process: subprocess.Popen[str], path: str, engine: TestEngine) -> None:
        self.process, self.path, self.engine = process, path, engine

    def wait_served_again(self) -> None:
        """Until the engine is served by the next process, with all blocks."""
        until(lambda: self.engine.load(range(8)) == ["hit"] * 8, "its rows are served again")

    def end(self, number: int) -> str:
        """Send the supervisor a signal, and wait for its end: what it wrote to stderr."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=SECONDS)[1]


@contextmanager
def supervised(folder: str, tmp_path: Path, first: str = "") -> Iterator[Supervised]:
    """`kvtier serve --keep-rows`, after other code."""
    stack, path = tmp_path / "stack.yaml", f"{folder}/socket"
    stack.write_text(stack_text())
    with stack_process(stack, path, first, ["--keep-rows"]) as process, TestEngine(path, "one") as engine:
        assert engine.store(range(8)) == ["stored"] * 8
        yield Supervised(process, path, engine)


def test_rows_are_served_after_each_kill_and_nothing_is_left_at_the_end(short_folder: str, tmp_path: Path) -> None:
    with supervised(short_folder, tmp_path) as found:
        for _ in range(2):
            kill_listener(found.path)
            found.wait_served_again()
        served = peer_pid(found.path)
        errors = found.end(signal.SIGTERM)
        assert found.process.returncode == 0, errors
        assert errors.count("was ended by signal 9, and is started again") == 2
        assert not is_alive(served)
        assert os.listdir(short_folder) == []


def test_a_hangup_starts_it_again_with_its_rows(short_folder: str, tmp_path: Path) -> None:
    with supervised(short_folder, tmp_path) as found:
        served = peer_pid(found.path)
        found.process.send_signal(signal.SIGHUP)
        until(lambda: not is_alive(served), "it ends")
        found.wait_served_again()
        found.end(signal.SIGINT)
        assert found.process.returncode == 130  # as without a supervisor


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1], ids=["frozen", "busy"])
def test_a_process_that_hangs_is_ended_and_started_again(short_folder: str, tmp_path: Path, number: int) -> None:
    """A frozen one takes SIGABRT no longer, and is killed."""
    (tmp_path / "sitecustomize.py").write_text(BUSY_AT_A_SIGNAL)
    before = f"import os; os.environ['PYTHONPATH'] = ':'.join(['{tmp_path}', *sys.path])"
    with supervised(short_folder, tmp_path, f"import sys; {before}\n{SHORT_WATCHDOG}") as found:
        served = peer_pid(found.path)
        os.kill(served, number)
        until(lambda: not is_alive(served), "it is ended")
        found.wait_served_again()
        assert "did not run for 3 s" in found.end(signal.SIGTERM)


async def test_a_freeze_of_parent_and_child_is_one_part_of_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh process is not ended for a time in which neither ran."""
    sent, loop, freezes = list[int](), asyncio.get_running_loop(), 0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + 3600.0 * freezes)
    monkeypatch.setattr(Supervisor, "_start", lambda supervisor: 0)
    monkeypatch.setattr(Supervisor, "_send", lambda supervisor, number: sent.append(number))
    supervisor = Supervisor([])
    life = asyncio.ensure_future(supervisor._life())
    await asyncio.sleep(0)
    supervisor._ready = True
    while not sent:
        freezes += 1
        await asyncio.sleep(0.01)
    assert sent == [signal.SIGABRT]
    assert freezes > WATCHDOG_SECONDS / SILENCE_PART_SECONDS
    supervisor._ended.set_result(0)
    assert await life == 0
    supervisor._notices.close()


def test_a_start_for_which_there_is_no_process_is_tried_again(short_folder: str, tmp_path: Path) -> None:
    with supervised(short_folder, tmp_path, SECOND_FORK_FAILS) as found:
        kill_listener(found.path)
        found.wait_served_again()
        errors = found.end(signal.SIGTERM)
        assert found.process.returncode == 0, errors
        assert errors.count("no process can be had") == 1


def test_it_ends_with_its_supervisor(short_folder: str, tmp_path: Path) -> None:
    with supervised(short_folder, tmp_path) as found:
        served = peer_pid(found.path)
        found.end(signal.SIGKILL)
        until(lambda: not is_alive(served), "it ends")


def test_what_cannot_be_served_is_one_line_and_the_end(short_folder: str, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("tiers: [{type: cpu, cpu_bytes_to_use: 1PiB}]\n")
    code = "from kvtier.cli import main; main()"
    words = [sys.executable, "-c", code, "serve", str(stack), "--socket", f"{short_folder}/socket", "--keep-rows"]
    (Path(short_folder) / "socket").mkdir()
    found = warm.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert (found.returncode, found.stdout) == (2, "")
    assert len(found.stderr.splitlines()) == 1, found.stderr
    under = warm.run(words, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, "NOTIFY_SOCKET": "@x"})
    assert (under.returncode, under.stderr) == (
        2,
        "error: --keep-rows: the service manager that started this process keeps the rows\n",
    )


def send(address: str, text: str, *descriptors: int) -> None:
    """Send a notice."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect("\0" + address[1:])
        socket.send_fds(sock, [text.encode()], descriptors)


def test_notices_of_others_change_nothing_and_leave_no_descriptor() -> None:
    notices, own = Notices(), os.getpid()
    before = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(BlockingIOError):
            notices.receive(own)
        send(notices.address, "FDSTORE=1\nFDNAME=rows", 0, 1)
        assert notices.receive(own + 1) == {}
        assert notices.kept == {}
        for number in range(KEPT_MAX + 2):
            send(notices.address, f"FDSTORE=1\nFDPOLL=0\nFDNAME={number}\nSTATUS=x", 0)
            assert notices.receive(own) == {"STATUS": "x"}
        assert len(notices.kept) == KEPT_MAX
        send(notices.address, "FDSTORE=1\nFDNAME=1", 0)
        send(notices.address, "FDSTOREREMOVE=1\nFDNAME=2")
        send(notices.address, "\xff=\n=\nREADY=1")
        assert (notices.receive(own), notices.receive(own)) == ({}, {})
        assert notices.receive(own)["READY"] == "1"
        assert len(notices.kept) == KEPT_MAX - 1
        assert len(os.listdir("/proc/self/fd")) == before + KEPT_MAX - 1
    finally:
        notices.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


@pytest.fixture
def notices() -> Iterator[Notices]:
    """A socket for notices, of this process."""
    found = Notices()
    yield found
    found.close()


@pytest.fixture
def manager(notices: Notices) -> Iterator[ServiceManager]:
    """What sends them."""
    found = ServiceManager({"NOTIFY_SOCKET": notices.address, "WATCHDOG_USEC": "20000000"})
    yield found
    found.close()


def received(notices: Notices) -> list[dict[str, str]]:
    """All that wait, of this process."""
    found = []
    with suppress(BlockingIOError):
        while True:
            found.append(notices.receive(os.getpid()))
    return found


async def test_the_watchdog_hears_of_a_process_that_has_no_descriptor_left(
    notices: Notices, manager: ServiceManager
) -> None:
    manager.notify("READY=1")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        watching = asyncio.ensure_future(manager.watch())
        await asyncio.sleep(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not watching.done(), watching.exception()
    watching.cancel()
    assert received(notices) == [{"READY": "1"}, {"WATCHDOG": "1"}]


def test_a_manager_that_reads_nothing_holds_up_what_it_keeps_for_a_moment_and_the_watchdog_not_at_all(
    notices: Notices, manager: ServiceManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_manager, "NOTICE_SECONDS", 0.5)

    def send_all() -> None:
        for _ in range(num_waiting):
            manager._send(["WATCHDOG=1"], 0.0)
        assert caplog.records == []
        manager.keep(dict.fromkeys(NAMES, 0))

    num_waiting = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 2
    sending = threading.Thread(target=send_all, daemon=True)
    sending.start()
    sending.join(SECONDS)
    assert not sending.is_alive()
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == ["the service manager does not take FDSTOREREMOVE=1"] * len(NAMES)
    assert {"".join(fields) for fields in received(notices)} == {"WATCHDOG"}
    manager.keep(dict.fromkeys(NAMES, 0))
    received(notices)
    assert tuple(notices.kept) == NAMES
