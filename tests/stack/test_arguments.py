"""Whatever a caller hands in: an error of the caller or an answer, and the control plane serves on as before."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support_arguments import Call, some_job, some_keys, wrong_calls
from support_driver import ServedStack
from support_protections_calls import without_checked_calls
from support_stack import PLAIN, Engine, fs, parts_of, run_jobs, shared_fs, stack_file, whole

from kvtier.engines.engine_memory.memory import PagedMemory
from kvtier.engines.engine_memory.options import EngineMemoryOptions, read_options
from kvtier.engines.engine_memory.tier import BlockingTier
from kvtier.engines.engine_memory.transfers import EngineTransfer
from kvtier.engines.process_calls import ProcessCalls, ProcessRequest
from kvtier.engines.process_stack import ProcessStack
from kvtier.errors import KVTierError, UsageError
from kvtier.stack import TierStack
from kvtier.stack.engine_calls import EngineCalls
from kvtier.stack.request import StackRequest
from kvtier.types.arrays import int_array
from kvtier.types.geometry import GroupLayout, KVLayout
from kvtier.types.hints import Retain
from kvtier.types.jobs import LOADED, STORED, JobKind
from kvtier.types.keys import JobId, block_keys
from kvtier.types.namespace import Namespace
from kvtier.types.requests import RequestInfo

Good = dict[str, Callable[[], dict[str, object]]]

LIFE = {"open", "close", "stats", "take_events", "check_integrity"}
REQUEST: Good = {
    "extend": lambda: {"keys": some_keys()},
    "reserve": lambda: {"keys": some_keys()},
    "touch": lambda: {"keys": some_keys()},
    "worth_loading": lambda: {"keys": some_keys()},
    "end": lambda: {"output_tokens": 4, "input_tokens": 3, "prompt": some_keys(), "arrived": 1.0},
}
ADAPTERS: Good = {
    "prompt_computed": lambda: {"tokens": 64, "begun": 1.0, "ended": 2.0},
    "announce": lambda: {"keys": some_keys()},
}
PROCESS_ADAPTERS: Good = {**ADAPTERS, "storable": lambda: {"keys": some_keys()}}
BOTH: Good = {
    "request": lambda: {"request_id": "r", "keys": some_keys(), "info": RequestInfo(), "time": 1.0},
    "hint": lambda: {"hint": Retain(some_keys(), 3.0, "s")},
    "job": lambda: {"kind": JobKind.LOAD, "groups": (), "timeout_seconds": 5.0},
    "cancel": lambda: {"job_id": 1 << 41},
    "locate": lambda: {"keys": some_keys()},
}
BLOCKS: Callable[[], dict[str, object]] = lambda: {  # noqa: E731
    "keys": some_keys(),
    "gpu_blocks": range(4),
    "timeout_seconds": 5.0,
}
JOBS = iter(range(1 << 42, 1 << 43))
TIER_STACK: Good = {
    **BOTH,
    "store": BLOCKS,
    "load": lambda: {**BLOCKS(), "request": None},
    "run": lambda: {"job": some_job(JobKind.LOAD, next(JOBS)), "request": None},
    "lookup": lambda: {"keys": some_keys()},
    "drain": lambda: {"timeout_seconds": 5.0, "backlog": 0},
    "close_on": dict,
}
PROCESS_STACK: Good = {
    **BOTH,
    "request": lambda: {**BOTH["request"](), "time": None},
    "submit_store": BLOCKS,
    "submit_load": lambda: {**BLOCKS(), "request": None},
    "submit": lambda: {"job": some_job(JobKind.LOAD, next(JOBS)), "request": None},
    "lookup": lambda: {"keys": some_keys(), "ask": True},
    "wait": lambda: {"timeout_seconds": 0.0},
    "reset": lambda: {"timeout_seconds": 5.0},
}
MEMORY: Good = {
    "find": lambda: {"keys": some_keys(), "seconds": 5.0},
    "store": lambda: {"keys": some_keys(), "places": range(4), "seconds": 5.0},
    "load": lambda: {"keys": some_keys(), "places": range(4), "seconds": 5.0},
    "lookup": lambda: {"key": some_keys()[0], "request_id": "r"},
    "lease": lambda: {"keys": some_keys()},
    "release": lambda: {"keys": some_keys()},
    "submit": lambda: {"transfer": EngineTransfer(next(JOBS), JobKind.LOAD, some_keys(), int_array(range(4)), "", 0.0)},
    "reset": lambda: {"timeout_seconds": 5.0},
}
OURS = block_keys([bytes([number]) * 32 for number in range(1, 5)])


def stack_of(engine: Engine, tmp_path: Any) -> Any:
    config = stack_file(PLAIN, 16, fs(tmp_path / "own"), shared_fs(tmp_path / "shared"), cpu={"policy": "reuse"})
    return parts_of(config, engine)


def wrong_calls_of(
    stack: Any, kind: type, good: Good, engine: type, adapters: Good
) -> Iterator[tuple[Callable[[], object], Call]]:
    """The wrong calls of a stack, of a request of it, and of its face for adapters, with what gives that face."""
    skipped = {*LIFE, "hold_back", *({"reset"} if kind is TierStack else {"step"})}
    request = ProcessRequest if kind is ProcessStack else StackRequest
    for face, calls in (
        (lambda: stack, wrong_calls(kind, good, skipped)),
        (lambda: stack.request("r"), wrong_calls(request, REQUEST, skipped)),
        (lambda: stack.engine, wrong_calls(engine, adapters, skipped)),
    ):
        for call in calls:
            yield face, call


def waits_long(call: Call) -> bool:
    """Such as `wait` for three seconds, which is an answer."""
    return call.method == "wait" and call.where.split("=")[1] in ("3", "1.5")


async def test_a_tier_stack_takes_no_harm_from_any_argument(tmp_path):
    engine = Engine(PLAIN, 64)
    async with TierStack(stack_of(engine, tmp_path)) as stack:
        calls = refused = 0
        for face, call in wrong_calls_of(stack, TierStack, TIER_STACK, EngineCalls, ADAPTERS):
            calls += 1
            try:
                answer = getattr(face(), call.method)(**call.arguments)
                if inspect.isawaitable(answer):
                    await asyncio.wait_for(answer, 20.0)
            except KVTierError:
                refused += 1
            except BaseException as error:
                raise AssertionError(f"{call} raised {error!r}") from error
            assert stack.stats().errors == 0, call
        for reason in (None, 3, ["x"]):
            with pytest.raises(UsageError):
                stack.engine.hold_back(reason)
        for number in (None, "x", [1], 1.5, 10**400, -1):
            with pytest.raises(UsageError):
                stack.close_on(number)
        assert calls > 1000 < refused
        stack.check_integrity()
        engine.compute(whole(OURS))
        assert (await stack.store(OURS, gpu_blocks=range(4))).ok
        assert (await stack.load(OURS, gpu_blocks=range(8, 12))).ok
        assert not engine.wrong(whole(OURS, 8))


def test_a_process_stack_takes_no_harm_from_any_argument(tmp_path):
    engine = Engine(PLAIN, 64)
    with ServedStack(stack_of(engine, tmp_path)) as stack:
        refused = calls = 0
        for face, call in wrong_calls_of(stack, ProcessStack, PROCESS_STACK, ProcessCalls, PROCESS_ADAPTERS):
            if waits_long(call):
                continue
            try:
                getattr(face(), call.method)(**call.arguments)
                stack.step()
            except KVTierError:
                refused += 1
            except BaseException as error:
                raise AssertionError(f"{call} raised {error!r}") from error
            calls += 1
            if not calls % 50:
                assert stack.stats().errors == 0, call
            assert stack._client.core.connected, call
        assert refused > 1000
        stack.check_integrity()
        engine.compute(whole(OURS))

        def ends_well(job_id: JobId) -> bool:
            return run_jobs(stack, job_id)[job_id].ok

        while not (  # what earlier calls began may still take rows
            ends_well(stack.submit_store(OURS, gpu_blocks=range(4)))
            and ends_well(stack.submit_load(OURS, gpu_blocks=range(8, 12)))
        ):
            pass
        assert not engine.wrong(whole(OURS, 8))


def test_a_tier_below_an_engines_memory_takes_no_harm_from_any_argument(tmp_path):
    pages = np.zeros((16, 4096), np.uint8)
    options = read_options(EngineMemoryOptions, "fs", {"roots": [str(tmp_path)], "capacity": 8 << 20}, "tier")
    namespace = Namespace(KVLayout([GroupLayout.of_pages(4096)]))
    tier = BlockingTier(options, namespace, PagedMemory([[pages]]), "fs", logging.getLogger("test"))
    try:
        for call in wrong_calls(BlockingTier, MEMORY, LIFE):
            try:
                getattr(tier, call.method)(**call.arguments)
                tier.finished()
            except KVTierError:
                pass
            except BaseException as error:
                raise AssertionError(f"{call} raised {error!r}") from error
            assert tier.stats().errors == 0, call
        pages[:4] = 7
        assert tier.store(OURS, range(4), 20.0) == [STORED] * 4
        assert tier.load(OURS, range(8, 12), 20.0) == [LOADED] * 4
        assert (pages[8:12] == 7).all()
    finally:
        tier.close()


async def test_a_time_that_goes_back_or_stands_still_says_nothing_of_the_speed(tmp_path):
    engine = Engine(PLAIN, 64)
    parts = parts_of(stack_file(PLAIN, 16, fs(tmp_path), prefill_tokens_per_second="measured"), engine)
    async with TierStack(parts) as stack:
        engine.compute(whole(OURS))
        await stack.store(OURS, gpu_blocks=range(4))
        with pytest.raises(UsageError, match="when a prompt ended"):
            stack.engine.prompt_computed(160, 5.0, 4.0)
        stack.engine.prompt_computed(160, 4.0, 4.0)
        assert stack.request("r").worth_loading(OURS) == 4
        assert (await stack.load(OURS, gpu_blocks=range(8, 12))).ok


async def test_without_the_checks_one_call_ends_the_plane_for_good(tmp_path, monkeypatch, caplog):
    """What the checks are for: after a hint whose seconds are text nothing is found any more."""
    without_checked_calls(monkeypatch)
    engine = Engine(PLAIN, 64)
    async with TierStack(stack_of(engine, tmp_path)) as stack:
        engine.compute(whole(OURS))
        await stack.store(OURS, gpu_blocks=range(4))
        stack.hint(Retain(OURS, "300", "x"))
        assert stack.stats().errors == 1
        assert not (await stack.load(OURS, gpu_blocks=range(8, 12))).ok


async def test_jobs_of_one_id_that_end_late_one_after_another_are_not_taken_for_lost(tmp_path):
    async with TierStack(stack_of(Engine(PLAIN, 64), tmp_path)) as stack:
        for _ in range(3):
            await stack.run(replace(some_job(JobKind.LOAD, 1 << 42), deadline=-1.0), stack.request("r"))
            assert not stack.stats().errors
