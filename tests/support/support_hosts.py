"""Stacks of several hosts over one store that they share: what each stores and loads, every byte compared."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from support_stack import PLAIN, Engine, fs, load, running, stack_file, statuses, store, whole

from kvtier.stack import TierStack
from kvtier.types.keys import OffloadKey


def host(
    shared: dict[str, object], engine: Engine, folder: Path | None = None, rows: int = 8
) -> AbstractAsyncContextManager[TierStack]:
    """A stack of a host of its own: a small CPU tier, a small disk if it has one, and the tier that is shared."""
    disk = [fs(folder, capacity="256KiB", region_bytes="64KiB")] if folder else []
    return running(stack_file(PLAIN, rows, *disk, shared), engine, lookup_timeout_seconds=40.0)


async def stored(stack: TierStack, engine: Engine, names: list[OffloadKey]) -> None:
    """Store blocks, four at a time, in every tier."""
    for start in range(0, len(names), 4):
        await store(stack, engine, whole(names[start : start + 4], start))
        assert await stack.drain(60)


async def loaded(stack: TierStack, engine: Engine, names: list[OffloadKey]) -> int:
    """How many blocks are loaded, each byte compared; eight at a time, which is what the rows hold."""
    count = 0
    for start in range(0, len(names), 8):
        engine.wipe()
        count += statuses(await load(stack, engine, whole(names[start : start + 8], start))).count("loaded")
    return count
