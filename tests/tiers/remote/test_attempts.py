"""How many calls a tier makes at once, what it repeats, and when a second get goes beside a slow one."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from kvtier.options import TierOptions
from kvtier.testing.conformance import make_keys
from kvtier.testing.conformance.base import ConformanceBase
from kvtier.tier.job_run import JobRun
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import CORRUPT, LOADED, MISSING, STORED, BlockOutcome, BlockStatus, JobKind, failed
from kvtier.types.keys import GroupIndex
from kvtier_remote import call_limit
from kvtier_remote.attempts import Durations
from kvtier_remote.backend import RemoteBackend
from kvtier_remote.call_limit import CallLimit, CompletionDelay, RequestShare
from kvtier_remote.options import RemoteOptions
from kvtier_remote.transport import Marker, NameFormat, TransportInfo, Value, ValueRef, Verify

BUSY, CUT, LATE_ANSWER = (failed(number) for number in (errno.EBUSY, errno.ECONNRESET, errno.ETIMEDOUT))
KEYS = make_keys(40)
Answer = Callable[[str], BlockOutcome | asyncio.Event | None]
"""What becomes of a request, given get or put: an outcome, an event to wait for, or None to do it."""


def done(kind: str) -> None:
    """Every request works."""


class MemoryTransport:
    """Values in memory, a call for each. `answer` decides what becomes of a request."""

    name_format: ClassVar[NameFormat] = NameFormat()
    batch_blocks = 1
    batch_bytes = 1
    concurrency = 8
    flight_bytes = sys.maxsize

    def __init__(self, hedges: bool) -> None:
        self.hedges = hedges
        self.values: dict[str, bytes] = {}
        self.answer: Answer = done
        self.under_way = self.most = self.reading = 0
        self.calls: list[str] = []
        self.cancelled = 0

    async def open(self) -> TransportInfo:
        return TransportInfo(1 << 40, flight_bytes=self.flight_bytes)

    async def close(self, timeout_seconds: float) -> int:
        return 0

    async def read_marker(self, name: str) -> Marker | None:
        return None

    async def swap_marker(self, name: str, held: Marker | None, marker: Marker) -> Marker | None:
        return marker

    async def present(self, places: Sequence[ValueRef]) -> list[bool]:
        return [place.name in self.values for place in places]

    async def remove(self, places: Sequence[ValueRef]) -> None:
        for place in places:
            self.values.pop(place.name, None)

    async def _answered(self, kind: str) -> BlockOutcome | None:
        self.calls.append(kind)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            answer = self.answer(kind)
            await (answer.wait() if isinstance(answer, asyncio.Event) else asyncio.sleep(0))
            return answer if isinstance(answer, BlockOutcome) else None
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1

    async def put(self, values: Sequence[Value]) -> list[BlockOutcome]:
        (value,) = values
        outcome = await self._answered("put")
        if outcome is None:
            self.values[value.place.name] = value.header + bytes(value.payload)
        return [outcome or STORED]

    async def get(self, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
        """One that is cancelled writes to its row once more before it ends."""
        (value,) = values
        self.reading += 1
        try:
            outcome = await self._answered("get")
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            value.payload[:] = bytes(len(value.payload))
            raise
        finally:
            self.reading -= 1
        if outcome is not None:
            return [outcome]
        if value.place.name not in self.values:
            return [MISSING]
        held = self.values[value.place.name]
        value.payload[:] = held[value.place.header_bytes :]
        return [verify(0, memoryview(held)[: value.place.header_bytes])]


class MemoryOptions(RemoteOptions):
    type: Literal["memory"] = "memory"


class MemoryBackend(RemoteBackend):
    Options: ClassVar[type[TierOptions]] = MemoryOptions
    transport: MemoryTransport

    def _make_transport(self) -> Any:
        return self.transport


class Memory(ConformanceBase):
    """Tiers over one transport."""

    layout = KVLayout((GroupLayout((TensorRef(0, 5000),)),))
    num_rows = len(KEYS)

    def __init__(self, hedges: bool = False) -> None:
        self.transport = MemoryTransport(hedges)

    def make(self, place: Path) -> MemoryBackend:
        tier = MemoryBackend(MemoryOptions(request_timeout_seconds=20.0, job_timeout_seconds=40.0))
        tier.transport = self.transport
        return tier


def statuses(outcomes) -> list[BlockStatus]:
    return [outcome.status for outcome in outcomes.values()]


def first(count: int, outcome: BlockOutcome) -> Answer:
    """So many requests end like this, and those after them work."""
    left = iter(range(count))
    return lambda kind: None if next(left, None) is None else outcome


# -- calls at once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [BUSY, LATE_ANSWER])
async def test_a_server_that_is_overloaded_gets_fewer_calls_at_once_and_then_more_again(tmp_path, outcome):
    suite = Memory()
    transport = suite.transport
    async with suite.opened(tmp_path) as driver:
        await driver.store(KEYS)
        assert transport.most == 8
        transport.answer = lambda kind: outcome
        await driver.load(KEYS)
        transport.most = 0
        transport.answer = done
        await driver.load(KEYS[:1])
        await driver.load(KEYS[:6])
        assert 0 < transport.most <= 3
        for _ in range(6):
            await driver.load(KEYS)
        assert transport.most == 8
        assert driver.tier.counters["overloaded"] >= 3


class LateTransport(MemoryTransport):
    """Whose calls wait for this process."""

    def __init__(self, hedges: bool) -> None:
        super().__init__(hedges)
        self.lateness = CompletionDelay()
        self.lateness.learn(60.0)


@pytest.mark.parametrize(("make", "most"), [(MemoryTransport, 1), (LateTransport, 3)])
async def test_more_bytes_are_in_flight_while_calls_wait_for_this_process(tmp_path, make, most):
    suite = Memory()
    suite.transport = make(False)
    async with suite.opened(tmp_path) as driver:
        driver.tier._attempts.limit.most_bytes = driver.tier._context.geometry.aligned_bytes(GroupIndex(0))
        assert statuses(await driver.store(KEYS)) == [BlockStatus.STORED] * len(KEYS)
        assert statuses(await driver.load(KEYS)) == [BlockStatus.LOADED] * len(KEYS)
    assert suite.transport.most == most


async def test_the_bytes_in_flight_follow_the_lateness_of_calls():
    lateness = CompletionDelay()
    limit = CallLimit(16, 2, lateness)
    await limit.begin(2)
    waiting = [asyncio.create_task(limit.begin(2)) for _ in range(6)]
    for seconds, done in ((1.0, 3), (0.0, 3), (1.0, 5)):
        for _ in range(200):
            lateness.learn(seconds)
        limit.end(2)
        await asyncio.sleep(0)
        assert sum(one.done() for one in waiting) == done
    for one in waiting:
        one.cancel()
    await asyncio.wait(waiting, timeout=10)


def test_a_single_late_call_is_no_busy_process():
    lateness, interval = CompletionDelay(), sys.getswitchinterval()
    lateness.learn(2 * interval)
    assert not lateness.late
    for _ in range(8):
        lateness.learn(interval)
    assert lateness.late


async def test_one_burst_of_refusals_halves_once():
    limit = CallLimit(16)
    numbers = [await limit.begin() for _ in range(16)]
    assert [limit.judge(number, True) for number in numbers] == [True] + [False] * 15
    assert limit.limit == 8
    for _ in numbers:
        limit.end()
    for expected in (4, 2, 1, 1):
        assert limit.judge(await limit.begin(), True)
        limit.end()
        assert limit.limit == expected


async def test_a_waiting_call_that_is_cancelled_takes_no_room():
    limit = CallLimit(1)
    await limit.begin()
    waiting = [asyncio.create_task(limit.begin()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    limit.end()
    waiting[1].cancel()  # it has got its room, and does not use it
    await asyncio.wait(waiting, timeout=10)
    assert [one.cancelled() for one in waiting] == [True, True, False]
    limit.end()
    await asyncio.wait_for(limit.begin(), 10)


async def test_bytes_in_flight_are_bounded_beside_one_call():
    limit = CallLimit(16, 6)
    await limit.begin(10)
    waiting = [asyncio.create_task(limit.begin(size)) for size in (3, 3, 1)]
    await asyncio.sleep(0)
    limit.end(10)
    await asyncio.sleep(0)
    assert [one.done() for one in waiting] == [True, True, False]
    limit.end(3)
    await asyncio.wait_for(waiting[2], 10)


async def test_a_large_call_that_is_cancelled_lets_smaller_ones_begin():
    limit = CallLimit(16, 6)
    await limit.begin(3)
    large, small = (asyncio.create_task(limit.begin(size)) for size in (5, 2))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.wait((large, small), timeout=10)
    assert (large.cancelled(), small.done()) == (True, True)


async def test_no_call_begins_while_a_question_is_pending_and_all_do_after_it():
    limit = CallLimit(16, 18)
    with limit.lookup_priority():
        waiting = [asyncio.create_task(limit.begin(2)) for _ in range(3)]
        with limit.lookup_priority():
            await asyncio.sleep(0)
            assert not any(one.done() for one in waiting)
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting), "the first question is still pending"
    await asyncio.wait(waiting, timeout=10)
    assert all(one.done() for one in waiting)


async def test_after_a_question_half_of_the_bytes_are_in_flight(monkeypatch):
    monkeypatch.setattr(call_limit, "LOOKUP_WINDOW_SECONDS", 1000.0)
    limit = CallLimit(16, 4)
    await limit.begin(2)
    await asyncio.wait_for(limit.begin(2), 10)
    with limit.lookup_priority():
        pass
    waiting = asyncio.create_task(limit.begin(1))
    await asyncio.sleep(0)
    limit.end(2)
    await asyncio.sleep(0)
    assert not waiting.done()
    limit.end(2)
    await asyncio.wait_for(waiting, 10)


async def test_a_question_holds_nothing_back_for_longer_than_its_time(monkeypatch):
    monkeypatch.setattr(call_limit, "HELD_SECONDS", 0.0)
    limit = CallLimit(16, 18)
    with limit.lookup_priority():
        await asyncio.wait_for(limit.begin(2), 10)
    with limit.lookup_priority():
        waiting = asyncio.create_task(limit.begin(2))
    await asyncio.wait_for(waiting, 10)


async def test_questions_hold_nothing_back_where_bytes_are_not_bounded(monkeypatch):
    monkeypatch.setattr(call_limit, "HELD_SECONDS", 1000.0)
    limit = CallLimit(16)
    with limit.lookup_priority():
        await asyncio.wait_for(limit.begin(2), 10)


async def test_a_tier_holds_its_calls_back_while_it_asks(tmp_path):
    suite = Memory()
    asked, answered = asyncio.Event(), asyncio.Event()
    async with suite.opened(tmp_path) as driver:
        driver.tier._attempts.limit.most_bytes = 1 << 20
        present = suite.transport.present

        async def slow(places: Sequence[ValueRef]) -> list[bool]:
            asked.set()
            await answered.wait()
            assert suite.transport.calls == []
            return await present(places)

        suite.transport.present = slow
        question = asyncio.create_task(driver.tier.lookup(KEYS))
        await asked.wait()
        storing = asyncio.create_task(driver.store(KEYS[:2]))
        for _ in range(20):
            await asyncio.sleep(0)
        answered.set()
        await question
        assert statuses(await storing) == [BlockStatus.STORED] * 2


# -- what is repeated -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [BUSY, CUT])
async def test_a_request_that_was_refused_or_cut_is_repeated(tmp_path, outcome):
    suite = Memory()
    async with suite.opened(tmp_path) as driver:
        assert set(statuses(await driver.store(KEYS))) == {BlockStatus.STORED}
        suite.transport.answer = first(3, outcome)
        assert set(statuses(await driver.load(KEYS))) == {BlockStatus.LOADED}
        assert driver.tier.counters["repeated"] == 3
        suite.transport.answer = first(3, outcome)
        assert set(statuses(await driver.store(KEYS))) == {BlockStatus.STORED}


@pytest.mark.parametrize("outcome", [LATE_ANSWER, failed(errno.EIO), failed(errno.EACCES), MISSING])
async def test_nothing_else_is_repeated(tmp_path, outcome):
    suite = Memory()
    async with suite.opened(tmp_path) as driver:
        await driver.store(KEYS)
        suite.transport.calls.clear()
        suite.transport.answer = lambda kind: outcome
        assert set(statuses(await driver.load(KEYS))) == {outcome.status}
        assert suite.transport.calls == ["get"] * len(KEYS)


async def test_an_outage_is_not_multiplied(tmp_path):
    suite = Memory()
    suite.transport.answer = lambda kind: CUT
    async with suite.opened(tmp_path) as driver:
        for _ in range(10):
            assert set(statuses(await driver.load(KEYS))) == {BlockStatus.FAILED}
        asked = 10 * len(KEYS)
        assert asked < len(suite.transport.calls) <= asked * 11 // 10


async def test_nothing_is_repeated_after_a_job_s_deadline_or_once_it_is_cancelled(tmp_path):
    suite = Memory()
    async with suite.opened(tmp_path) as driver:
        await driver.store(KEYS)
        loop = asyncio.get_running_loop()
        suite.transport.answer = lambda kind: CUT
        job = driver.load_job(KEYS)
        now = [0.0]
        object.__setattr__(driver.tier._context, "clock", lambda: now[0])
        object.__setattr__(job, "deadline", 1.0)

        def late(kind: str) -> BlockOutcome:
            now[0] = 2.0
            return CUT

        suite.transport.answer = late
        begun = len(suite.transport.calls)
        await driver.tier.load(job)
        assert len(suite.transport.calls) - begun <= 8, "those that had begun"
        now[0] = 0.0
        began = asyncio.Event()
        suite.transport.answer = lambda kind: (began.set(), CUT)[1]
        suite.transport.calls.clear()
        load = loop.create_task(driver.tier.load(driver.load_job(KEYS[:4])))
        await began.wait()
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert suite.transport.calls == ["get"] * 4


def test_a_share_saves_up_no_more_than_its_burst():
    share = RequestShare(one_in=10, at_once=2)
    assert not share.take()
    share.count(9)
    assert not share.take()
    share.count(1000)
    assert [share.take() for _ in range(3)] == [True, True, False]


# -- hedged gets ------------------------------------------------------------------------------------------------------


class Slow:
    """Every get waits for an event of its own, in the order in which they begin."""

    def __init__(self) -> None:
        self.events: list[asyncio.Event] = []
        self.begun = asyncio.Semaphore(0)

    def __call__(self, kind: str) -> asyncio.Event:
        self.events.append(asyncio.Event())
        self.begun.release()
        return self.events[-1]

    async def until(self, count: int) -> None:
        """Until so many more have begun."""
        async with asyncio.timeout(20):
            for _ in range(count):
                await self.begun.acquire()


@pytest.fixture
async def hedging(tmp_path):
    """A tier that hedges, with all blocks stored and loaded."""
    suite = Memory(hedges=True)
    async with suite.opened(tmp_path) as driver:
        assert set(statuses(await driver.store(KEYS))) == {BlockStatus.STORED}
        assert set(statuses(await driver.load(KEYS))) == {BlockStatus.LOADED}
        assert driver.tier.counters["hedged"] == 0
        driver.rows.view[:] = 0x55
        yield driver, suite.transport


@pytest.fixture
async def block(hedging):
    """One that is stored, as a load of the tier has it."""
    driver, _ = hedging
    job = driver.load_job(KEYS[:1])
    (one,) = driver.tier._blocks(JobRun(job, JobKind.LOAD, asyncio.get_running_loop()))
    return one


@pytest.mark.parametrize("answers_first", [0, 1])
async def test_the_first_of_two_gets_that_verifies_counts_and_the_other_writes_no_row(hedging, block, answers_first):
    driver, transport = hedging
    slow = transport.answer = Slow()
    get = asyncio.create_task(driver.tier._hedged.get(driver.tier._begin_get, block))
    await slow.until(2)
    slow.events[answers_first].set()
    assert await get == LOADED
    assert transport.reading == 0, "none uses the row any more"
    assert (transport.cancelled, len(slow.events)) == (1, 2)
    counters = driver.tier.counters
    assert (counters["hedged"], counters["hedged.won"]) == (1, answers_first)
    place = block.value.place
    assert bytes(block.value.payload) == transport.values[place.name][place.header_bytes :]
    assert block.found == driver.rows.checksum(block.row), "verified where it was read"


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [((BUSY, None), LOADED), ((None, CORRUPT), LOADED), ((CORRUPT, None), LOADED), ((CUT, CORRUPT), CUT)],
)
async def test_a_get_that_fails_leaves_it_to_the_other(hedging, block, outcomes, expected):
    driver, transport = hedging
    slow, left = Slow(), iter(outcomes)

    async def answered(kind: str) -> BlockOutcome | None:
        outcome = next(left)
        await slow(kind).wait()
        return outcome

    transport._answered = answered
    get = asyncio.create_task(driver.tier._hedged.get(driver.tier._begin_get, block))
    await slow.until(2)
    for event in slow.events:
        event.set()
    assert await get == expected


async def test_at_most_one_get_in_20_is_hedged(hedging):
    driver, transport = hedging
    slow = transport.answer = Slow()
    load = asyncio.create_task(driver.load(KEYS[:8]))
    await slow.until(8 + 2)  # 40 loads came before
    await asyncio.sleep(0.2)  # longer than any of them waits for its first get
    assert len(slow.events) == 10
    for event in slow.events:
        event.set()
    assert set(statuses(await load)) == {BlockStatus.LOADED}


async def test_a_transport_that_cannot_be_cancelled_is_not_hedged(tmp_path):
    suite = Memory(hedges=False)
    async with suite.opened(tmp_path) as driver:
        await driver.store(KEYS)
        await driver.load(KEYS)
        slow = suite.transport.answer = Slow()
        load = asyncio.create_task(driver.load(KEYS[:1]))
        await slow.until(1)
        await asyncio.sleep(0.2)  # longer than a get is waited for
        assert len(slow.events) == 1
        slow.events[0].set()
        assert statuses(await load) == [BlockStatus.LOADED]


def test_the_wait_is_longer_than_95_of_100_gets_of_the_last_minute_took():
    now = [0.0]
    durations = Durations(lambda: now[0])
    assert durations.patience_seconds() == 0.05
    for number in range(100):
        durations.add(number / 100)
    assert durations.patience_seconds() == 0.05, "it is found out anew once a second"
    now[0] = 1.0
    assert durations.patience_seconds() == pytest.approx(0.95)
    now[0] = 61.0
    assert durations.patience_seconds() == 0.05
