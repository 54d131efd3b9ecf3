"""Hints to a real stack: kept on a real disk, brought up before a load, within the file's quotas."""

from __future__ import annotations

import pytest
from support_driver import ServedStack
from support_stack import PLAIN, Engine, fs, keys, load, parts_of, running, stack_file, statuses, store, until, whole

from kvtier.errors import UsageError
from kvtier.options import parse_quota, quota_bytes
from kvtier.stack import TierStack
from kvtier.types.hints import Demote, HintRefusal, HintResult, Pin, Prefetch, Release, Retain
from kvtier.types.keys import OffloadKey

AGENT = keys(6, tag="agent")
BLOCKS = 200


async def flood(stack: TierStack, engine: Engine, blocks: int) -> None:
    others = keys(blocks, tag="others")
    for first in range(0, blocks, 10):
        await store(stack, engine, whole(others[first : first + 10], 20))


def where(stack: TierStack | ServedStack, names: list[OffloadKey] = AGENT) -> list[str | None]:
    return stack.locate(names)


async def test_an_agents_blocks_outlast_a_flood_on_disk_and_are_hits_of_the_cpu_tier_when_prefetched(tmp_path):
    engine = Engine(PLAIN, BLOCKS)
    config = stack_file(PLAIN, 24, fs(tmp_path / "root", capacity=512 << 10))
    async with running(config, engine) as stack:
        await store(stack, engine, whole(AGENT))
        assert stack.hint(Retain(AGENT, 300.0, "agent")) == HintResult(6)
        await flood(stack, engine, 4 * 24)
        await stack.drain(20.0)
        assert where(stack) == ["fs"] * 6
        figures = stack.stats()
        assert figures.tiers["fs"].evictions > 0
        assert 0 < figures.tiers["fs"].retained_bytes <= figures.tiers["fs"].retained_bytes_max
        assert figures.tiers["cpu"].retained_bytes == 0
        assert figures.hints.retained_sets == 1

        assert stack.hint(Prefetch(session="agent")) == HintResult(6)
        await until(lambda: where(stack) == ["cpu"] * 6)
        before = stack.stats().tiers["fs"].loaded
        assert statuses(await load(stack, engine, whole(AGENT, 100))) == ["loaded"] * 6
        figures = stack.stats()
        assert figures.tiers["fs"].loaded == before == 6
        assert (figures.hints.prefetched, figures.hints.prefetched_used) == (6, 6)

        assert stack.hint(Demote(session="agent")) == HintResult(6)
        await until(lambda: where(stack) == ["fs"] * 6)
        assert stack.stats().hints.demoted_early == 6
        assert stack.hint(Release("agent")) == HintResult(6)
        await flood(stack, engine, 300)
        await stack.drain(20.0)
        assert where(stack) == [None] * 6


async def test_quotas_and_bounds_come_from_the_stack_file(tmp_path):
    engine = Engine(PLAIN, BLOCKS)
    row = stack_file(PLAIN, 1).tiers[1].cpu_bytes_to_use
    hints = "{retained_sets: 1, retain_time: 5s, prefetch_blocks: 2}"
    config = stack_file(PLAIN, 24, cpu={"retained_max": f"{2 * row}"}, hints=hints)
    async with running(config, engine) as stack:
        await store(stack, engine, whole(AGENT))
        assert stack.hint(Pin(AGENT, 300.0, "a")) == HintResult(2, {HintRefusal.OVER_QUOTA: 4})
        assert stack.hint(Retain(AGENT[:1], 300.0, "b")) == HintResult(0, {HintRefusal.TOO_MANY: 1})
        assert stack.hint(Prefetch(keys(3, tag="nowhere"))) == HintResult(2, {HintRefusal.QUEUE_FULL: 1})
        figures = stack.stats()
        assert figures.tiers["cpu"].retained_bytes == figures.tiers["cpu"].retained_bytes_max == 2 * row
        assert figures.hints.refused["pin"]["over_quota"] == 4
        assert figures.hints.prefetch_missed == {"missing": 2, "late": 0}
        assert stack.hint(Demote(AGENT[3:4])) == HintResult(0, {HintRefusal.NO_TIER: 1})


def test_a_synchronous_engine_says_hints_and_steps(tmp_path):
    engine = Engine(PLAIN, BLOCKS)
    config = stack_file(PLAIN, 24, fs(tmp_path / "root", capacity=1 << 20, write_policy="on_evict"))
    with ServedStack(parts_of(config, engine)) as stack:

        def step_until(done) -> None:
            for _ in range(2000):
                if done():
                    return
                stack.step()
                stack.wait(0.01)
            raise AssertionError("the hint had no effect")

        engine.compute(whole(AGENT))
        job = stack.submit_store(AGENT, gpu_blocks=range(6))
        step_until(lambda: any(result.job_id == job for result in stack.step()))
        assert stack.hint(Demote(AGENT)).ok
        step_until(lambda: where(stack) == ["fs"] * 6)
        assert stack.hint(Prefetch(AGENT)).ok
        step_until(lambda: where(stack) == ["cpu"] * 6)
        with pytest.raises(UsageError, match="seconds above 0"):
            stack.hint(Retain(AGENT, -1.0))


async def test_a_stack_whose_control_plane_has_failed_refuses_hints(tmp_path, monkeypatch, caplog):
    engine = Engine(PLAIN, BLOCKS)
    async with TierStack(parts_of(stack_file(PLAIN, 24), engine)) as stack:
        await store(stack, engine, whole(AGENT))

        def broken(*_: object) -> None:
            raise ArithmeticError

        monkeypatch.setattr(stack._assembled.plane.hints.retention, "retain", broken)
        assert stack.hint(Retain(AGENT, 300.0)) == HintResult(0, {HintRefusal.STOPPED: 6})
        assert "the control plane has failed" in caplog.text
        assert stack.hint(Release()) == HintResult()


@pytest.mark.parametrize(
    ("text", "of_1000"),
    [("25%", 250), ("12.5 %", 125), ("0%", 0), ("100%", 1000), ("1KiB", 1024), (77, 77), (0.5, 500)],
)
def test_a_quota_is_a_share_or_a_size(text, of_1000):
    assert quota_bytes(parse_quota(text), 1000) == of_1000


@pytest.mark.parametrize("text", ["101%", "-1%", "a%", "%", 1.5, "ten", None, True])
def test_what_is_no_quota_is_refused(text):
    with pytest.raises(ValueError, match=r"a share is between|is not a size"):
        parse_quota(text)
