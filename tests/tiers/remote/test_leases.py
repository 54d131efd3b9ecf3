"""Markers that are in use: kept where a server evicts, spared by `kvtier gc --old`, and few however many resets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import support_objects
from support_hits import NAMES, hits, stored
from support_tools import tool_json
from support_valkey import Blocks, Server, valkey_server

from kvtier.errors import ResourceError
from kvtier.testing.conformance import make_keys
from kvtier_remote import background
from kvtier_remote.objects.listing import ObjectListing
from kvtier_remote.objects.transport import ObjectTransport
from kvtier_remote.transport import Marker
from kvtier_remote.valkey.transport import ValkeyTransport


@pytest.fixture
def folder(tmp_path):
    return support_objects.Folder(tmp_path / "bucket")


@pytest.mark.parametrize("keeps", [True, False])
async def test_the_marker_is_used_while_so_much_is_stored_as_a_server_holds(tmp_path, monkeypatch, keeps):
    """So one that evicts by use evicts everything else before it."""
    if not keeps:
        monkeypatch.setattr(background.LeaseKeeper, "stored", lambda self, payload_bytes: None)
    with valkey_server(maxmemory="24mb") as server:
        async with Blocks(server).opened(tmp_path) as driver:
            before = uses(server)
            for number in range(64):
                names = make_keys(8, 0, start=8 * number)
                assert all(outcome.ok for outcome in (await driver.store(names)).values())
            stored_bytes = 64 * 8 * driver.geometry.aligned_bytes(0)
            assert stored_bytes > 24 << 20
            assert (uses(server) - before >= 16) == keeps


def uses(server: Server) -> int:
    """How often markers were read."""
    return int(server.client.info("commandstats").get("cmdstat_eval", {"calls": 0})["calls"])


def gc(server: Server) -> None:
    tool_json("gc", f"valkey://{server.address}/kvtier", "-o", "tls=false", "--old")


@pytest.mark.parametrize("leases", [True, False])
async def test_gc_spares_what_an_open_process_finds(server, tmp_path, monkeypatch, leases):
    """Its marker is lost, and another process has made a new one."""
    if not leases:
        monkeypatch.setattr(ValkeyTransport, "keep_lease", lambda self, marker, lease: self.read_marker(marker))
    async with Blocks(server).opened(tmp_path) as one:
        await stored(one)
        server.client.delete(*server.names("*:m:*"))
        async with Blocks(server).opened(tmp_path):
            await asyncio.to_thread(gc, server)
            assert await hits(one) == (len(NAMES) if leases else 0)
    server.client.delete(*server.names("*:l:*") or ["none"])
    await asyncio.to_thread(gc, server)
    assert not server.names("*:b:*"), "nobody is there any more"


async def test_a_bucket_says_which_markers_are_in_use(folder, tmp_path):
    async with support_objects.Blocks(folder).opened(tmp_path) as driver:
        digest, epochs = driver.tier._namespace[:8], driver.tier._epoch
        held = await driver.tier._transport.read_marker(driver.tier._names.marker)
        listing = ObjectListing(driver.tier.options, folder.store)
        assert listing.leases() == {(digest, held)} == {(digest, epochs.marker(0))}
        listing.close()


@pytest.mark.parametrize("forgets", [True, False])
async def test_a_bucket_keeps_one_marker_however_often_it_is_reset(folder, tmp_path, monkeypatch, forgets, dial):
    """One that an earlier release left 3,000 of is opened, and has few after some resets; in a quick run 1,200."""
    count = dial(3000, 1200)
    if not forgets:
        monkeypatch.setattr(ObjectTransport, "_forget", keep_all)
    suite = support_objects.Blocks(folder)
    async with suite.opened(tmp_path) as driver:
        name = driver.tier._names.marker
    held = next(one for one in support_objects.names(folder.store) if one.startswith(name)).rpartition(".")[2]
    for epoch in range(1, count):
        support_objects.write(folder.store, f"{name}/{epoch:020d}.{held}", b"")
    async with suite.opened(tmp_path) as driver:
        assert driver.opened.epoch == count - 1
        for epoch in range(count, count + 4):
            await driver.tier.reset(epoch)
        assert await driver.tier._transport.read_marker(name) == driver.tier._epoch.marker(count + 3)
    left = len([one for one in support_objects.names(folder.store) if one.startswith(name)])
    assert (left, forgets) in ((1, True), (count + 4, False))


async def keep_all(transport: ObjectTransport, name: str, markers: Sequence[Marker]) -> None:
    """In place of the removal of markers that count no more."""


@pytest.mark.parametrize("epoch", [2**61, 2**64, 10**20 - 1])
async def test_a_bucket_s_marker_beyond_the_ceiling_is_none(folder, tmp_path, epoch):
    suite = support_objects.Blocks(folder)
    async with suite.opened(tmp_path) as driver:
        await stored(driver)
        name = driver.tier._names.marker
    support_objects.write(folder.store, f"{name}/{epoch:020d}.{'ab' * 8}", b"")
    async with suite.opened(tmp_path) as driver:
        assert driver.opened.epoch == 0
        assert await hits(driver) == len(NAMES)
        await driver.tier.reset(1)
        driver.epoch = 1
        assert await hits(driver) == 0


async def test_a_reset_that_failed_does_not_count_twice(server, tmp_path, monkeypatch):
    """It is repeated for the same weights. Others that count to the same number mean the next ones."""
    suite = Blocks(server)
    async with suite.opened(tmp_path) as one, suite.opened(tmp_path) as other:
        with monkeypatch.context() as patch:

            async def silent(self: ValkeyTransport, name: str) -> Marker | None:
                raise TimeoutError(110, "no answer")

            patch.setattr(ValkeyTransport, "read_marker", silent)
            with pytest.raises(ResourceError):
                await one.tier.reset(1)
        await other.tier.reset(1)
        await one.tier.reset(2)
        one.epoch = 2
        await stored(one)  # with the first weights
        await other.tier.reset(2)
        other.epoch = 2
        assert await hits(other) == 0
