"""Engines at a stack process: who is served, and when the rows of one that has gone come back."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from faults.machine import warm
from kvtier.aio.loop_thread import LoopThread
from kvtier.config import parse_stack, stack_parts
from kvtier.service import wire
from kvtier.service.channel import Channel, receive_greeting, send_greeting
from kvtier.service.server import StackServer
from kvtier.service.wire import GREETING, TO_ENGINE, TO_WORKER, Hello, Refused, Welcome
from kvtier.types.geometry import KVLayout
from kvtier.types.namespace import Namespace

PAGE = 4096
LAYOUT = KVLayout.of_pages(PAGE, world_size=2)


class Served:
    """A server in a thread of its own, and what its pool holds."""

    def __init__(self, path: str, server: StackServer, thread: LoopThread) -> None:
        self.path = path
        self.server = server
        self._thread = thread

    def look(self, what: Any) -> Any:
        """The value of a call in the server's thread."""

        async def call() -> Any:
            return what(self.server)

        return self._thread.run(call, 10.0)

    def wait(self, what: Any) -> None:
        """Until a call in the server's thread is true."""
        until = time.monotonic() + 20.0
        while not self.look(what):
            assert time.monotonic() < until, "it did not come true"
            time.sleep(0.01)

    def lent(self) -> int:
        """Rows that are lent to all engines."""
        return int(self.look(lambda server: server.pool.quotas.lent))


@contextmanager
def serving(folder: Path, below: str = "") -> Iterator[Served]:
    config = parse_stack(f"tiers:\n  - {{type: cpu, cpu_bytes_to_use: {64 * 2 * PAGE}}}\n{below}")
    thread = LoopThread("test-server", "service")
    thread.open()
    path = str(folder / "socket")
    server = StackServer(lambda namespace: stack_parts(config, namespace), path)
    thread.run(server.__aenter__, 30.0)
    try:
        yield Served(path, server, thread)
    finally:
        thread.run(server.__aexit__, 30.0)
        thread.close(10.0)


def greet(path: str, role: str, participant: int = 0, pidfd: int | None = None, **more: Any) -> Any:
    """A channel, or the reason of a refusal."""
    given = {"token": "one", "manifest": Namespace(more.pop("layout", LAYOUT), model=more.pop("model", "m"))} | more
    manifest = given.pop("manifest").manifest().encode()
    hello = Hello([1], "", role, participant, "", given.pop("token"), manifest, **given)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10.0)
    sock.connect(path)
    own = os.pidfd_open(os.getpid())
    try:
        send_greeting(sock, hello, [own if pidfd is None else pidfd])
    finally:
        os.close(own)
    answer, descriptors = receive_greeting(sock, GREETING)
    for fd in descriptors:
        os.close(fd)
    if isinstance(answer, Refused):
        sock.close()
        return answer.reason
    assert isinstance(answer, Welcome)
    return Channel(sock, TO_ENGINE if role == "scheduler" else TO_WORKER, 1 << 20)


def receive(channel: Channel, kind: type[Any]) -> Any:
    """The next item of a kind; what came before it is passed over."""
    until = time.monotonic() + 20.0
    while time.monotonic() < until:
        for item in channel.receive():
            if isinstance(item, kind):
                return item
        assert not channel.closed, channel.fault
        select.select([channel], [], [], 0.05)
    raise AssertionError(f"no {kind.__name__} came")


def engine(path: str, **more: Any) -> tuple[Channel, list[Channel]]:
    """(the scheduler's channel, those of the workers) of an engine that has joined and was lent rows."""
    workers = [greet(path, "worker", number, **more) for number in range(2)]
    scheduler = greet(path, "scheduler", **more)
    scheduler.send([wire.Want(8)])
    return scheduler, workers


def test_a_process_of_the_same_place_or_of_another_layout_is_refused(tmp_path):
    with serving(tmp_path) as served:
        scheduler, workers = engine(served.path)
        receive(scheduler, wire.Lent)
        assert "connected already" in greet(served.path, "worker", 1)
        assert "connected already" in greet(served.path, "scheduler")
        assert "no worker 2" in greet(served.path, "worker", 2)
        assert "scheduler or a worker" in greet(served.path, "reader", token="two")
        assert "layout" in greet(served.path, "worker", token="two", layout=KVLayout.of_pages(PAGE))
        with open(os.devnull) as file:
            assert "no pidfd" in greet(served.path, "worker", token="two", pidfd=file.fileno())
        other = os.pidfd_open(os.getppid())
        try:
            assert "another process" in greet(served.path, "worker", token="two", pidfd=other)
        finally:
            os.close(other)
        assert served.look(lambda server: len(server.pool.sessions)) == 1
        for channel in (scheduler, *workers):
            channel.close()


@pytest.mark.parametrize("who", ["scheduler", "worker"])
def test_rows_of_a_broken_connection_come_back_when_all_workers_are_ready(who, tmp_path):
    with serving(tmp_path) as served:
        scheduler, workers = engine(served.path)
        receive(scheduler, wire.Lent)
        assert served.lent() == 8
        (scheduler if who == "scheduler" else workers[1]).close()
        served.wait(lambda server: all(session.lost for session in server.pool.sessions.values()))
        assert served.lent() == 8
        with pytest.raises(AssertionError, match="closed the connection"):
            receive(workers[0] if who == "scheduler" else scheduler, wire.Closing)
        again = [greet(served.path, "worker", 0, resumes=True), greet(served.path, "scheduler", resumes=True)]
        again.append(greet(served.path, "worker", 1, resumes=True))
        for worker in (again[0], again[2]):
            receive(worker, wire.Drained)
        again[0].send([wire.Ready()])
        served.wait(lambda server: server.pool.sessions[2]._resuming == {1})
        assert served.lent() == 8, "a worker may still copy"
        again[2].send([wire.Ready()])
        assert receive(again[1], wire.Notes).last
        served.wait(lambda server: server.pool.quotas.lent == 0)
        again[1].send([wire.Want(4)])
        receive(again[1], wire.Lent)
        assert served.lent() == 4
        for channel in (scheduler, *workers, *again):
            channel.close()


def test_rows_come_back_when_the_last_process_of_an_engine_is_killed(tmp_path):
    script = """if True:
        import sys, time
        sys.path.insert(0, sys.argv[2])
        from test_connected_engines import engine, receive, wire
        from kvtier.types.keys import make_key
        channels = engine(sys.argv[1], token="killed")
        places = receive(channels[0], wire.Lent).places
        one = wire.Places(places.rows[:4], places.generations[:8])
        channels[0].send([wire.Fill(1, wire.Keys.of([make_key(b"key", 0)]), one)])
        print("lent", flush=True)
        time.sleep(60)
    """
    with serving(tmp_path) as served:
        scheduler, workers = engine(served.path)
        receive(scheduler, wire.Lent)
        arguments = [sys.executable, "-c", script, served.path, str(Path(__file__).parent)]
        with warm.Popen(arguments, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"lent\n"
            served.wait(lambda server: any(each.copying.in_flight for each in server.pool.sessions.values()))
            assert served.look(lambda server: server.pool.quotas.engines) == 2
            child.kill()
        served.wait(lambda server: len(server.pool.sessions) == 1)
        assert served.lent() == 8
        served.look(lambda server: server.pool.check_integrity())
        for channel in (scheduler, *workers):
            channel.close()


def test_notes_are_sent_and_the_joined_namespace_opens_the_lower_tiers(tmp_path):
    (tmp_path / "root").mkdir(mode=0o700)
    below = f"  - {{type: fs, roots: [{tmp_path / 'root'}], capacity: 4MiB, min_free_bytes: 0}}\n"
    with serving(tmp_path, below) as served:
        workers = [greet(served.path, "worker", each, note=f"note {each}", complete=False) for each in range(2)]
        scheduler = greet(served.path, "scheduler", complete=False)
        notes = receive(scheduler, wire.Notes)
        assert (notes.notes, notes.last) == (["note 0", "note 1"], True)
        assert list((tmp_path / "root").iterdir()) == []
        scheduler.send([wire.Join(Namespace(LAYOUT, model="m", weights="sha256:1").manifest().encode())])
        assert receive(scheduler, wire.Joined).fault == ""
        assert list((tmp_path / "root").iterdir())
        for channel in (scheduler, *workers):
            channel.close()


def test_a_root_that_cannot_be_opened_is_what_an_engine_is_told(tmp_path):
    (tmp_path / "absent").touch()  # no folder
    below = f"  - {{type: fs, roots: [{tmp_path / 'absent'}], capacity: 4MiB, min_free_bytes: 0}}\n"
    with serving(tmp_path, below) as served:
        scheduler, workers = engine(served.path)
        assert "absent" in receive(scheduler, wire.Joined).fault
        assert "absent" in greet(served.path, "worker", token="two")
        for channel in (scheduler, *workers):
            channel.close()


def test_questions_about_weights_go_to_the_workers_and_their_answers_back(tmp_path):
    with serving(tmp_path) as served:
        scheduler, workers = engine(served.path)
        receive(scheduler, wire.Lent)
        scheduler.send([wire.AskWeights(7)])
        for worker in workers:
            assert receive(worker, wire.Question).number == 7
            worker.send([wire.Answer(7, wire.UNCHANGED)])
        assert receive(scheduler, wire.Weights) == wire.Weights(7, wire.UNCHANGED)
        for channel in (scheduler, *workers):
            with suppress(OSError):
                channel.close()
