"""Disks that fail and hang on request: a FUSE file system with a switch, and ext4 on a device inside one."""

from __future__ import annotations

import importlib.util
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import guard
from .loops import MIB, Disk, loop_device, mounted, unmount, without_loops
from .undo import Machine, run, without_root

READS, WRITES, HANGS = 1, 2, 4
"""Modes of a switch, to be combined: reads fail with EIO, changes fail with EIO, every request but a lookup waits."""

_COUNTERS = struct.Struct("<QQQ")
_COUNTERS_AT = 8
_START_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests since the mount that went well, that failed and that hung for a while."""

    served: int
    failed: int
    hung: int


class Switch:
    """Decides what becomes of requests from now on; those that hang go on when it no longer says so."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(4096))
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def set(self, mode: int) -> None:
        """READS, WRITES and HANGS together; 0: no fault."""
        self._memory[0] = mode

    @contextmanager
    def on(self, mode: int) -> Iterator[None]:
        """In this mode for a while, then in order again."""
        self.set(mode)
        try:
            yield
        finally:
            self.set(0)

    def close(self) -> None:
        self._memory.close()

    @property
    def counts(self) -> Counts:
        return Counts(*_COUNTERS.unpack_from(self._memory, _COUNTERS_AT))


@dataclass(frozen=True, slots=True)
class SwitchedFolder:
    """A folder as the file system with a switch shows it; `behind` is where its files really are."""

    mount: Path
    behind: Path
    switch: Switch


def _environment() -> dict[str, str]:
    """Variables by which mfusepy takes libfuse 3 where libfuse 2 is installed too."""
    return {"FUSE_LIBRARY_NAME": "fuse3", **os.environ}


def without_fuse() -> str | None:
    """Why no FUSE file system can be made here, if so."""
    if without_root():
        return without_root()
    if not os.path.exists("/dev/fuse"):
        return "needs /dev/fuse"
    if importlib.util.find_spec("mfusepy") is None:
        return "needs the Python package mfusepy"
    code = "import sys, mfusepy; sys.exit(mfusepy.fuse_version_major < 3)"
    looked = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, env=_environment())
    return "needs libfuse 3 (Debian: libfuse3-3, fuse3)" if looked.returncode else None


def without_bad_disks() -> str | None:
    """Why no disk that errs can be made here, if so."""
    return without_loops() or without_fuse()


@contextmanager
def switched(machine: Machine, folder: Path) -> Iterator[SwitchedFolder]:
    """A new folder behind a switch."""
    behind, mount, said = folder / "behind", folder / "switched", folder / "said"
    behind.mkdir(parents=True)
    mount.mkdir()
    switch = Switch(folder / "switch")
    command = [sys.executable, str(Path(__file__).with_name("fuse_server.py")), behind, mount, folder / "switch"]
    with open(said, "wb") as words:
        server = subprocess.Popen(command, stdout=words, stderr=words, env=_environment())
    with machine.changed("kill", str(server.pid), guard.birth(server.pid)):
        try:
            _wait_for(mount, server, said)
            yield SwitchedFolder(mount, behind, switch)
        finally:
            switch.set(0)
            if os.path.ismount(mount):
                unmount(mount)
            server.wait(_START_SECONDS)
            switch.close()


def _wait_for(mount: Path, server: subprocess.Popen[bytes], said: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while not os.path.ismount(mount):
        if server.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the FUSE file system did not start: {said.read_text()[-500:]}")
        time.sleep(0.01)


@contextmanager
def ext4_behind_a_switch(machine: Machine, folder: Path, mib: int = 64) -> Iterator[tuple[Disk, Switch]]:
    """An ext4 whose device errs and hangs as a switch says."""
    with switched(machine, folder) as shown:
        with open(shown.behind / "image", "wb") as file:
            file.truncate(mib * MIB)
        image = shown.mount / "image"
        with loop_device(machine, image, "--direct-io=on") as device:
            run("mkfs.ext4", "-q", "-m", "0", device)
            with mounted("ext4", device, folder / "mount", "noatime,lazytime,commit=600") as mount:
                yield Disk(mount, device, image), shown.switch
