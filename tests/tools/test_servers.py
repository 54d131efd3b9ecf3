"""`kvtier ls`, `du`, `gc` and `fsck` on servers: of the right blocks only, beside who uses them, in bounded memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support_remote_blocks import LARGE_BYTES, NAMES, SMALL_BYTES, store_epochs
from support_tools import found, refusal, tool, tool_json
from support_valkey import Blocks, Server, valkey_cluster, valkey_server

from kvtier.errors import RootError
from kvtier.testing.conformance import make_keys
from kvtier.tier.inspection import Access, BlockState
from kvtier_remote import ValkeyBackend
from kvtier_remote.valkey.listing import INSPECTOR, ValkeyListing


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with valkey_server() as one:
        yield one


@pytest.fixture
def server(shared: Server) -> Server:
    shared.client.flushall()
    return shared


def stored(server: Server, **what: Any) -> str:
    """Blocks on a server, of processes whose leases have expired. The digits of their namespace."""
    digits = store_epochs(Blocks(server), **what)
    expire_leases(server)
    return digits


def expire_leases(server: Server) -> None:
    """What time does two minutes after the last process has closed."""
    server.client.delete(*server.names("*:l:*"))


def address(server: Server, prefix: str = "kvtier") -> tuple[str, ...]:
    return f"valkey://{server.address}/{prefix}", "-o", "tls=false"


def loadable(server: Server, tag: str = "") -> int:
    """How many of the blocks load."""

    async def work() -> int:
        suite = Blocks(server)
        async with suite.opened(Path(), replace(suite.namespace(), tag=tag)) as driver:
            return sum(outcome.ok for outcome in (await driver.load(NAMES)).values())

    return asyncio.run(work())


def test_blocks_are_listed_by_what_their_names_say(server: Server) -> None:
    begun = time.time()
    digits = stored(server)
    document = tool_json("ls", *address(server), "--full")
    assert (document["layout"], document["root"]) == ("valkey", address(server)[0])
    assert {block["key"] for block in document["blocks"]} == {sha256(key).hexdigest()[:40] for key in NAMES}
    for block in document["blocks"]:
        assert (block["namespace"], block["epoch"], block["state"]) == (digits, 0, "current")
        assert block["payload_bytes"] in (LARGE_BYTES, SMALL_BYTES)
        assert block["stored_bytes"] > block["payload_bytes"]
        assert begun - 1 < block["stored_at"] <= time.time()
    heading, *lines = tool("ls", *address(server)).stdout.splitlines()
    assert len(lines) == 5
    assert lines[0].index("current") == heading.index("state")


def test_usage_is_added_up_by_namespace_and_by_epoch(server: Server) -> None:
    one, two = stored(server, epochs=2), stored(server, tag="two", names=NAMES[:2])
    document = tool_json("du", *address(server))
    rows = {row["namespace"]: row for row in document["rows"]}
    assert (rows[one]["blocks"], rows[one]["leftover_blocks"], rows[one]["epoch"]) == (5, 5, 1)
    assert (rows[two]["blocks"], rows[two]["payload_bytes"]) == (2, 2 * LARGE_BYTES)
    by_epoch = {
        (row["namespace"], row["epoch"]): row for row in tool_json("du", *address(server), "--by", "epoch")["rows"]
    }
    assert [by_epoch[one, epoch]["blocks"] for epoch in (0, 1)] == [0, 5]
    assert by_epoch[one, 0]["leftover_blocks"] == 5
    lines = tool("du", *address(server), "--by", "epoch").stdout.splitlines()
    assert {(*line.split()[:2], line.split()[-1]) for line in lines[1:4]} == {
        (one, "0", "no"),
        (one, "1", "yes"),
        (two, "0", "yes"),
    }


def test_what_no_process_will_find_is_dropped_and_nothing_else(server: Server) -> None:
    stored(server, epochs=2)
    before = set(server.names("*"))
    assert tool_json("gc", *address(server), "--old", "--dry-run")["dropped"][0]["blocks"] == 5
    assert set(server.names("*")) == before
    assert tool_json("gc", *address(server), "--old")["dropped"][0]["blocks"] == 5
    assert tool("gc", *address(server), "--old").stdout == "there is nothing to drop\n"
    assert loadable(server) == 5
    server.client.delete(*server.names("*:m:*"))
    expire_leases(server)
    assert tool_json("gc", *address(server), "--old")["dropped"][0]["blocks"] == 5, "without a marker none is found"
    assert server.names("*:b:*") == []


def test_a_namespace_is_dropped_and_the_others_stay(server: Server) -> None:
    one, two = stored(server), stored(server, tag="two")
    assert "no namespace begins with 'ffffff'" in refusal("gc", *address(server), "--namespace", "ffffff")
    whole = replace(Blocks(server).namespace(), tag="two").digest().hex()
    (dropped,) = tool_json("gc", *address(server), "--namespace", whole)["dropped"]
    assert (dropped["namespace"], dropped["blocks"]) == (two, 5)
    assert (loadable(server, tag="two"), loadable(server)) == (0, 5)
    assert len(server.names("*:m:*")) == 2, "an epoch never decreases"
    assert [row["namespace"] for row in tool_json("du", *address(server))["rows"]] == [one]


def test_a_manifest_says_what_a_namespace_is(server: Server) -> None:
    """It is written once, and goes with the last block of its namespace. Names say nothing readable."""
    digits = stored(server, tag="for tenant A")
    (name,) = server.names("*manifests*")
    assert name.decode() == f"kvtier:manifests:{digits}.json"
    (row,) = tool_json("du", *address(server))["rows"]
    assert row["tag"] == "for tenant A"
    server.client.set(name, "changed by people")
    stored(server, tag="for tenant A")
    assert server.client.get(name) in (b"changed by people", "changed by people")
    assert tool_json("du", *address(server))["rows"][0]["tag"] is None, "what is no manifest says nothing"
    tool_json("gc", *address(server), "--namespace", digits)
    assert server.names("*manifests*") == []


def test_what_is_stored_while_a_tool_runs_is_no_leftover(server: Server) -> None:
    """Markers are read when a tool begins. A namespace that is new, or was reset since, is looked at once more."""
    stored(server)
    tier = server.tier()
    store = INSPECTOR.inspect_server(tier.options, Access.CHANGE)
    stored(server, tag="new")
    stored(server, epochs=2)
    dropped = [
        block for step in store.drop(lambda block: block.state is not BlockState.CURRENT) for block in step.blocks
    ]
    store.close()
    assert {block.epoch for block in dropped} <= {0}, "what was current when the tool began, at most"
    assert (loadable(server), loadable(server, tag="new")) == (5, 5)


def test_a_prefix_is_a_scope(server: Server) -> None:
    stored(server)
    server.client.set("xkvtier:b:something", "of another program")
    assert len(tool_json("ls", *address(server))["blocks"]) == 5
    for other in ("vtier", "kvtie", "x"):
        assert tool_json("ls", *address(server, other))["blocks"] == []
        assert tool_json("fsck", *address(server, other))["counts"] == []
    assert found(tool_json("fsck", *address(server))) == set()


def test_damage_of_every_kind_is_found_and_removed_on_request(server: Server) -> None:
    stored(server)
    assert tool("fsck", *address(server)).exit_code == 0
    smalls = server.names("kvtier:b:*")
    fronts, rests = server.names("*}h"), server.names("*}b")
    server.client.setrange(smalls[0], 200, b"\xff")
    server.client.setrange(smalls[1], 30, b"\xff")
    server.client.copy(smalls[0], smalls[2], replace=True)
    server.client.setrange(rests[0], 7, b"\xff")
    server.client.append(rests[1], b"more")
    expected = {
        ("corrupt", "header_checksum", 1),
        ("corrupt", "key", 1),
        ("corrupt", "payload", 2),
        ("corrupt", "slot_bytes", 1),
    }
    assert found(tool_json("fsck", *address(server), status=1)) == expected
    assert len(server.names("*:b:*")) == 7, "nothing is changed unless asked for"
    repaired = tool_json("fsck", *address(server), "--repair")
    assert (repaired["damaged"], found(repaired)) == (0, expected)
    assert (server.names("*:b:*"), fronts == []) == ([], False)


def test_what_no_lookup_finds_is_a_leftover(server: Server) -> None:
    stored(server, epochs=2)
    current = [name for name in server.names("*}h") if b"00000001." in name]
    server.client.delete(current[0])
    server.client.delete(current[1].removesuffix(b"h") + b"b")
    server.client.set("kvtier:b:garbage\n", "not ours")
    document = tool_json("fsck", *address(server))
    assert found(document) == {("old", "old", 5), ("orphaned", "orphaned", 2), ("unknown_file", "name", 1)}
    assert (document["whole"], document["damaged"]) == (3, 0)
    tool_json("gc", *address(server), "--old")
    assert found(tool_json("fsck", *address(server))) == {("unknown_file", "name", 1)}
    assert loadable(server) == 3


def test_looking_is_no_use_that_keeps_a_block_on_the_server(server: Server) -> None:
    stored(server)
    idle = {name: server.client.object("idletime", name) for name in server.names("*:b:*")}
    time.sleep(2.1)  # the server's clock of uses counts whole seconds
    tool_json("ls", *address(server))
    tool_json("fsck", *address(server))
    assert all(server.client.object("idletime", name) > before for name, before in idle.items())


def test_all_primaries_of_a_cluster_are_listed(tmp_path: Path) -> None:
    with valkey_cluster() as servers:
        where = (f"valkey://{servers[0].address}", "-o", "tls=false", "-o", "mode=cluster")
        suite = Blocks(servers[0], mode="cluster")

        async def work() -> None:
            async with suite.opened(tmp_path) as driver:
                await driver.store([*make_keys(6, 0), *make_keys(6, 1)])

        asyncio.run(work())
        assert all(server.names("*:b:*") for server in servers)
        document = tool_json("du", *where)
        assert (document["total"]["blocks"], document["regions"]) == (12, 3)
        assert tool_json("fsck", *where)["whole"] == 12
        assert tool_json("gc", *where, "--namespace", document["rows"][0]["namespace"])["dropped"][0]["blocks"] == 12
        assert not any(server.names("*:b:*") for server in servers)


def test_many_names_come_in_pages(server: Server, dial: Callable[[int, int], int]) -> None:
    """No list of all names is held: pages are as large as an answer of the server."""
    count = dial(20_000, 8000)
    name = f"kvtier:b:{'0' * 16}.{'0' * 24}."
    with server.client.pipeline(transaction=False) as pipe:
        for number in range(count):
            pipe.set(f"{name}{number:040x}", b"x")
        pipe.execute()
    listing = ValkeyListing(server.options())
    pages = [len(page) for page in listing.pages()]
    listing.close()
    assert (sum(pages), max(pages) < 4000) == (count, True)
    assert tool_json("gc", *address(server), "--old")["dropped"][0]["blocks"] == count


def test_a_tier_of_a_stack_file_is_named_and_brings_its_credentials(server: Server, tmp_path: Path) -> None:
    stored(server)
    secret, stack = tmp_path / "secret", tmp_path / "stack.yaml"
    secret.write_text("open sesame")
    secret.chmod(0o600)
    stack.write_text(
        "tiers:\n"
        "  - {type: cpu, cpu_bytes_to_use: 64MiB}\n"
        f"  - {{type: fs, name: disk, roots: [{tmp_path}/a, {tmp_path}/b], capacity: 64MiB}}\n"
        f"  - {{type: valkey, name: cache, servers: ['{server.address}'], password_file: {secret}, tls: false}}\n"
    )
    server.client.config_set("requirepass", "open sesame")
    try:
        assert len(tool_json("ls", "cache", "--stack", stack)["blocks"]) == 5
        assert "wants a password" in refusal("ls", *address(server))
        assert len(tool_json("ls", *address(server), "-o", f"password_file={secret}")["blocks"]) == 5
    finally:
        server.client.config_set("requirepass", "")
    assert "has no tier 'cold' (tiers: cpu, disk, cache)" in refusal("ls", "cold", "--stack", stack)
    assert f"give one of them: {tmp_path}/a, {tmp_path}/b" in refusal("ls", "disk", "--stack", stack)
    assert "keeps nothing" in refusal("ls", "cpu", "--stack", stack)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("valkey://me:sesame@127.0.0.1:1/a",), "an address holds no user and no password"),
        (("valkey://127.0.0.1:1/a", "-o", "password=sesame"), "password: a stack file holds no secret"),
        (("valkey://127.0.0.1:1/a", "-o", "tls"), "--option takes KEY=VALUE"),
        (("valkey://127.0.0.1:1/a", "-o", "tls=false"), "servers: 127.0.0.1:1: Connection refused"),
        (("valkey://127.0.0.1/a",), "servers[0]: that is no server"),
        (("valkey://127.0.0.1:1/a/b",), "prefix: that is not accepted"),
        (("ftp://127.0.0.1:1/a",), "ftp://: no backend reads such an address"),
        (("/somewhere", "-o", "tls=false"), "--option is for the address of a server"),
    ],
)
def test_a_bad_address_is_one_line_that_repeats_no_secret(arguments: tuple[str, ...], reason: str) -> None:
    for command in (("ls",), ("du",), ("fsck",), ("gc", "--old")):
        line = refusal(command[0], *arguments, *command[1:])
        assert reason in line
        assert "sesame" not in line.replace("password=sesame", "")


def test_blocks_older_than_an_age_are_dropped(server: Server) -> None:
    store_epochs(BlocksOfYesterday(server), names=NAMES[:2])
    stored(server, names=NAMES[2:])
    for age, blocks in (("2d", 0), ("20h", 2), ("20h", 0)):
        dropped = tool_json("gc", *address(server), "--older-than", age)["dropped"]
        assert sum(row["blocks"] for row in dropped) == blocks
    assert loadable(server) == 3


class BlocksOfYesterday(Blocks):
    """What was stored a day ago, by this machine's clock."""

    def make(self, place: Path) -> ValkeyBackend:
        return ValkeyBackend(self.server.options(), lambda: time.time_ns() - 86400 * 10**9)


def test_a_server_that_ends_meanwhile_is_one_line() -> None:
    with valkey_server() as server:
        stored(server)
        listing = ValkeyListing(server.options(request_timeout_seconds=2))
        server.kill()
        with pytest.raises(RootError, match=r"^valkey://127.0.0.1:[0-9]+/kvtier: the server does not answer"):
            list(listing.pages())
        listing.close()
        listing.close()


# ---- names of other types, which anyone may have written below the prefix


OTHERS = {
    "a list": lambda client, name: client.rpush(name, b"x"),
    "a hash": lambda client, name: client.hset(name, "field", b"x"),
    "a set": lambda client, name: client.sadd(name, b"x"),
    "a stream": lambda client, name: client.xadd(name, {"field": b"x"}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_name_of_another_type_takes_no_tool_away(server: Server, kind: str) -> None:
    """Under names of blocks, of a part of one, of a marker and of a manifest; what is stored is listed as before."""
    digits = stored(server)
    block = next(name for name in server.names("kvtier:b:*")).decode()
    other = "kvtier:b:" + block.removeprefix("kvtier:b:").replace(digits, "0" * 16)
    names = [other, f"{{{other}1}}h", "kvtier:b:what", f"kvtier:m:{'0' * 16}", f"kvtier:manifests:{'0' * 16}.json"]
    for name in names:
        OTHERS[kind](server.client, name)
    assert len(tool_json("ls", *address(server))["blocks"]) == 5
    assert [row["blocks"] for row in tool_json("du", *address(server))["rows"]] == [5]
    checked = tool_json("fsck", *address(server))
    assert checked["whole"] == 5
    assert {kind for kind, _, _ in found(checked)} == {"unknown_file"}
    assert tool("gc", *address(server), "--old").stdout == "there is nothing to drop\n"
    assert set(names) <= {name.decode() for name in server.names("*")}, "what is not ours stays"
    assert loadable(server) == 5
