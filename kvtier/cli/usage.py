"""Blocks of a store added up: for `kvtier du`, and for what `kvtier gc` is about to drop."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvtier.cli.progress import progress
from kvtier.tier.inspection import BlockState, ListStep, StoredBlock

Chosen = Callable[[StoredBlock], bool]


@dataclass(slots=True)
class Usage:
    """Blocks that can be loaded, and leftovers that cannot. None where the store does not record it."""

    blocks: int = 0
    payload_bytes: int = 0
    stored_bytes: int = 0
    leftover_blocks: int = 0
    leftover_bytes: int = 0
    oldest_generation: int | None = None
    newest_generation: int | None = None
    oldest_stored_at: float | None = None
    newest_stored_at: float | None = None
    hits: int | None = None

    def add(self, block: StoredBlock) -> None:
        """Count one block in."""
        if block.state is not BlockState.CURRENT:
            self.leftover_blocks += 1
            self.leftover_bytes += block.stored_bytes
            return
        self.blocks += 1
        self.payload_bytes += block.payload_bytes
        self.stored_bytes += block.stored_bytes
        self.oldest_generation = min(block.generation, self.oldest_generation or block.generation)
        self.newest_generation = max(block.generation, self.newest_generation or 0)
        if block.stored_at is not None:
            self.oldest_stored_at = min(block.stored_at, self.oldest_stored_at or block.stored_at)
            self.newest_stored_at = max(block.stored_at, self.newest_stored_at or block.stored_at)
        if block.hits is not None:
            self.hits = (self.hits or 0) + block.hits


def add_up(
    title: str,
    slots: int | None,
    steps: Iterator[ListStep],
    place: Callable[[StoredBlock], Any],
    chosen: Chosen | None = None,
) -> tuple[dict[Any, Usage], Usage]:
    """The chosen blocks (None: all) by their place, in its order, and all of them together. Shows how far it is."""
    usages: dict[Any, Usage] = {}
    total = Usage()
    with progress(title, slots) as advance:
        for listed in steps:
            for block in filter(chosen, listed.blocks) if chosen else listed.blocks:
                usages.setdefault(place(block), Usage()).add(block)
                total.add(block)
            advance(listed.slots)
    return dict(sorted(usages.items())), total
