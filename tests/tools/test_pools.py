"""`kvtier ls`, `du`, `gc` and `fsck` on a Mooncake pool, whose names its master's HTTP port lists."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from support_mooncake import Pool, PoolBlocks, mooncake_pool
from support_remote_blocks import LARGE_BYTES, NAMES, SMALL_BYTES, store_epochs
from support_tools import refusal, tool_json

from kvtier_remote.mooncake.tier import MooncakeBackend

pytestmark = [pytest.mark.remote, pytest.mark.mooncake]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with mooncake_pool(tmp_path_factory.mktemp("pool"), 64 << 20) as one:
        yield one


@pytest.fixture
def pool(shared: Pool) -> Pool:
    """The pool of this module, empty."""
    shared.remove(shared.names())
    return shared


class YesterdaysBlocks(PoolBlocks):
    """A host whose clock is a day behind."""

    def make(self, place: Path) -> MooncakeBackend:
        tier = super().make(place)
        tier._wall_ns = lambda: time.time_ns() - 86_400 * 10**9
        return tier


def address(pool: Pool) -> tuple[str, ...]:
    return f"mooncake://{pool.address}/kvtier", "-o", f"admin={pool.admin}", "-o", "staging=4MiB"


def test_blocks_are_listed_by_what_their_names_and_headers_say(pool: Pool) -> None:
    begun = time.time()
    digits = store_epochs(PoolBlocks(pool))
    document = tool_json("ls", *address(pool), "--full")
    assert (document["layout"], document["root"]) == ("mooncake", address(pool)[0])
    assert {block["key"] for block in document["blocks"]} == {sha256(key).hexdigest()[:40] for key in NAMES}
    for block in document["blocks"]:
        assert (block["namespace"], block["epoch"], block["state"]) == (digits, 0, "current")
        assert block["payload_bytes"] in (LARGE_BYTES, SMALL_BYTES)
        assert begun - 1 < block["stored_at"] <= time.time()


def test_usage_is_added_up_and_says_whose_it_is(pool: Pool) -> None:
    one, two = store_epochs(PoolBlocks(pool), epochs=3), store_epochs(PoolBlocks(pool), tag="two", names=NAMES[:2])
    rows = {row["namespace"]: row for row in tool_json("du", *address(pool))["rows"]}
    assert (rows[one]["blocks"], rows[one]["leftover_blocks"], rows[one]["epoch"]) == (5, 10, 2)
    assert (rows[two]["blocks"], rows[two]["payload_bytes"]) == (2, 2 * LARGE_BYTES)
    assert (rows[two]["model"], rows[two]["tag"]) == ("conformance", "two")


def test_old_epochs_and_whole_namespaces_are_dropped_and_nothing_else(pool: Pool) -> None:
    one, two = store_epochs(PoolBlocks(pool), epochs=2), store_epochs(PoolBlocks(pool), tag="two")
    assert tool_json("gc", *address(pool), "--old", "--dry-run")["dropped"][0]["blocks"] == 5
    assert len(pool.names("kvtier:b:")) == 15
    assert tool_json("gc", *address(pool), "--old")["dropped"][0]["blocks"] == 5
    assert tool_json("gc", *address(pool), "--namespace", one)["dropped"][0]["blocks"] == 5
    assert len(pool.names("kvtier:b:")) == 5
    assert pool.names("kvtier:manifests:") == [f"kvtier:manifests:{two}.json"]
    assert {name[:25] for name in pool.names("kvtier:m:")} == {f"kvtier:m:{one}", f"kvtier:m:{two}"}


def test_blocks_older_than_an_age_are_dropped(pool: Pool) -> None:
    store_epochs(YesterdaysBlocks(pool), names=NAMES[:2])
    store_epochs(PoolBlocks(pool), names=NAMES[2:])
    for age, blocks in (("2d", 0), ("20h", 2), ("20h", 0)):
        dropped = tool_json("gc", *address(pool), "--older-than", age)["dropped"]
        assert sum(row["blocks"] for row in dropped) == blocks
    assert len(pool.names("kvtier:b:")) == 3


def test_damage_is_found_and_removed(pool: Pool) -> None:
    store_epochs(PoolBlocks(pool))
    assert tool_json("fsck", *address(pool))["whole"] == 5
    first, second, *_ = pool.names("kvtier:b:")
    value = bytearray(pool.read(first))
    value[-1] ^= 1
    pool.write(first, bytes(value))
    pool.write(second, pool.read(pool.names("kvtier:b:")[2]))
    found = tool_json("fsck", *address(pool), status=1)
    assert found["whole"] == 3
    assert {one["reason"] for one in found["findings"]} == {"payload", "key"}
    assert tool_json("fsck", *address(pool), "--repair")["whole"] == 3
    assert len(pool.names("kvtier:b:")) == 3


def test_without_the_masters_http_port_there_is_no_list(pool: Pool) -> None:
    where = f"mooncake://{pool.address}/kvtier"
    assert "admin: a pool is listed by its master's HTTP port" in refusal("ls", where)
    assert "does not answer" in refusal("ls", where, "-o", "admin=127.0.0.1:1")
    assert "no HTTP port of a Mooncake master" in refusal("ls", where, "-o", f"admin={pool.address}")


def test_a_masters_http_port_that_is_silent_is_said_to_be(pool: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        admin = f"admin=127.0.0.1:{silent.getsockname()[1]}"
        line = refusal("ls", f"mooncake://{pool.address}/kvtier", "-o", admin, "-o", "request_timeout_seconds=2")
    assert "the pool does not answer (timed out)" in line
