"""A transport's life: constructed without I/O, opened, closed as often as you like, and gone without a trace."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, ResourceError
from kvtier.testing.trace import leaving_no_trace, refusing_io, turns
from kvtier.types.jobs import CORRUPT, LOADED
from kvtier_remote.conformance.base import CLOSE_SECONDS, TransportBase, in_loop
from kvtier_remote.conformance.client import questions


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
