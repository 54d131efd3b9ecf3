"""Rows that the engines of a pool are lent ahead, in turns, and those that they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.service.session import Session

LENT_AT_ONCE = 16
"""Rows that an engine is lent before it is the turn of the others."""


class Lending:
    """The turns of a pool's sessions. No session that has no work is lent anything."""

    def __init__(self) -> None:
        self._turns = 0

    def lend(self, plane: ControlPlane, working: Sequence[Session], now: float) -> bool:
        """Lend rows to engines in turn, a few at a time if several want some; none while a reservation lacks rows.

        True if rows were asked for.
        """
        asked = False
        while not plane.control.shortage and (waiting := [each for each in working if each.rows_wanted]):
            asked = True
            first = min(waiting, key=lambda each: (each.lent_in_turn, each.number))
            self._turns += 1
            first.lent_in_turn = self._turns
            wanted = first.rows_wanted
            rows, generations = plane.lend(min(LENT_AT_ONCE, wanted) if len(waiting) > 1 else wanted, now)
            if not rows:
                break
            first.copying.on_lent(rows, generations)
        return asked

    @staticmethod
    def take_back(plane: ControlPlane, sessions: Iterable[Session], working: Sequence[Session]) -> None:
        """Ask for leases, of the engine first that holds most, where rows are short; and for what is beyond bounds."""
        short = plane.control.shortage
        for_loans = not short
        if not short and not plane.control.cpu.available:
            short = max((each.rows_wanted for each in working), default=0)
        for session in sorted(sessions if short else working, key=lambda each: -each.held):
            short = max(0, short - session.take_back(short, for_loans))
