"""Jobs longer than a message: the client's core and a session divide them and put them together again."""

from __future__ import annotations

import pytest
from support_engine_client import take_results
from support_service import NAMESPACE, block_keys
from support_sessions import HandEngine, names, pool_world

from kvtier.client.core import EngineCore
from kvtier.client.transfers import Transfers
from kvtier.service import wire
from kvtier.service.wire import Places
from kvtier.types.geometry import Geometry
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import STORED, GPUGroup, JobKind, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey

BLOCKS = 3000


def groups(keys: list[OffloadKey]) -> tuple[GPUGroup, ...]:
    return (GPUGroup(GroupIndex(0), tuple(keys), GPURuns.whole(range(len(keys)))),)


def step(core: EngineCore, engine: HandEngine) -> None:
    """What came is taken in, what there is to send is sent in messages that fit."""
    core.take_in(engine.items)
    engine.items.clear()
    messages = wire.FROM_ENGINE.encode(core.out, 0)
    core.out.clear()
    for message in messages:
        engine.send(*wire.FROM_ENGINE.decode(message)[1])


async def test_a_job_of_many_blocks_is_stored_found_and_loaded_whole():
    async with pool_world(rows=128 * 1024) as world:
        engine = await world.engine()
        core, keys = EngineCore(), names(*range(BLOCKS))
        core.out.append(wire.Want(BLOCKS))
        while core.room < BLOCKS:
            step(core, engine)
            await world.turn()
        job = core.begin_store(TransferJob(JobId(0), JobKind.STORE, groups(keys)))
        assert job is not None
        assert sum(isinstance(item, wire.Fill) for item in core.out) == 3
        step(core, engine)
        outcomes = [(1, number % 2 * 5) for number in range(BLOCKS)]
        messages = [outcomes[first : first + 1024] for first in range(0, BLOCKS, 1024)]
        world.pool.on_worker_items(
            engine.session, 0, [wire.Copied(job.job_id, runs, runs is not messages[-1]) for runs in messages]
        )
        await engine.wait(lambda: any(isinstance(item, wire.Ended) and not item.more for item in engine.items))
        step(core, engine)
        (result,) = take_results(core)
        assert [outcome.ok for outcome in result.outcomes[0]] == [True, False] * (BLOCKS // 2)
        request = core.request("r", keys)
        step(core, engine)
        step(core, engine)
        stored = [key for key in keys if key in request.leased]
        assert stored == keys[::2]
        loading = core.begin_load(TransferJob(JobId(0), JobKind.LOAD, groups(stored)), request)
        assert loading is not None
        assert sum(isinstance(item, wire.Load) for item in core.out) == 2
        step(core, engine)
        engine.report(loading.job_id, (len(stored), 0))
        step(core, engine)
        (result,) = take_results(core)
        assert all(outcome.ok for outcome in result.outcomes[0])
        assert engine.session.leasing.leased == 0


def test_a_load_that_was_late_waits_for_rows_and_not_for_a_time_that_is_past() -> None:
    core = EngineCore(own_worker=True)
    core.joins, core.manifest = True, b"m"
    core.take_in([wire.Notes(0, ["note"]), wire.Joined()])
    transfers = Transfers(core, lambda copy: None, Geometry(NAMESPACE.layout, 4096), 16)
    for number, count in ((1, 4), (2, 400)):  # windows of four rows, eight in all
        keys = block_keys(count, 1000 * number)
        blocks = GPUGroup(GroupIndex(0), keys, GPURuns.whole(range(count)))
        transfers.submit(TransferJob(JobId(number), JobKind.LOAD, (blocks,), deadline=1000.0), None, 0.0)
    first = next(item for item in core.out if isinstance(item, wire.Reserve))
    core.take_in([wire.Found(first.number, bytes([wire.LATE] * 4), Places.of([], []))])
    for now in (1.0, 1.1, 2.0):
        transfers.advance(now)
    assert transfers.next_deadline == 1000.0


def test_a_copy_that_a_signal_interrupts_belongs_to_its_job_all_the_same() -> None:
    begun: list[TransferJob] = []

    def interrupt(copy: TransferJob) -> None:
        begun.append(copy)
        raise KeyboardInterrupt

    core = EngineCore(own_worker=True)
    core.joins, core.manifest = True, b"m"
    core.take_in([wire.Notes(0, ["note"]), wire.Joined(), wire.Lent(Places.of([8, 9], [1, 1]))])
    transfers = Transfers(core, interrupt, Geometry(NAMESPACE.layout, 4096), 16)
    blocks = GPUGroup(GroupIndex(0), block_keys(4), GPURuns.whole(range(4)))
    with pytest.raises(KeyboardInterrupt):
        transfers.submit(TransferJob(JobId(1), JobKind.STORE, (blocks,)), None, 0.0)
    core.lose()
    core.on_copied_alone(begun[0].job_id, [STORED] * 2)
    transfers.advance(1.0)
    (result,) = transfers.results
    assert not any(outcome.ok for outcome in result.outcomes[0])
