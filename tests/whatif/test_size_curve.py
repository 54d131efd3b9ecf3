"""What a running stack says other sizes would hit, beside the exact curve of the same requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support_control import ROW_BYTES, World, cpu_setup, fs_setup, key, shared_setup
from support_counts import seeds

from kvtier.config import parse_stack
from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.settings import StackSettings
from kvtier.control.tiers.size_curve import BLOCKS_MAX, INTERVAL_LEAST, SIZES, SizeCurve, interval_of
from kvtier.engines.process_stack import open_engine_stack
from kvtier.metrics import metric_families
from kvtier.tier.contract import SlotSpace
from kvtier.tools.whatif.miss_ratio import lru_curve
from kvtier.traces.requests import KeyChain, Request, RequestSource, group_keys
from kvtier.types.arrays import int_array
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import OffloadKey, RequestId
from kvtier.types.requests import NO_INFO

CURVES = StackSettings(curves=True, gather_seconds=0.0)


def conversations(seed: int, requests: int) -> RequestSource:
    """Conversations that begin alike, grow, are cut, and come back sooner or later."""
    rng = random.Random(seed)
    prompts = [[0, 1, 2]]
    for number in range(requests):
        ids = prompts[-1 - min(int(rng.expovariate(0.02)), len(prompts) - 1)]
        start = 1000 * (number + 1)
        prompts.append(ids[: rng.randint(1, len(ids))] + list(range(start, start + rng.randint(0, 30))))
    made = [Request("", "", int_array(ids), len(ids), len(ids), 1) for ids in prompts]
    return RequestSource("made", len(made), max(map(len, prompts)), 1, lambda: iter(made))


def prompts_of(source: RequestSource) -> Iterator[tuple[OffloadKey, ...]]:
    chain = KeyChain()
    return (group_keys(chain.digests(request), 0) for request in source.requests())


def blocks(count: int) -> SlotSpace:
    return SlotSpace(count, (1,), (1,))


@pytest.mark.parametrize("size", [1, 2, 5, 30, 101, 400, 5000])
def test_without_sampling_it_is_the_exact_curve(size: int) -> None:
    source = conversations(seed=size, requests=400)
    exact, curve = lru_curve(source), SizeCurve(blocks(size), interval=1)
    for keys in prompts_of(source):
        curve.use(keys)
    assert curve.used == exact.references
    assert curve.missed == {times: exact.references - exact.hits(int(times * size)) for times in SIZES}


@pytest.mark.parametrize("seed", seeds(3, 1))
def test_one_block_in_ten_is_close_to_it(seed: int) -> None:
    source = conversations(seed, requests=3000)
    exact, errors = lru_curve(source), []
    for size in (500, 2000, 4000):
        curve = SizeCurve(blocks(size), interval=10)
        for keys in prompts_of(source):
            curve.use(keys)
        errors += [
            abs(1 - missed / curve.used - exact.hit_rate(int(times * size))) for times, missed in curve.missed.items()
        ]
    print(f"seed {seed}: mean {sum(errors) / len(errors):.4f}, worst {max(errors):.4f}")
    assert sum(errors) / len(errors) < 0.015
    assert max(errors) < 0.04


@pytest.mark.parametrize("size", [4096, 1 << 20])
def test_what_it_keeps_is_bounded_whatever_the_tier_holds(size: int) -> None:
    curve = SizeCurve(blocks(size))
    for start in range(0, 150_000, 1000):
        curve.use([key(number) for number in range(start, start + 1000)])
    assert curve.interval >= INTERVAL_LEAST
    assert sum(map(len, curve._parts)) <= min(BLOCKS_MAX, SIZES[-1] * size / curve.interval + 1)
    assert [interval_of(n) for n in (1, 128, 4096, 10_000_000)] == [1, 2, 6, 2442]


def test_slots_of_several_sizes_count_in_bytes() -> None:
    curve = SizeCurve(SlotSpace(12, (1,), (3, 1)), interval=1)  # 12 bytes: 6, 12, 24 and 48
    small = [key(number, 1) for number in range(3)]
    curve.use(small)
    curve.use([key(10, 0), key(11, 0)])
    curve.use(small)
    assert curve.missed == {0.5: 8, 1.0: 5, 2.0: 5, 4.0: 5}


def test_a_reset_forgets_what_was_used_and_keeps_the_counts() -> None:
    world = World(cpu_setup(8), [fs_setup(16)], limits=CURVES)
    assert world.plane.uses is not None
    world.plane.uses.begin(RequestId("1"), [key(1), key(2)], 0.0, None, NO_INFO)
    world.plane.reset(1.0)
    world.plane.uses.begin(RequestId("2"), [key(1), key(2)], 2.0, None, NO_INFO)
    curves = [tier.curve for tier in world.plane.control.owned_tiers]
    assert [curve.missed[1.0] for curve in curves if curve is not None] == [4, 4]


def test_each_owned_tier_counts_requests_that_begin_once_and_nothing_else() -> None:
    world = World(cpu_setup(2), [fs_setup(4, 1), shared_setup()], limits=CURVES)
    assert world.plane.uses is not None
    for number, keys in enumerate(([1, 2], [3, 4], [1, 2], [1, 2])):
        for _ in range(2):
            world.plane.uses.begin(RequestId(str(number)), [key(n) for n in keys], float(number), None, NO_INFO)
    world.plane.uses.on_touch([key(9)], 5.0)
    cpu, disk = [tier.curve for tier in world.plane.control.owned_tiers]
    assert cpu is not None
    assert disk is not None
    assert (cpu.used, cpu.missed) == (8, {0.5: 7, 1.0: 6, 2.0: 4, 4.0: 4})
    assert (disk.used, disk.missed) == (8, {0.5: 6, 1.0: 4, 2.0: 4, 4.0: 4})


def test_without_the_option_a_plane_takes_no_requests_in() -> None:
    plane = ControlPlane(cpu_setup(8), [fs_setup(16)])
    assert plane.uses is None
    assert [tier.curve for tier in plane.control.owned_tiers] == [None, None]


def test_the_figures_and_metrics_of_a_stack_have_the_curve(tmp_path: Path, short_folder: str) -> None:
    disk = f"{{type: fs, roots: [{tmp_path}], capacity: 64MiB, min_free_bytes: 0}}"
    tiers = f"[{{type: gpu}}, {{type: cpu, cpu_bytes_to_use: {2 * ROW_BYTES}}}, {disk}]"
    layout, pages = KVLayout.of_pages(ROW_BYTES, block_size=16), [torch.zeros((4, ROW_BYTES), dtype=torch.uint8)]
    config = parse_stack(f"curves: true\nruntime_dir: {short_folder}\ntiers: {tiers}")
    with open_engine_stack(config, layout, pages, model="m") as stack:
        assert stack.engine.follows_requests
        for number, block in enumerate((1, 2, 3, 1)):
            stack.request(RequestId(str(number)), [key(block)]).end()
        stats = stack.stats()
    assert stats.tiers["cpu"].curve_hit_rates == {"0.5": 0.0, "1": 0.0, "2": 0.25, "4": 0.25}
    families = {metric.name: samples for metric, samples in metric_families(stats).items()}
    assert families["kvtier_curve_used_blocks_total"]["cpu",] == 4
    assert families["kvtier_curve_missed_blocks_total"]["cpu", "2"] == 3
    assert ("fs", "4") in families["kvtier_curve_missed_blocks_total"]
