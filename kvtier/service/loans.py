"""Rows that engines are lent ahead, in turn, and rows that are asked back from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.service.session import Session

LENT_AT_ONCE = 16
"""Rows that an engine is lent before it is the turn of the others."""


class Loans:
    """The turns of engines that are lent rows."""

    def __init__(self) -> None:
        self._turns = 0

    def lend(self, plane: ControlPlane, working: Sequence[Session], now: float) -> bool:
        """Lend rows to engines in turn, a few at a time if several want some; none while a reservation lacks rows.

        True if rows were asked for.
        """
        asked = False
        while not plane.control.shortage:
            waiting = {each: wanted for each in working if (wanted := each.rows_wanted)}
            if not waiting:
                break
            asked = True
            (first, wanted), *others = waiting.items()
            if others:
                first = min(waiting, key=lambda each: (each.lent_in_turn, each.number))
                wanted = min(LENT_AT_ONCE, waiting[first])
            self._turns += 1
            first.lent_in_turn = self._turns
            rows, generations = plane.lend(wanted, now)
            first.copying.on_lent(rows, generations)
            if not (rows and others):
                break
        return asked

    def take_back(
        self, plane: ControlPlane, sessions: Collection[Session], working: Sequence[Session], asked: bool
    ) -> bool:
        """Ask for leases, of the engine first that holds most, where rows are short; and for what is beyond bounds.

        `asked` is what `lend` returned. True if rows are short: then others than the `working` sessions were asked too.
        """
        short = plane.control.shortage
        for_loans = not short
        if asked and not short and not plane.control.cpu.available:
            short = max((each.rows_wanted for each in working), default=0)
        left = short
        for session in sorted(sessions, key=lambda each: -each.held) if short else working:
            left = max(0, left - session.take_back(left, for_loans))
        return short > 0
