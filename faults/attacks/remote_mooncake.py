"""The attacks on servers of blocks, on a Mooncake pool."""

from __future__ import annotations

from functools import partial

from ..attack import Attack, Budget, Tally
from ..remote.pool import pool, without_mooncake
from .remote import LINKS, STOPS, Fault, faulty_servers
from .remote_access import forks
from .remote_values import hosts_that_reset, wrong_values

STORES = {name: stop for name, stop in STOPS.items() if name != "emptied again and again"}
MASTERS = STOPS
WAYS: dict[str, Fault] = {name: LINKS[name] for name in ("without a word", "refused", "300 ms more in 1 %")}
"""Through the proxy goes what is said to the master; the store's own port is its own choice."""


def pools(budget: Budget) -> Tally:
    """The store, the master, and the way to the master, in turn."""
    tally = Tally()
    for number in range(budget.count):
        process, faults = (("store", STORES), ("master", MASTERS), ("master", WAYS))[number % 3]
        name = list(faults)[number // 3 % len(faults)]
        part = Budget(1, budget.seed + number, budget.folder, budget.long)
        tally.add(faulty_servers(part, partial(pool, process=process), {f"{process}: {name}": faults[name]}))
    return tally


ATTACKS = (
    Attack(
        "mooncake",
        "the store and the master: kill -9, with and without a new start, SIGSTOP for 1 s, past a job's deadline, to "
        "the end; the pool is emptied; the way to the master is silent, refused, slow",
        3, 90, pools, minutes=5, missing=without_mooncake, shards=2,
    ),
    Attack(
        "hosts on mooncake",
        "hosts as on valkey",
        1, 50, lambda budget: hosts_that_reset(budget, pool), minutes=8, missing=without_mooncake, shards=2,
    ),
    Attack(
        "values on mooncake",
        "as on valkey",
        11, 500, lambda budget: wrong_values(budget, pool), minutes=8, missing=without_mooncake, shards=2,
    ),
    Attack(
        "fork over mooncake",
        "as over valkey: the clients are processes of their own",
        2, 60, lambda budget: forks(budget, pool), minutes=5, missing=without_mooncake,
    ),
)  # fmt: skip
