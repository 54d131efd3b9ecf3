"""A server that does not answer: every call ends, and memory is left alone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvtier.testing.trace import turns
from kvtier.types.jobs import LOADED, BlockStatus
from kvtier_remote.conformance.base import TransportBase, in_loop
from kvtier_remote.conformance.client import SENTINEL, Client, questions


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
