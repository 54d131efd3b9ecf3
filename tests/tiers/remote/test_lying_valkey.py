"""A Valkey server that lies: each opening and call ends in its time, with a typed error or an outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from support_counts import some
from support_lies import BLOCK_LIES, ENDLESS_VALKEY_LIES, INFO_LIES, ONE_SLOT, SLOTS_HUGE, cluster_lies
from support_lying_life import LIFE_SECONDS, MEMORY_BYTES, life_over
from support_lying_valkey import Command, LyingValkey, bulk, lying_valkey
from support_valkey import Blocks, Server, valkey_server

from kvtier.errors import ConfigError, ResourceError
from kvtier.testing.conformance import make_keys
from kvtier_remote.valkey import server_facts
from kvtier_remote.valkey.cluster_nodes import SLOTS, ClusterNodes
from kvtier_remote.valkey.server_facts import look_at

NAMES = [*make_keys(3, 0), *make_keys(3, 1)]


@pytest.fixture
def liar(server: Server) -> Iterator[LyingValkey]:
    """One in front of the shared server, honest as yet."""
    with lying_valkey(server.process.port, lambda words: None) as one:
        yield one


def blocks(server: Server, liar: LyingValkey, **changes: Any) -> Blocks:
    return Blocks(server, servers=[liar.address], **changes)


@pytest.mark.parametrize("lie", INFO_LIES)
async def test_what_a_server_says_of_itself_or_of_a_marker_raises_typed_errors_only(server, liar, tmp_path, lie):
    liar.lie = INFO_LIES[lie]
    opened = []
    with suppress(ConfigError, ResourceError):
        async with blocks(server, liar).opened(tmp_path) as driver:
            opened.append(driver.opened.capacity_bytes)
    assert opened == ([256 << 20] if "evictions" in lie else [])
    assert liar.asked


@pytest.mark.parametrize("lie", some(BLOCK_LIES, 8))
async def test_what_a_server_says_of_blocks_is_an_outcome_and_no_defect(server, liar, tmp_path, lie):
    liar.lie = BLOCK_LIES[lie]
    async with blocks(server, liar).opened(tmp_path) as driver:
        stored = {str(one.status) for one in (await driver.store(NAMES)).values()}
        assert stored == {"failed" if "OK" in lie else "stored"}
        loaded = {str(one.status) for one in (await driver.load(NAMES)).values()}
        assert loaded <= {"loaded"} if "length" in lie else loaded <= {"failed", "corrupt", "missing"}
        found = {str(one) for one in await driver.tier.lookup(NAMES)}
        assert found <= ({"retry", "miss"} if "length" in lie else {"hit", "miss"})
        counted = set(driver.tier.counters)
        assert "defect" not in counted
        assert counted <= {"requested", "server.evicted", "errno.EBADMSG", "lookup.failed", "mismatch.payload_bytes"}
    assert liar.asked


@pytest.mark.parametrize(
    "answer", [b"_\r\n", b",1.5\r\n", b":5\r\n", b"*0\r\n", bulk(b"9" * 100), b"%1\r\n:1\r\n:2\r\n"]
)
async def test_a_reset_that_is_answered_by_anything_else_is_a_typed_error(server, liar, tmp_path, answer):
    async with blocks(server, liar).opened(tmp_path) as driver:
        liar.lie = lambda words: answer if words[0].upper() == b"EVAL" else None
        with pytest.raises(ResourceError, match="the epoch cannot be raised on the server"):
            await driver.tier.reset(1)
        assert driver.tier.counters["reset.failed"] == 1
        liar.lie = lambda words: None
        await driver.tier.reset(1)


def test_a_life_over_values_that_trickle_is_bounded_in_time_and_memory():
    with valkey_server() as server, lying_valkey(server.process.port, lambda words: None) as liar:
        honest = life_over(server.options(servers=[liar.address]))
        assert honest.calls == ["opened", "stored", "loaded", "hit", "reset"]
        liar.lie = ENDLESS_VALKEY_LIES["values that trickle"]
        ended = life_over(server.options(servers=[liar.address]))
    assert ended.calls == ["opened", "stored", "failed", "hit", "reset"]
    assert ended.seconds < LIFE_SECONDS
    assert ended.peak_bytes < honest.peak_bytes + MEMORY_BYTES


# ---- a client whose request was not answered


async def test_a_connection_whose_request_was_not_answered_is_closed(server, liar, tmp_path):
    """Whatever its server still sends: no memory is kept for that."""
    async with blocks(server, liar, connections=1, request_timeout_seconds=1.0).opened(tmp_path) as driver:
        assert {str(one.status) for one in (await driver.store(NAMES)).values()} == {"stored"}
        sent = Counted()
        liar.lie = lambda words: sent.without_end() if words[0].upper() == b"MGET" else None
        assert {str(one.status) for one in (await driver.load(NAMES[3:])).values()} == {"failed"}
        await asyncio.wait_for(sent.ended.wait(), LIFE_SECONDS)
        liar.lie = lambda words: None
        assert {str(one.status) for one in (await driver.load(NAMES)).values()} == {"loaded"}


class Counted:
    """A value without an end; `ended` once its connection has."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()

    def without_end(self) -> Iterator[bytes]:
        try:
            yield b"*1\r\n$4000000000\r\n"
            while True:
                time.sleep(0.01)
                yield bytes(1 << 10)
        finally:
            self._loop.call_soon_threadsafe(self.ended.set)


# ---- clusters


@pytest.fixture(scope="module")
def cluster() -> Iterator[Server]:
    """A cluster of one node."""
    settings = {"cluster_enabled": "yes", "cluster_config_file": "nodes.conf"}
    with valkey_server(**settings) as one:
        one.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
        deadline = time.monotonic() + LIFE_SECONDS
        while "ok" not in str(one.client.execute_command("CLUSTER INFO")["cluster_state"]):
            assert time.monotonic() < deadline, "the cluster has no state"
        yield one


@pytest.mark.parametrize("lie", cluster_lies(0))
def test_slots_that_cannot_be_are_refused_and_nodes_are_found_in_bounded_time(cluster, lie):
    with lying_valkey(cluster.process.port, lambda words: None) as liar:
        liar.lie = cluster_lies(liar.port)[lie]
        options = cluster.options(servers=[liar.address], mode="cluster", allow_unbounded=True)
        begun = time.monotonic()
        nodes = ClusterNodes()
        may_be = lie in ("a node whose slots another one has too", "a node with no slot of its own")
        with nullcontext() if may_be else pytest.raises(ConfigError, match=r"does not answer \(Bad message\)"):
            look_at(options, nodes)
        assert [*nodes.slots.values()] == [0]
        assert time.monotonic() - begun < LIFE_SECONDS


def ranges(*given: tuple[int, int, bytes]) -> list[list[Any]]:
    return [[first, last, [b"host", 6379, node]] for first, last, node in given]


@pytest.mark.parametrize(
    "answer",
    [
        ranges((0, SLOTS_HUGE, b"a")),
        ranges((-1, 5, b"a")),
        ranges((5, 3, b"a")),
        ranges((0, SLOTS, b"a")),
        ranges(*((slot, slot, b"%d" % slot) for slot in range(SLOTS))),
        [[0, 5, [b"host", 6379, 7]]],
        [[0.5, 5, [b"host", 6379, b"a"]]],
        [[True, 5, [b"host", 6379, b"a"]]],
        [[0, 5]],
        [None],
        {"a": 1},
        b"abc",
        None,
    ],
    ids=lambda answer: repr(answer)[:30],
)
def test_slots_of_another_kind_teach_nothing(answer):
    nodes = ClusterNodes()
    nodes.learn(ranges((0, 10, b"a"), (11, SLOTS - 1, b"b")))
    with pytest.raises(OSError, match="Bad message"):
        nodes.learn(answer)
    assert nodes.slots == {"a": 0, "b": 11}
    assert nodes.node_of("x") in ("a", "b")


def test_each_node_has_a_slot_of_its_own():
    nodes = ClusterNodes()
    nodes.learn(ranges((0, SLOTS - 1, b"gone"), (0, SLOTS - 1 - ONE_SLOT, b"a"), (SLOTS - ONE_SLOT, SLOTS - 1, b"b")))
    assert nodes.slots == {"a": 0, "b": SLOTS - ONE_SLOT}


def test_names_are_tried_in_bounded_time(monkeypatch):
    """Also for a node that has one slot, or none."""
    nodes = ClusterNodes()
    nodes.learn(ranges((0, SLOTS - 2, b"a"), (SLOTS - 1, SLOTS - 1, b"b")))
    monkeypatch.setattr(server_facts, "_NAMES_TRIED", 1000)
    found = server_facts._names_of(nodes, ["a", "b", "nobody"], "kvtier:b:probe{}")
    assert {"a"} <= set(found) <= {"a", "b"}


# ---- commands that a server does not know (number 11 of the issue)


def unknown(command: bytes) -> Any:
    """As a server answers whose `rename-command` took a command away."""

    def lie(words: Command) -> bytes | None:
        name = words[0]
        text = b"-ERR unknown command '%s', with args beginning with: 'x' \r\n" % name
        return text if name.upper() == command else None

    return lie


@pytest.mark.parametrize("command", [b"INFO", b"EVAL", b"STRLEN", b"MGET"])
async def test_a_command_that_was_renamed_is_named_and_no_matter_of_tls(server, liar, tmp_path, command):
    liar.lie = unknown(command)
    with pytest.raises(ConfigError, match=f"does not know {command.decode()}, which clients need") as caught:
        async with blocks(server, liar).opened(tmp_path):
            pass
    assert caught.value.path == "servers"


async def test_a_single_server_that_is_taken_for_a_cluster_is_told_apart(server, liar, tmp_path):
    with pytest.raises(ConfigError, match="is it a cluster") as caught:
        async with blocks(server, liar, mode="cluster").opened(tmp_path):
            pass
    assert caught.value.path == "mode"
