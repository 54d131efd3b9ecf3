"""Connections of a stack process: who is let in, how many, and what is left of those that end."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support_engine_client import EngineClient
from support_served import served
from support_service import NAMESPACE, PAGE, TestEngine, block_keys, peer_pid, stack_process, stack_text, until

from faults.machine import warm
from kvtier.client.connection import Identity
from kvtier.errors import ConfigError, ResourceError
from kvtier.service import listener, wire
from kvtier.service import server as module
from kvtier.service.channel import Channel, is_listening, receive_greeting, send_greeting
from kvtier.service.wire import FROM_ENGINE, GREETING, PROTOCOLS, TO_ENGINE, Hello, Refused, Welcome
from kvtier.stack.watching import socket_file
from kvtier.tier.contract import LookupResult
from kvtier.types.geometry import KVLayout

SUPPORT = str(Path(__file__).parents[1] / "support")
LIFE = """
import os, sys, time
sys.path.insert(0, {support!r})
from support_service import TestEngine
engine = TestEngine(sys.argv[1])
engine.store(range(8))
request = engine.client.request("held")
{more}
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def engine_process(path: str, more: str = "") -> Iterator[subprocess.Popen[str]]:
    """An engine of its own process that has stored 8 blocks."""
    code = LIFE.format(support=SUPPORT, more=more)
    with warm.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def hello(
    role: str = "scheduler", token: str = "", pid: int = 0, layout: KVLayout = NAMESPACE.layout
) -> tuple[Hello, int]:
    """A greeting, and the descriptor that goes with it."""
    manifest = replace(NAMESPACE, layout=layout).manifest().encode()
    item = Hello(list(PROTOCOLS), "", role, 0, "engine", token or secrets.token_hex(8), manifest)
    return item, os.pidfd_open(pid or os.getpid())


def greet(
    path: str, role: str = "scheduler", token: str = "", layout: KVLayout = NAMESPACE.layout
) -> tuple[socket.socket, object]:
    """A connection made by hand, and the answer to its greeting."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(20)
    item, pidfd = hello(role, token, layout=layout)
    try:
        sock.connect(path)
        send_greeting(sock, item, [pidfd])
        answer, descriptors = receive_greeting(sock, GREETING)
    except OSError:
        sock.close()
        raise
    finally:
        os.close(pidfd)
    for fd in descriptors:
        os.close(fd)
    return sock, answer


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def open_descriptors(process: int) -> int:
    """How many descriptors a process has, after a moment in which it may close some."""
    time.sleep(0.02)
    return len(os.listdir(f"/proc/{process}/fd"))


# -- ends ----------------------------------------------------------------------------------------------------------


def test_an_orderly_end_frees_the_rows_though_the_process_lives(tmp_path: Path) -> None:
    with served(tmp_path) as found:
        for life in range(20):
            with TestEngine(found.path) as engine:
                assert engine.store(range(8 * life, 8 * life + 8)) == ["stored"] * 8
            until(lambda: not found.engines and found.rests(), "the rows are free")


def test_connections_leave_nothing_behind(tmp_path: Path) -> None:
    with served(tmp_path) as found, TestEngine(found.path) as engine:
        engine.store(range(8))
        before = descriptors()
        for number in range(300):
            sock, answer = greet(found.path, "worker" if number % 2 else "scheduler", f"token-{number}")
            assert isinstance(answer, Welcome), answer
            if number % 2:
                Channel(sock, TO_ENGINE, 1 << 20).send([wire.Quiet()])
            sock.close()
            if number % 50 == 49:
                until(lambda: found.engines == 1, "all have left")
        until(lambda: descriptors() <= before, "no descriptor is left")
        assert engine.load(range(8)) == ["hit"] * 8


@pytest.mark.parametrize("forked", [False, True])
def test_a_killed_process_gives_its_rows_back_also_where_a_child_holds_its_socket(forked: bool, tmp_path: Path) -> None:
    more = "if not os.fork():\n    time.sleep(600)" if forked else ""
    with served(tmp_path) as found, TestEngine(found.path) as witness, engine_process(found.path, more) as process:
        assert found.engines == 2
        assert "LENT" in found.rows()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == forked
        os.kill(process.pid, signal.SIGKILL)
        try:
            until(lambda: found.engines == 1, "its exit is seen")
            witness.client.core._lent.clear()
            until(lambda: found.rows().get("LENT", 0) <= 64, "its rows are free")
            assert witness.load(range(8)) == ["hit"] * 8
        finally:
            for each in children:
                os.kill(int(each), signal.SIGKILL)


def test_a_process_that_died_before_it_was_read_leaves_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as found, TestEngine(found.path) as engine:
        engine.store(range(4))
        before, goes_on = descriptors(), threading.Event()
        found.thread.call_soon(goes_on.wait)
        code = (
            f"import sys, os; sys.path[:0] = [{SUPPORT!r}, {str(Path(__file__).parent)!r}]\n"
            "import socket; from test_server import hello; from kvtier.service.channel import send_greeting\n"
            "for role in ('worker', 'scheduler'):\n"
            "    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); sock.connect(sys.argv[1])\n"
            "    item, pidfd = hello(role, 'dies'); send_greeting(sock, item, [pidfd])\n"
            "    sys.modules['kept-' + role] = sock\n"
            "socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])\n"
            "os.kill(os.getpid(), 9)\n"
        )
        done = warm.run([sys.executable, "-c", code, found.path], timeout=60)
        assert done.returncode == -signal.SIGKILL
        goes_on.set()
        until(lambda: found.engines == 1 and descriptors() <= before, "nothing is left")
        assert engine.load(range(4)) == ["hit"] * 4


def test_the_end_is_said_before_the_connection_ends(tmp_path: Path) -> None:
    with served(tmp_path) as found:
        sock, _ = greet(found.path)
        channel = Channel(sock, TO_ENGINE, 1 << 20)
    items = channel.receive()
    assert [item for item in items if type(item) is wire.Closing]
    assert channel.closed
    channel.close()


def test_an_engine_that_does_not_read_is_shut_out_and_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OUTBOX_BYTES_MAX", 64 << 10)
    with served(tmp_path) as found, TestEngine(found.path) as engine:
        engine.store(range(8))
        worker, _ = greet(found.path, "worker", "silent")
        sock, _ = greet(found.path, "scheduler", "silent")
        channel = Channel(sock, TO_ENGINE, 1 << 30)
        number = 0
        while found.engines == 2 and number < 20000:
            number += 1
            channel.send([wire.Ask("r", number, wire.Keys.of(block_keys(512, 1000)))])
            if channel.closed:
                break
        until(lambda: found.run(lambda: all(e.scheduler is None or not e.session.lost for e in engines(found))))
        assert engine.load(range(8)) == ["hit"] * 8
        until(lambda: channel.closed or not channel.flush() or channel.receive() or channel.closed, "it is closed")
        worker.close()
        channel.close()


def test_a_process_whose_queue_of_connections_is_full_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening, ExitStack() as waiting:
        listening.bind(path)
        assert not is_listening(path)
        listening.listen(0)
        assert is_listening(path)
        with suppress(BlockingIOError):
            while True:
                sock = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                sock.setblocking(False)
                sock.connect(path)
        assert is_listening(path)


def test_what_is_sent_at_once_has_a_bound_too() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(one, FROM_ENGINE, 1 << 10, 1 << 20)
    reader = Channel(other, TO_ENGINE, 1 << 10)
    part = wire.FiguresPart(1, b"x" * (32 << 10), last=False)
    assert not channel.send([part] * 40)
    assert not channel.waiting_bytes, "nothing of it was kept"
    assert channel.send([part] * 20)
    assert channel.waiting_bytes, "the socket has no room for all of it"
    assert not channel.send([part])
    received = 0
    while received < 20:
        received += len(reader.receive())
        channel.flush()
    assert channel.send([part])
    channel.close()
    reader.close()


def engines(found: object) -> list[module.Engine]:
    return list(found.server._engines.values())  # type: ignore[attr-defined]


# -- bounds --------------------------------------------------------------------------------------------------------


def test_more_engines_than_a_service_has_places_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ENGINES_MAX", 2)
    with served(tmp_path) as found:
        with TestEngine(found.path), TestEngine(found.path) as two:
            with pytest.raises(ConfigError, match="2 engines are served already"):
                TestEngine(found.path)
            assert two.store(range(4)) == ["stored"] * 4
        until(lambda: not found.engines)
        with TestEngine(found.path) as three:
            assert three.load(range(4)) == ["hit"] * 4


def test_more_connections_than_there_may_be_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 12)
    monkeypatch.setattr(listener, "GREETINGS_PER_SECOND", 1e6)
    with served(tmp_path) as found, TestEngine(found.path) as engine:
        silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(30)]
        for sock in silent:
            sock.connect(found.path)
            sock.settimeout(20)
        refused = [sock for sock in silent[10:] if sock.recv(1) == b""]
        assert len(refused) == 20
        assert engine.store(range(4)) == ["stored"] * 4
        with pytest.raises(ResourceError, match="no stack process answers"):
            TestEngine(found.path)
        for sock in silent:
            sock.close()
        until(lambda: found.run(lambda: not found.server._listener.is_greeting))
        with TestEngine(found.path) as other:
            assert other.load(range(4)) == ["hit"] * 4


def test_greetings_have_a_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "GREETINGS_PER_SECOND", 0.0)
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 20)
    with served(tmp_path) as found, TestEngine(found.path) as engine:
        answers = []
        for _ in range(30):
            try:
                sock, answer = greet(found.path, "scheduler")
            except (OSError, ConnectionError):
                answers.append(None)
            else:
                answers.append(answer)
                sock.close()
        assert [answer is None for answer in answers] == [False] * 18 + [True] * 12
        assert engine.store(range(4)) == ["stored"] * 4
        monkeypatch.setattr(listener, "GREETINGS_PER_SECOND", 1000.0)
        with TestEngine(found.path) as other:
            assert other.load(range(4)) == ["hit"] * 4


def test_a_process_that_is_refused_again_and_again_leaves_others_their_greetings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETINGS_PER_SECOND", 0.0)
    monkeypatch.setattr(listener, "PROCESS_PER_SECOND", 0.0)
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 40)
    monkeypatch.setattr(listener, "PROCESS_AT_ONCE", 20)
    code = (
        f"import sys; sys.path[:0] = [{SUPPORT!r}, {str(Path(__file__).parent)!r}]\n"
        "from test_server import greet\n"
        "read = 0\n"
        "for _ in range(100):\n"
        "    try:\n"
        "        sock, _ = greet(sys.argv[1], 'no role')\n"
        "    except OSError:\n"
        "        continue\n"
        "    read += 1\n"
        "    sock.close()\n"
        "print(read)\n"
    )
    with served(tmp_path) as found, TestEngine(found.path) as engine:
        refused = warm.run([sys.executable, "-c", code, found.path], timeout=60, stdout=subprocess.PIPE, text=True)
        assert refused.stdout == "3\n", "it is read until its own greetings are used up"
        assert engine.store(range(4)) == ["stored"] * 4
        with TestEngine(found.path) as other:
            assert other.load(range(4)) == ["hit"] * 4


def test_greetings_of_processes_that_cannot_be_told_apart_have_a_rate_of_their_own() -> None:
    rates, now = listener.GreetingRates(), 0.0
    while rates.take((0, 7), now):
        rates.on_refused((0, 7))
    for _ in range(100):
        now += 1.0
        read = sum(rates.take((0, 7), now) for _ in range(1000))
        assert read == listener.FOREIGN_PER_SECOND
        assert rates.take((4711, 7), now)


def test_processes_whose_greetings_are_counted_have_a_bound() -> None:
    rates = listener.GreetingRates()
    for process in range(1, 3 * listener.PROCESSES_MAX):
        rates.take((process, 7), 0.0)
    assert len(rates._of) == listener.PROCESSES_MAX


def test_without_descriptors_it_rests_and_accepts_again(tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text(stack_text())
    path = str(tmp_path / "socket")
    with stack_process(stack, path) as process:
        with TestEngine(path) as engine:
            engine.store(range(4))
            used = len(os.listdir(f"/proc/{process.pid}/fd"))
            before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used, used * 4))
            assert before[1] >= used * 4
            silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            silent.connect(path)
            assert engine.load(range(4)) == ["hit"] * 4
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used * 4, used * 4))
            with TestEngine(path) as other:
                assert other.load(range(4)) == ["hit"] * 4
            silent.close()
        os.kill(process.pid, signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert "rests for 1 s: [Errno 24] Too many open files" in log


def test_it_has_as_many_descriptors_as_it_may(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text(stack_text())
    first = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))"
    with stack_process(tmp_path / "stack.yaml", str(tmp_path / "socket"), first) as process:
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (512, 512)


@pytest.mark.parametrize("options", [[], ["--keep-rows"]], ids=["alone", "under a parent"])
def test_a_stack_that_cannot_be_opened_for_lack_of_descriptors_is_opened_later(
    options: list[str], tmp_path: Path
) -> None:
    """Wherever the opening is when the last one is taken, the engine is refused and the process lives."""
    (tmp_path / "stack.yaml").write_text(stack_text(64, tmp_path / "root"))
    path = str(tmp_path / "socket")
    with stack_process(tmp_path / "stack.yaml", path, options=options):
        process = peer_pid(path)
        most = resource.prlimit(process, resource.RLIMIT_NOFILE)[1]
        used = min(open_descriptors(process) for _ in range(20))  # the process may still have `peer_pid`'s connection
        refused = 0
        for more in range(4, 60):
            resource.prlimit(process, resource.RLIMIT_NOFILE, (used + more, most))
            try:
                sock, answer = greet(path, "scheduler")
            except OSError:  # without a descriptor for the connection
                refused += 1
                continue
            sock.close()
            if isinstance(answer, Welcome):
                break
            refused += 1
            assert "could not be opened" in answer.reason or "Too many open files" in answer.reason
        assert refused >= 2
        assert peer_pid(path) == process
        resource.prlimit(process, resource.RLIMIT_NOFILE, (most, most))
        with TestEngine(path) as engine:
            assert engine.store(range(4)) == ["stored"] * 4


def test_the_lock_beside_its_socket_is_touched_while_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_file, "TOUCH_SECONDS", 0.01)
    with served(tmp_path) as found:
        lock = Path(f"{found.path}.lock")
        os.utime(lock, (0, 0))
        until(lambda: lock.stat().st_mtime > 0, "it looks used")


# -- greetings -----------------------------------------------------------------------------------------------------


def test_another_user_is_refused() -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as place, served(Path(place)) as found, TestEngine(found.path) as engine:
        engine.store(range(4))
        os.chmod(place, 0o755)
        os.chmod(found.path, 0o666)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(20)
            os.seteuid(54321)  # the other end sees the user of the time of connect
            try:
                sock.connect(found.path)
            finally:
                os.seteuid(0)
            item, pidfd = hello()
            send_greeting(sock, item, [pidfd])
            os.close(pidfd)
            answer, _ = receive_greeting(sock, GREETING)
            assert answer == Refused("user 54321 is not allowed, see `allow` of the stack file")
        assert engine.look(range(4)) == [LookupResult.HIT] * 4


def test_an_engine_that_tries_again_after_it_was_refused_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(tmp_path) as found:
        for _ in range(20):
            sock, answer = greet(found.path, "no role", "same")
            assert isinstance(answer, Refused)
            sock.close()
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(20)
                sock.connect(found.path)
                sock.send(b"garbage")
                assert sock.recv(1) == b""
    for subject in ("is not served", "did not begin"):
        assert len([line for line in caplog.messages if subject in line]) == 1


def test_one_that_is_connected_already_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as found:
        one, first = greet(found.path, "worker", "same")
        two, second = greet(found.path, "worker", "same")
        assert isinstance(first, Welcome)
        assert second == Refused("worker 0 of this engine is connected already")
        one.close()
        two.close()


@pytest.mark.parametrize(
    "bounds",
    [
        {"world_size": 4_000_000, "replicated": True},
        {"world_size": 1 << 62, "replicated": True},
        {"block_size_factor": 4097},
        {"world_size": 4096, "block_size_factor": 17},
    ],
    ids=" ".join,
)
def test_a_layout_beyond_all_bounds_is_refused_before_anything_is_made_of_it(
    bounds: dict[str, Any], tmp_path: Path
) -> None:
    layout = replace(KVLayout.of_pages(PAGE), **bounds)
    with served(tmp_path) as found:
        sock, answer = greet(found.path, "worker", "e", layout)
        sock.close()
        assert isinstance(answer, Refused)
        assert "at most 4096 and 4096 are served" in answer.reason
        with TestEngine(found.path) as engine:
            assert engine.store(range(4)) == ["stored"] * 4


@pytest.mark.parametrize(
    "message", [b"", b"garbage", b"\x92\x00\x90", b"x" * 70000], ids=["empty", "garbage", "no item", "long"]
)
def test_a_greeting_that_is_none_ends_its_connection_alone(message: bytes, tmp_path: Path) -> None:
    with served(tmp_path) as found, TestEngine(found.path) as engine:
        engine.store(range(4))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(20)
            sock.connect(found.path)
            read, written = os.pipe()
            socket.send_fds(sock, [message], [read, written])
            os.close(read)
            os.close(written)
            with suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        assert engine.look(range(4)) == [LookupResult.HIT] * 4


def test_an_engine_that_leaves_with_wrong_names_takes_all_blocks_along_and_the_others_go_on(tmp_path):
    with (
        served(tmp_path, stack_text(256, tmp_path / "root")) as service,
        TestEngine(service.path) as wrong,
        TestEngine(service.path) as other,
    ):
        assert wrong.store(range(16)) == ["stored"] * 16
        assert other.load(range(16)) == ["hit"] * 16
        assert wrong.client.say_goodbye(10.0, "its weights are others") is not None
        assert other.load(range(16), "again") == ["missing"] * 16
        assert other.store(range(16, 32)) == ["stored"] * 16
        assert other.load(range(16, 32), "own") == ["hit"] * 16


def test_after_an_engine_left_with_wrong_names_the_next_one_finds_none_and_uses_the_disk(tmp_path, caplog):
    with served(tmp_path, stack_text(256, tmp_path / "root")) as service:
        with TestEngine(service.path) as wrong:
            assert wrong.store(range(16)) == ["stored"] * 16
            assert wrong.client.say_goodbye(10.0, "its weights are others") is not None
            assert any("its weights are others" in line for line in caplog.messages)
        until(lambda: not service.engines, "it has gone")
        with TestEngine(service.path) as engine:
            assert engine.load(range(16)) == ["missing"] * 16
            assert engine.store(range(16)) == ["stored"] * 16
            lowers = service.server.pool._opened().plane.control.lowers
            until(lambda: service.run(lambda: len(lowers[0].owned.directory)) == 16, "the disk has them")


def test_an_engine_that_leaves_twice_with_wrong_names_is_disconnected_and_resets_once(tmp_path):
    with served(tmp_path) as service, TestEngine(service.path) as wrong, TestEngine(service.path) as other:
        resets = service.server.pool.plane.control.resets
        wrong.client.core.out += [wire.Leave(1, "others"), wire.Leave(2, "others")]
        wrong.step_until(lambda: not wrong.client.core.connected, "it is disconnected")
        assert service.run(lambda: service.server.pool.plane.control.resets) <= resets + 1
        assert other.store(range(8)) == ["stored"] * 8


def test_a_tag_of_an_engine_that_is_not_the_stack_files_is_refused(tmp_path: Path) -> None:
    """Engines of two tags never share a block; a service whose stack file names a tag has that one alone."""
    cache = torch.zeros((4, PAGE), dtype=torch.uint8)
    with served(tmp_path, stack_text(64, namespace="site")) as found, TestEngine(found.path) as engine:
        assert engine.store(range(4)) == ["stored"] * 4
        same = Identity(found.path, replace(NAMESPACE, tag="site"), "same", "1" * 32)
        with EngineClient(same, [cache]) as client:
            request = client.request("r")
            client.reserve(request, block_keys(4))
            until(lambda: (client.step(), request.served)[1], "it is served")
            assert len(request.leased) == 4
        other = Identity(found.path, replace(NAMESPACE, tag="red"), "other", "2" * 32)
        with pytest.raises(ConfigError, match="its tag 'red' is not that of the service's stack file"):
            EngineClient(other, [cache])


def test_a_worker_whose_last_word_is_read_after_its_engines_end_is_watched_no_more(tmp_path: Path) -> None:
    """Both are readable at once where the server was busy; this process lives on, and its rows are to come back."""
    with served(tmp_path) as found:
        engine = TestEngine(found.path)
        assert engine.store(range(4)) == ["stored"] * 4
        busy = threading.Event()
        found.thread.call_soon(busy.wait, 20.0)
        peers = found.server._engines.values()
        closing = threading.Thread(target=engine.client.close)
        closing.start()
        closing.join(20.0)
        (closed,) = peers
        order = sorted(closed.peers, key=lambda peer: peer.worker is not None)
        found.thread.call_soon(lambda: [found.server._on_readable(peer) for peer in order])
        busy.set()
        until(lambda: found.engines == 0, "it is gone")
        assert found.rests()
