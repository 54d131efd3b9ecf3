"""A Valkey cluster of three nodes, one of which is stopped, or is reached over a bad network."""

from __future__ import annotations

from functools import partial

from kvtier.control.tiers.breaker import BreakerState

from ..attack import Attack
from ..remote.server import JOB_SECONDS, ClusterNode, ProxiedNode, valkey_cluster, without_valkey
from .remote import LINKS, STOPS, Fault, Scene, faulty_servers, frozen_to_the_end, killed_to_the_end


def proxy_restarted(scene: Scene) -> None:
    """What stands in front of a node ends, with all of its connections, and comes back at its address."""
    for _ in range(3):
        LINKS["refused"](scene)
        scene.engine.run(seconds=JOB_SECONDS / 2)


def beside_live_nodes(stop: Fault) -> Fault:
    """A node is stopped to the end. From the moment that it is left alone, the others are hit as before and take what
    is stored, none of which fails, and the breakers of the tier stay closed."""

    def attack(scene: Scene) -> None:
        stop(scene)
        before = scene.engine.lower
        first = scene.engine.run(requests=LIVE_REQUESTS)
        assert isinstance(scene.server, ClusterNode)
        scene.server.nodes[0].client.flushall()  # so that there is something to store
        second = scene.engine.run(requests=LIVE_REQUESTS)
        after = scene.engine.lower
        figures = f"{first.loads} {second.loads} {after.events}"
        assert after.loaded - before.loaded >= LIVE_REQUESTS, f"the other nodes were not hit: {figures}"
        assert after.stored > before.stored, f"the other nodes took nothing: {figures}"
        assert after.failed == before.failed, f"a node that is gone was asked: {figures}"
        assert {breaker.state for breaker in scene.engine.breakers} == {BreakerState.CLOSED}, figures

    return attack


LIVE_REQUESTS = 40
"""Of eight blocks each, two thirds of which lie on the other nodes."""
NODES: dict[str, Fault] = {
    "a node killed and started again": STOPS["killed and started again"],
    "a node frozen past a job's deadline": STOPS["frozen past a job's deadline"],
    "a node frozen for 1 s": STOPS["frozen for 1 s"],
    "a node killed for good": beside_live_nodes(killed_to_the_end),
    "a node frozen to the end": beside_live_nodes(frozen_to_the_end),
}
PROXIED: dict[str, Fault] = {
    "the proxy of a node ended and started again": proxy_restarted,
    "a node half-open": LINKS["without a word"],
    "a node stalled within a value": LINKS["stalled within a value"],
    "300 ms more in 1 % to a node": LINKS["300 ms more in 1 %"],
}

ATTACKS = (
    Attack(
        "valkey cluster",
        "one node of three is killed and started again, frozen for 1 s, past a job's deadline, killed for good, or "
        "frozen to the end: the other two are hit and take blocks meanwhile",
        1, 80, lambda budget: faulty_servers(budget, valkey_cluster, NODES), missing=without_valkey, shards=2,
    ),
    Attack(
        "valkey cluster behind a proxy",
        "one node of three states the address of a proxy, which ends and starts again three times, says nothing more, "
        "stalls within a value, or takes 300 ms more for 1 %",
        1, 80, lambda budget: faulty_servers(budget, partial(valkey_cluster, kind=ProxiedNode), PROXIED),
        missing=without_valkey, shards=2,
    ),
)  # fmt: skip
