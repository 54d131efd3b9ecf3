"""Values in and out: byte for byte, one outcome for each, and not a byte beside them."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path

from kvtier.testing.trace import turns
from kvtier.types.jobs import CORRUPT, LOADED, MISSING, STORED
from kvtier_remote.conformance.base import TransportBase, in_loop
from kvtier_remote.conformance.client import SENTINEL, Client, content
from kvtier_remote.transport import ValueRef


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
