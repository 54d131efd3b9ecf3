"""A private stack process: where it lies, who starts it, who finds it, how it ends."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from support_counts import full_alone
from support_private import private_socket
from support_served import served
from support_service import TestEngine, peer_pid, stack_text, until

from faults.machine import warm
from kvtier.client import private
from kvtier.client.private import HOUR_SECONDS, PrivateStack, Restarts, runtime_folder
from kvtier.errors import ConfigError, ResourceError
from kvtier.service import server
from kvtier.service.channel import is_listening
from kvtier.tier.contract import LookupResult

LINGER_SECONDS = 1.0
SUPPORT = str(Path(__file__).parents[1] / "support")


def start(folder: str, stack: str | None = None, restarts: Restarts | None = None) -> str:
    return private_socket(stack or stack_text(), folder, restarts, LINGER_SECONDS)


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text()


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A program that starts a private process: an engine of its own."""
    head = f"import sys; sys.path.insert(0, {SUPPORT!r})\n"
    return warm.run([sys.executable, "-c", head + code, *words], capture_output=True, text=True, timeout=120)


# -- life ----------------------------------------------------------------------------------------------------------


def test_a_private_process_that_hangs_before_its_first_word_is_given_up(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = tmp_path / "python"
    hung.write_text("#!/bin/sh\nexec sleep 60\n")
    hung.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hung))
    monkeypatch.setattr(private, "START_SECONDS", 0.5)
    with pytest.raises(ConfigError, match="does not begin within"):
        PrivateStack(stack_text(), folder).start()


def test_the_others_find_what_the_first_has_started_and_it_ends_after_the_last(folder: str) -> None:
    path = start(folder)
    with TestEngine(path) as one:
        assert one.store(range(8)) == ["stored"] * 8
        pid = peer_pid(path)
        assert start(folder) == path
        assert peer_pid(path) == pid
        with TestEngine(path) as two:
            assert two.load(range(8)) == ["hit"] * 8
    until(lambda: has_ended(pid), "it ends")
    assert sorted(os.listdir(Path(path).parent)) == [f"{Path(path).name}.start"]
    assert start(folder) == path
    assert peer_pid(path) != pid


def test_a_scheduler_may_leave_after_its_worker(folder: str) -> None:
    """As in vLLM, which ends its workers first. The process goes on for others, and ends with the last one."""
    path = start(folder)
    pid = peer_pid(path)
    with TestEngine(path) as one, TestEngine(path) as two:
        for engine, ends in ((one, False), (two, True)):
            assert engine.store(range(8)) == ["stored"] * 8 if engine is one else engine.load(range(8)) == ["hit"] * 8
            engine.client._worker.close()
            engine.step_until(lambda client=engine.client: not client.core.connected, "all is a miss")
            assert engine.look(range(8)) == [LookupResult.MISS] * 8
            left = engine.client.say_goodbye(10.0)
            assert left is not None
            assert (left.ends, left.dropped, left.unfinished) == (ends, 0, 0)
            engine.client.close()
        until(lambda: has_ended(pid), "it ends")


def test_a_scheduler_that_does_not_leave_after_its_worker_is_connected_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GOODBYE_SECONDS", 0.3)
    with served(tmp_path) as service, TestEngine(service.path) as one, TestEngine(service.path) as two:
        assert one.store(range(8)) == ["stored"] * 8
        one.client._worker.close()
        one.step_until(lambda: not one.client.core.connected, "all is a miss")
        one.step_until(lambda: one.client.core.connected, "it is connected again")
        assert two.load(range(8)) == ["hit"] * 8


def test_it_needs_the_pipe_alone(folder: str) -> None:
    """Neither the stack file nor the socket is in its arguments or its environment."""
    path = start(folder, stack_text(namespace="secret"))
    about = Path("/proc") / str(peer_pid(path))
    assert b"secret" not in (about / "cmdline").read_bytes() + (about / "environ").read_bytes()
    assert Path(path).stat().st_mode & 0o777 == 0o600


def test_many_that_start_at_once_start_one(folder: str) -> None:
    paths: list[str] = []
    threads = [threading.Thread(target=lambda: paths.append(start(folder))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(paths) == 6
    assert len(set(paths)) == 1
    listening = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and folder in b"".join(map(os.fsencode, links(entry))).decode()
    ]
    assert listening == [str(peer_pid(paths[0]))]


def links(process: Path) -> list[str]:
    """The open files of a process."""
    found = []
    with suppress(OSError):
        for fd in (process / "fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(fd))
    return found if str(os.getpid()) != process.name else []


def test_one_that_was_killed_is_in_nobodys_way(folder: str) -> None:
    restarts = Restarts()
    path = start(folder)
    with TestEngine(path) as engine:
        engine.store(range(4))
        pid = peer_pid(path)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_listening(path), "it is gone")
        assert Path(path).exists()
        assert start(folder, restarts=restarts) == path
        assert restarts.count == 1
    with TestEngine(path) as engine:
        assert engine.store(range(4)) == ["stored"] * 4


def test_it_outlives_who_started_it_and_inherits_its_niceness_and_its_errors(folder: str) -> None:
    code = (
        "import logging, os; from support_private import private_socket\n"
        "logging.basicConfig(level=logging.INFO); os.nice(3)\n"
        "print(private_socket(sys.argv[1], sys.argv[2], linger_seconds=60.0))"
    )
    with open(Path(folder) / "errors", "w+") as errors:
        command = [sys.executable, "-c", f"import sys\n{code}", stack_text(), folder]
        done = warm.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=120, check=True)
        path = done.stdout.strip()
        errors.seek(0)
        assert f"INFO the stack is served at {path}" in errors.read()
    assert os.getpriority(os.PRIO_PROCESS, peer_pid(path)) == os.getpriority(os.PRIO_PROCESS, 0) + 3
    with TestEngine(path) as engine:
        assert engine.store(range(4)) == ["stored"] * 4


def test_two_launches_on_one_root_are_refused_with_the_way_out(folder: str, tmp_path: Path) -> None:
    one, two = (stack_text(rows, tmp_path / "root") for rows in (1024, 2048))
    with TestEngine(start(folder, one)) as engine:
        assert engine.store(range(4)) == ["stored"] * 4
        with pytest.raises(ConfigError, match=r"in use by process .*`kvtier serve`"):
            TestEngine(start(folder, two))
    # the first writes back and ends; its successor at the same path waits for that
    path = start(folder, one)
    with TestEngine(path) as engine:
        assert engine.load(range(4)) == ["hit"] * 4


# -- what keeps it from starting -----------------------------------------------------------------------------------


def test_one_that_ends_before_it_answers_is_started_again(folder: str) -> None:
    """As one that was killed, and closes its socket later than who starts the next one looks."""
    private = PrivateStack(stack_text(), folder)
    ending = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ending.bind(private.path)
    ending.listen()

    def end() -> None:
        connected, _ = ending.accept()
        Path(private.path).unlink()
        ending.close()
        connected.close()

    thread = threading.Thread(target=end)
    thread.start()
    with TestEngine(private) as engine:
        assert engine.store(range(4)) == ["stored"] * 4
    thread.join()


def test_a_stack_file_that_is_wrong_is_the_one_error(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be started: tiers\[0\].cpu_bytes_to_use: is required"):
        start(folder, "tiers: [{type: cpu}]\n")


def test_a_tier_that_cannot_open_is_the_one_error(folder: str, tmp_path: Path) -> None:
    stack = stack_text(root=tmp_path / "root")
    (tmp_path / "root").chmod(0o777)
    with pytest.raises(ConfigError, match="root"):
        TestEngine(start(folder, stack))


def test_a_path_that_is_too_long_is_the_one_error(tmp_path: Path) -> None:
    base = tmp_path / ("n" * 90)
    base.mkdir()
    with pytest.raises(ConfigError, match=r"runtime_dir: the socket .* has a longer path than 107 bytes"):
        start(str(base))


def test_no_interpreter_is_the_one_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ConfigError, match="stack: the stack process cannot be started: No such file"):
        start(folder)


@pytest.mark.parametrize(
    "call",
    ["socket", *(pytest.param(call, marks=full_alone()) for call in ("execve", "fork", "memfd_create", "flock"))],
)
def test_calls_that_seccomp_refuses_are_the_one_error(call: str, folder: str) -> None:
    code = (
        "import pyseccomp, ctypes, errno\n"
        "from support_service import TestEngine\n"
        "from support_private import private_socket\n"
        "from kvtier.errors import ConfigError\n"
        "filters = pyseccomp.SyscallFilter(pyseccomp.ALLOW)\n"
        "for name in sys.argv[3:]:\n"
        "    filters.add_rule(pyseccomp.ERRNO(errno.EPERM), name)\n"
        "filters.load()\n"
        "try:\n"
        "    TestEngine(private_socket(sys.argv[1], sys.argv[2], linger_seconds=1.0))\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    calls = ["fork", "vfork", "clone", "clone3"] if call == "fork" else [call]
    done = python(code, stack_text(), folder, *calls)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, done.stdout


def test_descriptors_above_those_of_select(folder: str) -> None:
    """An engine has many files open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = (
        "import fcntl, os, resource\n"
        "from support_service import TestEngine\n"
        "from support_private import private_socket\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({hard}, {hard}))\n"
        "null = os.open('/dev/null', os.O_RDONLY)\n"
        "held = [os.dup(null) for _ in range(1030)]\n"
        "with TestEngine(private_socket(sys.argv[1], sys.argv[2], linger_seconds=1.0)) as engine:\n"
        "    print(engine.store(range(4)))\n"
    )
    done = python(code, stack_text(), folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['stored', 'stored', 'stored', 'stored']\n"


def test_a_system_without_a_process_to_give_costs_no_restart(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    restarts = Restarts()
    with monkeypatch.context() as patch:
        patch.setattr(private.subprocess, "Popen", refuse)
        for _ in range(8):
            with pytest.raises(ConfigError, match="Resource temporarily unavailable"):
                start(folder, restarts=restarts)
    assert not restarts.next_seconds
    start(folder, restarts=restarts)
    assert restarts.count == 1


def test_no_process_for_the_grandchild_is_the_one_error() -> None:
    """A user with one process too few: root has no such limit, so the program becomes another user."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    user = 54321
    code = (
        "import os, resource\n"
        "from support_private import private_socket\n"
        "from kvtier.errors import ConfigError\n"
        f"os.setgid({user}); os.setuid({user})\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))\n"
        "try:\n"
        "    private_socket(sys.argv[1], sys.argv[2])\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    with tempfile.TemporaryDirectory() as place:  # which the other user can reach
        os.chown(place, user, user)
        done = python(code, stack_text(), place)
    assert done.returncode == 0, done.stderr
    assert "cannot be" in done.stdout, (done.stdout, done.stderr)


# -- the folder ----------------------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The usual places, in folders of the test."""
    found = {name: tmp_path / name for name in ("xdg", "run", "tmp", "shm")}
    for path in found.values():
        path.mkdir()
    monkeypatch.setattr(private, "USUAL_PLACES", tuple(str(found[name]) for name in ("run", "tmp", "shm")))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(found["xdg"]))
    return SimpleNamespace(**found)


def test_the_places_are_tried_in_order(places: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"kvtier-{os.geteuid()}"
    assert runtime_folder(str(places.shm)) == places.shm / own
    assert runtime_folder() == places.xdg / own
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places.xdg / "absent"))
    assert runtime_folder() == places.run / own
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    (places.run / own).rmdir()
    places.run.rmdir()
    assert runtime_folder() == places.tmp / own
    assert (places.tmp / own).stat().st_mode & 0o777 == 0o700
    (places.tmp / own).rmdir()
    places.tmp.rmdir()
    assert runtime_folder() == places.shm / own
    (places.shm / own).rmdir()
    places.shm.rmdir()
    with pytest.raises(ConfigError, match=r"runtime_dir: there is no place .*run: No such file .*shm: No such file"):
        runtime_folder()


@pytest.mark.parametrize("wrong", ["mode", "link", "file", "owner"])
def test_a_folder_that_is_not_ours_alone_is_refused(wrong: str, places: SimpleNamespace) -> None:
    own = places.xdg / f"kvtier-{os.geteuid()}"
    if wrong == "link":
        own.symlink_to(places.run)
    elif wrong == "file":
        own.touch(0o700)
    else:
        own.mkdir(0o700)
        own.chmod(0o750 if wrong == "mode" else 0o700)
    if wrong == "owner":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(own, 54321, 54321)
    with pytest.raises(ConfigError, match="is no folder of this user of mode 0700"):
        runtime_folder()


def test_a_read_only_root_with_one_writable_volume(folder: str) -> None:
    """In a mount namespace of its own in which all but one folder is read-only."""
    volume = Path(folder)
    code = (
        "import os; from support_service import TestEngine\n"
        "from support_private import private_socket\n"
        "from kvtier.errors import ConfigError\n"
        "try:\n"
        "    open('/tmp/kvtier-writable', 'w')\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
        "path = private_socket(sys.argv[1], sys.argv[2], linger_seconds=0.5)\n"
        "with TestEngine(path) as engine:\n"
        "    print(engine.store(range(4)) == ['stored'] * 4, path.startswith(sys.argv[2]))\n"
    )
    script = (
        'set -e; mount --make-rprivate /; mount --bind "$2" "$2"\n'
        "for place in / /run /tmp /dev/shm; do\n"
        "  mountpoint -q $place && mount -o remount,bind,ro $place || true\n"
        'done; shift 2; exec "$@"'
    )
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c", script, "sh"]
    probe = subprocess.run([*unshare, "x", str(volume), "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mount namespace can be had: {probe.stderr.strip()}")
    head = f"import sys; sys.path.insert(0, {SUPPORT!r})\n"
    command = [*unshare, "x", str(volume), sys.executable, "-c", head + code, stack_text(), str(volume)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd="/")
    assert done.stdout.splitlines() == ["Read-only file system", "True True"], done.stderr


# -- restarts ------------------------------------------------------------------------------------------------------


def test_restarts_are_three_in_an_hour_and_then_hourly() -> None:
    now = [0.0]
    restarts = Restarts(lambda: now[0])

    def due(seconds: float) -> bool:
        """A process that ends after so many seconds; True if it is started again."""
        now[0] += seconds
        restarts.on_end()
        if restarts.next_seconds:
            return False
        restarts.on_start()
        return True

    assert [due(60.0) for _ in range(5)] == [True, True, True, False, False]
    assert restarts.next_seconds == HOUR_SECONDS - 120
    assert [due(1160.0) for _ in range(6)] == [False, False, True, False, False, False]
    now[0] += 119.0
    assert not due(0.0)
    assert due(1.0)
    assert restarts.count == 5
    assert due(HOUR_SECONDS)  # it served for an hour
    assert [due(1.0) for _ in range(3)] == [True, True, False]
    assert restarts.count == 8


def test_three_restarts_an_hour_apart_are_not_too_many() -> None:
    now = [0.0]
    restarts = Restarts(lambda: now[0])
    for _ in range(10):
        now[0] += HOUR_SECONDS / 2
        restarts.on_end()
        assert not restarts.next_seconds
        restarts.on_start()


def test_a_process_that_must_not_be_started_yet_is_found_all_the_same(folder: str) -> None:
    restarts = Restarts()
    for _ in range(3):
        restarts.on_start()
        restarts.on_end()
    with pytest.raises(ResourceError, match="is started again in 3600 s"):
        start(folder, restarts=restarts)
    path = start(folder)
    assert start(folder, restarts=restarts) == path
    assert restarts.count == 3
