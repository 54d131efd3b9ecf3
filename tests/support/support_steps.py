"""Exceptions inside the steps of a control plane, at random places, and what each driver answers from then on."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pkgutil
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from support_stack import JUNK, PLAIN, Engine, fs, keys, parts_of, stack_file, whole
from support_stack_tiers import LOAD, STORE

from kvtier.engines.engine_memory.memory import PagedMemory
from kvtier.engines.engine_memory.options import EngineMemoryOptions, read_options
from kvtier.engines.engine_memory.tier import BlockingTier
from kvtier.errors import IntegrityError
from kvtier.stack import TierStack
from kvtier.stack.dispatcher import Dispatcher, Traffic
from kvtier.tier.contract import LookupResult
from kvtier.types.geometry import GroupLayout, KVLayout
from kvtier.types.hints import HintRefusal, HintResult, Retain
from kvtier.types.jobs import BlockOutcome, BlockStatus, JobResult
from kvtier.types.keys import RequestId
from kvtier.types.namespace import Namespace

ENDS_SECONDS = 20.0
BLOCKS = 8
NAMES = keys(2 * BLOCKS)
DISPATCHER = ("_start", "_begin", "_report", "_failure", "_expire", "_drop_waiting", "_set_alarm")
UNGUARDED = {"counters", "take_changes"}
"""Calls outside a step, of figures alone."""


Place = tuple[str, int]
"""A function, and the number of a call of it."""
NOWHERE: Place = ("", 0)


class Defect(Exception):
    """What a step raises."""


ERRORS = (Defect, Defect, Defect, KeyboardInterrupt)
LIVES_AT_ONCE = 20


class StepFault:
    """Counts the calls of functions of a control plane and of a dispatcher while armed, and raises at one, once.

    It raises before the function ran or after it. `raised` is the function's name. `calls` counts the calls of each
    function since `arm`.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self._sites = [*_functions(packages), *((Dispatcher, name) for name in DISPATCHER), (Traffic, "end")]
        self._place, self._after, self._armed = NOWHERE, False, False
        self._error: type[BaseException] = Defect
        self.raised = ""
        self.calls: Counter[str] = Counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        usual = [(owner, name, vars(owner)[name]) for owner, name in self._sites]
        for owner, name, function in usual:
            setattr(owner, name, self._counted(function))
        try:
            yield
        finally:
            for owner, name, function in usual:
                setattr(owner, name, function)

    def arm(self, place: Place, after: bool = False, error: type[BaseException] = Defect) -> None:
        """Raise at the call of a function that has this number from here on."""
        self._place, self._after, self._error = place, after, error
        self._armed, self.raised, self.calls = True, "", Counter()

    def disarm(self) -> None:
        self._armed = False

    def _counted(self, function: FunctionType) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            due = False
            if self._armed:
                name = function.__qualname__
                self.calls[name] += 1
                due = (name, self.calls[name]) == self._place
            if due and not self._after:
                self._strike(function)
            answer = function(*args, **kwargs)
            if due and self._after:
                self._strike(function)
            return answer

        return counted

    def _strike(self, function: FunctionType) -> None:
        self._armed, self.raised = False, function.__qualname__
        raise self._error(self.raised)


def _functions(packages: Sequence[str]) -> Iterator[tuple[type, str]]:
    """The functions of the classes of these packages, without what the language calls and what is no step's part."""
    for package in packages:
        root = import_module(package)
        found = pkgutil.walk_packages(getattr(root, "__path__", []), f"{package}.")
        for module in [root, *(import_module(each.name) for each in found)]:
            for owner in vars(module).values():
                if isinstance(owner, type) and owner.__module__ == module.__name__:
                    for name, function in vars(owner).items():
                        if isinstance(function, FunctionType) and not name.startswith("__") and name not in UNGUARDED:
                            yield owner, name


@dataclass
class Found:
    """What the lives of a driver came to."""

    lives: int = 0
    struck: int = 0
    checked: int = 0
    loaded: int = 0
    raised: list[str] = field(default_factory=list)


class Face:
    """One life of a driver over the root that the life before it left. `fault` is armed while it works."""

    packages: Sequence[str] = ("kvtier.control", "kvtier.policy")

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine = Engine(PLAIN, 6 * BLOCKS)
        self.loaded = self.checked = 0
        self.driver: Any = None

    def check_closed(self) -> None:
        """Everything has ended."""
        assert self.driver.close_report is not None
        assert not self.driver.close_report.unfinished_jobs

    def live(self, rng: random.Random, fault: StepFault, place: Place, error: type[BaseException] = Defect) -> None:
        """Open, compare what is there, work with the fault armed, check the answers, close."""
        raise NotImplementedError

    def compare(self, group: Any, outcomes: Sequence[BlockOutcome]) -> None:
        wrong = self.engine.wrong(group, outcomes)
        assert not wrong, f"wrong bytes: {wrong[:2]}"
        self.loaded += sum(outcome.ok for outcome in outcomes)

    def parts(self) -> Any:
        config = stack_file(PLAIN, 2 * BLOCKS, fs(self.root, capacity=1 << 20))
        times = {"load_timeout_seconds": 5.0, "store_timeout_seconds": 5.0, "close_timeout_seconds": 5.0}
        return parts_of(config, self.engine, **times)

    @staticmethod
    def jobs(stack: Any, rng: random.Random) -> list[Any]:
        """Loads of what is there and stores of new blocks, each on GPU blocks of its own."""
        names = keys(BLOCKS, start=rng.randrange(64))
        groups = [(LOAD, NAMES[:BLOCKS], 0), (STORE, names, BLOCKS), (LOAD, NAMES[4:12], 2 * BLOCKS)]
        groups += [(STORE, keys(BLOCKS, start=rng.randrange(64)), 3 * BLOCKS)]
        return [stack.job(kind, [whole(found, first)]) for kind, found, first in groups]

    def check_answers(self, stack: Any) -> None:
        """The calls of a stack that has failed that memory answers."""
        self.checked += 1
        assert stack.stats().errors
        assert stack.locate(NAMES) == [None] * len(NAMES)
        request = stack.request(RequestId("r"), NAMES)
        reservation = request.reserve(NAMES[:4])
        assert reservation.served
        assert reservation.hits() == [False] * 4
        assert request.reservation is reservation
        assert stack.hint(Retain(NAMES[:4], 5.0, "s")) == HintResult(0, {HintRefusal.STOPPED: 4})
        request.extend(NAMES)
        request.touch(NAMES)
        assert request.worth_loading(NAMES) == len(NAMES)
        request.release()
        assert request.reservation is None
        request.end(3, input_tokens=64)
        stack.engine.prompt_computed(64, 1.0, 2.0)
        stack.cancel(1 << 41)
        assert any(event.removed for event in stack.take_events())
        stack.engine.announce(NAMES)
        assert stack.take_events() == []
        stack.engine.hold_back("its control plane failed")
        try:
            stack.check_integrity()
        except IntegrityError:
            return
        raise AssertionError("a failed stack has no integrity")

    def check_outcomes(self, result: JobResult, kind: Any) -> None:
        """What a job of a stack that has failed ends with."""
        expected = {BlockStatus.MISSING} if kind is LOAD else {BlockStatus.DROPPED}
        assert {outcome.status for outcome in result.outcomes[0]} == expected


class TierFace(Face):
    """A `TierStack`, several calls of it side by side."""

    def live(self, rng: random.Random, fault: StepFault, place: Place, error: type[BaseException] = Defect) -> None:
        asyncio.run(asyncio.wait_for(self._live(rng, fault, place, error), 3 * ENDS_SECONDS))

    async def _live(self, rng: random.Random, fault: StepFault, place: Place, error: type[BaseException]) -> None:
        stack = self.driver = TierStack(self.parts())
        async with stack:
            self.engine.wipe()
            loaded = await stack.load(NAMES, gpu_blocks=range(len(NAMES)))
            self.compare(whole(NAMES), loaded.outcomes[0])
            self.engine.compute(whole(NAMES))
            await stack.store(NAMES, gpu_blocks=range(len(NAMES)))
            assert await stack.drain(ENDS_SECONDS)
            jobs = self.jobs(stack, rng)
            for job in jobs:
                if job.kind is STORE:
                    self.engine.compute(job.gpu_groups[0])
            fault.arm(place, rng.random() < 0.5, error)
            async with asyncio.timeout(ENDS_SECONDS):
                results = await self._work(stack, jobs, rng)
            for job, result in zip(jobs, results, strict=True):
                if job.kind is LOAD:
                    self.compare(job.gpu_groups[0], result.outcomes[0])
            self.engine.wipe()
            if fault.raised and stack._failed:
                async with asyncio.timeout(ENDS_SECONDS):
                    await self._check(stack)
        fault.disarm()
        assert all((storage == JUNK).all() for storage in self.engine.storages), "a copy was in flight after its job"

    async def _work(self, stack: TierStack, jobs: list[Any], rng: random.Random) -> list[JobResult]:
        calls = [asyncio.ensure_future(stack.run(job)) for job in jobs]
        await asyncio.sleep(0)
        await stack.lookup(NAMES)
        request = stack.request(RequestId("a"))
        request.reserve(NAMES[:4])
        stack.hint(Retain(NAMES[:4], 5.0, "s"))
        request.touch(NAMES)
        stack.engine.announce(NAMES[:2])
        stack.cancel(jobs[rng.randrange(len(jobs))].job_id)
        request.end()
        results = await asyncio.gather(*calls)
        await stack.drain(ENDS_SECONDS)
        if rng.random() < 0.2:
            await stack.reset()
        return results

    async def _check(self, stack: TierStack) -> None:
        self.check_answers(stack)
        assert await stack.lookup(NAMES) == [LookupResult.MISS] * len(NAMES)
        self.check_outcomes(await stack.load(NAMES[:4], gpu_blocks=range(4)), LOAD)
        self.check_outcomes(await stack.store(NAMES[:4], gpu_blocks=range(4)), STORE)
        assert await stack.drain(1)
        await stack.reset()


class MemoryFace(Face):
    """A tier below an engine's own memory."""

    packages = (
        "kvtier.engines.engine_memory.plane",
        "kvtier.engines.engine_memory.transfers",
        "kvtier.control.tiers",
        "kvtier.policy",
    )

    def live(self, rng: random.Random, fault: StepFault, place: Place, error: type[BaseException] = Defect) -> None:
        pages = self.engine.pages[0]
        memory = PagedMemory([[self.engine.storages[0]]])
        given = {"roots": [str(self.root)], "capacity": 1 << 20, "io_engine": "threads", "direct": "off"}
        options = read_options(EngineMemoryOptions, "fs", {**given, "min_free_bytes": 0}, "tier")
        namespace = Namespace(KVLayout([GroupLayout.of_pages(pages.shape[1])]), model="test")
        tier = self.driver = BlockingTier(options, namespace, memory, "fs", logging.getLogger("kvtier.test"))
        try:
            self.engine.wipe()
            self.compare(whole(NAMES), tier.load(NAMES, range(len(NAMES)), ENDS_SECONDS))
            self.engine.compute(whole(NAMES))
            tier.store(NAMES, range(len(NAMES)), ENDS_SECONDS)
            fault.arm(place, rng.random() < 0.5, error)
            self._work(tier, rng)
            self.engine.wipe()
            if fault.raised and tier._failed:
                self._check(tier)
        finally:
            tier.close()
        fault.disarm()
        assert np.all(self.engine.storages[0] == JUNK), "a copy was in flight after its job"

    def check_closed(self) -> None:
        assert not self.driver.thread.alive

    def _work(self, tier: BlockingTier, rng: random.Random) -> None:
        names, first = keys(BLOCKS, start=rng.randrange(64)), 3 * BLOCKS
        self.engine.compute(whole(names, first))
        tier.find(NAMES, ENDS_SECONDS)
        tier.lease(NAMES[:4])
        tier.lookup(NAMES[0], "r")
        tier.store(names, range(first, first + BLOCKS), ENDS_SECONDS)
        tier.end_step()
        self.engine.wipe()
        self.compare(whole(NAMES), tier.load(NAMES, range(len(NAMES)), ENDS_SECONDS))
        tier.release(NAMES[:4])
        if rng.random() < 0.2:
            tier.reset()

    def _check(self, tier: BlockingTier) -> None:
        self.checked += 1
        assert tier.stats().errors
        assert tier.find(NAMES, ENDS_SECONDS) == [False] * len(NAMES)
        assert tier.lookup(NAMES[0], "r") is LookupResult.MISS
        tier.lease(NAMES)
        tier.release(NAMES)
        tier.end_step()
        for call in (tier.store, tier.load):
            outcomes = call(NAMES[:4], range(4), ENDS_SECONDS)
            assert not any(outcome.ok for outcome in outcomes)
        tier.reset()


FACES: dict[str, type[Face]] = {"TierStack": TierFace, "EngineMemoryTier": MemoryFace}


def lives(face: str, folder: Path, seed: int, count: int, error: type[BaseException] = Defect) -> Found:
    """`count` lives over one root, each with an exception in another step. An AssertionError names life and step."""
    rng, found = random.Random(seed), Found()
    one = FACES[face](folder / face)
    fault = StepFault(one.packages)
    with fault.installed():
        one.live(rng, fault, NOWHERE)
        first = fault.calls
        one.live(rng, fault, NOWHERE)
        calls = dict(sorted((first & fault.calls).items()))
        for number in range(count):
            name = rng.choice(list(calls))
            place = (name, rng.randint(1, calls[name]))
            try:
                with suppress(KeyboardInterrupt):
                    one.live(rng, fault, place, error)
                one.check_closed()
            except Exception as problem:
                where = f"life {number} of seed {seed}, {fault.raised or 'nothing'} raised"
                raise AssertionError(f"{where}: {problem!r}") from problem
            found.lives += 1
            found.struck += bool(fault.raised)
            found.raised += [fault.raised] if fault.raised else []
    found.loaded, found.checked = one.loaded, one.checked
    return found


def steps_that_raise(budget: Any, tally: Any) -> Any:
    """An attack of `count` lives: a third over each face, every fourth of them with Ctrl-C."""
    logging.getLogger("kvtier").setLevel(logging.CRITICAL + 1)
    rng = random.Random(budget.seed)
    left, faces = budget.count, itertools.cycle((face, error) for face in FACES for error in ERRORS)
    while left > 0:
        (face, error), count = next(faces), min(left, LIVES_AT_ONCE)
        left -= count
        folder = budget.folder / str(left)  # of these lives alone: a root that one of them left open is its own fault
        folder.mkdir()
        try:
            found = lives(face, folder, rng.randrange(1 << 32), count, error)
        except AssertionError as problem:
            tally.wrong_bytes += "wrong bytes" in str(problem)
            tally.hangs += "TimeoutError" in str(problem) or "did not end" in str(problem)
            tally.expect(False, f"{face}: {problem}")
            continue
        tally.notes[f"lives in which a step raised, {face}"] += found.struck
        tally.notes["blocks loaded and compared"] += found.loaded
        tally.iterations += found.lives
    return tally
