"""A tier whose opening, moving or closing is interrupted once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from faults.machine.raising import PlaceFault
from kvtier.tier.contract import LoadStore, Opened, TierContext


def faults_of(fault: PlaceFault, phase: str) -> dict[str, PlaceFault]:
    """`fault` in one phase of a tier's life, and faults that strike nothing in the others."""
    return {each: PlaceFault([]) for each in ("open", "move", "close")} | {phase: fault}


async def interrupted_life(
    backend: LoadStore, context: TierContext, faults: dict[str, PlaceFault], moved: Callable[[Opened], Awaitable[None]]
) -> None:
    """Open a tier, move blocks, close it; the second call has to close what an interrupted one left."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    try:
        with suppress(MemoryError):
            with faults["open"].armed_now():
                opened = await backend.open(context)
            with faults["move"].armed_now():
                await moved(opened)
    finally:
        with suppress(MemoryError), faults["close"].armed_now():
            await backend.close()
        await backend.close()
