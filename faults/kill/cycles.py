"""Kill, damage, open again, compare: as often as asked, on worlds that are made anew every few dozen cycles."""

from __future__ import annotations

import os
import random
import shutil
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvtier_fs.io.uring import probe_uring

from ..attack import Tally
from .companion import Companion, holders
from .damage import Lost, SlabFiles, SlabLate, in_flight
from .files_damage import BlockFiles, FilesLate
from .life import Life, Plan, Target
from .oracle import Oracle
from .shared_log import SharedLog, Word
from .victim import Sign, Signals, Stacks, Victim, pause_until
from .warming import LIVES, warm_up
from .world import Tools, World

CYCLES_OF_A_WORLD = 80
_LATE_SECONDS = 0.08
_CAUGHT_SECONDS = 0.01
_DELAY_SECONDS = {Target.STORE: 0.004, Target.LOAD: 0.004, Target.RESET: 0.008, Target.CLOSE: 0.012}
_RESET_SECONDS = 0.5
_COUNTED = {
    "blocks stored": Word.STORED,
    "stores refused": Word.REFUSED,
    "blocks evicted": Word.EVICTED,
    "regions formatted again": Word.REFORMATTED,
    "blocks checked by living victims": Word.CHECKED,
    "misses of living victims": Word.MISSED,
    "opened from a snapshot": Word.FROM_SNAPSHOT,
}


@dataclass(frozen=True, slots=True)
class Mix:
    """What the cycles are made of: during what victims are killed (weights), how many deaths are followed by late
    writes, how many by torn blocks as a power loss leaves them, how many of the kills must catch I/O, after how many
    a companion begins (all shares)."""

    targets: dict[Target, int]
    late: float
    power: float
    caught: float
    companions: float = 0.0


ORDINARY = Mix(
    {Target.STORE: 72, Target.OPEN: 8, Target.LOAD: 8, Target.RESET: 6, Target.CLOSE: 6}, 0.13, 0.1, 0.65, 0.05
)
ALL_LATE = Mix({Target.STORE: 1}, 1.0, 0.0, 1.0)
ONLY_TORN = Mix({Target.STORE: 1}, 0.0, 0.0, 1.0)


@dataclass(slots=True)
class Scene:
    """One world and what observes it."""

    world: World
    log: SharedLog
    oracle: Oracle
    damage: SlabFiles | BlockFiles
    late: SlabLate | FilesLate | None = None
    left: set[str] = field(default_factory=set)
    open_seconds: float = 0.02
    companion: Companion | None = None


class Cycles:
    """Kills on one layout. `tally` takes what is found; an iteration is a kill."""

    def __init__(self, layout: str, folder: Path, seed: int, tally: Tally, mix: Mix = ORDINARY) -> None:
        self.mix = mix
        self.layout, self.folder, self.tally = layout, folder, tally
        self._life = LIVES[layout]
        self.rng = random.Random(f"{layout} {seed}")
        self._tools = Tools(uring=not probe_uring())
        self._signals, self._stacks = Signals(), Stacks()
        self._scene: Scene
        warm_up(layout, folder, self._tools, self._signals)

    def run(self, kills: int) -> None:
        """Go on until so many victims were killed."""
        files = len(os.listdir("/proc/self/fd"))
        while self.tally.iterations < kills:
            self._scene = self._new_scene()
            self._cycles(kills)
            self._last_life()
            shutil.rmtree(self.folder / "world")
            left = len(os.listdir("/proc/self/fd")) - files
            self.tally.leaks += max(0, left)
            self.tally.expect(left <= 0, f"{left} descriptors of the harness stay open")
        self._signals.close()
        self._stacks.close()

    def _cycles(self, goal: int) -> None:
        """Cycles on one world, until so many iterations are done."""
        for _ in range(CYCLES_OF_A_WORLD):
            if self.tally.iterations < goal:
                self._cycle()
                self._accompany()
        self._part()

    def _accompany(self) -> None:
        """Layout files, now and then: another process on the root, which sees some victims die, and then dies."""
        scene, rng = self._scene, self.rng
        if scene.companion is not None:
            scene.companion.years -= 1
            if scene.companion.years < 0:
                self._part()
        elif self.layout == "files" and rng.random() < self.mix.companions:
            scene.companion = Companion(scene.world, rng.getrandbits(48), rng.randint(1, 8))

    def _part(self) -> None:
        """The companion dies, if there is one, and is judged as any victim."""
        scene, tally = self._scene, self.tally
        companion, scene.companion = scene.companion, None
        if companion is None:
            return
        killed = companion.kill()
        tally.expect(killed, f"a companion failed: {companion.log.text}")
        self._count(killed)
        tally.notes["companions killed"] += killed
        lost = self._note_death(companion.log, companion.plan, killed, {})
        tally.notes["torn slots"] += scene.damage.tear(lost, self.rng)
        scene.left = leftovers(scene.world.roots[0])

    def _new_scene(self) -> Scene:
        folder = self.folder / "world"
        folder.mkdir(mode=0o700)
        world = World(self.layout, folder, self.rng, self._tools)
        damage = SlabFiles(world) if self.layout == "slab" else BlockFiles(world)
        return Scene(world, SharedLog(world.log_shape), Oracle(world), damage)

    def _plan(self) -> Plan:
        scene, rng = self._scene, self.rng
        target = rng.choices(list(self.mix.targets), list(self.mix.targets.values()))[0]
        if scene.late is not None or (scene.companion is not None and target is Target.RESET):
            target = Target.STORE  # two processes that share a root are reset both or not at all
        favourite = rng.randrange(scene.world.geometry.num_groups)
        return Plan(target, rng.getrandbits(48), favourite, rng.randint(1, 12), scene.late is not None)

    def _start(self, plan: Plan) -> Victim:
        scene = self._scene
        scene.log.clear()
        work = partial(_live, self._life, scene.world, scene.log, plan, self._signals.write)
        return Victim(work, scene.log, self._signals)

    def _cycle(self) -> None:
        scene, tally = self._scene, self.tally
        plan = self._plan()
        before = dict(scene.oracle.acknowledged)
        victim = self._start(plan)
        sign = victim.wait()
        if sign is Sign.READY:
            if scene.late is not None:
                self._land_late(scene, scene.late)
            self._wait(plan.target)
        elif sign is Sign.NOTHING:
            tally.hangs += 1
            tally.expect(
                False, f"to be killed during {plan.target.value}, a victim hangs: {self._stacks.of(victim.pid)}"
            )
        killed = victim.kill()
        self._count(killed)
        if not killed:
            tally.notes["ended before they were killed"] += 1
            tally.expect(os.waitstatus_to_exitcode(victim.status) == 0, f"a victim failed: {scene.log.text}")
        self._after(plan, killed, before)

    def _count(self, killed: bool) -> None:
        self.tally.iterations += killed
        self.tally.notes["kills"] += killed

    def _land_late(self, scene: Scene, late: SlabLate | FilesLate) -> None:
        """Let the old writes land once their places were used again, while the victim lives."""
        until = time.perf_counter() + _LATE_SECONDS
        while late.waiting and time.perf_counter() < until and not scene.log.words[Word.IDLE]:
            late.look(scene.log)
            time.sleep(0.0002)
        late.finish()

    def _wait(self, target: Target) -> None:
        """The random moment of the kill; on the way the bound is looked at once."""
        words = self._scene.log.words
        if target is Target.RESET and self.rng.random() < 0.5:  # until it is acknowledged
            until = time.perf_counter() + _RESET_SECONDS
            while not words[Word.RESET_DONE] and time.perf_counter() < until:
                time.sleep(0.0002)
        begun = time.perf_counter()
        longest = _DELAY_SECONDS.get(target, self._scene.open_seconds)
        moment = begun + self.rng.random() ** (3 if target is Target.CLOSE else 1) * longest  # a close may be quick
        if self.rng.random() < 0.3:
            pause_until(begun + self.rng.random() * (moment - begun))
            self._look_at_bound("while a victim lives")
        pause_until(moment)
        notes = self.tally.notes
        if target is Target.STORE and notes["kills with I/O in flight"] < self.mix.caught * (notes["kills"] + 1):
            while words[Word.SUBMITTED] == words[Word.ENDED] and time.perf_counter() < moment + _CAUGHT_SECONDS:
                time.sleep(0.0001)

    def _look_at_bound(self, when: str) -> None:
        world = self._scene.world
        blocks, sizes = held(world.roots)
        over = max(blocks, sizes) - world.capacity
        self.tally.notes["looks at the bound"] += 1
        self.tally.over_bound += over > 0
        self.tally.expect(over <= 0, f"{over} bytes over the bound of {world.capacity} {when}")

    # -- after a death -------------------------------------------------------------------------------------------

    def _after(self, plan: Plan, killed: bool, before: dict[int, tuple[int, int]]) -> None:
        scene = self._scene
        if scene.companion is not None:
            scene.oracle.learn(scene.companion.log)
        lost = self._note_death(scene.log, plan, killed, before)
        if scene.log.words[Word.OPENED]:
            scene.open_seconds = 0.8 * scene.open_seconds + 0.2 * scene.log.words[Word.OPEN_NS] / 1e9
        self._end_late_writes()
        self._left_behind(scene.log)
        self._damage(lost)
        self._look_at_bound("after a kill")

    def _note_death(self, log: SharedLog, plan: Plan, killed: bool, before: dict[int, tuple[int, int]]) -> list[Lost]:
        """Judge what a dead process loaded and did. Returns its writes that had not ended."""
        tally, words, lost = self.tally, log.words, in_flight(log)
        self._judge(log, before)
        complaint = self._scene.oracle.absorb(log)
        tally.wrong_bytes += bool(complaint) + words[Word.WRONG]
        tally.expect(not complaint, complaint)
        tally.expect(not words[Word.WRONG], log.text)
        for name, word in _COUNTED.items():
            tally.notes[name] += words[word]
        if killed:
            tally.notes["kills with I/O in flight"] += words[Word.SUBMITTED] > words[Word.ENDED]
            tally.notes["kills with writes in flight"] += bool(lost)
            tally.notes[f"kills during {plan.target.value}"] += 1
        tally.notes["resets acknowledged"] += bool(words[Word.RESET_DONE])
        return lost

    def _judge(self, log: SharedLog, before: dict[int, tuple[int, int]]) -> None:
        tally = self.tally
        verdict = self._scene.oracle.judge(log, before)
        tally.wrong_bytes += len(verdict.complaints)
        for complaint in verdict.complaints:
            tally.expect(False, complaint)
        tally.notes["blocks loaded after opening and compared"] += verdict.verified
        tally.notes["blocks refused after opening"] += verdict.corrupt
        tally.notes["blocks missing after opening"] += verdict.missing
        tally.notes["blocks expected back"] += verdict.expected
        tally.notes["expected blocks that were lost"] += verdict.lost

    def _end_late_writes(self) -> None:
        scene = self._scene
        if scene.late is None:
            return
        scene.late.finish()
        self.tally.notes["late writes"] += scene.late.landed
        self.tally.notes["late writes into places used again"] += scene.late.landed_after_reuse
        self.tally.notes["cycles with late writes"] += bool(scene.late.landed_after_reuse)
        scene.late = None
        scene.oracle.forget_all()

    def _left_behind(self, log: SharedLog) -> None:
        """What dead processes left must be gone once this process has swept. What it leaves itself is for the next one
        to remove, and what a companion has is its own."""
        scene, tally = self._scene, self.tally
        if self.layout != "files":
            return
        names = leftovers(scene.world.roots[0])
        if scene.companion is not None:
            lease = scene.companion.owns()
            names = {name for name in names if lease is not None and lease not in name}
        stayed = scene.left & names if log.words[Word.SWEPT] else set()
        tally.leaks += len(stayed)
        tally.expect(not stayed, f"not swept: {sorted(stayed)}")
        tally.notes["temporaries and leases left by the dead"] += len(names - scene.left)
        scene.left = names - stayed

    def _damage(self, lost: list[Lost]) -> None:
        scene, rng = self._scene, self.rng
        if rng.random() < self.mix.power:
            self.tally.notes["acknowledged writes torn as by a power loss"] += scene.damage.tear_ended(scene.log, rng)
            scene.oracle.forget_all()
        scene.damage.note(scene.log)
        notes = self.tally.notes
        if lost and notes["cycles with late writes"] < self.mix.late * (notes["kills"] + 1):
            scene.late = scene.damage.keep(lost, rng)
        self.tally.notes["torn slots"] += scene.damage.tear(lost, rng)

    def _last_life(self) -> None:
        """A victim that is not killed: it opens, loads, stores some and closes. Dead processes leave nothing."""
        scene, tally = self._scene, self.tally
        self._end_late_writes()
        before = dict(scene.oracle.acknowledged)
        victim = self._start(Plan(Target.CLOSE, self.rng.getrandbits(48), 0, 1))
        sign = victim.wait_end()
        if sign is Sign.NOTHING:
            tally.hangs += 1
            tally.expect(False, f"a victim that was left alone hangs: {self._stacks.of(victim.pid)}")
            victim.kill()
            return
        victim.reap()
        tally.expect(victim.status == 0, f"the last victim failed: {scene.log.text}")
        self._judge(scene.log, before)
        self._left_behind(scene.log)
        self._look_at_bound("after a close")
        if self.layout == "files":
            left = leftovers(scene.world.roots[0])
            tally.leaks += len(left)
            tally.expect(not left, f"left after all processes are gone: {sorted(left)}")
        else:
            names = {name for root in scene.world.roots for name in os.listdir(root)}
            tally.expect("snapshot.new" not in names, "a snapshot that was never finished is left")


async def _live(life: type[Life], world: World, log: SharedLog, plan: Plan, signal: int) -> None:
    await life(world, log, plan, signal).run()


def held(roots: list[Path]) -> tuple[int, int]:
    """Bytes of disk of everything in these roots, as the file system counts them, and the sum of the files' sizes.

    A file that is renamed meanwhile counts once.
    """
    blocks: dict[tuple[int, int], int] = {}
    sizes: dict[tuple[int, int], int] = {}
    for root in roots:
        for folder, _, names in os.walk(root):
            for path in [folder, *(os.path.join(folder, name) for name in names)]:
                try:
                    status = os.lstat(path)
                except FileNotFoundError:
                    continue
                blocks[status.st_dev, status.st_ino] = status.st_blocks * 512
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(blocks.values()), sum(sizes.values())


def leftovers(root: Path) -> set[str]:
    """Temporaries in a root of layout `files`, and leases that name a process."""
    return holders(root).keys() | {name for _, _, names in os.walk(root) for name in names if name.startswith("new-")}
