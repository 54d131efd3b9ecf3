"""Layout `files`: another process on the same root, which goes on while victims die beside it, and dies later."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kvtier_fs.shared.leases import LEASE_NAME, decode_holder

from .files_life import FilesLife
from .life import Plan, Target
from .shared_log import SharedLog
from .victim import Signals, Victim
from .world import World


class Companion:
    """A slower life, with a log and a pipe of its own. `years` are the cycles it has left."""

    def __init__(self, world: World, seed: int, years: int) -> None:
        self.log, self.years = SharedLog(world.log_shape), years
        self.plan = Plan(Target.STORE, seed, 0, 1, companion=True)
        self._world, self._signals = world, Signals()
        life = FilesLife
        self._victim = Victim(lambda: life(world, self.log, self.plan, self._signals.write).run(),
                              self.log, self._signals)  # fmt: skip

    def owns(self) -> str | None:
        """Its lease; None while it has none, or where leases cannot be distinguished."""
        found = holders(self._world.roots[0])
        return next((name for name, pid in found.items() if pid == self._victim.pid), None)

    def kill(self) -> bool:
        """SIGKILL. True if that was what ended it."""
        killed = self._victim.kill()
        self._signals.close()
        return killed


def holders(root: Path) -> dict[str, int]:
    """The leases in a root that name a process, and that process.

    One whose holder died before it had written its name expires by time; until then it may stay.
    """
    found = {}
    for path in root.glob("leases/*"):
        with suppress(FileNotFoundError):  # swept meanwhile
            holder = decode_holder(path.read_bytes()) if LEASE_NAME.fullmatch(path.name) else None
            if holder is not None:
                found[path.name] = holder.pid
    return found
