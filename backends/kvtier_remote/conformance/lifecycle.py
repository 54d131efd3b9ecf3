"""A transport's life: constructed without I/O, opened, closed as often as you like, and gone without a trace."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, ResourceError
from kvtier.testing.trace import leaving_no_trace, refusing_io, turns
from kvtier.types.jobs import CORRUPT, LOADED, BlockStatus
from kvtier_remote.conformance.base import CLOSE_SECONDS, SENTINEL, Client, TransportBase, in_loop, questions


class ConnectionTests(TransportBase):
    """Opening and closing."""

    def test_a_constructor_does_no_io(self, tmp_path: Path) -> None:
        self.warm_up()
        with leaving_no_trace(), refusing_io():
            self.make(tmp_path)

    @in_loop
    async def test_an_open_transport_says_what_it_is(self, tmp_path: Path) -> None:
        transport = self.make(tmp_path)
        limits = transport.batch_blocks, transport.batch_bytes, transport.concurrency
        assert min(limits) >= 1
        try:
            facts = await transport.open()
        finally:
            await transport.close(CLOSE_SECONDS)
        assert facts.capacity_bytes > 0
        assert not any("\n" in note for note in facts.notes)
        assert limits == (transport.batch_blocks, transport.batch_bytes, transport.concurrency)

    @in_loop
    async def test_closing_is_idempotent_and_needs_no_opening(self, tmp_path: Path) -> None:
        for opens in (False, True):
            transport = self.make(tmp_path)
            if opens:
                await transport.open()
            for _ in range(3):
                assert await transport.close(CLOSE_SECONDS) == 0

    @in_loop
    async def test_a_server_that_is_not_there_is_an_error_that_leaves_nothing(self, tmp_path: Path) -> None:
        transport = self.make_unreachable(tmp_path)
        if transport is None:
            pytest.skip("this engine is always there")
        try:
            with pytest.raises((ConfigError, ResourceError)) as raised:
                await transport.open()
        finally:
            assert await transport.close(CLOSE_SECONDS) == 0
        assert "\n" not in str(raised.value)

    @in_loop
    async def test_calls_after_close_end_as_errors(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            places = self.places(client)[: client.transport.batch_blocks]
            await client.put(places[:1])
            await client.transport.close(CLOSE_SECONDS)
            assert not any(outcome.ok for outcome in await client.get(places[:1]))
            assert not any(outcome.ok for outcome in await client.transport.put([client.value(places[0])]))
            for call in questions(client, places):
                with pytest.raises(OSError):
                    await call()

    @in_loop
    async def test_closing_lets_calls_in_flight_end(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            sizes = [max(self.sizes), min(self.sizes)] * client.transport.concurrency
            places = [client.place(i, size) for i, size in enumerate(sizes)]
            await client.put(places[::2])
            puts = [asyncio.create_task(client.transport.put([client.value(place)])) for place in places]
            gets = [asyncio.create_task(client.get([place])) for place in places]
            asked = asyncio.create_task(client.transport.present(places))
            await turns(3)
            assert await client.transport.close(CLOSE_SECONDS) == 0
            async with asyncio.timeout(CLOSE_SECONDS):
                outcomes = [
                    outcome for calls in (puts, gets) for found in await asyncio.gather(*calls) for outcome in found
                ]
                await asyncio.wait([asked])
            assert asked.exception() is None or isinstance(asked.exception(), OSError)
            assert len(outcomes) == 2 * len(places)
            assert CORRUPT not in outcomes

    @in_loop
    async def test_many_lives_leave_nothing_behind(self, tmp_path: Path) -> None:
        for version in range(5):
            async with self.client(tmp_path) as client:
                places = self.places(client)
                await client.put(places, version)
                assert await client.read(places, version) == [LOADED] * len(places)


class FrozenServerTests(TransportBase):
    """Calls and closing while the server is frozen."""

    @in_loop
    async def test_a_frozen_server_costs_time_and_memory_is_left_alone(self, tmp_path: Path) -> None:
        frozen = self.frozen()
        if frozen is None:
            pytest.skip("this engine cannot be frozen")
        async with self.client(tmp_path, self.make_hurried(tmp_path)) as client:
            places = [client.place(i, size) for i, size in enumerate((5000, 300 << 10))]
            await client.put(places)
            rooms = [client.value(place) for place in places]
            with frozen:
                started = time.monotonic()
                read = client.transport.get(rooms, lambda *_: LOADED)
                written = client.transport.put([client.value(place, 1) for place in places])
                asked = [asyncio.ensure_future(call()) for call in questions(client, places)]
                async with asyncio.timeout(self.call_seconds):
                    moved = asyncio.gather(read, written)
                    await asyncio.wait(asked)
                    outcomes = [outcome for found in await moved for outcome in found]
                assert {outcome.status for outcome in outcomes} == {BlockStatus.FAILED}, outcomes
                assert all(isinstance(one.exception(), OSError) for one in asked), asked
                for room in rooms:
                    room.payload[:] = bytes([SENTINEL]) * len(room.payload)
                print(f"the calls took {time.monotonic() - started:.1f} s")
            async with asyncio.timeout(self.call_seconds):
                while (await client.read(places[:1]))[0].status is BlockStatus.FAILED:
                    pass
            assert all(set(bytes(room.payload)) == {SENTINEL} for room in rooms), "memory was written later"

    @in_loop
    async def test_closing_while_the_server_is_frozen_is_bounded(self, tmp_path: Path) -> None:
        frozen = self.frozen()
        if frozen is None:
            pytest.skip("this engine cannot be frozen")
        transport = self.make_hurried(tmp_path)
        client = Client(transport, str(tmp_path))
        await transport.open()
        place = client.place(0, 5000)
        await client.put([place])
        with frozen:
            reading = asyncio.create_task(transport.get([client.value(place)], lambda *_: LOADED))
            await turns(3)
            async with asyncio.timeout(self.call_seconds):
                await transport.close(1.0)
                assert not (await reading)[0].ok
        assert await transport.close(self.call_seconds) == 0, "once the server goes on, what was stuck has ended"

    @in_loop
    async def test_a_hedged_get_that_is_cancelled_lets_its_memory_go(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            if not client.transport.hedges:
                pytest.skip("no get of this engine is cancelled")
            assert client.transport.batch_blocks == 1
            place = client.place(0, max(self.sizes))
            await client.put([place])
            rooms = [client.value(place, 1) for _ in range(8)]
            for number, room in enumerate(rooms):
                reading = asyncio.create_task(client.transport.get([room], lambda *_: LOADED))
                await turns(number)
                reading.cancel()
                await asyncio.wait([reading])
                room.payload[:] = bytes([SENTINEL]) * len(room.payload)
            assert await client.get([place]) == [LOADED]
            assert all(set(bytes(room.payload)) == {SENTINEL} for room in rooms), "memory was written later"
