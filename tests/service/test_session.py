"""Sessions: what an engine is lent and leased, what it may say, and when its rows come back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from support_counts import full_alone
from support_sessions import PAGE, HandEngine, names, pool_world

from kvtier.errors import UsageError
from kvtier.service import session, wire
from kvtier.service.wire import CHANGED, LATE, LEASED, MISSING, PENDING, UNCHANGED, Breach, Keys, Places
from kvtier.testing.memory import MemoryStorage, MemoryTier
from kvtier.types.events import OffloadingEvent
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import JobResult, TransferJob
from kvtier.types.keys import Medium

STORED = "stored"


async def test_what_one_engine_stored_another_finds_leases_and_loads():
    async with pool_world() as world:
        one, two = await world.engine(rows=8), await world.engine()
        assert await one.store(1, 2, 3) == [(3, STORED, "", 0)]
        found = two.ask("r", 1, 2, 9)
        assert found.states == bytes((LEASED, LEASED, MISSING))
        job = two.load("r", found.places)
        rows = found.places.unpack()[0].tolist()
        assert set(rows) <= set(world.pinned())
        two.report(job, (2, 0))
        assert await two.ended(job) == [(2, "loaded", "", 0)]
        assert not set(rows) & set(world.pinned())
        stats = world.pool.stats().tiers["cpu"]
        assert (stats.loaded, stats.hits, stats.load_bytes) == (2, 2, 2 * PAGE)
        assert (stats.stored, stats.store_bytes) == (3, 3 * PAGE)
        counts = {way: (each.took_seconds.count, each.in_flight_bytes) for way, each in stats.transfers.items()}
        assert counts == {"store": (1, 0), "load": (1, 0)}


async def test_each_reservation_of_a_request_gets_its_own_answer():
    storage = MemoryStorage()
    async with pool_world(rows=16, lower=32, storage=storage) as world:
        engine = await world.engine(rows=4)
        for first in range(0, 24, 2):
            await engine.store(first, first + 1)
        engine.send(wire.Reserve("r", 100, Keys.of(names(0, 1))), wire.Reserve("r", 101, Keys.of(names(2, 99))))
        await world.turn()
        found = {item.number: item.states for item in engine.take(wire.Found)}
        assert found == {100: bytes((LEASED, LEASED)), 101: bytes((LEASED, MISSING))}
        engine.send(wire.Drop("r"))
        await world.turn()
        assert engine.session.held == len(engine.lent())


async def test_a_report_may_come_before_the_engine_names_its_job_in_any_order():
    layout = KVLayout.of_pages(PAGE, world_size=2)
    async with pool_world(layout=layout) as world:
        engine = await world.engine(rows=8)
        engine.report(2, (1, 0), worker=0)
        engine.report(1, (2, 0), worker=1)
        engine.report(2, (1, 5), worker=1)
        assert engine.fill(names(1, 2)) == 1
        await world.turn()
        assert not engine.take(wire.Ended)
        engine.report(1, (2, 0), worker=0)
        assert await engine.ended(1) == [(2, STORED, "", 0)]
        assert engine.fill(names(3)) == 2
        assert await engine.ended(2) == [(1, "failed", "", 5)]
        with pytest.raises(Breach, match="not in flight"):
            engine.report(1, (2, 0), worker=0)


async def test_workers_without_a_slice_of_their_own_may_report_fills_or_not():
    layout = KVLayout((GroupLayout((TensorRef(0, PAGE),)),), world_size=3, replicated=True)
    async with pool_world(layout=layout) as world:
        engine = await world.engine(rows=8)
        first = engine.fill(names(1))
        engine.report(first, (1, 7), worker=2)
        engine.report(first + 1, (1, 7), worker=1)
        engine.report(first, (1, 0), worker=0)
        assert await engine.ended(first) == [(1, STORED, "", 0)]
        engine.report(first, (1, 7), worker=1)
        second = engine.fill(names(2))
        engine.report(second, (1, 0), worker=0)
        assert await engine.ended(second) == [(1, STORED, "", 0)]
        job = engine.load("r", engine.ask("r", 1).places)
        for worker in range(3):
            assert await engine.ended(job) == []
            engine.report(job, (1, 0), worker=worker)
        assert await engine.ended(job) == [(1, "loaded", "", 0)]


async def test_jobs_and_reports_may_come_in_several_items():
    async with pool_world() as world:
        engine = await world.engine(rows=8)
        places = [engine.lent().pop(0) for _ in range(3)]
        parts = [Places.of([row], [generation]) for row, generation in places]
        keys = [Keys.of([key]) for key in names(1, 2, 3)]
        engine.send(*(wire.Fill(1, key, part, more) for key, part, more in zip(keys, parts, (1, 1, 0), strict=True)))
        with pytest.raises(Breach, match="other blocks"):
            engine.report(1, (4, 0))
        world.pool.on_worker_items(engine.session, 0, [wire.Copied(1, [(1, 0)], True), wire.Copied(1, [(2, 0)])])
        assert await engine.ended(1) == [(3, STORED, "", 0)]
        found = engine.ask("r", 1, 2, 3)
        rows, generations = found.places.unpack()
        engine.send(wire.Load(2, "r", Places.of(rows[:1], generations[:1]), True))
        with pytest.raises(Breach, match="came after"):
            engine.send(wire.Fill(3, Keys.of(names(4)), Places.of(*zip(engine.lent()[0], strict=True))))
        engine.send(wire.Load(2, "r", Places.of(rows[1:], generations[1:])))
        engine.report(2, (3, 0))
        assert await engine.ended(2) == [(3, "loaded", "", 0)]


async def test_a_lie_about_rows_or_jobs_changes_nothing():
    async with pool_world() as world:
        honest, liar = await world.engine(rows=8), await world.engine(rows=8)
        await honest.store(1, 2)
        leased = honest.ask("h", 1, 2).places
        own = liar.ask("r", 1).places
        row, generation = liar.lent()[0]
        before = world.counts(), world.pinned(), honest.session.held, liar.session.held
        lies = [
            wire.Load(1, "r", leased),
            wire.Load(1, "h", leased),
            wire.Load(1, "r", Places.of(own.unpack()[0], own.unpack()[1] + 1)),
            wire.Load(1, "r", Places(b"", b"")),
            wire.Fill(1, Keys.of(names(7)), Places.of([row], [generation + 1])),
            wire.Fill(1, Keys.of(names(7, 8)), Places.of([row, row], [generation] * 2)),
            wire.Fill(1, Keys.of(names(7, 8)), Places.of([row], [generation])),
            wire.Fill(1, Keys.of(names(7)), Places.of([honest.lent()[0][0]], [honest.lent()[0][1]])),
            wire.Fill(0, Keys.of(names(7)), Places.of([row], [generation])),
            wire.Fill(1, Keys.of([names(7)[0][:-1] + b"\x07"]), Places.of([row], [generation])),
            wire.Return(Places.of([row, row], [generation] * 2)),
            wire.Return(Places.of([-1], [0])),
            wire.Return(Places.of([10**6], [0])),
            wire.Join(b"{}"),
            wire.Hint("melt", Keys.of(names(1))),
            wire.Hint("retain", Keys.of(names(1)), "s" * 1025, 1.0),
            wire.Ask("r" * 1025, 99, Keys.of(names(1))),
            wire.HoldBack("w" * 1025),
            wire.Begin("b", Keys.of(names(1)), {"tenant": "t" * 1025}),
            wire.Begin("b", Keys.of(names(1)), {"colour": "red"}),
        ]
        for lie in lies:
            with pytest.raises((Breach, wire.WireError, UsageError)):
                liar.send(lie)
            await world.turn()
            assert (world.counts(), world.pinned(), honest.session.held, liar.session.held) == before, lie
        job = honest.load("h", leased)
        honest.report(job, (2, 0))
        assert await honest.ended(job) == [(2, "loaded", "", 0)]


async def test_rows_of_a_lost_engine_stay_as_they_are_until_its_processes_have_exited():
    async with pool_world() as world:
        engine, other = await world.engine(rows=8), await world.engine(rows=8)
        await engine.store(1, 2)
        found = engine.ask("r", 1)
        filling, loading = engine.fill(names(3)), engine.load("r", found.places)
        engine.ask("s", 2)
        held, counts = world.pinned(), world.counts()
        engine.lose()
        await world.turn()
        assert (world.pinned(), world.counts()) == (held, counts)
        engine.send(wire.Drop("s"))  # what is still read from a lost connection
        engine.report(filling, (1, 0))
        await world.turn()
        assert other.ask("o", 3).states == bytes((LEASED,))
        other.send(wire.Drop("o"))
        assert set(found.places.unpack()[0].tolist()) <= set(world.pinned()), loading
        engine.exit()
        await world.turn()
        assert world.pinned() == [row for row, _ in other.lent()]
        assert world.counts()["lent"] == len(other.lent())


async def test_a_reset_voids_leases_and_tells_the_others():
    async with pool_world() as world:
        one, two = await world.engine(rows=8), await world.engine(rows=8)
        await one.store(1, 2, 3)
        mine, theirs = one.ask("r", 1).places, two.ask("r", 1, 2).places
        flying = two.load("f", two.ask("f", 3).places)
        filling = two.fill(names(5))
        lent = len(two.lent())
        one.send(wire.Reset(77))
        await world.turn()
        assert [item.number for item in one.take(wire.ResetDone)] == [77]
        assert not one.take(wire.Void)
        assert len(two.take(wire.Void)) == 1
        assert two.ask("other", 1).states == bytes((MISSING,))
        with pytest.raises(Breach, match="not leased"):
            one.load("r", mine)
        assert set(theirs.unpack()[0].tolist()) <= set(world.pinned()), "their workers may be in a copy"
        late = two.load("r", theirs)  # begun before the engine saw the reset
        for job, count in ((late, 2), (flying, 1)):
            two.report(job, (count, 0))
            assert await two.ended(job) == [(count, "cancelled", "", 0)]
        two.report(filling, (1, 0))
        assert await two.ended(filling) == [(1, "dropped", "reset", 0)]
        assert len(two.lent()) == lent
        assert await two.store(6) == [(1, STORED, "", 0)]
        two.send(wire.Drop("r"))
        await world.turn()
        assert world.counts()["quarantined"] == 0


async def test_resets_that_come_meanwhile_are_one():
    async with pool_world(lower=32) as world:
        engine, other = await world.engine(), await world.engine()
        engine.send(*(wire.Reset(number) for number in range(1, 6)))
        await world.turn()
        assert [item.number for item in engine.take(wire.ResetDone)] == [1, 2, 3, 4, 5]
        assert len(other.take(wire.Void)) == 2
        with pytest.raises(Breach, match="resets at once"):
            engine.send(*(wire.Reset(number) for number in range(100)))


async def test_a_key_that_is_asked_again_after_a_reset_is_not_found_in_its_old_row():
    async with pool_world() as world:
        one, two = await world.engine(rows=8), await world.engine()
        await one.store(1)
        old = two.ask("r", 1).places.unpack()
        one.send(wire.Reset(1))
        assert two.ask("r", 1).states == bytes((MISSING,))
        await one.store(1)
        new = two.ask("r", 1)
        assert new.states == bytes((LEASED,))
        assert new.places.unpack()[0].tolist() != old[0].tolist()


async def test_a_reservation_that_waits_is_a_miss_after_a_reset_by_another_engine():
    async with pool_world(rows=4, reservation_seconds=60.0) as world:
        one, two = await world.engine(rows=1), await world.engine()
        await one.store(1)
        found = one.ask("r", 1)
        assert found.states == bytes((LEASED,))
        two.send(wire.Reserve("w", 5, Keys.of(names(1))))
        two.take(wire.Found)
        two.send(wire.Reserve("w", 6, Keys.of(names(*range(50, 60)))))
        one.send(wire.Reset(9))
        await world.turn()
        assert {item.number for item in two.take(wire.Found)} <= {5, 6}
        assert two.session.leasing.reserving == 0


@pytest.mark.parametrize("verdicts", [(UNCHANGED, UNCHANGED), (UNCHANGED, CHANGED)])
async def test_nothing_is_served_or_stored_while_weights_are_in_question(verdicts):
    layout = KVLayout.of_pages(PAGE, world_size=2)
    async with pool_world(layout=layout) as world:
        engine = await world.engine(rows=8)
        await engine.store(1)
        engine.send(wire.AskWeights(5))
        assert [item.number for item in engine.questions] == [5]
        assert engine.ask("r", 1).states == bytes((MISSING,))
        assert await engine.store(2) == [(1, "dropped", "held_back", 0)]
        for worker, verdict in enumerate(verdicts):
            assert not engine.take(wire.Weights)
            world.pool.on_worker_items(engine.session, worker, [wire.Answer(5, verdict)])
        assert [(item.number, item.verdict) for item in engine.take(wire.Weights)] == [(5, min(verdicts))]
        unchanged = min(verdicts) == UNCHANGED
        assert engine.ask("r", 1).states == bytes((LEASED if unchanged else MISSING,))
        assert engine.ask("q", 2).states == bytes((MISSING,))
        engine.send(wire.Reset(1))
        assert await engine.store(3) == [(1, STORED, "", 0) if unchanged else (1, "dropped", "held_back", 0)]
        engine.send(wire.HoldBack("replaced"))
        assert await engine.store(4) == [(1, STORED, "", 0)]


async def test_a_worker_that_is_not_connected_leaves_the_question_open():
    async with pool_world() as world:
        engine = await world.engine()
        engine.session._notes.clear()
        engine.send(wire.AskWeights(5))
        assert [(item.number, item.verdict) for item in engine.take(wire.Weights)] == [(5, wire.UNKNOWN_WEIGHTS)]


async def test_copies_in_flight_are_not_stored_once_a_worker_loads_weights():
    async with pool_world() as world:
        engine = await world.engine(rows=8)
        before, during = engine.fill(names(1)), engine.fill(names(2))
        engine.report(before, (1, 0))
        world.pool.on_worker_items(engine.session, 0, [wire.Loaded(), wire.Copied(during, [(1, 0)])])
        await world.turn()
        assert [(item.number, item.verdict) for item in engine.take(wire.Weights)] == [(0, CHANGED)]
        ended = {item.job: item.outcomes[0][1] for item in engine.take(wire.Ended)}
        assert ended == {before: STORED, during: "failed"}
        assert engine.ask("r", 1).states == bytes((MISSING,))
        dropped = [(1, "dropped", "held_back", 0)]
        engine.send(wire.Reset(1))  # on its way before the engine was told
        assert await engine.store(3) == dropped
        engine.send(wire.HoldBack("replaced"))
        assert await engine.store(4) == dropped
        engine.send(wire.Reset(2, loads=1))
        assert await engine.store(5) == [(1, STORED, "", 0)]
        assert engine.ask("q", 1, 5).states == bytes((MISSING, LEASED))


async def test_an_engine_of_other_weights_holds_its_pool_back_or_is_shut_out():
    async with pool_world(lower=32) as world:
        one, two = await world.engine(rows=8), await world.engine(rows=8)
        await two.store(1)
        one.send(wire.HoldBack("the weights were replaced"))
        assert one.ask("r", 1).states == bytes((MISSING,))
        assert await one.store(2) == [(1, "dropped", "held_back", 0)]
        assert two.ask("r", 1, 2).states == bytes((LEASED, MISSING))
        assert not world.pool.fault
        one.exit()
        two.send(wire.HoldBack("the weights were replaced"))
        assert await two.store(3) == [(1, STORED, "", 0)]
        assert two.ask("s", 3).states == bytes((LEASED,))
        assert all(lower.held_back for lower in world.pool.plane.control.lowers)
        three = await world.engine()
        (joined,) = three.take(wire.Joined)
        assert "the weights were replaced" in joined.fault
        for engine in (two, three):
            assert not world.pool.is_spent
            engine.exit()
        assert world.pool.is_spent


async def test_an_engine_is_served_once_its_workers_are_there_and_it_has_joined():
    layout = KVLayout.of_pages(PAGE, world_size=2)
    async with pool_world(layout=layout, lower=32) as world:
        engine = await world.engine(joins=False)
        assert [item.notes for item in engine.take(wire.Notes)] == [["note 0", "note 1"]]
        engine.send(wire.Want(8))
        assert engine.ask("r", 1).states == bytes((MISSING,))
        assert not engine.lent()
        assert world.pool.plane.control.lowers[0].held_back
        engine.send(wire.Join(engine.manifest))
        assert (await engine.joined()).fault == ""
        await engine.wait(engine.lent)
        assert not world.pool.plane.control.lowers[0].held_back
        with pytest.raises(Breach, match="joins once"):
            engine.send(wire.Join(engine.manifest))


async def test_two_namespaces_share_rows_and_no_block_and_a_third_is_refused_by_name():
    async with pool_world(lower=32) as world:
        one, two = await world.engine("one", rows=4), await world.engine("two", rows=4)
        await one.store(1)
        assert two.ask("r", 1).states == bytes((MISSING,))
        await two.store(1, 2)
        again = await world.engine("two")
        assert again.ask("r", 1, 2).states == bytes((LEASED, LEASED))
        assert one.ask("r", 1, 2).states == bytes((LEASED, MISSING))
        third = await world.engine("three")
        (joined,) = third.take(wire.Joined)
        assert "three" in joined.fault
        assert third.ask("r", 1).states == bytes((MISSING,))
        assert {key for event in two.take(wire.Events) for *_, keys in event.events for key in keys.unpack()} == set(
            names(1, 2)
        )
        one.exit()
        fourth = await world.engine("four")
        assert [item.fault for item in fourth.take(wire.Joined)] == [""]
        assert fourth.ask("r", 1, 2).states == bytes((MISSING, MISSING))
        back = await world.engine("one")
        assert "third" in back.take(wire.Joined)[0].fault
        fourth.exit()
        back.exit()
        back = await world.engine("one")
        assert back.ask("r", 1).states == bytes((LEASED,))


async def test_a_layout_of_other_groups_is_refused_and_shorter_blocks_are_taken_from_the_first():
    groups = GroupLayout((TensorRef(0, 128),)), GroupLayout((TensorRef(1, 128),))
    async with pool_world(layout=KVLayout(groups)) as world:
        engine = await world.engine(joins=False)
        manifest = engine.manifest
        engine.send(wire.Join(manifest.replace(b'"block_size":16', b'"block_size":32')))
        assert "layout" in (await engine.joined()).fault


@pytest.mark.parametrize("rows", [1, 2, 4, 64, 4096, *(pytest.param(rows, marks=full_alone()) for rows in (8, 512))])
async def test_a_greedy_engine_leaves_a_modest_one_its_share(rows):
    async with pool_world(rows=rows, reservation_seconds=0.05) as world:
        greedy, modest = await world.engine(rows=1), await world.engine()
        greedy.send(wire.Want(10**9))
        quotas, stored = world.pool.quotas, []
        for number in range(min(rows, 200)):
            if greedy.lent() and await greedy.store(number) == [(1, STORED, "", 0)]:
                stored.append(number)
        for number in stored:
            greedy.ask(f"a{number}", number)
            await greedy.reserve(f"b{number}", number)
        assert greedy.session.leasing.found <= quotas.found_most
        assert greedy.session.held <= quotas.pinned_most
        assert len(greedy.lent()) <= quotas.lent_most <= max(1, rows // 4)
        modest.send(wire.Want(1))
        await world.turn()
        if rows > 4:
            assert modest.lent(), "a row for the modest engine"
            assert await modest.store(1000) == [(1, STORED, "", 0)]
        for number in stored:
            greedy.send(wire.Drop(f"a{number}"), wire.Drop(f"b{number}"))
        await world.turn()
        assert greedy.session.held == len(greedy.lent())
        greedy.exit()
        modest.exit()
        await world.turn()
        assert world.pinned() == []
        assert (quotas.found, quotas.lent, quotas.engines) == (0, 0, 0)


async def test_engines_that_reserve_more_rows_than_there_are_take_turns():
    """In order of arrival the last engine, with one request, would be served after 23 requests of the others."""
    async with pool_world(rows=64, lower=512, reservation_seconds=60.0) as world:
        engines = [await world.engine(rows=1) for _ in range(4)]
        for number in range(400):
            assert await engines[0].store(number) == [(1, STORED, "", 0)]
        for at, engine in enumerate(engines):
            for number in range(8 if engine is not engines[3] else 1):
                first = 64 * at + 4 * number
                engine.send(wire.Reserve(f"r{number}", number + 1, Keys.of(names(*range(first, first + 4)))))
        served = list[int]()
        while len(served) < 25:
            await asyncio.sleep(0)
            for at, engine in enumerate(engines):
                for found in engine.take(wire.Found):
                    served.append(at)
                    engine.send(wire.Drop(f"r{found.number - 1}"))
        assert sorted(served) == [*[0] * 8, *[1] * 8, *[2] * 8, 3]
        assert served.index(3) < 12
        assert set(served[:12]) == {0, 1, 2, 3}


async def test_a_request_beyond_the_bound_is_cut_at_once_where_nothing_will_come_back():
    async with pool_world(rows=16, lower=64, reservation_seconds=3600.0) as world:
        engine = await world.engine(rows=2)
        for number in range(24):
            assert await engine.store(number) == [(1, STORED, "", 0)]
        engine.number += 1
        engine.send(wire.Reserve("r", engine.number, Keys.of(names(*range(24)))))
        (revoked,) = engine.take(wire.Revoke)
        assert (revoked.requests, revoked.lent) == ([], len(engine.lent())), "the rows that it was lent"
        engine.send(wire.Return(Places.of(*zip(*engine.lent(), strict=True))))
        engine.lent().clear()
        await engine.wait(lambda: any(isinstance(item, wire.Found) for item in engine.items))
        (found,) = engine.take(wire.Found)
        assert found.states.count(LEASED) == 16
        assert LATE in found.states, "in a lower tier"
        assert set(found.states[16:]) <= {LATE, MISSING}, "or given up for the others"
        second = await engine.reserve("s", 23)
        assert not second, "it waits for the leases of the first"
        engine.send(wire.Drop("r"))
        await engine.wait(lambda: any(isinstance(item, wire.Found) for item in engine.items))
        assert engine.take(wire.Found)[0].states == bytes((LEASED,))


async def test_leases_are_wished_back_when_a_reservation_lacks_rows():
    async with pool_world(rows=16, lower=64, reservation_seconds=60.0) as world:
        engine = await world.engine(rows=2)
        for number in range(32):
            assert await engine.store(number) == [(1, STORED, "", 0)]
        held = {}
        for number in range(32):
            (found,) = await engine.reserve(f"r{number}", number) or [None]
            if found is None:
                break
            held[f"r{number}"] = number
        assert engine.session.held == 16
        (revoked,) = engine.take(wire.Revoke)
        assert revoked.requests == [f"r{len(held) - 1}"], "the youngest"
        engine.send(wire.Drop(revoked.requests[0]))
        await world.turn()
        assert [item.states for item in engine.take(wire.Found)] == [bytes((LEASED,))]


async def test_names_of_any_length_are_wished_back_in_messages_that_fit():
    async with pool_world(rows=512) as world:
        engine = await world.engine(rows=64)
        requests = [wire.bounded_text("\U0001f600" * 1024 + f"{number}") for number in range(40)]
        assert len({len(name) for name in requests}) == 1
        requests = ["\U0001f600" * 1000 + f"{number:04}" for number in range(40)]
        for number, request in enumerate(requests):
            assert await engine.store(number) == [(1, STORED, "", 0)]
            engine.ask(request, number)
        second = await world.engine()  # a half of its share is beyond the new one
        revoked = engine.take(wire.Revoke)
        assert sum(len(item.requests) for item in revoked) == 8
        messages = wire.TO_ENGINE.encode([wire.Revoke(requests[:12]), *revoked], 0)
        assert all(len(message) <= wire.MESSAGE_BYTES_MAX for message in messages)
        second.exit()


async def test_a_second_engine_has_loans_wished_back_that_are_beyond_the_share():
    async with pool_world(rows=64) as world:
        first = await world.engine(rows=16)
        assert len(first.lent()) == 16
        second = await world.engine()
        second.send(wire.Want(8))
        (revoked,) = first.take(wire.Revoke)
        assert (revoked.requests, revoked.lent) == ([], 8)
        first.send(wire.Return(Places.of(*zip(*[first.lent().pop() for _ in range(8)], strict=True))))
        assert len(second.lent()) == 8


async def test_events_go_to_every_engine_and_a_late_one_is_sent_what_is_there():
    async with pool_world(lower=64) as world:
        one = await world.engine(rows=8)
        quiet = await world.engine(events=False)
        await one.store(1, 2)
        two = await world.engine()
        for engine in (one, two):
            seen = [
                (tier, removed, key)
                for item in engine.take(wire.Events)
                for tier, _, removed, keys in item.events
                for key in keys.unpack()
            ]
            assert {key for tier, removed, key in seen if tier == "cpu" and not removed} == set(names(1, 2))
        two.send(wire.Announce(Keys.of(names(2, 7))))
        announced = [
            (tier, removed, keys.unpack()) for item in two.take(wire.Events) for tier, _, removed, keys in item.events
        ]
        assert announced[:2] == [("cpu", True, names(2)), ("cpu", False, names(2))]
        assert not one.take(wire.Events)
        assert not quiet.take(wire.Events)


async def test_many_events_come_in_parts_and_the_oldest_are_lost_at_last():
    async with pool_world(rows=4096) as world:
        engine = await world.engine(rows=8)
        event = OffloadingEvent(tuple(names(*range(3000))), Medium("CPU"), False, "cpu")
        engine.session.events.add([event] * 4)
        engine.send()
        seen = [len(keys.unpack()) for item in engine.take(wire.Events) for *_, keys in item.events]
        assert 0 < sum(seen) <= 2048
        while sum(seen) < 12000:
            await asyncio.sleep(0.005)
            seen += [len(keys.unpack()) for item in engine.take(wire.Events) for *_, keys in item.events]
            assert sum(seen) <= 12000
        assert max(seen) <= 1024
        engine.session.events.add([replace(event, keys=event.keys[:1])] * 5000)
        assert engine.session.events.lost == 5000 - 4096


async def test_figures_come_whole_at_first_and_then_as_what_has_changed(monkeypatch):
    monkeypatch.setattr(session, "FIGURES_SECONDS", 0.0)
    async with pool_world() as world:
        engine = await world.engine(rows=8)
        engine.send(wire.AskStats())
        first = engine.take(wire.Stats)
        assert [item.last for item in first] == [False] * (len(first) - 1) + [True]
        series = {(each.name, tuple(each.labels)): each for item in first for each in item.series}
        assert len(series) > 50
        assert series["kvtier_stored_blocks_total", ("cpu",)].values == [0.0]
        assert series["kvtier_transfer_seconds", ("cpu", "store")].values == []
        await engine.store(1, 2)
        engine.send(wire.AskStats())
        changed = {(each.name, tuple(each.labels)): each for item in engine.take(wire.Stats) for each in item.series}
        assert changed["kvtier_stored_blocks_total", ("cpu",)].values == [2.0]
        value, count = changed["kvtier_transfer_seconds", ("cpu", "store")].values
        assert value > 0
        assert count == 1
        assert len(changed) < len(series)
        assert ("kvtier_evicted_blocks_total", ("cpu",)) not in changed
        assert ("kvtier_capacity_bytes", ("cpu",)) in series.keys() - changed.keys()
        assert changed["kvtier_used_bytes", ("cpu",)].values > series["kvtier_used_bytes", ("cpu",)].values
        monkeypatch.setattr(session, "FIGURES_SECONDS", 60.0)
        collected, collect = [], world.pool.send_figures
        monkeypatch.setattr(world.pool, "send_figures", lambda session: (collected.append(session), collect(session)))
        engine.send(*[wire.AskStats()] * 7)
        assert len([item for item in engine.take(wire.Stats) if item.last]) == 7
        assert len(collected) == 5


async def test_requests_hints_and_speeds_reach_the_stack():
    async with pool_world(curves=True, prefill_tokens_per_second="measured") as world:
        engine = await world.engine(rows=8)
        await engine.store(1, 2)
        uses = world.pool.plane.uses
        assert uses is not None
        engine.send(
            wire.Begin("r", Keys.of(names(1)), {"tenant": "t"}, True),
            wire.Begin("r", Keys.of(names(2)), {"tenant": "t"}),
            wire.Extend("r", Keys.of(names(3))),
        )
        assert uses.counted
        assert list(uses._open) == [f"{engine.session.number}:r"]
        engine.send(wire.Computed(160, 0.5, 0.3))
        assert world.pool.plane.choice._block_seconds == pytest.approx(0.02)
        engine.send(wire.Hint("retain", Keys.of(names(1)), "s", 5.0))
        assert world.pool.plane.control.cpu.retained.slots
        engine.send(wire.Hint("release", Keys(0, b""), "s"))
        assert not world.pool.plane.control.cpu.retained.slots
        engine.send(wire.End("r", 32, 8, Keys.of(names(1)), 0.1, True), wire.End("r", 32, 8, Keys.of(names(2)), 0.1))
        assert not uses._open
        engine.send(wire.Begin("q", Keys.of(names(1))))
        engine.lose()
        assert not uses._open


async def hinted(engine: HandEngine, kind: str, *numbers: int, session: str = "s", seconds: float = 60.0) -> Any:
    """A hint: (blocks that it is followed for, those refused by reason)."""
    engine.number += 1
    engine.send(wire.Hint(kind, Keys.of(names(*numbers)), session, seconds, engine.number))
    await engine.world.turn()
    (found,) = engine.take(wire.Hinted)
    return found.accepted, found.refused


async def test_one_of_two_engines_may_retain_its_part_and_what_it_had_before_stays():
    async with pool_world(rows=64, retained_sets=4) as world:
        first = await world.engine(rows=8)
        for start in range(0, 24, 4):
            await first.store(*range(start, start + 4))
        assert await hinted(first, "pin", *range(8, 16)) == (8, {})
        assert await hinted(first, "pin", *range(8, 18), session="s") == (10, {})
        second = await world.engine()
        assert await hinted(first, "pin", *range(8, 20)) == (10, {"over_quota": 2})
        assert await hinted(second, "retain", *range(8), session="x") == (6, {"over_quota": 2}), "the bound of all"
        assert await hinted(first, "release") == (10, {})
        assert await hinted(second, "release", session="x") == (6, {})
        assert await hinted(first, "pin", *range(12)) == (8, {"over_quota": 4})
        assert await hinted(second, "pin", *range(12, 24)) == (8, {"over_quota": 4})
        assert await hinted(second, "pin", *range(2), session="t") == (0, {"over_quota": 2})
        assert await hinted(second, "pin", 0, session="u", seconds=1e-9) == (0, {"too_many": 1})
        stats = world.pool.stats().hints
        assert stats.refused["pin"]["over_quota"] == 2 + 4 + 4 + 2
        assert stats.refused["pin"]["too_many"] == 1
        first.lose()
        first.exit()
        assert await hinted(second, "release") == (16, {}), "the sets of both have one name"
        assert await hinted(second, "pin", *range(4, 20), session="t") == (16, {}), "it is alone again"
        await world.pool.reset()


async def test_blocks_that_no_tier_has_take_nothing_of_a_quota():
    async with pool_world(rows=64, retained_sets=4) as world:
        first = await world.engine(rows=8)
        await first.store(*range(8))
        for number in range(8):
            some = range(100 + 8 * number, 108 + 8 * number)
            assert await hinted(first, "pin", *some, session=str(number)) == (0, {"not_found": 8})
        assert await hinted(first, "pin", *range(4), session="s") == (4, {})
        second = await world.engine()
        for number in range(2):
            some = range(100 + 4 * number, 104 + 4 * number)
            assert await hinted(second, "pin", *some, session=str(number)) == (0, {"not_found": 4})
        assert await hinted(second, "pin", *range(4, 8), session="t") == (4, {})


async def test_blocks_that_were_named_before_they_were_stored_count_once_they_are():
    async with pool_world(rows=64) as world:
        first, second = await world.engine(rows=8), await world.engine()
        assert await hinted(second, "pin", *range(8)) == (0, {"not_found": 8})
        for start in range(0, 16, 4):
            await first.store(*range(start, start + 4))
        assert await hinted(second, "pin", *range(10)) == (8, {"over_quota": 2})


async def test_a_prefetch_leaves_room_in_the_queue_for_other_engines():
    async with pool_world(rows=16, lower=64, prefetch_blocks=12) as world:
        first = await world.engine(rows=2)
        for number in range(40):
            await first.store(number)
        second = await world.engine()
        table = world.pool.plane.control.cpu.directory
        below = [number for number in range(40) if names(number)[0] not in table]
        first.number += 1
        first.send(wire.Hint("prefetch", Keys.of(names(*below[:10])), "s", 0.0, first.number))
        second.send(wire.Hint("prefetch", Keys.of(names(*below[10:20])), "s", 0.0, first.number))
        (one,), (other,) = first.take(wire.Hinted), second.take(wire.Hinted)
        assert (one.accepted, one.refused) == (6, {"queue_full": 4})
        assert other.accepted in (3, 4, 5, 6)
        assert other.accepted + other.refused["queue_full"] == 10


async def test_what_is_computed_sooner_than_loaded_is_not_reserved():
    async with pool_world(rows=16, lower=64, prefill_tokens_per_second=1e9) as world:
        engine = await world.engine(rows=2)
        for number in range(24):
            await engine.store(number)
        (lower,) = world.pool.plane.control.lowers
        await engine.reserve("first", 0)
        assert lower.speed.seconds(1) > 16e-9
        engine.send(wire.Drop("first"))
        (found,) = await engine.reserve("r", *range(24))
        assert set(found.states) <= {LEASED, MISSING}
        assert MISSING in found.states
        assert PENDING not in found.states
        assert engine.session.leasing.leases["r"].computes


async def test_what_is_stored_and_announced_in_one_message_is_published_once_as_stored():
    async with pool_world() as world:
        engine = await world.engine(rows=8, events=True)
        await world.turn()
        engine.take(wire.Events)
        place = engine.lent()[0]
        engine.job += 1
        engine.report(engine.job, (1, 0))
        fill = wire.Fill(engine.job, Keys.of(names(1)), Places.of([place[0]], [place[1]]))
        engine.send(fill, wire.Announce(Keys.of(names(1))))
        await world.turn()
        said = [removed for item in engine.take(wire.Events) for _, _, removed, _ in item.events]
        assert said == [False, True, False], "an announcement is a removal and a store"


async def test_figures_before_a_rest_have_all_copies_in_them():
    async with pool_world() as world:
        engine = await world.engine(rows=8)
        job = engine.fill(names(1, 2))
        engine.send(wire.AskStats(), wire.AskStats(rests=True))
        await world.turn()
        assert [item.last for item in engine.take(wire.Stats)].count(True) == 1
        engine.report(job, (2, 0))
        assert await engine.ended(job) == [(2, STORED, "", 0)]
        last = {(each.name, tuple(each.labels)): each for item in engine.take(wire.Stats) for each in item.series}
        assert last["kvtier_stored_blocks_total", ("cpu",)].values == [2.0]
        engine.send(wire.AskStats(rests=True))
        assert engine.take(wire.Stats)[-1].last


async def test_figures_are_sent_once_in_a_turn_however_often_they_are_asked_for():
    async with pool_world() as world:
        engine = await world.engine()
        engine.send(*(wire.AskFigures(number) for number in range(1000)))
        parts = engine.take(wire.FiguresPart)
        assert {part.number for part in parts} == {999}
        assert [part.last for part in parts].count(True) == 1
        engine.send(wire.AskFigures(7))
        assert {part.number for part in engine.take(wire.FiguresPart)} == {7}


@pytest.mark.parametrize("other", ["x", "100"])
async def test_the_end_of_a_request_ends_no_reservation_of_its_number(other, monkeypatch):
    goes_on, load = asyncio.Event(), MemoryTier.load

    async def slow(tier: MemoryTier, job: TransferJob) -> JobResult:
        await goes_on.wait()
        return await load(tier, job)

    async with pool_world(rows=16, lower=32, storage=MemoryStorage()) as world:
        engine = await world.engine(rows=4)
        for first in range(0, 24, 2):
            await engine.store(first, first + 1)
        await world.turn()
        monkeypatch.setattr(MemoryTier, "load", slow)
        engine.send(wire.Begin(other, Keys.of(names(77))))
        engine.send(wire.Reserve("r", 100, Keys.of(names(0, 1))))
        engine.send(wire.End(other))
        await world.turn()
        assert not engine.take(wire.Found)
        goes_on.set()
        await world.turn()
        await world.turn()
        assert [item.states for item in engine.take(wire.Found)] == [bytes([LEASED] * 2)]
