"""Several servers, one of which does not answer: it costs its own values, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.types.jobs import LOADED, MISSING, STORED, BlockStatus
from kvtier_remote.conformance.base import TransportBase, in_loop
from kvtier_remote.conformance.client import Client
from kvtier_remote.transport import Sharded, ValueRef

_ROUNDS = 4
_VALUES = 48


class SpreadServersTests(TransportBase):
    """Transports over several servers, which have `server_of`."""

    @in_loop
    async def test_a_server_that_does_not_answer_costs_no_value_of_another(self, tmp_path: Path) -> None:
        silence = self.one_silent()
        if silence is None:
            pytest.skip("this engine has no servers that can be silenced one by one")
        async with self.client(tmp_path, self.make_hurried(tmp_path)) as client:
            assert isinstance(client.transport, Sharded), "values of different servers go in one call"
            places = [client.place(number, (5000, 300 << 10)[number % 2]) for number in range(_VALUES)]
            for server in _by_server(client, places):
                await client.put(server)
            with silence as silent:
                groups = _by_server(client, places)
                lost = next(group for group in groups if client.transport.server_of(group[0]) == silent)
                assert len(groups) > 1
                for _ in range(_ROUNDS):
                    async with asyncio.timeout(self.call_seconds):
                        await _round(client, places, groups, lost)
            async with asyncio.timeout(2 * self.call_seconds):
                await _well_again(client, lost)
            assert list(await client.transport.present(places)) == [True] * len(places)


def _by_server(client: Client, places: Sequence[ValueRef]) -> list[list[ValueRef]]:
    assert isinstance(client.transport, Sharded)
    found: dict[str, list[ValueRef]] = {}
    for place in places:
        found.setdefault(client.transport.server_of(place), []).append(place)
    return list(found.values())


async def _round(
    client: Client, places: Sequence[ValueRef], groups: Sequence[list[ValueRef]], lost: list[ValueRef]
) -> None:
    """A lookup of all, then loads and stores of each server at once."""
    presence = dict(zip(places, await client.transport.present(places), strict=True))
    live = [group for group in groups if group is not lost]
    assert all(presence[place] is True for group in live for place in group)
    assert not any(presence[place] for place in lost)
    read = await asyncio.gather(*(client.read(group) for group in groups))
    for group, outcomes in zip(groups, read, strict=True):
        if group is lost:
            assert {outcome.status for outcome in outcomes} <= {BlockStatus.FAILED, BlockStatus.DROPPED}
        else:
            assert outcomes == [LOADED] * len(group)
    written = await asyncio.gather(*(client.transport.put([client.value(group[0])]) for group in groups))
    assert all(outcomes == [STORED] for group, outcomes in zip(groups, written, strict=True) if group is not lost)


async def _well_again(client: Client, places: Sequence[ValueRef]) -> None:
    """Until each value is loaded or missing, and all of them were stored."""
    while not {*await client.read(places)} <= {LOADED, MISSING}:  # noqa: ASYNC110 - nothing says when
        await asyncio.sleep(0.05)
    for batch in client.batches(places):
        values = [client.value(place) for place in batch]
        while set(await client.transport.put(values)) != {STORED}:  # noqa: ASYNC110 - nothing says when
            await asyncio.sleep(0.05)
