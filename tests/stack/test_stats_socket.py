"""The stats socket: who may read it, what it says, what it replaces and never does, and that no client holds it up."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support_driver import ServedStack
from support_stack import PLAIN, Engine, fs, keys, parts_of, stack_file, store, until, whole

from faults.machine import warm
from kvtier.errors import ResourceError
from kvtier.stack import StackParts, StackStats, TierStack, TierStats
from kvtier.stack.watching import socket_file as files
from kvtier.stack.watching import stats_socket as module
from kvtier.stack.watching.socket_file import SocketFile
from kvtier.stack.watching.stats_socket import StatsSocket, stats_from_json

OTHER_PROCESS = """
import os, sys
from kvtier.stack.watching.socket_file import SocketFile
claimed = SocketFile.claim(sys.argv[1])
os.chmod(sys.argv[1], 0o660)
kept = os.dup(0)
child = os.fork()
if child == 0:
    try:
        os.fstat(claimed.fd)
    except OSError:
        print("closed in the child", flush=True)
    os.read(kept, 1)
    os._exit(0)
os.read(kept, 1)
"""


@pytest.fixture
def path(short_folder: str) -> str:
    """Of a socket."""
    return f"{short_folder}/s"


def parts(path: str, engine: Engine, *lowers: dict[str, object]) -> StackParts:
    return parts_of(stack_file(PLAIN, 16, *lowers, stats_socket=path), engine)


def read(path: str) -> bytes:
    """What the socket says, read by a client that waits."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        with client.makefile("rb") as file:
            return file.read()


async def read_beside(path: str) -> dict[str, object]:
    """The document, while the loop of the test serves it."""
    reader, writer = await asyncio.open_unix_connection(path)
    document = json.loads(await reader.read())
    writer.close()
    assert isinstance(document, dict)
    return document


def figures(**tier: object) -> StackStats:
    return StackStats({"disk": TierStats(**tier)}, backlog=7)  # type: ignore[arg-type]


async def opened(path: str, stats: Callable[[], StackStats | None], **more: object) -> StatsSocket:
    served = StatsSocket(path, stats, **more)  # type: ignore[arg-type]
    await served.open()
    return served


# -- what it says ------------------------------------------------------------------------------------------------------


async def test_the_document_holds_the_figures_of_the_stack(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRESH_SECONDS", 0.0)
    engine = Engine(PLAIN, 8)
    async with TierStack(parts(path, engine, fs(tmp_path / "root"))) as stack:
        await store(stack, engine, whole(keys(8)))
        assert await stack.drain(60)
        document = await read_beside(path)
        assert stats_from_json(document) == stack.stats()
    assert (document["kvtier_stats"], document["process"]) == (1, os.getpid())
    assert document["written_today_bytes"] == {"cpu": 0, "fs": stack.stats().tiers["fs"].written_bytes}
    assert document["written_today_bytes"]["fs"] > 8 * 4096, "with headers"


def test_the_loop_answers_while_the_engine_does_nothing(path: str) -> None:
    with ServedStack(parts(path, Engine(PLAIN, 8))) as stack:
        document = json.loads(read(path))  # this is the engine's thread
        assert stats_from_json(document).tiers.keys() == stack.stats().tiers.keys() == {"cpu"}
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(f"{path}.lock").st_mode) == 0o600
    assert os.listdir(os.path.dirname(path)) == []


def test_what_a_version_does_not_know_is_left_out_and_what_it_lacks_is_zero() -> None:
    document = {"stats": {"tiers": {"cpu": {"hits": 3, "of_tomorrow": 4}}, "backlog": 2, "of_tomorrow": 5}}
    found = stats_from_json(document)
    assert (found.backlog, found.tiers["cpu"].hits, found.tiers["cpu"].stored) == (2, 3, 0)


async def test_bytes_of_today_begin_again_at_midnight(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRESH_SECONDS", 0.0)
    times = iter([3 * 86400 - 0.001, 3 * 86400])
    served = await opened(path, lambda: figures(written_bytes=1000), time_of_day=lambda: next(times))
    document = await read_beside(path)
    while document["written_today_bytes"] != {"disk": 0}:
        assert document["written_today_bytes"] == {"disk": 1000}
        document = await read_beside(path)
    await served.close()


async def test_figures_are_collected_seldom_however_many_ask(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRESH_SECONDS", 3600.0)
    collected: list[StackStats] = []

    def stats() -> StackStats:
        collected.append(figures())
        return collected[-1]

    served = await opened(path, stats)
    documents = [await read_beside(path) for _ in range(3)]
    await served.close()
    assert len(collected) == 1
    assert documents == [documents[0]] * 3


# -- clients -----------------------------------------------------------------------------------------------------------


def test_clients_that_do_not_read_hold_up_nothing(path: str) -> None:
    with ServedStack(parts(path, Engine(PLAIN, 8))):
        silent = [socket.socket(socket.AF_UNIX) for _ in range(3 * files.WAITING_MAX)]
        try:
            for client in silent:
                client.connect(path)
            assert b"kvtier_stats" in read(path)
        finally:
            for client in silent:
                client.close()


async def test_a_document_that_the_client_has_no_room_for_is_not_waited_with(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    dropped = {f"reason-{number:06}": number for number in range(200_000)}
    served = await opened(path, lambda: figures(dropped=dropped))
    _, writer = await asyncio.open_unix_connection(path, limit=1)
    await until(lambda: "half a document" in caplog.text)
    writer.close()
    await served.close()


async def test_a_client_that_is_gone_before_it_is_answered_is_nothing(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        served = await opened(path, figures)
        gone.connect(path)
    assert (await read_beside(path))["kvtier_stats"] == 1
    await served.close()


async def test_without_descriptors_it_rests_and_goes_on(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "REST_SECONDS", 0.0)
    refusals, accept = [OSError(errno.EMFILE, "no descriptor")], SocketFile.accept

    def refuse_first(file: SocketFile) -> socket.socket:
        if refusals:
            raise refusals.pop()
        return accept(file)

    monkeypatch.setattr(SocketFile, "accept", refuse_first)
    served = await opened(path, figures)
    assert (await read_beside(path))["kvtier_stats"] == 1
    assert "no descriptor" in caplog.text
    await served.close()


async def test_a_stack_that_is_gone_answers_nothing(path: str) -> None:
    served = await opened(path, lambda: None)
    reader, writer = await asyncio.open_unix_connection(path)
    assert await reader.read() == b""
    writer.close()
    await served.close()


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_socket_of_a_killed_process_is_replaced_although_a_child_of_it_lives(path: str) -> None:
    command = [sys.executable, "-c", OTHER_PROCESS, path]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"closed in the child\n"
        with pytest.raises(ResourceError, match="is the socket of another stack that runs"):
            SocketFile.claim(path)
        other.send_signal(signal.SIGKILL)
        other.wait()
        claimed = SocketFile.claim(path)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        claimed.release()
    assert os.listdir(os.path.dirname(path)) == []


def _file(path: str) -> None:
    Path(path).write_text("precious")


def _link(path: str) -> None:
    os.symlink("/nonexistent", path)


def _socket_of_others(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)


@pytest.mark.parametrize("make", [_file, os.mkdir, _link, os.mkfifo, _socket_of_others])
@pytest.mark.parametrize("lock", [None, b"", b"other", b"socket 1 2 3\n", bytes(500)])
def test_nothing_but_a_socket_that_a_stack_left_is_removed(
    path: str, make: Callable[[str], None], lock: bytes | None
) -> None:
    make(path)
    if lock is not None:
        Path(f"{path}.lock").write_bytes(lock)
    before = os.lstat(path)
    with pytest.raises(ResourceError, match="no socket that a stack left"):
        SocketFile.claim(path)
    assert os.path.samestat(os.lstat(path), before)
    assert os.path.exists(f"{path}.lock") == bool(lock)


def test_what_took_the_place_of_the_socket_stays_at_the_end(path: str) -> None:
    claimed = SocketFile.claim(path)
    os.unlink(path)
    _file(path)
    claimed.release()
    assert Path(path).read_text() == "precious"


async def test_the_lock_is_touched_while_it_is_served(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that clean up /tmp remove files that were not used for days, and no socket of a process that runs."""
    monkeypatch.setattr(files, "TOUCH_SECONDS", 0.01)
    lock = f"{path}.lock"
    served = await opened(path, figures)
    for _ in range(2):
        os.utime(lock, (0, 0))
        await until(lambda: min(os.stat(lock).st_atime, os.stat(lock).st_mtime) > 0)
    await served.close()
    assert os.listdir(os.path.dirname(path)) == []


def test_a_lock_that_its_last_owner_removes_meanwhile_is_not_taken_for_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, removed = files.fcntl.flock, []

    def remove_first(fd: int, operation: int) -> None:
        if not removed:
            removed.append(fd)
            os.unlink(f"{path}.lock")
        flock(fd, operation)

    monkeypatch.setattr(files.fcntl, "flock", remove_first)
    claimed = SocketFile.claim(path)
    assert os.path.samestat(os.fstat(claimed.lock), os.stat(f"{path}.lock"))
    claimed.release()


def test_a_lock_that_is_a_link_or_a_fifo_is_refused(path: str) -> None:
    os.symlink(f"{path}.target", f"{path}.lock")
    with pytest.raises(ResourceError, match="symbolic links"):
        SocketFile.claim(path)
    os.unlink(f"{path}.lock")
    os.mkfifo(f"{path}.lock")
    with pytest.raises(ResourceError, match="is not a file of this user"):
        SocketFile.claim(path)
    assert not os.path.exists(path)


# -- a stack goes on without it ----------------------------------------------------------------------------------------


async def test_the_second_of_two_stacks_says_one_line_and_goes_on_without(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(PLAIN, 8)
    async with TierStack(parts(path, engine)) as first:
        async with TierStack(parts(path, engine)) as second:
            await store(second, engine, whole(keys(4)))
        assert stats_from_json(await read_beside(path)) == first.stats()
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert found == [f"no stats socket: {path} is the socket of another stack that runs"]


@pytest.mark.parametrize(
    ("tail", "reason"), [("/absent/s", "No such file or directory"), ("/" + "x" * 90, "AF_UNIX path too long")]
)
def test_a_path_that_cannot_be_had_is_one_line(
    path: str, tail: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(PLAIN, 8)
    wanted = replace(parts_of(stack_file(PLAIN, 16), engine), stats_socket=os.path.dirname(path) + tail)
    with ServedStack(wanted) as stack:
        assert stack.stats().backlog == 0
    assert [record.getMessage() for record in caplog.records] == [f"no stats socket: {wanted.stats_socket}: {reason}"]
    assert os.listdir(os.path.dirname(path)) == []


async def test_a_file_system_that_does_not_answer_is_not_waited_for(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FILES_SECONDS", 0.5)
    answers, claim, claimed = threading.Event(), SocketFile.claim, threading.Event()

    def claim_late(where: str) -> SocketFile:
        assert answers.wait(60)
        found = claim(where)
        claimed.set()
        return found

    monkeypatch.setattr(SocketFile, "claim", claim_late)
    served = await opened(path, figures)
    assert "did not answer in 0.5 s" in caplog.text
    answers.set()
    await until(claimed.is_set)
    await until(lambda: not os.listdir(os.path.dirname(path)))
    await served.close()


async def test_without_a_path_there_is_no_socket(tmp_path: Path) -> None:
    async with TierStack(parts_of(stack_file(PLAIN, 16), Engine(PLAIN, 8))) as stack:
        assert stack._assembled is not None
        assert stack._assembled.stats_socket is None
