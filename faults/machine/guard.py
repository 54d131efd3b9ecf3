"""Undoes what a process did to the machine and could not undo itself: `python guard.py JOURNAL PID`.

Waits until the process is dead, or killed and unable to die because its I/O is stuck on a disk it froze, and then runs
the journal's steps, the last one first. Nothing but the standard library, so that it starts at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FIFREEZE, FITHAW = 0xC0045877, 0xC0045878
_LOOK_SECONDS = 0.3
_STEP_SECONDS = 20.0
_KILLED = 1 << (signal.SIGKILL - 1)


def freeze(mount: str, request: int) -> None:
    """Freeze or thaw the file system mounted at a path. Raises OSError."""
    fd = os.open(mount, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, request, 0)
    finally:
        os.close(fd)


def _thaw(mount: str) -> None:
    freeze(mount, FITHAW)


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


def _kill(pid: str, born: str) -> None:
    if birth(int(pid)) == born:
        os.kill(int(pid), signal.SIGKILL)


def _detach(image: str) -> None:
    listed = ["losetup", "--noheadings", "--output", "NAME", "--associated", image]
    found = subprocess.run(listed, check=True, capture_output=True, text=True, timeout=_STEP_SECONDS)
    for device in found.stdout.split():
        subprocess.run(["losetup", "--detach", device], check=True, timeout=_STEP_SECONDS)


STEPS: dict[str, Callable[..., None]] = {"thaw": _thaw, "write": _write, "kill": _kill, "detach": _detach}
"""What can be undone: each takes the arguments that follow its name in the journal."""


def undo(step: list[str]) -> None:
    """Run one step. Raises OSError or subprocess.SubprocessError."""
    STEPS[step[0]](*step[1:])


def undo_all(journal: Path) -> None:
    """Run every step of a journal, the last one first, whatever becomes of each; the journal is gone then."""
    with suppress(FileNotFoundError):
        for line in reversed(journal.read_text().splitlines()):
            with suppress(OSError, ValueError, subprocess.SubprocessError):
                undo(json.loads(line))
        journal.unlink()


def birth(pid: int) -> str:
    """When a process began, in clock ticks since the boot; empty if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def lost(pid: int, born: str) -> bool:
    """True if a process is dead or has been killed: one whose I/O is stuck cannot die before that is undone."""
    if birth(pid) != born:
        return True
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(signals & _KILLED for signals in pending)


def main(journal: str, pid: str) -> None:
    """Watch over a process; ends with it, or when the journal is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000")
    born = birth(int(pid))
    while not lost(int(pid), born):
        if not Path(journal).exists():
            return
        time.sleep(_LOOK_SECONDS)
    undo_all(Path(journal))


if __name__ == "__main__":
    main(*sys.argv[1:])
