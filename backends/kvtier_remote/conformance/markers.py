"""Markers: one for a namespace, also when several clients make it, and an epoch that never falls."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from kvtier_remote.conformance.base import TransportBase, in_loop
from kvtier_remote.transport import Marker


class MarkerTests(TransportBase):
    """Making, raising and losing markers."""

    @in_loop
    async def test_a_marker_keeps_its_incarnation_and_its_epoch_never_falls(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as one, self.client(tmp_path) as other:
            name = one.names.marker
            first, second = b"\x80 first ", b"\x01second "
            assert await one.transport.raise_marker(name, Marker(first, 0)) == (first, 0)
            epoch = 0
            for asked in (0, 1, 1, 0, 2, 17, 300, 299, 1 << 33, 5):
                epoch = max(epoch, asked)
                assert await other.transport.raise_marker(name, Marker(first, asked)) == (first, epoch)
                assert await one.transport.raise_marker(name, Marker(second, asked + 1)) == (first, epoch)
        async with self.client(tmp_path) as late:
            assert await late.transport.raise_marker(name, Marker(second, 0)) == (first, 1 << 33)

    @in_loop
    async def test_a_marker_may_begin_at_any_epoch_and_is_alone(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client, self.client(tmp_path / "other") as other:
            for one, marker in ((client, Marker(b"one-----", 7)), (other, Marker(b"two-----", 3))):
                assert await one.transport.raise_marker(one.names.marker, marker) == marker
            assert (await client.transport.raise_marker(client.names.marker, Marker(bytes(8), 0))).epoch == 7

    @in_loop
    async def test_clients_that_race_for_a_marker_end_with_one(self, tmp_path: Path) -> None:
        clients = 4
        start = asyncio.Barrier(clients)
        async with asyncio.TaskGroup() as group:
            lives = [group.create_task(self._race(tmp_path, i, start)) for i in range(clients)]
        results = [life.result() for life in lives]
        if self.races_end_at_once:
            assert len({marker.incarnation for seen in results for marker in seen}) == 1
        for seen in results:
            assert all(one.epoch <= next_one.epoch for one, next_one in pairwise(seen))
        async with self.client(tmp_path) as client:
            last = await client.transport.raise_marker(client.names.marker, Marker(bytes(8), 0))
        assert last.epoch == 7
        assert all(seen[-1].incarnation == last.incarnation for seen in results)

    async def _race(self, place: Path, racer: int, start: asyncio.Barrier) -> list[Marker]:
        async with self.client(place) as client:
            await start.wait()
            seen = [Marker(bytes([racer]) * 8, 0)]
            for epoch in range(8):
                marker = Marker(seen[-1].incarnation, epoch)
                seen.append(await client.transport.raise_marker(client.names.marker, marker))
            return seen[1:]

    @in_loop
    async def test_a_marker_that_is_lost_comes_back_with_another_incarnation(self, tmp_path: Path) -> None:
        old, new = Marker(b"\x01before-", 9), Marker(b"\x02after--", 0)
        async with self.client(tmp_path) as client:
            name = client.names.marker
            assert await client.transport.raise_marker(name, old) == old
            if not self.lose_markers(tmp_path):
                pytest.skip("nothing of this engine is lost from outside")
            assert await client.transport.raise_marker(name, new) == new
            assert await client.transport.raise_marker(name, old) == new
