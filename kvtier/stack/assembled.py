"""What an open stack consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.control.plane import ControlPlane
from kvtier.stack.dispatcher import Dispatcher, TierQueue
from kvtier.tier_api.contract import LoadStore, Opened
from kvtier.types.geometry import Geometry


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """An open stack's insides. `queues[i].tier` are the tiers from the CPU down; `opened[i]` what they said."""

    geometry: Geometry
    plane: ControlPlane
    dispatcher: Dispatcher
    queues: Sequence[TierQueue]
    opened: Sequence[Opened]
    to_close: Sequence[LoadStore]
