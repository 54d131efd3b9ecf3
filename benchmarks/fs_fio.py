"""fio as a contestant: the same bytes into and out of one preallocated file, as fast as this disk takes them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.fs_child import LOAD, Pass, Refused, Setup


class Fio:
    """Requests of one payload each, in a row, `depth` at once: io_uring and O_DIRECT, as kvtier does where it can.

    A pass of jobs that follow each other waits for all requests of a job before it begins the next.
    """

    name = "fio"
    most_blocks = 1 << 40

    def __init__(self) -> None:
        self._setup: Setup
        self._direct = True

    @staticmethod
    def version() -> str | None:
        """What is installed; None if nothing is."""
        if shutil.which("fio") is None:
            return None
        return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()

    def open(self, setup: Setup) -> str:
        """Preallocate a file for twice the rows. Returns how it works here."""
        self._setup = setup
        self._path = Path(setup.folder) / "fio"
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600))
            self._direct = True
        except OSError:
            self._direct = False
        fd = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        os.posix_fallocate(fd, 0, 2 * setup.blocks * setup.block_bytes)
        os.close(fd)
        return "io_uring, direct" if self._direct else "io_uring, buffered: the file system has no O_DIRECT"

    def run(self, work: Pass) -> dict[str, float]:
        """Do one pass. The data is fio's own and is not compared."""
        setup = self._setup
        first = work.start % (2 * setup.blocks)
        alone = work.at_once == 1 and work.job_blocks < work.blocks
        depth = work.job_blocks if alone else setup.depth
        options = {
            "name": "pass",
            "filename": self._path,
            "rw": "read" if work.kind == LOAD else "write",
            "bs": setup.block_bytes,
            "offset": first * setup.block_bytes,
            "size": work.blocks * setup.block_bytes,
            "ioengine": "io_uring",
            "iodepth": depth,
            "iodepth_batch_submit": depth if alone else 1,
            "iodepth_batch_complete_min": depth if alone else 1,
            "direct": int(self._direct),
            "allow_file_create": 0,
            "fallocate": "none",
            "invalidate": 0,
            "output-format": "json",
        }
        os.sync()
        command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Refused(f"fio ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        side = job["read" if work.kind == LOAD else "write"]
        if side["io_bytes"] != work.blocks * setup.block_bytes:
            raise Refused(f"fio moved {side['io_bytes']} bytes")
        seconds = side["io_bytes"] / max(side["bw_bytes"], 1)
        return {"seconds": seconds, "cpu_seconds": (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3}

    def close(self) -> None:
        """Nothing runs between passes."""
