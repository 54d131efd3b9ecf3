"""The processes that are connected to a stack process, the engines that they belong to, and the engines' figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from kvtier.service.channel import Channel
from kvtier.service.session import Session
from kvtier.service.wire import Hello
from kvtier.stack.watching.stats import EngineStats

NAMES_MAX = 64
"""Names of engines that are gone; the figures of others are added up."""
OTHERS = "others"
NAME_CHARACTERS_MAX = 64


class Peer:
    """A connection of an engine's scheduler or worker, for a session of it."""

    def __init__(self, channel: Channel, engine: Engine, worker: int | None, pidfd: int) -> None:
        """`pidfd` is of the connected process, and -1 once it is not watched any more."""
        self.channel = channel
        self.engine = engine
        self.pidfd = pidfd
        self.quiet = worker is None
        self.session = engine.session
        self.worker = worker
        self.writes = False


class Engine:
    """The processes of one life of an engine, and their session.

    `earlier` sessions have lost their connections. Each ends when all processes have exited, or when all workers have
    connected again and are `Ready`: those that are, are with it. `pidfds` are watched: of the connected processes, and
    of those in `left`, workers by number that have disconnected and may still copy. `leaves`: the number of its
    `Leave`, which it waits for. `distrusted`: what was stored is being reset, as that asked for. `counts` are those of
    all its sessions.
    """

    def __init__(self, session: Session, hello: Hello) -> None:
        self.session = session
        self.counts = session.counts
        self.token = hello.token
        self.engine_id = hello.engine_id
        self.scheduler: Peer | None = None
        self.peers: set[Peer] = set()
        self.pidfds: set[int] = set()
        self.left: dict[int, set[int]] = {}
        self.earlier: dict[Session, set[int]] = {}
        self.leaves: int | None = None
        self.distrusted = False

    def has(self, hello: Hello) -> bool:
        """True if another process is connected as this one."""
        if hello.role == "scheduler":
            return self.scheduler is not None
        return any(peer.worker == hello.participant and peer.session is self.session for peer in self.peers)


class EngineTotals:
    """Figures by the names of engines, for metrics: of those that are there, and of some that are gone.

    One that connects again under its name goes on counting.
    """

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
