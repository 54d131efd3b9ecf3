"""Changes to the machine that are always undone: at the end, on an error, and by a guard if the process is killed."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from . import guard

_JOURNALS = Path(tempfile.gettempdir()) / "kvtier-faults"
_CLONE_NEWNS = 0x00020000
CAP_SYS_ADMIN = 21


def run(*command: str | os.PathLike[str]) -> str:
    """What a command prints. Raises RuntimeError with what it said if it fails."""
    done = subprocess.run(list(map(os.fspath, command)), check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def without_root() -> str | None:
    """Why this process may not change the machine, if so."""
    if os.geteuid():
        return "needs root"
    status = Path("/proc/self/status").read_text()
    may = int(status.partition("CapEff:")[2].split()[0], 16)
    return None if may >> CAP_SYS_ADMIN & 1 else "needs the right to mount (CAP_SYS_ADMIN)"


class Machine:
    """The right to change this machine for a while. Use it as `with Machine() as machine`, once, from the main thread.

    Mounts made meanwhile are seen by this process and its children only, and end with them. A change that survives its
    process goes through `changed`.
    """

    def __init__(self) -> None:
        self._steps: list[list[str]] = []
        self._journal = _JOURNALS / f"{os.getpid()}-{guard.birth(os.getpid())}"
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        clean_up_after_others()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNS):
            number = ctypes.get_errno()
            raise OSError(number, f"no mount namespace of its own: {os.strerror(number)}")
        run("mount", "--make-rprivate", "/")
        self._write()
        script = Path(guard.__file__)
        command = [sys.executable, "-I", "-S", str(script), str(self._journal), str(os.getpid())]
        self._guard = subprocess.Popen(command, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._guard is not None
        left = len(self._steps)
        guard.undo_all(self._journal)
        self._guard.wait(60)
        if left:
            raise RuntimeError(f"{left} changes to the machine were not undone by those who made them")

    @contextmanager
    def changed(self, *undo: str) -> Iterator[None]:
        """Make the change inside; `undo` (see `guard.STEPS`) is run at the end, and by the guard if this process dies.

        Raises what the undoing raises, unless something else is being raised.
        """
        step = list(undo)
        self._steps.append(step)
        self._write()
        try:
            yield
        finally:
            guard.undo(step)
            self._steps.remove(step)
            self._write()

    @contextmanager
    def setting(self, path: str, value: str) -> Iterator[None]:
        """A file of the kernel's that takes a value, such as one under /proc/sys, has another one for a while."""
        before = Path(path).read_text()
        with self.changed("write", path, before):
            Path(path).write_text(value)
            yield

    def _write(self) -> None:
        self._journal.parent.mkdir(mode=0o700, exist_ok=True)
        part = self._journal.with_suffix(".part")
        part.write_text("".join(json.dumps(step) + "\n" for step in self._steps))
        part.rename(self._journal)


def clean_up_after_others() -> None:
    """Undo what processes left behind that were killed together with their guards."""
    for journal in _JOURNALS.glob("*-*"):
        pid, _, born = journal.name.removesuffix(".part").partition("-")
        if pid.isdecimal() and guard.lost(int(pid), born):
            guard.undo_all(journal)
