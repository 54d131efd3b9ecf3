"""Epochs over real stores: what an opening does to them, what a reset of another host then finds, and damaged disks."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import support_protections_epochs as protections
import torch
from support_counts import fully
from support_valkey import Server, stack_tier, valkey_server

import kvtier
from kvtier.tier.shared_epoch import EPOCH_CEILING, OPENINGS_FROM

PAGE = 4096
NAMES = kvtier.block_keys([hashlib.sha256(f"prompt {i}".encode()).digest() for i in range(16)])


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with valkey_server() as one:
        yield one


@pytest.fixture
def server(shared: Server) -> Server:
    shared.client.flushall()
    return shared


class Host:
    """A host's memory, and its stack over a disk of its own and a store that others use too."""

    def __init__(self, *tiers: dict[str, object], tag: str = "prod") -> None:
        self.kv = torch.zeros(32, PAGE, dtype=torch.uint8)
        below = [{"type": "cpu", "cpu_bytes_to_use": "1MiB"}, *tiers]
        lines = ["{" + ", ".join(f"{name}: {value}" for name, value in tier.items()) + "}" for tier in below]
        text = f"namespace: {tag}\ntiers:\n  - type: gpu\n" + "".join(f"  - {line}\n" for line in lines)
        self.stack = kvtier.open_stack(
            kvtier.parse_stack(text), kvtier.KVLayout.of_pages(PAGE), [self.kv], model="demo"
        )

    async def __aenter__(self) -> Host:
        await self.stack.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stack.__aexit__(*error)

    @property
    def epoch(self) -> int:
        return self.stack._assembled.plane.control.epoch

    async def store(self, weights: int) -> None:
        self.kv[:16] = weights
        await self.stack.store(NAMES, gpu_blocks=range(16))
        assert await self.stack.drain(20.0)

    async def load(self) -> list[int]:
        """The weights of the blocks that are found."""
        self.kv[:] = 255
        await self.stack.lookup(NAMES)
        result = await self.stack.load(NAMES, gpu_blocks=range(16))
        return [int(self.kv[i, 0]) for i, outcome in enumerate(result.outcomes[0]) if outcome.ok]


def disk(root: Path) -> dict[str, object]:
    return {"type": "fs", "roots": f"[{root}]", "capacity": "8MiB", "min_free_bytes": 0}


def folder(root: Path) -> dict[str, object]:
    return {"type": "shared_fs", "root": root, "capacity": "16MiB", "min_free_bytes": 0}


@fully
@pytest.mark.parametrize("kind", ["valkey", "shared_fs"])
async def test_a_disk_that_forgot_the_namespace_raises_no_shared_epoch(tmp_path, server, kind):
    """And a reset of another host finds nothing of what the first one stored before it."""
    store = stack_tier(server) if kind == "valkey" else folder(tmp_path / "shared")
    own = disk(tmp_path / "disk")
    async with Host(own, store):
        pass
    async with Host(store) as other:
        for number in range(97):
            async with Host(own, tag=f"other {number}"):
                pass
        async with Host(own, store) as one:
            assert one.epoch == other.epoch, "nothing was reset"
            await one.store(1)
            await other.stack.reset()
            assert await other.load() == []
            async with Host(store) as late:
                assert late.epoch == other.epoch
                await other.store(2)
                assert await late.load() == [2] * 16
            assert set(await one.load()) <= {1}


@pytest.mark.parametrize("kind", ["valkey", "shared_fs"])
async def test_a_disk_that_is_ahead_moves_the_others_to_a_number_that_no_reset_counts_to(tmp_path, server, kind):
    """The store came back from an earlier state."""
    store = stack_tier(server) if kind == "valkey" else folder(tmp_path / "shared")
    own = disk(tmp_path / "disk")
    async with Host(own, store) as one:
        before = saved(server, tmp_path / "shared")
        await one.stack.reset()
        ahead = one.epoch
        await one.store(1)
    restore(server, before)
    async with Host(store) as other, Host(own, store) as one:
        assert one.epoch != ahead
        assert other.epoch == ahead - 1
        assert await one.load() == []
        await one.store(1)
        await other.stack.reset()
        assert other.epoch == ahead
        assert await other.load() == []
        async with Host(store) as late:
            assert await late.load() == []


async def found_through_a_dump(server: Server) -> list[int]:
    """A server comes back from an earlier state beside a host that runs on. What another host finds after its reset."""
    store = stack_tier(server)
    async with Host(store) as running:
        before = saved(server, Path("/nowhere"))
        await running.stack.reset()
        restore(server, before)
        async with Host(store) as late:
            await running.store(1)
            await late.stack.reset()
            assert late.epoch == running.epoch
            return await late.load()


async def test_a_reset_finds_nothing_of_a_host_that_ran_through_a_restored_dump(server):
    assert await found_through_a_dump(server) == []


async def test_without_own_bytes_of_resets_it_does(server, monkeypatch):
    protections.without_own_bytes_of_resets(monkeypatch)
    assert await found_through_a_dump(server) == [1] * 16


def saved(server: Server, root: Path) -> dict[object, bytes]:
    files = {path: path.read_bytes() for path in root.glob("epochs/*") if path.name != "lock"}
    return files | {name: server.client.get(name) for name in server.names("*:m:*")}


def restore(server: Server, before: dict[object, bytes]) -> None:
    for place, held in before.items():
        if isinstance(place, Path):
            place.write_bytes(held)
        else:
            server.client.set(place, held)


async def test_a_disk_that_missed_a_reset_of_a_lost_marker_is_cold(tmp_path, server):
    own, store = disk(tmp_path / "disk"), stack_tier(server)
    async with Host(own, store) as one:
        await one.store(1)
    async with Host(store) as other:
        await other.stack.reset()
    server.client.flushall()
    async with Host(own, store) as one:
        assert await one.load() == []


FORGED = (2**53, EPOCH_CEILING - 1, EPOCH_CEILING, 2**62 - 1, 2**62, 2**63, 10**19 - 1)


@pytest.mark.parametrize("kind", ["fs", "shared_fs"])
async def test_a_forged_marker_costs_no_disk_and_no_other_namespace(tmp_path, server, kind, dial, seed):
    """A quick run draws three epochs."""
    for epoch in Random(seed).sample(FORGED, dial(len(FORGED), 3)):
        server.client.flushall()
        root = tmp_path / str(epoch)
        await forge_marker(server, disk(root) if kind == "fs" else folder(root), epoch)


async def forge_marker(server: Server, own: dict[str, object], epoch: int) -> None:
    store = stack_tier(server)
    async with Host(own, tag="other") as other:
        await other.store(7)
    async with Host(own, store) as one:
        await one.store(1)
    (marker,) = server.names("*:m:*")
    server.client.set(marker, server.client.get(marker).split()[0] + b" %d" % epoch)
    for weights in (2, 3):
        async with Host(own, store) as one:
            assert one.epoch < EPOCH_CEILING
            await one.stack.reset()
            assert await one.load() == []
            await one.store(weights)
            assert await one.load() == [weights] * 16
    async with Host(own, store) as one:
        assert await one.load() == [3] * 16
    async with Host(own, tag="other") as other:
        assert await other.load() == [7] * 16, "another namespace of the same disk"


async def test_a_root_with_a_damaged_superblock_is_down_and_the_stack_goes_on(tmp_path, server, caplog):
    own, store = disk(tmp_path / "root"), stack_tier(server)
    async with Host(own, store) as one:
        await one.store(1)
    superblock = tmp_path / "root" / "superblock"
    superblock.write_bytes(bytes(8192))
    async with Host(own, store) as one:
        (line,) = [record.getMessage() for record in caplog.records if "is down" in record.getMessage()]
        assert f"find {tmp_path / 'root'} -mindepth 1 -delete" in line
        assert await one.load() == [1] * 16, "the server has them"
        await one.stack.reset()
        assert await one.load() == []
        await one.store(2)
    assert superblock.read_bytes() == bytes(8192)
    for path in (tmp_path / "root").iterdir():
        path.unlink()
    async with Host(own, store) as one:
        assert await one.load() == [2] * 16


async def test_hosts_that_open_at_once_over_empty_stores_share(tmp_path, server):
    tiers = (stack_tier(server), folder(tmp_path / "shared"))
    hosts = [Host(*tiers) for _ in range(3)]
    await asyncio.gather(*(host.__aenter__() for host in hosts))
    try:
        assert len({host.epoch for host in hosts}) == 1
        assert hosts[0].epoch >= OPENINGS_FROM
        await hosts[0].store(1)
        assert [await host.load() for host in hosts] == [[1] * 16] * 3
    finally:
        for host in hosts:
            await host.__aexit__(None, None, None)
