"""Many requests that wait at once: a step costs what it does, and not what waits beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from support_control import World, below, cpu_setup, fs_setup, key

from kvtier.types.jobs import LOADED, STORED, JobKind, JobResult
from kvtier.types.keys import RequestId

ROWS = 32
DISTINCT = 48


@contextmanager
def counted() -> Iterator[list[int]]:
    """The number of calls of Python functions of the control plane within."""
    count = [0]

    def on_event(frame: object, event: str, _: object) -> None:
        count[0] += event == "call" and "/kvtier/control/" in frame.f_code.co_filename  # type: ignore[attr-defined]

    sys.setprofile(on_event)
    try:
        yield count
    finally:
        sys.setprofile(None)


def submit(world: World, kind: JobKind, *numbers: int) -> None:
    """A job beside which nothing is collected yet."""
    job = world.job(kind, [key(n) for n in numbers])
    world.jobs[job.job_id] = job
    world.plane.submit(job, world.now)


def with_loads(count: int, each: int = 1) -> World:
    """Loads of blocks that are on disk alone, and wait for it."""
    world = below(DISTINCT, rows=ROWS, slots=128)
    for i in range(count):
        submit(world, JobKind.LOAD, *(block(i, j) for j in range(each)))
    world.step()
    return world


def block(request: int, position: int = 0) -> int:
    """The oldest requests are of blocks of their own: nothing becomes of those of the others while they are served."""
    return 1 + request if request < 40 else 41 + (request + position) % (DISTINCT - 40)


def with_reservations(count: int) -> World:
    """Requests that reserve blocks that are on disk alone."""
    world = below(DISTINCT, rows=ROWS, slots=128)
    for i in range(count):
        reserve(world, str(i), block(i), block(i, 1))
    world.step()
    return world


def reserve(world: World, name: str, *numbers: int) -> None:
    world.plane.reserve(RequestId(name), [key(n) for n in numbers], world.now)


def with_stores(count: int) -> World:
    """Stores that wait for rows, which others fill."""
    world = World(cpu_setup(ROWS), [fs_setup(128)])
    for i in range(count):
        submit(world, JobKind.STORE, 5000 + i)
    world.step()
    return world


def end_one(world: World) -> None:
    """One job of a tier ends, and a step follows."""
    emission = world.running.pop(next(iter(world.running)))
    world.watch.done(emission.job.job_id)
    outcome = LOADED if emission.job.kind is JobKind.LOAD else STORED
    world.plane.finish(JobResult.uniform(emission.job, outcome), world.now)
    world.plane.pump(world.now)
    world.plane.next_deadline(world.now)


def calls_of_steps(world: World, ends: int = 10) -> int:
    """Of a step in which nothing has arrived, and of some in each of which a job of a tier has ended."""
    with counted() as count:
        world.plane.pump(world.now)
    for _ in range(ends):
        with counted() as more:
            end_one(world)
        count[0] += more[0]
        for emission in world.plane.collect().jobs:
            world.running[emission.job.job_id] = emission
    return count[0]


@pytest.mark.parametrize(
    "waiting",
    [with_loads, lambda count: with_loads(count, 3), with_reservations, with_stores],
    ids=["loads", "loads of three blocks", "reservations", "stores"],
)
def test_a_step_beside_ten_thousand_waiting_requests_takes_the_calls_of_one_beside_a_hundred(
    waiting: Callable[[int], World],
):
    few, many = calls_of_steps(waiting(100)), calls_of_steps(waiting(10_000))
    assert many <= 1.1 * few, (few, many)


@pytest.mark.parametrize("end", ["run", "deadline", "cancel"])
def test_four_times_the_loads_take_four_times_the_calls(end: str):
    """From their submission to their results: served, late all at once, or cancelled one by one."""

    def calls(count: int) -> int:
        world = below(DISTINCT, rows=ROWS, slots=128)
        with counted() as number:
            for i in range(count):
                submit(world, JobKind.LOAD, 1 + i % DISTINCT)
                world.step()
            if end == "deadline":
                world.pass_time(101.0)
            elif end == "cancel":
                for job_id in list(world.jobs):
                    world.plane.cancel(job_id, world.now)
            world.run_all()
        assert world.plane.idle
        assert len(world.results) == len(world.jobs)
        world.check()
        return number[0]

    few, many = calls(250), calls(1000)
    assert many <= 4.4 * few, (few, many)


def test_deadlines_of_jobs_that_have_ended_are_not_kept():
    world = below(1)
    for _ in range(2000):
        world.load(1)
        world.run_all()
    assert len(world.plane._open._deadlines) < 200
    for i in range(2000):
        reserve(world, str(i), 1)
        world.plane.end_request(RequestId(str(i)), world.now)
    assert len(world.plane.reservations._times) < 200


def test_a_load_that_waits_goes_on_with_whatever_becomes_of_its_block():
    """In a row by another's doing, stored anew, evicted below, or refused: no load waits for room that it needs not."""
    world = with_loads(200)
    waits = world.plane.control.awaited
    assert len(waits.ages) > 1
    gone = next(k for k in reversed(waits.ages) if k not in world.plane.control.cpu.directory)
    lower = world.plane.control.lowers[0].owned
    slot = lower.ready(gone)
    lower.discard(slot, lower.table.generation[slot])
    world.step()
    assert gone not in waits.ages
    world.run_all()
    assert world.plane.idle
    world.check()
    missing = [job_id for job_id, job in world.jobs.items() if gone in job.groups[0].keys and job.kind is JobKind.LOAD]
    assert missing
    assert all(world.statuses(job_id) == ["missing"] for job_id in missing)
