"""What a block takes of a server's memory: a large one has two names, so that no size class is half empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support_redis import Authority, RedisServer, redis_server
from support_valkey import Blocks

from kvtier.testing.conformance import make_keys
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef

pytestmark = pytest.mark.remote
BLOCKS = 12
MOST_TIMES_PAYLOAD = 1.02


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(Authority(tmp_path_factory.mktemp("tls") / "authority")) as one:
        yield one


@pytest.mark.parametrize("kib", [256, 1024, 2048, 4096])
async def test_large_blocks_take_at_most_a_fiftieth_more_than_their_payload(server, tmp_path: Path, kib: int) -> None:
    class Sized(Blocks):
        layout = KVLayout((GroupLayout((TensorRef(0, kib << 10),)),))
        num_rows = BLOCKS

    server.client.flushall()
    async with Sized(server).opened(tmp_path) as driver:
        assert all(outcome.ok for outcome in (await driver.store(make_keys(BLOCKS, 0))).values())
    names = server.names("*:b:*")
    assert len(names) == 2 * BLOCKS
    held = sum(int(server.client.memory_usage(name, samples=0)) for name in names)
    assert held <= MOST_TIMES_PAYLOAD * BLOCKS * (kib << 10), f"{held / (BLOCKS * (kib << 10)):.3f} of the payload"
