"""Reset, then die at the N-th I/O call, for every N: nothing from before a reset that was acknowledged comes back."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import kvtier_fs.local.folder
import kvtier_fs.shared.bucket

from ..attack import Tally
from .life import Life, Plan, Target
from .oracle import Oracle
from .shared_log import SharedLog, Word
from .victim import Sign, Signals, Victim
from .warming import LIVES, warm_up
from .world import Tools, World

PARTS = (
    (("slab", 1, True), ("slab", 2, False), ("files", 1, True)),
    (("slab", 1, False), ("slab", 2, True), ("files", 1, False)),
)
_CALLS = (
    "open", "pwrite", "pwritev", "fsync", "fdatasync", "ftruncate", "rename", "replace", "link", "unlink",
    "mkdir", "fchmod", "utime",
)  # fmt: skip
_MODULES = (kvtier_fs.local.folder, kvtier_fs.shared.bucket)
_CHANGES = os.O_CREAT | os.O_WRONLY | os.O_RDWR
_ROWS_BEFORE, _ROWS_AFTER = 3, 1
_STEPS_MAX = 2000
_SECTOR = 512
_open = os.open


@dataclass(frozen=True, slots=True)
class Variant:
    """What is done at every step: the layout, its roots, how the session before ended; `half`: a write that is the
    last call does half of its work."""

    layout: str
    roots: int
    clean: bool
    half: bool


class Steps:
    """Counts this process's I/O calls once armed, and ends it just before, or half-way through, one of them."""

    def __init__(self, at: int, half: bool, log: SharedLog) -> None:
        self._at, self._half, self._log = at, half, log
        self._armed = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Count from here on, in a process that will not outlive it."""
        for name in _CALLS:
            setattr(os, name, self._counted(getattr(os, name), name in ("pwrite", "pwritev")))
        for module in _MODULES:
            module.fallocate = self._counted(module.fallocate, False)  # type: ignore[attr-defined]
        self._armed = True
        yield
        self._armed = False

    def _counted(self, call: Callable[..., Any], writes: bool) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **more: Any) -> Any:
            if self._armed and (call is not _open or args[1] & _CHANGES):
                self._log.words[Word.STEPS] += 1
                if self._log.words[Word.STEPS] == self._at:
                    if writes and self._half:
                        _do_half(call, *args)
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **more)

        return counted


def _do_half(call: Callable[..., Any], fd: int, data: Any, at: int) -> None:
    whole = b"".join(data) if isinstance(data, list) else bytes(data)
    half = len(whole) // 2 // _SECTOR * _SECTOR
    if half:
        call(fd, [whole[:half]] if isinstance(data, list) else whole[:half], at)


class ResetSteps:
    """The row "reset, then crash". Every world is kept as it was before the reset and put back for each step."""

    def __init__(self, folder: Path, seed: int, tally: Tally) -> None:
        self.folder, self.tally = folder, tally
        self._rng = random.Random(f"reset {seed}")
        self._signals = Signals()
        for layout in LIVES:
            warm_up(layout, folder, Tools(uring=False), self._signals)

    def run(self, rounds: int, part: int) -> None:
        """So many times one part of the variants, each at every step."""
        for number in range(rounds):
            for layout, roots, clean in PARTS[part]:
                self._every_step(Variant(layout, roots, clean, (number + part) % 2 == 0))
        self._signals.close()

    def _every_step(self, variant: Variant) -> None:
        world, log, oracle = self._before_reset(variant)
        eras, floor = (dict(world.eras), world.next_era), dict(oracle.acknowledged)
        kept = self.folder / "kept"
        (self.folder / "world").rename(kept)
        for step in range(1, _STEPS_MAX):
            shutil.copytree(kept, self.folder / "world", copy_function=shutil.copyfile)
            _private(self.folder / "world")
            world.eras, world.next_era = dict(eras[0]), eras[1]
            reached = self._step(variant, step, (world, log, Oracle(world)), floor)
            shutil.rmtree(self.folder / "world")
            if not reached:
                self.tally.notes[f"steps on {variant.layout}, {variant.roots} root(s)"] += step - 1
                break
        else:
            self.tally.expect(False, f"{variant}: more than {_STEPS_MAX} I/O calls")
        shutil.rmtree(kept)

    def _before_reset(self, variant: Variant) -> tuple[World, SharedLog, Oracle]:
        """A root with blocks in it, closed in order or not."""
        folder = self.folder / "world"
        folder.mkdir(mode=0o700)
        world = small_world(variant, folder, self._rng)
        log, oracle = SharedLog(world.log_shape), Oracle(world)
        life, seed = LIVES[variant.layout], self._rng.getrandbits(48)
        work = partial(_fill, life, world, log, seed, variant.clean, self._signals)
        victim = Victim(work, log, self._signals)
        self._ended(victim, log, "filling")
        oracle.absorb(log)
        log.clear()
        return world, log, oracle

    def _ended(self, victim: Victim, log: SharedLog, doing: str) -> bool:
        """Wait for a victim. True if it was killed, or killed itself."""
        sign = victim.wait_end()
        self.tally.hangs += sign is Sign.NOTHING
        self.tally.expect(sign is not Sign.NOTHING, f"a victim hangs while {doing}")
        killed = victim.kill() if sign is Sign.NOTHING else victim.reap()
        self.tally.expect(killed or victim.status == 0, f"a victim failed while {doing}: {log.text}")
        return killed

    def _step(self, variant: Variant, step: int, scene: tuple[World, SharedLog, Oracle], floor: dict[int, Any]) -> bool:
        """One life that ends at a step, and the next one, which opens. False if the life had fewer steps."""
        world, log, oracle = scene
        tally, life = self.tally, LIVES[variant.layout]
        seed = self._rng.getrandbits(48)
        log.clear()
        work = partial(_reset, life, world, log, seed, (step, variant.half), self._signals)
        self._ended(Victim(work, log, self._signals), log, "it resets")
        self._judge(oracle, log, floor, "before the reset")
        complaint = oracle.absorb(log)
        begun, done = log.words[Word.RESET_BEGUN], log.words[Word.RESET_DONE]
        reached = log.words[Word.STEPS] >= step
        log.clear()
        work = partial(_look, life, world, log, self._signals)
        self._ended(Victim(work, log, self._signals), log, f"it opens after {variant} step {step}")
        epoch = log.words[Word.EPOCH]
        complaint = complaint or ("" if epoch >= done else f"epoch {epoch} after the reset to {done} was acknowledged")
        tally.wrong_bytes += bool(complaint)
        tally.expect(not complaint, f"{variant} step {step}: {complaint}")
        tally.notes["killed before the reset was acknowledged"] += begun > done
        tally.notes["resets that held without an acknowledgement"] += epoch > done
        if epoch:
            tally.notes["blocks hit after a reset, all of them newer"] += self._judge(oracle, log, {}, f"step {step}")
        else:
            tally.notes["blocks hit where the reset did not hold"] += self._judge(oracle, log, {}, f"step {step}")
        tally.iterations += reached
        return reached

    def _judge(self, oracle: Oracle, log: SharedLog, floor: dict[int, Any], when: str) -> int:
        verdict = oracle.judge(log, floor)
        self.tally.wrong_bytes += len(verdict.complaints)
        self.tally.expect(not verdict.complaints, f"{when}: {verdict.complaints[:1]}")
        self.tally.expect(not verdict.lost, f"{when}: {verdict.lost} blocks did not come back")
        return verdict.verified


def small_world(variant: Variant, folder: Path, rng: random.Random) -> World:
    """A world of the smallest shape whose I/O is all system calls of this process."""
    while True:
        world = World(variant.layout, folder, rng, Tools(uring=False))
        if max(world.shape.block_bytes) < 1 << 16 and len(world.roots) == variant.roots:
            world.options = world.options.model_copy(update={"io_threads": 1})
            return world


def _private(folder: Path) -> None:
    """Copies are made with the umask's modes; roots must be private."""
    for name, folders, files in os.walk(folder):
        for each in folders:
            os.chmod(os.path.join(name, each), 0o700)
        for each in files:
            os.chmod(os.path.join(name, each), 0o600)


async def _fill(life: type[Life], world: World, log: SharedLog, seed: int, clean: bool, signals: Signals) -> None:
    one = life(world, log, Plan(Target.CLOSE, seed, 0, 1), signals.write)
    await one.begin()
    for _ in range(2):
        await one.batch(range(log.shape.load_rows, log.shape.load_rows + _ROWS_BEFORE))
    if clean:
        await one.close()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


async def _reset(
    life: type[Life], world: World, log: SharedLog, seed: int, end: tuple[int, bool], signals: Signals
) -> None:
    one = life(world, log, Plan(Target.RESET, seed, 0, 1), signals.write)
    await one.begin()
    with Steps(*end, log).armed():
        await one.raise_epoch()
        for _ in range(2):
            await one.batch(range(log.shape.load_rows, log.shape.load_rows + _ROWS_AFTER))
    os.kill(os.getpid(), signal.SIGKILL)


async def _look(life: type[Life], world: World, log: SharedLog, signals: Signals) -> None:
    await life(world, log, Plan(Target.LOAD, 0, 0, 1), signals.write).begin()
    os.kill(os.getpid(), signal.SIGKILL)
