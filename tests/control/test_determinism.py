"""The same calls give the same jobs, results and events: in any process, under any hash seed."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support_control import ROW_BYTES, World, cpu_setup, fs_setup, key, plane_settings, shared_setup
from support_paths import PROJECT, SUPPORT

from kvtier.types.jobs import GPUGroup, JobKind
from kvtier.types.keys import RequestId


class Recorder(World):
    """A world that writes down everything the plane says."""

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        self.trace: list[str] = []

    def collect(self) -> None:
        known, over = set(self.running) | set(self.late), set(self.results)
        super().collect()
        for job_id, emission in self.running.items():
            if job_id not in known:
                self.trace.append(describe(emission))
        for job_id, result in self.results.items():
            if job_id not in over:
                self.trace.append(f"result {job_id} {result.outcomes}")
        for event in self.plane.take_events():
            self.trace.append(f"event {event.medium} {event.removed} {[k.hex() for k in event.keys]}")


def describe(emission) -> str:
    job = emission.job
    groups = []
    for group in job.groups:
        keys = [k.hex() for k in group.keys]
        if isinstance(group, GPUGroup):
            places = [[p.tolist() for p in group.runs.pages()], group.rows.tolist(), group.generations.tolist()]
        else:
            places = [list(group.rows), list(group.slots), list(group.generations)]
        groups.append(f"{group.group} {keys} {' '.join(map(str, places))}")
    return f"job {job.job_id} {emission.position} {job.kind} {job.deadline} {job.epoch} {job.formats} {groups}"


def trace(seed: int, steps: int = 450) -> list[str]:
    """Everything a plane with three tiers says to a random engine on random disks."""
    rng = random.Random(seed)
    policy = rng.choice(["lru", "arc", "reuse"])
    lowers = [
        fs_setup(
            24, 4, (ROW_BYTES, 2 * ROW_BYTES), policy=policy, write_policy=rng.choice(["write_through", "on_evict"])
        ),
        shared_setup(hint_seconds=3.0, admit=rng.choice(["always", "second_use"])),
    ]
    world = Recorder(cpu_setup(14, policy, groups=2), lowers, limits=plane_settings(watermark_rows=2))
    for _ in range(steps):
        blocks = [key(rng.randrange(40), rng.randrange(2)) for _ in range(rng.randint(1, 9))]
        match rng.choice(
            ["store", "store", "load", "reserve", "cancel", "touch", "late", "late end", "reset", *["end"] * 6]
        ):
            case "store" | "load" as kind:
                world.submit(JobKind(kind), blocks, rng.choice([None, 1.0, 50.0]))
            case "reserve":
                world.plane.reserve(RequestId(f"r{rng.randrange(4)}"), blocks, world.now)
                world.plane.end_request(RequestId(f"r{rng.randrange(4)}"), world.now)
            case "cancel" if opened := [j for j in world.jobs if j not in world.results]:
                world.plane.cancel(rng.choice(opened), world.now)
            case "touch":
                world.plane.lookup(blocks, world.now)
                world.plane.touch(blocks)
            case "late" if timed := [j for j, e in world.running.items() if e.job.deadline is not None]:
                world.make_late(rng.choice(timed))
            case "late end" if world.late:
                world.end_late(rng.choice(list(world.late)), rng.random() < 0.5)
            case "reset" if rng.random() < 0.1:
                world.plane.reset(world.now)
                world.remote.clear()
            case "end" if world.running:
                fault = rng.choice([None, None, None, "failed", "corrupt"])
                world.finish(rng.choice(list(world.running)), fault, rng.randint(1, 3))
        world.pass_time(rng.choice([0.0, 0.01, 0.5]))
        world.check()
    return world.trace


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def run_elsewhere(seed: int, hash_seed: str) -> tuple[str, str]:
    """The digest of the trace from a process of its own, and a word that shows its hashes differ."""
    here = Path(__file__).resolve()
    code = f"import {here.stem} as t; print(t.digest(t.trace({seed})), hash('a'))"
    paths = [str(here.parent), str(PROJECT), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told, hashed = done.stdout.split()
    return told, hashed


def test_the_same_calls_give_the_same_jobs_under_two_hash_seeds(seed):
    here = trace(seed)
    assert len(here) > 200, "a trace that says little proves little"
    one, hashed_one = run_elsewhere(seed, "1")
    two, hashed_two = run_elsewhere(seed, "2")
    assert hashed_one != hashed_two
    assert one == two == digest(here)


@pytest.mark.parametrize("number", range(4))
def test_the_same_calls_give_the_same_jobs_in_one_process(number):
    first = trace(1000 + number, 150)
    assert first == trace(1000 + number, 150)
    assert first != trace(2000 + number, 150)
