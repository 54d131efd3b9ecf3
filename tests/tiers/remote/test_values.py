"""What lies on the server: names that tell nothing, values that are believed in nothing, bounds."""

from __future__ import annotations

import re

import pytest
from support_valkey import Blocks, valkey_server
from support_values import DAMAGED_VALUES

from kvtier.testing.conformance import make_keys
from kvtier.types.jobs import DropReason
from kvtier.types.keys import make_key
from kvtier_remote.valkey.calls import FRONT_BYTES

NAME = re.compile(r"\{?kvtier:b:[0-9a-f]{16}\.[0-9a-f]{24}\.[0-9a-f]{40}(\}[hb])?")
LARGE, SMALL = 0, 1


async def test_names_tell_nothing_and_large_values_have_two(server, tmp_path):
    suite = Blocks(server)
    async with suite.opened(tmp_path) as driver:
        names = [*make_keys(3, LARGE), *make_keys(2, SMALL)]
        assert all(outcome.ok for outcome in (await driver.store(names)).values())
        size = driver.geometry.aligned_bytes(LARGE)
    found = [name.decode() for name in server.names("*")]
    blocks = [name for name in found if ":b:" in name]
    assert all(NAME.fullmatch(name) for name in blocks)
    assert not any(key[:8].hex() in name for key in names for name in found)
    assert sorted(name[-1] for name in blocks if name.startswith("{")) == ["b"] * 3 + ["h"] * 3
    assert len(blocks) == 8
    lease, marker, manifest = sorted(set(found) - set(blocks))
    assert re.fullmatch(r"kvtier:l:[0-9a-f]{16}\.[0-9a-f]{24}", lease)
    assert re.fullmatch(r"kvtier:m:[0-9a-f]{16}", marker)
    assert re.fullmatch(r"kvtier:manifests:[0-9a-f]{16}\.json", manifest)
    lengths = {server.client.strlen(name) for name in blocks if name.startswith("{")}
    assert lengths == {192 + FRONT_BYTES, size - FRONT_BYTES}


async def test_blocks_expire_and_the_marker_does_not(server, tmp_path):
    async with Blocks(server, expire="1h").opened(tmp_path) as driver:
        assert all(outcome.ok for outcome in (await driver.store(driver_keys())).values())
    times = {name: server.client.ttl(name) for name in server.names("*")}
    assert len(times) == 9
    assert all(0 < times.pop(name) <= 120 for name in server.names("*:l:*"))
    assert all(ttl == -1 if b":b:" not in name else 0 < ttl <= 3600 for name, ttl in times.items())


def driver_keys():
    """Two large blocks and two small ones: six names."""
    return [*make_keys(2, LARGE), *make_keys(2, SMALL)]


def pair(server, group):
    """The names of two blocks of a group, the part that holds the header of each."""
    pattern = "{kvtier:b:*}h" if group == LARGE else "kvtier:b:*"
    return server.names(pattern)[:2]


def swapped(server, group):
    one, other = pair(server, group)
    values = server.client.get(one), server.client.get(other)
    server.client.mset({one: values[1], other: values[0]})
    return 2


def changed(change):
    def damage(server, group):
        (name, _) = pair(server, group)
        server.client.set(name, change(server.client.get(name)))
        return 1

    return damage


def body_gone(server, group):
    name = server.names("*}b" if group == LARGE else "kvtier:b:*")[0]
    server.client.delete(name)
    return 1


DAMAGE = {
    "exchanged": swapped,
    **{name: changed(change) for name, change in DAMAGED_VALUES.items()},
    "half of it gone": body_gone,
}

LENGTHS = ("truncated", "one byte longer", "much longer", "empty")


@pytest.mark.parametrize("group", [LARGE, SMALL], ids=["split", "whole"])
@pytest.mark.parametrize("kind", DAMAGE)
async def test_no_damaged_value_is_loaded_and_none_harms_another(server, tmp_path, kind, group):
    async with Blocks(server).opened(tmp_path) as driver:
        names = driver_keys()
        assert all(outcome.ok for outcome in (await driver.store(names)).values())
        expected = DAMAGE[kind](server, group)
        outcomes = await driver.load(names)
        assert sum(not outcome.ok for outcome in outcomes.values()) == expected, outcomes
        assert {outcome.status for outcome in outcomes.values()} <= {"loaded", "corrupt", "missing"}
        counted = {name for name in driver.tier.counters if name.startswith("mismatch.")}
        assert bool(counted) == any(outcome.status == "corrupt" for outcome in outcomes.values())
        assert ("mismatch.payload_bytes" in counted) == (kind in LENGTHS)
        found = await driver.tier.lookup(names)
        assert [one == "hit" for one in found] == [outcomes[key].ok for key in names], "it was not removed"
        assert all(outcome.ok for outcome in (await driver.store(names)).values())
        assert all(outcome.ok for outcome in (await driver.load(names)).values())


async def test_a_full_server_that_evicts_nothing_drops_what_has_no_room(tmp_path):
    with valkey_server(maxmemory="4mb", maxmemory_policy="noeviction") as server:
        async with Blocks(server).opened(tmp_path) as driver:
            assert driver.opened.capacity_bytes == 4 << 20
            assert "noeviction" in driver.opened.notes[0]
            outcomes = await driver.store(make_keys(16, LARGE))
            dropped = [outcome for outcome in outcomes.values() if not outcome.ok]
            assert dropped
            assert {outcome.reason for outcome in dropped} == {DropReason.DISK_FULL}
            kept = [key for key, outcome in outcomes.items() if outcome.ok]
            assert all(outcome.ok for outcome in (await driver.load(kept)).values())


async def test_a_server_that_evicts_gives_right_blocks_or_none(tmp_path):
    with valkey_server(maxmemory="5mb", maxmemory_policy="allkeys-lru") as server:
        async with Blocks(server).opened(tmp_path) as driver:
            loaded = missing = 0
            for start in range(0, 64, 16):
                names = make_keys(16, LARGE, start)
                assert all(outcome.ok for outcome in (await driver.store(names)).values())
                outcomes = (await driver.load(names)).values()
                loaded += sum(outcome.status == "loaded" for outcome in outcomes)
                missing += sum(outcome.status == "missing" for outcome in outcomes)
            assert loaded
            assert missing
            assert loaded + missing == 64


async def test_a_key_that_no_header_takes_is_dropped(server, tmp_path):
    async with Blocks(server).opened(tmp_path) as driver:
        long, short = make_key(b"x" * 5000, SMALL), make_keys(1, SMALL)[0]
        outcomes = await driver.store([long, short])
        assert (outcomes[long].reason, outcomes[short].ok) == (DropReason.KEY_TOO_LONG, True)
        assert list(await driver.tier.lookup([long, short])) == ["miss", "hit"]
