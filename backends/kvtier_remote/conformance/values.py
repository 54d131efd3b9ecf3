"""Values in and out: byte for byte, one outcome for each, and not a byte beside them."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.testing.trace import turns
from kvtier.types.jobs import CORRUPT, LOADED, MISSING, STORED, BlockStatus
from kvtier_remote.conformance.base import SENTINEL, Client, TransportBase, content, in_loop
from kvtier_remote.transport import Marker, Sharded, ValueRef


class ValueTests(TransportBase):
    """Writing, reading, finding and removing."""

    @in_loop
    async def test_values_of_every_size_come_back_byte_for_byte(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            places = [place._replace(header_bytes=192 + 64 * (i % 3)) for i, place in enumerate(self.places(client))]
            assert await client.transport.present(places) == [False] * len(places)
            await client.put(places)
            assert await client.transport.present(places) == [True] * len(places)
            assert await client.read(places) == [LOADED] * len(places)
            for place in places[::-1]:
                assert await client.get([place]) == [LOADED]

    @in_loop
    async def test_calls_of_as_much_as_is_allowed(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            limits = client.transport
            number = limits.batch_blocks
            even = max(1, min(limits.batch_bytes // number, (32 << 20) // number))
            for first, size in ((0, 1), (number, even)):
                places = [client.place(first + i, size) for i in range(number)]
                await client.put(places)
                assert await client.get(places) == [LOADED] * number
            large = client.place(2 * number, min(limits.batch_bytes, 32 << 20))
            await client.put([large])
            assert await client.get([large]) == [LOADED]

    @in_loop
    async def test_what_is_missing_is_missing_beside_what_is_there(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            places = [client.place(i, 5000) for i in range(min(8, client.transport.batch_blocks))]
            await client.put(places[::2])
            there = [i % 2 == 0 for i in range(len(places))]
            assert await client.transport.present(places) == there
            assert await client.get(places) == [LOADED if one else MISSING for one in there]

    @in_loop
    async def test_a_value_of_another_length_is_corrupt_and_harms_no_other(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            for number, size in enumerate((5000, 300 << 10)):
                good, place, fine = (client.place(3 * number + i, size) for i in range(3))
                await client.put([good, place, fine])
                for wrong in (size - 1, size + 1, size - 64, size * 2, size * 9 // 10):
                    other = place._replace(payload_bytes=wrong)
                    assert await client.transport.present([good, other, good]) == [True, False, True]
                    assert await client.read([good, other, fine]) == [LOADED, CORRUPT, LOADED], wrong
                    arrived = await client.transport.get([client.value(other)], lambda *_: LOADED)
                    assert arrived == [CORRUPT], "it was left to the verifier"
                assert await client.get([place]) == [LOADED]

    @in_loop
    async def test_the_verdict_on_a_value_is_the_verifier_s(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            places = [client.place(i, 5000) for i in range(min(4, client.transport.batch_blocks))]
            await client.put(places)
            assert await client.get(places, version=1) == [CORRUPT] * len(places), "these are not the bytes"
            assert await client.get(places) == [LOADED] * len(places)

    @in_loop
    async def test_a_value_is_written_over_the_one_of_its_name(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            places = self.places(client)
            for version in range(3):
                await client.put(places, version)
                assert await client.read(places, version) == [LOADED] * len(places)
            shorter = client.place(0, 4000)
            for place in (client.place(0, 5000), shorter, client.place(0, 6000)):
                await client.put([place])
                assert await client.transport.present([place]) == [True]
                assert await client.get([place]) == [LOADED]
            assert await client.get([shorter]) == [CORRUPT]

    @in_loop
    async def test_what_is_removed_is_gone_and_nothing_else(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            places = self.places(client, 3)
            await client.put(places)
            await client.transport.remove(places[::2])
            expected = [MISSING if i % 2 == 0 else LOADED for i in range(len(places))]
            assert await client.read(places) == expected
            assert await client.transport.present(places) == [one == LOADED for one in expected]
            await client.transport.remove(places)
            await client.transport.remove(places)
            assert await client.read(places) == [MISSING] * len(places)
            await client.put(places, 1)
            assert await client.read(places, 1) == [LOADED] * len(places)

    @in_loop
    async def test_many_are_asked_for_in_one_call(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            places = [client.place(i, 64) for i in range(1500)]
            await client.put(places[::100])
            assert await client.transport.present(places) == [i % 100 == 0 for i in range(len(places))]

    @in_loop
    async def test_memory_is_left_alone_once_a_call_has_returned(self, tmp_path: Path) -> None:
        """Bytes written afterwards into the payloads of a put are not stored, and nothing into those of a get."""
        async with self.client(tmp_path) as client:
            limit = min(4, client.transport.batch_blocks)
            places = [client.place(i, size) for i, size in enumerate((5000, 5000, 300 << 10, 300 << 10)[:limit])]
            values = [client.value(place) for place in places]
            assert await client.transport.put(values) == [STORED] * limit
            assert [bytes(value.payload) for value in values] == [content(place, 0)[1] for place in places]
            for value in values:
                value.payload[:] = bytes([SENTINEL]) * len(value.payload)
            assert await client.transport.get(values, lambda *_: LOADED) == [LOADED] * limit
            assert [bytes(value.payload) for value in values] == [content(place, 0)[1] for place in places]
            for value in values:
                value.payload[:] = bytes([SENTINEL]) * len(value.payload)
            await client.put(places, 1)
            assert await client.get(places, 1) == [LOADED] * limit
            assert all(set(bytes(value.payload)) == {SENTINEL} for value in values), "memory was written later"

    @in_loop
    async def test_calls_run_side_by_side(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            await asyncio.gather(*(self._use(client, i) for i in range(client.transport.concurrency)))

    async def _use(self, client: Client, worker: int) -> None:
        number = min(4, client.transport.batch_blocks)
        places = [client.place(100 * worker + i, self.sizes[(worker + i) % len(self.sizes)]) for i in range(number)]
        for version in range(3):
            await client.put(places, version)
            assert await client.transport.present(places) == [True] * number
            assert await client.read(places, version) == [LOADED] * number
        await client.transport.remove(places)
        assert await client.read(places) == [MISSING] * number

    @in_loop
    async def test_two_clients_share_what_is_stored(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as one, self.client(tmp_path) as other:
            places = self.places(one)
            for version, (writer, reader) in enumerate(((one, other), (other, one))):
                await writer.put(places, version)
                assert await reader.transport.present(places) == [True] * len(places)
                assert await reader.read(places, version) == [LOADED] * len(places)
            await one.transport.remove(places)
            assert await other.read(places) == [MISSING] * len(places)

    @in_loop
    async def test_a_question_that_is_given_up_disturbs_nothing(self, tmp_path: Path) -> None:
        async with self.client(tmp_path) as client:
            places = self.places(client)
            await client.put(places)
            for number in range(8):
                asked = asyncio.create_task(client.transport.present(places))
                await turns(number)
                asked.cancel()
                await asyncio.wait([asked])
            assert await client.transport.present(places) == [True] * len(places)

    @in_loop
    async def test_random_operations_against_a_dict(self, tmp_path: Path) -> None:
        seed = int.from_bytes(hashlib.sha256(str(tmp_path).encode()).digest()[:4], "big")
        print(f"seed {seed}")
        rng = random.Random(seed)
        async with self.client(tmp_path) as client:
            held: dict[ValueRef, int] = {}
            places = [client.place(i, rng.choice(self.sizes[:4])) for i in range(12)]
            for step in range(80):
                some = rng.sample(places, rng.randint(1, len(places)))
                match rng.randrange(4):
                    case 0:
                        await client.put(some, step)
                        held.update(dict.fromkeys(some, step))
                    case 1:
                        await client.transport.remove(some)
                        held = {place: version for place, version in held.items() if place not in some}
                    case 2:
                        assert await client.transport.present(some) == [place in held for place in some]
                    case _:
                        for place in some:
                            expected = LOADED if place in held else MISSING
                            assert await client.get([place], held.get(place, 0)) == [expected], (seed, step)


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
