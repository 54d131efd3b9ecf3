"""Closing a tier takes no longer than its options say, however many of its parts are stuck."""

from __future__ import annotations

import asyncio
import time

from support_objects import Blocks, Folder

from kvtier_remote.mooncake.options import MooncakeOptions
from kvtier_remote.mooncake.transport import MooncakeTransport

CLOSE_SECONDS = 4.0


class Stuck:
    """A part that takes all of the time that it is given."""

    async def close(self, timeout_seconds: float) -> int:
        await asyncio.sleep(timeout_seconds)
        return 1


async def test_all_parts_of_a_tier_share_its_time(tmp_path):
    bucket = Folder(tmp_path / "bucket")
    async with Blocks(bucket, close_timeout_seconds=CLOSE_SECONDS).opened(tmp_path) as driver:
        tier = driver.tier
        parts = tier._transport, tier._hedged, tier._budget
        tier._transport, tier._hedged, tier._budget = Stuck(), Stuck(), Stuck()
        began = time.monotonic()
        await tier.close()
        assert time.monotonic() - began < CLOSE_SECONDS
        assert tier.counters["close.stuck"] == 3
        tier._transport, tier._hedged, tier._budget = parts


async def test_both_lanes_of_a_pool_share_the_time():
    transport = MooncakeTransport(MooncakeOptions(master="127.0.0.1:1"))
    transport._transfers = transport._questions = Stuck()
    began = time.monotonic()
    assert await transport.close(CLOSE_SECONDS) == 2
    assert time.monotonic() - began < 1.5 * CLOSE_SECONDS
