"""Blocks of two sizes in tiers on servers, as tests store them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvtier.testing.conformance import make_keys
from kvtier.testing.conformance.base import ConformanceBase
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.keys import OffloadKey

LARGE_BYTES, SMALL_BYTES = 300 << 10, 5000
TWO_SIZES = KVLayout((GroupLayout((TensorRef(0, LARGE_BYTES),)), GroupLayout((TensorRef(1, SMALL_BYTES),))))
NAMES = [*make_keys(2, 0), *make_keys(3, 1)]
"""Two large blocks and three small ones."""


def store_epochs(suite: ConformanceBase, tag: str = "", epochs: int = 1, names: Sequence[OffloadKey] = NAMES) -> str:
    """Store blocks under each of so many epochs, the last of which is current. Returns the digits of the namespace."""
    namespace = replace(suite.namespace(), tag=tag)

    async def work() -> None:
        async with suite.opened(Path(), namespace) as driver:
            for epoch in range(driver.epoch, driver.epoch + epochs):
                if epoch:
                    await driver.tier.reset(epoch)
                    driver.epoch = epoch
                assert all(outcome.ok for outcome in (await driver.store(names)).values())

    asyncio.run(work())
    return namespace.digest()[:8].hex()
