"""The processes that are connected to a stack process, and the engines that they belong to."""

from __future__ import annotations

from kvtier.service.channel import Channel
from kvtier.service.session import Session
from kvtier.service.wire import Hello


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
