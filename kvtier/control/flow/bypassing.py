"""Which blocks no tier would keep: policies that follow requests value what they would evict for them more."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.control.state import ControlState
from kvtier.types.keys import OffloadKey


def unwanted(control: ControlState, keys: Sequence[OffloadKey], now: float) -> set[OffloadKey]:
    """Those of these distinct keys in prefix order, none in the CPU tier, that neither it nor a tier below would keep.

    A lower tier that has a block already does not need it, and one without such a policy takes every block.
    """
    left = control.cpu.bypassed(keys)
    if not left:
        return set()
    for lower in control.lowers:
        if left and not lower.held_back:
            needed = [key for key in left if lower.index.needs(key, now)]
            bypassed = () if lower.owned is None else lower.owned.bypassed(needed)
            taken = set(needed).difference(bypassed)
            left = [key for key in left if key not in taken]
    return set(left)
