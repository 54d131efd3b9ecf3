"""An open stack's parts: made by `assembly`, used by `TierStack` and by `shutdown`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.stack.dispatcher import Dispatcher
from kvtier.stack.joining import Joining
from kvtier.tier.contract import FencesCopies, LoadStore
from kvtier.types.geometry import Geometry

if TYPE_CHECKING:
    from kvtier.stack.learned.model_files import ModelFiles
    from kvtier.traces.write import Recorder


class StatsServer(Protocol):
    """A server of the stack's figures beside it."""

    async def close(self) -> asyncio.CancelledError | None:
        """Serve nothing any more. Returns the cancellation that came meanwhile."""


@dataclass(slots=True, eq=False)
class OpenStack:
    """The parts of an open stack.

    `fenced` copy GPU blocks of a device beside the engine's work, so each job is fenced when the engine submits it.
    With `joining` the lower tiers are opened later; `to_close` then grows by them. `plane` becomes `Answers` when
    an exception leaves it half-way through a step. `models` keeps what policies learn, where there is a place for it.
    """

    geometry: Geometry
    plane: ControlPlane
    dispatcher: Dispatcher
    to_close: Sequence[LoadStore]
    fenced: Sequence[FencesCopies] = ()
    joining: Joining | None = None
    recorder: Recorder | None = None
    models: ModelFiles | None = None
    stats_socket: StatsServer | None = None
