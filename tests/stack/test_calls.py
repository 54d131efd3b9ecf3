"""Blocks named by their keys and GPU block ids, without a prepared job."""

from __future__ import annotations

import asyncio

import pytest
from support_driver import ServedStack, presence
from support_stack import HYBRID, PLAIN, Engine, keys, parts_of, running, stack_file, statuses, whole

from kvtier.errors import UsageError
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import JobKind
from kvtier.types.keys import RequestId
from kvtier.types.requests import RequestInfo

INFO = RequestInfo(session="s", tenant="t", priority=3, retain_until=1e9)


async def test_keys_and_their_gpu_blocks_make_a_roundtrip():
    engine = Engine(PLAIN, 16)
    names, target = keys(4), whole(keys(4), 8)
    engine.compute(whole(names))
    async with running(stack_file(PLAIN, 8), engine) as stack:
        stored = await stack.store(names, gpu_blocks=[0, 1, 2, 3])
        assert statuses(stored) == ["stored"] * 4
        assert await stack.lookup(names) == [LookupResult.HIT] * 4
        with stack.request(RequestId("r"), names, info=INFO) as request:
            assert request.reserve(names).hits() == [True] * 4
            loaded = await stack.load(names, request, gpu_blocks=range(8, 12))
            assert request.reservation is None
        assert statuses(loaded) == ["loaded"] * 4
        assert not engine.wrong(target)


async def test_a_request_ends_with_its_block_whatever_happens_in_it():
    engine, names = Engine(PLAIN, 16), keys(4)
    engine.compute(whole(names))
    async with running(stack_file(PLAIN, 8), engine) as stack:
        assert (await stack.store(names, gpu_blocks=range(4))).ok
        request = stack.request(RequestId("r"))
        assert request.reserve(names).hits() == [True] * 4
        with pytest.raises(ArithmeticError), request:
            raise ArithmeticError
        assert request.reservation is None
        request.end()
        with pytest.raises(UsageError, match="has ended"):
            request.reserve(names)
        with stack.request(RequestId("at the end"), names):
            await stack.close()


async def test_groups_of_a_hybrid_layout_are_named_one_by_one():
    engine = Engine(HYBRID, 64)
    full, window = keys(3), keys(1, group=1)
    for one in (whole(full, 0, 4), whole(window, 12, 4)):
        engine.compute(one)
    async with running(stack_file(HYBRID, 16), engine) as stack:
        stored = await stack.store(groups=[(full, range(12)), (window, range(12, 16)), ([], [])])
        assert [len(outcomes) for outcomes in stored.outcomes] == [3, 1]
        assert stored.ok
        loaded = await stack.load(groups=[(window, range(40, 44)), (full, range(20, 32))])
        assert loaded.ok
        assert not engine.wrong(whole(full, 20, 4))
        assert not engine.wrong(whole(window, 40, 4))


async def test_a_prepared_job_goes_the_same_way():
    engine = Engine(PLAIN, 16)
    one = whole(keys(2))
    engine.compute(one)
    async with running(stack_file(PLAIN, 8), engine) as stack:
        assert (await stack.run(stack.job(JobKind.STORE, [one]))).ok
        assert (await stack.run(stack.job(JobKind.LOAD, [whole(keys(2), 4)]))).ok
        assert not engine.wrong(whole(keys(2), 4))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ({"keys": keys(2), "gpu_blocks": [0]}, "2 keys"),
        ({"keys": keys(1), "gpu_blocks": [0], "groups": [(keys(1), [0])]}, "not by both"),
        ({"keys": keys(1), "gpu_blocks": [-1]}, "negative GPU block"),
        ({"keys": keys(1, group=7), "gpu_blocks": [0]}, "no group 7"),
    ],
)
async def test_blocks_that_contradict_the_layout_are_refused(call, match):
    async with running(stack_file(PLAIN, 8), Engine(PLAIN, 16)) as stack:
        for move in (stack.store, stack.load):
            with pytest.raises(UsageError, match=match):
                await move(**call)


async def test_no_blocks_are_a_job_that_succeeded():
    async with running(stack_file(PLAIN, 8), Engine(PLAIN, 16)) as stack:
        async with asyncio.timeout(10):
            assert (await stack.store([])).ok
            assert (await stack.load(groups=[([], [])])).ok


async def test_a_timeout_of_a_call_is_its_jobs_deadline():
    engine = Engine(PLAIN, 16)
    async with running(stack_file(PLAIN, 8), engine) as stack:
        result = await stack.store(keys(2), gpu_blocks=[0, 1], timeout_seconds=0.0)
        assert set(statuses(result)) <= {"late", "dropped:no_row"}


def test_an_engines_stack_takes_keys_too():
    engine = Engine(PLAIN, 16)
    names = keys(3)
    engine.compute(whole(names))
    with ServedStack(parts_of(stack_file(PLAIN, 8), engine)) as stack:
        ended = {}

        def run(job_id):
            while job_id not in ended:
                ended.update({result.job_id: result for result in stack.step()})
                stack.wait(1.0)
            return ended[job_id]

        assert run(stack.submit_store(names, gpu_blocks=[0, 1, 2])).ok
        assert presence(stack, names) == [LookupResult.HIT] * 3
        request = stack.request(RequestId("r"))
        reservation = request.reserve(names)
        while not reservation.served:
            stack.wait(1.0)
            stack.step()
        assert reservation.hits() == [True] * 3
        assert run(stack.submit_load(names, request, gpu_blocks=[5, 6, 7])).ok
        assert run(stack.submit_load(groups=[(names[:1], [9])])).ok
    assert not engine.wrong(whole(names, 5))
    assert not engine.wrong(whole(names[:1], 9))
