"""One seed: a plan, several lives on the same disks with crashes between them, and a calm day at the end."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

from kvtier.errors import KVTierError
from kvtier.loadstore import LoadStore
from kvtier.namespace import Namespace
from kvtier.options import TierOptions
from kvtier.registry import discover
from kvtier.stack.assembly import StackParts
from kvtier.stack.tierstack import TierStack
from kvtier.testing.world.disk import Disks, RootFolder
from kvtier.testing.world.engine import Places, SimulatedEngine
from kvtier.testing.world.inhabit import Opening, inhabit, openings
from kvtier.testing.world.life import Life, Surroundings
from kvtier.testing.world.loop import VirtualLoop
from kvtier.testing.world.plan import GPU_BLOCKS, Ending, Plan, draw_plan
from kvtier.testing.world.system import System
from kvtier.testing.world.tiers import SimulatedCPU, SimulatedCPUOptions, SimulatedGPU, Witness, gpu_pages
from kvtier.testing.world.watch import Record, Watch
from kvtier.testing.world.weather import Weather, draw_weather

LIFE_SECONDS_MAX = 1000.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed. `violations` is empty if every promise was kept; `covered` counts what it went through."""

    seed: int
    violations: tuple[str, ...]
    events: tuple[tuple[float, str], ...]
    steps: int
    virtual_seconds: float
    covered: Counter[str]

    @property
    def trace(self) -> tuple[str, ...]:
        """All that happened, with virtual times."""
        return tuple(f"{when:12.6f} {text}" for when, text in self.events)

    @property
    def digest(self) -> str:
        """Of the trace."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]


class Simulator:
    """Lives through seeds with one fs backend, the installed one unless another is given, in one of its layouts.

    Raises ConfigError if none is installed.
    """

    def __init__(self, backend: type[LoadStore] | None = None, layout: str = "slab") -> None:
        self.backend = backend or discover().get("fs")
        self.layout = layout
        self._openings: list[Opening] = []
        self._modules = 0

    def openings(self) -> list[Opening]:
        """Where the backend's package touches the machine; looked up again when more modules have been loaded."""
        if len(sys.modules) != self._modules:
            self._openings = openings(self.backend.__module__.partition(".")[0])
            self._modules = len(sys.modules)
        return self._openings

    def run(self, seed: int) -> Outcome:
        """Live through one seed. The log is silent meanwhile: what happens is in the trace."""
        log = logging.getLogger("kvtier")
        level = log.level
        log.setLevel(logging.CRITICAL + 1)
        try:
            return World(seed, self).run()
        finally:
            log.setLevel(level)


class World:
    """The disks, the record, and the process that lives at the moment."""

    def __init__(self, seed: int, simulator: Simulator) -> None:
        self.dice = Random(f"kvtier world {seed}" if simulator.layout == "slab" else f"{simulator.layout} world {seed}")
        self.seed = seed
        self.backend = simulator.backend
        self.simulator = simulator
        self.plan: Plan = draw_plan(self.dice, simulator.layout)
        self.disks = Disks(RootFolder(root, self.plan.share_bytes) for root in self.plan.roots)
        self.record = Record()
        self.places = Places()
        self.now = 0.0
        self.steps = 0
        self.boots = 0
        self._pid = 1

    def run(self) -> Outcome:
        """All lives, and a calm one."""
        record = self.record
        record.trace.append((0.0, f"seed {self.seed}: {self.plan}"))
        for ending in self.plan.endings:
            if not record.violations:
                self._live(ending, draw_weather(self.dice), calm=False)
        if not record.violations:
            self._live(Ending.CLOSE, Weather(), calm=True)
        covered = record.covered + self.disks.covered
        return Outcome(self.seed, tuple(record.violations), tuple(record.trace), self.steps, self.now, covered)

    def _live(self, ending: Ending, weather: Weather, calm: bool) -> None:
        self._pid += 1
        dice = Random(f"kvtier life {self._pid} of {self.seed}")
        loop = VirtualLoop(dice, self.now, LIFE_SECONDS_MAX)
        system = System(self.disks, loop, dice, self._pid)
        watch = Watch(self.record, loop)
        watch.note(f"a life begins that ends with {ending}; {weather}")
        with inhabit(self.simulator.openings(), system):
            process = _Process(self, system, watch)
            life = process.born(weather, calm)
            self.disks.haunt(dice, loop.outside)
            if ending is not Ending.CLOSE:
                process.doom(life)
            try:
                ended = loop.run(life.run())
            except KVTierError as error:
                ended = False
                watch.complain(f"{type(error).__name__}: {error}")
            system.kill()
            self._judge(loop, watch, ended, crashing=process.crashed)
            if not ended or process.crashed or ending is not Ending.CLOSE:
                self._crash(ending, process, watch)
            life.sum_up()
            watch.deaf = True
            loop.close()
            life.bury()
        self.now = loop.time()
        self.steps += loop.steps

    def _judge(self, loop: VirtualLoop, watch: Watch, ended: bool, crashing: bool) -> None:
        if loop.hang:
            watch.complain(f"hang: {loop.hang}")
        if not crashing:
            for error in loop.errors:
                watch.complain(f"nobody caught {error}")

    def _crash(self, ending: Ending, process: _Process, watch: Watch) -> None:
        watch.note(f"{ending}")
        self.record.covered[f"crashes by {ending}" if process.crashed else f"{ending} after an orderly end"] += 1
        if ending is Ending.POWER_LOSS:
            for engine in process.engines:
                engine.land_before_power_fails()
            self.disks.lose_power(self.dice)
            self.boots += 1
        else:
            for engine in process.engines:
                self.disks.orphans += engine.orphans()


class _Process:
    """One process: its system, its engines, its stack."""

    def __init__(self, world: World, system: System, watch: Watch) -> None:
        self.world = world
        self.dice = system.dice
        self.system = system
        self.watch = watch
        self.engines: list[SimulatedEngine] = []
        self.crashed = False
        system.on_death = self._die_at_call
        system.on_time = self._die
        system.on_change = self._check_bound

    def born(self, weather: Weather, calm: bool) -> Life:
        """The stack of this process, not open yet, and the life that uses it."""
        plan = self.world.plan
        gpu = gpu_pages(plan.layout, GPU_BLOCKS)
        options = SimulatedCPUOptions.model_validate(
            {"rows": plan.rows, "policy": plan.cpu_policy, "free_watermark": plan.watermark}
        )
        cpu = SimulatedCPU(options, gpu, self.watch, self.dice)
        fs = Witness(self._fs(), self.watch)
        parts = StackParts(
            tiers=[cpu, fs],
            namespace=Namespace(plan.layout, model="simulated"),
            workers=[SimulatedGPU(TierOptions(type="gpu")) for _ in range(plan.layout.world_size)],
            engine_id="simulated",
            settings=plan.settings,
        )

        def set_weather(new: Weather) -> None:
            self.system.weather = cpu.weather = new

        around = Surroundings(
            plan=plan,
            dice=self.dice,
            watch=self.watch,
            gpu=gpu,
            fs=fs,
            set_weather=set_weather,
            files_open=lambda: len(self.system.fds),
            temporaries=self._temporaries,
            counters=lambda: getattr(fs.inner, "counters", {}),
        )
        life = Life(TierStack(parts), around, weather, calm)
        self.system.loop.now_and_then = life.check
        return life

    def _temporaries(self) -> list[str]:
        folders = self.world.disks.folders.values()
        return sorted(name for folder in folders for name in folder.all_names() if name.startswith("new-"))

    def _fs(self) -> LoadStore:
        """The production backend on simulated seams."""
        backend, system = self.world.backend, self.system
        options = backend.Options.model_validate(self.world.plan.fs)
        if not self.world.plan.shares_root:
            seams = sys.modules[backend.__module__].Seams(
                engine=self._engine,
                random_bytes=self.dice.randbytes,
                checked_here_bytes=self.dice.choice((0, 4096, 1 << 20)),
            )
            make: Callable[..., LoadStore] = backend
            return make(options, seams)
        files = sys.modules[f"{backend.__module__.partition('.')[0]}.files.backend"]
        root = self.world.plan.roots[0]
        holder = sys.modules[f"{backend.__module__.partition('.')[0]}.files.leases"].Holder(
            "simulated", f"boot {self.world.boots}", 1, system.pid, system.pid
        )
        made: LoadStore = files.FilesBackend(
            options,
            files.FilesSeams(
                engine=lambda: self._engine(SimpleNamespace(path=root)),
                wall=system.wall,
                holder=lambda: holder,
                random_bytes=self.dice.randbytes,
            ),
        )
        return made

    def _engine(self, root: object) -> SimulatedEngine:
        path = getattr(root, "path", "")
        engine = SimulatedEngine(self.system, self.world.disks.folders[path], self.world.places, self.watch)
        self.engines.append(engine)
        return engine

    def doom(self, life: Life) -> None:
        """Decide when the process dies: at a system call, with a write under way, in or after a reset, or just so."""
        dice, system = self.dice, self.system
        die = dice.random()
        if die < 0.25:
            system.die_at_call = dice.randint(1, 120)
        elif die < 0.7:
            system.die_at_write = dice.choice((1, 2, 3, 5, 8, 13))
            return
        elif die < 0.85:
            after = dice.choice((0.001, 0.1)) * dice.random()
            life.on_reset = lambda: system.loop.outside(after, self._die)
            return
        seconds = dice.choice((0.01, 0.1, 1.0, 5.0)) * dice.random()
        life.on_open = lambda: system.loop.outside(seconds, self._die)

    def _die(self) -> None:
        self.crashed = True
        self.system.kill()
        self.system.loop.stop()

    def _die_at_call(self) -> None:
        self.world.record.covered["crashes at a system call"] += 1
        self._die()

    def _check_bound(self) -> None:
        over = self.world.disks.over_bound()
        if over:
            self.watch.complain(over)


def run_seed(seed: int, layout: str = "slab") -> Outcome:
    """Live through one seed, as `Simulator` does."""
    return Simulator(layout=layout).run(seed)
