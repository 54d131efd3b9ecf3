"""Bounds of what engines may hold of a pool's rows, so that none leaves too few for the others.

    rows found and leased before a copy: an eighth of the rows for all, in equal parts
    rows lent ahead: an eighth for all, of which one engine a fourth, or 64 rows where there are few engines
    all that an engine pins, copies in flight included: half of the rows, while it has company

A CPU tier with few rows keeps three fourths of them for others than loans.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.settings import StackSettings
from kvtier.stack.open_stack import OpenStack
from kvtier.types.geometry import Geometry

SHARE = 8
ALONE_SHARE = 32
LENT_MIN = 64


class Quotas:
    """The rows of a pool, what all its sessions have of them, and `engines`, the number of sessions that share them.

    Rows that one engine may have at most: `found_most` from lookups, `lent_most` ahead, `pinned_most` in all.
    `lent_most_of_all` may be lent ahead to all engines.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.found = 0
        self.lent = 0
        self.lent_most_of_all = max(1, rows // SHARE, min(LENT_MIN, rows // 4))
        self.share(0)

    def share(self, engines: int) -> None:
        """So many engines share the rows from now on."""
        self.engines = engines
        self.found_most = max(1, self.rows // SHARE // max(1, engines))
        share = max(1, self.lent_most_of_all // max(1, engines))
        self.lent_most = min(max(LENT_MIN, self.rows // ALONE_SHARE), share)
        self.pinned_most = self.rows if engines <= 1 else max(1, self.rows // 2)

    def found_room(self, of_session: int) -> int:
        """The number of rows from lookups that a session may have beyond so many."""
        return max(0, min(self.found_most - of_session, max(1, self.rows // SHARE) - self.found))


@dataclass(frozen=True, slots=True, eq=False)
class PoolState:
    """State that the sessions of a pool share: its open stack, the bounds of what each may hold, and the settings."""

    stack: OpenStack
    quotas: Quotas
    settings: StackSettings

    @property
    def plane(self) -> ControlPlane:
        """The control plane."""
        return self.stack.plane

    @property
    def geometry(self) -> Geometry:
        """The layout of blocks in rows, which the first namespace fixes."""
        return self.stack.geometry
