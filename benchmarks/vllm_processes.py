"""What benchmarks and tests change in a real vLLM before it starts: how it makes processes, how slow the disk is."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing.context import BaseContext

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


def fork_processes() -> None:
    """Have vLLM fork its processes, as it does where there is a GPU: they have what was changed in this one. On a CPU
    it spawns them, each importing vLLM."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    def context() -> BaseContext:
        return multiprocessing.get_context("fork")

    utils.get_mp_context = multiproc_executor.get_mp_context = context
