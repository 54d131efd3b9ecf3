"""Rows that hold blocks of a process before, once it was found whether these are still whole."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.control.jobs import CPU_TIER
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.tiers.slot_table import READY
from kvtier.types.jobs import CORRUPT


def end_adoption(plane: ControlPlane, rows: Sequence[int], intact: Sequence[bool], now: float) -> None:
    """Rows that were lent and named hold the blocks of their keys already, if they are `intact`. Pump afterwards."""
    control, cpu, state = plane.control, plane.control.cpu, plane.control.cpu.table.state
    good = [row for row, ok in zip(rows, intact, strict=True) if ok]
    bad = [row for row, ok in zip(rows, intact, strict=True) if not ok]
    cpu.commit(good)
    cpu.abort(bad)
    for _ in bad:
        control.cpu_counters.count(CORRUPT)
    ready = [row for row in good if state[row] == READY]
    plane.demotions.row_ready(ready, CPU_TIER, now)
    control.end_fill(ready, True, CPU_TIER, now)
    control.end_fill([row for row in rows if state[row] != READY], False, CPU_TIER, now)
