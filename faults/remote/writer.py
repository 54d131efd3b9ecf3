"""A process that writes to a bucket as fast as its budget lets it, in which a day takes a minute.

`python -m faults.remote.writer OPTIONS DAY_SECONDS FIRST`: the options of a tier `s3` as JSON, and the first of its
keys. It goes on until it is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import ClassVar

from kvtier.aio.boot_clock import BootClock, read_boot_clock
from kvtier.testing.conformance import make_keys
from kvtier.testing.conformance.base import ConformanceBase
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier_remote import S3Backend, S3Options, write_budget

BLOCK_BYTES = 64 << 10
AT_ONCE = 8
PAUSE_SECONDS = 0.02
DAY_SECONDS = 86_400


class Shape(ConformanceBase):
    """One group."""

    layout: ClassVar[KVLayout] = KVLayout((GroupLayout((TensorRef(0, BLOCK_BYTES),)),))

    def __init__(self, options: S3Options) -> None:
        self._options = options

    def make(self, place: Path) -> S3Backend:
        return S3Backend(self._options)


async def write(options: S3Options, first: int) -> None:
    """Blocks that nobody has stored before."""
    async with Shape(options).opened(Path()) as driver:
        print("open", flush=True)
        for number in itertools.count(first, AT_ONCE):
            outcomes = await driver.store(make_keys(AT_ONCE, 0, number))
            if not all(outcome.ok for outcome in outcomes.values()):
                await asyncio.sleep(PAUSE_SECONDS)


def main(options: str, day_seconds: str, first: str) -> None:
    clock, faster = read_boot_clock(), DAY_SECONDS / float(day_seconds)
    fast = BootClock(clock.boot, lambda: int(time.clock_gettime_ns(time.CLOCK_BOOTTIME) * faster))
    write_budget.read_boot_clock = lambda: fast
    asyncio.run(write(S3Options.model_validate_json(options), int(first)))


if __name__ == "__main__":
    main(*sys.argv[1:])
