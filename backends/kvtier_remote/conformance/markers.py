"""Markers: one for a namespace, also when several clients make it, and replaced only by who found it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvtier_remote.conformance.base import TransportBase, in_loop
from kvtier_remote.conformance.client import Client
from kvtier_remote.transport import Marker


class MarkerTests(TransportBase):
    """Making, replacing and losing markers."""

    @in_loop
    async def test_a_marker_is_replaced_only_by_who_found_it(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as one, self.client(tmp_path) as other:
            name = one.names.marker
            assert await one.transport.read_marker(name) is None
            held = Marker(b"\x80 first ", 0)
            assert await one.transport.swap_marker(name, None, held) == held
            for number, epoch in enumerate((1, 2, 17, 300, 1 << 33, (1 << 40) + 1, (1 << 60) + 1)):
                following = Marker(bytes([number]) * 8, epoch)
                assert await other.transport.swap_marker(name, None, following) == held
                assert await other.transport.swap_marker(name, held._replace(epoch=epoch), following) == held
                assert await other.transport.swap_marker(name, held, following) == following
                assert await one.transport.swap_marker(name, held, Marker(bytes(8), 5)) == following
                assert await one.transport.read_marker(name) == following
                held = following
        async with self.client(tmp_path) as late:
            assert await late.transport.read_marker(name) == held

    @in_loop
    async def test_a_marker_may_be_lowered_and_is_alone(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client, self.client(tmp_path / "other") as other:
            for one, marker in ((client, Marker(b"one-----", 7)), (other, Marker(b"two-----", 3))):
                assert await one.transport.swap_marker(one.names.marker, None, marker) == marker
            lower = Marker(b"lower---", 2)
            assert await client.transport.swap_marker(client.names.marker, Marker(b"one-----", 7), lower) == lower
            assert await other.transport.read_marker(other.names.marker) == Marker(b"two-----", 3)

    @in_loop
    async def test_clients_that_race_for_a_marker_end_with_one(self, tmp_path: Path) -> None:
        clients, counts = 4, 8 if self.races_end_at_once else 2  # each of the others waits for the end of a race
        start = asyncio.Barrier(clients)
        async with asyncio.TaskGroup() as group:
            lives = [group.create_task(self._race(tmp_path, i, start, counts)) for i in range(clients)]
        counted = [life.result() for life in lives]
        async with self.client(tmp_path) as client:
            last = await client.transport.read_marker(client.names.marker)
        assert last is not None
        if self.races_end_at_once:
            assert last.epoch == sum(counted), "every client that found its own marker replaced the one it had found"
        assert 0 < last.epoch <= clients * counts, (
            "where a client looks after it wrote, its marker may be replaced by then"
        )

    async def _race(self, place: Path, racer: int, start: asyncio.Barrier, counts: int) -> int:
        """Count on, again and again, from what is there. Returns how often that was the client's own doing."""
        async with self.client(place) as client:
            await start.wait()
            return sum([await self._counted(client, Marker(bytes([racer]) * 7 + bytes([i]), 0)) for i in range(counts)])

    async def _counted(self, client: Client, own: Marker) -> bool:
        held = await client.transport.read_marker(client.names.marker)
        following = own._replace(epoch=held.epoch + 1 if held is not None else 1)
        return await client.transport.swap_marker(client.names.marker, held, following) == following

    @in_loop
    async def test_a_marker_that_is_lost_is_not_written_again(self, tmp_path: Path) -> None:
        old, new = Marker(b"\x01before-", 9), Marker(b"\x02after--", 0)
        async with self.client(tmp_path) as client:
            name = client.names.marker
            assert await client.transport.swap_marker(name, None, old) == old
            if not self.lose_markers(tmp_path):
                pytest.skip("nothing of this engine is lost from outside")
            assert await client.transport.swap_marker(name, old, old._replace(epoch=10)) is None
            assert await client.transport.read_marker(name) is None
            assert await client.transport.swap_marker(name, None, new) == new
            assert await client.transport.swap_marker(name, old, old._replace(epoch=10)) == new
