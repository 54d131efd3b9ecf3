"""The pool, as the sessions of engines see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.service.leases import Copy
from kvtier.service.quotas import Quotas
from kvtier.types.geometry import Geometry
from kvtier.types.keys import JobId, OffloadKey

if TYPE_CHECKING:
    from kvtier.service.session import Session


class PoolState(Protocol):
    """The state that the sessions of a pool share."""

    quotas: Quotas

    @property
    def plane(self) -> ControlPlane:
        """The control plane."""

    @property
    def geometry(self) -> Geometry:
        """The layout of blocks in rows."""

    @property
    def chooses(self) -> bool:
        """True if not all that is found is worth a load."""

    @property
    def reservation_seconds(self) -> float:
        """The time that a reservation may wait."""


class SessionHost(PoolState, Protocol):
    """What a session has the pool do."""

    def next_job(self, session: Session) -> JobId:
        """The number of a new fill of a session, whose `on_fill_end` is called."""

    def end_fill(self, copy: Copy) -> None:
        """All workers have reported a fill."""

    def join(self, session: Session, manifest: bytes) -> None:
        """`on_joined` follows. Raises WireError for a manifest that is none."""

    def begin_reset(self, session: Session, number: int) -> None:
        """`on_reset` of all sessions follows at once, `on_reset_done` of this one later."""

    def hold_back(self, session: Session, reason: str) -> None:
        """The engine's weights are others than those of its namespace."""

    def announce(self, session: Session, keys: Sequence[OffloadKey]) -> None:
        """Add to the session's events which tiers have these keys."""

    def send_figures(self, session: Session) -> None:
        """Add the figures to the session's items."""
