"""What benchmarks and tests change in a real vLLM before it starts: how it makes processes, how slow the disk is."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peer import HERE
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.service.channel import is_listening
from kvtier.types.jobs import JobResult, TransferJob
from kvtier_fs import FSBackend


def slow_loads(seconds: Callable[[], float]) -> None:
    """From here on one load of the disk follows another, and each takes so many seconds more a block."""
    load, one_at_a_time = FSBackend.load, asyncio.Lock()

    async def slow(this: FSBackend, job: TransferJob) -> JobResult:
        async with one_at_a_time:
            result = await load(this, job)
            await asyncio.sleep(seconds() * job.num_blocks)
            return result

    FSBackend.load = slow  # type: ignore[method-assign]


def slow_bytes(bytes_per_second: Callable[[], float]) -> None:
    """From here on loads of the disk end no sooner than this, one after another; 0: as soon as they can."""
    load, one_at_a_time = FSBackend.load, asyncio.Lock()

    async def slow(this: FSBackend, job: TransferJob) -> JobResult:
        speed = bytes_per_second()
        if not speed:
            return await load(this, job)
        async with one_at_a_time:
            result = await load(this, job)
            await asyncio.sleep(result.bytes_moved / speed)
            return result

    FSBackend.load = slow  # type: ignore[method-assign]


class SlowService:
    """A `kvtier serve` whose disk is as slow as it was told last; it begins with 0. `path` is its socket."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "s")
        self.told = folder / "slowness"
        self.tell(0.0)

    def tell(self, number: float) -> None:
        """The number for `slow_loads` or `slow_bytes` from here on."""
        part = self.told.with_suffix(".part")
        part.write_text(str(number))
        os.replace(part, self.told)


@contextmanager
def slow_service(stack: Mapping[str, Any], slow: str) -> Iterator[SlowService]:
    """A stack process whose disk `slow_loads` or `slow_bytes` slows down."""
    with temporary_folder("kvtier-slow-") as folder:
        service, file = SlowService(Path(folder)), Path(folder) / "stack.yaml"
        file.write_text(yaml.safe_dump(dict(stack)))
        code = (
            f"import sys; sys.path[:0] = [{str(HERE)!r}]\n"
            f"from pathlib import Path\nfrom benchmarks.vllm_processes import {slow}\n"
            f"{slow}(lambda: float(Path({str(service.told)!r}).read_text()))\n"
            "from kvtier.cli import main; main()"
        )
        command = [sys.executable, "-c", code, "serve", str(file), "--socket", service.path]
        with subprocess.Popen(command, stdout=sys.stderr) as process:
            try:
                while not is_listening(service.path):
                    if process.poll() is not None:
                        raise SystemExit("the stack process does not start")
                    time.sleep(0.01)
                yield service
            finally:
                process.terminate()


def fork_processes() -> None:
    """Have vLLM fork its processes, as it does where there is a GPU: they have what was changed in this one. On a CPU
    it spawns them, each importing vLLM."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    def context() -> BaseContext:
        return multiprocessing.get_context("fork")

    utils.get_mp_context = multiproc_executor.get_mp_context = context
