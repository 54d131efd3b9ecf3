"""The state that the sessions of a pool share."""

from __future__ import annotations

from typing import Protocol

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.service.quotas import Quotas
from kvtier.types.geometry import Geometry


class HoldsRows(Protocol):
    """The rows of an engine in its copies, and those with what is lent to it."""

    rows: int

    @property
    def held(self) -> int:
        """Rows in copies, and lent rows."""


class PoolState(Protocol):
    """A pool, as parts of its sessions see it."""

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
