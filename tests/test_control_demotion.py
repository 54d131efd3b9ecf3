"""Demotions: what the CPU tier owes to the tiers below, when it is sent, and what a row waits for before it goes."""

from __future__ import annotations

from dataclasses import replace

from support_control import World, cpu_plan, fs_plan

from kvtier.control.board import TierPlan
from kvtier.control.plane import ControlLimits
from kvtier.jobs import JobKind
from kvtier.keys import Medium

STORE, LOAD = JobKind.STORE, JobKind.LOAD


def second_fs(slots: int, **more: object) -> TierPlan:
    """An owned tier below the first one, under a name and a medium of its own."""
    return replace(fs_plan(slots, **more), name="fs2", medium=Medium("FS2"))


def test_a_row_is_sent_only_to_the_tier_it_owes_itself_to():
    """The first tier looks for cold rows while rows it has already still owe themselves to a slow second tier."""
    lowers = [fs_plan(16, write_policy="on_evict"), second_fs(16, inflight_blocks=1)]
    world = World(cpu_plan(8), lowers, limits=ControlLimits(watermark_rows=8))
    world.store(1, 2, 3, 4, 5, 6)
    world.run_tier(0)
    sent = []
    while jobs := world.under_way(1, STORE):
        sent += world.numbers(jobs[0])
        world.finish(jobs[0])
        world.check()
    assert sorted(sent) == [1, 2, 3, 4, 5, 6]
    world.run_all()
    world.check()
    assert world.plane.owed == 0
    assert all(len(lower.owned.directory) == 6 for lower in world.plane.board.lowers)
