"""Hints cost a bounded amount of work in a call and in a step, and nothing is queued twice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import pytest
from support_control import ROW_BYTES, World, cpu_setup, fs_setup, key
from support_control import below as below_rows

from kvtier.control.hints.following import BLOCKS_AT_ONCE, BLOCKS_MAX
from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.types.hints import Demote, HintRefusal, HintResult, Pin, Prefetch, Release, Retain
from kvtier.types.jobs import JobKind
from kvtier.types.keys import OffloadKey


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def allowed(setup: TierSpec, blocks: int) -> TierSpec:
    """A tier that may retain so many blocks."""
    return replace(setup, retained_bytes_max=blocks * ROW_BYTES)


def calls_of(step: Callable[[], object]) -> int:
    """How many Python functions of the control plane a step calls."""
    count = 0

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and "/kvtier/control/" in frame.f_code.co_filename

    sys.setprofile(on_event)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def large(blocks: int, **more: object) -> World:
    """A world with blocks 1 .. `blocks` in rows, which all may be retained."""
    world = World(allowed(cpu_setup(2 * blocks), blocks), [allowed(fs_setup(4 * blocks, **more), blocks)])
    world.store(*range(1, blocks + 1))
    world.finish(world.under_way(0, JobKind.STORE)[0])
    return world


@pytest.mark.parametrize("said", [Retain, Pin, Demote])
def test_a_call_and_a_step_look_at_a_bounded_number_of_blocks(said):
    """Sixteen times the blocks cost a call, and each of the steps that go on with them, no more."""

    def most(blocks: int) -> tuple[int, int]:
        world = large(blocks, write_policy="on_evict")
        names = keys(*range(1, blocks + 1))
        whole = said(names) if said is Demote else said(names, 60.0, "s")
        call = calls_of(lambda: world.plane.hint(whole, world.now))
        steps = [calls_of(lambda: world.plane.pump(world.now)) for _ in range(3)]
        return call, max(steps)

    (few, step_few), (many, step_many) = most(4 * BLOCKS_AT_ONCE // 2), most(8 * BLOCKS_AT_ONCE)
    assert many <= 1.1 * few
    assert step_many <= 1.1 * step_few + 200


def test_what_one_call_does_not_look_at_the_next_steps_do():
    blocks = 3 * BLOCKS_AT_ONCE
    world = large(blocks)
    world.collect()
    result = world.plane.hint(Retain(keys(*range(1, blocks + 1), 9999), 60.0, "s"), world.now)
    assert result == HintResult(blocks + 1)
    retention = world.plane.hints.retention
    assert len(retention.keys_of("s", blocks)) == BLOCKS_AT_ONCE
    assert not world.plane.idle
    world.step()
    assert world.plane.next_deadline(world.now) == world.now + 0.001
    for _ in range(2):
        world.step()
    assert len(retention.keys_of("s", blocks)) == blocks
    assert world.plane.hints.refused["retain", "not_found"] == 1
    world.check()


def test_a_release_ends_what_waits_to_be_retained_and_a_closing_stack_counts_it():
    blocks = 3 * BLOCKS_AT_ONCE
    world = large(blocks)
    names = keys(*range(1, blocks + 1))
    world.plane.hint(Retain(names, 60.0, "s"), world.now)
    world.plane.hint(Retain(names, 60.0, "t"), world.now)
    assert world.plane.hint(Release("s"), world.now) == HintResult(BLOCKS_AT_ONCE)
    world.plane.close(world.now)
    assert world.plane.hints.refused["retain", "stopped"] == blocks
    world.run_all()
    world.check()


def test_hints_that_wait_are_bounded_and_what_is_over_is_refused():
    world = large(8)
    many = keys(*range(10_000, 10_000 + 2 * BLOCKS_MAX))
    first = world.plane.hint(Demote(many), world.now)
    assert first.refused == {HintRefusal.NOT_FOUND: BLOCKS_AT_ONCE, HintRefusal.QUEUE_FULL: BLOCKS_MAX}
    for _ in range(4):
        last = world.plane.hint(Demote(many), world.now)
    assert last == HintResult(0, {HintRefusal.QUEUE_FULL: 2 * BLOCKS_MAX})


@pytest.mark.parametrize("said", [Retain, Demote])
def test_what_is_said_again_is_not_queued_again(said):
    world = large(32, write_policy="on_evict", inflight_blocks=4)
    names = keys(*range(1, 33))
    for _ in range(256):
        world.plane.hint(said(names) if said is Demote else said(names, 60.0, "s"), world.now)
        world.plane.pump(world.now)
    assert len(world.plane.control.lowers[0].queue) <= 32
    world.collect()
    world.run_all()
    assert world.plane.control.counters(1).stored == 32
    world.check()


def test_a_prefetch_that_is_said_again_takes_no_more_room_of_the_queue():
    world = below_rows(16, rows=32)
    for _ in range(10):
        assert world.plane.hint(Prefetch(keys(*range(1, 17))), world.now).ok
    assert world.plane.hints.prefetches.waiting == 16


def test_a_step_beside_eight_thousand_waiting_prefetches_takes_the_calls_of_one_beside_eighty():
    def calls(count: int) -> int:
        world = below_rows(100, rows=256, slots=1024)
        for number in [*range(1, 101), *range(5000, 5000 + count)]:
            world.plane.hint(Prefetch(keys(number)), world.now)
        world.plane.pump(world.now)
        assert world.plane.hints.prefetches.filling == 32
        return sum(calls_of(lambda: (world.plane.pump(world.now), world.plane.next_deadline(world.now))) for _ in "ab")

    assert calls(8000) <= 1.1 * calls(80)
