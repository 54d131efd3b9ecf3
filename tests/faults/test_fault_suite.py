"""Every attack of the fault suite at its quick or normal count; `python -m faults --long` runs the long ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support_counts import count, full_alone
from support_servers import needs_server

import simulator
from faults.attack import Attack, Tally
from faults.attacks.kernel import SUITES
from faults.attacks.remote_access import without_tls
from faults.attacks.world import HANGS, LEAKS, count_violation
from faults.remote.objects import without_azurite, without_ceph
from faults.remote.pool import without_mooncake
from faults.suite import PROJECT, all_attacks, run
from simulator.disk import Disks, SimulatedRoot

START_SECONDS = 60
"""What a test may take beyond its attack's own limit, which kills the attack's process and counts as a hang."""


LONG_ALONE = (
    *("steps that raise", "objects on s3", "access to s3", "expired keys of s3", "certificates of s3"),
    *("stores and monitors of ceph", "hosts on mooncake", "values on mooncake", "redis over TLS"),
    *("fork over s3", "fork over mooncake", "fork over redis TLS", "azure emulator", "write budget of s3"),
)
"""Attacks whose normal count is no part of the test run: see docs/faults.md."""
FULL_ALONE = (
    *("valkey cluster behind a proxy", "valkey over a bad network", "valkey full", "fork over valkey"),
    *("no inodes", "XFS with reflinks", "frozen neighbour in a stack", "bounds of answers"),
    *("silent name server", "the remote harness itself", "valkey cluster", "btrfs", "frozen neighbour"),
)
"""Attacks close to another one of the test run: its count is theirs in full runs."""
QUICK = {
    "lying records": 100,
    "io_uring denied": 1,
    "slow disk": 1,
    "disk errors": 1,
    "valkey stopped": 1,
    "bit flips": 700,
    "namespace skew": 48,
    "kill -9 slab": 20,
    "kill -9 files": 20,
    "wrong file": 64,
    "reset, then crash": 1,
    "late writes": 6,
    "btrfs": 1,
    "disk full": 1,
    "stale snapshot": 4,
    "asyncio cancel": 16,
    "leaks and soak": 8,
    "simulated world": 24,
    "simulated shared root": 15,
    "the harness itself": 900,
    "random operations": 3,
    "N-th I/O fails": 8,
    "servers that lie": 2,
    "hosts on valkey": 4,
}
"""Counts of a quick run, where these are not the normal ones."""
SERVERS = {without_ceph: "Ceph", without_mooncake: "Mooncake", without_tls: "Redis", without_azurite: "Azurite"}
"""Attacks that lack one of these are tests of the lane of servers."""


def marks_of(attack: Attack) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.timeout(attack.minutes * 60 + START_SECONDS)]
    if attack.name in LONG_ALONE:
        marks.append(pytest.mark.long)
    if attack.name in QUICK:
        marks.append(pytest.mark.full)
    if attack.name in FULL_ALONE:
        marks += full_alone()
    if attack.missing is without_mooncake:
        marks.append(pytest.mark.mooncake)
    if attack.missing is without_azurite:
        marks.append(pytest.mark.azure)
    return [*marks, pytest.mark.remote] if attack.missing in SERVERS else marks


@pytest.mark.parametrize(
    "attack", [pytest.param(attack, id=name, marks=marks_of(attack)) for name, attack in all_attacks().items()]
)
def test_every_promise_holds_under(attack: Attack, seed: int, tmp_path):
    times = count(attack.normal, QUICK.get(attack.name, attack.normal))
    print(f"replay alone: python -m faults --only {attack.name!r} --count {times} --seed {seed}")
    result = run(attack, times, seed, tmp_path, long=False)
    if result.missing is not None and attack.missing in SERVERS:
        needs_server(SERVERS[attack.missing], result.missing)
    elif result.missing is not None:
        pytest.skip(result.missing)
    print(result.tally)
    assert result.tally.clean


@pytest.mark.parametrize("field", ["wrong_bytes", "hangs", "leaks", "over_bound"])
def test_one_broken_promise_is_not_clean(field):
    assert Tally(iterations=1).clean
    assert not Tally(iterations=1, **{field: 1}).clean


def test_shards_add_up_and_the_largest_of_what_is_at_most_counts():
    tally = Tally(notes=Counter({"blocks": 2, "seconds, at most": 5}))
    tally.add(Tally(iterations=3, notes=Counter({"blocks": 1, "seconds, at most": 4})))
    assert (tally.iterations, tally.notes) == (3, {"blocks": 3, "seconds, at most": 5})


def test_an_attack_that_attacked_nothing_is_not_clean():
    assert not Tally().clean


def test_a_broken_promise_of_the_simulator_counts_in_its_column():
    """Columns are found by parts of messages, so a message that is changed must be changed here too."""
    sources = Path(simulator.__file__).parent.glob("*.py")
    messages = [line for source in sources for line in source.read_text().splitlines() if "violation(" in line]
    for column, parts in (("hangs", HANGS), ("leaks", LEAKS)):
        for part in parts:
            assert any(part in message for message in messages), part
            tally = Tally()
            count_violation(tally, f"the row {part} 5")
            assert getattr(tally, column) == 1
    over, wrong = Tally(), Tally()
    count_violation(over, Disks([SimulatedRoot("/root", -1)]).over_bound())
    count_violation(wrong, "key 12345678 was loaded with bytes of no block; allowed are [1]")
    assert (over.over_bound, wrong.wrong_bytes) == (1, 1)


@pytest.mark.parametrize("suite", SUITES)
def test_the_tests_that_run_without_io_uring_are_there(suite):
    assert len(list(PROJECT.glob(suite))) > 5
