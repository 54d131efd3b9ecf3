"""The serving loop on a stack in memory: every byte it uses is checked, and it moves what it says it moves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support_replay import FakeStack

from kvtier.errors import ConfigError
from kvtier.planner import StoreMode
from kvtier.tools.replay.engine import EngineCache
from kvtier.tools.replay.run import Replay
from kvtier.tools.replay.serve import Counts, ReplayLoop, ServeOptions
from kvtier.tools.replay.setup import ReplayOptions, make_layout
from kvtier.tools.replay.workload import make_workload
from kvtier.traces.requests import KeyChain, Request, group_keys
from kvtier.types.arrays import int_array
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import JobKind, JobResult, TransferJob
from kvtier.types.keys import OffloadKey
from kvtier.types.requests import RequestInfo

TOKENS = 16
PLAIN = KVLayout((GroupLayout((TensorRef(0, 96),), TOKENS),))
HYBRID = KVLayout(
    (
        GroupLayout((TensorRef(0, 72), TensorRef(1, 24)), TOKENS),
        GroupLayout((TensorRef(2, 40),), TOKENS, GroupKind.SLIDING_WINDOW, window_tokens=100),
    ),
    block_size_factor=4,
)


class Bench:
    """A server over a fake stack."""

    def __init__(
        self, layout: KVLayout = PLAIN, gpu_blocks: int = 16, mode: StoreMode = StoreMode.EAGER, **options: int
    ) -> None:
        self.engine = EngineCache(layout, gpu_blocks, "cpu", mode)
        self.stack = FakeStack(layout, self.engine.tensors)
        self.server = ReplayLoop(self.engine, self.stack, ServeOptions(**options))

    def serve(self, *requests: Request) -> Counts:
        counts = asyncio.run(self.server.run(iter(requests)))
        for pool in self.engine.pools:
            pool.check_integrity()
        for planner in self.engine.planners:
            assert planner.num_fenced == 0
        return counts

    def moved(self, kind: JobKind) -> list[int]:
        """Offloaded blocks of each job of a kind."""
        return [job.num_blocks for job in self.stack.jobs if job.kind is kind]


def ask(*ids: int, tokens: int | None = None) -> Request:
    prompt_tokens = TOKENS * len(ids) if tokens is None else tokens
    return Request("root", "", int_array(ids), min(len(ids), prompt_tokens // TOKENS), prompt_tokens, 0)


OTHERS = [ask(*range(base, base + 16)) for base in (100, 200)]
"""Requests that together wash everything else out of a GPU pool of 16 blocks."""


def test_new_blocks_are_computed_and_stored_once() -> None:
    bench = Bench()
    counts = bench.serve(ask(1, 2, 3), ask(1, 2, 3), ask(1, 2, 3, 4))
    assert bench.moved(JobKind.STORE) == [3, 1]
    assert bench.moved(JobKind.LOAD) == []
    assert (counts.stored, counts.requests, counts.prompt_tokens) == (4, 3, 16 * 10)


def test_the_last_block_of_a_prompt_is_never_hit() -> None:
    bench = Bench()
    counts = bench.serve(ask(1, 2, 3), ask(1, 2, 3), *OTHERS, ask(1, 2, 3))
    assert counts.hit_tokens == {"gpu": 2 * TOKENS, "cpu": 2 * TOKENS}
    assert bench.moved(JobKind.LOAD) == [2]


def test_a_token_past_the_last_block_lets_it_be_hit() -> None:
    bench = Bench()
    counts = bench.serve(ask(1, 2, 3), *OTHERS, ask(1, 2, 3, tokens=3 * TOKENS + 1))
    assert counts.hit_tokens["cpu"] == 3 * TOKENS


def test_references_count_a_prompts_last_block_and_leave_the_gpu_out() -> None:
    counts = Bench().serve(ask(1, 2, 3), ask(1, 2, 3), ask(1, 2, 9))
    assert (counts.block_references, counts.block_hits) == (9, 3 + 2)


def test_hits_are_counted_where_they_were() -> None:
    bench = Bench()
    bench.stack.tiers["cpu"].num_blocks = 2
    counts = bench.serve(ask(1, 2, 3, 4), *OTHERS, ask(1, 2, 3, 4, 5))
    assert counts.hit_tokens == {"gpu": 0, "fs": 4 * TOKENS}
    assert counts.verified == counts.loaded == 4


@pytest.mark.parametrize("byte", [0, 50, 95])
def test_one_wrong_byte_is_seen_and_computed_over(byte: int) -> None:
    bench = Bench()
    flips = iter([byte])

    def corrupt(key: OffloadKey, row: np.ndarray) -> None:
        for where in flips:
            row[where] ^= 1

    bench.stack.corrupt = corrupt
    counts = bench.serve(ask(1, 2, 3), *OTHERS, ask(1, 2, 3), ask(1, 2, 3))
    assert (counts.loaded, counts.verified, counts.mismatched) == (2, 2, 1)
    (wrong,) = counts.wrong
    assert (wrong.first_byte, wrong.wrong_bytes) == (byte, 1)
    assert counts.hit_tokens == {"gpu": 2 * TOKENS, "cpu": 1 * TOKENS}


def test_a_write_into_somebody_elses_gpu_block_is_seen() -> None:
    bench = Bench()
    run_job = bench.stack.run

    async def stray(job: TransferJob) -> JobResult:
        if job.kind is JobKind.STORE:
            return await run_job(job)
        used = set(job.groups[0].runs.gpu_blocks.tolist())
        other = next(b for b in range(16) if b not in used and bench.engine.pools[0].key_of(b))
        bench.engine.tensors[0][other] = 0
        strays.append(bench.engine.pools[0].key_of(other))
        return await run_job(job)

    strays: list[OffloadKey | None] = []
    bench.stack.run = stray
    last = OTHERS[-1].ids.tolist()
    counts = bench.serve(ask(1, 2, 3), *OTHERS, ask(1, 2, 3), ask(*last[:12]))
    assert strays
    assert counts.mismatched >= 1
    assert counts.wrong[0].key in strays


def test_what_a_load_does_not_bring_is_computed_and_stored_again() -> None:
    bench = Bench()
    bench.serve(ask(1, 2, 3, 4), *OTHERS)
    second = bench.stack.jobs[0].groups[0].keys[1]
    bench.stack.lost = {second}
    stored = bench.server.counts.stored
    counts = bench.serve(ask(1, 2, 3, 4, 5))
    assert (counts.loaded, counts.load_failed, counts.mismatched) == (3, 1, 0)
    assert counts.stored == stored + 2
    assert bench.stack.locate([second]) == ["cpu"]


def test_a_dropped_store_is_counted_and_tried_again() -> None:
    (key,) = group_keys(KeyChain().digests(ask(7)), 0)
    bench = Bench()
    bench.stack.refused = {key}
    counts = bench.serve(ask(7, 8))
    assert (counts.stored, counts.dropped) == (1, 1)
    bench.stack.refused = set()
    counts = bench.serve(ask(7, 8, 9))
    assert (counts.stored, counts.dropped) == (3, 1)
    assert bench.stack.locate([key]) == ["cpu"]


def test_what_a_request_used_and_did_not_store_is_touched_in_prefix_order() -> None:
    bench = Bench()
    bench.serve(ask(1, 2, 3), ask(1, 2), ask(1, 2, 3, 4))
    keys = list(bench.stack.jobs[0].groups[0].keys)
    assert bench.stack.touched == [[], keys[:2], keys]


def test_a_request_is_announced_with_its_prompt_and_ends_with_its_output() -> None:
    bench = Bench()
    first = Request("root", "s", int_array([1, 2, 3, 4]), 3, 3 * TOKENS, 17, 5.5)
    bench.serve(first, ask(1, 2))
    keys = list(bench.stack.jobs[0].groups[0].keys)
    assert bench.stack.begun == [("1", keys[:3], 5.5, RequestInfo(session="root s")), ("2", keys[:2], None, None)]
    assert bench.stack.ended == [("1", 17), ("2", 0)]


def test_a_long_store_goes_in_jobs_of_bounded_size() -> None:
    bench = Bench(store_blocks=4)
    bench.serve(ask(*range(11)))
    assert bench.moved(JobKind.STORE) == [4, 4, 3]


def test_a_request_longer_than_the_pool_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--gpu-blocks"):
        Bench(gpu_blocks=3).serve(ask(1, 2, 3, 4))


def test_lazy_mode_stores_only_what_the_gpu_is_about_to_forget() -> None:
    bench = Bench(mode=StoreMode.LAZY)
    counts = bench.serve(ask(1, 2, 3), ask(*range(50, 60)))
    assert counts.stored == 0
    counts = bench.serve(ask(*range(70, 86)), ask(1, 2, 3))
    assert counts.stored >= 13
    assert counts.hit_tokens["cpu"] == 2 * TOKENS


def test_unaligned_heads_load_only_the_rest_of_an_offloaded_block() -> None:
    layout = replace(PLAIN, block_size_factor=4)
    bench = Bench(layout)
    bench.serve(ask(*range(9)))
    pool = bench.engine.pools[0]
    # Leave six of the nine GPU blocks: the second offloaded block keeps its first two sub-blocks.
    keys = [pool.key_of(block) for block in range(16) if pool.key_of(block)]
    assert len(keys) == 9
    taken = pool.allocate(7 + 3)
    assert taken is not None
    pool.release(taken)
    counts = bench.serve(ask(*range(9)))
    (job,) = [job for job in bench.stack.jobs if job.kind is JobKind.LOAD]
    (group,) = job.groups
    assert (group.runs.firsts.tolist(), group.runs.counts.tolist()) == ([2], [2])
    assert counts.mismatched == 0
    assert counts.hit_tokens == {"gpu": 6 * TOKENS, "cpu": 2 * TOKENS}


@pytest.mark.parametrize("mode", list(StoreMode))
def test_requests_that_part_inside_an_offloaded_block_are_both_stored(mode: StoreMode) -> None:
    """The second hits two GPU blocks that the store of the first still reads; the store of it waits for nothing."""
    bench = Bench(replace(PLAIN, block_size_factor=4), gpu_blocks=32, mode=mode)
    run_job, begun, go_on = bench.stack.run, asyncio.Event(), asyncio.Event()
    names: list[OffloadKey] = []

    async def held_back(job: TransferJob) -> JobResult:
        if job.kind is JobKind.LOAD:
            return await run_job(job)
        names.extend(key for group in job.groups for key in group.keys)
        begun.set()
        await go_on.wait()
        return await run_job(job)

    async def story() -> None:
        bench.stack.run = held_back
        async with asyncio.TaskGroup() as group:
            if mode is StoreMode.LAZY:
                await bench.server.serve(ask(1, 2, 3, 4))
                bench.engine.planners[0].about_to_evict(bench.engine.pools[0].coldest())
                group.create_task(bench.server._store_planned())
            else:
                group.create_task(bench.server.serve(ask(1, 2, 3, 4)))
            await begun.wait()
            begun.clear()
            second = group.create_task(bench.server.serve(ask(1, 2, 5, 6)))
            if mode is StoreMode.LAZY:
                await second
                bench.engine.planners[0].about_to_evict(bench.engine.pools[0].coldest())
                group.create_task(bench.server._store_planned())
            await begun.wait()
            assert bench.engine.planners[0].num_fenced == 6
            go_on.set()

    asyncio.run(story())
    parted = [group_keys(KeyChain().digests(request), 0)[3] for request in (ask(1, 2, 3, 4), ask(1, 2, 5, 6))]
    assert names == parted
    assert bench.stack.locate(parted) == ["cpu", "cpu"]
    counts = bench.serve(*(ask(*range(base, base + 32)) for base in (100, 200)), ask(1, 2, 3, 4, 0), ask(1, 2, 5, 6, 0))
    assert counts.hit_tokens == {"gpu": (2 + 2) * TOKENS, "cpu": (4 + 2) * TOKENS}
    assert (counts.mismatched, counts.loaded) == (0, 2)


def test_a_hybrid_hit_loads_nothing_before_the_window() -> None:
    bench = Bench(HYBRID, gpu_blocks=40)
    washing = [ask(*range(base, base + 40)) for base in (100, 200)]
    counts = bench.serve(ask(*range(33)), *washing, ask(*range(33)))
    (job,) = [job for job in bench.stack.jobs if job.kind is JobKind.LOAD]
    full, window = job.groups
    assert len(full.keys) == 8
    # 32 blocks are hit; the window of 100 tokens reaches back into block 25, the second of its offloaded block.
    assert (window.runs.firsts.tolist(), window.runs.counts.tolist()) == ([1, 0], [3, 4])
    assert (counts.mismatched, counts.verified) == (0, 10)


@pytest.mark.parametrize("layout", [PLAIN, HYBRID])
@pytest.mark.parametrize("concurrency", [1, 5])
@pytest.mark.parametrize("mode", list(StoreMode))
def test_whole_workloads_end_with_every_byte_right(layout: KVLayout, concurrency: int, mode: StoreMode) -> None:
    source = make_workload("chat", seed=concurrency, num_requests=40)
    bench = Bench(layout, source.longest_blocks + 8, mode, concurrency=concurrency)
    bench.stack.tiers["cpu"].num_blocks = 300 // layout.block_size_factor
    yielding(bench.stack)
    counts = bench.serve(*source.requests())
    assert counts.requests == 40
    assert counts.mismatched == 0
    assert counts.verified == counts.loaded > 0
    assert {name for name, tokens in counts.hit_tokens.items() if tokens} == {"gpu", "cpu", "fs"}


def yielding(stack: FakeStack) -> None:
    """Make the fake's jobs take a few turns of the loop, so that requests run into each other."""

    run_job = stack.run

    async def later(job: TransferJob) -> JobResult:
        for _ in range(3):
            await asyncio.sleep(0)
        return await run_job(job)

    stack.run = later


def test_wrong_bytes_name_their_owner_in_the_report(tmp_path: Path) -> None:
    """Two blocks exchanged: each is reported with the key it really holds."""
    stacks: list[FakeStack] = []

    def make(config: object, layout: KVLayout, kv_caches: object) -> FakeStack:
        stack = FakeStack(layout, kv_caches, cpu_blocks=4)
        held: dict[bytes, np.ndarray] = {}

        def corrupt(key: OffloadKey, row: np.ndarray) -> None:
            held[key] = row.copy()
            if len(held) == 2:
                row[:] = next(iter(held.values()))

        stack.corrupt = corrupt
        stacks.append(stack)
        return stack

    options = ReplayOptions(block_bytes=64, requests=60, fs_root=tmp_path / "root")
    report = asyncio.run(Replay(options, make).run())
    assert not report.ok
    assert report.counts.mismatched == 1
    (line,) = report.wrong
    assert "it holds bytes of key " in line
    first, second = [key for job in stacks[0].jobs if job.kind is JobKind.LOAD for key in job.groups[0].keys][:2]
    assert line.startswith(f"key {second.hex()},")
    assert line.endswith(first.hex())


def test_hybrid_layouts_differ_in_page_size() -> None:
    layout = make_layout(ReplayOptions(workload="hybrid"), 16, None)
    assert layout.block_size_factor == 4
    assert layout.groups[0].page_bytes != layout.groups[1].page_bytes
