"""A replay whose disk goes wrong as planned, with its page: `python tests/support/support_faulty_replay.py FILE`."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.config import stack_parts
from kvtier.config.load import StackConfig
from kvtier.stack import TierStack
from kvtier.testing import Fault, FaultKind, FaultyBackend
from kvtier.tools.replay.run import Replay
from kvtier.tools.replay.setup import ReplayOptions
from kvtier.tools.replay.timeline import Timeline
from kvtier.tools.whatif.run_page import WatchedReplay
from kvtier.types.geometry import KVLayout
from kvtier.types.jobs import JobKind
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import Namespace

if TYPE_CHECKING:
    import torch

STACK = """
tiers:
  - type: gpu
  - {{type: cpu, cpu_bytes_to_use: 16MiB}}
  - {{type: fs, roots: [{root}], capacity: 64MiB, min_free_bytes: 0, job_timeout_seconds: 1.0}}
"""
LATE_JOBS = range(10, 12)
CORRUPT_LOADS, FAILING_JOBS = 15, 9


class Trouble:
    """What goes wrong with the disk: two jobs are late, then the first loads find corrupt blocks, and after these some
    jobs fail whole."""

    def __init__(self) -> None:
        self._loads = self._failing = 0

    def of_job(self, number: int, kind: JobKind) -> Fault | None:
        """Called once for each job, before its blocks."""
        if self._loads >= CORRUPT_LOADS:
            self._failing += 1
        self._loads += kind is JobKind.LOAD
        return Fault(FaultKind.LATE) if number in LATE_JOBS else None

    def of_block(self, number: int, kind: JobKind, key: OffloadKey) -> Fault | None:
        if self._failing:
            return Fault(FaultKind.FAIL) if self._failing <= FAILING_JOBS else None
        return Fault(FaultKind.CORRUPT) if kind is JobKind.LOAD and key[0] % 8 == 0 else None


def faulty_stack(config: StackConfig, layout: KVLayout, kv_caches: Sequence[torch.Tensor]) -> TierStack:
    """The stack of a replay over a disk with `Trouble`."""
    parts = stack_parts(config, Namespace(layout, model="kvtier-replay"), kv_caches)
    *above, disk = parts.tiers
    return TierStack(dataclasses.replace(parts, tiers=[*above, FaultyBackend(disk, Trouble())]))


def watched_replay(folder: Path, requests: int) -> WatchedReplay:
    """The replay of a chat, and its run."""
    stack = folder / "stack.yaml"
    stack.write_text(STACK.format(root=folder / "root"))
    options = ReplayOptions(stack=stack, workload="chat", requests=requests, block_bytes=16 << 10, gpu_blocks=448)
    timeline = Timeline(time.monotonic, "real")
    report = asyncio.run(Replay(options, faulty_stack).run(timeline=timeline))
    return WatchedReplay(report, timeline)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).write_text(watched_replay(Path(scratch), 1000).to_html())
