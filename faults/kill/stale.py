"""Close in order, open, write, die: the snapshot of the close is not used again, not even where it came back."""

from __future__ import annotations

from pathlib import Path

from ..attack import Tally
from .cycles import ONLY_TORN, Cycles
from .life import Plan, Target
from .shared_log import Word
from .victim import Sign

_ROUNDS_OF_A_WORLD = 10
_BATCHES = 3


class StaleSnapshots(Cycles):
    """The row "stale snapshot", slab only. An iteration is a kill after a snapshot was used."""

    def __init__(self, folder: Path, seed: int, tally: Tally) -> None:
        super().__init__("slab", folder, seed, tally, ONLY_TORN)

    def _cycles(self, goal: int) -> None:
        """Rounds on one world: a life that closes, one that is killed, and so on."""
        for _ in range(min(goal - self.tally.iterations, _ROUNDS_OF_A_WORLD)):
            self._closes()
            kept = [(root / "snapshot").read_bytes() for root in self._scene.world.roots]
            self._dies()
            for root, data in zip(self._scene.world.roots, kept, strict=True):
                self.tally.expect(not (root / "snapshot").exists(), "a snapshot outlived the life that used it")
                if self.tally.iterations % 2:  # as if its removal had never reached the disk
                    (root / "snapshot").write_bytes(data)
                    (root / "snapshot").chmod(0o600)
                    self.tally.notes["snapshots that came back"] += 1

    def _closes(self) -> None:
        """A life that is not killed; what the killed one before it left must be found by scanning."""
        scene, tally = self._scene, self.tally
        before = dict(scene.oracle.acknowledged)
        victim = self._start(Plan(Target.CLOSE, self.rng.getrandbits(48), self._favourite(), _BATCHES))
        hangs = victim.wait_end() is Sign.NOTHING
        tally.hangs += hangs
        killed = victim.kill() if hangs else victim.reap()
        tally.expect(not killed and victim.status == 0, f"a life that was left alone failed: {scene.log.text}")
        used = scene.log.words[Word.FROM_SNAPSHOT]
        tally.expect(not used, f"{used} stale snapshots were used")
        tally.notes["stale snapshots used"] += used
        self._after(Plan(Target.CLOSE, 0, 0, 0), False, before)

    def _dies(self) -> None:
        """A life that begins from the snapshots and is killed while it writes."""
        scene, tally = self._scene, self.tally
        before = dict(scene.oracle.acknowledged)
        plan = Plan(Target.STORE, self.rng.getrandbits(48), self._favourite(), _BATCHES)
        victim = self._start(plan)
        sign = victim.wait()
        tally.hangs += sign is Sign.NOTHING
        self._wait(Target.STORE)
        killed = victim.kill()
        tally.expect(killed, f"a victim failed: {scene.log.text}")
        used = scene.log.words[Word.FROM_SNAPSHOT]
        tally.expect(used == len(scene.world.roots), f"{used} of {len(scene.world.roots)} snapshots were used")
        self._count(killed)
        self._after(plan, killed, before)

    def _favourite(self) -> int:
        return self.rng.randrange(self._scene.world.geometry.num_groups)
