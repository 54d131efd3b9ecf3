"""What other namespaces left in a tier: free slots and unformatted regions, used last, oldest namespace first."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence


class ForeignLayer:
    """What one namespace left: stacks of slots by size, and regions of sizes that are none of ours."""

    __slots__ = ("regions", "slots")

    def __init__(self, slots: Sequence[Sequence[int]], regions: Sequence[int]) -> None:
        self.slots = [array("q", reversed(of_size)) for of_size in slots]
        self.regions = list(reversed(regions))


class ForeignSlots:
    """Layers in the order in which they may be overwritten. `counts` are the slots of each size in all of them."""

    def __init__(self, num_sizes: int) -> None:
        self.counts = [0] * num_sizes
        self.layers: list[ForeignLayer] = []

    @property
    def has_regions(self) -> bool:
        """True while a region is left that is formatted for none of our sizes."""
        return any(layer.regions for layer in self.layers)

    def add(self, layer: ForeignLayer) -> None:
        """One more namespace, younger than those before."""
        self.layers.append(layer)
        for size, slots in enumerate(layer.slots):
            self.counts[size] += len(slots)

    def next(self, size: int, count: int) -> tuple[list[int], int | None]:
        """What to overwrite next for a size: up to `count` slots, or a region to format; empty when none is left."""
        for layer in self.layers:
            stack = layer.slots[size]
            if stack:
                taken = stack[-count:]
                del stack[-count:]
                self.counts[size] -= len(taken)
                return taken.tolist()[::-1], None
            if layer.regions:
                return [], layer.regions.pop()
        return [], None

    def drop(self, size: int, slots: Collection[int]) -> int:
        """Forget slots whose region is formatted for another size. Returns how many there were."""
        dropped = sum(take_out(layer.slots[size], slots) for layer in self.layers)
        self.counts[size] -= dropped
        return dropped


def take_out(stack: array[int], slots: Collection[int]) -> int:
    """Remove those of the slots that are on the stack; returns how many these were."""
    kept = array("q", [slot for slot in stack if slot not in slots])
    removed = len(stack) - len(kept)
    stack[:] = kept
    return removed
