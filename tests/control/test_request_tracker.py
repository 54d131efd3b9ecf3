"""What policies that follow requests are told, and that the others are told none of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from support_control import ROW_BYTES, World, cpu_setup, fs_setup, key, shared_setup
from support_following import FollowingLRU, Notes

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.request_tracker import OPEN_MAX
from kvtier.control.tiers.lower_tier import TierSpec
from kvtier.errors import UsageError
from kvtier.tier.contract import Recovered
from kvtier.types.jobs import JobKind, RegionFormat
from kvtier.types.keys import FS, RequestId
from kvtier.types.requests import NO_INFO, RequestInfo

R1, R2 = RequestId("1"), RequestId("2")


def following(setup: TierSpec) -> TierSpec:
    return TierSpec(setup.name, setup.medium, setup.opened, FollowingLRU)


def world(rows: int = 8, lowers: list[TierSpec] | None = None, groups: int = 1) -> World:
    return World(following(cpu_setup(rows, groups=groups)), lowers or [])


def model(world: World) -> Notes:
    (only,) = world.plane.control.models
    assert isinstance(only, Notes)
    return only


def policy(world: World, position: int = 0) -> FollowingLRU:
    request_policy = world.plane.control.owned_tiers[position].request_policy
    assert request_policy is not None
    assert isinstance(request_policy.policy, FollowingLRU)
    return request_policy.policy


def begin(world: World, request: RequestId, numbers: list[int], time: float | None = None, **more: object) -> None:
    assert world.plane.uses is not None
    info = RequestInfo(**more)  # type: ignore[arg-type]
    world.plane.uses.begin(request, [key(n) for n in numbers], world.now, time, info)


def store(world: World, numbers: list[int]) -> None:
    world.submit(JobKind.STORE, [key(n) for n in numbers])
    world.run_all()


def test_a_request_is_told_with_its_blocks_and_where_they_are() -> None:
    it = world(lowers=[following(fs_setup(16)), shared_setup()])
    store(it, [1, 2])
    it.now = 5.0
    begin(it, R1, [1, 2, 3], session="s", tenant="t")
    (use,) = model(it).uses
    assert (use.request_id, use.time, list(use.keys), use.group) == (R1, 5.0, [key(1), key(2), key(3)], 0)
    assert (use.new_blocks, use.info) == (1, RequestInfo("s", "t"))
    for position in (0, 1):
        tier = it.plane.control.owned_tiers[position]
        assert policy(it, position).slots == [[tier.ready(key(1)), tier.ready(key(2)), -1]]


def test_tiers_share_one_model_and_it_hears_of_a_use_before_they_do() -> None:
    it = world(lowers=[following(fs_setup(16))])
    assert policy(it, 0).model is policy(it, 1).model is model(it)
    begin(it, R1, [1])
    assert len(model(it).uses) == 1


def test_without_a_policy_that_follows_requests_there_is_nobody_to_tell() -> None:
    plane = ControlPlane(cpu_setup(8), [fs_setup(16)])
    assert plane.uses is None
    assert list(plane.control.models) == []


def test_the_end_of_a_request_is_told_once_with_its_output() -> None:
    it = world()
    begin(it, R1, [1])
    begin(it, R2, [1])
    assert it.plane.uses is not None
    it.plane.uses.end(R1, 77)
    it.plane.uses.end(R1, 78)
    it.plane.uses.end(RequestId("never began"), 3)
    it.plane.uses.end(R2, None)
    assert model(it).told("end") == [(R1, 77), (R2, None)]


def test_a_request_begins_once() -> None:
    it = world()
    begin(it, R1, [1])
    begin(it, R1, [1, 2])
    assert len(model(it).uses) == 1


def test_time_handed_in_never_goes_back_and_the_clock_counts_no_more() -> None:
    it = world()
    it.now = 1000.0
    for number, time in enumerate((3.0, 7.0, 5.0, -1e9, 8.0)):
        begin(it, RequestId(str(number)), [number], time)
    it.now = 2000.0
    it.plane.pump(it.now)
    assert [use.time for use in model(it).uses] == [3.0, 7.0, 7.0, 7.0, 8.0]
    times = [time for (time,) in model(it).told("advance")]
    assert times == sorted(times)
    assert times[-1] == 8.0


def test_a_clock_that_stays_behind_goes_on_from_where_it_was() -> None:
    it = world()
    for number in range(40):
        begin(it, RequestId(str(number)), [number], 1000.0 + number if number < 10 else float(number))
    times = [use.time for use in model(it).uses]
    assert times == sorted(times)
    assert times[-1] - times[30] == 9.0


def test_a_clock_that_goes_back_is_made_monotone() -> None:
    it = world()
    for number, now in enumerate((10.0, 4.0, 11.0)):
        it.now = now
        begin(it, RequestId(str(number)), [number])
        it.plane.pump(now)
    assert [use.time for use in model(it).uses] == [10.0, 10.0, 11.0]
    times = [time for (time,) in model(it).told("advance")]
    assert times == sorted(times)


@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_is_refused_and_changes_nothing(time: float) -> None:
    it = world()
    with pytest.raises(UsageError, match="the time of request 1"):
        begin(it, R1, [1], time)
    begin(it, R1, [1], 1.0)
    assert [use.time for use in model(it).uses] == [1.0]


def test_an_embedder_that_only_touches_tells_of_uses_by_that() -> None:
    it = world()
    store(it, [1, 2])
    assert it.plane.uses is not None
    it.plane.uses.on_touch([key(1), key(2)], 3.0)
    it.plane.touch([key(1), key(2)])
    (use,) = model(it).uses
    assert (use.request_id, use.time, use.info) == ("", 3.0, NO_INFO)
    assert policy(it).touched == []


def test_an_embedder_that_tells_nothing_still_has_its_uses_counted() -> None:
    it = world()
    store(it, [1, 2])
    it.submit(JobKind.LOAD, [key(1)])
    it.run_all()
    assert it.plane.control.cpu.ready(key(1)) in policy(it).touched


def test_once_requests_are_told_of_a_touch_is_no_use_of_its_own() -> None:
    it = world()
    begin(it, R1, [1, 2])
    store(it, [1, 2])
    it.submit(JobKind.LOAD, [key(1), key(2)])
    it.run_all()
    assert it.plane.uses is not None
    it.plane.uses.on_touch([key(1)], it.now)
    assert len(model(it).uses) == 1
    assert policy(it).touched == []


def test_each_group_that_keeps_a_chain_is_a_use_of_its_own() -> None:
    setup = following(cpu_setup(8, groups=3))
    it = World(setup, [])
    it.plane = ControlPlane(setup, [], chains=frozenset({0, 2}))  # type: ignore[arg-type]
    keys = [key(n, group) for n in (1, 2) for group in (0, 1, 2)]
    assert it.plane.uses is not None
    it.plane.uses.begin(R1, [*keys, key(1, 0)], 1.0, None, NO_INFO)
    assert [(use.group, list(use.keys)) for use in model(it).uses] == [
        (0, [key(1, 0), key(2, 0)]),
        (2, [key(1, 2), key(2, 2)]),
    ]


def test_requests_that_never_end_are_bounded() -> None:
    it = world()
    assert it.plane.uses is not None
    for number in range(OPEN_MAX + 3):
        it.plane.uses.begin(RequestId(str(number)), [], 0.0, None, NO_INFO)
    assert model(it).told("end") == [(RequestId(str(number)), None) for number in range(3)]


def test_what_a_tier_was_opened_with_is_told_apart() -> None:
    slots = np.array([2, 0, 1])
    opened = fs_setup(8, 1).opened
    formats = (RegionFormat(0, ROW_BYTES, 1),)
    recovered = Recovered([key(n) for n in range(3)], slots, slots + 1, formats)
    below = TierSpec("fs", FS, replace(opened, recovered=recovered), FollowingLRU)
    it = world(lowers=[below])
    assert policy(it, 1).recovered == [2, 0, 1]
    assert model(it).calls == []
