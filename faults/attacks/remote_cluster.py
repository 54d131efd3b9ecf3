"""A Valkey cluster of three nodes, one of which is stopped, or is reached over a bad network."""

from __future__ import annotations

from functools import partial

from ..attack import Attack
from ..remote.server import JOB_SECONDS, ProxiedNode, valkey_cluster, without_valkey
from .remote import LINKS, STOPS, Fault, Scene, faulty_servers, frozen_to_the_end, killed_to_the_end


def proxy_restarted(scene: Scene) -> None:
    """What stands in front of a node ends, with all of its connections, and comes back at its address."""
    for _ in range(3):
        LINKS["refused"](scene)
        scene.engine.run(seconds=JOB_SECONDS / 2)


NODES: dict[str, Fault] = {
    "a node killed and started again": STOPS["killed and started again"],
    "a node frozen past a job's deadline": STOPS["frozen past a job's deadline"],
    "a node killed for good": killed_to_the_end,
    "a node frozen to the end": frozen_to_the_end,
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
        "one node of three is killed and started again, frozen past a job's deadline, killed for good, or frozen to "
        "the end",
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
