"""One seed: several processes one after another on the same disks, with crashes between, and one without faults."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace

from kvtier.errors import KVTierError
from kvtier.options import TierOptions
from kvtier.stack.assembly import StackParts
from kvtier.stack.tier_stack import TierStack
from kvtier.tier.contract import LoadStore
from kvtier.tier.registry import discover
from kvtier.types.namespace import Namespace
from simulator.ages import AgeWatch, draw_age_plan
from simulator.disk import Disks, SimulatedRoot
from simulator.engine import KnownOffsets, SimulatedEngine
from simulator.fault_profile import FaultProfile, draw_fault_profile
from simulator.loop import VirtualLoop
from simulator.oracle import Oracle, SeedRecord
from simulator.patching import Opening, openings, patched_modules, without_threads_on_disk
from simulator.process import ProcessEnvironment, SimulatedProcess
from simulator.seed_plan import GPU_BLOCKS, Ending, SeedPlan, draw_seed_plan, with_hints, with_requests
from simulator.syscalls import SimulatedSystem
from simulator.tiers import ObservedTier, SimulatedCPU, SimulatedCPUOptions, SimulatedGPU, gpu_pages

PROCESS_SECONDS_MAX = 1000.0


@dataclass(frozen=True, slots=True)
class SeedOutcome:
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


BACKENDS = {"slab": "fs", "files": "shared_fs"}
"""The backend of each disk layout."""


class Simulator:
    """Runs seeds with the backend of a disk layout (`slab`: fs, `files`: shared_fs), or with another one.

    Raises ConfigError if none is installed.
    """

    def __init__(self, backend: type[LoadStore] | None = None, layout: str = "slab") -> None:
        self.backend = backend or discover().get(BACKENDS[layout])
        self.layout = layout
        self._openings: list[Opening] = []
        self._modules = 0

    def openings(self) -> list[Opening]:
        """Where the backend's package touches the machine; looked up again when more modules have been loaded."""
        if len(sys.modules) != self._modules:
            self._openings = openings(self.backend.__module__.partition(".")[0])
            self._modules = len(sys.modules)
        return self._openings

    def run(self, seed: int) -> SeedOutcome:
        """Run one seed. The log is silent meanwhile: the trace holds what happens."""
        log = logging.getLogger("kvtier")
        level = log.level
        log.setLevel(logging.CRITICAL + 1)
        try:
            return SeedRun(seed, self).run()
        finally:
            log.setLevel(level)


class SeedRun:
    """The disks, the record, and the processes of one seed. The texts of the random seeds must not change."""

    def __init__(self, seed: int, simulator: Simulator) -> None:
        self.rng = Random(f"kvtier world {seed}" if simulator.layout == "slab" else f"{simulator.layout} world {seed}")
        self.seed = seed
        self.backend = simulator.backend
        self.simulator = simulator
        plan = with_requests(draw_seed_plan(self.rng, simulator.layout), Random(f"policies of {seed}"))
        self.plan: SeedPlan = with_hints(plan, Random(f"hints of {seed}"))
        self.ages = (
            None if self.plan.shares_root else draw_age_plan(Random(f"ages of {seed}"), len(self.plan.endings) + 1)
        )
        self.disks = Disks(SimulatedRoot(root, self.plan.share_bytes) for root in self.plan.roots)
        self.record = SeedRecord()
        self.record.covered.update(f"seeds with {policy}" for policy in self.plan.policies)
        self.places = KnownOffsets()
        self.now = 0.0
        self.steps = 0
        self.boots = 0
        self.clock_off_seconds = 0.0
        self._pid = 1

    def run(self) -> SeedOutcome:
        """Run every process of the plan, then one without faults."""
        record = self.record
        record.trace.append((0.0, f"seed {self.seed}: {self.plan} {self.ages or ''}"))
        for ending in self.plan.endings:
            if not record.violations:
                self._run_process(ending, draw_fault_profile(self.rng), faultless=False)
        if not record.violations:
            self._run_process(Ending.CLOSE, FaultProfile(), faultless=True)
        covered = record.covered + self.disks.covered
        return SeedOutcome(self.seed, tuple(record.violations), tuple(record.trace), self.steps, self.now, covered)

    def _run_process(self, ending: Ending, fault_profile: FaultProfile, faultless: bool) -> None:
        if self.ages is not None:
            self.now += self.ages.pauses[self._pid - 1]
        self._pid += 1
        rng = Random(f"kvtier life {self._pid} of {self.seed}")
        loop = VirtualLoop(rng, self.now, PROCESS_SECONDS_MAX)
        system = SimulatedSystem(self.disks, loop, rng, self._pid)
        oracle = Oracle(self.record, loop)
        self._set_clock(system)
        oracle.note(f"a process begins that ends with {ending}; {fault_profile}")
        with without_threads_on_disk(), patched_modules(self.simulator.openings(), system):
            host = _ProcessHost(self, system, oracle)
            process = host.start(fault_profile, faultless)
            self.disks.land_orphans(rng, loop.outside)
            if ending is not Ending.CLOSE:
                host.plan_crash(process)
            try:
                ended = loop.run(process.run())
            except KVTierError as error:
                ended = False
                oracle.violation(f"{type(error).__name__}: {error}")
            system.kill()
            self._check_end(loop, oracle, ended, crashing=host.crashed)
            if not ended or host.crashed or ending is not Ending.CLOSE:
                self._crash(ending, host, oracle)
            process.count_coverage()
            oracle.muted = True
            loop.close()
            process.discard_stack()
        self.now = loop.time()
        self.steps += loop.steps

    def _set_clock(self, system: SimulatedSystem) -> None:
        """The clock is as far off as it was, and is set once more before or while this process runs, if at all."""
        system.clock_off_seconds = self.clock_off_seconds
        if self.ages is None or not self.ages.steps:
            return
        step = self.ages.steps[self._pid - 2]
        self.clock_off_seconds += step
        delay = Random(f"{self.seed} {self._pid}").choice((0.0, 0.05, 1.0))
        if not delay:
            system.clock_off_seconds = self.clock_off_seconds
        else:
            system.loop.outside(delay, partial(setattr, system, "clock_off_seconds", self.clock_off_seconds))

    def _check_end(self, loop: VirtualLoop, oracle: Oracle, ended: bool, crashing: bool) -> None:
        if loop.hang:
            oracle.violation(f"hang: {loop.hang}")
        if not crashing:
            for error in loop.errors:
                oracle.violation(f"uncaught exception: {error}")

    def _crash(self, ending: Ending, host: _ProcessHost, oracle: Oracle) -> None:
        oracle.note(f"{ending}")
        self.record.covered[f"crashes by {ending}" if host.crashed else f"{ending} after an orderly end"] += 1
        if ending is Ending.POWER_LOSS:
            for engine in host.engines:
                engine.land_before_power_fails()
            self.disks.lose_power(self.rng)
            self.boots += 1
        else:
            for engine in host.engines:
                self.disks.orphans += engine.orphans()


class _ProcessHost:
    """Builds one process on a simulated system, and decides when it crashes."""

    def __init__(self, run: SeedRun, system: SimulatedSystem, oracle: Oracle) -> None:
        self.run = run
        self.rng = system.rng
        self.system = system
        self.oracle = oracle
        self.engines: list[SimulatedEngine] = []
        self.crashed = False
        system.on_death = self._die_at_call
        system.on_time = self._die
        system.on_change = self._check_bound

    def start(self, fault_profile: FaultProfile, faultless: bool) -> SimulatedProcess:
        """The stack of this host, not open yet, and the process that uses it."""
        plan = self.run.plan
        gpu = gpu_pages(plan.layout, GPU_BLOCKS)
        options = SimulatedCPUOptions.model_validate(
            {"rows": plan.rows, "policy": plan.cpu_policy, "free_watermark": plan.watermark}
        )
        cpu = SimulatedCPU(options, gpu, self.oracle, self.rng)
        ages = None if self.run.ages is None else AgeWatch(self.run.ages, self.oracle, self.system.wall)
        fs = ObservedTier(self._fs(), self.oracle, ages)
        parts = StackParts(
            tiers=[cpu, fs],
            namespace=Namespace(plan.layout, model="simulated"),
            workers=[SimulatedGPU(TierOptions(type="gpu")) for _ in range(plan.layout.world_size)],
            engine_id="simulated",
            settings=plan.settings,
        )

        def set_fault_profile(new: FaultProfile) -> None:
            self.system.fault_profile = cpu.fault_profile = new

        environment = ProcessEnvironment(
            plan=plan,
            rng=self.rng,
            oracle=self.oracle,
            gpu=gpu,
            fs=fs,
            set_fault_profile=set_fault_profile,
            files_open=lambda: len(self.system.fds),
            temporaries=self._temporaries,
            counters=lambda: getattr(fs.inner, "counters", {}),
            ages=ages,
        )
        process = SimulatedProcess(TierStack(parts), environment, fault_profile, faultless)
        self.system.loop.check_sometimes = process.check
        return process

    def _temporaries(self) -> list[str]:
        folders = self.run.disks.folders.values()
        return sorted(name for folder in folders for name in folder.all_names() if name.startswith("new-"))

    def _fs(self) -> LoadStore:
        """The production backend on simulated hooks."""
        backend, system = self.run.backend, self.system
        limit = {} if self.run.ages is None else {"max_age": f"{self.run.ages.max_age_seconds}s"}
        options = backend.Options.model_validate(self.run.plan.fs | limit)
        if not self.run.plan.shares_root:
            hooks = sys.modules[backend.__module__].Hooks(
                engine=self._engine,
                random_bytes=self.rng.randbytes,
                checked_here_bytes=self.rng.choice((0, 4096, 1 << 20)),
                wall_ns=lambda: int(system.wall() * 1e9),
            )
            make: Callable[..., LoadStore] = backend
            return make(options, hooks)
        files = sys.modules[backend.__module__]
        root = self.run.plan.roots[0]
        holder = sys.modules[f"{backend.__module__.rpartition('.')[0]}.leases"].Holder(
            "simulated", f"boot {self.run.boots}", 1, system.pid, system.pid
        )
        shared: Callable[..., LoadStore] = backend
        return shared(
            options,
            files.FilesHooks(
                engine=lambda: self._engine(SimpleNamespace(path=root)),
                wall=system.wall,
                holder=lambda: holder,
                random_bytes=self.rng.randbytes,
            ),
        )

    def _engine(self, root: object) -> SimulatedEngine:
        path = getattr(root, "path", "")
        engine = SimulatedEngine(self.system, self.run.disks.folders[path], self.run.places, self.oracle)
        self.engines.append(engine)
        return engine

    def plan_crash(self, process: SimulatedProcess) -> None:
        """Decide when the process dies: at a system call, during a write or a reset, or at a random time."""
        rng, system = self.rng, self.system
        moment = rng.random()
        if moment < 0.25:
            system.die_at_call = rng.randint(1, 120)
        elif moment < 0.7:
            system.die_at_write = rng.choice((1, 2, 3, 5, 8, 13))
            return
        elif moment < 0.85:
            after = rng.choice((0.001, 0.1)) * rng.random()
            process.on_reset = lambda: system.loop.outside(after, self._die)
            return
        seconds = rng.choice((0.01, 0.1, 1.0, 5.0)) * rng.random()
        process.on_open = lambda: system.loop.outside(seconds, self._die)

    def _die(self) -> None:
        self.crashed = True
        self.system.kill()
        self.system.loop.stop()

    def _die_at_call(self) -> None:
        self.run.record.covered["crashes at a system call"] += 1
        self._die()

    def _check_bound(self) -> None:
        over = self.run.disks.over_bound()
        if over:
            self.oracle.violation(over)


def run_seed(seed: int, layout: str = "slab") -> SeedOutcome:
    """Run one seed, as `Simulator` does."""
    return Simulator(layout=layout).run(seed)
