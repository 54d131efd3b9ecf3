"""Many requests that wait at once: a step costs what it does, and not what waits beside it."""

from __future__ import annotations

import sys

import pytest
from support_control import World, below, cpu_setup, fs_setup, key, shared_setup

from kvtier.types.jobs import JobKind
from kvtier.types.keys import RequestId

ROWS = 32
DISTINCT = 48


class Calls:
    """Counts calls of Python functions of the control plane."""

    def __init__(self) -> None:
        self.count = 0

    def _event(self, frame: object, event: str, _: object) -> None:
        self.count += event == "call" and "/kvtier/control/" in frame.f_code.co_filename  # type: ignore[attr-defined]

    def __enter__(self) -> Calls:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def waiting_loads(count: int, each: int = 1) -> World:
    """Loads of blocks that are on disk alone, and that wait for it."""
    world = below(DISTINCT, rows=ROWS)
    for i in range(count):
        numbers = [1 + (i + j) % DISTINCT for j in range(each)]
        world.plane.submit(world.job(JobKind.LOAD, [key(n) for n in numbers]), world.now)
    world.step()
    return world


def calls_of_steps(world: World, steps: int = 12) -> int:
    """Of steps in which nothing has arrived, and of some in which a promotion and then the copies have ended."""
    with Calls() as calls:
        world.plane.pump(world.now)
        for _ in range(steps):
            job_id = next(iter(world.running))
            emission = world.running.pop(job_id)
            world.watch.done(job_id)
            world.plane.finish(world_result(emission), world.now)
            world.plane.pump(world.now)
            world.collect()
            world.plane.next_deadline(world.now)
    return calls.count


def world_result(emission):
    from kvtier.types.jobs import LOADED, JobResult

    return JobResult.uniform(emission.job, LOADED)


@pytest.mark.parametrize("each", [1, 3])
def test_a_step_beside_ten_thousand_waiting_loads_takes_the_calls_of_one_beside_a_hundred(each):
    few, many = calls_of_steps(waiting_loads(100, each)), calls_of_steps(waiting_loads(10_000, each))
    assert many <= 1.1 * few
