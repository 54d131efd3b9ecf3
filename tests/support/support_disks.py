"""Small disks of one's own for a test: file systems in files, on loop devices."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.machine.loops import MIB, MKFS, without_loops


@contextmanager
def small_disk(kind: str = "ext4", mkfs: tuple[str, ...] = (), mib: int = 64) -> Iterator[Path]:
    """A mounted file system of this kind. Skips the test where none can be made."""
    if (missing := without_loops(kind)) is not None:
        pytest.skip(missing)
    with tempfile.TemporaryDirectory() as folder:
        image, mount = Path(folder) / "image", Path(folder) / "mount"
        mount.mkdir()
        with open(image, "wb") as file:
            file.truncate(mib * MIB)
        subprocess.run([*MKFS[kind], *mkfs, str(image)], check=True, capture_output=True)
        mounting = ["mount", "-o", "loop", str(image), str(mount)]
        done = subprocess.run(mounting, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no loop device can be mounted here: {done.stderr.strip()}")
        try:
            yield mount
        finally:
            subprocess.run(["umount", str(mount)], check=True)
