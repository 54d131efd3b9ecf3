"""Figures of a service by the names of its engines, for metrics: those that are there, and some that are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from kvtier.service.connected import Engine
from kvtier.stack.watching.stats import EngineStats

NAMES_MAX = 64
"""Names of engines that are gone; the figures of others are added up."""
OTHERS = "others"
NAME_CHARACTERS_MAX = 64


class EngineTotals:
    """Figures of engines since the process began. One that connects again under its name goes on counting."""

    def __init__(self) -> None:
        self._gone: dict[str, EngineStats] = {}

    def on_gone(self, engine: Engine) -> None:
        """No process of the engine is left."""
        gone = dict(self._gone)
        name = _name(engine)
        gone[name] = _sum(engine.counts, gone.pop(name, None))
        others = gone.pop(OTHERS, None)
        while len(gone) > NAMES_MAX:
            others = _sum(gone.pop(next(iter(gone))), others)
        self._gone = gone if others is None else {**gone, OTHERS: others}  # whole at once: other threads read it

    def figures(self, engines: Iterable[Engine]) -> dict[str, EngineStats]:
        """The figures by name, with those of the engines that are there. From any thread."""
        found = dict(self._gone)
        for engine in engines:
            held = engine.session.held + sum(each.held for each in list(engine.earlier))
            found[_name(engine)] = _sum(replace(engine.counts, held_rows=held), found.get(_name(engine)))
        return found


def _name(engine: Engine) -> str:
    return engine.engine_id[:NAME_CHARACTERS_MAX]


def _sum(one: EngineStats, other: EngineStats | None) -> EngineStats:
    """The figures of two in one."""
    other = other or EngineStats()
    return EngineStats(
        one.looked_up + other.looked_up,
        one.stored + other.stored,
        dict(Counter(one.loaded) + Counter(other.loaded)),
        one.revoked_rows + other.revoked_rows,
        one.held_rows + other.held_rows,
    )
