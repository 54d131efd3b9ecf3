"""Rows that are given up early: written back first where that is due, and free once a lower tier has their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvtier.control.flow.demotions import Demotions
from kvtier.control.state import ControlState
from kvtier.types.hints import HintRefusal
from kvtier.types.keys import OffloadKey

LOOKED_AT_ONCE = 256
"""Rows that one step looks at, at most."""


class EarlyDemotions:
    """The rows that are to be given up and wait for their write-back, by the key of their block.

    `freed` counts rows that were given up, `kept` those that no lower tier has taken, or that were used meanwhile.
    """

    def __init__(self, control: ControlState, demotions: Demotions) -> None:
        self._control = control
        self._demotions = demotions
        self._waiting: dict[OffloadKey, int] = {}
        self.freed = 0
        self.kept = 0

    def __bool__(self) -> bool:
        """True if any row waits."""
        return bool(self._waiting)

    def add(self, key: OffloadKey, now: float) -> HintRefusal | None:
        """Give up this block's row as soon as that is possible; why not, or None."""
        control = self._control
        row = control.cpu.ready(key)
        if row is None:
            return HintRefusal.IN_USE if key in control.cpu.directory else HintRefusal.NOT_FOUND
        if self._waiting.get(key) == control.cpu.table.generation[row]:
            return None  # it is on its way
        if not self._below(key, now) and not self._demotions.write_back(row, now):
            return HintRefusal.NO_TIER
        self._waiting[key] = control.cpu.table.generation[row]
        return None

    def _below(self, key: OffloadKey, now: float) -> bool:
        """True if a lower tier surely has this block."""
        return any(index.presence(key, now) for index in self._control.indexes[1:])

    def advance(self, now: float) -> None:
        """Free the rows that are clean by now and in no use."""
        cpu, free, looked = self._control.cpu, [], 0
        dirty, sending = self._demotions.dirty.bits, self._demotions.dirty.sending
        for key in list(islice(self._waiting, LOOKED_AT_ONCE)):
            generation, row = self._waiting.pop(key), cpu.ready(key)
            if row is not None and cpu.table.generation[row] == generation and (dirty[row] or sending[row]):
                self._waiting[key] = generation  # the next time after those that were not looked at
                continue
            looked += 1
            if row is not None and not cpu.table.pins[row] and self._below(key, now):
                free.append(row)
        if free:
            cpu.drop(free)
        self.freed += len(free)
        self.kept += looked - len(free)

    def on_load(self, keys: Sequence[OffloadKey]) -> None:
        """The engine loads these blocks: their rows stay."""
        for key in keys:
            if self._waiting.pop(key, None) is not None:
                self.kept += 1

    def stop(self) -> None:
        """No row is given up early any more."""
        self._waiting.clear()
