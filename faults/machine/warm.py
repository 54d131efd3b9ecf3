"""Processes forked from one warm interpreter, so that what a program imports is loaded once and not in each process.

`Popen` and `run` take commands of `subprocess` that start this Python with `-c`, `-m` or a script. Such a process is a
child of its caller, has the caller's environment, folder and descriptors, and ends with its threads joined and its exit
handlers run. What it cannot show is what depends on the start of an interpreter, such as flags, hash seed and the list
of modules, and, unless `whole_end` is given, the interpreter's own end.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

_LOADED = ("faults.suite", "kvtier.tools.commands.replay", "kvtier_fs.inspect", "kvtier_remote", "simulator.command")
_FDS_MAX, _HIGH_FD = 32, 200
_PR_SET_CHILD_SUBREAPER = 36
_CODE = "import sys; sys.path[:0] = {path!r}; from faults.machine import warm; warm.main({fd})"


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process of this Python, forked from a warm one; `whole_end`: the interpreter is taken down at its end."""

    def __init__(self, command: list[Any], *, whole_end: bool = False, **more: Any) -> None:
        self._whole_end = whole_end
        super().__init__(command, **more)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        """The step of `subprocess.Popen` that starts a process. Raises ValueError for what is no plain start."""
        _, preexec, _, pass_fds, cwd, env, _, _, shell, *pipes = rest[:15]
        if preexec or shell or args[0] != sys.executable:
            raise ValueError(f"this is no plain start of this Python: {args}")
        streams = [number if pipe == -1 else pipe for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {
            "command": [os.fspath(arg) for arg in args[1:]],
            "folder": os.fspath(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "fds": [0, 1, 2, *pass_fds],
            "whole_end": self._whole_end,
            "new_session": rest[-2],
        }
        self.pid = _server().start(request, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(command: list[Any], *, timeout: float | None = None, check: bool = False, capture_output: bool = False,
        **more: Any) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """`subprocess.run` for a process forked from a warm one."""
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **more) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, out, err)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class _Server:
    """The caller's side of a warm process, which ends when this one does."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if _here.is_warm and threading.active_count() == 1:
                self._fork(theirs)
            else:
                path = [entry for entry in sys.path if entry != ""]
                code = _CODE.format(path=path, fd=theirs.fileno())
                command = [sys.executable, "-c", code]
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
                atexit.register(self._end, process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if self.owner == os.getpid():
            self._socket.shutdown(socket.SHUT_RDWR)  # also where a forked child holds the other descriptor still
            self._socket.close()
            process.wait()

    def _fork(self, theirs: socket.socket) -> None:
        if not os.fork():
            self._socket.close()
            _serve(theirs)

    def start(self, request: dict[str, Any], fds: list[int]) -> int:
        """Have a process started that is a child of this one; returns its id."""
        text = os.memfd_create("request")
        try:
            os.write(text, json.dumps(request).encode())
            with self._lock:
                ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
                try:
                    socket.send_fds(self._socket, [b"start"], [text, *fds])
                    started = int(self._socket.recv(32))
                finally:
                    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        finally:
            os.close(text)
        if not started:
            raise OSError(errno.EAGAIN, "the warm process could not fork")
        return started


_here = types.SimpleNamespace(is_warm=False, whole_end=False)
_servers: list[_Server] = []


def _server() -> _Server:
    if not _servers or _servers[0].owner != os.getpid():
        _servers[:] = [_Server()]
    return _servers[0]


def is_warm() -> bool:
    """Whether this process was forked from a warm one."""
    return bool(_here.is_warm)


def start() -> None:
    """Start the warm process of this one before the first is needed: later this one may have threads."""
    _server()


# ---- in the warm process


def main(fd: int) -> None:
    """Import what programs need, and fork one for each request that comes."""
    for name in _LOADED:
        importlib.import_module(name)
    sys.modules["faults.suite"].all_attacks()
    gc.collect()
    gc.freeze()  # each child would walk these objects at its end, and copy their pages
    _here.is_warm = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(socket.socket(fileno=fd))


def _serve(requests: socket.socket) -> None:
    """Fork until the other end is closed. A child ends as its program does, with SystemExit at the latest."""
    while True:
        word, fds, _, _ = socket.recv_fds(requests, 8, _FDS_MAX)
        if not word:
            os._exit(0)
        reads, writes = os.pipe()
        between = os.fork()
        if not between:
            own = os.getpid()
            child = os.fork()
            if child:
                os.write(writes, str(child).encode())
                os._exit(0)
            requests.close()
            os.close(reads)
            os.close(writes)
            _live(own, fds)
        os.close(writes)  # or nothing would end the reading where no process could be forked
        os.waitpid(between, 0)
        requests.send(os.read(reads, 32) or b"0")
        for fd in (reads, *fds):
            os.close(fd)


def _live(between: int, fds: list[int]) -> None:
    """Be the process that was asked for."""
    request = json.loads(os.pread(fds[0], os.fstat(fds[0]).st_size, 0))
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for fd in fds[1:]]
    for fd in fds:
        os.close(fd)
    for fd, wanted in zip(moved, request["fds"], strict=True):
        os.dup2(fd, wanted)
        os.close(fd)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        lines = number == 2 or os.isatty(number)
        stream = open(number, mode, buffering=1 if lines else -1, errors=getattr(sys, name).errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if request["new_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while os.getppid() == between:
        pass
    _here.whole_end = request["whole_end"]
    status = _status_of(request["command"])
    if _here.whole_end:
        raise SystemExit(status)
    _end(status)


def _status_of(command: list[str]) -> int:
    """Run a program; its exit status, with what it raised on stderr. For a whole end the interpreter sees to both."""
    try:
        _execute(command)
    except BaseException as error:
        if _here.whole_end:
            raise
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            return error.code or 0
        if isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)
        else:
            traceback.print_exc()
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(status: int) -> None:
    """End as an interpreter does, short of taking its modules apart, which takes longer than many a program."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _execute(command: list[str]) -> None:
    """The program of a command line, as module `__main__`."""
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    with_head = True
    while command[0] in ("-W", "-P"):
        if command.pop(0) == "-P":
            with_head = False
        else:
            warnings.simplefilter(command.pop(0))  # type: ignore[arg-type]
    kind = command.pop(0) if command[0] in ("-c", "-m") else ""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    head = str(Path(command[0]).parent) if not kind else ""
    sys.path[:0] = [*([head] if with_head else []), *filter(None, given)]
    if kind == "-c":
        code: Any = command[0]
        sys.argv = ["-c", *command[1:]]
    else:
        if kind:
            spec = _module(command[0])
            origin, code = spec.origin, spec.loader.get_code(spec.name)
            program.__spec__, program.__package__ = spec, spec.parent
        else:
            origin = command[0]
            code = compile(Path(origin).read_bytes(), origin, "exec")
        program.__file__ = origin
        sys.argv = [origin, *command[1:]]
    exec(code, program.__dict__)  # noqa: S102


def _module(name: str) -> Any:
    """The spec of what `-m` runs."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None:
        raise SystemExit(f"No module named {name}")
    return spec
